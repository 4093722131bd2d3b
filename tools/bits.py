"""Are the weights equal bit for bit, on any number of ranks and after interruptions?

    python tools/bits.py runs/bits --data ../CamVid                20 steps of each kind
    python tools/bits.py runs/bits --data ../CamVid --long 200     and 200 of one, also resumed

Trains with train.shares: 8 on crops of CamVid, on 1, 2, 3 and 8 CPU ranks and, as root, on two
machines (network namespaces joined by a cable); kills a run and resumes it on other numbers of
ranks. Prints the SHA-256 of everything that each run leaves; exits with 1 if any differ. For
comparison the same run without shares.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import two_machines
from commands import command, logged, settings

from segtrain.checkpoint.format import load

# Everything that could tell ranks apart is on.
EXPERIMENT = """\
data: {{layout: camvid, root: "{data}", classes: camvid, num_workers: 0}}
augment: {{crop_size: [96, 128], scale_range: [0.5, 1.5], color_prob: 0.5, blur_prob: 0.5}}
model: {{arch: pspnet, backbone: resnet18}}
loss: {{kind: ohem, ohem_min_kept: 20000}}
norm: {{precise_batches: 2}}
train: {{batch_size: 8, shares: 8}}
optim: {{lr: 0.02, clip_grad_norm: 1.0, ema_decay: 0.99}}
eval: {{every_steps: null}}
log: {{every_steps: 1}}
"""
DEEPLAB = ("model.arch=deeplabv3plus", "model.backbone=mobilenet_v2", "model.output_stride=16")
KINDS: dict[str, Sequence[str]] = {
    "float32": (),
    "bfloat16": ("train.precision=bfloat16",),
    "float16": ("train.precision=float16", "train.batch_size=16", "train.accumulate_steps=2"),
    "float64": ("train.precision=float64", "loss.kind=dice", "loss.ohem_min_kept=100000"),
    "AdamW": ("optim.kind=adamw", "optim.lr=0.001"),
    "DeepLabV3+": DEEPLAB,
}
RANKS = (1, 2, 3, 8)
RESUMED = (3, 1, 2)
ADDRESS = "10.78.0.{}"


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where runs are written; must be new")
    parser.add_argument("--data", type=Path, required=True, help="CamVid: images/, labels/")
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    parser.add_argument("--long", type=int, default=0, metavar="STEPS")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    args.directory.mkdir(parents=True)
    config = args.directory / "bits.yaml"
    config.write_text(EXPERIMENT.format(data=args.data.resolve()))
    failed = False
    for kind in args.kinds:
        runs = {f"{n} ranks": Run(args.directory / f"{kind}_{n}", config, kind) for n in RANKS}
        for count, run in zip(RANKS, runs.values(), strict=True):
            run.train(count, args.steps)
        if os.geteuid() == 0:
            run = Run(args.directory / f"{kind}_machines", config, kind)
            train_on_two_machines(run, args.steps)
            runs["2 machines, 1 + 2 ranks"] = run
        failed |= not report(f"{kind}, {args.steps} steps", runs)
    usual = {}
    for count in RANKS[:3]:
        run = Run(args.directory / f"null_{count}", config, "float32", "train.shares=null")
        run.train(count, args.steps)
        usual[f"{count} ranks"] = run
    report(f"float32, {args.steps} steps, train.shares null", usual)
    if args.long:
        counts = RANKS[:3]
        runs = {f"{n} ranks": Run(args.directory / f"long_{n}", config, "float32") for n in counts}
        for count, run in zip(counts, runs.values(), strict=True):
            run.train(count, args.long)
        resumed = Run(args.directory / "long_resumed", config, "float32")
        resumed.train_with_interruptions(RESUMED, args.long)
        runs["resumed " + " -> ".join(map(str, RESUMED))] = resumed
        failed |= not report(f"float32, {args.long} steps", runs)
    return int(failed)


class Run:
    """One training, in parts if it is resumed."""

    def __init__(self, directory: Path, config: Path, kind: str, *options: str) -> None:
        self.directory, self.config = directory, config
        self.options = settings(*KINDS[kind], *options)

    def command(self, steps: int, *arguments: object) -> list[str]:
        """`segtrain train` for this run."""
        words = ["train", self.config, "--output", self.directory, "--device", "cpu", *arguments]
        return command(*words, *settings(train__steps=steps), *self.options)

    def train(self, ranks: int, steps: int) -> None:
        """From the first step to the last."""
        subprocess.run(self.command(steps, "--nproc", ranks), check=True, env=environment(ranks))

    def train_with_interruptions(self, ranks: Sequence[int], steps: int) -> None:
        """A part on each of these numbers of ranks, equally long; SIGTERM ends all but the last."""
        for part, count in enumerate(ranks, start=1):
            resume = ["--resume"] if part > 1 else []
            words = self.command(steps, "--nproc", count, *resume)
            process = subprocess.Popen(words, env=environment(count))
            while part < len(ranks) and len(self.losses()) < part * steps // len(ranks):
                if process.poll() is not None:
                    raise RuntimeError(f"{self.directory} ended too early")
                time.sleep(0.05)
            if part < len(ranks):
                process.send_signal(signal.SIGTERM)
            process.wait()

    def losses(self) -> list[float]:
        """The loss of every step that has been logged."""
        return logged(self.directory, "train/loss")

    def digests(self) -> dict[str, str]:
        """SHA-256 of what the run has left, by name."""
        saved = load(self.directory / "checkpoints" / "last.pt")
        parts = {"weights": saved.model, "average": saved.average, "best": saved.best}
        parts |= {"optimizer": saved.optimizer["state"], "losses": self.losses()}
        receipts = self.directory / "receipts.jsonl"
        if receipts.exists():  # with shares
            parts["receipts"] = receipts.read_text()
        return {name: sha256(part) for name, part in parts.items()}


def environment(ranks: int) -> dict[str, str]:
    """One thread for each of several ranks; two for one, which computes two shares at a time."""
    return os.environ | {"OMP_NUM_THREADS": "2" if ranks == 1 else "1"}


def train_on_two_machines(run: Run, steps: int) -> None:
    """One rank on the first machine, two on the second."""
    names = [f"bits-{os.getpid()}-{node}" for node in range(2)]
    try:
        two_machines.join(names, ADDRESS)
        processes = []
        for node, name in enumerate(names):
            place = ["--master-addr", ADDRESS.format(1), "--master-port", "29400"]
            size = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(node + 1)]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *size, *place]
            words = run.command(steps)
            group = [*torchrun, *words[words.index("-m") :]]
            group = ["ip", "netns", "exec", name, *group]
            processes.append(subprocess.Popen(group, env=environment(2)))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"{run.directory}: training on two machines failed")
    finally:
        two_machines.remove(names)


def report(title: str, runs: dict[str, Run]) -> bool:
    """Prints the digests; whether they are all equal."""
    digests = {name: run.digests() for name, run in runs.items()}
    first = next(iter(digests.values()))
    print(f"\n{title}\n  {'':26}" + "".join(f"{part:18}" for part in first))
    for name, parts in digests.items():
        print(f"  {name:26}" + "".join(f"{digest[:16]:18}" for digest in parts.values()))
    equal = all(parts == first for parts in digests.values())
    print("  all equal" if equal else "  DIFFERENT", flush=True)
    return equal


def sha256(value: Any) -> str:
    """Of all numbers in nested containers, in order, with the names of dicts."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            digest.update(repr((part.dtype, tuple(part.shape))).encode())
            digest.update(part.contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            for key, inner in part.items():
                digest.update(repr(key).encode())
                add(inner)
        elif isinstance(part, list | tuple):
            for inner in part:
                add(inner)
        else:
            digest.update(repr(part).encode())

    add(value)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
