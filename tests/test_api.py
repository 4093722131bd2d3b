"""segtrain from Python: a model that labels arrays, and training in a process of its own."""

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
import torch
from experiments import last, settings, small, write_config
from preloaded import PipedFork
from processes import REPOSITORY

import segtrain
from segtrain.errors import CheckpointError, ConfigError, DataError, NonFiniteError

BY_WINDOWS = ["eval.mode=slide", "eval.crop_size=[33, 41]"]
FOREVER = {"steps": 100_000}


STARTED = pytest.param(subprocess.Popen, marks=pytest.mark.slow("api", "cli", "trainer"))


@pytest.fixture(scope="module", params=[PipedFork, STARTED], ids=["forked", "started"])
def run(request, data, tmp_path_factory):
    """Trained from options by section, as in a notebook: a loop runs, stdout has no fileno."""
    options = small(data, train={"steps": 1})
    directory = tmp_path_factory.mktemp("runs") / "mine"

    async def cell():
        words = {"overrides": ["train.steps=2"], "device": "cpu"}
        return segtrain.train(options, output=directory, **words)

    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", request.param)
        run = asyncio.run(cell())
    assert "step 2  mIoU" in said.getvalue()
    return run


@pytest.fixture(scope="module")
def predictor(run):
    return segtrain.Predictor(run.directory, device="cpu")


@pytest.fixture
def image(data):
    return cv2.imread(str(data / "images/val/0.png"))[..., ::-1]


@pytest.fixture
def forked(monkeypatch):
    """`segtrain.train` takes forks for its processes; see preloaded.py."""
    monkeypatch.setattr("subprocess.Popen", PipedFork)


def train_forever(config, output):
    segtrain.train(config, output=output)


def wait_for(is_done, seconds=60):
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_importing_segtrain_imports_nothing_heavy():
    code = "import segtrain, sys; assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = segtrain.Trainer


def test_a_trained_run_is_returned_with_its_curves(run):
    assert (run.name, run.step, run.config.train.steps) == ("mine", 2, 2)
    assert run.best[0] == last(run.directory).step == 2
    assert repr(run).endswith(f"mine', step 2 of 2, best mIoU {run.best[1]:.4f} at step 2)")


@pytest.mark.parametrize("options", [[], BY_WINDOWS], ids=["whole", "windows"])
def test_labels_are_those_of_segtrain_predict(tmp_path, lab, options):
    words = [word for text in options for word in ("--set", text)]
    output, source = tmp_path / "out", "camvid_deeplabv3plus_r34"
    photo = cv2.imread(str(REPOSITORY / "configs/demo.png"))[60:130, 60:160]
    cv2.imwrite(str(tmp_path / "photo.png"), photo)
    command = ("predict", source, tmp_path / "photo.png", "--output", output, "--device", "cpu")
    lab.done(*command, *words)
    expected = cv2.imread(str(output / "labels/photo.png"), cv2.IMREAD_UNCHANGED)
    predictor = segtrain.Predictor(source, device="cpu", settings=options)
    found = predictor(photo[..., ::-1])
    assert (found.dtype, found.shape) == (np.uint8, (70, 100))
    assert len(np.unique(found)) > 2
    np.testing.assert_array_equal(found, expected)
    probabilities = predictor.probabilities(photo[..., ::-1])
    assert (probabilities.shape, probabilities.dtype) == ((11, 70, 100), np.float32)
    np.testing.assert_allclose(probabilities.sum(0), 1, atol=1e-5)
    np.testing.assert_array_equal(probabilities.argmax(0), found)
    assert predictor.classes[:2] == ("Sky", "Building")
    assert len(predictor.palette) == 11


def test_a_large_image_goes_by_windows(predictor, monkeypatch):
    large = np.random.default_rng(0).integers(0, 256, (40, 1100, 3), dtype=np.uint8)
    by_size = predictor._ready.predictor.settings._replace(most_pixels=40_000)
    monkeypatch.setattr(predictor._ready.predictor, "settings", by_size)
    assert by_size.of(large.shape[:2]).mode == "slide"
    probabilities = predictor.probabilities(large)
    np.testing.assert_array_equal(probabilities.argmax(0), predictor(large))


def test_two_threads_get_what_they_ask_for(predictor, image):
    images = [np.roll(image, i, axis=1) for i in range(8)]
    expected = [predictor(one) for one in images]
    with ThreadPoolExecutor(2) as pool:
        for one, other in zip(expected, pool.map(predictor, images), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[..., :2], r"expected an array \(H, W, 3\), got \(56, 72, 2\)"),
        (lambda x: x[:0], r"got \(0, 72, 3\) without a pixel"),
        (lambda x: x[..., 0], r"expected an array \(H, W, 3\), got \(56, 72\)"),
        (lambda x: x[None], r"got \(1, 56, 72, 3\); give the images of a batch one by one"),
        (lambda _: "a.jpg", r"got str a\.jpg; read a file before, as by cv2\.imread"),
        (lambda x: x / np.float32(255), "expected uint8 .* got float32 from 0 to 1"),
        (lambda x: x.astype(np.int64), "expected uint8 .* got int64 from 0 to 255"),
        (lambda x: x > 3, "expected uint8 .* got bool"),
    ],
)
def test_an_image_of_another_form_is_refused(predictor, image, change, message):
    image = image.copy()
    image[0, 0], image[0, 1] = 0, 255
    with pytest.raises(DataError, match=message):
        predictor(change(image))


def test_an_image_or_a_graph_in_place_of_a_model_is_refused(data, tmp_path):
    with pytest.raises(CheckpointError, match=r"0\.png: this is an image; name a run directory"):
        segtrain.Predictor(data / "images/val/0.png")
    (tmp_path / "own.onnx").write_bytes(b"graph")
    with pytest.raises(CheckpointError, match=r"own\.onnx: this is an exported graph; name"):
        segtrain.Predictor(tmp_path / "own.onnx")


