"""What to write instead of words on a command line that segtrain does not know."""

import re
import shlex
from collections.abc import Sequence

from segtrain.config import Config
from segtrain.config.experiment import SECTIONS
from segtrain.config.loading import yaml_value
from segtrain.config.messages import FOREIGN_KEYS, nearest

# If several sections have an option of the same name, the first of these is meant.
_SECTIONS = (
    *("train", "optim", "schedule", "data", "augment", "model"),
    *("loss", "eval", "norm", "log", "checkpoint"),
)
# The options that --set of each command may change, by the beginning of their names.
_ON_CONFIGS = ("train", "population", "data check", "config show")
_SETTABLE = dict.fromkeys(_ON_CONFIGS, ("",)) | {"eval": ("eval.", "data."), "predict": ("eval.",)}

# Commands and options of other tools.
_COMMANDS = {
    "train": "fit tune finetune",
    "population": "pbt search sweep",
    "eval": "val valid validate test evaluate score",
    "predict": "detect infer inference segment pred",
    "data check": "datacheck check data-check check-data",
    "config list": "list configs models",
    "config copy": "init new copy",
    "export": "deploy",
    "doctor": "info env checks",
}
_OPTIONS = {
    "the config is written without an option: segtrain train my.yaml": "config cfg config-file",
    "the config tells of the data; --set data.root=FOLDER names another folder": "data",
    "write --output": "o out out-dir outdir output-dir save-dir work-dir project",
    "a run or checkpoint is written without an option; to train from one, write --set "
    "train.init_from=RUN": "weights checkpoint ckpt model model-path resume-from",
    "images are written without an option: segtrain predict runs/own photos/": "source input",
    "write --set 'augment.crop_size=[512, 512]'": "imgsz img-size image-size img",
}
# What argparse says begins so, and what is meant.
_ERRORS = {
    "argument --size:": "write height and width, such as --size 512 512",
    "argument --device: invalid": "to choose a GPU, write CUDA_VISIBLE_DEVICES=0 segtrain ...",
}


def after_error(message: str, argv: Sequence[str]) -> str:
    """The end of argparse's message about the command line `argv`, from "; " on, or ""."""
    if choice := re.search(r"argument COMMAND: invalid choice: '([^']*)'", message):
        known = next((name for name, words in _COMMANDS.items() if choice[1] in words.split()), "")
        return f"; write segtrain {known}" if known and argv[:1] != ["data"] else ""
    if message.startswith("the following arguments are required"):
        return _of_other_tools(argv)
    return next((f"; {hint}" for begin, hint in _ERRORS.items() if message.startswith(begin)), "")


def instead_of(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """The end of a message, from "; " on: what to write instead of an unknown option.

    Args:
        unknown: the words of the command line `argv` that no option takes.

    Returns:
        an example for the first of them that is similar to an option; "" if none is.
    """
    if hint := _of_other_tools(unknown):
        return hint
    command = " ".join(argv[:2] if argv[:1] in (["data"], ["config"]) else argv[:1])
    settable = _SETTABLE.get(command, ())
    hints = (_setting(name, value) for name, value in _candidates(unknown, argv) if settable)
    hint = next(filter(None, hints), "")
    key = re.search(r"--set '?(\S+?)=", hint)
    return hint if key is None or key[1].startswith(settable) else ""


def _of_other_tools(words: Sequence[str]) -> str:
    names = [
        word.lstrip("-").partition("=")[0].replace("_", "-")
        for word in words
        if word.startswith("-")
    ]
    found = (hint for hint, known in _OPTIONS.items() if set(names) & set(known.split()))
    return next((f"; {hint}" for hint in found), "")


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
    all_keys = [f"{name}.{key}" for name in _SECTIONS for key in SECTIONS[name].model_fields]
    # Of keys with the same last part the first counts.
    keys = {key.rpartition(".")[2]: key for key in reversed([*all_keys, "seed"])}
    key = name if name in keys.values() else keys.get(name)
    if key is None and (word.startswith("-") or name in FOREIGN_KEYS):
        near = name if name in FOREIGN_KEYS else nearest(name, [*keys, *FOREIGN_KEYS])
        text = FOREIGN_KEYS.get(near or "", "")
        named = re.fullmatch(r"did you mean (\S+)\?", text)
        key = named[1] if named else keys.get(near or "")
        if key is None:
            example = ", such as --set train.steps=10000" if "train.steps" in text else ""
            return f"; {text}{example}" if text else ""
    return f"; write --set {shlex.quote(f'{key}={value or _usual(key)}')}" if key else ""


def _usual(key: str) -> str:
    """A value for an example: the default, but what a switch would switch on."""
    settings = Config
    for part in key.split("."):
        field = settings.model_fields[part]
        settings = field.annotation
    return "VALUE" if field.is_required() else yaml_value(field.default or True)
