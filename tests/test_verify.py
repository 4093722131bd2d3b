"""`segtrain verify`: equal runs pass on any ranks, and what differs is named."""

import base64
import io
import json
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import cv2
import pytest
from experiments import flip_bit, small, train, write_config, write_data
from processes import Command

from segtrain import cli
from segtrain.checkpoint.format import load, save
from segtrain.errors import UserError

STEPS = 4
OPTIONS = {
    "augment": {"crop_size": [25, 33]},
    "model": {"backbone": "resnet18", "num_stages": 2, "output_stride": 8},
    "train": {"steps": STEPS, "shares": 3, "batch_size": 5},
    "log": {"every_steps": 3},
    "checkpoint": {"keep_every_steps": 2},
}


@pytest.fixture(scope="module")
def run(run_ranks, data, tmp_path_factory):
    """A whole run on one rank, with step_0000002.pt; tests change copies of it."""
    where = tmp_path_factory.mktemp("verify")
    config = write_config(where / "c.yaml", small(data, **OPTIONS))
    assert run_ranks(1, train, config, where / "run") == [0]
    return where / "run"


def verify(*arguments):
    """Exit code, what is printed and the error of `segtrain verify` in this rank."""
    from segtrain.commands.verify import run_verify

    args = cli._parser().parse_args(["verify", *map(str, arguments), "--device", "cpu"])
    printed, code, said = io.StringIO(), 0, ""
    with redirect_stdout(printed):
        try:
            run_verify(args)
        except UserError as error:
            code, said = error.exit_code, str(error)
    return code, printed.getvalue(), said


def all_of(*lines):
    """`verify` with each of these arguments, one after the other."""
    return [verify(*line) for line in lines]


def content(directory):
    """Bytes and times of everything in it."""
    paths = sorted([directory, *directory.rglob("*")])
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in paths
    }


def change_receipt(run, step, change):
    path = run / "receipts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines[step - 1])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def flip_digest_bit(receipt, field, byte):
    values = bytearray(base64.b64decode(receipt[field]))
    values[byte] ^= 1
    receipt[field] = base64.b64encode(values).decode()


def change_checkpoint(path, change):
    """Without a manifest nothing tells that the file was changed."""
    checkpoint = load(path)
    (path.parent / "manifest.json").unlink(missing_ok=True)
    change(checkpoint)
    save(path, checkpoint)


def test_a_run_is_verified_on_other_ranks_and_nothing_is_written(run_ranks, run):
    before = content(run)
    for code, _, said in run_ranks(3, verify, run, "--steps", "2"):
        assert (code, said) == (0, "")
    results, others = run_ranks(2, all_of, (run, "--steps", "1:"), (run,))
    assert [(code, said) for code, _, said in results] == [(0, "")] * 2
    assert [printed for _, printed, _ in others] == ["", ""]
    printed = [out for _, out, _ in results]
    assert content(run) == before
    ending = "equal in every bit, and so are all weights in "
    wanted = [f"verified steps {steps} of {run}: " for steps in ("1..4", "3..4")]
    for out, beginning in zip(printed, wanted, strict=True):
        last_line = out.splitlines()[-1]
        assert last_line.startswith(beginning)
        assert re.search(ending + r"\d+ of these steps$", last_line)
        # The whole weights are those that the run has told.
        (line,) = (line for line in out.splitlines() if line.startswith("weights "))
        assert f"{line}\n" in (run / "train.log").read_text()
    assert "from the beginning" in printed[0]
    assert "from step_0000002.pt" in printed[1]


