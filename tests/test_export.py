import ast
import copy
import dataclasses
import json
import math
import re
from functools import partial
from itertools import product

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from processes import REPOSITORY
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from segtrain import __version__
from segtrain.checkpoint import ready
from segtrain.checkpoint.trained import LoadedModel, load_initial, load_model
from segtrain.commands import export as command
from segtrain.config import Config, DataConfig, ModelConfig
from segtrain.data.check.channels import Channels
from segtrain.data.read.classes import ClassFile, SegClass
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.export import formats, write
from segtrain.export.export_model import Case, ExportModel, preprocessing
from segtrain.export.write import export_graph, export_weights
from segtrain.models import SegModel, build_model
from segtrain.models.blocks import ConvNormReLU, FeatureChannels, Features
from segtrain.models.pspnet import PSPHead
from segtrain.types import SegLogits

MEAN, STD = (120.0, 110.0, 100.0), (58.0, 57.0, 56.0)
ARCHITECTURES = [
    {"arch": "pspnet", "backbone": "resnet18"},
    {"arch": "deeplabv3plus", "backbone": "resnet18", "output_stride": 16},
    {"arch": "deeplabv3", "backbone": "mobilenet_v3_large", "output_stride": 32},
    {"arch": "deeplabv3plus", "backbone": "mobilenet_v2", "separable": True},
    {"arch": "pspnet", "backbone": "resnet50", "align_corners": True},
]
CLASSES = ClassFile(
    name="three",
    classes=(
        SegClass("road", (128, 64, 128), (7,)),
        SegClass("sky", (70, 130, 180), (23, 24)),
        SegClass("car", (0, 0, 142), (26,)),
    ),
    ignore_ids=(0,),
    ignore_color=(0, 0, 0),
)


class Tiny(nn.Module):
    """Seconds instead of minutes where the architecture does not matter."""

    def __init__(self, channels=3):
        super().__init__()
        torch.manual_seed(0)  # whatever has run before
        self.conv = nn.Conv2d(channels, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images):
        return SegLogits(self.norm(self.conv(images)))


class ThreeConvolutions(nn.Module):
    """A backbone of stride 8: exporting takes time by the number of layers."""

    channels = FeatureChannels(low=8, aux=8, out=16)

    def __init__(self):
        super().__init__()
        self.stem = ConvNormReLU(3, 8, 3, norm=nn.BatchNorm2d)
        self.low = nn.Conv2d(8, 8, 3, stride=4, padding=1)
        self.out = nn.Conv2d(8, 16, 3, stride=2, padding=1)

    def forward(self, x):
        low = self.low(self.stem(x))
        return Features(low, low, self.out(low))


def small(head, arch):
    torch.manual_seed(0)
    config = ModelConfig(arch=arch, head_channels=16)
    backbone = ThreeConvolutions()
    head = head(config, backbone.channels, num_classes=3, norm=nn.BatchNorm2d)
    return loaded_model(SegModel(backbone, head, None, dropout=0.0, align_corners=False), arch=arch)


def loaded_model(model=None, **architecture):
    torch.manual_seed(0)
    config = Config(
        data=DataConfig(layout="folders", root="/data", classes="three", mean=MEAN, std=STD),
        model=ModelConfig(
            **{"backbone": "resnet18", "head_channels": 16, "aux_head": False} | architecture
        ),
    )
    if model is None:
        model = build_model(config.model, num_classes=3)
    model.train()
    with torch.no_grad():
        channels = model.conv.in_channels if isinstance(model, Tiny) else 3
        model(torch.randn(2, channels, 64, 96))  # running statistics other than 0 and 1
    channels = Channels(("Red", "Green", "Blue"), MEAN, STD, STD, (("scale", 0.5, 0),))
    return LoadedModel(model.eval(), config, CLASSES, step=1200, channels=channels)


def pixels(*shape, seed=1):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))


def normalized(images):
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (MEAN, STD))
    return (images.float() - mean) / std


