"""SLURM: what srun tells a task, in torch's words, and the job started once more."""

import os
import re
import subprocess
from collections.abc import Mapping

from segtrain.errors import ConfigError, ExecutionError


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started several tasks of which this is one.

    The batch script itself has most of these variables too, but is no step.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    return "SLURM_STEP_ID" in environ and tasks != "1"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a task that srun started.

    The first host of the step is the meeting point; the port comes from the numbers of job and
    step, so that two of them on one host do not meet.

    Raises:
        ConfigError: a variable of srun's is missing, or the first host cannot be told.
    """
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    needed = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", tasks, "SLURM_LOCALID"]
    needed += [nodes] if "MASTER_ADDR" not in environ else []
    missing = [name for name in needed if name not in environ]
    if missing:
        raise ConfigError(f"environment: of srun's variables {', '.join(missing)} are missing")
    job, step = number(environ, "SLURM_JOB_ID"), number(environ, "SLURM_STEP_ID")
    port = 20_000 + (job * 16 + step) % 20_000
    return {
        "RANK": str(number(environ, "SLURM_PROCID")),
        "WORLD_SIZE": str(number(environ, tasks)),
        "LOCAL_RANK": str(number(environ, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(_tasks_on_this_node(environ)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ[nodes]),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def number(environ: Mapping[str, str], name: str) -> int:
    """A variable's value.

    Raises:
        ConfigError: it is no number.
    """
    text = environ[name]
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"environment: {name}: expected a number, got {text!r}")
    return int(text)


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    """From srun's list, in which `4(x2),3` stands for nodes with 4, 4 and 3 tasks; else 1."""
    listed = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            listed += [int(match[1])] * int(match[2] or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return listed[node] if node < len(listed) else 1


def _first_host(nodes: str) -> str:
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"environment: cannot tell the first host of {nodes!r} ({error}); set MASTER_ADDR"
        ) from None
    return listed.stdout.split()[0]


def requeue() -> None:
    """Has SLURM start this job once more; the run goes on where it was saved.

    Raises:
        ExecutionError: SLURM refuses.
    """
    command = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ExecutionError(
            f"{' '.join(command)}: {said.strip()}; the run is saved, go on with --resume"
        ) from None
