"""Files of 8 bits, each scored here once more: image by image, by onnxruntime, numpy and OpenCV."""

import json
import re
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from test_export import (
    CLASSES,
    MEAN,
    STD,
    Tiny,
    loaded_model,
    onnx_session,
    reference,
    small,
    with_data,
    with_eval,
)
from torch import nn

from segtrain.commands import export as command
from segtrain.export import formats, quantize
from segtrain.export.export_model import Case
from segtrain.export.quantize import FileModel, Quantizer
from segtrain.export.write import graph_of
from segtrain.inference.class_scores import InferenceSettings
from segtrain.inference.predictor import for_scores
from segtrain.models.deeplab import DeepLabV3PlusHead
from segtrain.types import IGNORE_INDEX, SegLogits

SIZE = (64, 96)
SLOW = pytest.mark.slow("export")
IDS = np.array([7, 23, 26], np.uint8)  # of CLASSES
FILE = (
    "classes:\n- {name: road, ids: [7]}\n- {name: sky, ids: [23, 24]}\n- {name: car, ids: [26]}\n"
    "ignore_ids: [0]\n"
)


def scene(seed):
    """A picture with structure at several scales, (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = cv2.resize(rng.uniform(0, 255, (4, 6, 3)), SIZE[::-1], interpolation=cv2.INTER_CUBIC)
    return (coarse + rng.normal(0, 25, coarse.shape)).clip(0, 255).astype(np.uint8)


def tensor(image):
    return torch.from_numpy(image).permute(2, 0, 1)[None]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Puts a data set on the disk whose labels are what the model predicts, but for one corner."""

    def write(loaded, num_train=6, num_val=4):
        (tmp_path / "classes.yaml").write_text(FILE)
        for split, seeds in (("train", range(num_train)), ("val", range(50, 50 + num_val))):
            for kind in ("images", "labels"):
                (tmp_path / kind / split).mkdir(parents=True, exist_ok=True)
            for seed in seeds:
                image = scene(seed)
                label = IDS[reference(loaded, tensor(image)).argmax(1)[0].numpy()]
                label[:5, :7] = 0
                for kind, picture in (("images", image[..., ::-1]), ("labels", label)):
                    assert cv2.imwrite(str(tmp_path / f"{kind}/{split}/{seed:02d}.png"), picture)
        classes = str(tmp_path / "classes.yaml")
        loaded = with_data(loaded, root=str(tmp_path), classes=classes)
        monkeypatch.setattr(command, "load_model", lambda *sources: loaded)
        return loaded

    return write


def tiny():
    return loaded_model(Tiny())


def deeplab():
    return small(DeepLabV3PlusHead, "deeplabv3plus")


def by_hand(file, image, options):
    """The classes of an image as a file of these options gives them, (H, W)."""
    given = cv2.resize(image.astype(np.float32), SIZE[::-1])
    if "--size" in options:
        given = cv2.resize(given, (56, 40))
    if "--normalize" in options:
        given = given.astype(np.uint8)
    else:
        given = ((given - np.array(MEAN)) / np.array(STD)).astype(np.float32)
    found = onnx_session(file).run(None, {"images": given.transpose(2, 0, 1)[None]})[0][0]
    if found.ndim == 2:
        return found
    return np.stack([cv2.resize(x, SIZE[::-1]) for x in found]).argmax(0)


def mean_iou(labels, found):
    from sklearn.metrics import jaccard_score

    valid = labels != 0
    return jaccard_score(labels[valid], IDS[found.astype(int)][valid], average="macro")


def assert_symmetric(file):
    """Kernels are int8 and all of it is symmetric, as TensorRT wants it."""
    import onnx

    graph = onnx.load(file).graph
    kinds = [node.op_type for node in graph.node]
    assert {"Conv", "QuantizeLinear", "DequantizeLinear"} <= set(kinds)
    assert not [node for node in graph.node if node.domain not in ("", "ai.onnx")]
    tensors = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    made = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type == "Conv":
            source = made[node.input[1]]
            assert source.op_type == "DequantizeLinear"
            kernel = tensors[source.input[0]]
            assert kernel.dtype == np.int8
            assert np.abs(kernel.astype(int)).max() <= 64
            assert tensors[source.input[1]].shape == kernel.shape[:1]  # by channel
            assert all(tensors[name].dtype == np.float32 for name in node.input[2:])  # bias
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert (tensors[node.input[2]] == 0).all()


