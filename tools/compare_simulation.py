"""How often `segtrain compare` sees a difference between models that have none, and between others.

Pairs of models are drawn: each class of each image has a size, a difficulty that both models share,
and a rate of right pixels of each model. Without an effect the two differ by chance alone, so an
interval of 95 % should leave out 0 in 5 % of the pairs. It takes a minute.

    python tools/compare_simulation.py
"""

import argparse

import numpy as np

from segtrain.evaluation.records import Records
from segtrain.results.compare import compare

CLASSES = tuple("abcdef")
# Images, sequences (0: none, each image is one), and what the second model has more, in logits.
SETTINGS = ((100, 0, 0.0), (20, 0, 0.0), (8, 0, 0.0), (100, 10, 0.0), (100, 5, 0.0), (100, 0, 0.15))


def draw_pair(
    rng: np.random.Generator, images: int, sequences: int, effect: float
) -> tuple[Records, Records]:
    """The records of two models on the same images."""
    shape = images, len(CLASSES)
    size = rng.integers(2000, 8000, shape) * (rng.random(shape) < 0.7)
    easy = rng.normal(1.2, 0.5, len(CLASSES)) + rng.normal(0, 0.6, (images, 1))
    sequence = np.arange(images) * max(sequences, 1) // images
    names = [f"drive{'abcdefghij'[s]}/{i:06}" for i, s in enumerate(sequence)]
    if not sequences:
        names = [f"{'abcdefghij'[i % 10]}{'abcdefghij'[i // 10]}" for i in range(images)]
    pair = []
    for gain in (0.0, effect):
        noise = rng.normal(0, 0.5, shape)
        if sequences:
            noise += rng.normal(0, 0.4, (sequences, 1))[sequence]
        right = rng.binomial(size, 1 / (1 + np.exp(-(easy + noise + gain))))
        predicted = right + np.roll(size - right, 1, axis=1)  # mistaken for the next class
        counts = np.stack([right, size, predicted], -1).astype(np.int64)
        nothing = np.zeros((len(CLASSES),) * 2, int), np.zeros((2, 960), int)
        pair.append(Records({"split": "val"}, tuple(names), CLASSES, counts, *nothing))
    return pair[0], pair[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=400, help="of each setting")
    args = parser.parse_args()
    print(
        "| images | sequences | effect | resampled | intervals without 0 |\n|---|---|---|---|---|"
    )
    for images, sequences, effect in SETTINGS:
        rng, found, unit = np.random.default_rng(1), 0, ""
        for _ in range(args.pairs):
            a, b = draw_pair(rng, images, sequences, effect)
            result = compare([a], [b])
            found, unit = found + result.models.excludes_zero, result.unit
        print(f"| {unit} | {effect:g} | {found / args.pairs:.1%} |", flush=True)


if __name__ == "__main__":
    main()
