"""`segtrain init FOLDER`: looks at a folder and writes an experiment that trains on it."""

import argparse
import shlex
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from segtrain.config import load_config
from segtrain.config.loading import yaml_value
from segtrain.errors import EXIT_OK, ConfigError, DataError
from segtrain.files import os_errors_as
from segtrain.run.directory import CONFIG
from segtrain.text import first_of, printable

if TYPE_CHECKING:  # the rest is imported when the command runs
    from segtrain.desk.survey.decisions import Decisions
    from segtrain.desk.survey.recipe import Machine

_WEIGHTS = "IMAGENET1K_V1"
# As torchvision calls the files, which takes longer to import than all else here.
WEIGHT_FILES = {"resnet18": "resnet18-f37072fd.pth", "resnet50": "resnet50-0676ba61.pth"}
_HOST = ("download.pytorch.org", 443)
# What a stop with a question leaves; the same command with an answer replaces it.
READINGS = "reading_*.png"
_SHEET = "samples.png"


def main(args: argparse.Namespace) -> int:
    """Writes the folder and says what was found; returns the exit code.

    Raises:
        DataError: no images, no labels, or labels that cannot be read.
        ConfigError: two readings fit (`UndecidedError`), a wrong option, or the folder exists.
    """
    words = "images labels names attribute pairs exif missing instances threshold task ignore val"
    words += " group like channels resize"
    answers = {word: getattr(args, word) for word in words.split()}
    answers["leave_out"] = args.leave_out or frozenset()
    if args.dry_run:
        output = args.output or default_output(args.folder)
        return _show(args.folder, output, jobs=args.jobs, **answers)
    config = write_experiment(args.folder, args.output, jobs=args.jobs, **answers)
    say_written(config.parent)
    made = shlex.quote(str(config.parent))
    print(f"\nnext: segtrain train {made}")
    if args.like is not None:
        print(f"masks that the model before finds wrong: segtrain suspects RUN --data {made}")
    return EXIT_OK


def say_written(output: Path) -> None:
    """Names the files of an experiment that was written."""
    names = ", ".join(sorted(path.name for path in output.iterdir()))
    print(printable(f"wrote {output}: {names}; look at {output / _SHEET}"))


def _show(folder: Path, output: Path, **options: Any) -> int:
    """Writes no more than pictures, beside `output`; returns the exit code."""
    beside = str(output.parent / f"{output.resolve().name}_")
    sheet = Path(f"{beside}{_SHEET}")
    if sheet.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--output {printable(output)}: lies in {folder}; name another folder")
    with tempfile.TemporaryDirectory(prefix="segtrain_") as made:
        draft, question = Path(made, "experiment"), None
        try:
            write_experiment(folder, draft, **options)
        except ConfigError as error:  # its pictures stay, and the answer goes to `output`
            text = str(error).replace(f"{draft}/", beside)
            question = ConfigError(text.replace(str(draft), shlex.quote(str(output))))
        with os_errors_as(ConfigError, f"--output {printable(output)}", "cannot be written"):
            for picture in (*draft.glob(_SHEET), *draft.glob(READINGS)):
                shutil.copyfile(picture, f"{beside}{picture.name}")
    if question:
        raise question
    print(f"wrote {printable(sheet)} alone: ten pairs; without --dry-run all else, too")
    return EXIT_OK


def default_output(folder: Path) -> Path:
    """Where the experiment for `folder` goes if nothing is said: below the working directory.

    Beside the data, if that directory belongs to them: they are only read.
    """
    data = folder.resolve()
    name = f"{data.name}_segtrain"
    return data.parent / name if Path.cwd().is_relative_to(data) else Path(name)


def config_of(folder: Path, *, may_write: bool) -> Path:
    """The config of the experiment for a folder, written now if there is none.

    Raises:
        ConfigError, DataError: the folder raises a question, or there is no config and
            `may_write` is False.
    """
    if (made := default_output(folder) / CONFIG).exists():
        root = Path(load_config(made).data.root)
        if root.expanduser().resolve() != folder.resolve():  # of a folder with the same name
            others = f"{printable(made)}: is of {printable(root)}, and not of {printable(folder)}"
            again = f"segtrain init {shlex.quote(str(folder))} --output OTHER"
            raise ConfigError(f"{others}; {again} makes one of this folder")
        _check_lists(made, folder)
        _say_unlisted(made, folder)
        return made
    if any(folder.glob(READINGS)):
        raise ConfigError(f"{folder}: segtrain init stopped here with a question; answer it there")
    if not may_write:
        raise ConfigError(f"{folder}: a folder without a config; segtrain init makes one first")
    config = write_experiment(folder)
    say_written(config.parent)
    return config


