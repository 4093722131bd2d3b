"""The command line as a table: every command, its function, its texts and its arguments."""

import argparse
import math
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from segtrain.text import scheme_of, without_password


class Argument(NamedTuple):
    """An option or operand, with what argparse's `add_argument` takes."""

    name: str
    options: dict[str, Any]
    group: str = ""  # the title above it in the help


class Command:
    """`name` may be of two words, such as "data check"; `function` is "module:name" of segtrain.

    texts: description, examples (a command a line) or epilog, for argparse.
    """

    def __init__(
        self, name: str, function: str, help: str, *arguments: Argument, **texts: str
    ) -> None:
        self.name, self.function, self.arguments = name, function, arguments
        self.texts = {"help": help, "description": f"{help[0].upper()}{help[1:]}."} | texts
        if examples := self.texts.pop("examples", None):
            self.texts["epilog"] = f"examples:\n{indent(examples, '  ')}"


GROUPS = {"data": "make, check or pack data sets", "config": "list, copy or show configs"}


def _argument(
    name: str, help: str, metavar: Any = None, type: Any = None, **options: Any
) -> Argument:
    options |= {key: value for key, value in (("metavar", metavar), ("type", type)) if value}
    return Argument(name, {"help": help, **options})


def _switch(name: str, help: str) -> Argument:
    return Argument(name, {"help": help, "action": "store_true"})


def _several(name: str, help: str, metavar: str) -> Argument:
    return _argument(name, help, metavar, action="append", default=[])


def _settings(
    examples: str = "optim.lr=1e-3, augment.crop_size='[512, 1024]', model.pretrained=null",
) -> Argument:
    """--set; `examples`: options that the command uses."""
    text = "change one option; may be repeated, the last one counts"
    return _several("--set", f"{text} ({examples})", "SECTION.KEY=VALUE")


def _size(default: list[int] | None, help: str) -> Argument:
    return _argument("--size", help, ("H", "W"), positive, nargs=2, default=default)


def _integer(text: str, *, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got '{text}'")
    return int(text)


positive, non_negative = partial(_integer, least=1), partial(_integer, least=0)


def _fraction(text: str, *, below_1: bool) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) <= 1 and not (below_1 and value == 1):
            return value
    words = "of at least 0 and below 1" if below_1 else "from 0 to 1"
    raise argparse.ArgumentTypeError(f"expected a number {words}, got '{text}'")


def _threshold(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    if not (equals and name):
        raise argparse.ArgumentTypeError(f"expected CLASS=T, got '{text}'")
    return name, _share(value)


def _quantity(text: str, unit: str, words: str) -> tuple[float, str]:
    """A positive number and its unit, which matches the pattern `unit`."""
    found = re.fullmatch(rf"([0-9.]+(?:[eE][+-]?[0-9]+)?) *({unit})", text.strip())
    with suppress(TypeError, ValueError):
        if 0 < (value := float(found[1])) < math.inf:
            return value, found[2]
    raise argparse.ArgumentTypeError(f"expected {words}, got '{text}'")


def _from_0(text: str, *, words: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected {words}, got '{text}'")


_tolerance = partial(_from_0, words="pixels of at least 0")
_metres = partial(_from_0, words="metres, such as 0.5")


_length = partial(_quantity, unit=r"[^\W\d_]+", words="a number and a unit, such as 0.25um")
_area = partial(_quantity, unit=r"(?:[^\W\d_]+2)?", words="pixels, or square units, such as 5m2")

_fraction_below_1, _opacity = (partial(_fraction, below_1=below) for below in (True, False))


def _number(text: str, *, most: float) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) <= most:
            return value
    raise argparse.ArgumentTypeError(f"expected a number above 0, up to {most:g}, got '{text}'")


_share, _points = (partial(_number, most=most) for most in (1, 100))


def _scale(text: str) -> float:
    if (value := _number(text, most=4)) < 0.1:  # megapixels are needed to check such a file
        raise argparse.ArgumentTypeError(f"expected a number from 0.1 to 4, got '{text}'")
    return value


def _path(text: str) -> Path:
    """A place on this machine. `s3://bucket/run` would be a folder called `s3:`."""
    if scheme := scheme_of(text):
        what = f"{scheme} is neither read nor written"
        text = without_password(text)
        raise argparse.ArgumentTypeError(f"{what}: expected a local path, got '{text}'")
    return Path(text)


def _run(text: str) -> Path | str:
    return text if re.match(r"(?!file:)[a-z0-9]+://", text) else _path(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len(set(names)) < len(names) or not all(names):
        raise argparse.ArgumentTypeError(f"expected different names, none empty, got '{text}'")
    return names


def _values(text: str) -> frozenset[int | tuple[int, int, int]]:
    found: set[int | tuple[int, int, int]] = set()
    for part in [] if text == "none" else text.split(","):
        if part.isascii() and part.isdigit():
            found.add(int(part))
        elif re.fullmatch("#[0-9a-fA-F]{6}", part):
            found.add(tuple(bytes.fromhex(part[1:])))
        else:
            raise argparse.ArgumentTypeError(f"expected ids or #rrggbb, or none, got '{text}'")
    return frozenset(found)


def _left_out(text: str) -> frozenset[str]:
    words = frozenset(text.split(","))
    if not words <= {"images", "labels", "lists"}:
        raise argparse.ArgumentTypeError(f"expected images, labels or lists, got '{text}'")
    return words


def _missing(text: str) -> str:
    word, sign, folders = text.partition(":")
    if word != "background" or (sign and not all(folders.split(","))):
        raise argparse.ArgumentTypeError(f"expected background or background:A,B, got '{text}'")
    return text


def _pairs(text: str) -> str:
    if not {*text.split(",")} <= {*_PAIRS}:
        raise argparse.ArgumentTypeError(f"expected words of {', '.join(_PAIRS)}, got '{text}'")
    return text


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"no regular expression: {error}, got '{text}'") from None


def _part(text: str) -> float | str:
    try:
        value = float(text)
    except ValueError:
        if Path(text).is_file():
            return text
        value = 0.0
    if 0 < value < 1:
        return value
    raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, or a list file, got '{text}'")


def _steps(text: str) -> tuple[int | None, int | None]:
    """First and last step of `A:B`, each None where it is left out; `A` is one step."""
    first, colon, last = text.partition(":")
    steps = tuple(positive(x) if x else None for x in (first, last if colon else first))
    if None not in steps and steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"expected A up to B, got '{text}'")
    return steps


