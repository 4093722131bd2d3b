"""`segtrain train --fit`: which ways it tries, what it takes, and what it says."""

import argparse
import json
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from experiments import experiment, losses, train, write_config, write_data
from PIL import Image

from segtrain.config import load_config, parse_config
from segtrain.desk.commands import fit
from segtrain.desk.commands.fit import Trial, fitted, ways
from segtrain.errors import EXIT_MEMORY, ConfigError, ExecutionError, MemoryLimitError
from segtrain.inference.settings import InferenceSettings, SettingsBySize
from segtrain.trainer import evaluation

DATA = "data: {layout: folders, root: none, classes: none}\n"
NORM, BLOCKS = ({"model.recompute": level} for level in ("norm", "blocks"))


def virtual(parts):
    return {"train.virtual_ranks": parts}


@pytest.mark.parametrize(
    ("text", "on_cuda", "expected"),
    [
        ("", False, [{}, NORM, BLOCKS]),
        ("model: {recompute: norm}", False, [{}, BLOCKS]),
        ("model: {recompute: blocks}", False, [{}]),
        ("", True, [{}, NORM, BLOCKS, virtual(2), virtual(4), virtual(6)]),
        ("train: {virtual_ranks: 3}", True, [{}, NORM, BLOCKS, virtual(6)]),
    ],
)
def test_ways_go_from_the_config_to_what_needs_less(text, on_cuda, expected):
    config = parse_config(DATA + text, source="c")
    assert list(ways(config, 6, on_cuda=on_cuda, lower=False)) == expected
    lower = [way | {"train.precision": "bfloat16"} for way in expected]
    assert list(ways(config, 6, on_cuda=on_cuda, lower=True)) == expected + lower


def choose(monkeypatch, tmp_path, text, fitting, *, lower=False):
    """What `fitted` returns if only ways with the text `fitting` fit, and all it has tried."""
    config = tmp_path / "c.yaml"
    config.write_text(DATA + text)
    tried = []

    def _try(args, source, overrides, *_):
        tried.append(" ".join(overrides))
        fits = fitting in tried[-1]
        return Trial(2.0 if fits else None, "1 of 2 GiB", "" if fits else "12 GiB of memory")

    monkeypatch.setattr(fit, "_try", _try)
    args = argparse.Namespace(set=["train.steps=1800"], device="cpu", fit_precision=lower)
    return fitted(args, config, load_config(config, args.set), 1), tried


@pytest.mark.parametrize(
    ("text", "fitting", "lower", "chosen"),
    [
        ("", "", False, []),
        ("", "blocks", False, ["model.recompute=blocks"]),
        ("", "bfloat16", True, ["train.precision=bfloat16"]),
        ("model: {backbone: mobilenet_v2}", "blocks", False, ["model.recompute=blocks"]),
    ],
)
def test_the_first_way_that_fits_is_taken(
    monkeypatch, tmp_path, capsys, text, fitting, lower, chosen
):
    found, tried = choose(monkeypatch, tmp_path, text, fitting, lower=lower)
    assert found == chosen
    assert tried[-1] == " ".join(chosen)
    assert not any("norm" in one for one in tried if "mobilenet" in text)  # refused by the config
    said = capsys.readouterr().err
    assert "1,800 steps take 1:00:00, evaluations apart" in said
    assert said.count("does not fit: 12 GiB") == len(tried) - 1
    assert ("gives another result" in said) is lower


def test_a_batch_that_fits_in_no_way_is_refused(monkeypatch, tmp_path):
    wanted = r"train\.batch_size 16 and crops of 512x512.* 12 GiB of memory; .*--fit-precision"
    with pytest.raises(MemoryLimitError, match=wanted):
        choose(monkeypatch, tmp_path, "", "nothing")
    with pytest.raises(ConfigError, match=r"--fit: .* train\.parallel: hogwild"):
        choose(monkeypatch, tmp_path, "train: {parallel: hogwild}", "")


TEN_GIB = 10 << 30
HOST = "9.10 of 10.00 GiB of host memory"


@pytest.mark.parametrize(
    ("code", "found", "expected"),
    [
        (0, (9, None), Trial(0.5, "9.00 of 10.00 GiB of host memory", "")),
        (0, (9.1, None), Trial(0.5, HOST, f"{HOST}, and 10% must stay free")),
        (0, (2, 7), Trial(0.5, "7.00 GiB of the GPU and 2.00 of 10.00 GiB of host memory", "")),
        (EXIT_MEMORY, None, Trial(None, "", "out of memory: cpu has 1 GiB")),
        (-signal.SIGKILL, None, Trial(None, "", "ended by SIGKILL")),
        (139, None, Trial(None, "", "out of memory: cpu has 1 GiB")),  # a crash at the end
    ],
)
def test_a_trial_tells_what_was_measured_or_why_it_does_not_fit(monkeypatch, code, found, expected):
    said = b"segtrain: out of memory: cpu has 1 GiB; use\nsegtrain: rank 0 failed\n"

    def run(command, stderr, _):
        assert command[-4:] == ["--set", "a=1", "--set", "b=2"]
        stderr.write(said if code > 0 else b"")
        if found:
            host, device = (number and int(number * 2**30) for number in found)
            fields = {"step_s": 0.5, "host_bytes": host, "device_bytes": device}
            Path(command[command.index("--json") + 1]).write_text(json.dumps(fields))
        return code

    monkeypatch.setattr(fit, "_run", run)
    arguments = argparse.Namespace(set=["a=1"]), Path("c.yaml"), ["b=2"], 2, "cpu", TEN_GIB
    assert fit._try(*arguments) == expected
    code, said = 3, said.replace(b"out of memory", b"broken")
    with pytest.raises(ExecutionError, match=r"bench c\.yaml .* failed:\n.*\n.*rank 0 failed"):
        fit._try(*arguments)