def _check_lists(config: Path, folder: Path) -> None:
    """ConfigError: a list of the experiment is gone. Warns where images that it names are."""
    from segtrain.desk.survey.grown import gone_files

    again = f"segtrain init {shlex.quote(str(folder))}"
    lists, images = gone_files(config)
    if lists:
        what = f"{first_of(lists)} is missing: half an experiment"
        way = f"delete {shlex.quote(str(config.parent))}, and {again} makes it anew"
        raise ConfigError(f"{printable(config)}: {what}; {printable(way)}")
    if images:
        what = f"{len(images)} images of its lists are gone: {first_of(images)}"
        like = f"{again} --like {shlex.quote(str(config.parent))} --output OTHER"
        print(f"warning: {printable(config)}: {what}; {printable(like)} makes one without them")


def _say_unlisted(config: Path, folder: Path) -> None:
    from segtrain.desk.survey.grown import unlisted

    if new := unlisted(config, folder):
        like = f"segtrain init {shlex.quote(str(folder))} --like {shlex.quote(str(config.parent))}"
        what = f"{len(new)} pictures are newer than it, and in none of its lists: {first_of(new)}"
        print(f"warning: {printable(config)}: {what}; {like} --output OTHER takes them in")


def write_experiment(
    folder: Path, output: Path | None = None, *, jobs: int | None = None, **answers: Any
) -> Path:
    """The path of the config that was written; see `main`. answers: as `Answers` has them."""
    output = default_output(folder) if output is None else output
    _claim(output, folder)
    from segtrain.desk.survey.decide import decide
    from segtrain.desk.survey.experiment_before import options_before
    from segtrain.desk.survey.experiment_files import write_files
    from segtrain.desk.survey.question_pictures import write_readings
    from segtrain.desk.survey.questions import Answers, UndecidedError
    from segtrain.distributed.machine import keep_freed_memory

    keep_freed_memory()  # file after file is read into arrays of the same size
    before: dict[str, Any] = {}
    if (like := answers.get("like")) and (before := options_before(like, answers)):
        answers |= before
        print(printable(f"options    of {_command(like, before).split(maxsplit=2)[2]}"))
    try:
        said = Answers(**answers, taken=frozenset(before))
        plan, files = decide(folder, said, output, _machine, jobs=jobs)
        print(printable(f"files      {files.line()}"))
        for line in _lines(plan):
            print(printable(line))
        command = _command(folder, answers)
        for warning in write_files(plan, output, command, jobs=jobs):
            print(printable(f"warning: {warning}"))
    except UndecidedError as undecided:
        # Only the pictures of the question stay: `_claim` accepts a folder that holds nothing else.
        shutil.rmtree(output, ignore_errors=True)
        pictures = write_readings(folder, undecided, output)
        shown = f"\n  pictures: {first_of(pictures)}" if pictures else ""
        again = f"{_command(folder, answers)} --output {shlex.quote(str(output))}"
        raise ConfigError(f"{undecided}{shown}\n  {again}, and one of them goes on") from None
    except BaseException:  # Ctrl-C too: half an experiment would be taken for a whole one
        shutil.rmtree(output, ignore_errors=True)
        raise
    return output / CONFIG


