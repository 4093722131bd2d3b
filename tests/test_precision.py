"""tf32 is the default, as torch has it in convolutions; float32 means float32."""

from contextlib import suppress
from copy import deepcopy

import pytest
import torch
from experiments import small, train, unread, write_config
from torch import nn

from segtrain.config import TrainConfig, load_config
from segtrain.errors import ConfigError
from segtrain.inference import predictor
from segtrain.inference.settings import InferenceSettings, check_eval_precision
from segtrain.models import build_model, precision
from segtrain.models.precision import (
    _convolution_s,
    autocast,
    cpu_gain,
    evaluation_warnings,
    float32_products,
    for_evaluation,
    offers,
    precision_on,
    precision_warnings,
    to_eval_precision,
)
from segtrain.training.state import make_state
from segtrain.training.step import TrainStep


def flags():
    """Whether convolutions, and matrix products, may be in TF32."""
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("before", [(True, False), (False, True)])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
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


def test_what_a_device_computes_in_is_said_and_what_float32_costs(monkeypatch):
    default, exact, cuda = TrainConfig(), TrainConfig(precision="float32"), torch.device("cuda", 0)
    assert default.precision == "tf32"
    old, new = (7, 5), (8, 0)
    for capability, named, warned in ((old, "float32", 0), (new, "tf32", 1)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert precision_on(default, cuda) == named
        assert precision_on(exact, cuda) == "float32"
        assert precision_warnings(default, cuda) == []
        assert len(precision_warnings(exact, cuda)) == warned
    assert precision_on(default, torch.device("cpu")) == "float32"
    assert precision_warnings(exact, torch.device("cpu")) == []


@pytest.fixture
def seconds(monkeypatch):
    """Of a convolution: the calls one after another, by type and whether it has a backward pass."""
    found = {(torch.float32, True): [1.0], (torch.float32, False): [1.0]}

    def taken(dtype, backward):
        times = found[dtype, backward]
        return times.pop(0) if times[1:] else times[0]

    monkeypatch.setattr(precision, "_convolution_s", taken)
    return found


CPU, DENSE = torch.device("cpu"), nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))


def test_a_processor_without_instructions_for_a_precision_is_told(seconds):
    seconds |= {(torch.bfloat16, backward): [90.0] for backward in (True, False)}
    lower = config(trained="bfloat16")
    assert "many times as long as float32" in precision_warnings(lower.train, CPU)[0]
    assert "--set eval.precision=tf32" in evaluation_warnings(lower, CPU)[0]
    assert evaluation_warnings(config(trained="bfloat16", evaluated="tf32"), CPU) == []
    assert precision_warnings(lower.train, torch.device("cuda", 0)) == []
    seconds[torch.bfloat16, False] = [0.9]
    assert evaluation_warnings(lower, CPU) == []
    assert len(precision_warnings(lower.train, CPU)) == 1


@pytest.mark.parametrize(("lower", "told"), [(1.5, True), (1.6, False), (9.0, False)])
def test_bfloat16_is_offered_where_convolutions_are_much_faster(seconds, lower, told):
    seconds |= {(torch.float32, True): [2.25], (torch.bfloat16, True): [lower]}
    line = "precision  train.precision=bfloat16 would make convolutions 1.5 times as fast"
    for trained in ("float32", "tf32"):
        found = offers(TrainConfig(precision=trained), CPU, DENSE)
        assert found == [line] * told
    for trained in ("bfloat16", "float16", "float64"):
        assert offers(TrainConfig(precision=trained), CPU, DENSE) == []
    assert offers(TrainConfig(), torch.device("cuda", 0), DENSE) == []
    by_channel = nn.Sequential(DENSE, nn.Conv2d(4, 4, 3, groups=4))
    assert offers(TrainConfig(), CPU, by_channel) == []


