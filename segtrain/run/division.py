"""The directory of `segtrain folds`: how the images are divided, and how far the training is.

It holds experiment.yaml (the config), folds.json (`Division`), two lists of pairs for each fold,
and the runs fold_0, fold_1 ...
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from segtrain import files
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.run.directory import named_run
from segtrain.text import printable

FOLDS, EXPERIMENT = "folds.json", "experiment.yaml"
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


def named_runs(paths: Iterable[Path]) -> list[Path]:
    """The runs that a command line names, see `named_run`, or directories of folds; each once."""
    return list(dict.fromkeys(p if read_division(p) else named_run(p) for p in paths))
