"""Several models as one: `segtrain eval`, `predict` and `export` with further checkpoints."""

import json
import re

import cv2
import numpy as np
import pytest
import torch
from experiments import experiment, train, write_config, write_data
from torch import nn

from segtrain.checkpoint.format import load, save
from segtrain.checkpoint.trained import load_model
from segtrain.export.export_model import metadata_of
from segtrain.export.write import graph_of
from segtrain.models.ensemble import Ensemble
from segtrain.task.tasks import task_of
from segtrain.types import SegLogits

WORDS = "mean probability of 2 models: {0}/a step 1, {0}/b step 2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """a and b differ in seed, head and step; the others from a in what cannot be mixed."""
    root = tmp_path_factory.mktemp("ensemble")
    write_data(root, num_images=4, num_val=2)
    for name, seed, width in (("a", 0, 16), ("b", 1, 24)):
        how = {"steps": seed + 1, "precision": "float32"}
        content = experiment(root, model={"head_channels": width}, train=how)
        config = write_config(root / f"{name}.yaml", content | {"seed": seed})
        assert train(config, root / name) == 0
    a = load(root / "a/checkpoints/last.pt")
    content = json.loads(a.config)
    content["data"]["mean"] = [100.0] * 3
    save(root / "mean.pt", a._replace(config=json.dumps(content)))
    save(root / "renamed.pt", a._replace(classes=a.classes.replace("plant", "tree")))
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
    """Of the network, and of the graph that is exported."""
    image, images = picture(runs)
    loaded = load_model(runs / "a", runs / "b")
    graph = graph_of(loaded, normalize="uint8", argmax=False)
    pixels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0)
    a, b = (probabilities(runs / name, images) for name in "ab")
    assert (a - b).abs().max() > 0.05
    with torch.no_grad():
        torch.testing.assert_close(
            graph(pixels).double().softmax(1), (a + b) / 2, rtol=0, atol=1e-5
        )
        found = loaded.model.double()(images).out.softmax(1)
    torch.testing.assert_close(found, (a + b) / 2, rtol=0, atol=1e-12)
    assert metadata_of(loaded)["ensemble"] == WORDS.format(runs)


def test_a_class_that_no_member_believes_in_keeps_a_finite_logarithm():
    class Sure(nn.Module):
        def forward(self, images):
            return SegLogits(torch.tensor([0.0, -500.0]).view(1, 2, 1, 1))

    out = Ensemble([Sure(), Sure()], task_of("semantic").mean)(torch.zeros(1)).out
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, -500.0]))


def test_predictions_and_scores_are_of_the_mean(runs, tmp_path, lab):
    _, images = picture(runs)
    expected = sum(probabilities(runs / name, images) for name in "ab")[0].argmax(0).numpy()

    photo, both = runs / "images/val/0.png", (runs / "a", "--with", runs / "b")
    assert WORDS.format(runs) in lab.done("predict", *both, photo, "--output", tmp_path / "out").out
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


@pytest.mark.slow("export", "models")
def test_an_exported_file_gives_the_mean(runs, tmp_path, lab):
    import onnxruntime

    file, (image, images) = tmp_path / "both.onnx", picture(runs)
    wanted = ("--format", "onnx", "--normalize", "--output", file)
    lab.done("export", runs / "a", "--with", runs / "b", *wanted)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert WORDS.format(runs) in session.get_modelmeta().custom_metadata_map["ensemble"]
    (logits,) = session.run(None, {"images": image.transpose(2, 0, 1)[None]})
    found = torch.from_numpy(logits).double().softmax(1)
    mean = sum(probabilities(runs / name, images) for name in "ab") / 2
    torch.testing.assert_close(found, mean, rtol=0, atol=1e-5)


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
        (("a", "--with", "mean.pt"), "data.mean is [100.0, 100.0, 100.0] here, "),
        (("a", "--with", "b", "--with", "renamed.pt"), "class 1 is plant there, tree now"),
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