def test_a_busy_moment_does_not_decide(seconds):
    """Kernels are chosen in the first calls, and other programs interrupt any."""
    seconds |= {(torch.float32, True): [9e-3, 1e-3, 7e-3, 2e-3]}
    seconds |= {(torch.bfloat16, True): [8e-2, 5e-3, 5e-4, 6e-3]}
    assert cpu_gain() == 2.0


def test_threads_are_as_before_a_measurement(monkeypatch):
    asked = []

    def taken(dtype, backward):
        asked.append(torch.get_num_threads())
        return _convolution_s(dtype, backward)

    monkeypatch.setattr(precision, "_convolution_s", taken)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert cpu_gain() > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(asked) == {1}


def config(*, trained="float32", evaluated=None):
    return unread(train={"precision": trained}, eval={"precision": evaluated})


def test_evaluations_have_the_precision_of_the_training_unless_they_name_their_own():
    assert for_evaluation(config(trained="bfloat16")).precision == "bfloat16"
    assert for_evaluation(config(trained="bfloat16", evaluated="tf32")).precision == "tf32"
    how = InferenceSettings.from_config(config(evaluated="float16"))
    assert (how.autocast, how.tf32) == (torch.float16, False)
    assert how.describe().endswith("; float16 autocast")
    how = InferenceSettings.from_config(config(trained="bfloat16", evaluated="tf32"))
    assert (how.autocast, how.tf32) == (None, True)
    assert how.describe().endswith("; no flip")


def test_a_precision_that_another_takes_the_place_of_is_refused():
    with pytest.raises(ConfigError, match=r"train\.precision=float32: no effect with eval\.prec"):
        check_eval_precision(["train.precision=float32"], config(evaluated="bfloat16"))
    # Autocast leaves float64 as it is: the scores would not be what they are called.
    with pytest.raises(ValueError, match=r"eval\.precision: bfloat16 cannot go with"):
        config(trained="float64", evaluated="bfloat16")
    check_eval_precision(["train.precision=bfloat16"], config(trained="bfloat16"))
    check_eval_precision(["eval.precision=bfloat16"], config(evaluated="bfloat16"))


def test_a_training_and_its_evaluations_run_each_in_its_precision(tmp_path, data, monkeypatch):
    seen, whole = [], predictor.predict_labels

    def step(self, local):
        seen.append(flags())
        return whole_step(self, local)

    whole_step = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", step)

    def predict_labels(forward, images, settings, *args, **options):
        seen.append((settings.autocast, flags()))
        return whole(forward, images, settings, *args, **options)

    monkeypatch.setattr(predictor, "predict_labels", predict_labels)
    monkeypatch.setattr(precision, "cpu_gain", lambda: 3.3)
    before = flags()
    precisions = {"train": {"steps": 1, "precision": "tf32"}, "eval": {"precision": "bfloat16"}}
    options = small(data, **precisions)
    run = tmp_path / "run"
    assert train(write_config(tmp_path / "config.yaml", options), run) == 0
    assert seen[0] == (True, True)
    assert set(seen[1:]) == {(torch.bfloat16, (False, False))}
    assert flags() == before
    log = (run / "train.log").read_text()
    assert log.count("train.precision=bfloat16 would make convolutions 3.3 times as fast") == 1
    lines = [line for line in log.splitlines() if "  mIoU" in line]
    assert len(lines) == 1
    assert " (bfloat16)  best mIoU" in lines[0]


def test_evaluations_of_a_saved_model_have_the_bits_of_those_in_its_training(tmp_path, data):
    """In half precision other kernels, which another memory format takes, round otherwise."""
    file = write_config(tmp_path / "c.yaml", small(data, train={"precision": "bfloat16"}))
    config = load_config(file)
    model = build_model(config.model, num_classes=4)
    saved = deepcopy(model)
    trained = make_state(model, config, torch.device("cpu")).eval_model.eval()
    loaded = to_eval_precision(saved, config, torch.device("cpu")).eval()
    images = torch.randn(2, 3, 33, 41)
    with torch.no_grad(), autocast(torch.bfloat16, images.device):
        assert torch.equal(trained(images).out, loaded(images).out)
