"""What may be meant by an option that segtrain does not know."""

import re
from collections.abc import Sequence

from segtrain.config.experiment import SECTIONS
from segtrain.config.messages import FOREIGN_KEYS, nearest

# If several sections have an option of the same name, the first of these is meant.
_SECTIONS = (
    *("train", "optim", "schedule", "data", "augment", "model"),
    *("loss", "eval", "norm", "log", "checkpoint"),
)
# How the options begin that --set of a command may change.
_ON_CONFIGS = ("train", "population", "bench", "data check", "config show")
_SETTABLE = dict.fromkeys(_ON_CONFIGS, ("",)) | {"eval": ("eval.", "data."), "predict": ("eval.",)}
# Of torchrun, for several machines.
_TORCHRUN = ("--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-timeout", "--master-addr")


def instead_of(unknown: Sequence[str], argv: Sequence[str]) -> str:
    """`; did you mean ...?` for the first of the `unknown` words that is like an option, or "".

    A further model behind --with gets a hint, too.

    unknown: the words of the command line `argv` that no option takes.
    """
    if "--with" in argv and not unknown[0].startswith("-"):
        return "; each further model needs its own --with, and inputs stand together"
    if any(word.partition("=")[0] in _TORCHRUN for word in unknown):
        return "; torchrun starts the ranks of several machines: torchrun ... -m segtrain train ..."
    command = " ".join(argv[:2] if argv[:1] in (["data"], ["config"]) else argv[:1])
    settable = _SETTABLE.get(command)
    hints = (_hint(word, settable) for word in unknown) if settable else ()
    return next(filter(None, hints), "")


def _hint(word: str, settable: tuple[str, ...]) -> str:
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    all_keys = [f"{part}.{key}" for part in _SECTIONS for key in SECTIONS[part].model_fields]
    # Of keys with the same last part the first counts.
    keys = {key.rpartition(".")[2]: key for key in reversed([*all_keys, "seed"])}
    key, text = keys.get(name.rpartition(".")[2]), ""
    if key is None and word.startswith("-"):
        near = nearest(name, [*keys, *FOREIGN_KEYS]) or ""
        text = FOREIGN_KEYS.get(near, "")
        named = re.fullmatch(r"did you mean (\S+)\?", text)
        key = named[1] if named else keys.get(near)
    if key is None:
        return f"; {text}" if text else ""
    return f"; did you mean --set {key}=VALUE?" if key.startswith(settable) else ""
