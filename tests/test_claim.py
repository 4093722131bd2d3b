"""The lock of a run directory."""

import os
import time
from contextlib import suppress

import pytest
from experiments import refusal, small, train, write_config

from segtrain.errors import ConfigError, ExecutionError
from segtrain.run.directory import LOCK, Claim


def test_a_deleted_lock_file_is_made_again(tmp_path):
    run = tmp_path / "runs" / "run"
    with Claim(run) as claim:
        claim.renew()
        (run / LOCK).unlink()
        claim.renew()
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "), Claim(run):
            pytest.fail("two runs in one directory")
        (run / LOCK).unlink()
        run.rmdir()
        run.parent.rmdir()
        claim.renew()
        assert str(os.getpid()) in (run / LOCK).read_text()
    assert not run.exists()


def test_the_lock_of_a_run_that_has_ended_is_taken(tmp_path):
    with Claim(tmp_path) as claim:
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).write_text("process 1 on another machine\n")
        claim.renew()
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()


def enter(directory, pipe):
    with Claim(directory):
        pipe.send("held")
        time.sleep(60)


def test_a_run_stops_if_another_one_has_locked_its_directory(tmp_path, forkserver):
    mine, theirs = forkserver.Pipe()
    with Claim(tmp_path) as claim:
        (tmp_path / LOCK).unlink()
        process = forkserver.Process(target=enter, args=(tmp_path, theirs))
        process.start()
        try:
            assert mine.recv() == "held"
            with pytest.raises(ExecutionError) as stop:
                claim.renew()
            holder = (tmp_path / LOCK).read_text()
        finally:
            process.kill()
            process.join()
    assert f"{tmp_path / LOCK}: deleted during this run" in str(stop.value)
    assert f"in use by process {process.pid} on " in str(stop.value)
    # The other one's lock is left to it.
    assert (tmp_path / LOCK).read_text() == holder


def test_a_lock_that_cannot_be_made_again_is_an_error(tmp_path):
    with Claim(tmp_path) as claim:
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).mkdir()
        with pytest.raises(ExecutionError, match=r"\.lock: deleted .* locked again: Is a"):
            claim.renew()


def test_a_folder_that_the_user_made_stays(tmp_path):
    with Claim(tmp_path):
        pass
    assert tmp_path.is_dir()
    with Claim(tmp_path / "made"):
        assert (tmp_path / "made").is_dir()
    assert not (tmp_path / "made").exists()


def test_on_a_full_disk_the_lock_works(small_disk):
    with (small_disk / "other").open("wb", buffering=0) as other, suppress(OSError):
        while other.write(bytes(4096)):
            pass
    with Claim(small_disk) as claim:
        claim.renew()
        with pytest.raises(ConfigError, match="in use by another run"), Claim(small_disk):
            pytest.fail("two runs in one directory")
    assert [path.name for path in small_disk.iterdir()] == ["other"]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("nowhere", path)])
def test_no_lock_is_taken_on_anything_but_a_file(tmp_path, make):
    make(tmp_path / LOCK)
    with pytest.raises(ConfigError, match=r"cannot write the run directory: .*\(\.lock\)"):
        Claim(tmp_path).__enter__()


def losing_its_lock(config, run, *, to_another):
    """The error of a run whose lock file is deleted after its first step, and its checkpoints."""
    from segtrain.commands.train import loop as command

    whole, left = command.train_steps, []

    def train_steps(*args, **kwargs):
        for result in whole(*args, **kwargs):
            if result.step == 1:
                (run / LOCK).unlink()
                if to_another:
                    left.append(Claim(run).__enter__())
            yield result

    command.train_steps = train_steps
    before = refusal(train, config, run)
    return before, sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_run_that_has_lost_its_lock_to_another_saves_nothing(run_ranks, tmp_path, data):
    options = small(data, train={"steps": 2}, checkpoint={"every_steps": 1})
    config = write_config(tmp_path / "c.yaml", options)
    (alone,) = run_ranks(1, losing_its_lock, config, tmp_path / "alone", to_another=False)
    assert alone == (None, ["best.pt", "last.pt", "manifest.json", "previous.pt"])
    ((ended, saved),) = run_ranks(1, losing_its_lock, config, tmp_path / "run", to_another=True)
    kind, code, said = ended
    assert (kind, code) == ("ExecutionError", 6)
    assert "this run stops before it writes into files of another one" in said
    assert saved == []
