"""Several models as one: `segtrain eval`, `predict` and `export` with further checkpoints."""

import json
import re

import cv2
import numpy as np
import pytest
import torch
from experiments import experiment, train, write_config, write_data
from torch import nn

from segtrain.checkpoint.trained import load_model
from segtrain.models.ensemble import Ensemble
from segtrain.types import SegLogits


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """a and b differ in seed, head and step; the others in what cannot be mixed."""
    root = tmp_path_factory.mktemp("ensemble")
    write_data(root, num_images=4, num_val=2)
    classes = root / "classes.yaml"
    (root / "other.yaml").write_text(classes.read_text().replace("plant", "tree"))
    small = {"num_stages": 2, "output_stride": 8}
    for name, seed, options in (
        ("a", 0, {}),
        ("b", 1, {"train": {"steps": 2}, "model": {"head_channels": 24}}),
        ("mean", 0, {"data": {"mean": [100.0, 100.0, 100.0]}}),
        ("renamed", 0, {"data": {"classes": str(root / "other.yaml")}}),
    ):
        content = experiment(root, model=small, train={"steps": 1, "precision": "float32"})
        for section, values in options.items():
            content[section] |= values
        config = write_config(root / f"{name}.yaml", content | {"seed": seed})
        assert train(config, root / name) == 0
    return root


def probabilities(path, images):
    """(N, K, H, W) float64 of one checkpoint."""
    with torch.no_grad():
        return load_model(path).model.double()(images.double()).out.softmax(1)


def picture(root):
    image = cv2.imread(str(root / "images/val/0.png"))[..., ::-1].copy()
    data = load_model(root / "a").config.data
    pixels = (image - np.array(data.mean)) / np.array(data.std)
    return image, torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)


def test_probabilities_are_the_mean_of_the_members(runs):
    _, images = picture(runs)
    with torch.no_grad():
        found = load_model(runs / "a", runs / "b").model.double()(images).out.softmax(1)
    a, b = (probabilities(runs / name, images) for name in "ab")
    assert (a - b).abs().max() > 0.05
    torch.testing.assert_close(found, (a + b) / 2, rtol=0, atol=1e-12)


def test_a_class_that_no_member_believes_in_keeps_a_finite_logarithm():
    class Sure(nn.Module):
        def forward(self, images):
            return SegLogits(torch.tensor([0.0, -500.0]).view(1, 2, 1, 1))

    out = Ensemble([Sure(), Sure()])(torch.zeros(1)).out
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, -500.0]))


def test_predictions_scores_and_export_are_of_the_mean(runs, tmp_path, lab):
    import onnxruntime

    image, images = picture(runs)
    expected = sum(probabilities(runs / name, images) for name in "ab")[0].argmax(0).numpy()

    photo, both = runs / "images/val/0.png", (runs / "a", "--with", runs / "b")
    words = f"mean probability of 2 models: {runs / 'a'} step 1, {runs / 'b'} step 2"
    assert words in lab.done("predict", *both, photo, "--output", tmp_path / "out").out
    label = cv2.imread(str(tmp_path / "out/labels/0.png"), cv2.IMREAD_UNCHANGED)
    assert np.mean(label == expected) > 0.999  # float32

    scores, maps = tmp_path / "scores.json", tmp_path / "maps"
    lab.done("eval", *both, "--json", scores, "--save-predictions", maps)
    found = json.loads(scores.read_text())
    assert [(x["checkpoint"], x["step"]) for x in found["ensemble"]] == [
        (str(runs / "a"), 1),
        (str(runs / "b"), 2),
    ]
    assert (cv2.imread(str(maps / "0.png"), cv2.IMREAD_UNCHANGED) == label).all()

    file = tmp_path / "both.onnx"
    wanted = ("--format", "onnx", "--normalize", "--output", file)
    lab.done("export", *both, *wanted)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert words in session.get_modelmeta().custom_metadata_map["ensemble"]
    (logits,) = session.run(None, {"images": image.transpose(2, 0, 1)[None]})
    of_file = torch.from_numpy(logits).double().softmax(1)
    mean = sum(probabilities(runs / name, images) for name in "ab") / 2
    torch.testing.assert_close(of_file, mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "members"),
    [((), "ab"), (("--set", "eval.flip=true"), ""), (("--split", "train"), "")],
)
def test_scores_of_the_members_stand_beside(runs, lab, options, members):
    """Each member's own score of the same evaluation; of another one it would mislead."""
    lines = []
    for name in members:
        score = re.search(r"^mIoU +[\d.]+", lab.done("eval", runs / name).out, re.MULTILINE)[0]
        lines.append(f"{runs / name} alone: {score}")
    said = lab.done("eval", runs / "a", "--with", runs / "b", *options).out
    assert [line for line in said.splitlines() if " alone: " in line] == lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a", "--with", "a"), "named twice"),
        (("a", "--with", "mean"), "data.mean is [100.0, 100.0, 100.0] here, "),
        (("a", "--with", "b", "--with", "renamed"), "class 1 is plant there, tree now"),
        (("a", "--with", "none"), "none: no such run or checkpoint"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(runs, words, said, monkeypatch, lab):
    monkeypatch.chdir(runs)
    error = lab.refused("eval", *words, code=4)
    assert f"{words[-1]}: " in error
    assert said in error


def test_an_ensemble_has_no_single_file_of_weights(runs, tmp_path, lab):
    wanted = ("--format", "safetensors", "--output", tmp_path / "x.safetensors")
    said = lab.refused("export", runs / "a", "--with", runs / "b", *wanted)
    assert "holds the weights of one model" in said