def _claim(output: Path, folder: Path) -> None:
    """Makes the folder `output`, empty; before the survey, which takes minutes."""
    place = f"--output {printable(output)}"
    data = folder.resolve()
    if not data.is_dir():
        raise DataError(f"{folder}: no such folder")
    if output.resolve().is_relative_to(data):
        beside = shlex.quote(str(data.parent / f"{data.name}_segtrain"))
        way = f"choose a folder outside of it, such as --output {printable(beside)}"
        raise ConfigError(f"{place}: lies in {printable(folder)}, where data are only read; {way}")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{place}: is a file; choose another name")
    with os_errors_as(ConfigError, place, "cannot be written; name another folder by --output"):
        output.mkdir(parents=True, exist_ok=True)
        there = list(output.iterdir())
        if not all(path.match(READINGS) for path in there):
            said = f"--like {shlex.quote(str(output))} keeps there what is evaluated on here"
            said = f", where {said}" if (output / CONFIG).exists() else ""
            if not said:
                what = f"has files, and no {CONFIG}: half an experiment, or no experiment"
                again = f"segtrain init {shlex.quote(str(folder))}"
                way = f"delete it for {printable(again)}, or name another folder by --output"
                raise ConfigError(f"{place}: exists already; {what}; {way}")
            raise ConfigError(f"{place}: exists already; choose another folder{said}")
        for path in there:
            path.unlink()


def _machine() -> "Machine":
    """What there is to train with, and where pretrained weights come from."""
    import torch

    from segtrain.desk.survey.recipe import Machine
    from segtrain.models.precision import WORTH_AN_OFFER, cpu_gain

    if has_gpu := torch.cuda.is_available():
        # Not where torch computes it as float32.
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bfloat16 = cpu_gain() >= WORTH_AN_OFFER
    name = WEIGHT_FILES["resnet50" if has_gpu else "resnet18"]
    if Path(torch.hub.get_dir(), "checkpoints", name).is_file():
        return Machine(has_gpu, _WEIGHTS, has_bfloat16)
    # One connection tells whether the weights could be downloaded.
    with suppress(OSError), socket.create_connection(_HOST, timeout=2):
        return Machine(has_gpu, _WEIGHTS, has_bfloat16)
    return Machine(has_gpu, None, has_bfloat16)


def _lines(plan: "Decisions") -> list[str]:
    """What was found, as a table, and the warnings."""
    from segtrain.desk.survey.class_table import class_table
    from segtrain.desk.survey.leaks import one_sided

    survey, labels = plan.survey, plan.labels
    images = (*plan.splits.train, *plan.splits.val)
    patterns = sorted(
        {str(PurePath(i.path).with_name(f"*{PurePath(i.path).suffix}")) for i in images}
    )
    lines = [
        f"images     {len(survey.images)}: {first_of(patterns, 3)}",
        f"labels     {sum(map(bool, labels.labels.values()))}: {labels.pattern}"
        + (f", pairs of {survey.pair_source}" if survey.pair_source else ""),
    ]
    lines += [
        f"pixels     {option.key} {yaml_value(option.value)}: {option.reason}"
        for option in plan.options
        if option.key in ("data.channels", "data.value_range")
    ]
    if (bands := images[0].files)[1:]:
        lines.append(f"bands      in this order: {first_of(bands, 16)}")
    for image, files in list(labels.labels.items())[:3]:
        lines.append(f"  pair     {image}  {first_of(files, 2) or 'background alone'}")
    if labels.upright or labels.resized:
        what = "as EXIF turns the images" if labels.upright else "of another size than the images"
        lines.append(f"labels     {what}: drawn anew on the pixels as stored")
    lines += [f"classes    {line}" for line in plan.classes.reasons]
    lines += [f"  {line}" for line in class_table(labels, plan.classes)]
    lines.append(
        f"splits     {len(plan.splits.train)} to train, {len(plan.splits.val)} to evaluate: "
        f"{plan.splits.reason}"
    )
    notes = [*plan.classes.warnings, *plan.splits.warnings, *survey.notes]
    notes += one_sided(labels, plan.classes, plan.splits.train, plan.splits.val)
    if plan.machine.weights is None:
        notes.append("no pretrained weights here and no network: a schedule for random weights")
    return lines + [f"warning: {note}" for note in notes]


def _command(folder: Path, answers: Mapping[str, Any]) -> str:
    """The line that these answers were given by."""
    from segtrain.desk.survey.contents import word

    words = ["segtrain", "init", str(folder)]
    for key, value in answers.items():
        key = key.replace("_", "-")
        if key == "leave-out":
            value = ",".join(sorted(value)) or None
        if key == "ignore" and value is not None:
            value = ",".join(map(word, value)) or "none"
        value = value.pattern if key == "group" and value is not None else value
        value = ",".join(value) if key == "names" and value is not None else value
        words += [] if value is None else [f"--{key}", str(value)]
    return shlex.join(words)
