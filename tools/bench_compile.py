"""What train.compile is worth: steps with and without it, in turns, in one process.

    python tools/bench_compile.py --threads 2
    python tools/bench_compile.py --set train.precision=bfloat16 --set model.output_stride=8

The demonstration's model and batch, random images. The times are those of whole steps, optimizer
included and loader left out. Other work on the machine disturbs them, hence blocks in turns, the
medians, and --clock cpu, the time that the threads of this process worked. The first compiled step
is that of compiling, unless torch's cache (TORCHINDUCTOR_CACHE_DIR) holds the code already.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from segtrain.config import Config, load_config
from segtrain.distributed.machine import keep_freed_memory
from segtrain.models import build_model
from segtrain.norm import make_norm
from segtrain.training.engine import StepResult, train_steps
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch

CONFIG = Path(__file__).resolve().parent.parent / "configs/demo.yaml"
NUM_CLASSES = 19
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=6, help="blocks of steps of each kind")
    parser.add_argument("--block", type=int, default=5, help="steps in a block")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    device, clock = torch.device(options.device), CLOCKS[options.clock]

    length = 1 + options.blocks * options.block
    runs = {}
    for name, value in (("eager", "false"), ("compiled", "true")):
        settings = [f"train.steps={length}", "train.warmup_steps=0", f"train.compile={value}"]
        runs[name] = steps(load_config(CONFIG, [*settings, *options.overrides]), device)
        print(
            f"{name:9} first step {timed(runs[name], 1, device, CLOCKS['wall'])[0]:8.2f} s",
            flush=True,
        )

    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.blocks):
        for name, run in runs.items():
            times[name] += timed(run, options.block, device, clock)
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:9} {middle:.4f} s a step (quartiles {low:.4f} to {high:.4f})")
    ratios = ratios_of_blocks(times, options.block)
    print(
        f"eager / compiled: {statistics.median(ratios):.2f}, by blocks "
        f"{min(ratios):.2f} to {max(ratios):.2f}"
    )
    return 0


def steps(config: Config, device: torch.device) -> Iterator[StepResult]:
    """The steps of a training on random images."""
    torch.manual_seed(config.seed)
    model = build_model(config.model, num_classes=NUM_CLASSES, norm=make_norm(config.norm))
    state = make_state(model, config, device)
    rows = [range(config.train.batch_size)]
    batch = random_batch(config)
    step_sync = StepSync(lambda: False)
    return train_steps(
        state,
        [batch] * config.train.steps,
        config,
        device=device,
        indices=rows,
        step_sync=step_sync,
    )


def random_batch(config: Config) -> Batch:
    size = (config.train.batch_size, *config.augment.crop_size)
    images = torch.randint(256, (size[0], 3, *size[1:]), dtype=torch.uint8)
    labels = torch.randint(NUM_CLASSES, size, dtype=torch.uint8)
    return Batch(images.contiguous(memory_format=torch.channels_last), labels, ["random"])


def timed(
    run: Iterator[StepResult], count: int, device: torch.device, clock: Callable[[], float]
) -> list[float]:
    """The seconds of each of the next steps."""
    seconds = []
    for _ in range(count):
        began = clock()
        next(run)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    return seconds


def ratios_of_blocks(times: dict[str, list[float]], block: int) -> list[float]:
    """The ratio of the medians of each two blocks that ran side by side."""
    medians = {
        name: [statistics.median(values[i : i + block]) for i in range(0, len(values), block)]
        for name, values in times.items()
    }
    return [a / b for a, b in zip(medians["eager"], medians["compiled"], strict=True)]


if __name__ == "__main__":
    sys.exit(main())
