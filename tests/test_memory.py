from pathlib import Path

import pytest
import torch
from experiments import experiment, small, train, write_config

from segtrain.config import Config
from segtrain.errors import ConfigError
from segtrain.models import memory
from segtrain.models.memory import check_windows, is_out_of_memory, memory_bytes, training_finding

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """Memory of a million bytes."""
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 1_000_000)


def config(**sections):
    data = {"layout": "camvid", "root": "x", "classes": "camvid"}
    return Config.model_validate({"data": data} | sections)


@pytest.mark.parametrize("workers", [0, 2])
def test_crops_that_no_memory_holds_are_refused_before_anything_is_made(data, tmp_path, workers):
    options = small(data, data={"num_workers": workers})
    options["augment"]["crop_size"] = [100_000, 100_000]
    path = write_config(tmp_path / "c.yaml", options)
    # 5 images of 10^10 pixels; 4 bytes stored, 12 normalized, 16 for the scores of 4 classes.
    gigabytes = "5 crops of 100000x100000 take at least 1,600.0 GB of memory, and cpu has [0-9.,]+"
    with pytest.raises(ConfigError, match=rf"augment\.crop_size: {gigabytes} GB; use smaller"):
        train(path, tmp_path / "run")
    assert not (tmp_path / "run" / "train.log").exists()


def test_windows_that_no_memory_holds_are_refused_before_training(data, tmp_path):
    options = experiment(data, eval={"mode": "slide", "crop_size": [100_000, 90_000]})
    with pytest.raises(ConfigError, match=r"eval\.crop_size: .* of 100000x90000 take at least 252"):
        train(write_config(tmp_path / "c.yaml", options), tmp_path / "run")


def test_the_bound_is_what_images_and_scores_take(machine):
    fits = config(augment={"crop_size": (100, 100)})
    # 10,000 pixels x (4 + 12 + 4 x 19) bytes are 0.92 MB.
    assert training_finding(fits, 19, 1, CPU, 1) is None
    assert "2 crops of 100x100 take at least" in training_finding(fits, 19, 2, CPU, 1)
    assert "on each of 2 ranks" in training_finding(fits, 19, 1, CPU, 2)
    compiled = config(augment={"crop_size": (100, 100)}, train={"compile": True})
    assert training_finding(compiled, 19, 6, CPU, 1) is None
    assert training_finding(compiled, 19, 7, CPU, 1) is not None


def test_windows_count_only_where_there_are_any(machine):
    large = {"crop_size": (300, 300)}
    check_windows(config(eval=large), 19, CPU)
    with pytest.raises(ConfigError, match=r"eval\.crop_size"):
        check_windows(config(eval=large | {"mode": "slide"}), 19, CPU)
    with pytest.raises(ConfigError, match=r"eval\.crop_size"):
        check_windows(config(augment=large, eval={"mode": "slide"}), 19, CPU)


def test_memory_is_that_of_the_container_where_it_has_less(tmp_path, monkeypatch):
    whole = memory_bytes(CPU)
    lines = Path("/proc/meminfo").read_text()
    total = int(lines.split("MemTotal:")[1].split()[0]) * 1024
    assert whole <= total
    for text, expected in (("12345\n", 12345), ("max\n", total), (f"{2 * total}\n", total)):
        (tmp_path / "limit").write_text(text)
        monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "limit")
        assert memory_bytes(CPU) == pytest.approx(expected, rel=1e-9)


def test_torchs_failed_allocation_on_a_cpu_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
