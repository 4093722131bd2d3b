"""`segtrain compare A B --steps`: planted causes are named, and what is harmless is not accused.

tools/steps_trial.py of commit 8fd315f trained each of its pairs; here one run is changed in what it
has left.
"""

import json
import re
import shutil

import pytest
import torch
from experiments import small, train, write_config
from test_verify import OPTIONS, STEPS, flip_digest_bit

from segtrain.checkpoint.format import load, save
from segtrain.data.sample.stream import hash_pixels


@pytest.fixture(scope="module")
def run(run_ranks, data, tmp_path_factory):
    """A run with receipts, a log line for each step, and its last checkpoint."""
    where = tmp_path_factory.mktemp("steps")
    config = write_config(
        where / "c.yaml",
        small(data, **OPTIONS | {"log": {"every_steps": 1}, "optim": {"ema_decay": None}}),
    )
    assert run_ranks(1, train, config, where / "run") == [0]
    for path in (where / "run/checkpoints").glob("*.pt"):
        if path.name != "last.pt":  # reading them takes most of the time
            path.unlink()
    return where / "run"


def rewritten(name, change):
    """An edit of a run: the text of a file goes through `change`."""

    def edit(run):
        before = (run / name).read_text()
        (run / name).write_text(change(before))
        assert (run / name).read_text() != before

    return edit


def lines_of(name, change):
    """An edit that puts each line of a JSON Lines file through `change`; empty ones go."""

    def of_text(text):
        lines = map(change, map(json.loads, text.splitlines()))
        return "".join(json.dumps(line) + "\n" for line in lines if line)

    return rewritten(name, of_text)


def receipt(step, **fields):
    """Changes these fields of the receipts from `step` on; a number is a relative difference."""

    def change(values):
        for field, value in fields.items() if values["step"] >= step else ():
            if isinstance(value, float):
                values[field] = (float.fromhex(values[field]) * (1 + value)).hex()
            elif value is not flip_digest_bit:
                values[field] = value
            elif field in values:
                flip_digest_bit(values, field, 0)
        return values

    return lines_of("receipts.jsonl", change)


def without(*fields):
    """Takes these fields out of all receipts."""
    return lines_of("receipts.jsonl", lambda one: {k: one[k] for k in one if k not in fields})


def logged(step, size, until=STEPS):
    """Changes the loss that is logged from `step` to `until` by a relative difference."""

    def change(line):
        is_meant = "train/loss" in line and step <= line["step"] <= until
        return line | ({"train/loss": line["train/loss"] * (1 + size)} if is_meant else {})

    return lines_of("metrics.jsonl", change)


def config(before, after):
    return rewritten("config.yaml", lambda text: text.replace(before, after))


def saved(change):
    """Changes all checkpoints."""

    def edit(run):
        for path in (run / "checkpoints").glob("*.pt"):
            save(path, change(load(path)))

    return edit


def first_block(kind):
    """Another hash of the first files or labels of the training split."""
    first = re.compile(rf'("{kind}": ?\[\s*").')
    return saved(lambda it: it._replace(data=first.sub(r"\g<1>x", it.data, count=1)))


TORCH = rewritten("environment.json", lambda text: text.replace('"torch": "', '"torch": "9'))
PROCESSOR = saved(lambda it: it._replace(shares=it.shares | {"arithmetic": "0" * 16}))
PIXELS = receipt(2, pixels="0" * 16)
FLIPPED = config("flip: false", "flip: true")
GAP = lines_of("receipts.jsonl", lambda one: one if one["step"] != 3 else None)
LATE = lines_of("receipts.jsonl", lambda one: one if one["step"] > 2 else None)
TWO_RANKS = rewritten("environment.json", lambda text: re.sub('("cpu .*")', r"\1, \1", text))
PLAIN = (lines_of("receipts.jsonl", lambda one: None), config("shares: 2", "shares: null"))
COMPILED = config("compile: false", "compile: true")
RATE = config("lr: 0.02", "lr: 0.03")
WEIGHTS = saved(lambda it: it._replace(model={name: t * 2 for name, t in it.model.items()}))
EQUAL = "the runs are equal in every bit of steps 1 to 4"
CASES = [
    ((), EQUAL),
    ((config("num_workers: 0", "num_workers: 1"),), EQUAL),
    ((FLIPPED,), f"{EQUAL}; scores may differ by eval.flip: false in A, true in B"),
    ((GAP,), f"{EQUAL} but for 1 of them"),
    ((TORCH,), f"{EQUAL}; what differs: versions"),
    ((WEIGHTS,), "the update after step 4, whose gradients are equal: the optimizer's code, or we"),
    ((WEIGHTS, RATE), "config: optim.lr: 0.02 in A, 0.03 in B; first seen at step 4: weights"),
    ((without("pixels", "start"),), EQUAL),
    ((LATE,), "the runs are equal in every bit of steps 3 to 4"),
    ((receipt(1, samples="0" * 16),), "samples: files were added"),
    ((receipt(1, samples="0" * 16), first_block("files")), "data: split train: names, sizes"),
    ((PIXELS,), "pixels: an image, a label, or what reads"),
    ((PIXELS, first_block("files")), "data: split train: names, sizes"),
    ((receipt(1, loss=1e-3), first_block("files")), "the code of model, loss"),
    ((PIXELS, first_block("labels")), "data: split train: 1 labels hold something else"),
    ((PIXELS, RATE), "pixels: an image"),
    ((PIXELS, TORCH), "versions: torch: 2"),
    ((PIXELS, config("flip_prob: 0.5", "flip_prob: 0.4")), "config: augment.flip_prob: 0.5 in A"),
    ((receipt(2, loss=1e-6), RATE), "config: optim.lr: 0.02 in A, 0.03 in B; first seen at step 2"),
    ((receipt(1, loss=1e-3), RATE), "the code of model, loss"),
    ((receipt(1, start=flip_digest_bit, loss=1e-9),), "starting weights: "),
    ((receipt(3, loss=1e-9),), "the update after step 2, whose gradients are equal"),
    ((LATE, receipt(3, loss=1e-3)), "not known: rounding or another cause in the steps before"),
    ((without("start"), receipt(1, loss=1e-3)), "pixels, starting weights (older"),
    ((receipt(1, gradients=flip_digest_bit, grad_norm=1e-7), TORCH), "only rounding: torch: 2"),
    ((receipt(1, loss=1e-9), PROCESSOR), "only rounding: bits of a small step: "),
    (PLAIN, "the runs are equal as far as they can be compared, to step 4; what differs: config"),
]
PLAIN_CASES = [
    ((), "the runs are equal as far as they can be compared, to step 4"),
    ((logged(3, 1e-3, until=3),), "the runs are equal"),  # the mean after an interruption
    ((logged(4, 1e-3),), "the runs are equal"),  # likewise, by the checkpoint
    ((WEIGHTS,), "not known: rounding or another cause in the steps before"),
    ((WEIGHTS, logged(1, 1e-8)), "only rounding, such as of other threads"),
    ((WEIGHTS, logged(1, 1e-8), TWO_RANKS), "only rounding: devices: 1 x cpu ("),
    ((WEIGHTS, logged(1, 1e-8), COMPILED), "only rounding: train.compile: false in A, true in B"),
    ((WEIGHTS, logged(1, 1e-4), TWO_RANKS), "more than rounding"),
    ((WEIGHTS, logged(1, 1e-8), first_block("labels")), "data: split train: 1 labels hold"),
    ((WEIGHTS, logged(2, 1e-8), RATE), "config: optim.lr: 0.02 in A"),
]


