"""tools/cluster: each file does what it says, as far as a machine without these systems can tell.

SLURM's programs have stand-ins; the image's wheel is built from what the Dockerfile copies.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from experiments import assert_same_state, last, small, train, write_config, write_data
from processes import logged_steps

from segtrain import cli

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "tools/cluster"
PYTHON = shlex.quote(sys.executable)


def program(folder, name, text, interpreter="/bin/bash"):
    """Writes an executable file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{interpreter}\n{text}\n")
    path.chmod(0o755)
    return path


# SLURM. The test is its controller: it starts batch scripts, ends their time, and queues again.

SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"USR1@\d+",
    "requeue": None,
    "open-mode": "append",
    "output": r"[\w%-]+\.out",
}
SRUN = """
import os, subprocess, sys
assert sys.argv[1] == f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}", sys.argv
nodes, each = (int(os.environ[name]) for name in ("SLURM_NNODES", "STANDIN_TASKS_PER_NODE"))
step = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": str(nodes * each),
    "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})",
    "SLURM_STEP_NODELIST": f"node[1-{nodes}]",
}
tasks = []
for rank in range(nodes * each):
    place = zip(("SLURM_NODEID", "SLURM_LOCALID"), map(str, divmod(rank, each)))
    environ = os.environ | step | {"SLURM_PROCID": str(rank), **dict(place)}
    tasks.append(subprocess.Popen(sys.argv[2:], env=environ))
with open("tasks", "a") as file:
    print(*(task.pid for task in tasks), file=file)
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
case "$1 $2" in
    "show hostnames") for _ in $(seq "$SLURM_NNODES"); do echo 127.0.0.1; done ;;
    "requeue $SLURM_JOB_ID") echo "$2" >> requeued ;;
    *) exit 2 ;;
esac
"""


class Job:
    """A batch script as `sbatch` runs it; tasks_per_node: fewer tasks than it asks for."""

    def __init__(self, script, *words, where, array_task=None, tasks_per_node=None, segtrain=None):
        assert script.stat().st_mode & 0o100
        assert "set -euo pipefail" in script.read_text()
        given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.M))
        assert len(given) == script.read_text().count("#SBATCH")
        for name, value in given.items():
            pattern = SBATCH[name]
            assert re.fullmatch(pattern, value) if pattern else not value, name
        assert {"requeue", "signal"} <= given.keys()
        bin = where / "bin"
        program(bin, "segtrain", segtrain or f'exec {PYTHON} -m segtrain "$@"')
        program(bin, "srun", SRUN, sys.executable)
        program(bin, "scontrol", SCONTROL)
        self.where = where / "job"
        self.where.mkdir()
        asked = int(given.get("ntasks-per-node", given.get("ntasks", 0)))
        self.command = ["bash", script, *words]
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {
            "PATH": f"{bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": given["nodes"],
            "SLURM_CPUS_PER_TASK": given["cpus-per-task"],
            "STANDIN_TASKS_PER_NODE": str(tasks_per_node or asked),
        }
        if array_task is not None:
            self.environ["SLURM_ARRAY_TASK_ID"] = str(array_task)
        self.start()

    def start(self, **more):
        options = {"env": self.environ | more, "cwd": self.where, "start_new_session": True}
        with (self.where / "log").open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, **options)

    def goes_on_after_its_time(self, run):
        """It ends after step 2 or so, one of its tasks queues it again, and that job ends well."""
        deadline = time.monotonic() + 120
        while 2 not in logged_steps(run):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for pid in (self.where / "tasks").read_text().split():
            os.kill(int(pid), signal.SIGUSR1)
        assert self.wait() == 143, self.log
        assert (self.where / "requeued").read_text().split() == ["7"]
        assert 2 <= last(run).step < 40
        self.start(SLURM_RESTART_COUNT="1")
        assert self.wait() == 0

    def wait(self):
        try:
            return self.process.wait(240)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def log(self):
        return (self.where / "log").read_text()


@pytest.mark.parametrize(
    ("script", "words", "array_task", "tasks", "expected"),
    [
        ("slurm_array.sh", ["a.yaml"], 3, 1, "a.yaml --set seed=3 --output runs/a_seed3"),
        ("slurm_array.sh", ["a.yaml", "b.yaml"], 1, 1, "b.yaml"),
        ("slurm_array.sh", ["a.yaml", "b.yaml"], 2, 0, "no config for this task"),
        ("slurm_nodes.sh", ["a.yaml", "--output", "out"], None, 8, "a.yaml --output out"),
    ],
)
def test_each_task_of_a_batch_script_trains_or_goes_on(
    tmp_path, script, words, array_task, tasks, expected
):
    options = {"where": tmp_path, "array_task": array_task}
    job = Job(CLUSTER / script, *words, **options, segtrain='echo "$@"')
    assert job.wait() == (0 if tasks else 1)
    if not tasks:
        assert expected in job.log
        return
    assert job.log.splitlines() == [f"train {expected} --resume --requeue"] * tasks
    assert cli._parser().parse_args(job.log.splitlines()[0].split()).requeue


