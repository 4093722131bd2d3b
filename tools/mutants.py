"""Do the tests notice when the core is wrong?

    python tools/mutants.py runs/mutants                  100 mutants, with one seed always the same
    python tools/mutants.py runs/mutants --show 17        the change that mutant 17 is
    python tools/mutants.py runs/mutants --whole FILE...  which tests of these files no mutant fails

A mutant is the code with one comparison, operator, condition or constant changed. Each meets the
tests that reach it and pass, in a clone of the last commit; one that none notices has survived.
What has been found is kept in the folder, and the same command goes on after an interruption.
"""

import argparse
import ast
import copy
import ctypes
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import mutation_probe

from segtrain.distributed.machine import descendants, is_alive

ROOT = Path(__file__).resolve().parent.parent
CORE = ("norm", "training", "distributed", "checkpoint", "evaluation", "metrics.py", "seed.py")

_SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
# Beside the seconds that the tests took without a change.
_SPARE_S = 120
_TESTS_S = 400  # of the tests that reach a mutant, the shortest first


class Mutant(NamedTuple):
    """Where a file changes: bytes of the source, and what comes there."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a file: of its functions, without annotations, messages and docstrings."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for node, role in _inside_functions(ast.parse(source)):
        for new in _changes(node, role):
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[node.end_lineno - 1] + node.end_col_offset
            before = source.encode()[start:end].decode()
            after = f"({ast.unparse(ast.fix_missing_locations(new))})"
            found.append(Mutant(file, node.lineno, start, end, before, after))
    return found


def changed(source: str, mutant: Mutant) -> str:
    """The source with the mutant in it."""
    encoded = source.encode()
    return (encoded[: mutant.start] + mutant.after.encode() + encoded[mutant.end :]).decode()


def probed(source: str, numbered: dict[int, Mutant]) -> str:
    """The source with a mark in the place of each mutant."""
    places: dict[tuple[int, int], list[int]] = {}
    for number, mutant in numbered.items():
        places.setdefault((mutant.start, mutant.end), []).append(number)
    text = source.encode()
    # From the end of the file, and inner places before those around them.
    marks = [(end, 0, b"))") for _, end in places]
    for (start, end), numbers in places.items():
        call = " or ".join(f"__import__('mutation_probe').hit({number})" for number in numbers)
        marks.append((start, end, f"({call} or (".encode()))
    for place, _, mark in sorted(marks, key=lambda mark: (-mark[0], mark[1])):
        text = text[:place] + mark + text[place:]
    return text.decode()


def _inside_functions(
    tree: ast.AST, role: str = "", inside: bool = False
) -> Iterator[tuple[ast.expr, str]]:
    """The expressions of functions, and what each is to the one around it."""
    if isinstance(tree, ast.expr) and inside:
        yield tree, role
    for name, value in ast.iter_fields(tree):
        deeper = inside or (isinstance(tree, ast.FunctionDef) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_talk(child, name):
                yield from _inside_functions(child, name, deeper)


def _is_talk(node: ast.AST, role: str) -> bool:
    """Whether a part says something to readers, to users or to a checker of types."""
    return (
        role in ("annotation", "returns", "decorator_list", "exc", "msg", "pattern")
        or isinstance(node, (ast.arguments, ast.JoinedStr))  # Python 3.11 knows no places in it
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    )


def _changes(node: ast.expr, role: str) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _SWAPPED:
            yield _with(node, ops=[_SWAPPED[type(operator)]()])
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _SWAPPED:
            if not any(map(_is_text, (left, right))):
                yield _with(node, op=_SWAPPED[type(operator)]())
        case ast.BoolOp(op=operator):
            yield _with(node, op=_SWAPPED[type(operator)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case _ if role == "test":
            yield ast.UnaryOp(ast.Not(), node)


def _is_text(node: ast.expr) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)


def _with(node: ast.expr, **fields: Any) -> ast.expr:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if more mutants survived than `--survivors` allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where clones and outcomes are kept")
    parser.add_argument("--of", nargs="+", default=CORE, help="files and folders of segtrain")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--survivors", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--show", type=int, metavar="N", help="print a mutant, and do nothing")
    parser.add_argument("--whole", nargs="+", metavar="FILE", help="all tests of these files")
    args = parser.parse_args(arguments)
    numbered = drawn(args.of, args.count, args.seed)
    # What is kept belongs to one commit and one draw.
    drawn_now = hashlib.sha256(repr((numbered, args.whole)).encode()).hexdigest()[:8]
    commit = _git("rev-parse", "--short", "HEAD").strip()
    args.folder = args.folder.resolve() / f"{commit}-{drawn_now}"
    if args.show is not None:
        print(told(numbered[args.show]))
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    # All of this commit, whatever is committed while they are at work.
    for name in ("probed", *(f"clone{job}" for job in range(args.jobs))):
        _clone(args.folder / name)
    tests, seconds = reached(args.folder, numbered, args.whole)
    outcomes = met(args, numbered, tests, seconds)
    if args.whole:
        return report_tests(outcomes, tests)
    return report(numbered, outcomes) > args.survivors


def drawn(of: Sequence[str], count: int, seed: int) -> dict[int, Mutant]:
    """Some of all mutants of these files, by number."""
    files = []
    for name in of:
        path = ROOT / "segtrain" / name
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    names = [str(file.relative_to(ROOT)) for file in files]
    every = [mutant for name in names for mutant in mutants(name, _committed(name))]
    return dict(enumerate(random.Random(seed).sample(every, min(count, len(every)))))


def reached(
    folder: Path, numbered: dict[int, Mutant], files: Sequence[str] | None
) -> tuple[dict[int, list[str]], dict[str, float]]:
    """The tests that reach each mutant and pass, the shortest first, and each one's seconds."""
    marks, times = folder / "reached", folder / "times.json"
    if not times.exists():
        clone = folder / "probed"
        by_file: dict[str, dict[int, Mutant]] = {}
        for number, mutant in numbered.items():
            by_file.setdefault(mutant.file, {})[number] = mutant
        for name, here in by_file.items():
            (clone / name).write_text(probed(_committed(name, clone), here))
        options = ["-n", "auto", "-m", "not slow", "-p", "mutation_probe", "--times", str(times)]
        _, said = _pytest(clone, [*options, *(files or [])], {mutation_probe.FOLDER: str(marks)})
        if not times.exists() or not json.loads(times.read_text())["tests"]:
            sys.exit(said)
    seconds = {name: wall for name, (wall, _) in json.loads(times.read_text())["tests"].items()}
    tests: dict[int, list[str]] = {number: [] for number in numbered}
    for file in marks.glob("*.json"):
        for name, numbers in json.loads(file.read_text()).items():
            for number in numbers:
                tests[number].append(name)
    return {n: sorted(names, key=seconds.__getitem__) for n, names in tests.items()}, seconds


