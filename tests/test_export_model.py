"""What stands around the network in a file, read here without segtrain, beside `Predictor`."""

import json
import math
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from itertools import product

import cv2
import numpy as np
import pytest
import torch
from processes import REPOSITORY
from test_export import (
    CLASSES,
    MEAN,
    STD,
    Tiny,
    assert_script_predicts,
    loaded_model,
    metadata_of,
    onnx_session,
    psp,
    reference,
    save_photo,
    small,
    torchscript,
    with_data,
)

from segtrain.checkpoint import ready
from segtrain.commands import export as command
from segtrain.export import write
from segtrain.export.export_model import Case, ViewSize
from segtrain.export.write import export_graph, graph_of
from segtrain.inference.predictor import for_scores
from segtrain.inference.settings import InferenceSettings, view_size
from segtrain.models.deeplab import DeepLabV3PlusHead
from segtrain.task.decision_rule import DecisionRule

CPU = torch.device("cpu")
HALF = {"argmax": True, "confidence": True, "view": ViewSize(None, 0.5)}
SURE = {"argmax": True, "confidence": True, "unknown_below": 0.45, "temperature": 0.6}
RUNTIMES = {
    "onnx": lambda file: lambda x: onnx_session(file).run(None, {"images": x.numpy()}),
    "pt2": lambda file: torch.export.load(file).module(),
    "torchscript": torchscript,
}


