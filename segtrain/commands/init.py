"""`segtrain init FOLDER`: looks at a folder and writes an experiment that trains on it."""

import argparse
import shlex
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segtrain.errors import EXIT_OK, ConfigError, DataError
from segtrain.text import counted, first_of, printable

if TYPE_CHECKING:  # the rest is imported when the command runs
    from segtrain.survey.label_sets import LabelSet
    from segtrain.survey.recipe import Machine
    from segtrain.survey.write import Plan

_WEIGHTS = "IMAGENET1K_V1"
_HOST = ("download.pytorch.org", 443)
# What a stop with a question leaves; the same command with an answer replaces it.
READINGS = "reading_*.png"


def main(args: argparse.Namespace) -> int:
    """Writes the folder and says what was found; returns the exit code.

    Raises:
        DataError: no images, no labels, or labels that cannot be read.
        ConfigError: two readings fit (`UndecidedError`), a wrong option, or the folder exists.
    """
    words = ("labels", "names", "ignore", "val", "channels")
    answers = {word: getattr(args, word) for word in words}
    config = write_experiment(args.folder, args.output, jobs=args.jobs, **answers)
    print(f"\nnext: segtrain train {shlex.quote(str(config.parent))}")
    return EXIT_OK


def default_output(folder: Path) -> Path:
    """Where the experiment for `folder` goes if nothing is said: beside no data, in this folder."""
    return Path(f"{folder.resolve().name}_segtrain")


def write_experiment(
    folder: Path, output: Path | None = None, *, jobs: int | None = None, **answers: Any
) -> Path:
    """The path of the config that was written; see `main`. answers: as `Answers` has them."""
    output = default_output(folder) if output is None else output
    _check_output(output, folder)
    from segtrain.survey.classes import choose_classes
    from segtrain.survey.decide import (
        Answers,
        UndecidedError,
        check_pairs,
        choose_labels,
        choose_splits,
    )
    from segtrain.survey.label_sets import compared
    from segtrain.survey.label_sets import counted as count_labels
    from segtrain.survey.recipe import choose_options, choose_pixels
    from segtrain.survey.survey import survey
    from segtrain.survey.write import CONFIG, SHEET, Plan, draw_annotations, write, write_readings

    given = Answers(**answers)
    val_list = Path(given.val) if isinstance(given.val, str) else None
    found = survey(folder, val_list=val_list, jobs=jobs)
    _check_output(output, folder)  # again, after minutes: the folder is removed
    shutil.rmtree(output, ignore_errors=True)
    labels = None
    try:
        if found.annotations and (not found.sets or given.labels in found.annotations):
            labels, classes = draw_annotations(found, output, given, jobs)
        else:
            labels = choose_labels(found, given)
            sizes = {image.files[0]: image.size for image in found.images}
            labels = count_labels(folder, labels, sizes, jobs)
            _refuse_damaged(folder, labels)
            check_pairs(found, labels, compared(folder, found.images, labels), given)
            classes = choose_classes(found, labels, given)
        splits = choose_splits(found, labels, given)
        machine = _machine()
        pixels = choose_pixels(found, (*splits.train, *splits.val), given, machine)
        options = choose_options(splits, classes.classes, pixels, machine)
        plan = Plan(found, labels, classes, splits, options)
        for line in _lines(plan, pixels.warnings, machine):
            print(printable(line))
        write(plan, output, _command(folder, answers), jobs=jobs)
    except UndecidedError as undecided:
        shutil.rmtree(output, ignore_errors=True)
        pictures = write_readings(found, labels, undecided.readings, output)
        shown = f"\n  pictures: {first_of(pictures)}" if pictures else ""
        place = f"--output {shlex.quote(str(output))}, and"
        again = f"\n  segtrain init {shlex.quote(str(folder))} {place} one of them goes on"
        raise ConfigError(f"{undecided}{shown}{again}") from None
    except BaseException:  # Ctrl-C too: half an experiment would be taken for a whole one
        shutil.rmtree(output, ignore_errors=True)
        raise
    names = ", ".join(sorted(path.name for path in output.iterdir()))
    print(f"wrote {output}: {names}; look at {output / SHEET}")
    return output / CONFIG