def reference(loaded, images):
    """The logits of 0..255 images, normalized by hand."""
    with torch.no_grad():
        return loaded.model(normalized(images)).out


def onnx_session(file):
    import onnxruntime

    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


def torchscript(file, extra=None):
    with pytest.warns(FutureWarning, match=r"torch\.jit\.load"):
        return torch.jit.load(file, _extra_files=extra)


SLOW = pytest.mark.slow("export", "models")


def psp():
    return small(PSPHead, "pspnet")


@pytest.fixture(scope="module", params=["one layer", pytest.param("pspnet", marks=SLOW)])
def loaded(request):
    return psp() if request.param == "pspnet" else loaded_model(Tiny())


@pytest.fixture(scope="module")
def onnx_file(loaded, tmp_path_factory):
    file = tmp_path_factory.mktemp("export") / "model.onnx"
    export_graph(loaded, file, format="onnx")
    return file


# Sizes that neither tracing nor the command's own comparison used.
SHAPES = ((1, 3, 77, 150), (3, 3, 163, 90))


def test_onnx_gives_the_logits_of_the_model_at_every_size(onnx_file, loaded):
    session = onnx_session(onnx_file)
    for shape in SHAPES:
        images = pixels(*shape)
        found = session.run(None, {"images": normalized(images).numpy()})[0]
        expected = reference(loaded, images)
        # 1e-4 of the scale: onnxruntime adds in another order.
        atol = 1e-4 * expected.abs().max().item()
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=atol)
    pixel = torch.zeros(1, 3, 1, 1)
    assert session.run(None, {"images": pixel.numpy()})[0].shape == (1, 3, 1, 1)
    assert session.get_modelmeta().custom_metadata_map["min_side_px"] == "1"