@pytest.mark.slow("commands", "trainer", "distributed")
@pytest.mark.fault(13)
@pytest.mark.parametrize("script", ["slurm_array.sh", "slurm_nodes.sh"])
def test_a_job_goes_on_after_its_time(run_ranks, tmp_path, script):
    """One of an array trains a seed; one of two nodes has a rank on each."""
    write_data(tmp_path)
    # By shares one rank trains the same bits as two.
    options = small(tmp_path, train={"steps": 40, "batch_size": 4, "shares": 4})
    config = write_config(tmp_path / "c.yaml", options)
    is_array = script == "slurm_array.sh"
    more = {"array_task": 3} if is_array else {"tasks_per_node": 1}
    words = () if is_array else ("--output", "runs/c_seed3", "--set", "seed=3")
    job = Job(CLUSTER / script, config, *words, where=tmp_path, **more)
    run = job.where / "runs/c_seed3"
    job.goes_on_after_its_time(run)
    assert ("devices    2 x cpu" in job.log) != is_array
    alone = write_config(tmp_path / "alone.yaml", options | {"seed": 3})
    assert run_ranks(1, train, alone, tmp_path / "alone") == [0]
    assert_same_state(last(run), last(tmp_path / "alone"))


# The image.


def stages():
    """The instructions of each stage of the Dockerfile, as (word, rest); the first has none."""
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Dockerfile").read_text(), flags=re.M)
    text = text.replace("\\\n", " ")
    found = [[]]
    for word, rest in re.findall(r"^([A-Z]+) (.*)$", text, re.M):
        if word == "FROM":
            found.append([])
        found[-1].append((word, " ".join(rest.split())))
    assert sum(map(len, found)) == len(text.split("\n")) - text.count("\n\n") - 1
    return found


def runs(stage):
    return [rest for word, rest in stage if word == "RUN"]


def test_the_image_copies_files_that_are_there_and_does_not_run_as_root():
    _, first, second = stages()
    for word, rest in first + second:
        if word == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    assert ("USER", "1000") in second
    assert any("useradd --uid 1000" in line for line in runs(second))
    assert ("ENTRYPOINT", '["segtrain"]') in second
    for line in runs(first) + runs(second):
        assert subprocess.run(["sh", "-n", "-c", line]).returncode == 0, line


@pytest.mark.parametrize(
    ("argument", "value", "end"),
    [
        ("DEVICE", "cpu", "--index-url https://download.pytorch.org/whl/cpu torch torchvision"),
        ("DEVICE", "cuda", "--index-url https://pypi.org/simple torch torchvision"),
        ("EXTRAS", "", "/wheels/*.whl"),
        ("EXTRAS", "onnx,timm", "/wheels/*.whl[onnx,timm]"),
    ],
)
def test_build_arguments_choose_torch_and_extras(tmp_path, argument, value, end):
    done = run_with(tmp_path, argument, value)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith(end)


def test_an_unknown_extra_ends_the_build(tmp_path):
    done = run_with(tmp_path, "EXTRAS", "onnx,tim")
    assert done.returncode == 1
    assert done.stderr.startswith("EXTRAS: {'tim'} unknown, expected some of ['")
    assert "'timm'" in done.stderr


def run_with(folder, argument, value):
    """The instruction that uses a build argument, run with a stand-in for pip."""
    program(folder, "pip", 'echo "$@"')
    program(folder, "python", f'exec {sys.executable} "$@"')
    (line,) = [line for line in runs(stages()[2]) if f"${argument}" in line.replace("{", "")]
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", argument: value}
    return subprocess.run(["sh", "-c", line], env=environ, capture_output=True, text=True)


def test_the_wheel_of_what_the_image_copies_has_all_that_segtrain_needs(tmp_path):
    """Built by its backend, without pip, which would fetch one."""
    pytest.importorskip("hatchling")
    _, first, _ = stages()
    source, site = tmp_path / "src", tmp_path / "site"
    for rest in (rest for word, rest in first if word == "COPY"):
        *names, target = rest.split()
        for name in names:
            place = source / (name if target == "./" else target)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            place.parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, place)
    (line,) = runs(first)
    assert line.startswith("pip wheel ")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("segtrain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = "import segtrain; from segtrain.data.read.classes import load_class_file as load"
    code += "; from segtrain.cli import main; main(['config', 'list'])"
    code += "; print(segtrain.__file__, load('camvid').num_classes)"
    environ = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    options = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **options)
    *configs, told = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert len(configs) == len(list((ROOT / "configs").glob("*.yaml")))
    assert told.split() == [str(site / "segtrain/__init__.py"), "11"]
    assert [path.name for path in site.glob("segtrain-*.dist-info/licenses/*")] == ["LICENSE"]
