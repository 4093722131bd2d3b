"""What the checks of tools/gpu_check.py ask a CUDA device, with stand-ins for all that needs it."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_checks import (
    compiled,
    demonstration,
    deterministic,
    evaluation,
    half,
    layers,
    norm,
    pack,
    steps,
    throughput,
    workers,
)
from gpu_checks.findings import BAD, GOOD, MEASURED, NEEDS_CUDA, Findings

from segtrain import cli
from segtrain.config import load_config

CUDA = torch.device("cuda", 0)


@pytest.fixture
def findings(tmp_path):
    found = Findings(tmp_path / "findings.json")
    yield found
    assert NEEDS_CUDA not in [line.verdict for line in found.lines]


class Commands:
    """Takes the place of `segtrain`: parses each command and its options, and runs `act` on it."""

    def __init__(self, act):
        self.act = act
        self.seen = []

    def __call__(self, *words):
        args = cli._parser().parse_args([str(word) for word in words])
        if hasattr(args, "config"):
            load_config(Path(args.config), args.set)
        self.seen.append(args)
        self.act(words[0], args)


@pytest.fixture
def commands(monkeypatch):
    """`commands(module, act)` replaces the commands of a check."""

    def use(module, act):
        stub = Commands(act)
        monkeypatch.setattr(module, "segtrain", stub)
        monkeypatch.setattr(module, "draw_scenes", lambda folder, *_: folder / "scenes")
        return stub

    return use


def write_metrics(run, loss=3.0, score=0.71):
    run.mkdir()
    lines = [{"train/loss": loss, "time/step_s": 0.1}] * 20 + [{"eval/mIoU": score}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def verdicts(findings):
    return [line.verdict for line in findings.lines]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({}, [GOOD, GOOD, GOOD]),
        ({"loss": 3.001}, [BAD, GOOD, GOOD]),
        ({"score": 0.6}, [GOOD, GOOD, BAD]),
    ],
)
def test_the_demo_runs_whole_and_in_virtual_ranks(findings, commands, tmp_path, second, expected):
    results = iter([{}, second])
    stub = commands(demonstration, lambda _, args: write_metrics(args.output, **next(results)))
    demonstration.check(findings, CUDA, tmp_path)
    assert verdicts(findings) == expected
    assert [args.device for args in stub.seen] == ["cuda"] * 2
    assert "train.virtual_ranks=2" in stub.seen[1].set


@pytest.mark.parametrize(("resumed", "verdict"), [("a" * 64, GOOD), ("b" * 64, BAD)])
def test_a_killed_run_is_compared_bit_by_bit(
    findings, commands, monkeypatch, tmp_path, resumed, verdict
):
    stub = commands(deterministic, lambda _, args: args.resume or write_metrics(args.output))
    killed = []

    def kill_at(arguments, run, step):
        args = cli._parser().parse_args([str(word) for word in arguments])
        killed.append((args.output, step))
        write_metrics(args.output)

    monkeypatch.setattr(deterministic, "kill_at", kill_at)
    digests = {"killed": resumed, "free_again": "c" * 64}
    monkeypatch.setattr(deterministic, "fingerprint", lambda run: digests.get(run.name, "a" * 64))
    deterministic.check(findings, CUDA, tmp_path)
    assert verdicts(findings) == [verdict, MEASURED, MEASURED]
    assert killed == [(tmp_path / "killed", 40)]
    chosen = ["train.deterministic=true" in args.set for args in stub.seen]
    assert chosen == [True, True, False, False]
    assert findings.lines[2].found == "1.00"


def write_scores(kind, args, moved):
    if kind == "eval":
        matrix = [[50_000, 0], [moved if args.device == "cuda" else 0, 50_000]]
        args.json.write_text(json.dumps({"confusion_matrix": matrix}))
    if kind == "predict":
        path = args.output / evaluation.LABELS
        path.mkdir(parents=True)
        image = torch.zeros(100, 100, dtype=torch.uint8).numpy()
        evaluation.cv2.imwrite(str(path / "a.png"), image)


@pytest.mark.parametrize(("moved", "verdict"), [(2, GOOD), (100, BAD)])
def test_evaluation_is_compared_with_the_cpu(
    findings, commands, monkeypatch, tmp_path, moved, verdict
):
    monkeypatch.setattr(evaluation, "_count", lambda *_: None)
    monkeypatch.setattr(evaluation.importlib.util, "find_spec", lambda name: name != "onnx" or None)
    stub = commands(evaluation, lambda kind, args: write_scores(kind, args, moved))
    evaluation.check(findings, CUDA, tmp_path)
    assert verdicts(findings) == [verdict, GOOD, GOOD, GOOD, "not measured"]
    assert {args.device for args in stub.seen if hasattr(args, "device")} == {"cpu", "cuda"}


def test_an_export_that_fails_is_a_finding(findings, commands, tmp_path):
    def refuse(*_):
        raise RuntimeError("segtrain export ended with 1")

    commands(evaluation, refuse)
    evaluation._export(findings, tmp_path, tmp_path)
    assert set(verdicts(findings)) <= {BAD, "not measured"}
    assert findings.lines[0].found == "segtrain export ended with 1; see the output"


def test_the_wait_for_data_is_asked_of_files_and_of_a_pack(findings, commands, tmp_path):
    bench = {"data_s": 0.001, "step_s": 0.1, "sample_s": 0.004, "parts_s": {}, "limit": "none"}

    def act(kind, args):
        if kind == "bench":
            args.json.write_text(json.dumps(bench))

    stub = commands(pack, act)
    pack.check(findings, CUDA, tmp_path)
    assert verdicts(findings) == [MEASURED] * 3 + [GOOD] + [MEASURED] * 2
    packed = [f"data.pack={tmp_path / 'pack'}" in args.set for args in stub.seen]
    assert packed == [False, False, True]
    assert stub.seen[0].output == tmp_path / "pack"


def test_ten_workers_are_killed(findings, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "draw_scenes", lambda folder, *_: folder)
    numbers = []
    monkeypatch.setattr(workers, "_one_run", lambda *args: numbers.append(args[-1]))
    workers.check(findings, CUDA, tmp_path)
    assert numbers == list(range(10))


def test_the_layer_is_asked_in_every_type_and_layout(findings, monkeypatch, tmp_path):
    monkeypatch.setattr(norm, "one_rank", lambda _: nullcontext())
    asked = []
    monkeypatch.setattr(norm, "largest_error", lambda *args: asked.append(args) or 1e-7)
    monkeypatch.setattr(norm, "variance_error", lambda _, ratio: 2e-4 if ratio == 1e4 else 1e-6)
    monkeypatch.setattr(norm, "run_tests", lambda findings, file: asked.append(file))
    monkeypatch.setattr(norm.importlib.util, "find_spec", lambda _: object())
    norm.check(findings, CUDA, tmp_path)
    assert verdicts(findings) == [GOOD] * 9
    assert len(asked) == 7
    monkeypatch.setattr(norm.importlib.util, "find_spec", lambda _: None)
    norm.check(findings, CUDA, tmp_path)
    assert findings.lines[-1].found == "pytest is not installed"


@pytest.mark.parametrize(
    ("check", "size", "backbone"),
    [(steps.check_large, 713, "resnet50"), (steps.check_small, 257, "resnet18")],
)
def test_steps_are_asked_in_three_precisions(
    findings, monkeypatch, tmp_path, check, size, backbone
):
    monkeypatch.setattr(steps, "one_rank", lambda _: nullcontext())
    asked = []
    monkeypatch.setattr(steps, "_one_precision", lambda *args: asked.append(args[2]))
    check(findings, CUDA, tmp_path)
    assert [one.train.precision for one in asked] == ["bfloat16", "float32", "float16"]
    assert {one.augment.crop_size for one in asked} == {(size, size)}
    assert {one.model.backbone for one in asked} == {backbone}


def test_throughput_is_that_of_the_issue(findings, monkeypatch, tmp_path):
    monkeypatch.setattr(throughput, "one_rank", lambda _: nullcontext())
    monkeypatch.setattr(throughput, "matmul_peak", lambda *_: 1e15)
    monkeypatch.setattr(throughput, "_free", lambda _: None)
    asked, configs = [], []
    monkeypatch.setattr(throughput, "training_flops", lambda one, _: configs.append(one) or 1e12)
    monkeypatch.setattr(throughput, "_one_batch", lambda *args: asked.append(args[3:]))
    throughput.check(findings, CUDA, tmp_path)
    assert asked == [(images, 1e-3) for images in (2, 4, 8, 16)]
    (config,) = configs
    assert (config.augment.crop_size, config.model.backbone) == ((512, 1024), "resnet50")
    assert (config.model.arch, config.train.precision) == ("pspnet", "bfloat16")


def test_all_shapes_of_the_layer_are_timed(findings, monkeypatch, tmp_path):
    monkeypatch.setattr(layers, "one_rank", lambda _: nullcontext())
    asked = []
    for name in ("_one_shape", "_prototype_is_right", "_kernels"):
        monkeypatch.setattr(layers, name, lambda *_, name=name: asked.append(name))
    layers.check(findings, CUDA, tmp_path)
    one_type = ["_one_shape"] * len(layers.TABLE_SHAPES) + ["_prototype_is_right", "_kernels"]
    assert asked == 2 * one_type


def test_thirty_steps_of_float16(findings, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(half, "Training", lambda config, _: asked.append(config))
    monkeypatch.setattr(half, "train", lambda _, num: ([3.0, *[2.0] * (num - 1)], 3, 8192.0))
    half.check(findings, CUDA, tmp_path)
    assert verdicts(findings) == [GOOD] * 3
    assert findings.lines[0].found == "30"
    assert asked[0].train.precision == "float16"


def test_compiling_is_asked_in_two_precisions(findings, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(compiled, "Training", lambda config, _: SimpleNamespace(train=config.train))
    monkeypatch.setattr(compiled, "_compare", lambda *args: asked.append(args[2:]))
    compiled.check(findings, CUDA, tmp_path)
    assert [precision for _, precision in asked] == ["bfloat16", "float32"]
    for trainings, precision in asked:
        assert {one.train.precision for one in trainings.values()} == {precision}
        assert [one.train.compile for one in trainings.values()] == [False, True]
