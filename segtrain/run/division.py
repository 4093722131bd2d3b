"""The directories of `segtrain folds` and `segtrain seeds`: their runs, and how far they are.

Both hold experiment.yaml (the config). That of folds has folds.json (`Division`), two lists of
pairs for each fold, and the runs fold_0, fold_1 ...; that of seeds seeds.json (`Seeds`) and a run
for each seed.
"""

import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from segtrain import files
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.run.directory import EVALUATION, named_run
from segtrain.text import first_of, printable

FOLDS, SEEDS, EXPERIMENT = "folds.json", "seeds.json", "experiment.yaml"
_MAX_BYTES = 1 << 30


class Record(BaseModel):
    """What several runs have in common, or a part of it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


AnyRecord = TypeVar("AnyRecord", bound=Record)


class Fold(Record):
    """A part of the images, and the run that trains on all others.

    images: by name, the group that the image belongs to: a sequence, or the image itself.
    """

    run: Annotated[str, Field(pattern=r"^fold_[0-9]+$")]
    images: dict[str, str]
    finished: bool = False


class Division(Record):
    """The folds of an experiment.

    by: what is kept whole. group: the pattern of `--group`.
    all: whether the evaluation split is divided too.
    scores: of all images, each by the model that has not seen it; empty until all folds are done.
    """

    format: Literal[1] = 1
    by: Literal["image", "sequence", "group"]
    group: str | None = None
    all: bool
    folds: list[Fold]
    scores: dict[str, Any] = {}


class SeedRun(Record):
    """A run of one seed; its best score (eval.best), the step of it and the last score."""

    run: Annotated[str, Field(pattern=r"^seed_[0-9]+$")]
    seed: int
    finished: bool = False
    best: float | None = None
    step: int | None = None
    last: float | None = None


class Seeds(Record):
    """The runs of one config that differ in their seed only."""

    format: Literal[1] = 1
    runs: list[SeedRun]


def unit_of(by: str, groups: Collection[str]) -> str:
    """What is kept whole, in a word; groups: that of each image. Copies and tiles make groups."""
    return "group" if by == "image" and len(set(groups)) < len(groups) else by


def read_division(directory: Path) -> Division | None:
    """That of `directory`; None if there is none.

    Raises:
        CheckpointError: folds.json is damaged or cannot be read.
    """
    path = directory / FOLDS
    return read_record(path, Division) if path.is_file() else None


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """The record in a JSON file; CheckpointError if it cannot be read or is damaged."""
    with files.os_errors_as(CheckpointError, path):
        content = files.read_bytes(path, _MAX_BYTES)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise CheckpointError(f"{path}: damaged: {printable(error, 300)}") from None


def write_record(path: Path, record: Record) -> None:
    """Writes the JSON file, whole; ExecutionError if it cannot."""
    with files.os_errors_as(ExecutionError, path, "cannot be written"):
        files.write_atomic(path, record.model_dump_json(indent=1) + "\n")


def read_seeds(directory: Path) -> Seeds | None:
    """Those of `directory`; None if there are none; CheckpointError if they cannot be read."""
    path = directory / SEEDS
    return read_record(path, Seeds) if path.is_file() else None


def is_scored(directory: Path) -> bool:
    """Whether `segtrain score` has written the scores of label maps there."""
    return all((directory / name).is_file() for name in (EVALUATION, EXPERIMENT))


def named_runs(paths: Iterable[Path]) -> list[Path]:
    """The runs that a command line names, see `named_run`, or directories of folds; each once.

    A directory of seeds stands for its runs. Scored label maps count as a run.

    Raises:
        ConfigError: no run is there, or a seed is not trained to its end.
    """
    named: list[Path] = []
    for path in paths:
        if (seeds := read_seeds(path)) is None:
            is_own = is_scored(path) or read_division(path)
            named.append(path if is_own else named_run(path))
            continue
        if left := [each.run for each in seeds.runs if not each.finished]:
            what = f"not trained to the end: {first_of(left)}"
            again = f"segtrain seeds {shlex.quote(printable(path))} --resume"
            raise ConfigError(f"{path}: {what}; go on with {again}")
        named += [named_run(path / each.run) for each in seeds.runs]
    return list(dict.fromkeys(named))
