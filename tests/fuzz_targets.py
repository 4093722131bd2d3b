"""What reads files from elsewhere, each with whole files of its kind to start from."""

import hashlib
import io
import json
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import cv2
import fuzz_inputs
import numpy as np
import safetensors.torch
import torch
from fuzz_inputs import Mutator, mutate, mutate_png, mutate_zip
from PIL import Image
from torch import nn

from segtrain.checkpoint import format
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.checkpoint.restore import restore
from segtrain.checkpoint.trained import load_initial
from segtrain.config import (
    Config,
    DataConfig,
    OptimConfig,
    TrainConfig,
    config_to_yaml,
    load_config,
    parse_config,
)
from segtrain.data.read.classes import ClassFile, load_class_file
from segtrain.data.read.image import RGB, read_image, set_dtype
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.label_formats import label_format_of
from segtrain.data.read.labels import colors_to_train_ids, ids_to_train_ids
from segtrain.data.read.layouts import list_split
from segtrain.errors import DataError
from segtrain.files import manifest
from segtrain.models.pretrained import load_backbone
from segtrain.training.state import TrainState, make_state

ROOT = Path(__file__).resolve().parent.parent


class Target(NamedTuple):
    """One reader of files.

    run: reads the file at the path and uses what comes out; AssertionError if that is wrong.
    seeds: whole files, and hostile ones.
    names: what a file may be called, where that decides how it is read.
    words: pieces that mean something in the format.
    """

    run: Callable[[Path], object]
    seeds: Callable[[], list[bytes]]
    names: tuple[str, ...]
    mutate: Mutator = mutate
    words: Sequence[bytes] = ()


def _config(path: Path) -> None:
    config = load_config(path, ["train.steps=77"])
    again = parse_config(config_to_yaml(config), source="printed")
    assert again == config, "what is printed reads back as another config"


def _configs() -> list[bytes]:
    files = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    # Most of a file's time goes into comments; without them there are ten inputs for one.
    bare = [re.sub(rb" *#.*", b"", file) for file in files]
    extra = (
        b"data: {layout: list, root: x, classes: c}\naugment: {extra: [{name: A, args: {p: 1}}]}"
    )
    return [*files, *bare * 3, *[extra] * 9]


def _classes(path: Path) -> None:
    use_classes(load_class_file(str(path)))


def use_classes(classes: ClassFile) -> None:
    """Makes all the tables that labels are read and written by."""
    num_classes = classes.num_classes
    assert 1 <= num_classes <= 255
    for raw in classes.write_ids:
        ids = np.array([[raw]], np.uint16)
        assert ids_to_train_ids(ids, "x", classes)[0, 0] == classes.write_ids.index(raw)
    colors = np.array([[*classes.palette, classes.ignore_color]], np.uint8)
    found = colors_to_train_ids(colors, "x", classes)
    assert found.tolist() == [[*range(num_classes), 255]]


def _class_files() -> list[bytes]:
    files = sorted((ROOT / "data/classes").glob("*.yaml"))
    return [path.read_bytes() for path in files] + [b"classes: [ground, plant]\n"]


def _list(path: Path) -> None:
    root = path.parent / "data"
    if not root.exists():
        (root / "d").mkdir(parents=True)
        for name in ("a.png", "b c.png", "d/e.png"):
            (root / name).touch()
    data = DataConfig(layout="list", root=str(root), classes="voc", train_split=f"../{path.name}")
    for pair in list_split(data, data.train_split).pairs:
        for file in (*pair.images, pair.label):
            assert ".." not in file.relative_to(root).parts, f"{file} is not below the root"


def _lists() -> list[bytes]:
    return [
        b"a.png d/e.png\nd/e.png a.png\n",
        b'# image label\r\n"b c.png"\ta.png\r\n',
        b'\xef\xbb\xbfa.png,"b c.png"\n\n./d/./e.png , a.png\n',
        b"../data/a.png /etc/passwd.png\nd/../../x.png \\\\host\\x.png\nC:\\x.png a.png\n",
    ]


