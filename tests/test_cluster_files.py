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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest
import yaml
from experiments import assert_same_state, last, small, train, write_config, write_data
from processes import logged_steps

from segtrain import cli, errors

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
    words = (write_config(config, options), "--output", "out", "--set", "log.prometheus=true")
    job = Job(CLUSTER / "slurm_nodes.sh", *words, where=tmp_path, number=5, tasks_per_node=1)
    run = job.where / "out"
    job.goes_on_after_its_time(run)
    assert "devices    2 x cpu" in (job.where / "log").read_text()
    assert run_ranks(1, train, config, tmp_path / "alone") == [0]
    assert_same_state(last(run), last(tmp_path / "alone"))


# Kubernetes.


def manifests():
    claim, jobset = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text())
    return claim, jobset


def job_of(jobset):
    """The Job that the JobSet operator makes, which is all but the names around it."""
    (machines,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": machines["name"]}}
    return job | machines["template"]


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_claim_and_job_are_of_the_schemas_of_kubernetes(version):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    claim, jobset = manifests()
    job = job_of(jobset)
    for resource in (claim, job):
        kubernetes.validate(resource, version, strict=True)
    job["spec"]["template"]["spec"]["containers"][0]["volumes"] = []
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(job, version, strict=True)


def test_the_jobset_has_fields_of_its_api_alone():
    """Of jobset.x-k8s.io/v1alpha2; there is no schema of it here."""
    _, jobset = manifests()
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"].keys() == {"failurePolicy", "replicatedJobs"}
    policy = jobset["spec"]["failurePolicy"]
    assert policy.keys() == {"maxRestarts", "rules"}
    assert policy["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    (machines,) = jobset["spec"]["replicatedJobs"]
    assert machines.keys() == {"name", "replicas", "template"}
    assert machines["template"].keys() == {"spec"}


def test_the_pods_have_what_a_training_needs():
    claim, jobset = manifests()
    job = job_of(jobset)["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/work"] == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert container["workingDir"] == "/work"
    assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile_text()
    disruption, permanent = job["podFailurePolicy"]["rules"]
    assert disruption["action"] == "Ignore"
    codes = errors.EXIT_CONFIG, errors.EXIT_DATA, errors.EXIT_CHECKPOINT, errors.EXIT_NON_FINITE
    assert permanent["onExitCodes"]["values"] == [*codes, errors.EXIT_MEMORY]
    assert permanent["onExitCodes"]["containerName"] == container["name"]


def test_the_pods_command_is_one_of_segtrain():
    _, jobset = manifests()
    job = job_of(jobset)["spec"]
    args = parsed(job["template"]["spec"]["containers"][0]["args"])
    assert args.nnodes == (1, job["completions"])
    assert job["parallelism"] == job["completions"]


# EC2.

ARGUMENTS = ["my config.yaml", "--set", "data.root=it's $HOME"]
AWS = """
printf '%s\\n' "$*" >> {calls}
case "$1 $2" in
    "ec2 run-instances")
        for word in "$@"; do case $word in file://*) cp "${{word#file://}}" {user_data};; esac; done
        echo "i-1 sir-1" ;;
    "ec2 describe-instances") echo sir-1 ;;
    "ec2 cancel-spot-instance-requests") ;;
    "s3 sync")
        from=${{4/s3:\\/\\//{bucket}/}} to=${{5/s3:\\/\\//{bucket}/}}
        mkdir -p "$to" && cp -r "$from/." "$to" ;;
    *) exit 2 ;;
esac
"""


@pytest.fixture
def cloud(tmp_path):
    """Runs ec2_spot.sh with a stand-in for aws; what it was called with, and the user data."""
    bin, calls, user_data = tmp_path / "bin", tmp_path / "calls", tmp_path / "user_data"
    bucket = str(tmp_path / "s3").replace("/", "\\/") + "\\/"
    program(bin, "aws", AWS.format(calls=calls, user_data=user_data, bucket=bucket))
    path = f"{bin}:{os.environ['PATH']}"

    def request(*words, **environ):
        given = {"PATH": path, "IMAGE": "ami-1", "TYPE": "g6.xlarge", **environ}
        return subprocess.run(
            [CLUSTER / "ec2_spot.sh", *words], env=given, capture_output=True, text=True
        )

    request.bin, request.calls, request.user_data, request.path = bin, calls, user_data, path
    return request


def test_a_request_for_spot_machines_that_are_started_again(cloud):
    done = cloud(*ARGUMENTS, "--nnodes", "2:4", WORK="fs-1.efs:/", COUNT="4", PROFILE="p")
    assert (done.returncode, done.stdout, done.stderr) == (0, "i-1 sir-1\n", "")
    (call,) = cloud.calls.read_text().splitlines()
    for part in (
        "--count 4",
        "--image-id ami-1",
        "SpotInstanceType=persistent,InstanceInterruptionBehavior=stop",
        "--metadata-options HttpTokens=required",
        "--iam-instance-profile Name=p",
    ):
        assert part in call
    assert "--subnet-id" not in call
    assert cloud.user_data.read_text().startswith("#!/bin/bash\nwork=fs-1.efs:/\narguments=(")
    assert len(cloud.user_data.read_bytes()) < 16384


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ([], {"WORK": "s3://b/f"}, "which config?"),
        (["c.yaml"], {"WORK": "s3://b/f", "COUNT": "2"}, "WORK: several machines need a folder"),
        (["c.yaml"], {}, "WORK: s3://bucket/folder or host:/path"),
        (["c.yaml"], {"WORK": "s3://b/f", "IMAGE": ""}, "IMAGE: an image, ami-..."),
    ],
)
def test_a_request_that_misses_something_is_refused(cloud, words, environ, said):
    done = cloud(*words, **environ)
    assert done.returncode != 0
    assert said in done.stderr
    assert not cloud.calls.exists()


