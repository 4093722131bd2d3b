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
    "train": {"steps": STEPS, "shares": 2, "batch_size": 4},
    "log": {"every_steps": 3},
    "checkpoint": {"keep_every_steps": 2},
}


@pytest.fixture(scope="module")
def run(run_ranks, data, tmp_path_factory):
    """A whole run on one rank, with last.pt and step_0000002.pt; tests change copies of it."""
    where = tmp_path_factory.mktemp("verify")
    config = write_config(where / "c.yaml", small(data, **OPTIONS))
    assert run_ranks(1, train, config, where / "run") == [0]
    for path in (where / "run/checkpoints").glob("*.pt"):
        if path.name not in ("last.pt", "step_0000002.pt"):  # reading them takes most of it
            path.unlink()
    return where / "run"


def verify(*arguments):
    """Exit code, what is printed and the error of `segtrain verify` in this rank."""
    from segtrain.desk.commands.verify import run_verify

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


def receipts_of(run):
    return [json.loads(line) for line in (run / "receipts.jsonl").read_text().splitlines()]


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
    results, others = run_ranks(2, all_of, (run, "--steps", "1:"), (run,), (run, "--steps", "2"))
    assert [(code, said) for code, _, said in results] == [(0, "")] * 3
    assert [printed for _, printed, _ in others] == [""] * 3
    printed = [out for _, out, _ in results[:2]]
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


def receipt(**fields):
    """Changes these fields of the receipt of step 4; a list: bytes of a digest, a bit each."""

    def change(run):
        *others, last = receipts_of(run)
        for field, value in fields.items():
            if not isinstance(value, list):
                last[field] = value
            for byte in value if isinstance(value, list) else ():
                flip_digest_bit(last, field, byte)
        lines = (json.dumps(line) + "\n" for line in (*others, last))
        (run / "receipts.jsonl").write_text("".join(lines))

    return change


def kept_number(kind):
    """Changes a number of the first tensor in step_0000002.pt."""

    def change(checkpoint):
        tensors = getattr(checkpoint, kind)
        tensors = tensors["state"][0] if kind == "optimizer" else tensors
        tensors[next(iter(tensors))][1, 0, 1, 1] *= 1.5

    return lambda run: change_checkpoint(run / "checkpoints/step_0000002.pt", change)


def edited_config(run):
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("  lr: 0.02\n", "  lr: 0.5\n"))


def other_pixels(run):
    """Beside the run, a data set whose images differ in some pixels."""
    root = run.parent / "data"
    root.mkdir()
    write_data(root)
    for path in (root / "images/train").iterdir():
        image = cv2.imread(str(path))
        image[20:40, 20:50] ^= 1
        cv2.imwrite(str(path), image)


def test_what_differs_is_found_and_named(run_ranks, run, tmp_path):
    """Parameters and weights are in the order of the model: the last of all is the bias of the
    auxiliary classifier. Gradients come in the other order. A replay passes the step of a changed
    checkpoint, or starts from it."""
    names = list(load(run / "checkpoints/last.pt").model)
    last = receipts_of(run)[-1]
    parameters = len(base64.b64decode(last["gradients"])) // 2
    of_step = "step {} differs from its receipt".format
    kept = "step_0000002.pt differs from the weights of its step, 2"
    told = "split train: names, sizes or order of the files differ", "config.yaml has been edited: "
    other = "--steps", "1:", "--set", f"data.root={tmp_path / 'data'}"
    weights = f"weights: 2 of {len(names)} tensors differ; the first is {names[1]}"
    average = f"average: 1 of {len(names)} tensors differ; the first is {names[-1]}"
    gradients = f"gradients: 2 of {parameters} tensors differ; the first is {names[-1]}"
    cases = [
        (receipt(loss=last["loss"][:-4] + "0p-1"), (), of_step(4), "loss: ", ""),
        (receipt(samples="0" * 16), (), of_step(4), "samples: other names or another order", ""),
        (receipt(pixels="0" * 16), (), of_step(4), "pixels: the same samples, ", ""),
        (receipt(gradients=[2, -1]), (), of_step(4), gradients, ""),
        (receipt(weights=[8, 16]), (), of_step(4), weights, ""),
        (receipt(average=[-1]), (), of_step(4), average, ""),
        (other_pixels, other, of_step(1), "pixels: the same samples, but other crops", told[0]),
        (edited_config, (), of_step(4), "", told[1] + "optim.lr: 0.02 there, 0.5 now\n"),
    ]
    for kind in ("model", "average", "optimizer"):
        name = names[0] if kind != "optimizer" else f"momentum_buffer of {names[0]}"
        step, field = 3 if kind == "model" else 4, "average" if kind == "average" else "loss"
        cases.append((kept_number(kind), ("--steps", "1:3"), kept, f"{kind}: 1 of ", name))
        cases.append((kept_number(kind), ("--steps", "3:"), of_step(step), f"{field}: ", ""))
    copies = [Path(shutil.copytree(run, tmp_path / str(i))) for i in range(len(cases))]
    for copy, (edit, *_) in zip(copies, cases, strict=True):
        edit(copy)
    calls = ((copy, *words) for copy, (_, words, *_) in zip(copies, cases, strict=True))
    (results,) = run_ranks(1, all_of, *calls)
    for copy, case, (code, printed, said) in zip(copies, cases, results, strict=True):
        _, _, first, second, told = case
        assert (code, "verified" in printed) == (4, False)
        lines = said.splitlines()
        assert lines[0] == f"{copy}: {first}"
        assert lines[1].strip().startswith(second)
        assert told in printed + said


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
        augment={"crop_size": [25, 33]},
        train={"steps": 2, "shares": 2, "batch_size": 4},
        optim={"ema_decay": None},
        log={"every_steps": 2},
        eval={"every_steps": 1},
        norm={"precise_batches": 1},
        checkpoint={"keep_every_steps": 1},
    )
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    assert run_ranks(1, train, config, run) == [0]
    for code, _, said in run_ranks(2, all_of, (run, "--steps", "1:"), (run,))[0]:
        assert (code, said) == (0, "")


def test_what_cannot_be_verified_is_refused_with_the_repair(run_ranks, run, tmp_path):
    names = ("lost", "plain", "bare", "early", "late")
    lost, plain, bare, early, late = (shutil.copytree(run, tmp_path / name) for name in names)
    text = (plain / "config.yaml").read_text()
    (plain / "config.yaml").write_text(text.replace("  shares: 2\n", ""))
    (bare / "receipts.jsonl").unlink()
    lines = (lost / "receipts.jsonl").read_text().splitlines(keepends=True)
    (lost / "receipts.jsonl").write_text("".join([*lines[:1], *lines[2:]]))
    for directory, step in ((early, 0), (late, STEPS + 1)):
        with (directory / "receipts.jsonl").open("a") as file:
            file.write(json.dumps(receipts_of(run)[-1] | {"step": step}) + "\n")
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


def test_the_command_line_verifies_on_ranks_that_it_starts(run, tmp_path):
    """A difference ends all ranks, and is told once."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    receipt(grad_norm="0x1p+0")(copy)
    command = Command(tmp_path, "verify", copy, "--nproc", "2", "--device", "cpu")
    assert command.wait() == 4
    err = command.errors
    assert err.count(f"{copy}: step 4 differs from its receipt") == 1
    assert err.count("grad_norm: 1 (0x1p+0) there, ") == 1
    assert "Traceback" not in err