@pytest.mark.parametrize("common", [(), PLAIN], ids=["receipts", "logs"])
def test_the_first_cause_is_named(run, tmp_path, lab, common):
    a = edited(run, tmp_path / "a", *common)
    for i, (edits, expected) in enumerate(PLAIN_CASES if common else CASES):
        b = edited(a, tmp_path / str(i), *edits)
        *_, verdict = lab.done("compare", a, b, "--steps").out.splitlines()
        assert verdict[:12] == "verdict     "
        assert verdict[12:].startswith(expected), (i, verdict)


def edited(run, directory, *edits):
    shutil.copytree(run, directory)
    if edits:  # without a manifest nothing tells that a checkpoint was changed
        (directory / "checkpoints/manifest.json").unlink(missing_ok=True)
    for edit in edits:
        edit(directory)
    return directory


def test_what_differs_is_listed_with_the_names_of_tensors(run, tmp_path, lab):
    edits = receipt(2, gradients=flip_digest_bit, grad_norm=1e-7), LATE, RATE, WEIGHTS
    b = edited(run, tmp_path / "b", *edits)
    lines = lab.done("compare", run, "--with", b, "--steps").out.splitlines()
    number = len(load(run / "checkpoints/last.pt").shares["exponents"])
    assert "config      optim.lr: 0.02 in A, 0.03 in B" in lines
    assert "data        equal: classes, files by name and size, labels" in lines
    assert "steps       3 to 4 have receipts in both runs; they begin at 1 in A, 3 in B" in lines
    gradients = f"gradients: 1 of {number} tensors differ; the first is "
    assert f"step 3      {gradients}backbone.conv1.weight" in lines
    shutil.rmtree(b / "checkpoints")
    (b / "checkpoints").mkdir()
    bare = edited(b, tmp_path / "bare", receipt(3, gradients=flip_digest_bit))
    lines = lab.done("compare", b, bare, "--steps").out.splitlines()
    assert "data        not known: a run has no checkpoint that tells" in lines
    assert f"step 3      {gradients}number 1" in lines
    rewritten("environment.json", lambda text: "{}")(bare)
    PLAIN[0](bare)
    (bare / "metrics.jsonl").unlink()
    lines = lab.done("compare", b, bare, "--steps").out.splitlines()
    assert "steps       none has receipts in both runs; B lost them" in lines
    assert "versions    not known: a run has lost its environment.json" in lines
    assert lines[-1].endswith("  not known: no checkpoints or losses of the same steps are left")


def test_the_hash_of_pixels_sees_every_part_of_a_sample_and_its_place():
    image, label = torch.arange(24, dtype=torch.uint8).view(3, 2, 4), torch.ones(2, 4).byte()
    brighter, other = image.clone(), label.clone()
    brighter[2, 1, 3], other[1, 3] = 0, 2
    samples = (image, label), (brighter, label), (image, other)
    hashes = [hash_pixels((*sample, "a"), 0) for sample in samples]
    hashes.append(hash_pixels((image, label, "a"), 1))
    assert len(set(hashes)) == 4
    assert hash_pixels((image.clone(), label, "b"), 0) == hashes[0]