def test_aws_itself_takes_the_request(cloud, monkeypatch):
    """The command line of AWS checks the options; moto answers as EC2."""
    server = pytest.importorskip("moto.server", reason="needs moto[server]")
    real = shutil.which("aws")
    if real is None:
        pytest.skip("needs the aws command")
    boto3 = pytest.importorskip("boto3", reason="needs boto3")
    (cloud.bin / "aws").unlink()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    keys["AWS_DEFAULT_REGION"] = "eu-central-1"
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    moto = server.ThreadedMotoServer("127.0.0.1", 0)
    moto.start()
    try:
        url = "http://{}:{}".format(*moto.get_host_and_port())
        ec2 = boto3.client("ec2", endpoint_url=url)
        image = ec2.describe_images()["Images"][0]["ImageId"]
        iam = boto3.client("iam", endpoint_url=url)
        iam.create_instance_profile(InstanceProfileName="segtrain")
        given = keys | {"AWS_ENDPOINT_URL": url, "HOME": os.environ["HOME"], "IMAGE": image}
        given |= {"COUNT": "2", "PROFILE": "segtrain", "WORK": "fs-1.efs:/"}
        done = cloud(*ARGUMENTS, **given)
        assert done.returncode == 0, done.stderr
        ids = [line.split()[0] for line in done.stdout.splitlines()]
        found = ec2.describe_instances(InstanceIds=ids)["Reservations"][0]["Instances"]
        assert [machine["InstanceType"] for machine in found] == ["g6.xlarge"] * 2
        assert found[0]["InstanceLifecycle"] == "spot"
        attribute = ec2.describe_instance_attribute(InstanceId=ids[0], Attribute="userData")
        assert attribute["UserData"]["Value"]
    finally:
        moto.stop()