_CLASSES = ClassFile(
    "toy", load_class_file("voc").classes[:4], ignore_ids=(255,), ignore_color=(224, 224, 192)
)


def _image(path: Path) -> None:
    info = read_info(path)
    image = read_image([path], RGB._replace(dtype=set_dtype(info.dtype)))
    assert image.dtype == set_dtype(info.dtype)
    assert image.shape == (*info.size, 3)


def _label(path: Path) -> None:
    labels = []
    for label_format in ("ids", "colors"):
        try:
            labels.append(label_format_of(label_format).read(path, _CLASSES))
        except DataError:
            if label_format == "colors" and not labels:
                raise
    for label in labels:
        assert label.dtype == np.uint8
        assert label.shape == read_info(path).size
        assert set(np.unique(label)) <= {0, 1, 2, 3, 255}


def _pictures() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 4, (9, 13), dtype=np.uint8)
    palette = Image.fromarray(pixels)
    palette.putpalette([value for color in _CLASSES.palette for value in color])
    colors = palette.convert("RGB")
    modes = [Image.fromarray(pixels), palette, colors, colors.convert("RGBA")]
    modes += [colors.convert("LA"), colors.convert("1"), Image.fromarray(pixels.astype(np.uint16))]
    files = [_saved(image, "PNG") for image in modes]
    files.append(_saved(palette, "PNG", bits=2, transparency=1))
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\6\0\0"
    return [*files, _saved(colors, "PNG", exif=exif)]