def test_pt2_gives_the_logits_of_every_size_it_takes_and_moves_to_another_device(tmp_path, loaded):
    """torch.export takes a side of one feature for a constant, so it has a least size."""
    from torch.export.passes import move_to_device_pass

    export_graph(loaded, tmp_path / "model.pt2", format="pt2")
    extra = {formats.METADATA_FILE: ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    metadata, run = json.loads(extra[formats.METADATA_FILE]), program.module()
    assert_metadata(metadata)
    least = int(metadata["min_side_px"])
    assert least == loaded.config.model.output_stride + 1
    assert f"H and W at least {least} px" in metadata["input"]
    for shape in (*SHAPES, (1, 3, least, least), (2, 3, least, 90), (1, 3, 70, least)):
        images = pixels(*shape)
        torch.testing.assert_close(run(normalized(images)), reference(loaded, images))
    if not isinstance(loaded.model, Tiny):  # whose one layer holds for a side of one feature, too
        with pytest.raises(AssertionError, match="Guard failed"):
            run(torch.zeros(1, 3, least - 1, 90))
    moved = move_to_device_pass(program, "meta")
    assert "cpu" not in str(moved.graph)
    assert moved.module()(torch.empty(1, 3, 70, 90, device="meta")).shape == (1, 3, 70, 90)


def test_torchscript_gives_the_logits_at_every_size_and_is_tied_to_no_device(tmp_path):
    loaded = psp()
    export_graph(loaded, tmp_path / "pspnet.ts", format="torchscript")
    run = torchscript(tmp_path / "pspnet.ts")
    for shape in (*SHAPES, (1, 3, 1, 1)):
        images = pixels(*shape)
        torch.testing.assert_close(run(normalized(images)), reference(loaded, images))
    assert "Device = prim::Constant" not in str(run.inlined_graph)


# With most kinds of layers.
SOME = ("torchscript", ARCHITECTURES[2])
OTHERS = [
    pytest.param(*each, marks=SLOW)
    for each in product(("torchscript", "onnx", "pt2"), ARCHITECTURES)
    if each != SOME
]


@pytest.mark.parametrize(("format", "architecture"), [SOME, *OTHERS])
def test_real_backbones_export(format, architecture, tmp_path):
    compared = export_graph(loaded_model(**architecture), tmp_path / "file", format=format)
    assert all(comparison.passed for comparison in compared)


def test_onnx_is_one_file_that_describes_itself_and_names_no_source_file(onnx_file):
    import onnx

    assert [path.name for path in onnx_file.parent.iterdir()] == ["model.onnx"]
    model = onnx.load(onnx_file)
    assert [o.version for o in model.opset_import if o.domain == ""] == [formats.ONNX_OPSET]
    dims = [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["batch", 3, "height", "width"]
    metadata = onnx_session(onnx_file).get_modelmeta().custom_metadata_map
    assert_metadata(metadata)
    assert metadata["input"] == "images (N, 3, H, W) RGB float32, (pixel - mean) / std by channel"
    assert b".py" not in onnx_file.read_bytes()


def assert_metadata(metadata):
    assert json.loads(metadata["class_names"]) == ["road", "sky", "car"]
    assert json.loads(metadata["class_ids"]) == [7, 23, 26]
    assert json.loads(metadata["mean"]) == list(MEAN)
    assert json.loads(metadata["std"]) == list(STD)
    assert metadata["step"] == "1200"
    assert metadata["model"] == "pspnet resnet18"


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_graph_that_knows_the_traced_size_is_refused_and_the_old_file_stays(tmp_path):
    class Baked(Tiny):
        def forward(self, images):
            height = images.shape[2]
            return SegLogits(self.norm(self.conv(images)) * (int(height) / height))

    file = tmp_path / "model.ts"
    file.write_bytes(b"before")
    with pytest.raises(ExecutionError, match=r"at 131x222, batch 1: max difference \d\.\de"):
        export_graph(loaded_model(Baked()), file, format="torchscript")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_an_exporter_that_fails_is_named_with_its_reason(tmp_path):
    class Branching(Tiny):
        def forward(self, images):
            logits = self.norm(self.conv(images))
            return SegLogits(logits if logits.sum() > 0 else -logits)

    class Rounding(Tiny):
        def forward(self, images):
            half = math.ceil(images.shape[2] / 2)  # as timm's padding; torch cannot store it
            return SegLogits(self.norm(self.conv(images)) * (2 * half / images.shape[2]))

    for model, reason in ((Branching(), "data-dependent"), (Rounding(), "node ceil")):
        with pytest.raises(ExecutionError, match=f"exporter of torch .*{reason}") as caught:
            export_graph(loaded_model(model), tmp_path / "model.pt2", format="pt2")
        (line,) = str(caught.value).splitlines()
        assert line.endswith("; try --format onnx or --format torchscript, or --size")
    assert list(tmp_path.iterdir()) == []


def test_a_size_can_be_fixed(tmp_path, capfd):
    file = tmp_path / "model.pt2"
    compared = export_graph(loaded_model(Tiny()), file, format="pt2", size=(40, 56))
    assert capfd.readouterr() == ("", "")
    assert [c.case for c in compared] == [Case(2, 40, 56), Case(1, 40, 56)]
    run = torch.export.load(file).module()
    assert run(torch.zeros(3, 3, 40, 56)).shape == (3, 3, 40, 56)
    with pytest.raises(AssertionError, match="Guard failed"):
        run(torch.zeros(3, 3, 40, 57))


def test_weights_that_are_not_finite_are_the_checkpoints_fault(tmp_path):
    loaded = loaded_model(Tiny())
    loaded.model.conv.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        export_graph(loaded, tmp_path / "model.ts", format="torchscript")


def tiny_graph(**options):
    return ExportModel(loaded_model(Tiny()).model, mean=MEAN, std=STD, **options)


@pytest.mark.fault(90)
def test_one_wrong_pixel_in_a_label_map_is_found():
    graph = tiny_graph(argmax=True)

    def run(images):
        labels = graph(images)
        labels[0, 3, 5] = (labels[0, 3, 5] + 1) % 3
        return labels

    case = Case(1, 30, 40)
    comparison = write.compare(run, graph, case)
    assert not comparison.passed
    assert comparison.agreement == pytest.approx(1 - 1 / 1200, abs=1e-6)
    for right in (graph, tiny_graph()):
        assert write.compare(right, right, case) == (case, 0.0, 1.0, None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda out: out[:, :, 1:], "its result is (1, 3, 29, 40)"),
        (lambda out: out.double(), "its result is (1, 3, 30, 40) torch.float64, not"),
        (lambda out: out * float("nan"), ""),
        (lambda out: 1 / 0, "it does not run: ZeroDivisionError"),
    ],
)
def test_a_result_of_another_kind_is_refused(change, problem):
    graph = tiny_graph()
    comparison = write.compare(lambda x: change(graph(x)), graph, Case(1, 30, 40))
    assert not comparison.passed
    assert (comparison.problem or "").startswith(problem)


