"""Loading ImageNet weights: what fits is loaded, everything else has a name in the report."""

import hashlib
import pathlib

import pytest
import torch
from experiments import flip_bit
from safetensors.torch import save_file

from segtrain.config import ModelConfig
from segtrain.errors import CheckpointError, ConfigError
from segtrain.models import build_backbone
from segtrain.models.pretrained import load_backbone


def backbone_of(name, **options):
    return build_backbone(ModelConfig(backbone=name, **options))


CLASSIFIER = ("fc.weight", "fc.bias")


@pytest.fixture(scope="module")
def classifier_state():
    from torchvision import models

    torch.manual_seed(0)
    return models.resnet18(num_classes=7).state_dict()


@pytest.fixture
def backbone():
    torch.manual_seed(1)
    return backbone_of("resnet18")


def saved(path, state):
    torch.save(state, path)
    return str(path)


def assert_filled(backbone, state):
    expected = {k: v for k, v in state.items() if k not in CLASSIFIER}
    torch.testing.assert_close(backbone.state_dict(), expected, rtol=0, atol=0)


def test_state_under_a_key_with_prefixes_is_found(tmp_path, classifier_state, backbone):
    """As is the backbone of a segmentation model, without its heads."""
    state = {f"module.{key}": value for key, value in classifier_state.items()}
    load_backbone(backbone, saved(tmp_path / "w.pth", {"epoch": 3, "state_dict": state}))
    assert_filled(backbone, classifier_state)
    state = {f"backbone.{k}": v + 1 for k, v in classifier_state.items() if k not in CLASSIFIER}
    heads = {"head.conv.weight": torch.ones(1), "aux_classifier.4.bias": torch.ones(1)}
    save_file(state | heads, tmp_path / "w.safetensors")
    report = load_backbone(backbone, str(tmp_path / "w.safetensors"))
    assert_filled(backbone, {key: value + 1 for key, value in classifier_state.items()})
    assert set(report.ignored) == set(heads)


def test_every_misfit_is_in_one_message_and_nothing_is_loaded(tmp_path, classifier_state, backbone):
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    state = dict(classifier_state)
    del state["layer2.0.conv1.weight"]
    state["layer9.weight"] = torch.ones(2)
    state["bn1.bias"] = torch.ones(3)
    state["layer1.0.bn1.weight"] = torch.full((64,), float("nan"))
    with pytest.raises(CheckpointError) as error:
        load_backbone(backbone, saved(tmp_path / "w.pth", state))
    message = str(error.value)
    assert "1 missing from the file: layer2.0.conv1.weight" in message
    assert "1 in the file but not in the backbone: layer9.weight" in message
    assert "1 of another shape: bn1.bias (expected (64,), found (3,))" in message
    assert "1 not finite: layer1.0.bn1.weight" in message
    torch.testing.assert_close(backbone.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("stem", "also"),
    [("32-32-64", set()), ("64-64-128", {"layer1.0.conv1.weight", "layer1.0.downsample.0.weight"})],
)
def test_deep_stem_stays_random_and_is_listed(tmp_path, classifier_state, stem, also):
    torch.manual_seed(2)
    deep = backbone_of("resnet18", stem=stem)
    deep.bn1.bias.data.fill_(5.0)
    report = load_backbone(deep, saved(tmp_path / "w.pth", classifier_state))
    assert also | {"conv1.weight", "bn1.bias", "conv3.weight"} <= set(report.random)
    assert {"conv1.weight", "bn1.bias", "fc.bias"} <= set(report.ignored)
    assert deep.bn1.bias[0] == 5.0
    torch.testing.assert_close(
        deep.layer1[1].conv1.weight.data, classifier_state["layer1.1.conv1.weight"]
    )
    assert "left random" in "\n".join(report.lines())
    assert report.loaded + len(report.random) == len(deep.state_dict())


def test_weights_with_the_same_deep_stem_leave_nothing_random(tmp_path):
    """semseg's initial weights: deep stem, torchvision's names, no batch counters."""
    torch.manual_seed(3)
    source = backbone_of("resnet18", stem="64-64-128")
    state = {k: v for k, v in source.state_dict().items() if "num_batches" not in k}
    target = backbone_of("resnet18", stem="64-64-128")
    report = load_backbone(target, saved(tmp_path / "w.pth", state))
    assert report.random == ()
    torch.testing.assert_close(target.state_dict(), source.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("IMAGENET22K", ConfigError, r"'IMAGENET22K' .* resnet18 \(IMAGENET1K_V1, DEFAULT\)"),
        ("absent.pth", CheckpointError, r"absent\.pth: .*, no such file"),
        ("code.pth", CheckpointError, "holds more than tensors"),
        ("epoch.pth", CheckpointError, "other values under epoch"),
        ("cut.pth", CheckpointError, r"cut\.pth"),
        ("empty.pth", CheckpointError, r"empty\.pth"),
        ("text.safetensors", CheckpointError, r"text\.safetensors"),
    ],
)
def test_what_holds_no_weights_is_refused(
    spec, error, message, tmp_path, classifier_state, backbone, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    torch.save({"conv1.weight": pathlib.PurePosixPath("x")}, "code.pth")
    torch.save(classifier_state | {"epoch": 7}, "epoch.pth")
    pathlib.Path("cut.pth").write_bytes(pathlib.Path("epoch.pth").read_bytes()[:-5000])
    pathlib.Path("empty.pth").touch()
    pathlib.Path("text.safetensors").write_text("not a checkpoint at all, only text")
    with pytest.raises(error, match=message):
        load_backbone(backbone, spec)


@pytest.fixture
def published(tmp_path, monkeypatch, classifier_state):
    """torchvision's named weight, served from a file whose name carries its hash."""
    from torchvision import models

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    local = tmp_path / "resnet18.pth"
    torch.save(classifier_state, local)
    digest = hashlib.sha256(local.read_bytes()).hexdigest()[:8]
    local = local.rename(tmp_path / f"resnet18-{digest}.pth")
    weights = models.ResNet18_Weights.IMAGENET1K_V1
    monkeypatch.setattr(weights.value, "url", local.as_uri())
    return local


def test_fetched_weights_with_a_wrong_hash_or_out_of_reach_are_refused(published, backbone):
    published.write_bytes(published.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match=r"cannot be fetched: invalid hash value"):
        load_backbone(backbone, "IMAGENET1K_V1")
    published.unlink()
    with pytest.raises(CheckpointError, match=r"fetch the file by hand and set model\.pretrained"):
        load_backbone(backbone, "IMAGENET1K_V1")


def test_fetched_weights_that_were_damaged_since_are_refused(published, backbone):
    """torch compares the hash of a download, not of its copy in the cache."""
    load_backbone(backbone, "IMAGENET1K_V1")
    (copy,) = (published.parent / "cache").rglob("*.pth")
    flip_bit(copy)
    with pytest.raises(CheckpointError, match=rf"{copy.name}: .*Bad CRC-32"):
        load_backbone(backbone, "IMAGENET1K_V1")
