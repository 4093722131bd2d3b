"""The checks of tools/gpu_check.py: what they measure, and what they say of a device.

There is none here. What asks CUDA runs with stand-ins for torch's functions, by their
documentation.
"""

import math
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import (
    compiled,
    evaluation,
    half,
    layers,
    norm,
    pack,
    ranks,
    steps,
    surroundings,
    throughput,
    watching,
    workers,
)
from gpu_checks.findings import BAD, GOOD, MEASURED, NEEDS_CUDA, Findings
from gpu_checks.reference import ReferenceLoop
from gpu_checks.stepping import (
    NUM_CLASSES,
    Training,
    as_among_two,
    config_of,
    greatest_difference,
    one_rank,
    random_batch,
)
from torch import nn

from segtrain.distributed import collectives as dist

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TINY = {"backbone": "mobilenet_v2", "head_channels": 8, "aux_channels": 8, "output_stride": 16}
WAIT = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:149.)"


@pytest.fixture
def findings(tmp_path):
    return Findings(tmp_path / "findings.json")


@pytest.fixture
def modes(monkeypatch):
    """The modes that torch's debugging of waits was set to."""
    found = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


def wait():
    warnings.warn(WAIT, stacklevel=2)


def test_waits_of_the_host_are_counted_by_place(modes):
    def call():
        for _ in range(2):
            wait()
        warnings.warn("something else", stacklevel=1)
        wait()

    line = call.__code__.co_firstlineno
    found = watching.host_waits(call)
    assert found == {
        f"tests/test_gpu_checks.py:{line + 2}": 2,
        f"tests/test_gpu_checks.py:{line + 4}": 1,
    }
    assert modes == ["warn", "default"]
    assert watching.in_words(found) == (
        f"tests/test_gpu_checks.py:{line + 2} (2), tests/test_gpu_checks.py:{line + 4} (1)"
    )


def test_the_first_wait_is_where_the_error_was_raised(modes):
    def refused():
        raise RuntimeError(WAIT)

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    line = refused.__code__.co_firstlineno
    assert watching.first_wait(refused) == f"tests/test_gpu_checks.py:{line + 1}"
    assert watching.first_wait(lambda: None) is None
    with pytest.raises(RuntimeError, match="illegal memory access"):
        watching.first_wait(broken)
    assert modes == ["error", "default"] * 3


def event(name, device=torch.autograd.DeviceType.CUDA, *, annotation=False):
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation)


def test_work_is_kernels_and_copies_of_the_device(modes, monkeypatch):
    names = ["gemm", "Memcpy DtoD (Device -> Device)", "Memset (Device)", "elementwise", "reduce"]
    seen = [event(name) for name in names]
    seen += [event("forward", annotation=True), event("aten::add", torch.autograd.DeviceType.CPU)]

    class Profiler:
        def __init__(self, activities):
            assert torch.profiler.ProfilerActivity.CUDA in activities

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def events(self):
            return seen

    monkeypatch.setattr(watching, "profile", Profiler)
    called = []
    assert watching.work_of(lambda: called.append(1)) == (3, 2)
    assert called == [1]


def test_memory_of_a_call_is_what_it_adds(modes, monkeypatch):
    gib = 2**30
    state = {"now": 3 * gib, "peak": 9 * gib}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: state["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: state["peak"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda: state.update(peak=state["now"])
    )
    assert watching.added_gib(lambda: state.update(peak=5 * gib)) == 2


def test_a_rank_alone_takes_the_way_of_several_and_back():
    with one_rank(CPU):
        with as_among_two():
            assert dist.group_size() == 2
            torch.testing.assert_close(
                dist.all_reduce_sum(torch.tensor([3.0])), torch.tensor([3.0])
            )
        assert dist.group_size() == 1