@pytest.fixture(scope="module")
def real_model():
    """A model that a checkpoint could hold, with variances that float16 cannot."""
    loaded = loaded_model(backbone="mobilenet_v2", head_channels=8)
    for layer in loaded.model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_var, 0.5, 1e6)
    return loaded


@pytest.mark.parametrize("half", [False, True])
def test_exported_weights_are_read_like_a_checkpoint(half, real_model, tmp_path):
    file = tmp_path / "own.safetensors"
    real_model.model.to(memory_format=torch.channels_last)
    count = export_weights(real_model, file, half=half)
    assert load_file(file).keys() == real_model.model.state_dict().keys()
    assert count == len(real_model.model.state_dict())
    found = load_model(file)
    assert found[1:] == real_model._replace(files=(file.resolve(),))[1:]
    for key, value in real_model.model.state_dict().items():
        other = found.model.state_dict()[key]
        assert other.dtype == value.dtype
        rounds = half and value.dim() > 1
        assert torch.equal(other, value.half().float() if rounds else value)
    fresh = build_model(found.config.model, num_classes=3)
    assert load_initial(fresh, file).random == []
    tensors, header = fresh.state_dict().values(), 100_000
    num_bytes = sum(x.nbytes / (2 if half and x.dim() > 1 else 1) for x in tensors)
    assert file.stat().st_size < num_bytes + header


def test_kernels_that_float16_cannot_hold_are_refused(real_model, tmp_path):
    model = copy.deepcopy(real_model.model)
    with torch.no_grad():
        next(model.parameters())[0, 0, 0, 0] = 1e5
    with pytest.raises(ExecutionError, match="not written: too large for float16"):
        export_weights(real_model._replace(model=model), tmp_path / "a", half=True)
    assert not (tmp_path / "a").exists()


def test_other_and_damaged_safetensors_are_refused(real_model, tmp_path):
    file = tmp_path / "own.safetensors"
    export_weights(real_model, file)
    weights, own = load_file(file), metadata_of(file, "safetensors")
    whole = file.read_bytes()
    for metadata, said in (
        (None, "not those of segtrain export; for the weights of another program use segtrain con"),
        (own | {"step": "-7"}, "damaged: step: "),
        (own | {"config": "{}"}, rf"its config does not fit segtrain {__version__}: data: Field"),
        (own | {"classes": "[]"}, "its classes do not fit segtrain"),
    ):
        save_file(weights, file, metadata)
        with pytest.raises(CheckpointError, match=said):
            load_model(file)
    file.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="damaged, cut short"):
        load_model(file)


@pytest.mark.fault(89)
def test_a_missing_onnx_package_is_named_with_the_command_that_installs_it(lab, monkeypatch):
    util, find = formats.importlib.util, formats.importlib.util.find_spec
    hidden = {"onnxscript": None}
    monkeypatch.setattr(util, "find_spec", lambda x, *a: hidden[x] if x in hidden else find(x, *a))
    said = lab.refused("export nowhere --format onnx --output model.onnx")
    assert said.endswith("needs onnxscript; in the checkout of segtrain: pip install '.[onnx]'\n")


