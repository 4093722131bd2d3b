"""What to write instead of words on a command line that segtrain does not know."""

import re
import shlex
from collections.abc import Iterator, Sequence

from segtrain.config import Config
from segtrain.config.experiment import SECTIONS
from segtrain.config.loading import yaml_value
from segtrain.config.messages import FOREIGN_KEYS, nearest

# If several sections have an option of the same name, the first of these is meant.
_SECTIONS = ("train", "data", "augment", "model", "loss", "eval", "norm", "log", "checkpoint")
# Commands of other tools.
_COMMANDS = {
    **dict.fromkeys(("fit", "tune", "finetune"), "train"),
    **dict.fromkeys(("pbt", "search", "sweep"), "population"),
    **dict.fromkeys(("val", "valid", "validate", "test", "evaluate", "score"), "eval"),
    **dict.fromkeys(("detect", "infer", "inference", "segment", "pred"), "predict"),
    **dict.fromkeys(("datacheck", "check", "data-check", "check-data"), "data check"),
    **dict.fromkeys(("list", "configs", "models"), "config list"),
    **dict.fromkeys(("init", "new", "copy"), "config copy"),
    **dict.fromkeys(("deploy",), "export"),
    **dict.fromkeys(("info", "env", "checks"), "doctor"),
}

# The options that --set of each command may change, by the beginning of their names.
_ON_CONFIGS = ("train", "population", "data check", "config show")
_SETTABLE = dict.fromkeys(_ON_CONFIGS, ("",)) | {"eval": ("eval.", "data."), "predict": ("eval.",)}

_OUTPUT = ("o", "out", "out_dir", "outdir", "output_dir", "save_dir", "work_dir", "project")
_WEIGHTS = ("weights", "checkpoint", "ckpt", "model", "model_path", "resume_from")
_SIDE = ("imgsz", "img_size", "image_size", "img")
_NO_OPTION = "is written without an option: segtrain {command} {value}"
# Options of other tools; the commands of segtrain that get the hint; the hint; and an example of
# {value}, for an option without one.
_OPTIONS = (
    (("config", "cfg", "config_file"), _ON_CONFIGS, f"the config {_NO_OPTION}", "my.yaml"),
    (
        ("data",),
        _ON_CONFIGS,
        "the config tells of the data, and is written without an option: segtrain {command} "
        "my.yaml; --set data.root=FOLDER names another folder",
        "",
    ),
    (_OUTPUT, ("train", "population", "predict"), "write --output {value}", "DIR"),
    (_OUTPUT, ("export",), "write --output {value}", "FILE"),
    (_OUTPUT, ("eval",), "write --save-predictions {value}, or --json FILE for the scores", "DIR"),
    (_WEIGHTS, ("eval", "predict", "export"), f"the run or checkpoint {_NO_OPTION}", "runs/own"),
    (_WEIGHTS[:3], ("train",), "to start from a model, write --set train.init_from={value}", "RUN"),
    (
        ("source", "input", "images"),
        ("predict",),
        "images are written without an option: segtrain predict runs/own photos/",
        "",
    ),
    (_SIDE, _ON_CONFIGS, "write --set 'augment.crop_size=[{value}, {value}]'", "512"),
    (_SIDE, ("export",), "write --size {value} {value}", "512"),
)


def after_error(message: str, argv: Sequence[str]) -> str:
    """The end of argparse's message about the command line `argv`, from "; " on, or ""."""
    if choice := re.search(r"argument COMMAND: invalid choice: '([^']*)'", message):
        known = _COMMANDS.get(choice[1].lower())
        if known == "data check" and argv[:1] == ["data"]:
            return ""
        return f"; write segtrain {known}" if known else ""
    if message.startswith("argument --size:"):
        return "; write height and width, such as --size 512 512"
    if message.startswith("argument --device: invalid choice"):
        number = re.search(r"choice: '(?:cuda:|gpu:?)?([0-9]+(?:,[0-9]+)*)'", message)
        if number is None:
            return ""
        visible = f"CUDA_VISIBLE_DEVICES={number[1]}"
        return f"; to choose a GPU, write {visible} segtrain ... --device cuda"
    if message.startswith("the following arguments are required"):
        options = (word.partition("=") for word in argv[1:])
        return _first(_of_other_tools(name, value, argv) for name, _, value in options)
    return ""