def test_a_changed_receipt_is_named_with_step_and_tensor(run_ranks, run, tmp_path):
    """Parameters and weights are in the order of the model: the last of all is the bias of the
    auxiliary classifier. Gradients come in the other order."""
    names = list(load(run / "checkpoints/last.pt").model)
    parameters = len(base64.b64decode(last_receipt(run)["gradients"])) // 2
    cases = {
        "loss": (lambda receipt: receipt.update(loss=receipt["loss"][:-4] + "0p-1"), "loss: "),
        "samples": (
            lambda receipt: receipt.update(samples="0" * 16),
            "samples: other names or another order: the data or their order changed",
        ),
        "pixels": (lambda receipt: receipt.update(pixels="0" * 16), "pixels: the same samples, "),
        "both": (
            lambda receipt: [flip_digest_bit(receipt, "gradients", byte) for byte in (2, -1)],
            f"gradients: 2 of {parameters} tensors differ; the first is {names[-1]}",
        ),
        "weights": (
            lambda receipt: [flip_digest_bit(receipt, "weights", byte) for byte in (8, 16)],
            f"weights: 2 of {len(names)} tensors differ; the first is {names[1]}",
        ),
        "average": (
            lambda receipt: flip_digest_bit(receipt, "average", -1),
            f"average: 1 of {len(names)} tensors differ; the first is {names[-1]}",
        ),
    }
    for name, (change, _) in cases.items():
        shutil.copytree(run, tmp_path / name)
        change_receipt(tmp_path / name, 4, change)
    (results,) = run_ranks(1, all_of, *((tmp_path / name,) for name in cases))
    for (name, (_, wanted)), (code, printed, said) in zip(cases.items(), results, strict=True):
        first, line = said.splitlines()  # nothing else differs
        assert code == 4
        assert "verified" not in printed
        assert first == f"{tmp_path / name}: step 4 differs from its receipt"
        assert line.strip().startswith(wanted)


def last_receipt(run):
    return json.loads((run / "receipts.jsonl").read_text().splitlines()[-1])


def test_a_changed_pixel_of_an_image_is_found(run_ranks, run, tmp_path):
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data")
    for path in (tmp_path / "data/images/train").iterdir():
        image = cv2.imread(str(path))
        image[20:40, 20:50] ^= 1
        cv2.imwrite(str(path), image)
    other = (run, "--steps", "1:", "--set", f"data.root={tmp_path / 'data'}")
    ((code, printed, said),) = run_ranks(1, verify, *other)
    assert code == 4
    first, *lines = said.splitlines()
    assert first == f"{run}: step 1 differs from its receipt"
    assert lines[0] == "  pixels: the same samples, but other crops or labels"
    assert lines[1].startswith("  loss: ")
    assert "changed    split train: names, sizes or order of the files differ" in printed


def test_a_changed_number_of_a_checkpoint_is_found(run_ranks, run, tmp_path):
    """The replay passes its step, or starts from it."""
    kinds, calls = ("model", "average", "optimizer"), []
    for kind in kinds:

        def change(checkpoint, kind=kind):
            tensors = getattr(checkpoint, kind)
            if kind == "optimizer":
                tensors = tensors["state"][0]
            tensors[next(iter(tensors))][1, 0, 1, 1] *= 1.5

        path = Path(shutil.copytree(run, tmp_path / kind)) / "checkpoints/step_0000002.pt"
        change_checkpoint(path, change)
        calls += [(tmp_path / kind, "--steps", steps) for steps in ("1:3", "3:")]
    (results,) = run_ranks(1, all_of, *calls)
    first = next(iter(load(path).model))
    for kind, passed, started in zip(kinds, results[::2], results[1::2], strict=True):
        assert (passed[0], started[0]) == (4, 4)
        name = f"momentum_buffer of {first}" if kind == "optimizer" else first
        beginning = f"{tmp_path / kind}: step_0000002.pt"
        assert passed[2].startswith(f"{beginning} differs from the weights of its step, 2\n")
        assert f"{kind}: 1 of " in passed[2]
        assert passed[2].endswith(f" tensors differ; the first is {name}")
        step, field = 3 if kind == "model" else 4, "average" if kind == "average" else "loss"
        said = f"{tmp_path / kind}: step {step} differs from its receipt\n  {field}: "
        assert started[2].startswith(said)


def test_a_damaged_checkpoint_is_found_before_and_another_arithmetic_told(run_ranks, run, tmp_path):
    paths = []
    for name in ("damaged", "other"):
        copied = shutil.copytree(run, tmp_path / name)
        paths.append(Path(copied, "checkpoints/step_0000002.pt"))
    flip_bit(paths[0])
    change_checkpoint(paths[1], lambda checkpoint: checkpoint.shares.update(arithmetic="0" * 16))
    calls = [("damaged", "1:2"), ("damaged", "3:"), ("other", "3:3")]
    calls = [(tmp_path / name, "--steps", steps) for name, steps in calls]
    ((*damaged, other),) = run_ranks(1, all_of, *calls)
    for code, printed, said in damaged:
        assert (code, printed) == (4, "")
        assert said.startswith(f"{paths[0]}: damaged: ")
        assert said.endswith("; move it away to verify the run without it")
    assert other[0] == 0
    assert "warning: this machine computes other bits than the one that trained" in other[1]


