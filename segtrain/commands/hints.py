"""What to write instead of words on a command line that segtrain does not know."""

import re
import shlex
from collections.abc import Sequence

from segtrain.config import Config
from segtrain.config.loading import yaml_value
from segtrain.config.options import FOREIGN_KEYS
from segtrain.config.suggest import nearest

# Of options by one name in several sections the first is meant.
_SECTIONS = ("train", "data", "augment", "model", "loss", "eval", "norm", "log", "checkpoint")
_ALL = {("train",), ("data", "check"), ("config", "show")}
_SOME = {"eval": ("eval.", "data."), "predict": ("eval.",)}


# Commands of other tools.
_COMMANDS = {
    **dict.fromkeys(("fit", "tune", "finetune"), "train"),
    **dict.fromkeys(("val", "valid", "validate", "test", "evaluate", "score"), "eval"),
    **dict.fromkeys(("detect", "infer", "inference", "segment", "pred"), "predict"),
    **dict.fromkeys(("datacheck", "check", "data-check", "check-data"), "data check"),
    **dict.fromkeys(("list", "configs", "models"), "config list"),
    **dict.fromkeys(("init", "new", "copy"), "config copy"),
    **dict.fromkeys(("convert", "deploy"), "export"),
    **dict.fromkeys(("info", "env", "checks"), "doctor"),
}
_RUN = ("eval", "predict", "export")
_OUTPUT = ("o", "out", "out_dir", "outdir", "output_dir", "save_dir", "work_dir", "project")
_WEIGHTS = ("weights", "checkpoint", "ckpt", "model", "model_path", "resume_from")
_SIDE = re.compile(r"[0-9]{1,6}\Z")


def after_error(message: str, argv: Sequence[str]) -> str:
    """The end of argparse's message about the command line `argv`, from "; " on, or ""."""
    choice = re.search(r"argument COMMAND: invalid choice: '([^']*)'", message)
    if choice:
        known = _COMMANDS.get(choice[1].lower())
        if known == "data check" and argv[:1] == ["data"]:
            return ""
        return f"; write segtrain {known}" if known else ""
    if message.startswith("argument --size:"):
        return "; write height and width, such as --size 512 512"
    if message.startswith("argument --device: invalid choice"):
        number = re.search(r"choice: '(?:cuda:|gpu:?)?([0-9]+(?:,[0-9]+)*)'", message)
        first = f"CUDA_VISIBLE_DEVICES={number[1]} segtrain ... " if number else ""
        return f"; to choose a GPU, write {first}--device cuda" if number else ""
    if message.startswith("the following arguments are required"):
        for word in argv[1:]:
            name, _, value = word.partition("=")
            if word.startswith("-") and (hint := _of_other_tools(name, value, argv)):
                return hint
    return ""


def _of_other_tools(word: str, value: str, argv: Sequence[str]) -> str:
    """What to write instead of an option that other tools have, from "; " on, or ""."""
    command, name = argv[0], word.lstrip("-").replace("-", "_")
    of_all = command == "train" or tuple(argv[:2]) in _ALL
    shown = shlex.quote(value) if value else ""
    called = " ".join(argv[:2] if command in ("data", "config") else argv[:1])
    if name in ("config", "cfg", "config_file") and of_all:
        file = shown or "my.yaml"
        return f"; the config is written without an option: segtrain {called} {file}"
    if name == "data" and of_all:
        return (
            f"; the config tells of the data, and is written without an option: segtrain {called} "
            "my.yaml; --set data.root=FOLDER names another folder"
        )
    if name in _OUTPUT and command in ("train", "predict", "export"):
        what = "FILE" if command == "export" else "DIR"
        return f"; write --output {shown or what}"
    if name in _OUTPUT and command == "eval":
        return f"; write --save-predictions {shown or 'DIR'}, or --json FILE for the scores"
    if name in _WEIGHTS and command in _RUN:
        run = shown or "runs/own"
        return f"; the run or checkpoint is written without an option: segtrain {command} {run}"
    if name in ("weights", "checkpoint", "ckpt") and command == "train":
        return f"; to start from a model, write --set train.init_from={shown or 'RUN'}"
    if name in ("source", "input", "images") and command == "predict":
        return "; images are written without an option: segtrain predict runs/own photos/"
    if name in ("imgsz", "img_size", "image_size", "img") and of_all:
        side = value if _SIDE.match(value) else "512"
        return f"; write --set 'augment.crop_size=[{side}, {side}]'"
    if name in ("imgsz", "img_size", "image_size", "img") and command == "export":
        side = value if _SIDE.match(value) else "512"
        return f"; write --size {side} {side}"
    return ""


def instead_of(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """An example of what to write instead of the first of `unknown` that is like an option.

    Returns:
        the end of a message, from "; " on; empty if nothing is like it.

    Args:
        unknown: the words of the command line `argv` that no option takes.
    """
    for word, value in _candidates(unknown, argv):
        if word.startswith("-") and (hint := _of_other_tools(word, value, argv)):
            return hint
    if not ({tuple(argv[:1]), tuple(argv[:2])} & _ALL or argv[0] in _SOME):
        return ""
    for word, value in _candidates(unknown, argv):
        if hint := _hint(word, value):
            allowed = _SOME.get(argv[0], ("",))
            key = re.search(r"--set '?(\S+?)=", hint)
            return hint if key is None or key[1].startswith(allowed) else ""
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


def _hint(word: str, value: str) -> str:
    name = word.lstrip("-").rstrip(":").replace("-", "_")
    keys = _keys()
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


def _keys() -> dict[str, str]:
    """The last word of every option, and its whole name."""
    keys: dict[str, str] = {"seed": "seed"}
    for section in reversed(_SECTIONS):
        fields = Config.model_fields[section].annotation.model_fields
        keys |= {key: f"{section}.{key}" for key in fields}
    return keys


def _usual(key: str) -> str:
    """A value for an example: the default, but true for a switch."""
    settings = Config
    for part in key.split("."):
        field = settings.model_fields[part]
        settings = field.annotation
    return "VALUE" if field.is_required() else yaml_value(field.default or True)