def met(
    args: argparse.Namespace,
    numbered: dict[int, Mutant],
    tests: dict[int, list[str]],
    seconds: dict[str, float],
) -> dict[int, Any]:
    """How many tests met each mutant, and which failed; without --whole they end at the first."""
    file = args.folder / "outcomes.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    outcomes = {int(number): outcome for number, outcome in known.items()}
    left = [number for number in numbered if number not in outcomes and tests[number]]
    outcomes |= {number: [0, []] for number in numbered if not tests[number]}
    free: SimpleQueue[Path] = SimpleQueue()
    for job in range(args.jobs):
        free.put(args.folder / f"clone{job}")

    def ask(number: int) -> tuple[int, list[str]]:
        chosen = _within(tests[number], seconds, None if args.whole else _TESTS_S)
        limit = _SPARE_S + 4 * sum(seconds[name] for name in chosen)
        clone = free.get()
        try:
            # A process of its own, since a mutant may end the one that started its tests.
            with ProcessPoolExecutor(1, initializer=_adopt_orphans) as pool:
                words = clone, numbered[number], chosen, limit, bool(args.whole)
                return pool.submit(_outcome, *words).result()
        except BrokenProcessPool:
            _end_those_in(clone)
            _git("checkout", "-q", ".", where=clone)
            return len(chosen), ["(it ended what had started the tests)"]
        finally:
            free.put(clone)

    with ThreadPoolExecutor(args.jobs) as threads:
        for number, outcome in zip(left, threads.map(ask, left), strict=True):
            outcomes[number] = outcome
            file.write_text(json.dumps(outcomes))
            ran, failed = outcome
            said = failed or ["survived"]
            print(number, told(numbered[number]), f"{ran} tests:", *said, flush=True)
    return outcomes


