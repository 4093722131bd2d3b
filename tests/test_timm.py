"""timm's networks as backbones: timm's features, our batch norm, nothing random, clear refusals."""

import copy

import pytest
import torch
import torch.nn.functional as F
from experiments import experiment, losses, train, write_config
from torch import nn

from segtrain.config import LayerRule, ModelConfig, OptimConfig, load_config, override_config
from segtrain.errors import CheckpointError, ConfigError
from segtrain.models import build_backbone, build_model, timm_backbone
from segtrain.models.pretrained import load_backbone
from segtrain.norm import FrozenBatchNorm2d, SyncBatchNorm2d, convert
from segtrain.trainer.setup import _other_normalization
from segtrain.training.optim.layers import freeze_layers

# The smallest of a family each.
CONVNEXT, MOBILENET, REGNET = "convnext_atto", "mobilenetv3_small_050", "regnetx_002"


@pytest.fixture(scope="module", autouse=True)
def timm():
    return pytest.importorskip("timm", reason="needs timm: pip install '.[timm]'")


def config_of(name, **options):
    return ModelConfig(backbone=f"timm/{name}", **({"output_stride": 32} | options))


def images(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def lively(module, seed=2):
    """`module` with weights and statistics that no two layers share."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
            if tensor.dim() > 1:
                tensor.sub_(1).mul_(2 / tensor[0].numel() ** 0.5)
    return module


@pytest.mark.parametrize(
    ("name", "strides"),
    [(REGNET, (4, 16, 32)), (CONVNEXT, None), ("tf_mobilenetv3_small_minimal_100", None)],
)
def test_strides_are_known_where_features_lie_over_them(name, strides):
    """Not where sizes are rounded down, or the padding follows the size."""
    assert build_backbone(config_of(name)).strides == strides


@pytest.mark.parametrize(
    ("name", "output_stride"),
    [
        *((CONVNEXT, 8), (MOBILENET, 32), (REGNET, 8)),
        *(
            pytest.param(*pair, marks=pytest.mark.slow("models"))
            for pair in ((CONVNEXT, 32), (MOBILENET, 8), (REGNET, 32), ("efficientnet_b0", 8))
        ),
    ],
)
def test_features_are_those_of_timm(timm, name, output_stride):
    options = {} if output_stride == 32 else {"output_stride": output_stride}
    reference = lively(timm.create_model(name, features_only=True, **options)).double().eval()
    ours = build_backbone(config_of(name, output_stride=output_stride), norm=SyncBatchNorm2d)
    ours = ours.double().eval()
    # timm writes stages.0 as stages_0 in some of its wrappers; the order is the same.
    ours.load_state_dict(dict(zip(ours.state_dict(), reference.state_dict().values(), strict=True)))
    x = images(2, 3, 65, 97)
    with torch.no_grad():
        expected = reference(x)
        found = ours(x)
    reductions = reference.feature_info.reduction()
    low = next(f for f, r in zip(expected, reductions, strict=True) if r == 4)
    for a, b, channels in zip(found, (low, expected[-2], expected[-1]), ours.channels, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert a.shape[1] == channels


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (REGNET, "safetensors"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow("models", "export"))
            for pair in (
                *((REGNET, "pt2"), ("test_convnext", "onnx")),
                *(("pvt_v2_b0", "onnx"), ("pvt_v2_b0", "pt2")),
            )
        ),
    ],
)
def test_a_trained_run_is_evaluated_and_exported(data, tmp_path, lab, name, form):
    sizes = {"augment": {"crop_size": [33, 41]}, "train": {"steps": 1, "precision": "float32"}}
    model = {"backbone": f"timm/{name}", "output_stride": 16 if name == REGNET else 32}
    options = experiment(data, model=model, **sizes)
    config = write_config(tmp_path / "timm.yaml", options)
    run, out = tmp_path / "run", tmp_path / f"m.{form}"
    lab.done("train", config, "--nproc", 1, "--output", run)
    lab.done("export", run, "--format", form, "--output", out)
    assert out.stat().st_size > 500_000


def test_every_batch_norm_is_made_by_the_factory_and_keeps_timms_eps():
    made = []

    def norm(channels):
        made.append(SyncBatchNorm2d(channels, momentum=0.3))
        return made[-1]

    backbone = build_backbone(config_of("tf_efficientnet_b0"), norm=norm)
    layers = [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(layers) == 48
    assert {id(layer) for layer in layers} <= {id(layer) for layer in made}
    assert {(layer.eps, layer.momentum) for layer in layers} == {(1e-3, 0.3)}


def test_group_norm_takes_the_place_of_batch_norm_with_its_activation():
    backbone = build_backbone(config_of(REGNET), norm=lambda c: nn.GroupNorm(1, c))
    first = backbone.weights.stem.bn
    x = images(2, 32, 4, 4, dtype=torch.float32)
    torch.testing.assert_close(first(x), F.relu(F.group_norm(x, 1)))


def test_weights_in_timms_layout_are_loaded_and_the_classifier_reported(timm, tmp_path):
    state = lively(timm.create_model(MOBILENET)).state_dict()
    torch.save(state, tmp_path / "weights.pth")
    backbone = build_backbone(config_of(MOBILENET))
    report = load_backbone(backbone, str(tmp_path / "weights.pth"))
    assert {"classifier.weight", "classifier.bias", "conv_head.weight"} <= set(report.ignored)
    for key, value in backbone.weights.state_dict().items():
        assert torch.equal(value, state[key]), key
    with pytest.raises(CheckpointError, match=r"expected the layout of timm's model of that name"):
        load_backbone(build_backbone(config_of(REGNET)), str(tmp_path / "weights.pth"))


def test_weights_by_name_are_timms(timm, monkeypatch):
    whole = lively(timm.create_model(REGNET))
    downloaded = []

    def from_hub(repository, *_, **__):
        downloaded.append(repository)
        return whole.state_dict()

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", from_hub)
    backbone = build_backbone(config_of(REGNET))
    report = load_backbone(backbone, "DEFAULT")
    assert downloaded == ["timm/regnetx_002.pycls_in1k"]
    assert report.source == "timm/regnetx_002.pycls_in1k"
    key = "stem.conv.weight"
    assert torch.equal(backbone.weights.state_dict()[key], whole.state_dict()[key])
    with pytest.raises(ConfigError, match=r"'a1' is neither a tag .*\(pycls_in1k\), nor DEFAULT"):
        load_backbone(backbone, "a1")

    def offline(*_, **__):
        raise FileNotFoundError("cannot locate the file on the Hub")

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", offline)
    with pytest.raises(CheckpointError, match="fetch the file by hand"):
        load_backbone(backbone, "DEFAULT")


def test_a_mean_that_the_weights_do_not_expect_is_told(data, tmp_path):
    weights = {"backbone": "timm/tf_efficientnet_b0", "pretrained": "ap_in1k"}
    config = load_config(
        write_config(tmp_path / "c.yaml", experiment(data, model={**weights, "output_stride": 16}))
    )
    (warning,) = _other_normalization(config)
    assert "data.mean is [123.675, 116.28, 103.53], timm's weights expect [127.5, " in warning
    half = [f"data.{key}=[127.5, 127.5, 127.5]" for key in ("mean", "std")]
    assert _other_normalization(override_config(config, half, source="test")) == []
    mean, _ = timm_backbone.expected_normalization(weights["backbone"], "weights.pth")
    assert mean == pytest.approx((123.675, 116.28, 103.53))


@pytest.mark.parametrize(
    ("name", "stride", "message"),
    [
        ("convnext_atom", 32, "timm has no network 'convnext_atom'; did you mean convnext_atto?"),
        ("densenet121", 8, "cannot give features at output stride 8"),
        ("pvt_v2_b0", 8, r"timm cannot dilate it\); try model.output_stride 32, another network"),
        ("efficientformer_l1", 32, "at output stride 32 for images of any size"),
        (
            "test_vit",
            32,
            r"has features of strides \[16, 16, 16\]; needed are three or more, 4 bef",
        ),
        ("tiny_vit_5m_224", 32, r"stages.1.blocks.0.attn.attention_bias_cache keeps values that"),
        pytest.param("inception_v3", 32, "cannot give fea", marks=pytest.mark.slow("models")),
    ],
)
def test_networks_that_cannot_be_used_are_refused(name, stride, message):
    with pytest.raises(ConfigError, match=message):
        build_backbone(config_of(name, output_stride=stride), norm=SyncBatchNorm2d)


def test_a_network_that_ignores_the_output_stride_is_refused(timm, monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *a, output_stride, **o: create(*a, **o))
    with pytest.raises(ConfigError, match=r"\[2, 4, 8, 16, 32\]; .* model.output_stride 8 last"):
        build_backbone(config_of("resnet18", output_stride=8))


def test_a_network_of_other_strides_than_it_says_is_refused(timm, monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda *a, **o: create(*a, **o | {"output_stride": 16})
    )
    says = "timm.models._features.FeatureInfo.reduction"
    monkeypatch.setattr(says, lambda _: [2, 4, 8, 8, 8])
    with pytest.raises(ConfigError, match=r"features of shape \(2, 256, 16, 20\) at stride 8"):
        build_backbone(config_of("resnet18", output_stride=8))


@pytest.mark.parametrize(
    "name", ["test_convnext", pytest.param("pvt_v2_b0", marks=pytest.mark.slow("models"))]
)
def test_ranks_change_nothing_and_the_log_says_which_norms_stay(data, tmp_path, run_ranks, name):
    """float64; odd crops, so nothing is a multiple of a stride."""
    options = experiment(data, model={"backbone": f"timm/{name}", "output_stride": 32})
    options["train"] |= {"steps": 2}
    config = write_config(tmp_path / "c.yaml", options)
    for ranks in (1, 2):
        assert run_ranks(ranks, train, config, tmp_path / str(ranks)) == [0] * ranks
    alone, divided = (losses(tmp_path / str(ranks)) for ranks in (1, 2))
    assert len(alone) == 2
    assert divided == pytest.approx(alone, rel=1e-12)
    norms = "LayerNorm, LayerNorm2d" if name == "test_convnext" else "LayerNorm"
    said = f"over 5 images; the backbone has {norms} instead, of each image alone"
    assert said in (tmp_path / "1/train.log").read_text()


@pytest.mark.parametrize(
    "size", [(64, 96), pytest.param((160, 288), marks=pytest.mark.slow("models"))]
)
def test_swin_takes_any_size_as_timms_of_that_size(timm, size):
    name = "swin_tiny_patch4_window7_224"
    options = {"feature_cls": "getter", "img_size": size, "always_partition": True}
    reference = lively(timm.create_model(name, features_only=True, **options)).eval()
    ours = build_backbone(config_of(name)).eval()
    assert ours.strides == (4, 16, 32)
    ours.weights.load_state_dict(reference.model.state_dict())
    x = images(1, 3, *size, dtype=torch.float32)
    with torch.no_grad():
        low, _, aux, out = reference(x)
        for found, wanted in zip(ours(x), (low, aux, out), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.slow("models")
def test_weights_of_dinov3_are_loaded_by_their_tag_or_file(timm, monkeypatch, tmp_path):
    name, tag = "convnext_tiny", "dinov3_lvd1689m"
    whole = lively(timm.create_model(f"{name}.{tag}"))
    torch.save(whole.state_dict(), tmp_path / "dinov3.pth")
    asked = []

    def from_hub(repository, *_, **__):
        asked.append(repository)
        return whole.state_dict()

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", from_hub)
    for spec in (tag, str(tmp_path / "dinov3.pth")):
        backbone = build_backbone(config_of(name))
        load_backbone(backbone, spec)
        for key, value in backbone.weights.state_dict().items():
            assert torch.equal(value, whole.state_dict()[key]), key
    assert asked == [f"timm/{name}.{tag}"]


def test_frozen_layers_keep_their_activation():
    backbone = lively(build_backbone(config_of(REGNET), norm=SyncBatchNorm2d)).double().eval()
    x = images(2, 3, 65, 97)
    with torch.no_grad():
        before = backbone(x)
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Conv2d(1, 1, 1)})
    rule = LayerRule(names=("backbone",), freeze=True)
    freeze_layers(model, OptimConfig(layers=(rule,)), None)
    assert sum(isinstance(m, FrozenBatchNorm2d) for m in model.modules()) > 10
    with torch.no_grad():
        for features in (backbone(x), backbone.train()(x)):  # frozen in training too
            torch.testing.assert_close(features, before, rtol=1e-12, atol=1e-12)


def test_random_layers_and_statistics_that_cannot_be_synchronized_are_refused():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.1))
    with pytest.raises(ConfigError, match="1, a Dropout, draws random numbers"):
        timm_backbone.refuse_random_layers(network, "timm/x")
    with pytest.raises(ConfigError, match=r"0 is a BatchNorm1d, whose statistics"):
        timm_backbone.replace_norms(network, SyncBatchNorm2d, "timm/x")


def test_dropout_and_stochastic_depth_are_off(timm):
    layers = nn.Sequential(nn.Dropout(0.1), timm.layers.DropPath(0.2), nn.ReLU())
    timm_backbone.switch_off_random_layers(layers.train())
    assert torch.equal(layers(torch.ones(4, 9)), torch.ones(4, 9))


def test_conversion_keeps_what_a_subclass_applies(timm):
    """Its activation, whose output is what hooks of the user see."""
    import timm

    layer, x = timm.layers.BatchNormAct2d(3, act_layer=nn.PReLU).double(), images(2, 3, 4, 5)
    wanted, seen = copy.deepcopy(layer), []
    keys = nn.Sequential(layer).state_dict().keys()
    layer.register_forward_hook(lambda *args: seen.append(args[2]))
    net = convert(nn.Sequential(layer))
    assert type(net[0]) is SyncBatchNorm2d
    assert net.state_dict().keys() == keys
    for to in ("sync", "local"):
        convert(net, to)
        for training in (True, False):
            y, _ = net.train(training)(x), wanted.train(training)
            assert torch.equal(y, wanted(x))
            assert seen[-1] is y
    assert type(net[0]) is nn.BatchNorm2d


def test_without_timm_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[timm\]'"):
        build_model(config_of("resnet18"), num_classes=2)
