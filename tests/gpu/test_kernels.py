"""The kernels of segtrain/kernels on the device: as torch to rounding, the same bits, and as fast.

Each forward and backward pass as training calls it, beside the plain way, with a cold cache. The
limits are what prototypes took on a device whose memory copies at 4.26 TB/s; another one's are
longer in proportion.
"""

import statistics
import time
from contextlib import nullcontext

import pytest
import torch
from rounds import measure
from stepping import config_of

from gpu.test_graph import CASES, reserved_gib
from gpu.watching import TINY, Training, as_among_two, one_rank, without_kernels
from segtrain import kernels
from segtrain.config import LossConfig
from segtrain.models.blocks import at_least_float32
from segtrain.models.enlarged import enlarged
from segtrain.models.resizing import enlarge, resize
from segtrain.norm import SyncBatchNorm2d, norm_relu
from segtrain.trainer.setup import make_repeatable
from segtrain.training.losses import SegLoss
from segtrain.types import SegLogits

pytestmark = pytest.mark.gpu(limit_s=120)

# The prototypes' microseconds, forward and backward together, beside how fast their device copied.
PROTOTYPES_TB_S, SLACK = 4.26, 1.2
LOSSES = {
    "8x19x64x128, stride 8": ((8, 19, 64, 128), (512, 1024), 8, 158),
    "8x11x72x96, stride 4": ((8, 11, 72, 96), (288, 384), 4, 50),
    "2x19x90x90, aligned": ((2, 19, 90, 90), (713, 713), None, 56),
}
NORMS = {
    "8x256x128x256": ((8, 256, 128, 256), False, 131 + 207),
    "8x256x128x256, shortcut": ((8, 256, 128, 256), True, 162 + 323),
    "8x2048x64x128": ((8, 2048, 64, 128), False, 245 + 397),
    "8x64x72x96": ((8, 64, 72, 96), False, 27 + 34),
}
# Of the backward pass. No prototype had a forward one: the bytes take 16, and torch 331.
PYRAMID, FORWARD = {1: 65, 2: 71, 3: 66, 6: 56}, 70
RUNS = 20


@pytest.fixture(autouse=True)
def with_kernels(device, monkeypatch):
    """On a CPU they are left out: tests/kernels has the interpreter."""
    assert device.type == "cpu" or kernels.takes(torch.empty(1, device=device))


def image(shape, device, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, device=device, generator=generator)
    return x.to(dtype, memory_format=torch.channels_last)


def tiny(shape, device):
    """What a CPU can do in the time."""
    _, c, h, w = shape
    return shape if device.type == "cuda" else (1, min(c, 8), min(h, 9), min(w, 9))


def microseconds(call, device):
    """Of the device, with a cold cache, the host far ahead: gaps between kernels count, its own
    time does not."""
    if device.type == "cpu":
        call()
        return 1.0
    cache = torch.empty(2**28, dtype=torch.uint8, device=device)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    host_s = time.perf_counter() - began
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(int((1.5 * host_s + 3e-4) * 2e9))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


@pytest.fixture(scope="module")
def slowness(device):
    """How many times as long as the prototypes' device this one copies."""
    if device.type == "cpu":
        return 1.0
    x = torch.empty(2**28, device=device)
    y = torch.empty_like(x)
    return PROTOTYPES_TB_S / (2 * x.nbytes / microseconds(lambda: y.copy_(x), device) / 1e6)