def _check_output(output: Path, folder: Path) -> None:
    if output.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--output {printable(output)}: lies in {printable(folder)}, where data are only read; "
            "choose a folder outside of it"
        )
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {printable(output)}: is a file; choose another name")
    if output.exists() and any(not path.match(READINGS) for path in output.iterdir()):
        raise ConfigError(f"--output {printable(output)}: exists already; choose another folder")


def _refuse_damaged(folder: Path, labels: "LabelSet") -> None:
    if labels.unreadable:
        raise DataError(
            f"{folder}: {counted(len(labels.unreadable), 'label', 'labels')} cannot be read: "
            f"{first_of(labels.unreadable, 5)}; replace them or move them away"
        )
    if labels.wrong_size:
        raise DataError(
            f"{folder}: {counted(len(labels.wrong_size), 'label has', 'labels have')} another size "
            f"than the image: {first_of(labels.wrong_size, 5)}"
        )


def _machine() -> "Machine":
    """What there is to train with, and where pretrained weights come from."""
    import torch
    from torchvision.models import get_model_weights

    from segtrain.survey.recipe import Machine

    has_gpu = torch.cuda.is_available()
    url = get_model_weights("resnet50" if has_gpu else "resnet18")[_WEIGHTS].url
    cached = Path(torch.hub.get_dir(), "checkpoints", Path(url).name)
    if cached.is_file():
        return Machine(has_gpu, _WEIGHTS)
    with suppress(OSError), socket.create_connection(_HOST, timeout=2):
        return Machine(has_gpu, _WEIGHTS)
    return Machine(has_gpu, None)


def _lines(plan: "Plan", warnings: Sequence[str], machine: "Machine") -> list[str]:
    """What was found, as a table, and the warnings."""
    survey, labels = plan.survey, plan.labels
    patterns = sorted({_pattern(image.files) for image in (*plan.splits.train, *plan.splits.val)})
    lines = [
        f"images     {len(survey.images)}: {first_of(patterns, 3)}",
        f"labels     {len(labels.labels)}: {labels.pattern}",
    ]
    for image, files in list(labels.labels.items())[:3]:
        lines.append(f"  pair     {image}  {first_of(files, 2)}")
    lines += [f"classes    {line}" for line in plan.classes.reasons]
    total = sum(one.pixels for one in plan.classes.classes) or 1
    for one in plan.classes.classes:
        share = f" {one.pixels / total:7.2%}" if one.pixels else ""
        lines.append(f"  {one.name:<20}{share}")
    lines.append(
        f"splits     {len(plan.splits.train)} to train, {len(plan.splits.val)} to evaluate: "
        f"{plan.splits.reason}"
    )
    notes = [*plan.classes.warnings, *plan.splits.warnings, *warnings, *survey.notes]
    without = [image.files[0] for image in survey.images if image.files[0] not in labels.labels]
    for found, one, many in (
        (without, "image has no label", "images have no label"),
        (survey.alone, "label has no image", "labels have no image"),
        (survey.unclear, "label fits several images", "labels fit several images"),
        (survey.unreadable, "image is left out", "images are left out"),
        (survey.left_out, "kind of picture is not used", "kinds of pictures are not used"),
    ):
        if found:
            notes.append(f"{counted(len(found), one, many)}: {first_of(found, 3)}")
    if machine.weights is None:
        notes.append("no pretrained weights here and no network: a schedule for random weights")
    return lines + [f"warning: {note}" for note in notes]


def _pattern(files: Sequence[str]) -> str:
    folder, _, name = files[0].rpartition("/")
    end = name[name.rfind(".") :]
    return f"{folder}/*{end}" if folder else f"*{end}"


def _command(folder: Path, answers: Mapping[str, Any]) -> str:
    words = ["segtrain", "init", str(folder)]
    for key, value in answers.items():
        if isinstance(value, tuple | frozenset):
            value = ",".join(map(_word, value)) or "none"
        words += [] if value is None else [f"--{key}", str(value)]
    return shlex.join(words)


def _word(value: str | int | tuple[int, ...]) -> str:
    return f"#{bytes(value).hex()}" if isinstance(value, tuple) else str(value)
