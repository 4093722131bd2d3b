"""Hostile files for everything that reads one: each is loaded, or refused by a UserError.

    python tests/fuzz.py checkpoint --minutes 10 --seed 1

Anything else is a finding: another exception, ten seconds, two gigabytes, code of a pickle that was
run. Its input is cut down while the same happens, and kept under runs/fuzz; `current` there holds
the input of a process that was killed. Exits with 1 if there was a finding.
"""

import argparse
import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import NamedTuple, NoReturn

from fuzz_inputs import SENTINEL
from fuzz_targets import TARGETS, Target

from segtrain.errors import UserError

LIMIT_S = 10
LIMIT_BYTES = 2 << 30
_MINIMIZE_S = 20
_KEPT = 400  # inputs that are changed further
_WIDTH = 300  # of a line of a trace, which may quote the input
_LARGE = 5000  # bytes of inputs that take too long for that


class Verdict(NamedTuple):
    """What became of one input.

    finding: empty if it was loaded or refused; else what happened and where, the same for inputs
        that fail alike.
    refusal: the message of the UserError; empty if there was none.
    trace: of a finding.
    """

    finding: str = ""
    refusal: str = ""
    trace: str = ""


class _TooLong(BaseException):
    """Not an Exception, which a parser may swallow."""


def judge(target: Target, data: bytes, folder: Path, name: str | None = None) -> Verdict:
    """Gives `data` to the target as a file of this name in `folder`, which is its alone."""
    path = folder / (name or target.names[0])
    path.write_bytes(data)
    sentinel = folder / SENTINEL
    with chdir(folder), _limits(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = peak_bytes()
        try:
            target.run(path)
            verdict = Verdict()
        except UserError as error:
            verdict = Verdict(refusal=str(error) or "an empty message")
        except _TooLong as error:
            verdict = _finding(error, f"more than {LIMIT_S} s")
        except Exception as error:
            verdict = _finding(error, type(error).__name__)
    if sentinel.exists():
        sentinel.unlink()
        return Verdict("the input ran code")
    # The peak never falls: only an input that raises it can be blamed.
    if peak_bytes() > max(before, LIMIT_BYTES) and not verdict.finding:
        return Verdict(f"more than {LIMIT_BYTES >> 30} GiB")
    return verdict


def _finding(error: BaseException, what: str) -> Verdict:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/segtrain/" in frame.filename] or frames
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    lines = "".join(traceback.format_exception(error)).splitlines()
    return Verdict(f"{what} at {where}", trace="\n".join(line[:_WIDTH] for line in lines))


@contextmanager
def _limits() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _TooLong

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def peak_bytes() -> int:
    """The most memory, in bytes, that this process has ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def corpus(name: str) -> list[Path]:
    """Inputs that were findings once."""
    folder = Path(__file__).resolve().parent / "corpus" / name
    return sorted(folder.glob("*"))


def inputs(target: Target, name: str, rng: Random) -> Iterator[tuple[str, bytes]]:
    """(file name, content) without end: the seeds first, then what is made of them.

    `send` an input back that is worth changing further.
    """
    pool = target.seeds() + [path.read_bytes() for path in corpus(name)]
    num_seeds = len(pool)
    for data in list(pool):
        for file_name in target.names:
            yield file_name, data
    while True:
        base = rng.choice(pool)
        made = target.mutate(rng, base, target.words)
        worth = yield rng.choice(target.names), made
        if worth:
            pool.append(made)
            if len(pool) > num_seeds + _KEPT:
                del pool[num_seeds + rng.randrange(_KEPT)]


def minimized(target: Target, data: bytes, file_name: str, finding: str, folder: Path) -> bytes:
    """`data` without the parts that the finding does not need, as far as 20 seconds go."""
    until = time.monotonic() + _MINIMIZE_S
    size = len(data) // 2
    while size:
        start = 0
        while start < len(data) and time.monotonic() < until:
            shorter = data[:start] + data[start + size :]
            if judge(target, shorter, folder, file_name).finding == finding:
                data = shorter
            else:
                start += size
        size //= 2
    return data


def campaign(name: str, seconds: float, rng: Random, folder: Path, output: Path) -> Counter[str]:
    """Judges inputs for so long; how often each kind of finding, refusal and success came."""
    target, counts, seen = TARGETS[name], Counter(), set()
    output.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + seconds
    stream, worth, armed = inputs(target, name, rng), None, 0.0
    current = (output / "current").open("wb", buffering=0)
    while time.monotonic() < until:
        file_name, data = stream.send(worth)
        current.truncate(0)
        os.pwrite(current.fileno(), data, 0)
        if time.monotonic() > armed + LIMIT_S:
            armed = time.monotonic()
            # Where no signal gets through.
            faulthandler.dump_traceback_later(6 * LIMIT_S, exit=True)
        verdict = judge(target, data, folder, file_name)
        if verdict.finding and not judge(target, data, folder, file_name).finding:
            # A machine with other work on it may have stopped for ten seconds.
            counts[f"once only: {verdict.finding}"] += 1
            verdict = Verdict()
        outcome = "refused" if verdict.refusal else "loaded"
        counts[f"FINDING {verdict.finding}" if verdict.finding else outcome] += 1
        # A new message is a new way through the program; of a message only its words count.
        shape = "".join(c for c in verdict.refusal[:60] if c.isalpha())
        worth = not verdict.finding and shape not in seen and len(data) < _LARGE
        seen.add(shape)
        if verdict.finding and counts[f"FINDING {verdict.finding}"] == 1:
            faulthandler.cancel_dump_traceback_later()
            armed = 0.0
            kept = output / f"{len(list(output.iterdir())):03}_{file_name}"
            kept.write_bytes(minimized(target, data, file_name, verdict.finding, folder))
            print(f"{verdict.finding}: {kept}, {kept.stat().st_size} bytes", flush=True)
            print(kept.read_bytes()[:200], "\n", verdict.trace, sep="", flush=True)
    faulthandler.cancel_dump_traceback_later()
    current.close()
    (output / "current").unlink()
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """One campaign; 1 if it found anything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    faulthandler.enable()
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = address_space + 3 * LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    output = Path("runs/fuzz").resolve() / options.target
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rng = Random(options.seed)
        counts = campaign(options.target, 60 * options.minutes, rng, Path(folder), output)
    minutes = (time.monotonic() - began) / 60
    what = f"{counts.total()} inputs in {minutes:.1f} minutes, seed {options.seed}"
    print(f"{options.target}: {what}")
    for outcome, count in counts.most_common():
        print(f"  {count:9}  {outcome}")
    return int(any(outcome.startswith("FINDING") for outcome in counts))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