def _processes(text: str) -> int | str:
    return text if text == "auto" else positive(text)


_CONFIG_HELP = "experiment file (YAML), or a name from 'segtrain config list'"
_CONFIG = _argument("config", _CONFIG_HELP, "CONFIG")
_SOURCE_HELP = (
    "run (its best checkpoint), checkpoint, .safetensors file, recipe with weights, or folder of "
    "segtrain folds (all its models)"
)
_SOURCE = _argument("source", _SOURCE_HELP, "RUN|CHECKPOINT")
_PLUGIN = _several(
    "--plugin",
    "import this first, for names of your own that a run or checkpoint needs",
    "MODULE|FILE.py",
)
_WITH = _argument(
    "--with",
    "a further model of the same classes, may be repeated: the mean of all probabilities decides",
    "RUN|CHECKPOINT",
    action="append",
    dest="others",
    default=[],
)
_NPROC = _argument(
    "--nproc", "processes here (default: one for each GPU)", "N|auto", _processes, default="auto"
)
_DEVICE = _argument(
    "--device", "default: CUDA if there is any", choices=("auto", "cpu", "cuda"), default="auto"
)
_JOBS = _argument("--jobs", "processes (default: one for each core)", "J", positive)
_DATA_ROOT = _settings("only data.root=/elsewhere/data")
_DATA_SETTINGS = _settings("data.root=/elsewhere/data, data.eval_split=test")
_EXTENDING = {"nargs": "+", "action": "extend", "dest": "other", "default": []}
_FORMS = {"choices": ("ids", "colors", "train_ids", "bands")}
_UNITS = ("image", "sequence")
_GROUP_HELP = (
    "images stay together whose paths have the same match or (match), such as '(p[0-9]+)_'"
)
_VOLUME_HELP = "volumes stay together, in one split, whose paths have the same match or (match)"
# What says whose a label is: `desk.survey.pairs.CONVENTIONS`, which is not imported here.
_PAIRS = "named", "names", "inside", "between", "folders", "numbers", "places", "channels"
_PAIRS += "bands", "scenes"
_BY_NAMES = "(default: sequences where the names of the images show"
_OVERWRITE = _switch("--overwrite", "replace a file that is already there")


