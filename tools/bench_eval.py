"""Where the time of an evaluation goes: decoding, predicting, counting, writing; and the overlap.

    python tools/bench_eval.py --threads 1
    python tools/bench_eval.py CONFIG --device cuda --set eval.precision=bfloat16

The parts are timed in a plain loop, one after another, and then images go through
`evaluate_dataset`, which writes the same predictions. Rounds alternate between the two and between
batch sizes, so a busy machine troubles all alike: read the ratio. Without CONFIG the model is that
of configs/demo.yaml, on scenes drawn for it. Weights are random; they do not change the time.
--asleep-ms shows the overlap where no device is at hand: instead of a model, the host sleeps.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from segtrain.config import Config, load_config
from segtrain.data import open_dataset
from segtrain.evaluation.dataset import Prediction, evaluate_dataset
from segtrain.evaluation.inference import predict_labels
from segtrain.evaluation.settings import InferenceSettings, batch_limits
from segtrain.metrics import ConfusionMatrix
from segtrain.models import build_model
from segtrain.models.precision import float32_products, for_evaluation
from segtrain.run.pictures import write_png
from segtrain.synthetic.write import write_dataset
from segtrain.types import SegLogits

DEMO = Path(__file__).resolve().parent.parent / "configs/demo.yaml"
PARTS = ("decode", "predict", "count", "write")
Seconds = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--images", type=int, default=8, help="of the evaluation split")
    parser.add_argument("--size", nargs=2, type=int, default=(512, 1024), help="of drawn scenes")
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[], help="beside the default")
    parser.add_argument("--asleep-ms", type=float, metavar="MS", help="a view, instead of a model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        root, overrides = Path(folder), list(options.overrides)
        if options.config is None:
            counts = {"train": 1, "val": options.images}
            write_dataset(root / "data", counts, size=tuple(options.size), seed=0, jobs=None)
            overrides.insert(0, f"data.root={root / 'data'}")
        config = load_config(options.config or DEMO, overrides)
        bench = Bench(config, torch.device(options.device), options.images, root)
        if options.asleep_ms is not None:
            bench.model = Asleep(options.asleep_ms, bench.num_classes)
        with float32_products(for_evaluation(config)):
            report(bench, options.rounds, [None, *options.batch_sizes])
    return 0


class Asleep(nn.Module):
    """Takes `ms` a view in which the processor is free, as while a device computes."""

    def __init__(self, ms: float, num_classes: int) -> None:
        super().__init__()
        self._ms, self._num_classes = ms, num_classes

    def forward(self, images: torch.Tensor) -> SegLogits:
        """The same class everywhere."""
        time.sleep(len(images) * self._ms / 1e3)
        return SegLogits(images[:, :1].expand(-1, self._num_classes, -1, -1))


class Bench:
    """A model, the first images of a split, and a folder for predictions."""

    def __init__(self, config: Config, device: torch.device, num_images: int, folder: Path) -> None:
        self.dataset = open_dataset(config.data, config.data.eval_split)
        self.dataset.pairs = self.dataset.pairs[:num_images]
        self.num_classes = self.dataset.classes.num_classes
        self.settings = InferenceSettings.from_config(config)
        self.device, self._folder = device, folder
        torch.manual_seed(0)
        model = build_model(config.model, num_classes=self.num_classes).to(device).eval()
        if config.train.channels_last:
            model.to(memory_format=torch.channels_last)
        self.model: nn.Module = model

    def write(self, prediction: Prediction) -> None:
        """As `segtrain eval --save-predictions`."""
        write_png(self._folder / f"{prediction.index}.png", prediction.pred)

    def in_turn(self) -> tuple[Seconds, torch.Tensor]:
        """The seconds of each part if nothing overlaps, and the confusion matrix."""
        seconds = dict.fromkeys(PARTS, 0.0)
        matrix = ConfusionMatrix(self.num_classes, self.device)
        limits = batch_limits(self.settings, self.device, self.num_classes)

        @contextmanager
        def part(name: str) -> Iterator[None]:
            began = self._now()
            yield
            seconds[name] += self._now() - began

        for index in range(len(self.dataset)):
            with part("decode"):
                image, label = self.dataset[index]
            with part("predict"):
                pixels = torch.from_numpy(image).to(self.device).permute(2, 0, 1).unsqueeze(0)
                size = label.shape
                (found,) = predict_labels(self.model, [pixels], self.settings, [size], limits)
            with part("count"):
                matrix.update(found.label, torch.from_numpy(label).to(self.device))
            with part("write"):
                self.write(Prediction(index, image, label, found.label.cpu().numpy()))
        return seconds, matrix.counts

    def together(self, batch_size: int | None) -> tuple[float, torch.Tensor]:
        """The seconds of `evaluate_dataset`, and the confusion matrix."""
        settings = replace(self.settings, batch_size=batch_size or self.settings.batch_size)
        began = self._now()
        matrix = evaluate_dataset(
            self.model,
            self.dataset,
            settings,
            device=self.device,
            num_classes=self.num_classes,
            callbacks=[self.write],
        )
        return self._now() - began, matrix.counts

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def report(bench: Bench, rounds: int, batch_sizes: list[int | None]) -> None:
    """Measures in turns and prints medians, and how many pixels differ between the ways."""
    bench.in_turn()  # warms up
    parts: list[Seconds] = []
    whole: dict[int | None, list[float]] = {size: [] for size in batch_sizes}
    moved: dict[int | None, int] = {}
    for _ in range(rounds):
        seconds, expected = bench.in_turn()
        parts.append(seconds)
        for size in batch_sizes:
            took, counts = bench.together(size)
            whole[size].append(took)
            moved[size] = int((counts - expected).abs().sum()) // 2
    num = len(bench.dataset)
    print(f"{bench.settings.describe()}; {bench.device}, {torch.get_num_threads()} threads")
    for name in PARTS:
        print(f"{name:10} {median([one[name] for one in parts]) / num * 1e3:9.1f} ms an image")
    plain = [sum(one.values()) for one in parts]
    print(f"in turn    {num / median(plain):9.2f} images/s")
    for size, times in whole.items():
        ratio = median([a / b for a, b in zip(plain, times, strict=True)])
        name = "default" if size is None else f"batch {size}"
        print(
            f"{name:10} {num / median(times):9.2f} images/s, {ratio:.2f} times in turn; "
            f"{moved[size]} pixels count otherwise"
        )


median: Callable[[list[float]], float] = statistics.median

if __name__ == "__main__":
    sys.exit(main())