def graph_of(call):
    """`call` as a CUDA graph, which has been replayed once, and what that left."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, results


def judge(device, figures, slowness, ours, plain, most_us, bound, *, exact=None, timed=None):
    """ours, plain: return tensors; bound: of the largest difference, of the largest value.

    exact: with what ours are compared, if not with the plain ones. timed: the kernels of ours
    alone. Times are of replays, as in training.
    """
    found = ours()
    for one, other in zip(found, (exact or plain)(), strict=True):
        error = (one.double() - other.double()).abs().max() / other.double().abs().max()
        assert error <= bound
    assert all(map(torch.equal, ours(), found))
    if device.type == "cpu":
        return
    graphs = {"ours": graph_of(ours), "torch": graph_of(plain)}
    assert all(map(torch.equal, graphs["ours"][1], found))
    if timed is not None:
        graphs["kernels alone"] = graph_of(timed)
    for name, (graph, _) in graphs.items():
        figures[f"{name}, us"] = microseconds(graph.replay, device)
    figures["times as fast"] = figures["torch, us"] / figures["ours, us"]
    figures["limit, us"] = most_us * slowness * SLACK
    judged = "ours" if timed is None else "kernels alone"
    assert figures[f"{judged}, us"] <= figures["limit, us"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_enlarged_logits(device, figures, slowness, name):
    shape, size, stride, most_us = LOSSES[name]
    if device.type == "cpu":
        size = tuple(side * (stride or 1) for side in tiny(shape, device)[2:])
    small = image(tiny(shape, device), device).requires_grad_()
    criterion = SegLoss(LossConfig(), device)
    n, classes = small.shape[:2]
    labels = torch.randint(classes, (n, *size), device=device)
    labels[:, :7] = 255
    options = {"align_corners": stride is None}

    def passes(logits):
        sums = criterion(SegLogits(logits), labels)
        (grad,) = torch.autograd.grad(criterion.objective(sums, sums.detach()), small)
        return sums.detach(), grad

    def plain():
        return passes(enlarge(at_least_float32(small), size, stride, **options))

    def ours():
        lazy = enlarged(small, size, stride, **options)
        return plain() if lazy is None else passes(lazy)

    def timed():
        """As the prototypes: with labels as stored, and nothing around."""
        from segtrain.kernels import small_logits

        sums = small_logits.sums(small, stored, small_logits.axes_of(small, size, stride))
        return torch.autograd.grad(sums, small, ones)

    stored = labels.byte()
    ones = torch.ones(2, 1, dtype=torch.float64, device=device)
    judge(device, figures, slowness, ours, plain, most_us, 1e-2, timed=timed)


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_with_what_follows(device, figures, slowness, name):
    """As among several ranks."""
    shape, has_shortcut, most_us = NORMS[name]
    x, grad, other = (image(tiny(shape, device), device) for _ in range(3))
    inputs = [x.requires_grad_()] + ([other.requires_grad_()] if has_shortcut else [])
    norm = SyncBatchNorm2d(x.shape[1]).to(device)

    def passes():
        y = norm_relu(x, norm, other if has_shortcut else None)
        return [y.detach(), *torch.autograd.grad(y, [*inputs, *norm.parameters()], grad)]

    def plain():
        with without_kernels():
            return passes()

    with one_rank(device), as_among_two():
        judge(device, figures, slowness, passes, plain, most_us, 2e-2)


@pytest.mark.parametrize("bins", PYRAMID)
def test_resizing(device, figures, slowness, bins):
    """In bfloat16 torch's gradient is off by up to a third: it adds up to 8,192 values in that."""
    size = (64, 128) if device.type == "cuda" else (9, 11)
    channels = 512 if device.type == "cuda" else 4
    x = image((8, channels, bins, bins), device).requires_grad_()
    grad = image((8, channels, *size), device)

    def interpolated(x):
        return torch.nn.functional.interpolate(x, size, mode="bilinear")

    def ours():
        y = resize(x, size, align_corners=False)
        return [y.detach(), *torch.autograd.grad(y, x, grad)]

    def plain():
        y = interpolated(x)
        return [y.detach(), *torch.autograd.grad(y, x, grad)]

    def exact():
        wide = x.detach().double().requires_grad_()
        y = interpolated(wide)
        return [y.detach(), *torch.autograd.grad(y, wide, grad.double())]

    def forward():
        with torch.no_grad():
            return [resize(x, size, align_corners=False)]

    options = {"exact": exact, "timed": forward}
    judge(device, figures, slowness, ours, plain, FORWARD, 2e-2, **options)
    if device.type == "cuda":
        figures["backward, us"] = figures["ours, us"] - figures["kernels alone, us"]
        assert figures["backward, us"] <= PYRAMID[bins] * slowness * SLACK


STEPS = 200


def train(config, device, *, plain):
    """The losses of all steps, replayed, and the milliseconds of one at the end."""
    is_cuda = device.type == "cuda"
    with without_kernels() if plain else nullcontext():
        call = Training(config, device, synchronized=True, replayed=is_cuda)
        losses = torch.stack([call().loss for _ in range(STEPS if is_cuda else 2)])
        rounds = {"rounds": 3, "warmup": 1, "block_ms": 150 if is_cuda else 0}
        (times,) = measure({"step": call}, device=device, **rounds).values()
        memory = reserved_gib(device)
    return losses, statistics.median(times), memory


@pytest.mark.parametrize("name", CASES)
def test_steps_train_as_without_kernels(device, figures, name):
    """Within rounding, which steps amplify; what deterministic kernels of torch cost besides."""
    model, images, size, _ = CASES[name]
    is_cuda = device.type == "cuda"
    if not is_cuda:
        model, images, size = TINY, 2, (33, 41)
    options = {"model": model, "precision": "bfloat16" if is_cuda else "float32"}
    with one_rank(device):
        found = {}
        for way, plain, deterministic in (
            ("kernels", False, False),
            ("kernels again", False, False),
            ("plain", True, False),
            ("deterministic", False, True),
        ):
            config = config_of(size, images, **options, deterministic=deterministic)
            make_repeatable(config, device)
            before = reserved_gib(device)
            found[way], figures[f"{way}: ms"], after = train(config, device, plain=plain)
            figures[f"{way}: GiB"] = after - before
        figures["two runs are equal"] = torch.equal(found["kernels"], found["kernels again"])
        apart = (found["kernels"] - found["plain"]).abs() / found["plain"][0]
        figures["losses apart, first 20 steps"] = apart[:20].max().item()
        figures["losses apart"] = apart.max().item()
    assert figures["losses apart, first 20 steps"] <= 1e-2
    assert figures["losses apart"] <= 5e-2
