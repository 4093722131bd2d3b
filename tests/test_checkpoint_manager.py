import errno
import fcntl
import os
import random
import shutil
import signal
import time

import pytest
import torch
from experiments import fill, flip_bit, unread
from test_checkpoint import checkpoint, names

from segtrain import files
from segtrain.checkpoint.format import load, save, write_temporary
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.files import manifest
from segtrain.models import build_model
from segtrain.run.directory import RunLock
from segtrain.training.optim.optimizer import build_optimizer, moments_bytes


def store_in(directory, *steps):
    """The manager of a run that has just started, and has saved these steps."""
    store = CheckpointManager(directory, keep_limit=2)
    store.clean_up()
    for step in steps:
        store.save_last(checkpoint(step=step))
    return store


def weights(num_bytes):
    return {"weight": torch.zeros(num_bytes // 4)}


@pytest.mark.fault(25)
@pytest.mark.parametrize("room_for", ["half", "all but the manifest"])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(small_disk, room_for):
    store = store_in(small_disk / "run")
    store.save_last(checkpoint(step=1, model=weights(1 << 20)))
    new = checkpoint(step=2, model=weights(1 << 20))
    with write_temporary(small_disk / "size.pt", new) as (temporary, _):
        room = -(-temporary.stat().st_size // 4096) * 4096
    room = room // 2 if room_for == "half" else room
    fill(small_disk, room)
    before = names(small_disk / "run")
    with pytest.raises(ExecutionError, match=r"last\.pt: cannot write .*No space left"):
        store.save_last(new)
    assert names(small_disk / "run") == before
    assert load(store.last).step == 1
    (small_disk / "other").unlink()
    store.save_last(new)
    assert load(store.newest()[0]).step == 2


@pytest.mark.fault(25)
def test_free_space_is_checked_before_anything_is_written(small_disk):
    store = store_in(small_disk / "run")
    store.check_space(checkpoint(model=weights(3 << 18)))
    # Two and best.pt would fit, but not beside the third while it is written.
    with pytest.raises(ExecutionError, match=r"3 checkpoints take, with best\.pt, 4\.2 MB .* by"):
        store.check_space(checkpoint(model=weights(1 << 20)))
    for step in (1, 2):  # the third replaces the first
        store.save_last(checkpoint(step=step, model=weights(1 << 19)))
    fill(small_disk, 5 << 18)
    store.check_space(checkpoint(model=weights(1 << 19)))
    with pytest.raises(ExecutionError, match=r"1 checkpoint takes, with best\.pt, 2\.\d MB"):
        store.check_space(checkpoint(model=weights(1 << 20)))
    with pytest.raises(ExecutionError, match=r"1 checkpoint takes, with best\.pt, 1\.6 MB"):
        store.check_space(checkpoint(model=weights(1 << 19)), later_bytes=1 << 19)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_the_room_for_moments_is_known_before_the_first_step(kind):
    small = {"backbone": "resnet18", "num_stages": 2, "output_stride": 8, "head_channels": 8}
    config = unread(model=small, optim={"kind": kind})
    model = build_model(config.model, num_classes=2)
    optimizer = build_optimizer(model, config)
    expected = moments_bytes(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [x for state in optimizer.state.values() for x in state.values()]
    assert sum(x.nbytes for x in held if torch.is_tensor(x) and x.dim()) == expected > 0
    assert moments_bytes(optimizer) == 0
    other = torch.optim.Muon([torch.nn.Parameter(torch.ones(3, 4))])  # as a plugin's: not known
    assert moments_bytes(other) == 0


def test_weights_that_are_not_finite_are_no_newest_checkpoint(tmp_path):
    store = store_in(tmp_path)
    for step, value in ((1, 0.5), (2, torch.inf)):
        store.save_last(checkpoint(step=step, model={"a": torch.full((3,), value)}))
    path, (problem,) = store.newest()
    assert path.name == "previous.pt"
    assert problem.endswith("last.pt: damaged: numbers that are not finite in a")


@pytest.mark.fault(35)
@pytest.mark.parametrize("where", [0.001, 0.5, 0.999])
def test_a_flipped_bit_is_found_anywhere_in_the_file(tmp_path, where):
    """torch.load alone would load it as a weight."""
    store = store_in(tmp_path)
    store.save_last(checkpoint(step=1, model=weights(100_000)))
    flip_bit(store.last, where)
    with pytest.raises(CheckpointError, match=r"last\.pt: damaged: these are not the bytes"):
        load(store.last)


@pytest.mark.fault(46)
def test_a_damaged_last_is_skipped_for_the_previous_and_does_not_replace_it(tmp_path):
    store = store_in(tmp_path, 1, 2, 3)
    flip_bit(store.last, 0.5)
    store = store_in(tmp_path)
    path, (problem,) = store.newest()
    assert (path.name, load(path).step) == ("previous.pt", 2)
    assert "last.pt: damaged" in problem
    store.save_last(checkpoint(step=3))
    assert load(tmp_path / "previous.pt").step == 2
    assert load(store.last).step == 3


def test_a_last_that_may_not_be_read_is_no_reason_to_take_an_older_one(tmp_path, monkeypatch):
    """The steps between would be lost, and the file set aside as if it were damaged."""
    store, opened = store_in(tmp_path, 1, 2), files.open_regular

    def refused(path, *args, **kwargs):
        if os.path.basename(path) == "last.pt":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(files, "open_regular", refused)
    with pytest.raises(ExecutionError, match=r"last\.pt: cannot be read: permission denied"):
        store.newest()


@pytest.mark.fault(32, 46)
def test_the_newest_good_one_is_found_by_its_step_not_by_the_clock(tmp_path):
    store = store_in(tmp_path)
    for step in (10, 20):
        store.save_last(checkpoint(step=step))
        store.keep(checkpoint(step=step + 1))
    assert store_in(tmp_path).newest()[0].name == "step_0000021.pt"
    for name in ("last.pt", "step_0000021.pt"):
        flip_bit(tmp_path / name, 0.5)
    os.utime(tmp_path / "previous.pt", (4e9, 4e9))
    os.utime(tmp_path / "step_0000011.pt", (0, 0))
    path, problems = store_in(tmp_path).newest()
    assert path.name == "step_0000011.pt"
    assert ["step_0000021.pt" in problem for problem in problems] == [True, False]


@pytest.mark.fault(46)
def test_if_all_are_damaged_the_error_names_every_file(tmp_path):
    store_in(tmp_path, 1, 2)
    for name in ("last.pt", "previous.pt"):
        (tmp_path / name).write_bytes(b"")
    # One that may belong to another run is none of them.
    save(tmp_path / "step_0000900.pt", checkpoint(step=900))
    with pytest.raises(CheckpointError, match=r"last\.pt: damaged.*\n.*previous\.pt: damaged"):
        store_in(tmp_path).newest()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"last.pt": [{}]}', b'{"last.pt": 3}'])
def test_a_damaged_manifest_is_refused_by_name(tmp_path, content):
    store_in(tmp_path, 1)
    save(tmp_path / "from_elsewhere.pt", checkpoint(step=9))
    assert load(tmp_path / "from_elsewhere.pt").step == 9
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged, .*; remove it"):
        load(tmp_path / "last.pt")
    (tmp_path / "manifest.json").unlink()
    assert load(tmp_path / "last.pt").step == 1


def save_forever(directory, start):
    store = store_in(directory)
    for step in range(start, 1_000_000):
        content = {"weight": torch.full((200_000,), float(step))}
        store.save_last(checkpoint(step=step, model=content))
        if step % 3 == 0:
            store.keep(checkpoint(step=step, model=content))


@pytest.mark.fault(3)
def test_killed_at_any_moment_of_saving_a_checkpoint_can_be_loaded(tmp_path, forkserver):
    rng = random.Random(0)
    step = 1
    for _ in range(5):
        process = forkserver.Process(target=save_forever, args=(tmp_path, step))
        process.start()
        deadline = time.monotonic() + 60
        while not (tmp_path / "last.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.02 + 0.1 * rng.random())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        store = store_in(tmp_path)
        path, problems = store.newest()
        loaded = load(path)
        assert problems == []
        assert (loaded.model["weight"] == loaded.step).all()
        assert not any(name.endswith(".tmp") for name in names(tmp_path))
        # What is there is what the manifest says, one state of each file.
        manifest.write(tmp_path, {name: [entry] for name, entry in store._entries.items()})
        for name in names(tmp_path):
            if name.endswith(".pt"):
                load(tmp_path / name)
        assert loaded.step >= step - 1
        step = loaded.step + 1


def test_a_reader_finds_the_last_checkpoint_whole_while_it_is_saved_anew(tmp_path, forkserver):
    """It races a writer for at least 20 savings: between two loads it looks all the time."""
    store_in(tmp_path, 1)
    path, steps = tmp_path / "last.pt", [1]
    writer = forkserver.Process(target=save_forever, args=(tmp_path, 2))
    writer.start()
    deadline = time.monotonic() + 60
    try:
        while len(set(steps)) < 20 and time.monotonic() < deadline:
            for _ in range(1000):
                path.stat()
            steps.append(load(path).step)
    finally:
        writer.kill()
        writer.join()
    assert steps == sorted(steps)
    assert len(set(steps)) == 20


def test_without_hard_links_the_last_checkpoint_becomes_the_previous_one(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    store_in(tmp_path, 1, 2, 3)
    found = [load(tmp_path / name).step for name in ("previous.pt", "last.pt")]
    assert (found, len(names(tmp_path))) == ([2, 3], 3)


def hold(directory, pipe):
    with RunLock(directory):
        pipe.send("held")
        time.sleep(60)


@pytest.mark.fault(29, 30)
def test_a_run_in_use_is_refused_and_the_lock_of_a_dead_run_is_taken_over(tmp_path, forkserver):
    mine, theirs = forkserver.Pipe()
    process = forkserver.Process(target=hold, args=(tmp_path / "run", theirs))
    process.start()
    assert mine.recv() == "held"
    with (
        pytest.raises(ConfigError, match=rf"run: in use by process {process.pid} on .*--output"),
        RunLock(tmp_path / "run"),
    ):
        pytest.fail("two runs in one directory")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "run" / ".lock").exists()
    with RunLock(tmp_path / "run"), (tmp_path / "run" / ".lock").open() as again:
        assert str(os.getpid()) in again.read()
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not (tmp_path / "run").exists()


def test_a_lock_on_a_file_that_another_run_has_just_removed_does_not_count(tmp_path, monkeypatch):
    lock, path = fcntl.flock, tmp_path / ".lock"
    ended = []

    def lock_after_its_end(*args):
        if not ended:
            ended.append(path.unlink())
        return lock(*args)

    monkeypatch.setattr(fcntl, "flock", lock_after_its_end)
    in_use = pytest.raises(ConfigError, match="in use by process")
    with RunLock(tmp_path), in_use, RunLock(tmp_path):
        pytest.fail("two runs in one directory")


def test_the_user_s_own_files_are_neither_counted_nor_removed(tmp_path):
    """Under any name, even under that of a checkpoint of the run."""
    store = store_in(tmp_path)
    store.keep(checkpoint(step=10))
    own = ("step_mine.pt", "step_0000005.pt", "step_best of all.pt", "step_0000010.pt")
    for name in own:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).write_text(f"the content of {name}")
    for step in (20, 30, 40):
        store.keep(checkpoint(step=step))
    store = store_in(tmp_path)
    store.keep(checkpoint(step=50))
    kept = {path.name: path for path in tmp_path.glob("step_*.pt")}
    assert [kept.pop(name).read_text() for name in own] == [f"the content of {x}" for x in own]
    assert sorted(kept) == ["step_0000040.pt", "step_0000050.pt"]


def test_files_that_the_run_did_not_write_are_renamed_with_a_warning(tmp_path, capsys):
    """Files from before the run, from between two parts of it, and from during one."""
    names_of = ("last.pt", "previous.pt", "best.pt", "step_0000003.pt")
    for number, when in enumerate(("before", "between", "during"), 1):
        for name in names_of:
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).write_text(f"{when} {name}")
        if when != "during":
            store = store_in(tmp_path)
        for _ in range(2):
            store.save_last(checkpoint(step=number))
        store.save_best(checkpoint(step=number))
        store.keep(checkpoint(step=3))
        said = capsys.readouterr().out
        for name in names_of:
            aside = tmp_path / f"{name}.old-{number}"
            assert aside.read_text() == f"{when} {name}"
            line = f"warning: {tmp_path / name} was not as this run wrote it; it is kept as "
            assert said.count(f"{line}{aside.name}\n") == 1
            assert load(tmp_path / name).step in (number, 3)
    assert len(names(tmp_path)) == 1 + 4 * len(names_of)


def test_only_temporary_files_of_saving_are_cleaned_up(tmp_path):
    mine = [".notes.tmp", ".last.pt.tmp", ".last.pt.aB3x.tmp", ".other.pt.12.tmp", "last.pt.12.tmp"]
    left = [".last.pt.12.tmp", ".best.pt.7.tmp", ".step_0000012.pt.7.tmp", ".manifest.json.7.tmp"]
    for name in mine + left:
        (tmp_path / name).touch()
    store_in(tmp_path)
    assert names(tmp_path) == sorted(mine)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_whole(tmp_path, monkeypatch, moment):
    """Two saves happen before the manifest is read, or between it and the file."""
    store = store_in(tmp_path, 1)
    reading = manifest.read_entries
    busy = []

    def read(directory):
        found = reading(directory) if moment == "after" else None
        if not busy:
            busy.append(True)
            for step in (2, 3):
                store.save_last(checkpoint(step=step))
        return found or reading(directory)

    monkeypatch.setattr(manifest, "read_entries", read)
    assert load(store.last).step == (1 if moment == "after" else 3)


def test_a_run_stops_before_it_writes_where_another_one_has_written(tmp_path):
    """Also on a file system without locks."""
    first = store_in(tmp_path, 1)
    store_in(tmp_path, 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for write in (first.save_last, first.save_best, first.keep):
        with pytest.raises(ExecutionError, match=r"manifest\.json: another run has written"):
            write(checkpoint(step=3))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    shutil.rmtree(tmp_path)  # with what the other one wrote
    first.save_last(checkpoint(step=3))
    assert load(first.last).step == 3
