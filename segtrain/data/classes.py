"""Class files: the names, colours and raw ids of the classes, and what is ignored.

    classes:
      - {name: road, color: [128, 64, 128], ids: [7]}
      - {name: sidewalk, color: [244, 35, 232], ids: [8]}
    ignore_ids: [0, 1, 2, 3]
    ignore_color: [0, 0, 0]

The order of the list gives the train ids 0, 1, ... Everything but the name may be left out: `ids`
is then the place in the list, `color` the next free one of the Pascal VOC palette, `ignore_ids` is
[255], no colour is ignored, and a class may be just its name:

    classes: [background, crack, spalling]
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from segtrain.config.messages import Finding, nearest, report, validate
from segtrain.config.strict_yaml import Document, read_text, scan_yaml
from segtrain.errors import ConfigError
from segtrain.text import MAX_NAME, name_problem, printable

# Equal to records.IGNORE_INDEX, which cannot be imported here without torch; a test compares them.
_IGNORE_INDEX = 255
MAX_CLASSES = 255
_MAX_SHOWN = 10
MAX_RAW_ID = 65535  # labels have at most 16 bits

Color = tuple[int, int, int]

_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the files lie in the package, in a checkout at the top.
_DIRECTORIES = (_PACKAGE / "_data" / "classes", _PACKAGE.parent / "data" / "classes")
_EXAMPLE = "classes: [background, crack]"
_IGNORE_COLORS = ((0, 0, 0), (224, 224, 192), (255, 255, 255))


@dataclass(frozen=True)
class SegClass:
    """One class: its name, its colour in pictures, and the label values that mean it."""

    name: str
    color: Color
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ClassFile:
    """The classes of a data set; the place of a class is its train id.

    given_colors: train ids of the classes whose colour stands in the file; the others have a
        default colour. Empty for the class file of a checkpoint, which does not say it.
    ignores_color: whether labels may hold `ignore_color`; False where it is a default, which only
        pictures show: in labels it is as unknown as any other colour.
    """

    name: str
    classes: tuple[SegClass, ...]
    ignore_ids: tuple[int, ...]
    ignore_color: Color
    given_colors: Annotated[frozenset[int], Field(exclude=True)] = field(
        default=frozenset(), compare=False, repr=False
    )
    ignores_color: Annotated[bool, Field(exclude=True)] = field(
        default=True, compare=False, repr=False
    )

    @property
    def num_classes(self) -> int:
        """K, at most 255."""
        return len(self.classes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Class names in the order of the train ids."""
        return tuple(one.name for one in self.classes)

    @cached_property
    def palette(self) -> list[Color]:
        """Colours in the order of the train ids, RGB 0..255."""
        return [one.color for one in self.classes]

    @cached_property
    def train_id_of(self) -> dict[int, int]:
        """Raw label value -> train id, or 255 for ignored values; other values are mistakes."""
        ids = {raw: train_id for train_id, one in enumerate(self.classes) for raw in one.ids}
        return ids | dict.fromkeys(self.ignore_ids, _IGNORE_INDEX)

    @cached_property
    def write_ids(self) -> list[int]:
        """The raw label value to write for each train id, as submissions want it."""
        return [one.ids[0] for one in self.classes]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_Byte = Annotated[int, Field(ge=0, le=255)]
_RawId = Annotated[int, Field(ge=0, le=MAX_RAW_ID)]
_Color = tuple[_Byte, _Byte, _Byte]


def _fit(name: str) -> str:
    if problem := name_problem(name):
        raise ValueError(problem)
    return name


class _ClassEntry(_Section):
    name: Annotated[str, Field(min_length=1), AfterValidator(_fit)]
    color: _Color | None = None
    ids: Annotated[tuple[_RawId, ...], Field(min_length=1)] | None = None


class _ClassFileEntry(_Section):
    classes: Annotated[tuple[_ClassEntry, ...], Field(min_length=1)]
    ignore_ids: tuple[_RawId, ...] | None = None
    ignore_color: _Color | None = None