def photo(height, width, seed=0):
    """Of structure at several scales, (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    coarse = cv2.resize(rng.uniform(0, 255, (4, 6, 3)), (width, height), interpolation=2)
    return (coarse + rng.normal(0, 25, coarse.shape)).clip(0, 255).astype(np.uint8)


def as_batch(image):
    return torch.from_numpy(image.transpose(2, 0, 1)[None].copy())


def predicted(loaded, image, short_side_px, scale, **how):
    """The label map of the eager path with these settings."""
    settings = InferenceSettings.from_config(loaded.config)
    settings = replace(settings, short_side_px=short_side_px, scales=(scale,))
    predictor = for_scores(loaded.model, settings, CPU, 3).by(how.pop("rule", None))
    return predictor.label_maps([torch.from_numpy(image)], place="", **how)[0]


def by_opencv(loaded, image, size):
    """Logits (H, W, K) at the size of the image, of a view of `size`: all resizing by OpenCV."""
    values = ((image.astype(np.float32) - MEAN) / STD).astype(np.float32)
    view = cv2.resize(values, size[::-1])
    with torch.no_grad():
        logits = loaded.model(as_batch(view)).out[0].numpy()
    return np.dstack([cv2.resize(one, image.shape[1::-1]) for one in logits])


def tiny():
    return loaded_model(Tiny())


def aligned():
    return with_data(psp(), section="model", align_corners=True)


def answers(format, file, image):
    """What a file gives for an image, as arrays without the batch."""
    with torch.no_grad():
        found = RUNTIMES[format](file)(as_batch(image))
    return [np.asarray(x)[0] for x in found]


HALVES, SHORT, BOTH, SIZE = ViewSize(None, 0.7), ViewSize(40), ViewSize(110, 0.5), (77, 150)
USUAL = [
    *product(["torchscript"], [psp], [HALVES, SHORT, BOTH], [None, SIZE]),
    ("torchscript", aligned, HALVES, None),
    ("onnx", tiny, BOTH, None),
    ("onnx", tiny, SHORT, SIZE),
    ("pt2", tiny, HALVES, None),
    ("pt2", tiny, BOTH, SIZE),
]
OTHERS = product(["onnx", "pt2"], [tiny, psp, aligned], [HALVES, SHORT, BOTH], [None, SIZE])


@pytest.mark.parametrize(
    ("format", "make", "view", "size"),
    [*USUAL, *(pytest.param(*each, marks=pytest.mark.slow("export")) for each in OTHERS)],
)
def test_a_file_that_resizes_gives_what_predictor_gives(tmp_path, format, make, view, size):
    loaded = make()
    options = {"normalize": "uint8", "argmax": True, "confidence": True}
    export_graph(loaded, tmp_path / "file", format=format, size=size, view=view, **options)
    # Neither the sizes of the trial, nor one shape: taller, wider, square. 45 * 0.7 is 31.5.
    for height, width in [size] if size else [(77, 150), (163, 90), (45, 45)]:
        image = photo(height, width)
        label, confidence = answers(format, tmp_path / "file", image)
        expected = predicted(loaded, image, *view, probabilities="highest")
        assert label.shape == (height, width)
        assert len(np.unique(label)) > 1
        # Where two classes are as probable, roundings decide.
        assert (label == expected.label.numpy()).mean() > 0.9995
        np.testing.assert_allclose(confidence, expected.probability.numpy(), rtol=0, atol=1e-4)
        if make is not aligned:  # which OpenCV does not know
            seen = view_size((height, width), *view)
            other = by_opencv(loaded, image, seen).argmax(2)
            assert (label == other).mean() > 0.999
    own = predicted(loaded, image, None, 1.0).label.numpy()
    assert (label != own).any()  # resizing does change something


def test_sides_are_those_of_decimal_arithmetic_and_of_eval():
    rng = np.random.default_rng(0)
    sides = [*range(40, 60), *rng.integers(60, 4000, 40).tolist()]
    scales = [k / 20 for k in range(2, 81)] + [0.3333, 0.333333, 0.37]
    for scale in scales:
        for side in sides:
            exact = int((Decimal(str(scale)) * side).quantize(Decimal(1), ROUND_HALF_UP))
            assert ViewSize(None, scale).of((side, side + 1))[0] == exact
            assert view_size((side, side + 1), None, scale)[0] == exact
    for height in sides:
        for width in sides:
            for short, scale in ((230, 1.0), (270, 0.7)):
                share = Fraction(short, min(height, width)) * Fraction(str(scale))
                exact = tuple(math.floor(side * share + Fraction(1, 2)) for side in (height, width))
                assert ViewSize(short, scale).of((height, width)) == exact
                assert view_size((height, width), short, scale) == exact
    least = ViewSize(None, 0.3).least_side(9, None)
    assert ViewSize(None, 0.3).of((least, least)) == (9, 9)
    assert ViewSize(None, 0.3).of((least - 1,) * 2) == (8, 8)


@pytest.mark.parametrize("format", RUNTIMES)
def test_labels_that_are_not_sure_are_unknown_as_predict_makes_them(tmp_path, format):
    loaded = tiny()
    options = {"normalize": "uint8", **SURE}
    export_graph(loaded, tmp_path / "file", format=format, **options)
    image = photo(83, 61, seed=4)
    label, confidence = answers(format, tmp_path / "file", image)
    logits = reference(loaded, as_batch(image))[0].double().numpy() / 0.6
    powers = np.exp(logits - logits.max(0))
    probability = (powers / powers.sum(0)).max(0)
    np.testing.assert_allclose(confidence, probability, rtol=0, atol=1e-5)
    clear = np.abs(probability - 0.45) > 1e-5
    expected = np.where(probability >= 0.45, logits.argmax(0), 255)
    assert (label == expected)[clear].all()
    assert 0.02 < (label == 255).mean() < 0.98
    # Of predict, without a temperature: it has none.
    rule = DecisionRule({}, 0.4)
    graph = graph_of(loaded, normalize="uint8", argmax=True, unknown_below=0.4)
    found = predicted(loaded, image, None, 1.0, rule=rule).label
    assert torch.equal(graph(as_batch(image))[0], found)
    about = metadata_of(tmp_path / "file", format)
    graph = json.loads(about["graph"])
    assert (graph["temperature"], graph["unknown_below"]) == (0.6, 0.45)
    assert (graph["normalize"], graph["view"]) == ("uint8", None)
    assert about["output"] == (
        "labels (N, H, W) uint8, index into class_names, 255 where no probability is 0.45; "
        "confidence (N, H, W) float32, the probability"
    )


def test_where_classes_overlap_there_is_a_confidence_of_each(tmp_path):
    loaded = loaded_model(Tiny())._replace(classes=replace(CLASSES, overlapping=True))
    loaded = loaded._replace(config=loaded.config.model_copy(update={"task": "multilabel"}))
    options = {"confidence": True, "normalize": "uint8", "temperature": 2.0}
    export_graph(loaded, tmp_path / "m.onnx", format="onnx", **options)
    image = photo(40, 57)
    session = onnx_session(tmp_path / "m.onnx")
    assert [one.name for one in session.get_outputs()] == ["logits", "confidence"]
    logits, confidence = session.run(None, {"images": as_batch(image).numpy()})
    own = reference(loaded, as_batch(image)).double().numpy() / 2
    np.testing.assert_allclose(logits, own, rtol=0, atol=1e-4)
    np.testing.assert_allclose(confidence, 1 / (1 + np.exp(-own)), rtol=0, atol=1e-5)


CHANGES = {
    "less sure": lambda label, sure: (label, sure - 0.01),
    "one less sure": lambda label, sure: (label, sure.index_fill(2, torch.tensor([7]), 0.2)),
    "not a number": lambda label, sure: (label, sure * float("nan")),
    "all unknown": lambda label, sure: (label.fill_(255), sure),
    "none unknown": lambda label, sure: (label * (label != 255), sure),
    "other classes": lambda label, sure: (torch.where(label < 3, (label + 1) % 3, label), sure),
    "labels alone": lambda label, sure: label,
    "swapped": lambda label, sure: (sure, label),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_whose_second_result_is_wrong_is_found(change):
    graph, case = graph_of(loaded_model(Tiny()), **SURE), Case(1, 30, 40)
    assert write.compare(graph, graph, case) == (case, pytest.approx(0, abs=1e-9), 1.0, None)
    found = write.compare(lambda x: CHANGES[change](*graph(x)), graph, case)
    assert not found.passed


def command_line(lab, monkeypatch, loaded=None):
    loaded = loaded or loaded_model(Tiny())
    monkeypatch.setattr(command, "load_model", lambda *sources: loaded)
    return "export", "runs/mine", "--output", lab.folder / "new", "--format"


@pytest.mark.parametrize(
    ("format", "options", "said"),
    [
        ("safetensors", "--confidence --scale 0.5", "--confidence, --scale: no effect on --format"),
        ("safetensors", "--unknown-below 0.6", "--unknown-below: no effect on --format safet"),
        ("safetensors", "--short-side 90", "--short-side: no effect on --format safetensors"),
        ("safetensors", "--temperature 2", "--temperature: no effect on --format safetensors"),
        ("pt2", "--scale 0.5 --short-side 90", "--scale, --short-side: give one of them"),
        ("pt2", "--scale 1", "--scale 1: no effect: the run has no data.short_side_px"),
        ("pt2", "--scale 0.05", "argument --scale: expected a number from 0.1 to 4, got '0.05'"),
        ("pt2", "--scale 5", "argument --scale: expected a number above 0, up to 4, got '5'"),
        ("pt2", "--short-side 8", "the network would see 8x8 px, and needs 9 a side"),
        ("onnx", "--scale 0.2 --size 30 400", "the network would see 6x80 px, and needs 8 a side"),
        ("onnx", "--confidence", "--confidence, --unknown-below: are about labels; add --argmax"),
        ("onnx", "--unknown-below 0.6", "are about labels; add --argmax"),
        ("onnx", "--argmax --temperature 2", "--temperature: moves no label; add --confidence or"),
        ("onnx", "--argmax --unknown-below 0.3", "of 3 classes one always has 0.333"),
        ("onnx", "--argmax --unknown-below 0.6 --quantize int8", "--unknown-below: not with --qu"),
    ],
)
def test_what_cannot_take_effect_is_refused_by_name(lab, monkeypatch, format, options, said):
    words = command_line(lab, monkeypatch)
    assert said in lab.refused(*words, format, *options.split())
    assert not (lab.folder / "new").exists()


def test_what_thresholds_of_overlapping_classes_forbid(lab, monkeypatch):
    loaded = loaded_model(Tiny())._replace(classes=replace(CLASSES, overlapping=True))
    loaded = loaded._replace(config=loaded.config.model_copy(update={"task": "multilabel"}))
    words = (*command_line(lab, monkeypatch, loaded), "torchscript")
    assert "use --set eval.thresholds=[...]" in lab.refused(*words, "--unknown-below", 0.6)
    lab.done(*words, "--confidence", "--temperature", 2)
    own = with_data(loaded, section="eval", thresholds=(0.5, 0.3, 0.5))
    words = (*command_line(lab, monkeypatch, own), "torchscript", "--overwrite")
    assert "--temperature: eval.thresholds were found" in lab.refused(*words, "--temperature", 2)


def test_the_command_says_what_the_file_does_and_what_stays_outside(lab, monkeypatch):
    loaded = with_data(loaded_model(Tiny()), short_side_px=90)
    loaded = with_data(loaded, section="eval", scales=(0.5, 1.0), flip=True)
    words = command_line(lab, monkeypatch, loaded)
    options = ["--argmax", "--confidence", "--scale", "0.5", "--temperature", "1.5"]
    out = lab.done(*words, "torchscript", *options).out
    same = "--set eval.scales=[0.5] --set eval.mode=whole --set eval.flip=false"
    assert f"segtrain eval runs/mine {same} scores that" in out
    assert "the file divides logits by 1.5 before their softmax" in out
    assert "not in the file, done by predict: whole image; with flip (" in out
    assert "takes images of at least 2 px" in out
    about = metadata_of(lab.folder / "new", "torchscript")
    assert json.loads(about["graph"])["view"] == {"short_side_px": 90, "scale": 0.5}
    assert json.loads(about["short_side_px"]) is None
    assert [s["step"] for s in json.loads(about["preprocessing"])][2:] == ["scale", "normalize"]
    out = lab.done(*words, "torchscript", "--overwrite", "--short-side", 60).out
    assert "eval.scales=[1] " in out
    assert "--set data.short_side_px=60 scores that" in out


@pytest.fixture(scope="module")
def short_script():
    """What the README gives for pt2 and TorchScript."""
    text = (REPOSITORY / "segtrain/export/README.md").read_text(encoding="utf-8")
    _, code = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    assert len(code.splitlines()) < 20
    assert "segtrain" not in code.replace('"segtrain.json"', "")
    return code.replace("photo.jpg", "photo.png")


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("pt2", HALF),
        ("torchscript", HALF),
        ("torchscript", {"argmax": True}),
        ("torchscript", {"argmax": True, "unknown_below": 0.5}),
    ],
)
def test_the_readmes_short_script_predicts_as_segtrain_does(
    short_script, tmp_path, monkeypatch, lab, format, options
):
    loaded = loaded_model(Tiny())
    name, code = "mine.pt2", short_script
    if format == "torchscript":
        name = "mine.ts"
        code = code.replace("# run = torch.jit", "run = torch.jit").replace(
            "run = torch.export", "# "
        )
    save_photo(tmp_path / "photo.png", 67, 46)
    export_graph(loaded, tmp_path / name, format=format, normalize="uint8", **options)
    monkeypatch.setattr(ready, "load_model", lambda *sources, device: loaded)
    words = ["predict", "run", tmp_path / "photo.png", "--output", tmp_path / "out"]
    words += ["--device", "cpu"]
    if "view" in options:
        words += ["--set", "eval.scales=[0.5]"]
    if "unknown_below" in options:
        words += ["--unknown-below", 0.5]
    lab.done(*words)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(FutureWarning) if format == "torchscript" else pytest.MonkeyPatch.context():
        exec(code, names := {})
    expected, found = (
        cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        for path in (*(tmp_path / "out/labels").glob("*.png"), tmp_path / "label.png")
    )
    assert found.dtype == expected.dtype
    assert len(np.unique(expected)) > 1
    assert (found == expected).mean() > 0.999
    assert len(names["confidence"]) == ("confidence" in options)


def test_the_short_script_refuses_files_that_want_other_steps(short_script, tmp_path, monkeypatch):
    save_photo(tmp_path / "photo.png", 67, 46)
    monkeypatch.chdir(tmp_path)
    resized = with_data(loaded_model(Tiny()), short_side_px=40)
    for loaded, options in ((resized, {"normalize": "uint8", "argmax": True}), (resized, {})):
        export_graph(loaded, tmp_path / "mine.pt2", format="pt2", **options)
        with pytest.raises(AssertionError, match="preprocessing"):
            exec(short_script, {})


def test_the_long_script_knows_unknown_pixels(tmp_path, lab, monkeypatch, capsys):
    text = (REPOSITORY / "segtrain/export/README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].partition("```")[0].replace("photo.jpg", "photo.png")
    loaded = loaded_model(Tiny())
    save_photo(tmp_path / "photo.png", 67, 46)
    export_graph(
        loaded,
        tmp_path / "mine.onnx",
        format="onnx",
        normalize="uint8",
        argmax=True,
        unknown_below=0.5,
    )
    done = lab.done
    monkeypatch.setattr(lab, "done", lambda *words: done(*words, "--unknown-below", 0.5))
    assert_script_predicts(code, loaded, lab, monkeypatch, capsys, agreement=0.999)


@pytest.mark.slow("export")
def test_real_heads_resize_in_every_format(tmp_path):
    for format in RUNTIMES:
        loaded = small(DeepLabV3PlusHead, "deeplabv3plus")
        assert all(
            one.passed for one in export_graph(loaded, tmp_path / format, format=format, **HALF)
        )
