"""float32 means float32: TF32, torch's default in convolutions on CUDA, is an option of its own."""

from contextlib import suppress

import pytest
import torch

from segtrain.commands.train import run as run_module
from segtrain.config import TrainConfig, load_config
from segtrain.errors import ConfigError
from segtrain.models.precision import float32_products, precision_warnings


def flags():
    """Whether convolutions, and matrix products, may be in TF32."""
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("before", [(True, False), (False, True)])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_products_follow_the_precision_and_others_find_their_settings_again(precision, before):
    found = flags()
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    try:
        with suppress(ValueError), float32_products(TrainConfig(precision=precision)):
            assert flags() == (precision == "tf32",) * 2
            raise ValueError
        assert flags() == before
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = found


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_a_training_runs_under_its_precision(tmp_path, monkeypatch, precision):
    path = tmp_path / "config.yaml"
    path.write_text("data: {layout: voc, root: nowhere, classes: voc}\n")
    seen, before = [], flags()

    def set_up(order, stack):
        seen.append(flags())
        raise ConfigError("far enough")

    monkeypatch.setattr(run_module, "set_up", set_up)
    config = load_config(path, [f"train.precision={precision}"])
    with pytest.raises(ConfigError, match="far enough"):
        run_module.run(config, tmp_path / "run", device=torch.device("meta"), resume=False)
    assert seen == [(precision == "tf32",) * 2]
    assert flags() == before


def test_tf32_on_a_device_without_it_is_a_warning(monkeypatch):
    tf32, cuda = TrainConfig(precision="tf32"), torch.device("cuda", 0)
    assert "no effect on this device" in precision_warnings(tf32, torch.device("cpu"))[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert len(precision_warnings(tf32, cuda)) == 1
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert precision_warnings(tf32, cuda) == []
    assert precision_warnings(TrainConfig(), torch.device("cpu")) == []
