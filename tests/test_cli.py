import errno
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("command", table.COMMANDS, ids=lambda command: command.name)
def test_a_command_names_a_function_that_exists(command):
    module, name = command.function.split(":")
    assert callable(getattr(import_module(f"segtrain.{module}"), name))


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
    code = f"import sys, segtrain.commands.train.loop; print({later!r} & set(sys.modules))"
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
    ("argv", "usage"),
    [
        ("", ""),
        ("trian c.yaml", ""),
        ("train", "train"),
        ("train c.yaml --nproc 0", "train"),
        ("train c.yaml --nnodes 2", "train"),
        ("train c.yaml --nnodes 2 --rdzv-endpoint host:99 --node-rank 2", "train"),
        ("predict runs/x --output out", "predict"),
        ("data synth root --size 64", "data synth"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_the_usage_of_its_command(argv, usage, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: segtrain {usage} [-h]".replace("  ", " "))


@pytest.mark.parametrize(
    ("argv", "ending"),
    [
        ("train c.yaml --lr 0.1", "arguments: --lr 0.1; did you mean --set optim.lr=VALUE?"),
        ("train c.yaml --train.crop_size", "; did you mean --set augment.crop_size=VALUE?"),
        ("train c.yaml train.batch_size=4", "; did you mean --set train.batch_size=VALUE?"),
        ("eval runs/x --flip", "; did you mean --set eval.flip=VALUE?"),
        ("train c.yaml --gpus 2", "is an option of the command: --nproc"),
        ("export runs/x --format onnx --output x --lr 0.1", "arguments: --lr 0.1"),
        ("train c.yaml --zebra 1", "arguments: --zebra 1"),
    ],
)
def test_an_unknown_option_is_refused_with_what_may_be_meant(argv, ending, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(ending)


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


@pytest.mark.parametrize("argv", ["train own.yaml", "export run --format onnx"])
def test_an_output_that_libraries_cannot_name_is_refused_at_once(config, capsys, monkeypatch, argv):
    monkeypatch.chdir(config.parent)
    assert cli.main([*argv.split(), "--output", "q\udcff.onnx"]) == 2
    assert capsys.readouterr().err.endswith(": expected a name in UTF-8\n")


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://b", "http://x/y", "file:///tmp/run"])
def test_an_address_is_no_folder_of_this_machine(config, capsys, address):
    """pathlib makes a local folder `s3:` of it."""
    with pytest.raises(SystemExit) as left:
        cli.main(["train", str(config), "--output", address])
    assert left.value.code == 2
    scheme = address.partition("//")[0] + "//"
    said = f"--output: {scheme} is neither read nor written: expected a local path, got '{address}'"
    assert said in capsys.readouterr().err
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


def test_a_mean_in_units_of_0_to_1_is_refused_unless_a_run_has_begun_with_it(
    config, capsys, tmp_path, monkeypatch
):
    options = ["--set", WRONG_UNIT, "--output", str(tmp_path / "run"), "--nproc", "1"]
    monkeypatch.setattr("segtrain.commands.train.loop.run", lambda *_, **__: 7)
    said = (
        "segtrain: --set data.mean: [0.485, 0.456, 0.406] is in units of 0..1, and pixels are "
        "0..255 here; write [123.675, 116.28, 103.53]\n"
    )
    for words in (["data", "check", str(config), *options[:2]], ["train", str(config), *options]):
        assert cli.main([*words, *(["--resume"] if words[0] == "train" else [])]) == 2
        assert capsys.readouterr().err == said
    write_description(tmp_path / "run", load_config(config, [WRONG_UNIT]), ["cpu"])
    (tmp_path / "run/checkpoints").mkdir()
    (tmp_path / "run/checkpoints/last.pt").touch()
    assert cli.main(["train", str(config), *options, "--resume"]) == 7
    assert capsys.readouterr().err.startswith("segtrain: warning: data.mean: [0.485, ")
