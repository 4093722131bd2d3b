import resource
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from experiments import experiment, train, unread, write_config
from memory import measure_step
from stepping import train_steps
from torch import nn
from torch.profiler import ProfilerActivity, profile

from segtrain.distributed import machine as this_machine
from segtrain.errors import ConfigError
from segtrain.models import DropoutChannels, build_model, memory
from segtrain.models.memory import (
    check_windows,
    is_out_of_memory,
    memory_bytes,
    network_bytes,
    rank_bytes,
    training_bytes,
    training_finding,
)
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch, SegLogits

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """Memory of a million bytes, of which network and process take nothing."""
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 1_000_000)
    monkeypatch.setattr(memory, "network_bytes", lambda *_: 0)


@pytest.mark.parametrize(
    ("section", "options", "said"),
    [
        # 5 images of 10^10 pixels: 3 + 12 bytes for the image, 1 + 8 for the label; for two heads
        # and 4 classes, 4 bytes for the scores and 4 that cross entropy keeps.
        ("augment", {}, "5 crops of 100000x100000 take at least 4,097.8 GiB of memory"),
        ("eval", {"mode": "slide"}, "windows of 100000x100000 take at least 260"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused(data, tmp_path, section, options, said):
    options = experiment(data, **{section: options | {"crop_size": [100_000, 100_000]}})
    with pytest.raises(ConfigError, match=rf"{section}\.crop_size: .*{said}"):
        train(write_config(tmp_path / "c.yaml", options), tmp_path / "run")
    assert not (tmp_path / "run" / "train.log").exists()


def test_the_bound_is_what_images_and_scores_take(machine):
    fits = unread(augment={"crop_size": (60, 100)}, model={"aux_head": False})
    # 6,000 pixels x (3 + 12 + 9 + (4 + 4) x 17) bytes are 0.96 MB.
    assert training_finding(fits, 17, 1, CPU, 1) is None
    assert training_finding(fits, 18, 1, CPU, 1) is not None
    assert "2 crops of 60x100 take at least" in training_finding(fits, 17, 2, CPU, 1)
    assert "on each of 2 ranks" in training_finding(fits, 17, 1, CPU, 2)
    compiled = unread(augment={"crop_size": (60, 100)}, train={"compile": True})
    assert training_finding(compiled, 17, 6, CPU, 1) is None
    assert training_finding(compiled, 17, 7, CPU, 1) is not None
    crop = {"crop_size": (10, 10)}
    virtual = unread(augment=crop, train={"virtual_ranks": 2}, loss={"kind": "dice"})
    rest = 3 + 12 + 9 + 2 * 4 * 19
    # On CUDA the host keeps what waits.
    assert training_bytes(virtual, 19, 1, torch.device("cuda")) == 100 * (rest + 4 * 19)
    assert training_bytes(virtual, 19, 1, CPU) == 100 * (rest + 2 * 4 * 19)
    # There a kernel may compute cross entropy without scores at full size.
    pixels = unread(augment=crop, loss={"also": ({"kind": "focal"},)})
    assert training_bytes(pixels, 19, 1, torch.device("cuda")) == 100 * (3 + 12 + 9)
    assert training_bytes(pixels, 19, 1, CPU) == 100 * (rest + 4 * 4 * 19)


# Each loss with how much more than the bound it may take: what it needs for a moment, such as the
# order of sorted pixels, is not part of it.
LOSSES = {
    "cross entropy": ({"kind": "cross_entropy"}, 1.5),
    "dice": ({"kind": "dice"}, 4.0),
    "lovasz and focal": ({"kind": "lovasz", "also": ({"kind": "focal"},)}, 3.0),
}
SIZE, NUM_CLASSES, NUM_IMAGES = (40, 56), 19, 3


class PixelModel(nn.Module):
    """Scores of each pixel alone: hardly any features, which the bound leaves out."""

    dropout_channels = DropoutChannels(None, None)

    def __init__(self, aux_head):
        super().__init__()
        self.backbone = nn.Conv2d(3, 1, 1)
        self.head = nn.Conv2d(1, NUM_CLASSES, 1)
        self.aux_head = nn.Conv2d(1, NUM_CLASSES, 1) if aux_head else None

    def forward(self, images, dropout=None):
        x = self.backbone(images)
        return SegLogits(self.head(x), self.aux_head(x) if self.aux_head else None)


def peak_of_a_step(made):
    """The most bytes that torch had allocated at a time in a step, counted by its profiler."""

    def batches():
        images = torch.randint(256, (NUM_IMAGES, 3, *SIZE), dtype=torch.uint8)
        labels = torch.randint(NUM_CLASSES, (NUM_IMAGES, *SIZE), dtype=torch.uint8)
        yield Batch(images, labels, ["x"] * NUM_IMAGES)

    state = make_state(PixelModel(made.model.aux_head), made, CPU)
    sync = StepSync(lambda: False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        list(train_steps(state, batches(), made, device=CPU, step_sync=sync))
    events = profiled.profiler.kineto_results.events()
    events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize(
    ("name", "aux_head"),
    [("cross entropy", False), *((name, True) for name in LOSSES)],
)
def test_a_step_takes_the_bound_and_not_much_more(name, aux_head):
    loss, most = LOSSES[name]
    made = unread(
        augment={"crop_size": SIZE},
        model={"aux_head": aux_head, "dropout": 0.0},
        loss=loss,
        train={"steps": 1, "batch_size": NUM_IMAGES, "precision": "float32"},
    )
    bound = training_bytes(made, NUM_CLASSES, NUM_IMAGES, CPU)
    assert bound <= peak_of_a_step(made) <= most * bound


@pytest.mark.parametrize(
    ("backbone", "recompute", "most"),
    [
        ("resnet18", "none", 1.01),
        ("resnet18", "norm", 2.0),
        ("mobilenet_v2", "blocks", 1.1),
        *(
            pytest.param("resnet50", recompute, most, marks=pytest.mark.slow("models"))
            for recompute, most in (("none", 1.01), ("norm", 2.0), ("blocks", 1.1))
        ),
    ],
)
def test_the_features_of_a_network_are_those_that_live_after_its_forward_pass(
    monkeypatch, backbone, recompute, most
):
    monkeypatch.setattr(memory, "resident_bytes", lambda pid: 0)
    model = {"backbone": backbone, "recompute": recompute, "head_channels": 8, "aux_channels": 8}
    made = unread(augment={"crop_size": (65, 65)}, model=model, optim={"momentum": 0.9})
    built = build_model(made.model, num_classes=NUM_CLASSES)
    weights = sum(p.nbytes for p in built.parameters())
    state = torch.get_rng_state()
    features = network_bytes(made, NUM_CLASSES, NUM_IMAGES, CPU) - 2 * weights  # with momentum
    assert torch.equal(torch.get_rng_state(), state)
    sizes = {"size": 65, "batch_size": NUM_IMAGES, "num_classes": NUM_CLASSES}
    kept_by_losses = 2 * 4 * NUM_CLASSES * NUM_IMAGES * 65**2
    alive = measure_step(made.model, **sizes).forward - kept_by_losses
    assert features <= alive <= most * features


def test_windows_count_only_where_there_are_any(machine):
    large = {"crop_size": (300, 300)}
    check_windows(unread(eval=large), 19, CPU)
    with pytest.raises(ConfigError, match=r"eval\.crop_size"):
        check_windows(unread(eval=large | {"mode": "slide"}), 19, CPU)
    many = {"mode": "slide", "crop_size": (50, 50), "batch_size": 1000}
    with pytest.raises(ConfigError, match=r"eval\.batch_size: 1000 windows of 50x50"):
        check_windows(unread(eval=many), 19, CPU)
    check_windows(unread(eval=many | {"batch_size": 2}), 19, CPU)
    with pytest.raises(ConfigError, match=r"eval\.crop_size"):
        check_windows(unread(augment=large, eval={"mode": "slide"}), 19, CPU)


TOTAL = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {}, TOTAL),
        ("0::/a/b", {"a/b/memory.max": "12345\n", "a/memory.max": "99999\n"}, 12345),
        ("0::/a/b", {"a/b/memory.max": "max\n", "a/memory.max": "99999\n"}, 99999),
        ("0::/of/the/host", {"memory.max": "777"}, 777),
        ("0::/", {"memory.max": str(2 * TOTAL)}, TOTAL),
        (
            "7:cpu,cpuacct:/x\n4:memory:/x\n0::/",
            {"memory/x/memory.limit_in_bytes": "5555", "cpu,cpuacct/x/memory.max": "1"},
            5555,
        ),
    ],
)
def test_memory_is_that_of_the_container_where_it_has_less(
    tmp_path, monkeypatch, own, limits, expected
):
    (tmp_path / "own").write_text(own + "\n")
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(this_machine, "_GROUPS", tmp_path)
    monkeypatch.setattr(this_machine, "_OWN_GROUPS", tmp_path / "own")
    assert memory_bytes(CPU) == expected


def test_a_rank_has_its_part_of_the_machine_and_no_more_than_its_own_limits(monkeypatch, tmp_path):
    unlimited = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_AS: unlimited, resource.RLIMIT_DATA: unlimited}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], unlimited))
    (tmp_path / "status").write_text("VmSize:\t 3000 kB\nVmRSS:\t 1000 kB\nVmData:\t 1500 kB\n")
    monkeypatch.setattr(this_machine, "_PROCESS", tmp_path / "status")
    assert rank_bytes(CPU, 4) == memory_bytes(CPU) // 4
    limits[resource.RLIMIT_AS] = 5000 * 1024
    assert rank_bytes(CPU, 4) == 3000 * 1024  # 2000 kB of addresses have no memory
    limits[resource.RLIMIT_DATA] = 2500 * 1024
    assert rank_bytes(CPU, 4) == 2000 * 1024


def test_torchs_failed_allocation_on_a_cpu_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))  # oneDNN
    for other in ("shape mismatch", "could not create a primitive descriptor for a convolution"):
        assert not is_out_of_memory(RuntimeError(other))