class Metadata(BaseHTTPRequestHandler):
    """EC2's metadata of the second version: each answer needs a token."""

    values: dict[str, str]

    def do_PUT(self):
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self.answer("secret" if self.path == "/latest/api/token" and seconds else None)

    def do_GET(self):
        if self.headers.get("X-aws-ec2-metadata-token") != "secret":
            return self.answer(None, 401)
        return self.answer(self.values.get(self.path.removeprefix("/latest/meta-data/")))

    def answer(self, text, code=404):
        self.send_response(code if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata():
    """Values of the metadata, and the address that serves them."""
    handler = type("Handler", (Metadata,), {"values": {"instance-id": "i-1"}})
    handler.values["placement/region"] = "eu-central-1"
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield handler.values, "{}:{}".format(*server.server_address)
        server.shutdown()


@pytest.fixture
def machine(cloud, metadata, tmp_path):
    """A machine that has booted with the user data of `ec2_spot.sh WORDS`, below tmp_path/disk."""
    disk, (_, address), bin = tmp_path / "disk", metadata, cloud.bin

    def boot(*words, **environ):
        assert cloud(*words, **environ).returncode == 0
        text = cloud.user_data.read_text().replace("169.254.169.254", address)
        for path in ("work", "opt/segtrain", "etc"):
            text = re.sub(rf"(?<![\w:])/{path}\b", f"{disk}/{path}", text)
        for name in ("apt-get", "chown", "mount", "systemctl", "journalctl"):
            program(bin, name, f'echo {name} "$@" >> {cloud.calls}')
        venv = f"""
            [ "$1 $2" = "-m venv" ] && mkdir -p "$3/bin" && ln -s {bin}/pip {bin}/segtrain "$3/bin"
        """
        program(bin, "python3", venv)
        program(bin, "pip", f'[ "$1" = install ] && [ -f "$2" ] && echo pip "$@" >> {cloud.calls}')
        program(bin, "segtrain", f'printf "%s\\0" "$@" > {tmp_path}/arguments')
        (disk / "etc/systemd/system").mkdir(parents=True)
        script = program(tmp_path, "boot", text.partition("\n")[2])
        assert run(script).returncode == 0
        return disk / "opt/segtrain"

    def run(path, *words, **environ):
        given = {"PATH": cloud.path, **environ}
        return subprocess.run([path, *words], env=given, capture_output=True, text=True)

    boot.run = run
    return boot


def in_bucket(tmp_path, *names):
    """Files of the folder s3://b/f."""
    folder = tmp_path / "s3/b/f"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_a_machine_boots_trains_and_notices_that_it_is_taken_away(
    cloud, machine, metadata, tmp_path
):
    in_bucket(tmp_path, "segtrain-1-py3-none-any.whl", "my config.yaml")
    home = machine(*ARGUMENTS, WORK="s3://b/f")
    calls = cloud.calls.read_text()
    disk = tmp_path / "disk"
    assert f"pip install {disk}/work/segtrain-1-py3-none-any.whl" in calls
    assert calls.splitlines()[-1] == "systemctl enable --now segtrain.service"
    assert (disk / "work/my config.yaml").exists()

    assert machine.run(home / "start").returncode == 0
    *words, notice = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert words == ["train", *ARGUMENTS, "--resume", "--notice"]
    # What --notice runs every few seconds: it ends with 0 once AWS has announced it.
    values, _ = metadata
    assert machine.run("/bin/sh", "-c", notice).returncode not in (0, 126, 127)
    values["spot/instance-action"] = '{"action": "stop", "time": "2026-01-01T00:00:00Z"}'
    assert machine.run("/bin/sh", "-c", notice).returncode == 0


def test_a_training_is_saved_when_its_machine_is_taken_away(machine, metadata, config, tmp_path):
    """With segtrain itself, which asks every few seconds."""
    parsed(["train", "x"])
    in_bucket(tmp_path, "x.whl")
    options = yaml.safe_load(config.read_text())
    options["train"]["steps"] = 5000
    home = machine("c.yaml", WORK="s3://b/f")
    program(tmp_path / "bin", "segtrain", f'exec {PYTHON} -m segtrain "$@"')
    write_config(tmp_path / "disk/work/c.yaml", options)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([home / "start"], cwd=tmp_path / "disk/work", env=environ)
    run = tmp_path / "disk/work/runs/c"
    try:
        while 2 not in logged_steps(run):
            assert process.poll() is None
            time.sleep(0.05)
        metadata[0]["spot/instance-action"] = '{"action": "stop"}'
        assert process.wait(120) == 143
    finally:
        if process.poll() is None:
            process.kill()
    assert 2 <= last(run).step < 5000
    assert f"step {last(run).step}, which is saved" in (run / "train.log").read_text()


def test_the_machine_s_command_is_one_of_segtrain(machine, tmp_path):
    (tmp_path / "disk/work").mkdir(parents=True)
    (tmp_path / "disk/work/x.whl").touch()
    home = machine("c.yaml", "--nnodes", "2:4", WORK="fs-1.efs:/", COUNT="4")
    assert machine.run(home / "start").returncode == 0
    args = parsed((tmp_path / "arguments").read_text().split("\0")[:-1])
    assert (args.nnodes, args.notice.split()[1]) == ((2, 4), "spot/instance-action")


@pytest.mark.parametrize(
    ("code", "restarts", "is_over"),
    [(0, 0, True), (2, 0, True), (6, 3, False), (6, 20, True), (143, 99, False)],
)
def test_a_training_that_stops_is_copied_and_its_machine_left_or_switched_off(
    cloud, machine, tmp_path, code, restarts, is_over
):
    bucket = in_bucket(tmp_path, "x.whl")
    home = machine("c.yaml", WORK="s3://b/f")
    runs = tmp_path / "disk/work/runs"
    (runs / "c").mkdir()
    (runs / "c/train.log").write_text("log")
    cloud.calls.unlink()
    text = f'[ "$1" != show ] || echo {restarts}; echo systemctl "$@" >> {cloud.calls}'
    program(cloud.bin, "systemctl", text)
    assert machine.run(home / "stop", EXIT_STATUS=str(code)).returncode == 0
    assert (bucket / "runs/c/train.log").read_text() == "log"
    calls = cloud.calls.read_text()
    assert "journalctl --unit segtrain" in (bucket / "runs/i-1.log").read_text() + calls
    cancel = "ec2 cancel-spot-instance-requests --region eu-central-1 --spot-instance-request-ids"
    assert (f"{cancel} sir-1" in calls, calls.endswith("systemctl poweroff\n")) == (is_over,) * 2


def test_several_machines_mount_what_they_share(cloud, machine, tmp_path):
    (tmp_path / "disk/work").mkdir(parents=True)
    (tmp_path / "disk/work/x.whl").touch()
    home = machine("c.yaml", "--nnodes", "2:4", WORK="fs-1.efs:/", COUNT="4")
    (line,) = (tmp_path / "disk/etc/fstab").read_text().splitlines()
    assert line.split()[:3] == ["fs-1.efs:/", f"{tmp_path}/disk/work", "nfs4"]
    assert f"mount {tmp_path}/disk/work\n" in cloud.calls.read_text()
    assert machine.run(home / "stop", EXIT_STATUS="143").returncode == 0
    assert "s3 sync" not in cloud.calls.read_text()


def test_systemd_takes_the_service(machine, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    in_bucket(tmp_path, "x.whl")
    machine("c.yaml", WORK="s3://b/f")
    unit = tmp_path / "disk/etc/systemd/system/segtrain.service"
    options = {"capture_output": True, "text": True}
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], **options)
    about = [line for line in done.stderr.splitlines() if "segtrain.service" in line]
    assert (done.returncode, about) == (0, [])
    codes = re.search(r"RestartPreventExitStatus=(.*)", unit.read_text())[1]
    known = {v for k, v in vars(errors).items() if re.fullmatch("EXIT_[A-Z_]+", k)}
    # A closed output ends no service, and 6 may go well the next time.
    assert {int(code) for code in codes.split()} == known - {0, 6, 141}


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