def test_synchronized_and_local_trainings_are_alike():
    """In float64: how much a step amplifies the rounding of float32 depends on the processor."""
    config = config_of((33, 41), 2, model=TINY, precision="float64")
    with one_rank(CPU):
        found = steps.contenders(config, CPU)
        losses = {name: [one().loss.item() for _ in range(2)] for name, one in found.items()}
    assert greatest_difference(losses[steps.SYNC], losses[steps.LOCAL]) < 1e-9
    assert losses[steps.SYNC] != losses[steps.LOCAL]  # it went another way


def test_batches_have_one_label_a_block_and_all_values():
    images, labels, names = random_batch((35, 50), 3, CPU)[:3]
    assert (images.shape, labels.shape, len(names)) == ((3, 3, 35, 50), (3, 35, 50), 3)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (labels[:, :16, :16] == labels[:, :1, :1]).all()
    assert labels.max() < NUM_CLASSES
    assert (images[:, 0] // 12 == labels).all()


@pytest.mark.parametrize(
    ("values", "difference"),
    [([1.0, 2.2], 0.1), ([1.0, 2.0], 0.0), ([1.0, math.nan], math.inf)],
)
def test_greatest_difference_is_relative(values, difference):
    assert greatest_difference(values, [1.0, 2.0]) == pytest.approx(difference)


def test_the_reference_loop_trains_the_same_model_with_its_own_loss():
    """Three steps, each the update of torch.optim.SGD's documentation, computed here."""
    config = config_of((33, 41), 2, model=TINY | {"dropout": 0.0}, channels_last=False)
    batch = random_batch((33, 41), 2, CPU)
    loop = ReferenceLoop(config, CPU, *batch[:2], num_classes=NUM_CLASSES, amp=False)
    before = torch.backends.cudnn.benchmark
    weights = list(loop.model.parameters())
    momenta = [torch.zeros_like(p) for p in weights]
    for i in range(3):
        wanted = [p.detach().clone() for p in weights]
        lr = config.train.lr * (1 - i / config.train.steps) ** 0.9
        loss = loop()
        if i == 0:
            step = Training(config, CPU, nn.BatchNorm2d)()
            ours = step.loss.item() + 0.5 * step.aux_loss.item()
            assert loss == pytest.approx(ours, rel=1e-5)
        for p, old, momentum in zip(weights, wanted, momenta, strict=True):
            momentum.mul_(config.train.momentum).add_(p.grad + config.train.weight_decay * old)
            torch.testing.assert_close(p.detach(), old - lr * momentum, rtol=1e-6, atol=1e-9)
        assert any(
            (p.detach() - old).abs().max() > 1e-5 for p, old in zip(weights, wanted, strict=True)
        )
    assert torch.backends.cudnn.benchmark == before


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # the first steps overflow
def test_the_reference_loop_scales_the_loss_of_float16(monkeypatch):
    config = config_of((17, 17), 2, model=TINY)
    batch = random_batch((17, 17), 2, CPU)
    loop = ReferenceLoop(config, CPU, *batch[:2], num_classes=NUM_CLASSES, amp=True)
    seen = []
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(
        F, "cross_entropy", lambda x, *a, **k: seen.append(x.dtype) or cross_entropy(x, *a, **k)
    )
    assert math.isfinite(loop())
    assert loop.scaler.get_scale() > 1
    assert seen


def as_documented(monkeypatch):
    """Stand-ins for the CUDA kernels of batch norm, by native_functions.yaml and their formulas."""

    def along(v):
        return v.view(1, -1, 1, 1)

    def stats(x, eps):
        var, mean = torch.var_mean(x.float(), dim=(0, 2, 3), correction=0)
        return mean, (var + eps).rsqrt()

    def elemt(x, weight, bias, mean, inv_std, eps):
        y = (x.float() - along(mean)) * along(inv_std) * along(weight) + along(bias)
        return y.to(x.dtype)

    def reduce(grad, x, mean, inv_std, weight, input_g, weight_g, bias_g):
        total = grad.float().sum((0, 2, 3))
        total_xmu = (grad.float() * (x.float() - along(mean))).sum((0, 2, 3))
        return total, total_xmu, total_xmu * inv_std, total

    def backward_elemt(grad, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, count):
        assert count.dtype == torch.int32
        n = count.sum()
        xmu = (x.float() - along(mean)) * along(inv_std**2) * along(sum_dy_xmu / n)
        grad_x = (grad.float() - along(sum_dy / n) - xmu) * along(inv_std * weight)
        return grad_x.to(x.dtype)

    monkeypatch.setattr(torch, "batch_norm_stats", stats)
    monkeypatch.setattr(torch, "batch_norm_elemt", elemt)
    monkeypatch.setattr(torch, "batch_norm_backward_reduce", reduce)
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", backward_elemt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_prototype_is_batch_norm(findings, monkeypatch, dtype):
    as_documented(monkeypatch)
    kinds = {layers.LOCAL: layers.LocalBatchNorm2d, layers.PROTOTYPE: layers.ElementwiseBatchNorm2d}
    monkeypatch.setattr(
        layers, "layers", lambda channels, _: {name: kind(channels) for name, kind in kinds.items()}
    )
    with one_rank(CPU):
        layers._prototype_is_right(findings, CPU, dtype)
    assert [line.verdict for line in findings.lines] == [GOOD]


def test_kernels_of_the_layer_are_judged(findings, monkeypatch):
    counts = {layers.LOCAL: (2, 1), layers.OWN: (28, 8)}
    monkeypatch.setattr(layers, "layers", lambda *_: {name: name for name in counts})
    monkeypatch.setattr(layers, "count_passes", lambda name, *_: counts[name])
    layers._kernels(findings, CPU, (1, 2, 3, 4), torch.float32)
    counts[layers.OWN] = (10, 8)
    layers._kernels(findings, CPU, (1, 2, 3, 4), torch.float32)
    counts[layers.OWN] = (0, 0)
    layers._kernels(findings, CPU, (1, 2, 3, 4), torch.float32)
    assert [line.verdict for line in findings.lines[1::2]] == [BAD, GOOD, "not measured"]
    assert findings.lines[1].found == "28, 8"


def test_passes_of_a_layer_are_counted_apart(monkeypatch):
    calls = []
    monkeypatch.setattr(
        layers, "work_of", lambda call: calls.append(call()) or watching.Work(3 * len(calls), 1)
    )
    x = torch.rand(2, 3, 4, 5, requires_grad=True)
    assert layers.count_passes(nn.BatchNorm2d(3), x, torch.ones(2, 3, 4, 5)) == (4, 7)
    assert [one.shape for one in calls[1]] == [x.shape, (3,), (3,)]


def test_running_statistics_are_no_part_of_a_layers_count(monkeypatch):
    def call_once(call):
        call()
        return watching.Work(1, 0)

    monkeypatch.setattr(layers, "work_of", call_once)
    layer = layers.SyncBatchNorm2d(3)
    with one_rank(CPU):
        layers.count_passes(
            layer, torch.rand(2, 3, 4, 5, requires_grad=True), torch.ones(2, 3, 4, 5)
        )
    assert layer.num_batches_tracked == 0


def stub_contenders(monkeypatch, module, names, times):
    monkeypatch.setattr(module, "contenders", lambda *_: {name: name for name in names})
    monkeypatch.setattr(
        module, "measure", lambda contenders, **_: {n: times[n] for n in contenders}
    )
    monkeypatch.setattr(module, "added_gib", lambda _: 1.5)


STEP_MS = {steps.SYNC: [10.0, 12.0], steps.LOCAL: [10.0, 10.0], steps.TORCH: [20.0, 30.0]}


def test_steps_on_a_device_are_judged_by_their_waits(findings, monkeypatch):
    stub_contenders(monkeypatch, steps, STEP_MS, STEP_MS)
    waits = {steps.SYNC: {}, steps.LOCAL: {}, steps.TORCH: {"nn/_functions.py:90": 59}}
    monkeypatch.setattr(steps, "work_of", lambda _: watching.Work(700, 20))
    monkeypatch.setattr(steps, "host_waits", lambda name: Counter(waits[name]))
    monkeypatch.setattr(steps, "first_wait", lambda name: next(iter(waits[name]), None))
    config = config_of((33, 41), 2, model=TINY)
    steps._one_precision(findings, CUDA, config, "a case")
    assert [line.verdict for line in findings.lines] == [MEASURED, GOOD, *[MEASURED] * 4]
    assert findings.lines[0].found == (
        "11.0 ms, 1.10 [1.00, 1.20] of nn.BatchNorm2d; 700 kernels, 20 copies; 1.50 GiB"
    )
    assert findings.lines[5].found == "59: nn/_functions.py:90 (59); the first: nn/_functions.py:90"
    waits[steps.SYNC] = {"training/step_sync.py:69": 1}
    steps._one_precision(findings, CUDA, config, "a case")
    assert findings.lines[7].verdict == BAD


def test_memory_that_is_too_small_ends_one_precision_only(findings, monkeypatch):
    def refuse(config, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(steps, "contenders", refuse)
    steps._all_precisions(findings, CPU, (33, 41), 2, TINY)
    assert [line.found for line in findings.lines] == ["out of memory: CUDA out of memory"] * 3


@pytest.mark.parametrize(
    ("own_ms", "sync_ms", "verdicts"),
    # 2 images of 1 TFLOP at a peak of 1e14: 20 ms.
    [
        (40.0, 41.0, {"of the peak": GOOD, "synchronized": GOOD, "loop /": GOOD}),
        (60.0, 66.0, {"of the peak": BAD, "synchronized": BAD, "loop /": BAD}),
    ],
)
def test_throughput_on_a_device_is_judged(findings, monkeypatch, own_ms, sync_ms, verdicts):
    times = {steps.SYNC: [sync_ms], steps.LOCAL: [own_ms], steps.TORCH: [90.0]}
    stub_contenders(monkeypatch, throughput, STEP_MS, times)
    monkeypatch.setattr(throughput, "judge_waits", lambda *_: None)
    monkeypatch.setattr(throughput, "_free", lambda _: None)
    monkeypatch.setattr(throughput, "_reference_ms", lambda *_: 100.0)
    throughput._one_batch(findings, CUDA, throughput.CPU_SIZES, 2, 0.01)
    judged = {line.what: line for line in findings.lines if line.verdict in (GOOD, BAD)}
    assert len(judged) == 3
    for part, verdict in verdicts.items():
        assert [line.verdict for what, line in judged.items() if part in what] == [verdict]
    share = 20 / sync_ms
    wanted = f"{2e3 / sync_ms:.1f} images/s, {sync_ms:.1f} ms, {share:.0%} of the peak, 1.5 GiB"
    assert findings.lines[0].found == wanted


def test_a_batch_that_does_not_fit_is_said_to_be_unmeasured(findings, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(throughput, "contenders", refuse)
    monkeypatch.setattr(throughput, "ReferenceLoop", refuse)
    throughput._one_batch(findings, CPU, throughput.CPU_SIZES, 2, 0.01)
    assert [line.verdict for line in findings.lines] == ["not measured"] * 2


def test_throughput_on_a_cpu_promises_nothing(findings, monkeypatch, tmp_path):
    sizes = throughput.Sizes(TINY, (33, 41), (2,), 1, 1)
    monkeypatch.setattr(throughput, "CPU_SIZES", sizes)
    monkeypatch.setattr(throughput, "matmul_peak", lambda *_: 1e11)
    throughput.check(findings, CPU, tmp_path)
    verdicts = [line.verdict for line in findings.lines]
    assert set(verdicts) == {MEASURED, NEEDS_CUDA, "not measured"}
    assert {"batch 2: of the peak", "batch 2, torchvision's loop"} <= {
        line.what for line in findings.lines
    }


def test_layers_on_a_cpu(findings, monkeypatch, tmp_path):
    monkeypatch.setattr(
        layers, "measure", lambda calls, **_: {n: [c() and 1.0] for n, c in calls.items()}
    )
    layers.check(findings, CPU, tmp_path)
    assert findings.lines[0].found == "F.batch_norm 1.000 (1.00); segtrain 1.000 (1.00)"
    assert findings.lines[-1].verdict == NEEDS_CUDA


def test_steps_of_float16_that_overflow_are_counted():
    class Scaler:
        scales = iter([8.0, 4.0, 4.0, 4.0, 4.0, 2.0, 2.0])

        def get_scale(self):
            return next(self.scales)

    losses = iter([3.0, 2.0, 1.0])

    class Stub:
        state = SimpleNamespace(scaler=Scaler())

        def __call__(self):
            return SimpleNamespace(loss=torch.tensor(next(losses)))

    assert half.train(Stub(), 3) == ([3.0, 2.0, 1.0], 2, 2.0)


@pytest.mark.parametrize(
    ("losses", "skipped", "verdicts"),
    [
        ([3.0, 2.5, 2.0], 2, [GOOD, GOOD, GOOD]),
        ([3.0, math.nan, 2.0], 2, [BAD, GOOD, GOOD]),
        ([3.0, 3.1, 3.2], 2, [GOOD, BAD, GOOD]),
        ([3.0, 2.5, 2.0], 11, [GOOD, GOOD, BAD]),
    ],
)
def test_float16_is_judged(findings, monkeypatch, tmp_path, losses, skipped, verdicts):
    values = [*losses[:2], *losses[2:] * 13]
    monkeypatch.setattr(half, "train", lambda *_: (values, skipped, 64.0))
    half.check(findings, CPU, tmp_path)
    assert [line.verdict for line in findings.lines] == verdicts


def test_a_compiled_training_must_be_equal_and_one_graph(findings, monkeypatch):
    monkeypatch.setattr(compiled, "measure", lambda runs, **_: {name: [2.0, 1.0] for name in runs})

    def training(*losses, graphs=0):
        values = iter(losses)

        def step():
            compiled.counters["stats"]["unique_graphs"] += graphs
            return SimpleNamespace(loss=torch.tensor(next(values)))

        return step

    eager = [3.0, 2.0, 1.0]
    runs = {"eager": training(*eager), "compiled": training(3.0, 2.0, 1.1, graphs=1)}
    compiled._compare(findings, CPU, runs, "float32")
    assert [line.verdict for line in findings.lines] == [BAD, MEASURED, BAD]
    assert findings.lines[2].found == "3"
    runs = {"eager": training(*eager), "compiled": training(*eager)}
    monkeypatch.setattr(compiled, "counters", Counted())
    compiled._compare(findings, CPU, runs, "float32")
    assert [line.verdict for line in findings.lines[3:]] == [GOOD, MEASURED, GOOD]


class Counted(dict):
    """Counters of torch where one graph was compiled."""

    def __init__(self):
        super().__init__(stats={"unique_graphs": 1})

    def clear(self):
        pass


JUNIT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>
{more}</testsuite></testsuites>"""
FAILURE = '<testcase name="c"><failure message="no match&#10;more"/></testcase>'
ERROR = '<testcase name="d"><error message="setup"/></testcase>'


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ("", [(GOOD, "1 passed, 0 failed, 1 skipped")]),
        (
            FAILURE + ERROR,
            [(BAD, "1 passed, 2 failed, 1 skipped"), (BAD, "no match"), (BAD, "setup")],
        ),
    ],
)
def test_the_tests_of_the_layer_are_counted(findings, monkeypatch, tmp_path, more, lines):
    def pytest_stub(command, cwd, env):
        assert env["SEGTRAIN_CUDA_TESTS"] == "1"
        assert (norm._ROOT / command[-1]).exists()
        (tmp_path / "norm.xml").write_text(JUNIT.format(more=more))

    monkeypatch.setattr(norm.subprocess, "run", pytest_stub)
    norm.run_tests(findings, tmp_path / "norm.xml")
    assert [(line.verdict, line.found) for line in findings.lines] == lines


def test_a_wrong_layer_is_seen(monkeypatch):
    class Wrong(norm.SyncBatchNorm2d):
        def forward(self, x):
            return super().forward(x) * 1.001

    monkeypatch.setattr(norm, "SyncBatchNorm2d", Wrong)
    with one_rank(CPU), as_among_two():
        assert (
            norm.largest_error(CPU, torch.float32, torch.channels_last) > norm._ATOL[torch.float32]
        )


def test_ranks_that_disagree_are_an_error(monkeypatch):
    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, rank, *_):
            return SimpleNamespace(result=lambda: ([1.0 + rank], [2.0]))

    monkeypatch.setattr(ranks, "ProcessPoolExecutor", Pool)
    assert ranks.on_ranks(1, "cpu") == ([1.0], [2.0])
    with pytest.raises(RuntimeError, match="the 2 ranks disagree"):
        ranks.on_ranks(2, "cpu")


@pytest.mark.parametrize(("two", "verdict"), [(1.0 + 1e-12, GOOD), (1.0 + 1e-6, BAD)])
def test_numbers_of_ranks_are_compared(findings, monkeypatch, tmp_path, two, verdict):
    monkeypatch.setattr(ranks, "on_ranks", lambda num, _: ([1.0 if num != 2 else two], [1.0]))
    ranks.check(findings, CUDA, tmp_path)
    assert [line.verdict for line in findings.lines] == [verdict, GOOD, GOOD, GOOD]


@pytest.mark.parametrize(("data_s", "verdict"), [(0.001, GOOD), (0.01, BAD)])
def test_the_wait_for_a_pack_is_judged_on_a_device(findings, data_s, verdict):
    bench = {"data_s": data_s, "step_s": 0.1, "sample_s": 0.004, "parts_s": {"data": 0.001}}
    bench |= {"limit": "arithmetic"}
    pack._report(findings, "a pack", bench, is_cuda=True)
    assert findings.lines[0].verdict == verdict
    assert findings.lines[0].found == f"{data_s / 0.1:.1%} of 100 ms; a sample takes 4.0 ms"


def write_maps(folder, kind, value):
    path = folder / f"pred_{kind}" / evaluation.LABELS
    path.mkdir(parents=True)
    image = torch.full((4, 5), 7, dtype=torch.uint8).numpy()
    image[0, 0] = value
    evaluation.cv2.imwrite(str(path / "a.png"), image)


def test_label_maps_are_compared_pixel_by_pixel(tmp_path):
    write_maps(tmp_path, "cpu", 7)
    with pytest.raises(RuntimeError, match="1 and 0 label maps"):
        evaluation.different_pixels(tmp_path)
    write_maps(tmp_path, "cuda", 9)
    assert evaluation.different_pixels(tmp_path) == (1, 20)


@pytest.mark.parametrize(("moved", "verdict"), [(1, GOOD), (3, BAD)])
def test_few_pixels_may_differ_from_the_cpu(findings, moved, verdict):
    evaluation._judge(findings, "a", moved, 20_000)
    assert findings.lines[0].verdict == verdict


def test_a_run_that_ends_before_its_worker_is_killed_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="did not come to its second step"):
        workers.wait_for_worker(SimpleNamespace(poll=lambda: 1), tmp_path)


def test_a_device_is_described_with_driver_and_libraries(monkeypatch):
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_name", lambda _: "NVIDIA X")
    size = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: size)
    monkeypatch.setattr(cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(surroundings, "driver", lambda: "570.1")
    found = surroundings.describe("auto")
    names = ("device", "name", "memory_gib", "driver", "cuDNN", "NCCL", "torch")
    values = ("cuda", "NVIDIA X", 80, "570.1", "9.10.2", "2.28.9", torch.__version__)
    assert tuple(found[name] for name in names) == values


def test_the_driver_is_told_by_its_file_where_there_is_no_tool(monkeypatch, tmp_path):
    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(surroundings.subprocess, "run", missing)
    monkeypatch.setattr(surroundings, "_DRIVER", tmp_path / "version")
    assert surroundings.driver() is None
    line = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 23:00:00 UTC 2025\n"
    )
    (tmp_path / "version").write_text(line)
    assert surroundings.driver() == "570.86.15"