class _StoredClassFile(_ClassFileEntry):
    """Everything filled in, as `ClassFile` is written to checkpoints."""

    name: str
    classes: Annotated[tuple[_ClassEntry, ...], Field(min_length=1, max_length=MAX_CLASSES)]


def load_class_file(
    name_or_path: str, *, label_format: str = "ids", quoted: bool = True
) -> ClassFile:
    """The class file of a known data set (`cityscapes`, `camvid`, `voc`, `ade20k`) or at a path.

    A name has neither a directory nor an ending such as `.yaml`.

    Args:
        label_format: of `colors` every class must give its colour: a default one would be that of
            another class, or of none, in the labels.
        quoted: whether messages may show what stands in the file. False where the user did not
            name it: a checkpoint from elsewhere can name any file of this machine.

    Raises:
        ConfigError: no such file, or one line for every mistake in it.
    """
    try:
        path = _find(name_or_path)
    except OSError as error:  # a name that is too long, a folder without permission
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"data.classes: {printable(name_or_path)}: cannot be read: {reason}"
        ) from None
    text = read_text(path)
    try:
        return _parse(text, path, label_format)
    except _LacksColorError as error:
        unquoted = f"data.classes: {printable(path)}: {error.unquoted}"
        raise ConfigError(str(error) if quoted else unquoted) from None
    except ConfigError:
        if quoted:
            raise
        raise ConfigError(
            f"data.classes: {printable(path)}: not a class file, or one with mistakes; the "
            "checkpoint names it, so its lines are not shown; --set data.classes=PATH shows them, "
            "or names another"
        ) from None


def _parse(text: str, path: Path, label_format: str) -> ClassFile:
    document = scan_yaml(text, source=printable(path), example=_EXAMPLE)
    if ("names",) in document.lines and ("classes",) not in document.lines:
        raise ConfigError(
            f"{printable(path)}:{document.lines['names',]}: names: expected the key 'classes' with "
            f"a list in the order of the ids, such as '{_EXAMPLE}'"
        )
    # Of `{0: a, 1: b}` the keys are refused, and with them the whole mapping.
    keyed = any(
        p.path == ("classes",) and p.message.startswith("a key must") for p in document.problems
    )
    if keyed or isinstance(document.data.get("classes"), dict):
        raise ConfigError(
            f"{printable(path)}:{document.lines['classes',]}: classes: expected a list, such as "
            "[background, crack], or a line '- {name: crack, ids: [1]}' for each class"
        )
    if problem := _unnamed(document):
        raise ConfigError(f"{printable(path)}:{document.lines['classes',]}: classes: {problem}")
    findings = [Finding(path, text, line=line) for path, line, text in document.problems]
    entry = validate(_ClassFileEntry, _with_names(document.data))
    if isinstance(entry, list):
        refused = {problem.path for problem in document.problems}
        findings += [f for f in entry if not any(f.path == p[: len(f.path)] for p in refused)]
    elif len(entry.classes) > MAX_CLASSES:
        many = f"{len(entry.classes)} classes; at most {MAX_CLASSES} fit in a label"
        findings.append(Finding(("classes",), many))
    elif not findings:
        class_file = _resolve(entry, name=path.stem)
        findings += _conflicts(class_file, explicit_color=class_file.ignores_color)
        if label_format == "colors" and (lacking := _without_color(entry)):
            findings.append(lacking)
            if len(findings) == 1:
                place = report(findings, lambda finding: _place(document, finding))
                raise _LacksColorError(*place, unquoted=_without_color_by_number(entry))
        if not findings:
            return class_file
    raise ConfigError("\n".join(report(findings, lambda finding: _place(document, finding))))


def class_file_from_json(text: str) -> ClassFile:
    """The class file in a checkpoint, by the rules for files.

    Raises:
        pydantic.ValidationError: it is none.
        ConfigError: it says something twice.
    """
    stored = _StoredClassFile.model_validate_json(text)
    class_file = replace(_resolve(stored, name=stored.name), given_colors=frozenset())
    conflicts = _conflicts(class_file, explicit_color=class_file.ignores_color)
    problems = [finding.message for finding in conflicts]
    if problems:
        raise ConfigError("; ".join(problems))
    return class_file