COMMANDS = (
    Command(
        "init",
        "desk.commands.init:main",
        "look at a folder of images and labels, and write an experiment that trains on it",
        _argument(
            "folder", "where images and labels are, to any depth; only read", "FOLDER", _path
        ),
        _argument("--output", "folder to write (default: <name of FOLDER>_segtrain)", "DIR", _path),
        _argument("--images", "which images, where there are several: a folder or pattern", "PATH"),
        _argument("--labels", "which labels, where there are several: a folder or pattern", "PATH"),
        _argument("--names", "classes, in the order of their values in labels", "A,B,C", _names),
        _argument("--attribute", "of VIA and GeoJSON, the one that names the class", "NAME"),
        _argument("--pairs", "named: labels fit, whatever edges say", "named,WORD", _pairs),
        _argument("--exif", "labels lie on the pixels so", choices=("stored", "turned")),
        _argument("--missing", "what images without label show", "background[:FOLDERS]", _missing),
        _argument("--leave-out", "what is no data: images, labels, lists", "A,B", _left_out),
        _argument("--instances", "ids number objects of one class", choices=("binary",)),
        _argument("--threshold", "grey level from which on masks show their class", "T", float),
        _argument("--resize", "draw labels anew at the size of images", choices=("labels",)),
        _argument("--task", "multilabel: classes may overlap", choices=("multilabel",)),
        _argument("--ignore", "ids or #rrggbb that mean no data, or none", "VALUES|none", _values),
        _argument("--val", "evaluate on a part (default: 0.2), or a file of names", "PART", _part),
        _argument("--like", "folder has grown: each image stays on its side of DIR", "DIR", _path),
        _argument("--group", _GROUP_HELP, "REGEX", _pattern),
        _argument("--channels", "of the images, where that is in question", "C", positive),
        _switch("--dry-run", "write ten pairs to look at, DIR_samples.png, and nothing else"),
        _JOBS,
        description="Find which label belongs to which image, the classes, the splits and fitting\n"
        "options; write config.yaml, classes.yaml, train.txt, val.txt and a contact sheet,\n"
        "samples.png, into DIR. Where two readings fit, show both and the option that decides.",
        examples="segtrain init photos\n"
        "segtrain init photos --names background,crack --val 0.1 --output cracks\n"
        "segtrain init scans --group 'patient_[0-9]+'\n"
        "segtrain init organs --task multilabel                    a folder of masks a class\n"
        "segtrain train photos_segtrain/config.yaml",
    ),
    Command(
        "train",
        "commands.start:main",
        "train a model from a config",
        _argument("config", f"{_CONFIG_HELP}; with --resume or --finish a run", "CONFIG"),
        _settings(),
        _NPROC,
        _PLUGIN,
        _DEVICE,
        _argument("--output", "run directory (default: runs/<name of CONFIG>)", "DIR|URL", _run),
        _switch("--resume", "go on at the last checkpoint, on any number of ranks, or begin"),
        _switch("--fit", "find out how the batch fits into the memory, with the same result"),
        _switch("--fit-precision", "as --fit; in bfloat16, another result, where all else fails"),
        _argument("--until", "save after this step and stop; --resume goes on", "STEP", positive),
        _argument("--finish", "so many more steps from a run, as another run", "STEPS", positive),
        _switch("--accept-changes", "with --resume: although config or data have changed since"),
        _switch("--requeue", "in a SLURM job: at SIGUSR1 save, requeue the job and stop"),
        _argument(
            "--max-restarts",
            "of all ranks here, if one fails (default: 0)",
            "N",
            non_negative,
            default=0,
        ),
        examples="segtrain train own.yaml --nproc 4 --set optim.lr=0.02\n"
        "segtrain train own.yaml --resume                        or: train runs/own --resume\n"
        "segtrain train camvid_small --set data.root=CamVid      from 'segtrain config list'\n"
        "torchrun --nproc-per-node 4 -m segtrain train CONFIG\n"
        "segtrain train runs/own --finish 5000                   as runs/own_finish",
    ),
    Command(
        "population",
        "desk.commands.population.command:main",
        "search options with runs that learn from each other",
        _argument("config", f"{_CONFIG_HELP}; with --resume also the directory", "CONFIG"),
        _argument("--members", "runs (default: 4)", "N", positive),
        _argument("--every", "steps of a round (default: eval.every_steps)", "N", positive),
        _several("--perturb", "to search (default: optim.lr and weight_decay)", "SECTION.KEY"),
        _argument("--at-once", "members that train at the same time", "N", positive, default=1),
        _switch("--alone", "no exchange: the same members, for comparison"),
        _settings(),
        _NPROC,
        _DEVICE,
        _argument("--output", "default: runs/<name of CONFIG>_population, or _alone", "DIR", _path),
        _switch("--resume", "go on with the arguments of its start; start it if there is none"),
        description="Train several members of CONFIG with other seeds and options, a round at a\n"
        "time. After each round the worst quarter takes over weights and options of the best,\n"
        "and changes the options by a factor of 0.8 or 1.2 (arXiv:1711.09846). Each member is a\n"
        "run in DIR/member_0 and so on.",
        examples="segtrain population own.yaml --members 4 --every 2000\n"
        "segtrain population own.yaml --perturb optim.lr --perturb model.dropout --nproc 2\n"
        "segtrain population runs/own_population --resume",
    ),
    Command(
        "folds",
        "desk.commands.folds:main",
        "train on all images in turn, and score each by a model that has not seen it",
        _argument("config", f"{_CONFIG_HELP}; with --resume also the directory", "CONFIG"),
        _argument("-k", "folds (default: 5)", "K", partial(_integer, least=2), dest="number"),
        _argument("--by", f"what stays in one fold {_BY_NAMES} some)", choices=_UNITS),
        _argument("--group", _GROUP_HELP, "REGEX", _pattern),
        _switch("--all", "divide data.eval_split too, not only data.train_split"),
        _argument("--output", "directory (default: runs/<name of CONFIG>_folds)", "DIR", _path),
        _switch("--resume", "go on where the folds were left"),
        _argument("--save-predictions", "write label maps, and volumes of slices", "DIR", _path),
        _settings(),
        _NPROC,
        _DEVICE,
        description="Divide the images into K folds, and train K models, each on all folds but "
        "one, which\nit is then scored on. One score of all images with an interval, and a page. "
        "The directory\nstands for the ensemble of its models in eval, predict and export.",
        examples="segtrain folds own.yaml -k 5\n"
        "segtrain folds own.yaml --by sequence --all --nproc 4\n"
        "segtrain folds runs/own_folds --resume\n"
        "segtrain predict runs/own_folds photos/ --output predictions",
    ),
    Command(
        "seeds",
        "desk.commands.seeds:main",
        "train one config with several seeds: how far do its scores vary?",
        _argument("config", f"{_CONFIG_HELP}; with --resume also the directory", "CONFIG"),
        _argument("-n", "seeds (default: 5)", "N", partial(_integer, least=2), dest="number"),
        _argument("--output", "directory (default: runs/<name of CONFIG>_seeds)", "DIR", _path),
        _switch("--resume", "go on where the runs were left; -n may be more than before"),
        _settings(),
        _NPROC,
        _DEVICE,
        description="Train CONFIG with the seeds S, S + 1 ..., where S is its own seed, one after "
        "another, and\nprint mean and standard deviation of the best and the last scores. The "
        "directory stands for\nits runs in compare and report.",
        examples="segtrain seeds own.yaml -n 5\n"
        "segtrain seeds runs/own_seeds --resume -n 8\n"
        "segtrain compare runs/own_seeds --with runs/other_seeds",
    ),
    Command(
        "bench",
        "desk.commands.in_ranks:bench",
        "where the time of a training step goes",
        _CONFIG,
        _settings(),
        _NPROC,
        _DEVICE,
        _argument("--steps", "steps to measure (default: 20)", "N", positive, default=20),
        _argument("--json", "write the figures to this file", "FILE", _path),
        _switch("--memory", "only the time of a step, and the memory of steps and evaluation"),
        _argument("--profile", "trace of three steps for ui.perfetto.dev, .json", "FILE", _path),
        description="Train some steps of CONFIG, with its data and loader, and print the time of "
        "their parts,\noperations a second beside what this device reaches, memory, and what "
        "limits the speed.\nNothing is kept.",
        examples="segtrain bench own.yaml --nproc 2\n"
        "segtrain bench own.yaml --set train.precision=bfloat16 --profile trace.json.gz",
    ),
    Command(
        "eval",
        "commands.launch:evaluate",
        "score a model on a split: IoU of every class, mIoU, mAcc, aAcc",
        _argument("checkpoint", _SOURCE_HELP, "RUN|CHECKPOINT"),
        _WITH,
        _argument("--split", "split (default: data.eval_split)", "S"),
        _settings("eval.flip=true, eval.scales='[0.75, 1]', data.root=/elsewhere/data"),
        _NPROC,
        _PLUGIN,
        _DEVICE,
        _argument("--save-predictions", "write label maps with raw ids", "DIR", _path),
        _switch("--no-labels", "the split has no labels: predict for a test server, score nothing"),
        _argument("--json", "write all scores as JSON", "FILE", _path),
        _argument("--overlays", "write pictures of image, label and prediction", "DIR", _path),
        _argument("--num-overlays", "how many (default: 8)", "N", positive, default=8),
        _argument("--worst", "overlays of the N worst images, one of neighbours", "N", positive),
        _argument("--per-image", "write the scores of each image as CSV", "FILE", _path),
        _argument(
            "--group",
            "scores by group of images, such as patients, and their mean: images are of one group "
            "whose paths have the same match or (match), such as '(p[0-9]+)_'",
            "REGEX",
            _pattern,
        ),
        _argument(
            "--surface",
            "distances of borders: Hausdorff (95 %%), surface Dice at this tolerance in pixels, "
            "boundary IoU",
            "PX",
            _tolerance,
        ),
        _argument("--curves", "precision and recall at each threshold as CSV", "FILE", _path),
        _argument("--class", "whose threshold is sought", "NAME", dest="class_name"),
        _argument("--precision", "seek the threshold of this precision", "X", _share),
        _argument("--recall", "or the threshold of this recall", "X", _share),
        _argument("--min-area", "with --recall, by image: pixels of an object", "PX", positive),
        _switch("--temperature", "fit the T of export --temperature, which moves no label, no IoU"),
        description="Score a trained model: IoU, Dice, precision and recall of every class, their "
        "means,\npixel accuracy and calibration error.",
        examples="segtrain eval runs/own\n"
        "segtrain eval runs/own --set eval.scales='[0.75, 1, 1.25]' --set eval.flip=true\n"
        "segtrain eval runs/own --with runs/own_seed1 --with runs/own_seed2     an ensemble\n"
        "segtrain eval runs/own/checkpoints/last.pt --split val --save-predictions out\n"
        "segtrain eval runs/own --split test --no-labels --save-predictions out\n"
        "segtrain eval runs/own --class crack --recall 0.95\n"
        "segtrain eval runs/own --group '(patient_[0-9]+)' --json scores.json",
    ),
    Command(
        "score",
        "desk.commands.score:main",
        "score label maps of any program on a data set, as eval scores a model",
        _argument("predictions", "folder of label maps, or of segtrain predict", "DIR", _path),
        _argument("--data", f"{_CONFIG_HELP}, or a run", "CONFIG|RUN", required=True),
        _argument("--split", "split, or list file (default: data.eval_split)", "S|LIST"),
        _argument(
            "--label-format", "what label maps hold (as of predict: ids, or bands)", **_FORMS
        ),
        _argument("--ending", "what their names have behind the image's", "TEXT", default=""),
        _switch("--ignore-others", "leave out files that are of no image of the split"),
        _argument(
            "--output",
            "default: runs/<name>_scored; labels/ counts as the folder above",
            "DIR",
            _path,
        ),
        _argument("--json", "write all scores as JSON", "FILE", _path),
        _argument("--per-image", "write the scores of each image as CSV", "FILE", _path),
        _argument("--group", f"scores by group: {_GROUP_HELP}", "REGEX", _pattern),
        _argument("--surface", "distances of borders, as of segtrain eval", "PX", _tolerance),
        _DATA_SETTINGS,
        _PLUGIN,
        description="Score label maps that any program has written: a file for each image of a "
        "split, called\nas the image, or as the end of its path. Write a page, and scores that "
        "compare and report\nread as those of a run.",
        examples="segtrain score theirs/ --data own.yaml --label-format train_ids\n"
        "segtrain score theirs/ --data runs/own --ending _pred --output runs/theirs\n"
        "segtrain compare runs/own runs/theirs",
    ),
    Command(
        "verify",
        "desk.commands.in_ranks:verify",
        "compute steps of a run again and compare every bit",
        _argument("run", "run directory", "RUN", _path),
        _argument("--steps", "default: the newest", "A:B", _steps, default=(None, None)),
        _settings("data.root=/elsewhere/data, data.pack=null"),
        _NPROC,
        _PLUGIN,
        _DEVICE,
        description="Compute steps of a run with train.shares again, on any number of ranks, and "
        "compare\nsamples, losses, gradients and weights with its receipts and checkpoints.\n"
        "The run is only read, and may still be training.",
        examples="segtrain verify runs/own              from the newest checkpoint before the end\n"
        "segtrain verify runs/own --steps 900:1000 --nproc 4",
    ),
    Command(
        "report",
        "desk.commands.report:main",
        "write a page about one or several runs",
        _argument("runs", "run directory, or one of segtrain folds", "RUN", _run, nargs="+"),
        _argument("--output", "file to write (default: report.html of the run)", "FILE", _path),
        _argument("--figures", "also write its charts as SVG, the confusion as CSV", "DIR", _path),
        _switch("--curves", "of one run: evaluate once more, for precision over recall"),
        _DATA_ROOT,
        _PLUGIN,
        _DEVICE,
        description="Write one HTML file that needs no network: curves, scores of the classes, "
        "confusion,\ncalibration, the worst and best images, and what the config changes. Several "
        "runs are\nput side by side. Training writes it at its end.",
        examples="segtrain report runs/own --figures figures\n"
        "segtrain report runs/small runs/large --output both.html",
    ),
    Command(
        "runs",
        "desk.commands.runs:main",
        "list runs, or clear what finished ones no longer need",
        _argument(
            "directories", "to search (default: runs); with --clear a run", "DIR", _path, nargs="*"
        ),
        _switch(
            "--clear",
            "remove last.pt, previous.pt and step_N.pt of these runs, and keep best.pt: they "
            "cannot be trained on",
        ),
        _PLUGIN,
        _argument("--json", "write the list as JSON", "FILE", _path),
        description="List the runs in folders: best score and its step, steps done, hours of "
        "training, size on\ndisk, and how a stopped one goes on. --clear refuses runs that are not "
        "complete or in use.",
        examples="segtrain runs\nsegtrain runs --clear runs/own",
    ),
    Command(
        "watch",
        "desk.commands.watch:main",
        "what runs do now, on a screen that refreshes itself",
        _argument("directories", "runs, or folders (default: runs)", "RUN|DIR", _path, nargs="*"),
        _argument("--every", "seconds (default: 5)", "S", positive, default=5),
        _switch("--once", "print one screen and end, as without a terminal"),
        description="Show of each run its state and since when it holds, steps, speed, the time "
        "that is left\nwithout evaluations, how long ago it was saved, best score and newest "
        "loss; of a single run\nalso curves. Only files are read. Ctrl-C ends it.",
        examples="segtrain watch\nsegtrain watch runs/own --every 30\nsegtrain watch --once",
    ),
    Command(
        "compare",
        "desk.commands.compare:main",
        "say whether one model is better than another, or why two runs differ",
        _argument("runs", "runs, folds, seeds, scored maps; or all of A", "RUN", _path, nargs="+"),
        _argument("--with", "the runs of side B", "RUN", _path, **_EXTENDING),
        _argument("--on", "evaluate all on this list of images and labels, or split", "LIST|S"),
        _argument("--by", f"what is drawn again {_BY_NAMES} five)", choices=_UNITS),
        _argument("--json", "write all figures as JSON", "FILE", _path),
        _argument("--markdown", "write the table of the classes", "FILE", _path),
        _argument("--latex", "the same for LaTeX, with booktabs", "FILE", _path),
        _switch("--steps", "say instead where the training of two runs parts, and why"),
        _DATA_ROOT,
        _PLUGIN,
        _DEVICE,
        description="Compare two runs on the same images: the difference of their mIoU with an "
        "interval\n(paired bootstrap), the classes and images that make it, what the configs "
        "change, and a\nverdict. With several seeds a side it speaks of the recipes. More than two "
        "sides are each\ncompared with the first, in a table.",
        examples="segtrain compare runs/a runs/b\n"
        "segtrain compare runs/a_seeds runs/b_seeds runs/c_seeds --latex table.tex\n"
        "segtrain compare runs/old runs/new --on new.txt\n"
        "segtrain compare runs/a runs/b --steps\n"
        "segtrain compare runs/a runs/a_seed1 --with runs/b runs/b_seed1",
    ),
    Command(
        "suspects",
        "desk.commands.suspects:main",
        "find masks that are probably wrong",
        _argument("run", "run directory", "RUN", _path),
        _argument("--number", "masks to show (default: 50)", "N", positive, default=50),
        _argument("--output", "page to write (default: suspects.html of the run)", "FILE", _path),
        _argument("--exclude", "write the config without those that stand out", "FILE", _path),
        _argument("--data", "judge the images of this experiment or run instead", "CONFIG|RUN"),
        _argument(
            "--split", "or list file, to judge (default: the training's; of --data both)", "S|LIST"
        ),
        _DATA_ROOT,
        _PLUGIN,
        _DEVICE,
        description="Rank masks, by default those of the training split, by the loss of each "
        "image\nand class under the best checkpoint, in one pass, and write one HTML file: image, "
        "mask,\nprediction, and where and how they disagree: shifted, swapped, missing. The masks "
        "are not\nchanged.",
        examples="segtrain suspects runs/own\n"
        "segtrain suspects runs/own --number 100 --exclude wrong.yaml\n"
        "segtrain suspects runs/own --data own2  # new masks, before they are trained on",
    ),
    Command(
        "predict",
        "predict:main",
        "segment images of any size, and videos: label maps, colour maps and overlays",
        _SOURCE,
        _argument("inputs", "image, video, or folder of them", "INPUT", _path, nargs="+"),
        _WITH,
        _argument("--output", "where to write the results", "DIR", _path, required=True),
        _switch("--overwrite", "replace results that are already there"),
        _argument(
            "--probabilities",
            "also write those of every class; nii: of volumes, a NIfTI file a class",
            choices=("npz", "tif", "nii"),
        ),
        _argument("--opacity", "of overlays (default: 0.5)", "X", _opacity),
        _argument("--clear", "classes that overlays leave clear", "A,B", _names, default=()),
        _argument(
            "--table",
            "CSV: pixels and objects of each class in each image; of volumes voxels, millilitres "
            "and components in three dimensions (voxels that touch, also at corners)",
            "FILE",
            _path,
        ),
        _argument("--objects", "CSV: place, size and area of each object", "FILE", _path),
        _argument(
            "--pixel-size",
            "side of a pixel, such as 0.25um (default: that of a TIFF of a map, ImageJ or OME)",
            "LENGTH",
            _length,
        ),
        _argument(
            "--min-area",
            "in --table: is there an object of so many pixels, or square units such as 5m2? The "
            "label maps keep smaller ones",
            "AREA",
            _area,
        ),
        _argument(
            "--threshold",
            "a pixel has this class where its probability is at least T, and only there; may be "
            "repeated (segtrain eval --class finds T)",
            "CLASS=T",
            _threshold,
            action="append",
            dest="thresholds",
            default=[],
        ),
        _argument(
            "--unknown-below",
            "pixels of which no class has this probability get none, but by --threshold",
            "P",
            _share,
        ),
        _switch("--frames", "also write a label map of every frame of a video"),
        _settings("eval.mode=slide, eval.crop_size='[512, 1024]'"),
        _PLUGIN,
        _DEVICE,
        description="Write label maps, colour maps and overlays of images of any size, and videos. "
        "Objects are\npixels of one class that touch, also at corners. A line at the end tells "
        "the share of\neach class in all images, or volumes.",
        examples="segtrain predict runs/own photos/ extra.jpg --output predictions\n"
        "segtrain predict runs/own photos/ --output out --table table.csv --min-area 50\n"
        "segtrain predict runs/own slides/ --output out --objects cells.csv --pixel-size 0.25um\n"
        "segtrain predict runs/own photos/ --output out --threshold crack=0.3\n"
        "segtrain predict runs/own photos/ --output out --unknown-below 0.6 --table table.csv",
    ),
    Command(
        "export",
        "commands.export:main",
        "write a model for other programs",
        _SOURCE,
        _WITH,
        _argument(
            "--format",
            "pt2: torch.export, for images of more than model.output_stride px a side; "
            "safetensors: the weights, which eval, predict and train.init_from read too",
            required=True,
            choices=("onnx", "pt2", "torchscript", "safetensors"),
        ),
        _argument("--output", "file to write", "FILE", _path, required=True),
        _PLUGIN,
        _OVERWRITE,
        _argument(
            "--normalize",
            "the file takes RGB of 0..255, as bytes (default) or floats, and normalizes it itself",
            nargs="?",
            const="uint8",
            choices=("uint8", "float32"),
        ),
        _switch("--argmax", "the file returns train ids instead of logits"),
        _switch("--confidence", "a second result: the probability of the label, or of each class"),
        _argument("--unknown-below", "labels of a lower probability become 255", "P", _share),
        _argument("--temperature", "the file divides logits by it; eval fits it", "T", _points),
        _argument("--scale", "the file resizes images, as eval.scales does", "X", _scale),
        _argument("--short-side", "or to this short side in px", "PX", positive),
        _switch("--half", "safetensors: kernels as float16, which halves the file"),
        _size(None, "write a file for images of this height and width only (default: any size)"),
        _argument("--quantize", "onnx: compute in 8 bits, and score the file", choices=("int8",)),
        _argument(
            "--images",
            "of the training split to calibrate --quantize on, and of the evaluation split to "
            "score it on (default: 50)",
            "N",
            positive,
        ),
        _argument("--max-loss", "points of mIoU that int8 may cost (default: 2)", "X", _points),
        _settings("data.root=/elsewhere/data, for --quantize"),
        description="Write a model for other programs, and compare the file with it.",
        examples="segtrain export runs/own --format onnx --output own.onnx --normalize --argmax\n"
        "segtrain export runs/own --format pt2 --output own.pt2 --argmax --confidence --scale 0.5\n"
        "segtrain export runs/own --format onnx --quantize int8 --output own_int8.onnx",
    ),
    Command(
        "convert",
        "desk.commands.convert:main",
        "make a checkpoint of another program one of segtrain",
        _argument("file", "a .pth, .pt or .safetensors file", "FILE", _path),
        _argument("--output", "checkpoint to write, a .pt", "FILE", _path, required=True),
        _argument("--classes", "class file (default: the names in the file)", "NAME|FILE"),
        _argument(
            "--class-order", "order of the channels: a class file, or stored", "NAME|FILE|stored"
        ),
        _argument("--entry", "which state dict to read, where the file holds several", "KEY"),
        _several("--ignore", "leave out keys that begin so; may be repeated", "PREFIX"),
        _OVERWRITE,
        _settings("model.output_stride=16, data.root=/elsewhere/data"),
        description="Read weights of torchvision, semseg, mmsegmentation, VainF or\n"
        "segmentation_models.pytorch, and write a checkpoint for eval, predict, export and\n"
        "train.init_from. A key that finds no place is an error. What a file cannot say, such as\n"
        "model.output_stride, is assumed by the defaults of its program and printed.",
        examples="segtrain convert deeplabv3_resnet50_coco.pth --classes voc --output v3.pt\n"
        "segtrain convert theirs.pth --classes own.yaml --class-order stored --output own.pt",
    ),
    Command(
        "data synth",
        "desk.synthetic.data_set:main",
        "draw synthetic street scenes in the layout of Cityscapes",
        _argument("root", "directory to write to", "ROOT", _path),
        _argument("--num-train", "default: 200", "N", positive, default=200),
        _argument("--num-val", "default: 40", "N", positive, default=40),
        _size([256, 512], "height and width in pixels (default: 256 512)"),
        _argument("--seed", "default: 0", "S", non_negative, default=0),
        _JOBS,
        examples="segtrain data synth data/street --num-train 200 --num-val 40",
    ),
    Command(
        "data import",
        "desk.commands.import_data:main",
        "draw labels from annotation files",
        _argument("sources", "annotation file, or folder to search", "SOURCE", _path, nargs="+"),
        _argument("--output", "a new folder for the labels", "DIR", _path, required=True),
        _argument("--images", "where the images lie (default: beside SOURCE)", "FOLDER", _path),
        _argument(
            "--overlap",
            "which region is on top: the later, the smaller, or of the later class; keep: all "
            "stay, in labels for task multilabel",
            choices=("order", "area", "class", "keep"),
        ),
        _argument("--names", "classes of all SOURCEs, in the order of their ids", "A,B,C", _names),
        _argument("--attribute", "of VIA and GeoJSON, the one that names the class", "NAME"),
        _argument("--axis", "of volumes: slices are cut across it", choices=("x", "y", "z")),
        _argument("--group", _VOLUME_HELP, "REGEX", _pattern),
        _switch("--overwrite", "replace the labels of an earlier import"),
        _JOBS,
        description="Draw label maps from annotations of COCO (polygons, RLE), LabelMe, CVAT "
        "for images,\nLabel Studio (JSON), Supervisely, VIA, YOLO (outlines), a table of run "
        "lengths, GeoJSON\nor QuPath, and write the class file and the list of pairs. Or cut "
        "volumes (NIfTI, DICOM,\nTIFF stacks) and their labels into slices, with lists of whole "
        "patients.\n"
        "Needs pycocotools: pip install '.[annotations]'; of GeoJSON rasterio: '.[geo]';\n"
        "of volumes nibabel and SimpleITK: '.[medical]'.",
        examples="segtrain data import annotations/instances_train.json --images "
        "train2017 --output labels_train\nsegtrain data import roboflow_export --output labels",
    ),
    Command(
        "data polygons",
        "desk.commands.polygons:main",
        "outline the classes of label maps on the Earth, as GeoJSON",
        _argument("labels", "a label map, or a folder of such", "LABELS", _path, nargs="+"),
        _argument("--classes", "the class file of the labels", "FILE", required=True),
        _argument("--label-format", "what label maps hold (ids)", **_FORMS),
        _argument("--output", "the file to write", "FILE.geojson", _path, required=True),
        _argument("--simplify", "how far outlines may move", "METRES", _metres),
        _OVERWRITE,
        description="Write an outline for each area of a class, but of the background, with its "
        "class,\nsquare metres and raster; coordinates are longitude and latitude (RFC 7946).\n"
        "Needs rasterio and shapely: pip install '.[geo]'.",
        examples="segtrain predict runs/mine map.tif --output predictions\n"
        "segtrain data polygons predictions/labels --classes mine/classes.yaml "
        "--output map.geojson",
    ),
    Command(
        "data check",
        "commands.data:check",
        "read all images and labels of a config, and report what is wrong",
        _CONFIG,
        _DATA_SETTINGS,
        _JOBS,
        _argument("--json", "write the report as JSON", "FILE", _path),
        examples="segtrain data check own.yaml",
    ),
    Command(
        "data pack",
        "commands.data:pack",
        "decode a data set once, so that training reads crops from raw rows",
        _CONFIG,
        _argument("--output", "a new folder, such as packs/own", "DIR", _path, required=True),
        _DATA_SETTINGS,
        _JOBS,
        description="Decode both splits of a config into a folder of safetensors shards, which "
        "training,\nevaluation and check read by data.pack: DIR. A pixel of RGB takes 4 bytes.",
        examples="segtrain data pack own.yaml --output packs/own\n"
        "segtrain train own.yaml --set data.pack=packs/own",
    ),
    Command(
        "data stats",
        "commands.data:stats",
        "count the classes of a split, and print class weights for the loss",
        _CONFIG,
        _argument("--split", "split (default: data.train_split)", "S"),
        _argument("--beta", "of the effective number of pixels", "B", _fraction_below_1),
        _DATA_SETTINGS,
        _JOBS,
        _argument("--json", "write all numbers as JSON", "FILE", _path),
        description="Read a split once: pixels and images of each class, size, mean and standard "
        "deviation\nof the images, and class weights by four rules, as lines to paste.",
        examples="segtrain data stats own.yaml\n"
        "segtrain data stats own.yaml --split val --json stats.json",
    ),
    Command(
        "config list", "commands.config:print_names", "list the configs that come with segtrain"
    ),
    Command(
        "config copy",
        "commands.config:copy",
        "copy a config that comes with segtrain",
        _argument("name", "a name from 'segtrain config list'", "NAME"),
        _argument("file", "a new file, such as my.yaml", "FILE", _path),
        examples="segtrain config copy demo my.yaml",
    ),
    Command(
        "config show",
        "commands.config:print_config",
        "check a config and print it with all defaults",
        _CONFIG,
        _settings(),
        examples="segtrain config show own.yaml --set optim.lr=0.02\n"
        "segtrain config show camvid_small",
    ),
    Command(
        "config schema",
        "commands.config:write_schema",
        "print the JSON Schema of configs, for editors",
        _PLUGIN,
        _argument("--output", "default: the terminal", "FILE", _path),
        epilog="An editor with a YAML language server checks a config that begins with\n"
        "  # yaml-language-server: $schema=schema.json",
    ),
    Command(
        "doctor",
        "desk.commands.doctor:main",
        "versions, devices, memory and what is wrong here; exit code 2 if nothing can be trained",
    ),
)
