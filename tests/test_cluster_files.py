"""tools/cluster: each file does what it says, as far as a machine without these systems can tell.

SLURM's programs, EC2's metadata and the programs of a machine that boots have stand-ins; manifests
are checked against Kubernetes' schemas; the image's wheel is built from what the Dockerfile copies.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
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


def parsed(words):
    """What the command line of segtrain makes of these words."""
    return cli._parser().parse_args(words)


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_are_of_the_shell_s_grammar(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert path.stat().st_mode & 0o100
    assert "set -euo pipefail" in path.read_text()


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
    """A batch script as `sbatch` runs it, with fewer tasks on each node."""

    def __init__(self, script, *words, where, number, array_task=None, tasks_per_node=None):
        given = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.M))
        assert len(given) == script.read_text().count("#SBATCH")
        for name, value in given.items():
            pattern = SBATCH[name]
            assert re.fullmatch(pattern, value) if pattern else not value, name
        assert {"requeue", "signal"} <= given.keys()
        bin = where / "bin"
        program(bin, "segtrain", f'exec {PYTHON} -m segtrain "$@"')
        program(bin, "srun", SRUN, sys.executable)
        program(bin, "scontrol", SCONTROL)
        self.where = where / f"job{number}"
        self.where.mkdir()
        asked = int(given.get("ntasks-per-node", given.get("ntasks", 0)))
        self.command = ["bash", script, *words]
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {
            "PATH": f"{bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": str(number),
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

    def end_time_after(self, run, step):
        """Sends the signal of --signal to the tasks of the step, once the run has done `step`."""
        deadline = time.monotonic() + 120
        while step not in logged_steps(run):
            assert self.process.poll() is None, (self.where / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for pid in (self.where / "tasks").read_text().splitlines()[-1].split():
            os.kill(int(pid), signal.SIGUSR1)

    def goes_on_after_its_time(self, run):
        """It ends after step 2 or so, one of its tasks queues it again, and that job ends well."""
        self.end_time_after(run, 2)
        assert self.wait() == 143, (self.where / "log").read_text()
        assert self.requeued == [self.environ["SLURM_JOB_ID"]]
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
    def requeued(self):
        file = self.where / "requeued"
        return file.read_text().split() if file.exists() else []


@pytest.fixture
def config(tmp_path):
    write_data(tmp_path)
    options = small(tmp_path, train={"steps": 40, "batch_size": 4})
    return write_config(tmp_path / "c.yaml", options)


@pytest.mark.fault(13)
def test_a_task_of_an_array_trains_a_seed_and_goes_on_after_its_time(run_ranks, tmp_path, config):
    words = {"where": tmp_path, "number": 7}
    job = Job(CLUSTER / "slurm_array.sh", config, array_task=3, **words)
    run = job.where / "runs/c_seed3"
    job.goes_on_after_its_time(run)
    options = yaml.safe_load(config.read_text()) | {"seed": 3}
    alone = write_config(tmp_path / "alone.yaml", options)
    assert run_ranks(1, train, alone, tmp_path / "alone") == [0]
    assert_same_state(last(run), last(tmp_path / "alone"))


def test_a_task_of_an_array_trains_a_config_of_several(tmp_path, config):
    other = shutil.copy(config, tmp_path / "d.yaml")
    words = {"where": tmp_path, "number": 3}
    job = Job(CLUSTER / "slurm_array.sh", config, other, array_task=1, **words)
    assert job.wait() == 0
    assert [path.name for path in (job.where / "runs").iterdir()] == ["d"]
    words["number"] = 4
    job = Job(CLUSTER / "slurm_array.sh", config, other, array_task=2, **words)
    assert job.wait() == 1
    assert "no config for this task" in (job.where / "log").read_text()


@pytest.mark.fault(13)
def test_a_job_of_two_nodes_goes_on_after_its_time(run_ranks, tmp_path, config):
    options = yaml.safe_load(config.read_text())
    options["train"]["shares"] = 4  # so that one rank trains the same bits
    words = (write_config(config, options), "--output", "out")
    job = Job(CLUSTER / "slurm_nodes.sh", *words, where=tmp_path, number=5, tasks_per_node=1)
    run = job.where / "out"
    job.goes_on_after_its_time(run)
    assert "devices    2 x cpu" in (job.where / "log").read_text()
    assert run_ranks(1, train, config, tmp_path / "alone") == [0]
    assert_same_state(last(run), last(tmp_path / "alone"))


# The image.


def dockerfile_text():
    return (CLUSTER / "Dockerfile").read_text()


def stages():
    """The instructions of each stage of the Dockerfile, as (word, rest); the first has none."""
    text = re.sub(r"^#.*\n", "", dockerfile_text(), flags=re.M).replace("\\\n", " ")
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
    ("device", "index"),
    [("cpu", "https://download.pytorch.org/whl/cpu"), ("cuda", "https://pypi.org/simple")],
)
def test_the_build_argument_chooses_torch(tmp_path, device, index):
    program(tmp_path, "pip", 'echo "$@"')
    (line,) = [line for line in runs(stages()[2]) if "torchvision" in line]
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DEVICE": device}
    done = subprocess.run(["sh", "-c", line], env=environ, capture_output=True, text=True)
    assert f"--index-url {index} torch torchvision" in done.stdout


@pytest.mark.parametrize(("extras", "end"), [("", ".whl"), ("geo,onnx", ".whl[geo,onnx]")])
def test_the_build_argument_chooses_extras(tmp_path, extras, end):
    program(tmp_path, "pip", 'printf "%s\\n" "$@"')
    (line,) = [line for line in runs(stages()[2]) if "EXTRAS" in line]
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "EXTRAS": extras}
    done = subprocess.run(["sh", "-c", line], env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"/wheels/*{end}"


def test_the_wheel_of_what_the_image_copies_has_all_that_segtrain_needs(tmp_path):
    if find_spec("hatchling") is None:
        pytest.skip("needs hatchling")
    _, first, _ = stages()
    source = tmp_path / "src"
    for rest in (rest for word, rest in first if word == "COPY"):
        *names, target = rest.split()
        for name in names:
            place = source / (name if target == "./" else target)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            place.parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, place)
    (line,) = runs(first)
    assert line.startswith("pip wheel ")
    # Its backend is here; a build of its own would fetch it.
    words = shlex.split(line.replace("/wheels", str(tmp_path / "wheels")))
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, *words[1:], "--no-build-isolation", "-q"], cwd=source, check=True)
    (wheel,) = (tmp_path / "wheels").glob("segtrain-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    environ = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    options = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True}
    done = subprocess.run([site / "bin/segtrain", "config", "list"], **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(list((ROOT / "configs").glob("*.yaml")))
    code = "import segtrain; from segtrain.data.read.classes import load_class_file as load"
    code += "; print(segtrain.__file__, load('camvid').num_classes)"
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.stdout.split() == [str(site / "segtrain/__init__.py"), "11"], done.stderr
    assert [path.name for path in site.glob("segtrain-*.dist-info/licenses/*")] == ["LICENSE"]
