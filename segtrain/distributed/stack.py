"""What ranks on CUDA devices run on, and whether CUDA graphs with NCCL's sums worked there before.

What was found is kept in the user's cache, a small file for each stack. A restart of the ranks
without graphs goes by the environment, since that folder may be read-only.
"""

import hashlib
import json
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from segtrain import __version__, files
from segtrain.distributed import collectives as dist
from segtrain.distributed.machine import NCCL_ENGINE, driver_version
from segtrain.files import cache_folder

Verdict = Literal["proven", "differs", "silent"]
"""A replayed step computed the bits of the step itself; other numbers; or did not come back."""

_FOLDER, _MAX_BYTES = "graphs", 10_000


@dataclass(frozen=True)
class DeviceStack:
    """Versions and devices of all ranks; whether graphs work may differ with any of them."""

    segtrain: str
    torch: str
    cuda: str
    nccl: str
    engine: str  # of torch's two for NCCL
    driver: str
    devices: tuple[str, ...]  # of the ranks, in their order
    machines: int

    def __str__(self) -> str:
        counts = Counter(self.devices)
        devices = ", ".join(f"{number} x {name}" for name, number in counts.items())
        return (
            f"segtrain {self.segtrain}, torch {self.torch}, CUDA {self.cuda}, NCCL {self.nccl} "
            f"({self.engine}), driver {self.driver}, {devices} on {self.machines} "
            f"machine{'s' if self.machines > 1 else ''}"
        )

    def _file(self) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return cache_folder(_FOLDER, f"{digest[:16]}.json")

    def verdict(self) -> Verdict | None:
        """What this machine's cache says of it; None: nothing."""
        return _read(self._file())[1]

    def keep(self, verdict: Verdict) -> None:
        """Writes `verdict` into the cache, if it can be written."""
        content = {"verdict": verdict, "date": time.strftime("%Y-%m-%d"), "stack": asdict(self)}
        with suppress(OSError):
            self._file().parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(self._file(), json.dumps(content, indent=1) + "\n")


def stack_of_ranks() -> DeviceStack:
    """That of all ranks, each on its CUDA device (collective)."""
    import torch  # not above: `doctor` reads verdicts where it may be missing

    mine = dist.rank() - dist.local_rank(), torch.cuda.get_device_name()
    first_ranks, devices = zip(*dist.all_gather_object(mine), strict=True)
    return DeviceStack(
        segtrain=__version__,
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        engine="NCCL" if os.environ.get(NCCL_ENGINE) == "0" else "NCCL2",
        driver=driver_version() or "unknown",
        devices=tuple(devices),
        machines=len(set(first_ranks)),
    )


def verdict_of_ranks(stack: DeviceStack) -> Verdict | None:
    """What the machines know of `stack`: the worst; proven only if all know it (collective)."""
    # Machines have caches of their own, and all ranks must decide alike.
    known = dist.all_gather_object(stack.verdict())
    bad = next((verdict for verdict in known if verdict in ("differs", "silent")), None)
    return bad or (None if None in known else "proven")


def kept_verdicts() -> list[tuple[DeviceStack, Verdict]]:
    """All that this machine's cache holds."""
    pairs = [_read(path) for path in sorted(cache_folder(_FOLDER).glob("*.json"))]
    return [(stack, verdict) for stack, verdict in pairs if stack and verdict]


def _read(path: Path) -> tuple[DeviceStack | None, Verdict | None]:
    """What `keep` has written; a file that is missing or damaged says nothing."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        content = files.parse_json(files.read_bytes(path, _MAX_BYTES))
        fields = content["stack"] | {"devices": tuple(content["stack"]["devices"])}
        if content["verdict"] in ("proven", "differs", "silent"):
            return DeviceStack(**fields), content["verdict"]
    return None, None
