"""Hostile files for everything that reads one: each is loaded, or refused by a UserError.

Anything else is a finding: another exception, ten seconds, two gigabytes, code of a pickle that was
run.
"""

import resource
import signal
import traceback
import warnings
from collections.abc import Generator, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import NamedTuple, NoReturn

from fuzz_inputs import SENTINEL
from fuzz_targets import Target

from segtrain.errors import UserError

LIMIT_S = 10
LIMIT_BYTES = 2 << 30
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
        most = max(peak_bytes(), _held_bytes() + LIMIT_BYTES)
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
    # The peak never falls, and tests before may have left much: only what an input adds counts.
    if peak_bytes() > most and not verdict.finding:
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


def _held_bytes() -> int:
    """The memory, in bytes, that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def corpus(name: str) -> list[Path]:
    """Inputs that were findings once."""
    folder = Path(__file__).resolve().parent / "corpus" / name
    return sorted(folder.glob("*"))


def inputs(target: Target, name: str, rng: Random) -> Generator[tuple[str, bytes], Verdict | None]:
    """(file name, content) without end: the seeds first, then what is made of them.

    Of an input with a message that is new, which `send` brings back, more is made.
    """
    pool = target.seeds() + [path.read_bytes() for path in corpus(name)]
    num_seeds, seen = len(pool), set()
    for data in list(pool):
        for file_name in target.names:
            yield file_name, data
    while True:
        base = rng.choice(pool)
        made = target.mutate(rng, base, target.words)
        verdict = yield rng.choice(target.names), made
        # A new message is a new way through the program; of a message only its words count.
        shape = "".join(c for c in verdict.refusal[:60] if c.isalpha()) if verdict else ""
        if shape not in seen and len(made) < _LARGE:
            seen.add(shape)
            pool.append(made)
            if len(pool) > num_seeds + _KEPT:
                del pool[num_seeds + rng.randrange(_KEPT)]