def instead_of(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """The end of a message, from "; " on: what to write instead of an unknown option.

    Args:
        unknown: the words of the command line `argv` that no option takes.

    Returns:
        an example for the first of them that is similar to an option; "" if none is.
    """
    found = _candidates(unknown, argv)
    if hint := _first(_of_other_tools(name, value, argv) for name, value in found):
        return hint
    settable = _SETTABLE.get(_command(argv), ())
    if not settable:
        return ""
    hint = _first(_setting(name, value) for name, value in found)
    key = re.search(r"--set '?(\S+?)=", hint)
    return hint if key is None or key[1].startswith(settable) else ""


def _first(hints: Iterator[str]) -> str:
    return next(filter(None, hints), "")


def _command(argv: Sequence[str]) -> str:
    return " ".join(argv[:2] if argv[:1] in (["data"], ["config"]) else argv[:1])


def _of_other_tools(word: str, value: str, argv: Sequence[str]) -> str:
    name, command = word.lstrip("-").replace("-", "_"), _command(argv)
    for names, commands, hint, example in _OPTIONS:
        if word.startswith("-") and name in names and command in commands:
            is_usable = value and (names is not _SIDE or re.fullmatch(r"[0-9]{1,6}", value))
            shown = shlex.quote(value) if is_usable else example
            return "; " + hint.format(command=command, value=shown)
    return ""


def _candidates(unknown: Sequence[str], argv: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value or "") of what may be meant as an option."""
    found = []
    for i, word in enumerate(argv):
        following = argv[i + 1] if i + 1 < len(argv) else ""
        after = "" if following.startswith("--") else following
        if word == "--set" and "=" not in after and argv[i + 2 : i + 3] in [[u] for u in unknown]:
            found.append((after, argv[i + 2]))  # --set KEY VALUE
        elif word in unknown:
            name, separator, value = word.partition("=")
            found.append((name, value if separator else after))
    return found


def _setting(word: str, value: str) -> str:
    """The --set that may be meant by `word`: a key, its last part, or something similar."""
    name = word.lstrip("-").rstrip(":").replace("-", "_")
    # Of keys with the same last part the first counts.
    keys = {key.rpartition(".")[2]: key for key in reversed(_keys())}
    key = name if name in keys.values() else keys.get(name)
    if key is None and (word.startswith("-") or name in FOREIGN_KEYS):
        near = name if name in FOREIGN_KEYS else nearest(name, [*keys, *FOREIGN_KEYS])
        text = FOREIGN_KEYS.get(near or "", "")
        named = re.fullmatch(r"did you mean (\S+)\?", text)
        key = named[1] if named else keys.get(near or "")
        if key is None:
            example = ", such as --set train.steps=10000" if "train.steps" in text else ""
            return f"; {text}{example}" if text else ""
    if key is None:
        return ""
    return f"; write --set {shlex.quote(f'{key}={value or _usual(key)}')}"


def _keys() -> list[str]:
    return [f"{name}.{key}" for name in _SECTIONS for key in SECTIONS[name].model_fields] + ["seed"]


def _usual(key: str) -> str:
    """A value for an example: the default, but what a switch would switch on."""
    if key == "train.precision":  # who looks for it wants mixed precision
        return "bfloat16"
    settings = Config
    for part in key.split("."):
        field = settings.model_fields[part]
        settings = field.annotation
    return "VALUE" if field.is_required() else yaml_value(field.default or True)