def test_a_file_that_is_there_is_kept_unless_told_otherwise(lab, monkeypatch):
    monkeypatch.setattr(command, "load_model", lambda *sources: loaded_model(Tiny()))
    output = lab.folder / "best.safetensors"
    output.write_text("precious")
    words = ("export", "nowhere", "--format", "safetensors", "--output", output)
    assert re.search(r"best\.safetensors: exists; .*--overwrite", lab.refused(*words))
    lab.done(*words, "--overwrite")
    assert output.read_bytes() != b"precious"


@pytest.fixture(scope="module")
def readme_script():
    """What the README gives for the use of an ONNX file."""
    text = (REPOSITORY / "segtrain/export/README.md").read_text(encoding="utf-8")
    code, _ = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    return code.replace("photo.jpg", "photo.png")  # in which pixels are what was written


def assert_script_predicts(code, loaded, lab, monkeypatch, capsys, agreement):
    """Runs it beside mine.onnx and a photo, and `segtrain predict` on the same image.

    agreement: the share of pixels that must be equal.
    """
    monkeypatch.setattr(ready, "load_model", lambda *sources, device: loaded)
    where = lab.folder
    (photo,) = where.glob("photo.*")
    lab.done("predict", "run", photo, "--output", where / "out", "--device", "cpu")
    monkeypatch.chdir(where)
    names = {}
    exec(code, names)
    for folder, name in (("labels", "label.png"), ("colors", "colors.png")):
        expected = read(next((where / "out" / folder).glob("*.png")))
        found = read(where / name)
        assert len(np.unique(expected)) > 1
        assert found.dtype == expected.dtype
        assert np.mean(found == expected) > agreement
    printed = ast.literal_eval(capsys.readouterr().out)
    assert printed == {
        name: f"{np.mean(names['label'] == i):.1%}" for i, name in enumerate(loaded.classes.names)
    }


def read(path):
    return cv2.imread(str(path), cv2.IMREAD_UNCHANGED)


def save_photo(path, height, width):
    rng = np.random.default_rng(3)
    coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path)


@pytest.mark.parametrize(
    ("options", "short_side_px"),
    [
        ({"normalize": "uint8", "argmax": True}, None),
        pytest.param({"argmax": True}, 230, marks=SLOW),
        ({}, 230),
    ],
)
def test_the_readmes_script_predicts_as_segtrain_does(
    readme_script, tmp_path, monkeypatch, lab, capsys, options, short_side_px
):
    """Also of an image that becomes far larger, and of a grey one of 16 bits, ids above 255."""
    loaded = with_data(loaded_model(Tiny()), short_side_px=short_side_px)
    # Upright: sizes whose sides are mixed up would show.
    save_photo(tmp_path / "photo.png", 67, 46)
    if not options:
        ids = [dataclasses.replace(one, ids=(300 * i,)) for i, one in enumerate(CLASSES.classes)]
        classes = dataclasses.replace(CLASSES, classes=tuple(ids), ignore_ids=())
        loaded = loaded._replace(classes=classes)
        image = read(tmp_path / "photo.png")[..., 1].astype(np.uint16) * 257
        assert cv2.imwrite(str(tmp_path / "photo.png"), image)
    export_graph(loaded, tmp_path / "mine.onnx", format="onnx", **options)
    # A label map goes back to the image's size without the scores: its borders move by a pixel.
    # Unscaled images agree on 0.90.
    agreement = 0.95 if options == {"argmax": True} else 0.999
    assert_script_predicts(readme_script, loaded, lab, monkeypatch, capsys, agreement=agreement)


@SLOW
def test_the_readmes_script_reads_decibels(readme_script, tmp_path, monkeypatch, lab, capsys):
    """Floats in grey, of a range that ends at 0."""
    loaded = with_data(loaded_model(Tiny()), value_range=(-30.0, 0.0))
    save_photo(tmp_path / "photo.png", 61, 83)
    values = read(tmp_path / "photo.png")[..., 1].astype(np.float32) / 255 * 30 - 30
    (tmp_path / "photo.png").unlink()
    tifffile.imwrite(tmp_path / "photo.tif", values)
    export_graph(loaded, tmp_path / "mine.onnx", format="onnx")
    script = readme_script.replace("photo.png", "photo.tif")
    assert_script_predicts(script, loaded, lab, monkeypatch, capsys, agreement=0.999)