def test_values_of_8_bits_in_16_are_warned_of(predictor, image):
    np.testing.assert_array_equal(
        predictor(image.astype(np.uint16) * 257), predictor(np.ascontiguousarray(image))
    )
    with pytest.warns(UserWarning, match="uses at most 8 of them"):
        predictor(image.astype(np.uint16))


def test_masked_pixels_have_no_value_and_any_byte_order_is_taken(predictor, image):
    wide = image.astype(np.uint16) * 257
    np.testing.assert_array_equal(predictor(wide.astype(">u2")), predictor(wide))
    mask = np.zeros(image.shape, bool)
    mask[3, 4, 1] = True
    label = predictor(np.ma.masked_array(image, mask))
    assert label[3, 4] == 255
    assert np.count_nonzero(label == 255) == 1
    filled = image.copy()
    filled[3, 4, 1] = round(predictor._ready.config.data.mean[1])
    np.testing.assert_array_equal(np.where(mask.any(2), 255, predictor(filled)), label)


def test_a_model_of_a_value_range_takes_floats_without_values(predictor, image, monkeypatch):
    config = predictor._ready.config
    data = config.data.model_copy(update={"value_range": (0.0, 255.0)})
    config = config.model_copy(update={"data": data})
    monkeypatch.setattr(predictor, "_ready", predictor._ready._replace(config=config))
    values = image.astype(np.float64)
    np.testing.assert_array_equal(predictor(values), predictor(image))
    values[5, 7, 1] = np.inf
    filled = values.copy()
    filled[5, 7, 1] = config.data.mean[1]
    found, expected = predictor.probabilities(values), predictor.probabilities(filled)
    expected[:, 5, 7] = np.nan
    np.testing.assert_array_equal(found, expected)
    label = predictor(filled)
    label[5, 7] = 255
    np.testing.assert_array_equal(predictor(values), label)
    with pytest.warns(UserWarning, match=r"more than 10% of the samples outside of \[0, 255\]"):
        predictor(values * 100)


def test_scores_that_are_not_finite_are_refused(run, image):
    predictor = segtrain.Predictor(run.directory, device="cpu")
    with torch.no_grad():
        next(predictor._ready.predictor.model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="would mean nothing"):
        predictor(image)


def test_a_failure_of_training_is_raised_in_words_of_python(forked, data, run, tmp_path, capsys):
    options = small(data, data={"train_split": "nowhere"})
    with pytest.raises(DataError, match="nowhere") as failure:
        segtrain.train(write_config(tmp_path / "x.yaml", options), output=tmp_path / "x")
    assert failure.value.exit_code == 3
    assert "segtrain: " not in str(failure.value)
    assert str(failure.value).splitlines()[0] in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^config: optim.lr: .*'fast'"):
        segtrain.train(small(data, optim={"lr": "fast"}), output=tmp_path / "y")
    with pytest.raises(DataError, match=r"^config: data.root: there is no folder"):
        segtrain.train(small(data, data={"root": "nowhere"}), output=tmp_path / "y")
    with pytest.raises(ConfigError, match="\nfrom Python: --resume is resume=True, --output is "):
        segtrain.train(run.directory)
    with pytest.raises(ConfigError, match="output: expected a directory"):
        segtrain.train(settings())
    with pytest.raises(ConfigError, match=r"^argument --nproc: expected an integer"):
        segtrain.train(small(data), output=tmp_path / "y", nproc=-1)
    with pytest.raises(ConfigError, match=r"^overrides: expected a list such as \['optim.lr=1'\]"):
        segtrain.train(small(data), output=tmp_path / "y", overrides="optim.lr=1")
    assert not (tmp_path / "y").exists()


def test_a_run_is_prolonged_as_a_run_of_its_own(forked, run):
    longer = segtrain.train(run.directory, finish=1, device="cpu")
    assert (longer.directory, longer.step) == (run.directory.with_name("mine_finish"), 3)
    assert longer.config.schedule.finish_from == last(run.directory).step == 2
    with pytest.raises(ConfigError, match="mine_finish: holds a run already"):
        segtrain.train(run.directory, finish=1)
    with pytest.raises(ConfigError, match=r"train\.steps: 3 there, 4 now"):
        segtrain.train(run.directory, finish=2, resume=True)


def test_an_interrupt_saves_the_step_and_training_goes_on_from_there(forked, data, tmp_path):
    config = write_config(tmp_path / "x.yaml", small(data, train=FOREVER))
    output = tmp_path / "x"

    def interrupt():
        wait_for(lambda: (output / "metrics.jsonl").exists())
        os.kill(os.getpid(), signal.SIGINT)

    # A shell starts background jobs without one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        segtrain.train(config, output=output, device="cpu")
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert "stopped by SIGINT after step" in (output / "train.log").read_text()
    step = last(output).step
    overrides = [f"train.steps={step + 1}"]
    with pytest.raises(ConfigError, match="started with another config"):
        segtrain.train(config, output=output, overrides=overrides, resume=True)


def test_training_is_saved_and_stops_with_a_process_that_dies(forkserver, data, tmp_path):
    config = write_config(tmp_path / "x.yaml", small(data, train=FOREVER))
    process = forkserver.Process(target=train_forever, args=(config, tmp_path / "x"))
    process.start()
    wait_for(lambda: (tmp_path / "x/metrics.jsonl").exists())
    process.kill()
    process.join()
    wait_for(lambda: (tmp_path / "x/checkpoints/last.pt").exists())
    wait_for(lambda: not (tmp_path / "x/.lock").exists())
    assert "stopped by SIGTERM" in (tmp_path / "x/train.log").read_text()