def _outcome(
    clone: Path, mutant: Mutant, names: list[str], limit_s: float, whole: bool
) -> tuple[int, list[str]]:
    """How many tests met a mutant, and those that failed."""
    source = _committed(mutant.file, clone)
    (clone / mutant.file).write_text(changed(source, mutant))
    try:
        code, said = _pytest(clone, [*([] if whole else ["-x"]), "-rfE", *names], {}, limit_s)
    finally:
        (clone / mutant.file).write_text(source)
    failed = [
        line.split(" ", 1)[1].partition(" - ")[0]
        for line in said.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    # Tests that pytest does not find (4, 5) have noticed nothing.
    if code not in (0, 4, 5) and not failed:
        failed = ["(it did not end)" if code is None else f"(pytest ended with {code})"]
    return len(names), failed


def _pytest(
    clone: Path, options: Sequence[str], environ: dict[str, str], limit_s: float | None = None
) -> tuple[int | None, str]:
    """The exit code of pytest in a clone, None if it takes longer, and what it says.

    Nothing of it is left running.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    paths = os.pathsep.join([str(clone), str(clone / "tools")])
    environ = os.environ | {"PYTHONPATH": paths, "NO_ALBUMENTATIONS_UPDATE": "1"} | environ
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=clone, env=environ, **streams) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end_all()
            return None, ""
    return process.returncode, said


def _adopt_orphans() -> None:
    """What a killed pytest leaves becomes a child of this process, which ends it."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _end_those_in(clone: Path) -> None:
    """Ends what has a clone as its folder, whoever its parent is."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{process}/cwd").readlink() == clone:
                os.kill(int(process), signal.SIGKILL)


def _end_all() -> None:
    end = time.monotonic() + 10
    while (left := [p for p in descendants(os.getpid()) if is_alive(p)]) and time.monotonic() < end:
        for process in left:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def _within(names: list[str], seconds: dict[str, float], limit_s: float | None) -> list[str]:
    chosen, used = [], 0.0
    for name in names:
        used += seconds[name]
        if chosen and limit_s is not None and used > limit_s:
            break
        chosen.append(name)
    return chosen


def _clone(folder: Path) -> None:
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", "--local", ROOT, folder], check=True)


def _committed(name: str, where: Path | None = None) -> str:
    return _git("show", f"HEAD:{name}", where=where)


def _git(*words: str, where: Path | None = None) -> str:
    return subprocess.check_output(["git", *words], cwd=where or ROOT, text=True)


def told(mutant: Mutant) -> str:
    """A mutant for readers."""
    before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
    return f"{mutant.file}:{mutant.line}: {before} -> {after}"


def report(numbered: dict[int, Mutant], outcomes: dict[int, Any]) -> int:
    """Prints the survivors; their number."""
    survivors = [number for number in numbered if not outcomes[number][1]]
    print(f"{len(survivors)} of {len(numbered)} mutants survived")
    for number in survivors:
        print(number, told(numbered[number]), f"({outcomes[number][0]} tests)")
    return len(survivors)


def report_tests(outcomes: dict[int, Any], tests: dict[int, list[str]]) -> int:
    """Prints the tests that no mutant has failed although they reach some."""
    failed = {name for _, names in outcomes.values() for name in names}
    reach: dict[str, int] = {}
    for names in tests.values():
        for name in names:
            reach[name] = reach.get(name, 0) + 1
    for name in sorted(reach.keys() - failed):
        print(f"{name}: none of {reach[name]} mutants that it reaches fails it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