@pytest.mark.parametrize(
    ("format", "short_side_px"),
    [
        *((name, 230) for name in ("torchscript", "pt2", "safetensors")),
        ("safetensors", None),
        pytest.param("onnx", 230, marks=SLOW),
    ],
)
def test_the_command_writes_every_format_and_says_what_predict_does_to_images(
    format, short_side_px, tmp_path, monkeypatch, lab
):
    loaded = with_data(loaded_model(Tiny()), short_side_px=short_side_px)
    loaded = with_eval(loaded, mode="slide", crop_size=(64, 96), flip=True, scales=(0.5, 1.0))
    monkeypatch.setattr(command, "load_model", lambda *sources: loaded)
    file = tmp_path / "new" / "file"
    out = lab.done("export", "nowhere", "--format", format, "--output", file).out
    assert f"wrote {file}" in out
    if format != "safetensors":
        assert "131x222" in out
        assert "100.0000%" in out
    assert ("of at least 9 px a side" in out) == (format == "pt2")
    (line,) = [one for one in out.splitlines() if "predict" in one]
    assert "sliding window 64x96, overlap 0.33" in line
    assert ("resize images to a short side of 230 px yourself" in line) == (
        short_side_px is not None
    )
    metadata = metadata_of(file, format)
    assert_metadata(metadata)
    assert json.loads(metadata["preprocessing"]) == preprocessing(loaded)
    assert json.loads(metadata["short_side_px"]) == short_side_px
    how = json.loads(metadata["inference"])
    wanted = {"mode": "slide", "crop_size": [64, 96], "scales": [0.5, 1.0], "flip": True}
    assert {key: how[key] for key in wanted} == wanted
    assert how["overlap"] == pytest.approx(1 / 3)


def rgb_turned_by_exif(file):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(NOISE).save(file.with_suffix(".png"), exif=exif)


def few_colours(file):
    Image.fromarray(NOISE).quantize(9).save(file.with_suffix(".png"))


def with_alpha(file):
    Image.fromarray(np.dstack([NOISE, NOISE[..., :1]]), "RGBA").save(file.with_suffix(".png"))


def grey_of_16_bits(file):
    cv2.imwrite(str(file.with_suffix(".png")), NOISE[..., 0].astype(np.uint16) * 16)


def bands_of_12_bits(file):
    bands = np.dstack([NOISE, NOISE[..., :2]]).astype(np.uint16) * 16
    bands[2:5, 3:9] = 7
    tag = (42113, "s", 0, "7", True)  # GDAL_NODATA
    tifffile.imwrite(file.with_suffix(".tif"), bands, extratags=[tag], planarconfig="contig")


def heights_with_nan(file):
    heights = NOISE[..., 0].astype(np.float32) * 4 - 100
    heights[4:9, 5:7] = np.nan
    heights[0, 0] = np.inf
    tifffile.imwrite(file.with_suffix(".tif"), heights)


NOISE = np.random.default_rng(5).integers(0, 256, (21, 34, 3), dtype=np.uint8)
KINDS = [
    (rgb_turned_by_exif, {}),
    (rgb_turned_by_exif, {"short_side_px": 40}),
    (few_colours, {}),
    (with_alpha, {}),
    (grey_of_16_bits, {"short_side_px": 30}),
    (grey_of_16_bits, {"channels": 1, "value_range": (0.0, 4095.0)}),
    (grey_of_16_bits, {"channels": 1, "value_range": (900.0, 1800.0), "clip": True}),
    (bands_of_12_bits, {"channels": 5, "value_range": (100.0, 4095.0)}),
    (heights_with_nan, {"channels": 1, "value_range": (-100.0, 900.0), "short_side_px": 17}),
]


