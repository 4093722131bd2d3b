"""A rank of a check: `python -m gpus.rank MODULE OPTIONS NOTES`.

MODULE, such as gpus.speed, has `items(device, options)`: functions by name, which all ranks call in
this order. Each returns its figures and the lines of what is wrong. NOTES is the file that tells
where it is.
"""

import gc
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from segtrain.distributed.process_group import device_for, process_group

# The tool has a limit of its own, which also takes the stacks.
_TIMEOUT_S = 600.0


def main(module: str, options: dict[str, Any], notes: Path) -> None:
    """Joins the group, and does the items of `module`."""

    def note(**values: Any) -> None:
        with notes.open("a") as file:
            file.write(json.dumps(values) + "\n")

    device = device_for(options["device"])
    if device.type == "cpu":
        import replays

        torch.set_num_threads(1)
        replays.install()
    note(begun="its set-up")
    with process_group(device, timeout_s=_TIMEOUT_S):
        for item, call in import_module(module).items(device, options).items():
            if item not in options["skip"]:
                note(begun=item)
                figures, problems = call()
                note(item=item, figures=figures, problems=problems)
                gc.collect()  # graphs, for which NCCL would wait when the group is left
        note(begun="leaving the group")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
