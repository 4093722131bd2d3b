import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import segtrain
from segtrain import cli
from segtrain.cli import table
from segtrain.commands import exit_code
from segtrain.config import load_config
from segtrain.errors import CheckpointError, DataError
from segtrain.run.directory import write_description

WRONG_UNIT = "data.mean=[0.485, 0.456, 0.406]"
GOOD = "data: {layout: folders, root: /d, classes: voc}\n"
HEAVY = ("torch", "cv2", "albumentations", "numpy", "torchvision")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(GOOD)
    return path


def run_watched(*command_lines):
    """For each: exit code, stderr, and the heavy modules that were imported by then."""
    code = (
        "import contextlib, io, json, sys\n"
        "from segtrain.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stderr(err):\n"
        "        try: code = main(words)\n"
        "        except SystemExit as error: code = error.code or 0\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print('\\n!' + json.dumps([code, err.getvalue(), heavy]))\n"
    )
    words = [sys.executable, "-c", code, json.dumps(command_lines)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("!")]


def test_help_and_a_wrong_config_import_nothing_heavy(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(GOOD + "optim:\n  lrr: 1\ntrain:\n  steps: x\n")
    helps = [["--help"], ["--version"], ["train", "--help"]]
    assert run_watched(*helps) == [[0, "", []]] * 3
    said = (
        f"segtrain: {path}:3: optim.lrr: unknown key; did you mean 'lr'?\n"
        f"segtrain: {path}:5: train.steps: must be an integer, got 'x'\n"
    )
    commands = [["train"], ["data", "check"], ["config", "show"]]
    assert run_watched(*([*words, str(path)] for words in commands)) == [[2, said, []]] * 3


def test_steps_wait_for_no_import_of_what_comes_after_them():
    """The report and its statistics take a second to import."""
    later = {"scipy", "matplotlib", "jinja2", "tensorboard", "torch._dynamo", "torch._inductor"}
    code = f"import sys, segtrain.trainer.loop; print({later!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_threads_that_wait_leave_the_cores_to_others_unless_the_user_decides(monkeypatch, config):
    for given, wanted in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
        if given is None:
            monkeypatch.delenv("OMP_WAIT_POLICY")
        assert cli.main(["config", "show", str(config)]) == 0
        assert os.environ["OMP_WAIT_POLICY"] == wanted


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (DataError("a.png: bad\nb.png: bad"), 3, "segtrain: a.png: bad\nsegtrain: b.png: bad\n"),
        (CheckpointError("x.pt: damaged"), 4, "segtrain: x.pt: damaged\n"),
        (KeyboardInterrupt(), 130, "segtrain: interrupted\n"),
    ],
)
def test_errors_become_messages_and_exit_codes(monkeypatch, capsys, error, code, shown):
    def fail(args):
        raise error

    monkeypatch.setattr("segtrain.commands.config.write_schema", fail)
    assert cli.main(["config", "schema"]) == code
    assert capsys.readouterr().err == shown


def test_no_command_takes_an_address_for_a_folder():
    """pathlib makes a local folder `s3:` of one."""
    types = {one.options.get("type") for command in table.COMMANDS for one in command.arguments}
    assert Path not in types


def test_what_the_system_refuses_by_name_is_a_mistake_of_the_user(capsys):
    """A folder of somebody else; without a name an error may be anything."""

    def fail(*name):
        raise PermissionError(errno.EACCES, "Permission denied", *name)

    assert exit_code.run(lambda: fail("/home/ann/run")) == 2
    assert capsys.readouterr().err == "segtrain: /home/ann/run: permission denied\n"
    with pytest.raises(PermissionError):
        exit_code.run(fail)


@pytest.mark.parametrize(
    "error",
    [KeyError("bug"), OSError(errno.ENOSPC, "No space left on device", "x"), BrokenPipeError()],
    ids=["bug", "disk", "pipe"],
)
def test_a_mistake_in_the_program_keeps_its_traceback(monkeypatch, capfd, error):
    """As a full disk or a broken pipe that is not behind stdout."""

    def fail(args):
        raise error

    monkeypatch.setattr("segtrain.commands.config.write_schema", fail)
    with pytest.raises(type(error)):
        cli.main(["config", "schema"])
    assert capfd.readouterr() == ("", "")


@pytest.mark.fault(88)
def test_a_reader_that_leaves_early_is_told_by_the_exit_code_alone():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "segtrain", "config", "schema"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_told_in_one_line():
    command = [sys.executable, "-m", "segtrain", "config", "schema"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    said = "segtrain: cannot write: no space left on device\n"
    assert (done.returncode, done.stderr) == (6, said)


@pytest.mark.fault(88)
def test_a_closed_output_ends_no_command(config):
    shell = f'exec "$0" -m segtrain config show {config} >&-'
    done = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr


def test_a_mean_in_units_of_0_to_1_is_a_warning_where_a_run_has_begun_with_it(
    config, lab, monkeypatch
):
    run = lab.folder / "run"
    monkeypatch.setattr("segtrain.trainer.loop.run", lambda *_, **__: 7)
    write_description(run, load_config(config, [WRONG_UNIT]), ["cpu"])
    (run / "checkpoints").mkdir()
    (run / "checkpoints/last.pt").touch()
    options = ("--set", WRONG_UNIT, "--output", run, "--nproc", 1, "--resume")
    outcome = lab.command("train", config, *options)
    assert outcome.code == 7
    assert outcome.err.startswith("segtrain: warning: data.mean: [0.485, ")


def test_the_readme_shows_every_command():
    shown = (Path(segtrain.__file__).parent / "commands/README.md").read_text()
    told_elsewhere = {"config copy", "config show", "config schema"}  # configs/README.md
    names = {command.name for command in table.COMMANDS}
    assert {name for name in names if f"segtrain {name}" not in shown} == told_elsewhere