LABELS = ("--normalize", "--argmax")
OTHERS = [
    pytest.param(deeplab, options, marks=SLOW) for options in (LABELS, (), ("--size", "40", "56"))
]


@pytest.mark.parametrize(("make", "options"), [(tiny, LABELS), *OTHERS])
def test_an_int8_file_has_the_scores_that_the_table_says(lab, data, tmp_path, make, options):
    data(make())
    file, plain = tmp_path / "int8.onnx", tmp_path / "float.onnx"
    words = ("export", "nowhere", "--format", "onnx", *options, "--output")
    lab.done(*words, plain)
    quantize = ("--quantize", "int8", "--max-loss", 50, "--images", 3)
    out = lab.done(*words, file, *quantize).out
    rows = dict(re.findall(r"^(float|int8) +(\d+\.\d\d)", out, re.M))
    assert "int8 on 3 of the 6 images of split train" in out
    assert "mIoU of 3 of the 4 images of split val: whole image; scale 1; no flip" in out

    images = [scene(seed) for seed in (50, 52, 53)]  # spread evenly
    names = [tmp_path / f"labels/val/{seed}.png" for seed in (50, 52, 53)]
    labels = np.stack([cv2.imread(str(name), cv2.IMREAD_UNCHANGED) for name in names])
    found = {
        kind: np.stack([by_hand(path, image, options) for image in images])
        for kind, path in (("float", plain), ("int8", file))
    }
    for kind, one in found.items():
        assert float(rows[kind]) == pytest.approx(100 * mean_iou(labels, one), abs=0.02)
    same = (found["float"] == found["int8"])[labels != 0].mean()
    agreement = float(re.search(r"([\d.]+)% of the labelled pixels", out)[1])
    assert agreement == pytest.approx(100 * same, abs=0.02)
    assert 60 < agreement < 100
    if "--size" not in options:
        assert rows["float"] == "100.00"
    if not options:
        lab.done(*words, tmp_path / "again.onnx", *quantize)
        assert (tmp_path / "again.onnx").read_bytes() == file.read_bytes()
    assert_symmetric(file)
    about = onnx_session(file).get_modelmeta().custom_metadata_map
    assert about["quantization"] == "int8 (QDQ), calibrated on 3 images"
    assert json.loads(about["class_names"]) == ["road", "sky", "car"]
    assert json.loads(about["preprocessing"])[0]["step"] == "read"


def test_an_int8_file_that_resizes_is_scored_as_the_model_at_that_scale(lab, data, tmp_path):
    """By its first result; its speed is said, whatever it is."""
    loaded = data(with_eval(tiny(), flip=True, scales=(0.5, 2.0)))
    options = ("--normalize", "--argmax", "--confidence", "--scale", 0.5)
    words = ("export", "nowhere", "--format", "onnx", *options, "--output", tmp_path / "a.onnx")
    quantize = ("--quantize", "int8", "--max-loss", 100, "--images", 4)
    out = lab.done(*words, *quantize).out
    settings = replace(InferenceSettings.from_config(loaded.config), scales=(0.5,), flip=False)
    predictor = for_scores(loaded.model, settings, torch.device("cpu"), 3)
    images = [torch.from_numpy(scene(seed)) for seed in range(50, 54)]
    found = np.stack([predictor.label_maps([x], place="")[0].label.numpy() for x in images])
    names = [tmp_path / f"labels/val/{seed}.png" for seed in range(50, 54)]
    labels = np.stack([cv2.imread(str(name), cv2.IMREAD_UNCHANGED) for name in names])
    score = float(re.search(r"^float +(\d+\.\d\d)", out, re.M)[1])
    assert score == pytest.approx(100 * mean_iou(labels, found), abs=0.02)
    assert score < 99
    assert re.search(
        r"^(warning: )?int8 takes \d+\.\d\d times as long as float \(.+ cores", out, re.M
    )
    session = onnx_session(tmp_path / "a.onnx")
    label, confidence = session.run(None, {"images": tensor(scene(50)).numpy()})
    assert (label == found[0]).mean() > 0.9
    assert confidence.min() > 1 / 3