def limited_options(data, size=193, **train):
    return experiment(
        data,
        augment={"crop_size": [size, size]},
        model={"backbone": "mobilenet_v2", "dropout": 0.1},
        train={"steps": 1, "batch_size": 8, "precision": "float32"} | train,
    )


def limited_training(config, directory, more_mb):
    """What training says that may have so many MB of data more than the process has."""
    now = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_DATA, (now * 1024 + (more_mb << 20),) * 2)
    try:
        train(config, directory)
    except MemoryLimitError as error:
        return error.exit_code, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("more_mb", "said"),
    [
        (300, r"8 crops of 193x193 take at least [\d.]+ GiB of memory, and cpu has [\d.]+ GiB"),
        (None, "out of memory: cpu has .* segtrain train --fit"),
    ],
)
def test_out_of_memory_is_one_message(run_ranks, monkeypatch, tmp_path, data, more_mb, said):
    """Refused by the estimate before the first step; without it, named in the step."""
    config = write_config(tmp_path / "c.yaml", limited_options(data))
    limited = limited_training if more_mb else unforeseen
    (found,) = run_ranks(1, limited, config, tmp_path / "run", more_mb or 300)
    assert found[0] == EXIT_MEMORY
    assert re.search(said, found[1])


def unforeseen(config, directory, more_mb):
    from segtrain.trainer import preflight

    preflight.training_finding = lambda *_: None
    return limited_training(config, directory, more_mb)


def segtrain(*words, limit=None):
    command = [sys.executable, "-m", "segtrain", *map(str, words)]
    lower = None
    if limit is not None:
        lower = lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # noqa: E731
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=lower)


@pytest.mark.slow
def test_a_run_that_did_not_fit_trains_with_the_same_losses(tmp_path, data):
    """Under a limit: refused as it is; by --fit with recomputation, which the run keeps."""
    options = limited_options(data, size=257, steps=3)
    config = write_config(tmp_path / "c.yaml", options)
    limit, small = 1900 << 20, tmp_path / "small"
    assert segtrain("train", config, "--output", tmp_path / "whole").returncode == 0
    refused = segtrain("train", config, "--output", tmp_path / "no", limit=limit)
    assert refused.returncode == EXIT_MEMORY
    assert "--fit" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = segtrain("train", config, "--output", small, "--fit", "--until", "2", limit=limit)
    assert done.returncode == 0, done.stderr
    assert "fit        model.recompute blocks: " in done.stderr
    assert load_config(small / "config.yaml").model.recompute == "blocks"
    again = segtrain("train", config, "--output", small, "--fit", "--resume", limit=limit)
    assert "the run goes on as it was started: model.recompute blocks" in again.stderr
    assert losses(small) == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def test_a_trial_evaluates_the_images_that_take_most_memory(monkeypatch):
    """Of those that go as a whole, and of all; on every rank, as many as share a batch."""
    config = parse_config(DATA + "eval: {batch_size: 2, mode: whole}", source="c")
    most = SettingsBySize.that_fit(InferenceSettings.from_config(config), 40 * 60)
    monkeypatch.setattr(evaluation, "_predictor", lambda _: argparse.Namespace(settings=most))
    seen = []
    monkeypatch.setattr(evaluation, "_evaluated", lambda _, samples: seen.extend(samples))
    sizes = [(30, 40), (40, 60), (90, 90), (41, 60)]

    class Images(list):
        classes = argparse.Namespace(num_classes=3)

        def size(self, index):
            return sizes[index]

    state = argparse.Namespace(eval_model=None, passes=argparse.Namespace(at_once=1))
    run = argparse.Namespace(config=config, device="cpu", state=state)
    evaluation.evaluate_largest(run, Images("abcd"))
    assert seen == ["b", "b", "c", "c"]


@pytest.mark.slow
def test_a_run_that_fits_is_not_ended_by_its_first_evaluation(tmp_path):
    """An image that would need more than the steps did goes by windows."""
    write_data(tmp_path)
    for kind, channels in (("images", (3,)), ("labels", ())):
        path = min((tmp_path / kind / "val").rglob("*.png"))
        Image.fromarray(np.zeros((850, 850, *channels), np.uint8)).save(path)
    config = write_config(tmp_path / "c.yaml", limited_options(tmp_path, size=129, batch_size=2))
    done = segtrain("train", config, "--output", tmp_path / "run", "--fit", limit=1900 << 20)
    assert done.returncode == 0, done.stderr
    assert "1 image did not fit into memory as a whole" in done.stdout
