"""Losses, backbones and more of your own under names in a config, without a change of segtrain.

A plugin is a module or a file that registers what it has when it is imported:

    @loss("poly1", options=Poly1Options)
    class Poly1(CrossEntropy): ...

Three ways lead to an import, and all are the user's: `plugins` of a config that is trained or
checked, `--plugin` of a command (`load` in a program), and a name in a config that an installed
package offers as an entry point, such as `poly1 = my_pkg.losses:Poly1` in the group
`segtrain.losses`. What a run or a checkpoint says that it needs is never imported.
"""

import hashlib
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Container, Iterable
from functools import cache, partial
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from segtrain import files
from segtrain.errors import ConfigError
from segtrain.text import MAX_NAME, first_of, printable

GROUPS = {
    "loss": "segtrain.losses",
    "backbone": "segtrain.backbones",
    "head": "segtrain.heads",
    "optimizer": "segtrain.optimizers",
    "transform": "segtrain.transforms",
    "metric": "segtrain.metrics",
    "callback": "segtrain.callbacks",
    "label_format": "segtrain.label_formats",
    "task": "segtrain.tasks",
}
"""The kinds of plugins, and the groups of their entry points."""

# A method of the class from which those of a kind derive.
_CONTRACT_OF = {"label_format": "ignored", "task": "for_loss"}

_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_MAX_BYTES = 10_000_000  # far more than a file of source has


class Plugin(NamedTuple):
    """What stands behind a name.

    made: the class or function; what calls it says with what.
    options: the pydantic model of its own options; None: it has none.
    uses, ignores: options of segtrain's own, by their names in the section, that serve it although
        they serve few others, and that do not serve it although they serve all others.
    source, sha256: the module, or the absolute path of the file, and the hash of its code: of the
        bytes of a file, or of all Python files of a package; empty if there is no file.
    is_here: whether it is imported; see `stand_in`.
    """

    kind: str
    name: str
    made: Callable[..., Any]
    options: type[Any] | None
    uses: frozenset[str]
    ignores: frozenset[str]
    source: str
    sha256: str
    is_here: bool = True

    def record(self) -> dict[str, str | None]:
        """What a checkpoint keeps of it."""
        package = (
            None if self.source.endswith(".py") else _package_of(self.source.partition(".")[0])
        )
        known = {key: getattr(self, key) for key in ("kind", "name", "source", "sha256")}
        return known | {"package": package}


@cache  # it reads what all installed packages consist of
def _package_of(module: str) -> str | None:
    """The package that has brought a module, and its version."""
    owners = packages_distributions().get(module)
    return f"{owners[0]} {version(owners[0])}" if owners else None


_plugins: dict[tuple[str, str], Plugin] = {}
# What configs name that is not here, and whose part nobody has needed.
_absent: dict[tuple[str, str], Plugin] = {}
# What `load` has imported, with the hash of a file.
_loaded: dict[str, str] = {}
_paths: dict[str, str] = {}  # of files, by the names of their modules


def register(
    kind: str, name: str, *, options: type[Any] | None = None, uses: str = "", ignores: str = ""
) -> Callable[[Any], Any]:
    """A decorator that gives a class or function a name in configs; see `Plugin`.

    options: derives from `segtrain.config.Section`.
    uses, ignores: names with blanks between them, such as "class_weights".

    Raises:
        ConfigError: another plugin has the name, or its options take any key.
    """
    # The module that calls this, not `made.__module__`: it may register what a library has.
    # `partial` of the names below has no frame of its own.
    module = sys._getframe(1).f_globals.get("__name__", "__main__")

    def add(made: Any) -> Any:
        _add(kind, name, made, module, options, frozenset(uses.split()), frozenset(ignores.split()))
        return made

    return add


loss, backbone, head, optimizer, transform, metric, callback, label_format, task = (
    partial(register, kind) for kind in GROUPS
)