class Uneven(nn.Module):
    """A feature of large values that no class needs leaves the others no levels of 8 bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.conv.weight.data[0] *= 1e4
        self.last.weight.data[:, 0] = 0

    def forward(self, images):
        return SegLogits(self.last(self.conv(images)))


def test_a_file_that_loses_too_much_is_not_kept(lab, data, tmp_path):
    data(loaded_model(Uneven()))
    file = tmp_path / "int8.onnx"
    file.write_text("before")
    words = ("export", "nowhere", "--format", "onnx", "--quantize", "int8", "--output", file)
    said = lab.refused(*words, "--overwrite", "--max-loss", 30, code=6)
    fall = float(re.search(r"not written: the mIoU falls by ([\d.]+) points, and 30 are", said)[1])
    assert fall > 30
    assert file.read_text() == "before"


def test_without_labelled_pixels_nothing_is_known_and_nothing_kept(lab, data, tmp_path):
    data(loaded_model(Tiny()))
    for path in (tmp_path / "labels/val").iterdir():
        cv2.imwrite(str(path), np.zeros(SIZE, np.uint8))
    words = ("export", "nowhere", "--format", "onnx", "--quantize", "int8")
    said = lab.refused(*words, "--max-loss", 100, "--output", tmp_path / "a.onnx", code=6)
    assert "the mIoU falls by nan points" in said


def test_what_cannot_be_calibrated_is_refused_before_anything_is_exported(lab, data, tmp_path):
    loaded = data(loaded_model(Tiny()))
    words = ("export", "nowhere", "--output", tmp_path / "a.onnx", "--format", "onnx")
    said = lab.refused(*words, "--quantize", "int8", "--set", "data.root=/nowhere", code=3)
    assert "--quantize is calibrated on the training split: --set data.root=FOLDER" in said
    assert "no effect without --quantize" in lab.refused(*words, "--images", 4)
    assert "no effect without --quantize" in lab.refused(*words, "--set", "data.root=x")
    other = ("export", "nowhere", "--output", tmp_path / "a.pt2", "--format", "pt2")
    assert "is for --format onnx, not for pt2" in lab.refused(*other, "--quantize", "int8")
    (tmp_path / "classes.yaml").write_text(FILE.replace("sky", "sea"))
    said = lab.refused(*words, "--quantize", "int8", code=3)
    assert f"{loaded.config.data.classes}: other classes than those of the model" in said


@pytest.mark.parametrize("normalize", [None, "uint8", "float32"])
@pytest.mark.parametrize("value_range", [None, (10.0, 210.0)])
def test_a_file_in_the_place_of_the_model_gets_what_the_model_gets(normalize, value_range):
    """Scales, flips and windows too; whole numbers only if nothing is resized."""
    loaded = with_data(deeplab(), value_range=value_range)
    slide = {"mode": "slide", "crop_size": (40, 56), "flip": True}
    scales = () if normalize == "uint8" else (0.8, 1.5)
    loaded = with_eval(loaded, **slide, scales=(1.0, *scales))
    settings = InferenceSettings.from_config(loaded.config)
    graph = graph_of(loaded, normalize=normalize, argmax=False)
    seen = []

    def run(images):
        seen.append(images.dtype)
        with torch.no_grad():
            return graph(images)

    of_file, of_model = (
        for_scores(model, settings, torch.device("cpu"), 3)
        for model in (FileModel(run, graph, 3, None), loaded.model)
    )
    image = torch.from_numpy(scene(1))
    found, expected = (
        one.label_maps([image], place="", probabilities="all")[0] for one in (of_file, of_model)
    )
    torch.testing.assert_close(found.probability, expected.probability, atol=1e-4, rtol=0)
    assert set(seen) == {getattr(torch, normalize or "float32")}


class Scenes(list):
    """A data set of pairs."""

    split = "val"

    def name(self, index):
        return f"scene {index}"


def test_classes_that_overlap_are_scored_at_their_thresholds(tmp_path):
    from sklearn.metrics import jaccard_score

    loaded = loaded_model(Tiny())._replace(classes=replace(CLASSES, overlapping=True))
    loaded = loaded._replace(config=loaded.config.model_copy(update={"task": "multilabel"}))
    logits = reference(loaded, torch.cat([tensor(scene(i)) for i in range(3)]))
    thresholds = tuple(logits.sigmoid().movedim(1, 0).flatten(1).quantile(0.6, dim=1).tolist())
    settings = replace(InferenceSettings.from_config(loaded.config), thresholds=thresholds)
    graph = graph_of(loaded, normalize="uint8", argmax=False)
    files, example = (tmp_path / "float.onnx", tmp_path / "int8.onnx"), Case(2, *SIZE)
    with formats.quiet():
        formats._write_onnx(graph, graph.example(example), False, {"task": "x"}, files[0])

    def presence(file, image):
        logits = onnx_session(file).run(None, {"images": tensor(image).numpy()})[0][0]
        return (1 / (1 + np.exp(-logits)) >= np.reshape(thresholds, (-1, 1, 1))).transpose(1, 2, 0)

    scenes = Scenes((scene(i), presence(files[0], scene(i)).astype(np.uint8)) for i in range(3))
    for _, label in scenes:
        label[:4, :4, 1] = IGNORE_INDEX
    quantizer = Quantizer(loaded, graph, settings, None)
    quantizer.write(files[0], files[1], scenes, range(3))
    found = quantizer.figures(files, scenes, range(3))
    labels = np.stack([label for _, label in scenes])
    int8 = np.stack([presence(files[1], image) for image, _ in scenes])
    valid = labels != IGNORE_INDEX
    by_class = (np.moveaxis(x, -1, 0) for x in (labels, int8, valid))
    ious = [jaccard_score(a[v], b[v]) for a, b, v in zip(*by_class, strict=True)]
    assert found.mean_iou == (1.0, pytest.approx(np.mean(ious), abs=1e-4))
    assert found.agreement == pytest.approx((labels == int8)[valid].mean(), abs=1e-4)
    assert found.agreement < 1


def figures(first, second):
    return quantize.Figures((0.8, 0.8), 0.99, (first, second), (30, 40), (9.0, 2.5))


def test_int8_that_is_slower_is_a_warning_with_the_ratio_and_the_processor():
    assert figures(1476, 1354).speed("a Xeon") == "int8 takes 0.92 times as long as float (a Xeon)"
    for int8 in (93, 100, 107):  # one pair of files took 0.86 to 1.01 times as long in ten tries
        line = figures(100, int8).speed("a Xeon")
        assert line.startswith(
            f"int8 takes {int8 / 100:.2f} times as long as float (a Xeon): too close"
        )
        assert "slower" not in line
    line = figures(533, 696).speed("a Xeon, 2 cores")
    assert line.startswith(
        "warning: int8 takes 1.31 times as long as float (a Xeon, 2 cores): slow"
    )
    assert re.fullmatch(
        r"\S.*, \d+ cores, onnxruntime's own number of threads", quantize.processor()
    )


def test_both_files_are_timed_in_turns_by_the_clock():
    now, asked = [0.0], []

    def runner(name, seconds):
        def run(images):
            asked.append(name)
            now[0] += seconds[min(asked.count(name) - 1, len(seconds) - 1)]

        return run

    runs = [runner("float", [90.0, 90.0, 90.0, 0.5]), runner("int8", [0.7])]
    found = quantize._milliseconds(runs, torch.zeros(1), lambda: now[0])
    assert found == (pytest.approx(500), pytest.approx(700))
    assert asked == ["float", "int8"] * (quantize.NUM_RUNS + 3)