def followed(steps, file):
    """What the steps of the metadata make of a file, (1, C, H, W); without code of segtrain."""
    read, fill, *others = steps
    assert (read["step"], read["exif_orientation"], fill["step"]) == ("read", "ignored", "fill")
    if file.suffix == ".tif":
        with tifffile.TiffFile(file) as tiff:
            stored, no_data = tiff.asarray(), tiff.pages[0].tags.get(42113)
    else:
        picture, no_data = Image.open(file), None
        stored = np.array(picture.convert("RGB") if picture.mode == "P" else picture)
    stored = stored.reshape(*stored.shape[:2], -1)
    if read["channels"] == 3:
        assert (read["order"], read["grey"], read["alpha"]) == ("RGB", "three times", "dropped")
        stored = np.repeat(stored, 3, 2) if stored.shape[2] == 1 else stored[..., :3]
    whole = stored.dtype.kind == "u"
    x, low = stored.astype(np.float32), fill["low"]
    high = fill["high"] or np.iinfo(stored.dtype).max
    value = low + np.array(fill["scaled"]) * (high - low) / 255
    missing = ~np.isfinite(x)
    if no_data is not None:
        missing |= (stored == int(no_data.value)).all(2, keepdims=True)
    x = np.where(missing, np.round(value) if whole else value, x)
    for step in others:
        if step["step"] == "clip":
            x = x.clip(step["low"], step["high"])
        elif step["step"] == "scale":
            x = (x - step["low"]) / (high - step["low"]) * 255
        elif step["step"] == "resize":
            ratio = step["short_side_px"] / min(x.shape[:2])
            size = [int(side * ratio + 0.5) for side in x.shape[:2]]
            x = cv2.resize(x, size[::-1], interpolation=cv2.INTER_LINEAR).reshape(*size, -1)
        else:
            assert step["step"] == "normalize"
            x = (x - np.array(step["mean"])) / np.array(step["std"])
    return torch.from_numpy(x.transpose(2, 0, 1)[None]).float()


@pytest.mark.parametrize(("draw", "data"), KINDS)
def test_the_steps_of_the_metadata_make_what_predict_gives_the_network(
    draw, data, tmp_path, lab, monkeypatch
):
    channels = data.get("channels", 3)
    model = Tiny(channels)
    statistics = {name: (start,) * channels for name, start in (("mean", 90.5), ("std", 50.0))}
    loaded = with_data(loaded_model(model), **statistics, **data)
    (tmp_path / "in").mkdir()
    draw(tmp_path / "in" / "photo")
    (file,) = (tmp_path / "in").iterdir()
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    monkeypatch.setattr(ready, "load_model", lambda *sources, device: loaded)
    lab.done("predict", "run", file, "--output", tmp_path / "out", "--device", "cpu")
    torch.testing.assert_close(followed(preprocessing(loaded), file), seen[-1], rtol=0, atol=2e-5)

    how = {"clip": data.get("clip", False), "normalize": "float32"}
    graph = ExportModel(model, *statistics.values(), data.get("value_range"), **how)
    graph(followed(preprocessing(loaded, normalize="float32"), file))
    torch.testing.assert_close(seen[-1], seen[-2], rtol=0, atol=2e-5)


def with_data(loaded, *, section="data", **changes):
    changed = getattr(loaded.config, section).model_copy(update=changes)
    return loaded._replace(config=loaded.config.model_copy(update={section: changed}))


with_eval = partial(with_data, section="eval")


def metadata_of(file, format):
    extra = {formats.METADATA_FILE: ""}
    if format == "onnx":
        return onnx_session(file).get_modelmeta().custom_metadata_map
    if format == "safetensors":
        with safe_open(file, framework="pt") as stored:
            return stored.metadata()
    if format == "pt2":
        torch.export.load(file, extra_files=extra)
    else:
        torchscript(file, extra)
    return json.loads(extra[formats.METADATA_FILE])
