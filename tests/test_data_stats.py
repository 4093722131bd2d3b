"""`segtrain data stats`: the oracle counts the pixels of all files with numpy, one by one."""

import json

import numpy as np
import pytest
from PIL import Image

from segtrain.cli import main as segtrain

NAMES = ["sky", "road", "car", "train"]  # no label shows the last


@pytest.fixture
def data(tmp_path):
    """Seven training pairs of unequal sizes, and one of another split."""
    rng = np.random.default_rng(0)
    pairs = []
    for i in range(8):
        split = "train" if i < 7 else "val"
        height, width = 6 + i, 9 + 2 * i
        image = rng.integers(0, 200 + 8 * i, (height, width, 3), dtype=np.uint8)
        label = rng.choice([0, 0, 1, 255] if i % 2 else [0, 1, 2], (height, width)).astype(np.uint8)
        for kind, values in (("images", image), ("labels", label)):
            folder = tmp_path / kind / split
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(folder / f"{i}.png")
        pairs.append((image, label))
    (tmp_path / "classes.yaml").write_text(f"classes: [{', '.join(NAMES)}]\n")
    root, config = tmp_path, tmp_path / "c.yaml"
    config.write_text(
        f"data: {{layout: folders, root: {root}, classes: {root}/classes.yaml}}\n"
        "loss: {kind: dice}\n"
    )
    return config, pairs


def measured(config, *options):
    report = config.parent / "stats.json"
    assert segtrain(["data", "stats", str(config), "--json", str(report), *options]) == 0
    return json.loads(report.read_text())


def pixels_of(labels):
    return np.array([sum((label == k).sum() for label in labels) for k in range(4)])


def test_counts_sizes_and_moments_are_those_of_numpy(data):
    config, pairs = data
    found, train = measured(config), pairs[:7]
    labels = [label for _, label in train]
    images = [sum(bool((label == k).any()) for label in labels) for k in range(4)]
    wanted = zip(pixels_of(labels).tolist(), images, strict=True)
    assert found["classes"] == {
        name: {"pixels": n, "images": m} for name, (n, m) in zip(NAMES, wanted, strict=True)
    }
    assert found["ignored_pixels"] == sum((label == 255).sum() for label in labels)
    assert found["mean_size"] == np.mean([label.shape for label in labels], axis=0).tolist()
    rgb = np.concatenate([image.reshape(-1, 3) for image, _ in train]).astype(float)
    np.testing.assert_allclose(found["mean"], rgb.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found["std"], rgb.std(0), rtol=1e-13)
    other = measured(config, "--split", "val")["classes"].values()
    assert [c["pixels"] for c in other] == pixels_of([pairs[7][1]]).tolist()


@pytest.mark.parametrize("beta", [0.99, 0, None])
def test_class_weights_are_those_of_the_formulas(data, beta):
    """To the four digits that are printed; the absent class has weight 1.

    With the paper's beta, 0.9999, classes of millions of pixels would all have weight 1.
    """
    config, pairs = data
    numbers = measured(config, *([] if beta is None else ["--beta", str(beta)]))
    found = numbers["class_weights"]
    labels = [label for _, label in pairs[:7]]
    n = pixels_of(labels)[:3]
    beta = 1 - 1 / n.mean() if beta is None else beta
    assert numbers["effective_number_beta"] == beta
    beside = [sum((x != 255).sum() for x in labels if (x == k).any()) for k in range(3)]
    frequency = n / np.array(beside)
    effective = (1 - beta) / (1 - beta ** n.astype(float))
    wanted = {
        "median_frequency": np.median(frequency) / frequency,
        "inverse_frequency": n.sum() / (3 * n),
        "effective_number": effective * 3 / effective.sum(),
        "enet": 1 / np.log(1.02 + n / n.sum()),
    }
    assert found.keys() == wanted.keys()
    for name, weights in wanted.items():
        np.testing.assert_allclose(found[name][:3], weights, rtol=6e-4, err_msg=name)
        assert name == "enet" or found[name][3] == 1


def test_the_printed_line_is_accepted_as_class_weights(data, lab):
    config, _ = data
    said = lab.done("data", "stats", config).out
    lines = [line for line in said.splitlines() if "class_weights:" in line]
    assert len(lines) == 4
    text = config.read_text().replace("loss: {kind: dice}", "loss:\n" + lines[0])
    (config.parent / "weighted.yaml").write_text(text)
    lab.done("config", "show", config.parent / "weighted.yaml")


def test_statistics_of_a_part_are_refused(data, lab):
    """A file that cannot be read, and an id without a class, would be missing without a word."""
    config, _ = data
    image = config.parent / "images/train/3.png"
    good = image.read_bytes()
    image.write_bytes(good[:50])
    assert "3.png" in lab.refused("data", "stats", config, code=3)
    image.write_bytes(good)
    Image.fromarray(np.full((6, 9), 7, np.uint8)).save(config.parent / "labels/train/0.png")
    assert "label ids outside class file classes: 7" in lab.refused("data", "stats", config, code=3)