def _add(
    kind: str, name: str, made: Any, module: str, options: type[Any] | None, *rest: Any
) -> None:
    source = _paths.get(module, module)
    shown = f"{kind} {printable(name, MAX_NAME)}"
    before = _plugins.get((kind, name))
    # The same source may register again, as after a reload: the newer one counts.
    if before is not None and before.source != source:
        what = f"{source} and {before.source} both register it"
        raise ConfigError(f"{shown}: {what}; leave one out of plugins, or rename it")
    if kind == "metric" and "/" in name:
        raise ConfigError(f"{shown}: a slash stands between a metric and its score; rename it")
    if options is not None and getattr(options, "model_config", {}).get("extra") != "forbid":
        what = "options would take keys that are misspelt; derive them from segtrain.config.Section"
        raise ConfigError(f"{shown}: {what}")
    if not callable(made):
        raise ConfigError(f"{shown}: expected a class or a function, got {type(made).__name__}")
    if kind in ("label_format", "task"):
        if not isinstance(made, type) or not hasattr(made, _CONTRACT_OF[kind]):
            raise ConfigError(f"{shown}: expected a class with `{_CONTRACT_OF[kind]}`")
        if left := getattr(made, "__abstractmethods__", None):
            raise ConfigError(f"{shown}: lacks {first_of(sorted(left), 20)}")
        if kind == "task":
            made.name = name
    sha256 = _loaded[source] if module in _paths else _sha256_of(module)
    _plugins[kind, name] = Plugin(kind, name, made, options, *rest, source, sha256)


def _sha256_of(module: str) -> str:
    """The hash of the code of a module that is imported: of its package, if it is in one."""
    file, top = (
        getattr(sys.modules.get(name), "__file__", None) for name in (module, module.split(".")[0])
    )
    if top is None or not top.endswith("__init__.py"):
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    # All files of the package: the plugin may call any of them.
    root, digest = Path(top).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content} {path.relative_to(root).as_posix()}\n".encode())
    return digest.hexdigest()


def load(source: str, folder: Path | None = None) -> str:
    """Imports a module, `my_pkg.losses`, or a file, `./my_loss.py`, once; returns its full name.

    folder: what the path of a file starts from; None: the current one.

    Raises:
        ConfigError: it cannot be found or imported, or registers nothing.
    """
    is_file = source.endswith(".py")
    full = str(Path(folder or "", source).resolve()) if is_file else source
    if not is_file and not _MODULE.fullmatch(source):
        raise ConfigError(
            f"{printable(source, MAX_NAME)}: expected a module, such as my_pkg.losses, or a file "
            "that ends with .py"
        )
    try:
        if is_file:
            _import_file(full)
        else:
            importlib.import_module(full)
            _loaded.setdefault(full, "")
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(_cannot(full, error)) from error
    # With the modules below it, since a package may register in those.
    if not any(f"{plugin.source}.".startswith(f"{full}.") for plugin in _plugins.values()):
        _loaded.pop(full, None)
        known = ", ".join(GROUPS)
        raise ConfigError(f"{full}: registers nothing by segtrain.plugins ({known})")
    return full


def _import_file(path: str) -> None:
    """Runs the file as a module of a name of its own, unless the same bytes have run already."""
    source = files.read_bytes(Path(path), _MAX_BYTES)
    sha256 = hashlib.sha256(source).hexdigest()
    if _loaded.get(path) == sha256:
        return
    place = hashlib.sha256(path.encode()).hexdigest()[:8]
    name = f"segtrain_plugin_{re.sub(r'[^A-Za-z0-9]', '_', Path(path).stem)}_{place}"
    module = ModuleType(name)
    module.__file__ = path
    # Before it runs: `register` looks the source up here, and dataclasses look for their module.
    _paths[name], _loaded[path], sys.modules[name] = path, sha256, module
    _forget(path)  # the bytes before
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException:
        # Half of a module must not stay, neither imported nor with what it has registered.
        del _loaded[path], sys.modules[name]
        _forget(path)
        raise


def _forget(source: str) -> None:
    for key in [key for key, plugin in _plugins.items() if plugin.source == source]:
        del _plugins[key]