def ignoring_as(before: ClassFile, now: ClassFile) -> ClassFile:
    """`now`; where it is the same as `before`, its default `ignore_color` is ignored as there.

    before: of a checkpoint. Earlier versions ignored the default colour in labels.
    """
    if now == before and before.ignores_color:
        return replace(now, ignores_color=True)
    return now


def check_class_weights(classes: ClassFile, class_weights: Sequence[float] | None) -> None:
    """Refuses `loss.class_weights` that are not one for each class.

    Raises:
        ConfigError: another number of weights than classes.
    """
    if class_weights is not None and len(class_weights) != classes.num_classes:
        raise ConfigError(
            f"loss.class_weights: expected {classes.num_classes} numbers, one for each class of "
            f"{classes.name}, got {len(class_weights)}"
        )


def default_palette(num_colors: int) -> list[Color]:
    """The first colours of the Pascal VOC palette, all different, black first; at most 256.

    Bit 3 i + c of the index becomes bit 7 - i of channel c (VOC development kit, VOClabelcolormap).
    """
    return [
        tuple(sum((k >> (3 * i + c) & 1) << (7 - i) for i in range(8)) for c in range(3))
        for k in range(num_colors)
    ]


def known_names() -> list[str]:
    """Names of the class files that come with segtrain."""
    return sorted({path.stem for folder in _DIRECTORIES for path in folder.glob("*.yaml")})


def _unnamed(document: Document) -> str:
    """What is wrong with a list of numbers in place of names; empty if it is none."""
    classes = document.data.get("classes")
    numbers = isinstance(classes, list) and [type(one) for one in classes]
    if not numbers or not set(numbers) <= {int, float}:
        return ""
    quoted = ", ".join(f'"{one}"' for one in classes[:3])
    return (
        "expected names, got numbers; put names in quotes, such as "
        f"[{quoted}{', ...' if len(classes) > 3 else ''}], or give each class a word: "
        "[background, crack]"
    )


def _find(name_or_path: str) -> Path:
    path = Path(os.path.expanduser(name_or_path))  # Path.expanduser raises at unknown users
    if path.name != name_or_path or path.suffix:
        if not path.exists():
            beside = {p.stem: p for end in ("*.yaml", "*.yml") for p in path.parent.glob(end)}
            near = nearest(path.stem, beside)
            hint = f"; did you mean {printable(beside[near])}?" if near else ""
            if not path.is_absolute():
                here = printable(Path.cwd())
                hint += f" (looked for from {here}; --set data.classes=PATH names another)"
            raise ConfigError(
                f"data.classes: {printable(path)}: cannot be read: no such file{hint}"
            )
        return path
    for folder in _DIRECTORIES:
        if (folder / f"{name_or_path}.yaml").is_file():
            return folder / f"{name_or_path}.yaml"
    known = known_names()
    near = nearest(name_or_path, known)
    problem = f"data.classes: no class file named '{printable(name_or_path, MAX_NAME)}'"
    if near:
        raise ConfigError(f"{problem}; did you mean {near}?")
    raise ConfigError(f"{problem}; expected one of {', '.join(known)}, or a path ending in .yaml")


def _with_names(data: dict[str, Any]) -> dict[str, Any]:
    """A class that is just its name becomes an entry with a name."""
    classes = data.get("classes")
    if not isinstance(classes, list):
        return data
    entries = [{"name": one} if isinstance(one, str) else one for one in classes]
    return {**data, "classes": entries}