def test_precise_statistics_of_evaluations_are_followed(run_ranks, tmp_path, data):
    """They change the model after the receipt of their step, and the steps after it."""
    options = small(
        data,
        model=OPTIONS["model"],
        train={"steps": STEPS, "shares": 2, "batch_size": 4},
        optim={"ema_decay": None},
        log={"every_steps": 3},
        eval={"every_steps": 2},
        norm={"precise_batches": 1},
        checkpoint={"keep_every_steps": 2},
    )
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    run_ranks(1, train, config, run)
    for code, _, said in run_ranks(2, all_of, (run, "--steps", "1:"), (run,))[0]:
        assert (code, said) == (0, "")


def test_what_cannot_be_verified_is_refused_with_the_repair(run_ranks, run, tmp_path):
    names = ("lost", "plain", "bare", "early", "late")
    lost, plain, bare, early, late = (shutil.copytree(run, tmp_path / name) for name in names)
    text = (plain / "config.yaml").read_text()
    (plain / "config.yaml").write_text(text.replace("  shares: 3\n", ""))
    (bare / "receipts.jsonl").unlink()
    lines = (lost / "receipts.jsonl").read_text().splitlines(keepends=True)
    (lost / "receipts.jsonl").write_text("".join([*lines[:1], *lines[2:]]))
    for directory, step in ((early, 0), (late, STEPS + 1)):
        with (directory / "receipts.jsonl").open("a") as file:
            file.write(json.dumps(last_receipt(run) | {"step": step}) + "\n")
    foreign = "receipts.jsonl: has receipts of 1 step that the run has not, as"
    refused = {
        (tmp_path / "nowhere",): (2, "nowhere: expected the directory of a run"),
        (plain,): (2, "start it with --set train.shares=N"),
        (bare,): (2, f"{bare}/receipts.jsonl: no receipts yet (the run writes th"),
        (lost, "--steps", "1:"): (2, "has receipts of 3 steps, 1 to 4, but none of step 2"),
        (run, "--steps", "3:99999999999"): (2, "4 steps, 1 to 4, but none of step 5"),
        (run, "--steps", "7:"): (2, "but none of step 7"),
        (run, "--set", "optim.lr=1"): (2, "--set optim.lr=1: the run decides this"),
        (early, "--steps", "3:"): (4, f"{foreign} 0: it ends at"),
        (late, "--steps", "3:"): (4, f"{foreign} {STEPS + 1}: it ends at"),
    }
    (results,) = run_ranks(1, all_of, *refused)
    for (code, _, said), (wanted, expected) in zip(results, refused.values(), strict=True):
        assert (code, expected in said) == (wanted, True), said
    ((code, _, said),) = run_ranks(1, all_of, (lost, "--steps", "3:"))[0]
    assert (code, said) == (0, "")


def test_a_config_edited_after_training_is_told(run_ranks, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "config.yaml"
    path.write_text(path.read_text().replace("  lr: 0.02\n", "  lr: 0.5\n"))
    ((code, printed, said),) = run_ranks(1, verify, copy)
    assert (code, "step 4 differs from its receipt" in said) == (4, True)
    assert "warning: config.yaml has been edited: optim.lr: 0.02 there, 0.5 now\n" in printed


def test_the_command_line_verifies_on_ranks_that_it_starts(run, tmp_path):
    """A difference ends all ranks, and is told once."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    change_receipt(copy, 3, lambda receipt: receipt.update(grad_norm="0x1p+0"))
    command = Command(tmp_path, "verify", copy, "--nproc", "2", "--device", "cpu")
    assert command.wait() == 4
    err = command.errors
    assert err.count(f"{copy}: step 3 differs from its receipt") == 1
    assert err.count("grad_norm: 1 (0x1p+0) there, ") == 1
    assert "Traceback" not in err
