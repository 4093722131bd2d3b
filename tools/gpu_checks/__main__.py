"""`python -m gpu_checks PLACE DEVICE FILE FOLDER`: a check, or the machine, into FILE."""

import json
import sys
from importlib import import_module
from pathlib import Path

from segtrain.files import write_atomic


def main(place: str, device: str, file: str, folder: str) -> None:
    import torch

    from gpu_checks.findings import Findings
    from gpu_checks.surroundings import describe

    if place == "machine":
        write_atomic(Path(file), json.dumps(describe(device)), durable=False)
        return
    findings = Findings(Path(file))
    # With the index: NCCL and the memory statistics ask for it.
    chosen = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    module, name = place.split(":")
    getattr(import_module(module), name)(findings, chosen, Path(folder))
    findings.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