def _resolve(entry: _ClassFileEntry, *, name: str) -> ClassFile:
    """The class file with everything that was left out filled in."""
    given = {one.color for one in entry.classes if one.color is not None}
    free = iter([color for color in default_palette(256) if color not in given])
    classes = tuple(
        SegClass(
            one.name,
            one.color if one.color is not None else next(free),
            one.ids if one.ids is not None else (train_id,),
        )
        for train_id, one in enumerate(entry.classes)
    )
    used_ids = {raw for one in classes for raw in one.ids}
    ignore_ids = entry.ignore_ids
    if ignore_ids is None:
        ignore_ids = () if _IGNORE_INDEX in used_ids else (_IGNORE_INDEX,)
    used_colors = {one.color for one in classes}
    candidates = (entry.ignore_color, *_IGNORE_COLORS, *default_palette(256))
    explicit = entry.ignore_color
    color = explicit or next(c for c in candidates if c is not None and c not in used_colors)
    given_ids = frozenset(i for i, one in enumerate(entry.classes) if one.color is not None)
    ignores_color = explicit is not None
    return ClassFile(
        printable(name, MAX_NAME), classes, ignore_ids, color, given_ids, ignores_color
    )


class _LacksColorError(ConfigError):
    """Classes without a colour are all that is wrong.

    unquoted: the same in words of which none stands in the file.
    """

    def __init__(self, message: str, *, unquoted: str) -> None:
        super().__init__(message)
        self.unquoted = unquoted


def _without_color_by_number(entry: _ClassFileEntry) -> str:
    """As `_without_color`, without anything that stands in the file."""
    missing = [i for i, one in enumerate(entry.classes) if one.color is None]
    shown = ", ".join(map(str, missing[:_MAX_SHOWN]))
    more = f" and {len(missing) - _MAX_SHOWN} more" if len(missing) > _MAX_SHOWN else ""
    return (
        f"data.label_format is colors, and {len(missing)} of {len(entry.classes)} classes have no "
        f"`color`: number {shown}{more}, counted from 0; give each class its colour in the labels, "
        "such as {name: crack, color: [255, 0, 0]}"
    )


def _without_color(entry: _ClassFileEntry) -> Finding | None:
    """The classes of labels in colours that do not say theirs, in one finding."""
    missing = [(i, one.name) for i, one in enumerate(entry.classes) if one.color is None]
    if not missing:
        return None
    names = ", ".join(name for _, name in missing[:_MAX_SHOWN])
    more = f" and {len(missing) - _MAX_SHOWN} more" if len(missing) > _MAX_SHOWN else ""
    text = (
        f"data.label_format is colors, and {len(missing)} of {len(entry.classes)} classes have no "
        f"`color`: {names}{more}; give each class its colour in the labels, such as "
        f"{{name: {missing[0][1]}, color: [255, 0, 0]}}"
    )
    return Finding(("classes", missing[0][0]), text)


def _conflicts(class_file: ClassFile, *, explicit_color: bool) -> Iterator[Finding]:
    """What is given twice: names, ids, colours."""
    classes = class_file.classes
    names: dict[str, str] = {}
    colors: dict[Color, str] = {}
    ids: dict[int, str] = {}
    for i, one in enumerate(classes):
        if one.name in names:
            yield Finding(("classes", i, "name"), f"'{one.name}' is the name of two classes")
        names[one.name] = one.name
        if (other := colors.setdefault(one.color, one.name)) != one.name:
            yield Finding(("classes", i, "color"), f"{list(one.color)} is also {other}")
        for raw in one.ids:
            if raw in ids:
                yield Finding(("classes", i, "ids"), f"{raw} is also an id of {ids[raw]}")
            ids[raw] = one.name
    for i, raw in enumerate(class_file.ignore_ids):
        if raw in ids:
            yield Finding(("ignore_ids",), f"{raw} is also an id of {ids[raw]}")
        elif raw in class_file.ignore_ids[:i]:
            yield Finding(("ignore_ids",), f"{raw} is given twice")
    if explicit_color and (other := colors.get(class_file.ignore_color)):
        yield Finding(("ignore_color",), f"{list(class_file.ignore_color)} is also {other}")


def _place(document: Document, finding: Finding) -> tuple[tuple[int, int], str]:
    """`file:line` of the nearest key or item above the finding that is written in the file."""
    above = (finding.path[:length] for length in range(len(finding.path), 0, -1))
    lines = (document.lines[path] for path in above if path in document.lines)
    line = finding.line or next(lines, 0)
    return (0, line), f"{document.source}:{line}" if line else document.source
