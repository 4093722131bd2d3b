"""receipts.jsonl: equal bytes wherever and however often a step is computed."""

import hashlib
import json
from functools import partial

import numpy as np
import torch
from experiments import small, train, write_config

from segtrain import seed
from segtrain.checkpoint.format import load
from segtrain.run.log import RunLog
from segtrain.run.receipts import GRADIENT, WEIGHT, Receipt, read_receipts, unpack
from segtrain.training.receipt_meter import ReceiptMeter
from segtrain.training.step import StepResult

STEPS = 4
OPTIONS = {
    "train": {"steps": STEPS, "shares": 3, "batch_size": 5},
    # A log line comes at the end only: what is there before was written before a checkpoint.
    "log": {"every_steps": 9},
    "checkpoint": {"keep_every_steps": 2},
}
RECEIPT = Receipt(1, "00", "0x1p-1", None, "0x1p+1", "AAA=")


def test_a_run_that_goes_on_leaves_lines_of_a_killed_one_and_adds_its_own(
    run_ranks, tmp_path, data
):
    """Those of other ranks are equal to the last bit: see test_invariance.py."""
    config, run = write_config(tmp_path / "c.yaml", small(data, **OPTIONS)), tmp_path / "run"
    assert run_ranks(2, train, config, run, until=1) == [0] * 2
    # Later lines are of a run that was killed, the last one in the middle of a line.
    with (run / "receipts.jsonl").open("a") as file:
        file.write(RECEIPT._replace(step=2).line() + '\n{"step": ')
    assert run_ranks(1, train, config, run, resume=True) == [0]
    receipts = read_receipts(run / "receipts.jsonl")
    assert list(receipts) == [1, 2, 3, 4]
    assert [step for step, one in receipts.items() if one.weights and one.average] == [2, 4]
    check_content(receipts, run, data)


def check_content(receipts, run, data):
    """By another way than the program's."""
    names = sorted(path.stem for path in (data / "images/train").iterdir())
    stream = [names[i] for epoch in range(4) for i in seed.sample_order(0, epoch, len(names))]
    for step, receipt in receipts.items():
        batch = "\0".join(stream[(step - 1) * 5 : step * 5])
        assert receipt.samples == hashlib.sha256(batch.encode()).hexdigest()[:16]
    for field in ("gradients", "pixels"):
        assert len({getattr(receipt, field) for receipt in receipts.values()}) == STEPS
    assert [step for step, receipt in receipts.items() if receipt.start] == [1]
    checkpoint = load(run / "checkpoints/last.pt")
    for field in ("model", "average"):
        weights = getattr(checkpoint, field)
        digests = {name: hashlib.sha256(described(name, t)).digest() for name, t in weights.items()}
        packed = getattr(receipts[STEPS], "weights" if field == "model" else field)
        first = [int.from_bytes(digest[:8], "little") for digest in digests.values()]
        assert unpack(packed, WEIGHT) == first
        whole = hashlib.sha256(b"".join(digests.values())).hexdigest()
        what = "weights" if field == "model" else field
        assert f"{what}    sha256 {whole}\n" in (run / "train.log").read_text()


def described(name, tensor):
    values = tensor.numpy()
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + values.tobytes("C")


def gradients(*values):
    """The digest of gradients whose largest absolute values are these."""
    return torch.tensor(values, dtype=torch.float64).view(torch.int64)


def receipts_of(*steps):
    meter = ReceiptMeter(None, names=lambda step: [str(step)], weights_due=lambda step: False)
    for step, (loss, aux_loss, grad_norm, digest) in enumerate(steps, start=1):
        numbers = map(partial(torch.tensor, dtype=torch.float64), (loss, aux_loss, grad_norm))
        meter.after_step(None, None, StepResult(step, *numbers, 0.1, 0.0, digest))
    return meter.take_receipts()


def test_the_numbers_are_there_to_the_last_bit():
    nan, third = float("nan"), 1 / 3
    values = [1.0, np.nextafter(1.0, 2), 0.0, float("inf")]
    digest = gradients(*values)
    one, two = receipts_of((third, nan, 2.0, digest), (0.5, 0.25, nan, digest))
    assert float.fromhex(one.loss) == third
    assert (one.aux_loss, one.grad_norm) == (None, "0x1.0000000000000p+1")
    assert (two.aux_loss, two.grad_norm) == ("0x1.0000000000000p-2", "nan")
    bits = [int.from_bytes(np.float64(value).tobytes(), "little") for value in values]
    mixed = [bit * 0x9E3779B97F4A7C15 % 2**64 >> 48 for bit in bits]
    assert unpack(one.gradients, GRADIENT) == mixed
    assert len(set(mixed)) == 4  # one bit less is enough to see a difference


def test_a_step_that_overflowed_float16_has_a_receipt(run_ranks, tmp_path, data):
    options = {
        "augment": {"crop_size": [9, 17]},  # float16 takes ten times as long on a CPU
        "train": {"steps": 1, "shares": 2, "batch_size": 4, "precision": "float16"},
        "eval": {"precision": "float32"},
    }
    config = write_config(tmp_path / "c.yaml", small(data, **options))
    assert run_ranks(1, train_with_a_large_scale, config, tmp_path / "run") == [0]
    receipts = read_receipts(tmp_path / "run/receipts.jsonl")
    assert [receipt.grad_norm for receipt in receipts.values()] == ["nan"]


def train_with_a_large_scale(config, directory):
    original = torch.amp.GradScaler
    torch.amp.GradScaler = partial(original, init_scale=2.0**60)
    return train(config, directory)


def test_a_new_run_begins_a_new_file(tmp_path):
    (tmp_path / "receipts.jsonl").write_text(RECEIPT.line() + "\n")
    with RunLog(tmp_path, enabled=True) as log:
        log.begin()
        assert (tmp_path / "receipts.jsonl").read_bytes() == b""


def test_damaged_lines_are_left_out(tmp_path):
    whole = RECEIPT.line()
    damaged = [
        {"step": "2"},
        {"loss": None},
        {"loss": "garbage"},
        {"grad_norm": "0x1p99999"},
        {"gradients": "no base64"},
        {"gradients": "AAAA"},  # three bytes
        {"weights": 3},
        {"more": 1},
    ]
    receipt = json.loads(whole)
    lines = [json.dumps(receipt | {"step": i + 2} | row) for i, row in enumerate(damaged)]
    lines += ["", "[]", "[" * 100_000, whole[:-3]]
    file = tmp_path / "receipts.jsonl"
    file.write_text("\n".join([*lines, whole, RECEIPT._replace(step=2).line()]))
    assert read_receipts(file) == {1: RECEIPT}  # the last one has no line end