def _photographs() -> list[bytes]:
    colors = Image.fromarray(cv2.resize(np.eye(9, dtype=np.uint8) * 200, (40, 24))).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = {"exif": exif}, {"progressive": True}, {"icc_profile": b"x" * 200}, {"quality": 5}
    files = [_saved(colors, "JPEG", **kind) for kind in kinds]
    files += [_saved(colors.convert(mode), "JPEG") for mode in ("L", "CMYK")]
    return files + _pictures()


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _mutate_picture(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    return (mutate_png if data.startswith(b"\x89PNG") else mutate)(rng, data, words)


def _checkpoint(path: Path) -> None:
    checkpoint = format.load(path)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    try:
        load_initial(model, path)
    finally:
        state = _train_state(model)
        restore(state, checkpoint, path)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    _, classes = format.parse_experiment(checkpoint, path)
    use_classes(classes)


def _train_state(model: nn.Module) -> TrainState:
    data = DataConfig(layout="folders", root="none", classes="none")
    # With a loss scale.
    config = Config(data=data, train=TrainConfig(precision="float16"), optim=OptimConfig(lr=0.1))
    return make_state(model, config, torch.device("cpu"))


@cache
def checkpoint_content() -> dict[str, Any]:
    """What a checkpoint of the model in `_checkpoint` holds."""
    state = _train_state(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.scaler.scale(torch.ones(1))
    data = DataConfig(layout="folders", root="x", classes="voc")
    config = parse_config(f"data: {json.dumps(data.model_dump(mode='json'))}", source="x")
    checkpoint = format.Checkpoint(
        step=3,
        **format.experiment_fields(config, _CLASSES),
        model=state.model.state_dict(),
        average=state.model.state_dict(),
        optimizer=state.optimizer.state_dict(),
        scaler=state.scaler.state_dict(),
        best={"step": 2, "by": "mIoU", "score": 0.5},
    )
    return {"format": format.FORMAT_VERSION, "segtrain": "0", **checkpoint._asdict()}


def _quantized(values: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against them
        return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)


@cache
def odd_values() -> list[Any]:
    """Values of kinds that a checkpoint may not hold where they are put."""
    one = torch.ones(2, 3)
    return [
        *(None, True, 0, -1, 2**70, 1.5, float("nan"), "", "x", b"x", [], (), {}, set()),
        *([one], {"a": one}, {1: one}, OrderedDict(a=one), torch.float32, torch.Size([2])),
        *(one, one[0], one[0, 0], one.double(), one.half(), one.int(), one.bool(), one.cfloat()),
        *(one.to_sparse(), one.to("meta"), one.expand(4, 2, 3), torch.empty(0), nn.Parameter(one)),
        _quantized(one),
        one.to(torch.float8_e5m2),
        torch.ones(1, 1).expand(1 << 20, 1 << 20),
    ]


def _saved_tree(content: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def _swap(rng: Random, content: Any, odd: Sequence[Any]) -> Any:
    """`content` with one value somewhere in it replaced, removed or under another key."""
    if not isinstance(content, dict) or not content or rng.random() < 0.1:
        return rng.choice(odd)
    content = dict(content)
    key = rng.choice(list(content))
    choice = rng.random()
    if choice < 0.1:
        del content[key]
    elif choice < 0.2:
        new_key = rng.choice([0, 1.5, None, "", "x", b"x", (1,), f"{key}.weight"])
        content[new_key] = rng.choice([content[key], rng.choice(odd)])
    else:
        content[key] = _swap(rng, content[key], odd)
    return content


def _mutate_checkpoint(
    content: Callable[[], Any], rng: Random, data: bytes, words: Sequence[bytes]
) -> bytes:
    """A change of a value half of the time, else of bytes."""
    if rng.random() < 0.5:
        return mutate_zip(rng, data, words)
    changed = content()
    for _ in range(rng.choice((1, 1, 2))):
        changed = _swap(rng, changed, odd_values())
    return _saved_tree(changed)


def hostile_archives() -> list[bytes]:
    """Malicious pickles alone, and where torch keeps the pickle of an archive."""
    pickles = fuzz_inputs.malicious_pickles()
    return [kind for data in pickles for kind in (data, archive_of(data))]


def archive_of(pickled: bytes) -> bytes:
    """What torch.save writes around a pickle."""
    members = {"a/data.pkl": pickled, "a/byteorder": b"little", "a/version": b"3\n"}
    return fuzz_inputs.zipped(members)


def _checkpoints() -> list[bytes]:
    content = checkpoint_content()
    legacy = io.BytesIO()
    torch.save(content, legacy, _use_new_zipfile_serialization=False)
    return [_saved_tree(content)] * 8 + [legacy.getvalue(), *hostile_archives()]


@cache
def _saved_checkpoint() -> bytes:
    return _saved_tree(checkpoint_content())


class _Backbone(nn.Module):
    """The least that `load_backbone` takes for one."""

    name, classifier_keys, stem_keys = "resnet18", ("fc.",), ("conv1.", "bn1.")

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(2)


def _pretrained(path: Path) -> None:
    load_backbone(_Backbone(), str(path))


@cache
def _weights() -> dict[str, Any]:
    return {**_Backbone().state_dict(), "fc.weight": torch.ones(2, 2)}


def _weight_files() -> list[bytes]:
    plain = _weights()
    nested = {"model": {f"module.backbone.{key}": value for key, value in plain.items()}}
    files = [_saved_tree(plain), _saved_tree(nested), safetensors.torch.save(plain)] * 4
    return files + hostile_archives()


def _manifest(path: Path) -> None:
    last = path.with_name("last.pt")
    if not last.exists():
        last.write_bytes(_saved_checkpoint())
    manifest.read_entries(path.parent)
    store = CheckpointManager(path.parent, keep_limit=2)
    store.clean_up()
    store.newest()


def _manifests() -> list[bytes]:
    entry = asdict(manifest.Entry(3, 100, "0" * 64))
    whole = asdict(manifest.Entry(3, 1, hashlib.sha256(_saved_checkpoint()).hexdigest()))
    content = {"last.pt": [whole, entry], "best.pt": [entry, entry], "step_0000003.pt": [entry]}
    return [json.dumps(content, indent=2).encode(), json.dumps({"last.pt": []}).encode()]


_YAML_WORDS = (b": ", b"- ", b"[", b"]", b"{", b"}", b'"', b"'", b"#", b"&a ", b"*a", b"!!int ")
_YAML_WORDS += (b"<<: ", b"|\n", b">-\n", b"%YAML 1.1\n---\n", b"\n...\n", b"? ", b"\t", b"\\x00")
_YAML_WORDS += (b'"\\UFFFFFFFF"', b'"\\ud800"', b'"\\0"', b"null", b"true", b"1e400", b"1_0", b"~")
_YAML_WORDS += (b"%TAG ! x:\n", b"\xc2\x85", b"\xe2\x80\xa8", b"ignore_color: ", b"ids: ", b"\r")
_SECTIONS = parse_config("data: {layout: voc, root: x, classes: voc}", source="x").model_dump()
_CONFIG_WORDS = tuple(
    f"{name}: ".encode()
    for section in ("data", "augment", "model", "norm", "loss", "train", "eval", "log")
    for name in (section, *_SECTIONS[section])
)
_LIST_WORDS = (b"../", b"/", b"\\", b"\0", b'"', b",", b"\t", b" ", b"\r", b"\x0b", b"\xff", b"#")
_LIST_WORDS += (b"\xe2\x80\xa8", b"a.png", b"b c.png", b"d/e.png", b"~/", b"//", b"x" * 300)
_PICKLE_WORDS = tuple(data[2:-1] for data in fuzz_inputs.malicious_pickles())
_PICKLE_WORDS += (b"N", b"]", b"}", b")", b"0", b"2", b"R", b"b", b"\x81", b"Q", b"t", b"(", b"s")
_GLOBALS = {
    "torch._utils": "_rebuild_tensor_v2 _rebuild_parameter _rebuild_qtensor _rebuild_sparse_tensor "
    "_rebuild_nested_tensor",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch": "Size device FloatStorage Storage Tensor QUInt8Storage",
    "collections": "OrderedDict Counter",
    "builtins": "set",
}
_PICKLE_WORDS += tuple(
    f"c{module}\n{name}\n".encode() for module in _GLOBALS for name in _GLOBALS[module].split()
)
_SAFETENSORS_WORDS = tuple(f'"{kind}"'.encode() for kind in ("BF16", "F8_E5M2", "F4", "C64", "I4"))
_JSON_WORDS = (b"[", b"]", b"{", b"}", b"null", b"true", b"1e9", b"NaN", b'"', b'"\\ud800"', b":")
_JSON_WORDS += (b'"../last.pt"', b'"/dev/zero"', b'""', b'"."', b'"a\\u0000"', b'"step"', b",")
_JSON_WORDS += (b'"' + b"x" * 300 + b'"', b'"best.pt"', b'"/"', b'"last.pt"')

TARGETS = {
    "config": Target(_config, _configs, ("config.yaml",), words=(*_YAML_WORDS, *_CONFIG_WORDS)),
    "classes": Target(_classes, _class_files, ("classes.yaml",), words=_YAML_WORDS),
    "list": Target(_list, _lists, ("list.txt",), words=_LIST_WORDS),
    "image": Target(_image, _photographs, ("image.png",), _mutate_picture),
    "label": Target(_label, _pictures, ("label.png",), mutate_png),
    "checkpoint": Target(
        *(_checkpoint, _checkpoints, ("last.pt",)),
        *(partial(_mutate_checkpoint, checkpoint_content), _PICKLE_WORDS),
    ),
    "manifest": Target(_manifest, _manifests, ("manifest.json",), words=_JSON_WORDS),
    "pretrained": Target(
        *(_pretrained, _weight_files, ("weights.pth", "weights.safetensors")),
        *(partial(_mutate_checkpoint, _weights), (*_PICKLE_WORDS, *_SAFETENSORS_WORDS)),
    ),
}
