"""SLURM: srun's variables translated into torch's, and requeueing the job."""

import os
import re
import subprocess
from collections.abc import Mapping

from segtrain.errors import ConfigError, ExecutionError


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks: a batch script has no step id."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    return "SLURM_STEP_ID" in environ and tasks != "1"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a task that srun started; ConfigError: one of srun's is missing.

    MASTER_ADDR is the first host of the step. MASTER_PORT differs between jobs and steps, which may
    share a host.
    """
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    needed = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", tasks, "SLURM_LOCALID"]
    needed += [nodes] if "MASTER_ADDR" not in environ else []
    missing = [name for name in needed if name not in environ]
    if missing:
        raise ConfigError(f"environment: of srun's variables {', '.join(missing)} are missing")
    job, step = number(environ, "SLURM_JOB_ID"), number(environ, "SLURM_STEP_ID")
    # The same on all nodes without a word between them; 16 steps of a job have ports of their own.
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
    """The value of the variable `name`; ConfigError: it is no non-negative integer."""
    text = environ[name]
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"environment: {name}: expected a number, got {text!r}")
    return int(text)


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    """From srun's list, in which `4(x2),3` means nodes with 4, 4 and 3 tasks; 1 if unknown."""
    tasks = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            tasks += [int(match[1])] * int(match[2] or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return tasks[node] if node < len(tasks) else 1


def _first_host(nodes: str) -> str:
    try:
        return _run("scontrol", "show", "hostnames", nodes).split()[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"environment: cannot tell the first host of {nodes!r} ({error}); set MASTER_ADDR"
        ) from None


def requeue() -> None:
    """Asks SLURM to start this job again, which then resumes the run."""
    command = ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]]
    try:
        _run(*command)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise ExecutionError(
            f"{' '.join(command)}: {reason.strip()}; the run is saved, go on with --resume"
        ) from None


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
