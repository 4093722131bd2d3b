"""What `segtrain predict` asks of a kind of input."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from segtrain.checkpoint.ready import ReadyModel
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.georeference import geo_library, is_on_map
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.photos import PhotoFile
from segtrain.errors import DataError, ExecutionError
from segtrain.predict.object_table import TableOptions
from segtrain.predict.summary import Notes
from segtrain.run import pictures
from segtrain.task.contract import Task
from segtrain.task.tasks import task_of
from segtrain.text import printable


class Job(NamedTuple):
    """What to write, and where.

    names: of all inputs, below `output`. probabilities: None: not asked for. frames: a label map
    of each frame of a video.
    """

    ready: ReadyModel
    output: Path
    names: Sequence[str]
    tint: pictures.Tint
    overwrite: bool
    probabilities: str | None
    frames: bool
    tables: TableOptions

    @property
    def classes(self) -> ClassFile:
        """Those of the model."""
        return self.ready.loaded.classes

    @property
    def task(self) -> Task:
        """That of the model."""
        return task_of(self.ready.config.task)

    @property
    def folders(self) -> list[str]:
        """Where the predictions for images lie, below `output`."""
        return [*self.task.folders(self.classes), pictures.COLORS, pictures.OVERLAYS]


class Kind(Protocol):
    """A kind of input. Its sources have a `path` and a `name`, as PhotoFile has.

    Volumes, of which a folder may be one, also `take` theirs from what the user names, before all.

    several: the word of the summary, such as "videos". such: that of a refusal, "a video".
    honours: options that mean something for it; other kinds need not know these.
    instead: for options that it does not honour, what does the same.
    """

    several: str
    such: str
    honours: Collection[str]
    instead: Mapping[str, str]

    def is_own(self, source: PhotoFile) -> bool:
        """Whether a file, of no kind that is asked before, is of this one."""
        ...

    def check(self, job: Job, sources: Sequence[Any]) -> None:
        """UserError: `sources` do not fit the model, or what is below `job.output`."""
        ...

    def predict(self, job: Job, sources: Sequence[Any]) -> list[Notes]:
        """Writes the predictions for every source that can be read; returns notes on each.

        Raises:
            ExecutionError: the disk is full or not writable.
            MemoryLimitError: the device's memory does not suffice for one.
        """
        ...

    def written(self, job: Job) -> str:
        """Where below `job.output` they are, in words."""
        ...


def check_library(images: Sequence[PhotoFile]) -> None:
    """ConfigError: the label map of an image with a georeference could not have it."""
    for source in images if find_spec("rasterio") is None else ():
        with suppress(DataError):  # it is named when it is read
            if is_on_map(source.path, read_info(source.path)):
                geo_library(source.path)


@contextmanager
def noted(notes: list[Notes], path: Path) -> Iterator[None]:
    """Notes why a source cannot be read; ExecutionError: `path` cannot be written."""
    try:
        yield
    except DataError as error:
        notes.append(Notes(str(error)))
    except OSError as error:
        raise ExecutionError(f"{printable(path)}: cannot be written: {error}") from error