def _cannot(what: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or "no reason given"
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    if isinstance(error, OSError) and error.strerror:
        kind, reason = "", error.strerror.lower()
    missing = isinstance(error, ModuleNotFoundError) and error.name == what.partition(".")[0]
    way = "; install its package, or set PYTHONPATH" if missing else ""
    return f"{what}: cannot be imported: {kind}{printable(reason, 2 * MAX_NAME)}{way}"


def loaded() -> tuple[str, ...]:
    """What `load` has imported in this process, as `plugins` of a config."""
    return tuple(_loaded)


def registered(kind: str, name: str) -> Plugin | None:
    """The plugin of this name among those that are imported, or what `stand_in` has put there."""
    return _plugins.get((kind, name)) or _absent.get((kind, name))


def stand_in(kind: str, name: str, source: str = "", sha256: str = "") -> Plugin:
    """What stands for a plugin that is not here, in a config whose other parts are of use.

    Nothing is said of its options. Who calls it is told that it is not here (ConfigError).
    """

    def made(*_: Any, **__: Any) -> Any:
        what = f"{kind} {printable(name, MAX_NAME)}: of a plugin that is not imported here"
        raise ConfigError(f"{what}; if you trust that code, give {option_of(source)}")

    absent = Plugin(kind, name, made, None, frozenset(), frozenset(), source, sha256, False)
    return _absent.setdefault((kind, name), absent)


def names(kind: str) -> list[str]:
    """The names of the imported plugins of a kind."""
    return sorted(name for plugin_kind, name in _plugins if plugin_kind == kind)


def find(kind: str, name: str) -> Plugin | None:
    """The plugin of this name; an entry point of an installed package is imported.

    Raises:
        ConfigError: two packages have the name, or it cannot be imported.
    """
    if (kind, name) in _plugins:
        return _plugins[kind, name]
    points = list(entry_points(group=GROUPS[kind], name=name))
    if not points:
        return None
    if len(points) > 1:
        owners = first_of(point.dist.name if point.dist else point.value for point in points)
        raise ConfigError(f"{kind} {name}: several installed packages offer it: {owners}")
    try:
        made = points[0].load()
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(_cannot(f"{kind} {name} ({points[0].value})", error)) from error
    if (kind, name) not in _plugins:  # it does not register itself
        _add(kind, name, made, points[0].module, None, frozenset(), frozenset())
    return _plugins[kind, name]


def choose(kind: str, name: str, own: dict[str, Any]) -> Any:
    """What `name` stands for: in the table of segtrain's own, else a plugin."""
    if name in own:
        return own[name]
    plugin = registered(kind, name) or find(kind, name)
    assert plugin is not None  # the config was checked
    return plugin.made


def missing(records: Iterable[dict[str, Any]], needed: Container[str] = GROUPS) -> list[str]:
    """A line for each plugin of a checkpoint that is not here, and how it comes here.

    needed: the kinds that have to be; for others there are stand-ins then.

    Raises:
        ConfigError: as `find`.
    """
    lines = []
    for record in records:
        # A checkpoint comes from anywhere: it may name a kind that does not exist here.
        is_kind = record["kind"] in GROUPS
        if is_kind and find(record["kind"], record["name"]) is not None:
            continue
        if is_kind and record["kind"] not in needed:
            stand_in(*(record[key] for key in ("kind", "name", "source", "sha256")))
            continue
        # A stranger's words, on one line.
        said = {key: printable(str(value), MAX_NAME) for key, value in record.items()}
        given = option_of(record["source"])
        way = f"if you trust that code, give {given}, or where it lies now"
        # Only what has the form of a package and its version is suggested for installing.
        if re.fullmatch(r"[\w.-]+( [\w.+!-]+)?", record["package"] or ""):
            way = f"install {said['package']}, or give {given}"
        what = f"needs the {said['kind']} '{said['name']}' of a plugin that is not imported here"
        lines.append(f"{what} (SHA-256 {said['sha256'][:12]}...); {way}")
    return lines


def option_of(source: object) -> str:
    """The option that imports a plugin, to be pasted; what no module or file is, is not shown."""
    text = str(source)
    if not (_MODULE.fullmatch(text) or text.endswith(".py")):
        return "--plugin MODULE or FILE.py"
    return f"--plugin {shlex.quote(printable(text))}"


def changes(records: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each plugin whose code is not that of the checkpoint."""
    lines = []
    for record in records:
        here = _plugins.get((record["kind"], record["name"]))
        if here is not None and here.sha256 != record["sha256"]:
            before, now = (printable(x[:12], MAX_NAME) for x in (record["sha256"], here.sha256))
            where = f"{here.kind} {here.name} of {here.source}"
            lines.append(f"plugins: the code of {where}: SHA-256 {before}... there, {now}... now")
    return lines
