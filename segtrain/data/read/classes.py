"""The classes of a data set: their names, colours and raw ids, and what is ignored.

    classes:
      - {name: road, color: [128, 64, 128], ids: [7]}
      - {name: sidewalk, color: [244, 35, 232], ids: [8]}
    ignore_ids: [0, 1, 2, 3]
    ignore_color: [0, 0, 0]

The order of the list gives the train ids 0, 1, ... Only names are required. Defaults: `ids` is the
position in the list, `color` the next free colour of the Pascal VOC palette, `ignore_ids` is [255],
and no colour is ignored. A class may be only its name:

    classes: [background, crack, spalling]

Where classes overlap (task multilabel) labels have a band for each, in their order. Then `ids` are
the values that mean the class in its band, [1] by default, 0 is its absence, and nothing is ignored
by default.

Further keys of a class: `more_colors`, a list of colours that mean the class too, in labels;
`category`, the group of classes that is also scored; `instance_px`, the mean pixels of an instance,
by which instances are weighted.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from segtrain.config.messages import KeyPath, Mistake, did_you_mean, report, validate
from segtrain.config.strict_yaml import read_text, scan_yaml
from segtrain.errors import ConfigError
from segtrain.text import MAX_NAME, first_of, name_problem, printable
from segtrain.types import IGNORE_INDEX

Color = tuple[int, int, int]


@dataclass(frozen=True)
class SegClass:
    """One class: its name, its colour in pictures, and the label values that mean it.

    more_colors: colours beside `color` that mean it in labels.
    category: the group of classes that is also scored; None: the data set has no groups.
    instance_px: mean pixels of an instance in the data set; None: instances are not scored. Both
        concern scores only, so a checkpoint does not store them.
    """

    name: str
    color: Color
    ids: tuple[int, ...]
    more_colors: tuple[Color, ...] = ()
    category: Annotated[str | None, Field(exclude=True)] = field(default=None, compare=False)
    instance_px: Annotated[float | None, Field(exclude=True)] = field(default=None, compare=False)

    @property
    def label_colors(self) -> tuple[Color, ...]:
        """All colours that mean it in labels."""
        return (self.color, *self.more_colors)


@dataclass(frozen=True)
class ClassFile:
    """The classes of a data set; the position of a class is its train id.

    given_colors: train ids of the classes whose colour is written in the file. Empty for a class
        file from a checkpoint, which does not store it.
    ignores_color: whether labels may hold `ignore_color`. False where the file does not give it:
        the default colour is for pictures only, and in labels it is an unknown colour.
    overlapping: whether a pixel may have several classes. Labels are then (H, W, K) uint8: 1 where
        the class is, 0 where it is not, IGNORE_INDEX where that is not known.
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
    overlapping: bool = field(default=False, repr=False)

    @property
    def num_classes(self) -> int:
        """K, at most 255."""
        return len(self.classes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Class names in the order of the train ids."""
        return tuple(c.name for c in self.classes)

    @cached_property
    def palette(self) -> list[Color]:
        """Colours in the order of the train ids, RGB 0..255."""
        return [c.color for c in self.classes]

    @cached_property
    def train_id_of(self) -> dict[int, int]:
        """Raw label value -> train id, or 255 for ignored values; other values are mistakes."""
        ids = {raw: train_id for train_id, c in enumerate(self.classes) for raw in c.ids}
        return ids | dict.fromkeys(self.ignore_ids, IGNORE_INDEX)

    @cached_property
    def write_ids(self) -> list[int]:
        """The raw label value to write for each train id, the first of its ids."""
        return [c.ids[0] for c in self.classes]

    @cached_property
    def write_ignored(self) -> int:
        """The raw label value to write where there is no prediction; no class has it.

        One that keeps label maps at 8 bits, if there is one.
        """
        most = max(IGNORE_INDEX, *self.write_ids)
        taken = {i for seg_class in self.classes for i in seg_class.ids}
        if self.overlapping:
            # In the band of a class 0 means that it is absent.
            taken.add(0)
        small = [i for i in (*self.ignore_ids, *range(IGNORE_INDEX, -1, -1)) if i <= most]
        return next(i for i in (*small, *range(1 << 16)) if i not in taken)


def plain_names(names: Sequence[str]) -> list[str]:
    """The names without what data sets write differently: in lower case, `_` and `-` as blanks."""
    return [" ".join(n.lower().replace("_", " ").replace("-", " ").split()) for n in names]


def default_palette(num_colors: int) -> list[Color]:
    """The first colours of the Pascal VOC palette, all different, black first; at most 256.

    Bit 3 i + c of the index becomes bit 7 - i of channel c (VOC development kit, VOClabelcolormap).
    """
    return list(_voc_palette()[:num_colors])


@cache
def _voc_palette() -> tuple[Color, ...]:
    return tuple(
        tuple(sum((k >> (3 * i + c) & 1) << (7 - i) for i in range(8)) for c in range(3))
        for k in range(256)
    )


def class_differences(
    before: ClassFile, now: ClassFile, told_by: str
) -> tuple[list[str], list[str]]:
    """Differences between two class files: those that change the labels, and the others.

    told_by: what labels are read by. If it is "ids", colours only change pictures. If it is
        "colors", ids only change the label maps that segtrain writes. Else both are harmless.
    """
    # Of other classes, ids and colours are not worth comparing.
    if before.names != now.names:
        pairs = zip_longest(before.names, now.names)
        i, pair = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        old, new = ("none" if name is None else name for name in pair)
        return [
            f"class file: {before.num_classes} classes there, {now.num_classes} now; class {i} is "
            f"{old} there, {new} now"
        ], []
    ids = {"ignore_ids": (before.ignore_ids, now.ignore_ids)}
    colors = {"color of what is ignored": (before.ignore_color, now.ignore_color)}
    for old, new in zip(before.classes, now.classes, strict=True):
        ids[f"ids of {old.name}"] = old.ids, new.ids
        colors[f"color of {old.name}"] = old.color, new.color
        colors[f"more_colors of {old.name}"] = sorted(old.more_colors), sorted(new.more_colors)
    id_lines = [_line(what, *pair) for what, pair in ids.items() if set(pair[0]) != set(pair[1])]
    color_lines = [_line(what, *pair) for what, pair in colors.items() if pair[0] != pair[1]]
    lines = {"ids": id_lines, "colors": color_lines}
    harmful = lines.pop(told_by, [])
    return harmful, [line for kind in lines.values() for line in kind]


def _line(what: str, old: Sequence[object], new: Sequence[object]) -> str:
    return f"class file: {what}: {list(old)} there, {list(new)} now"


_MAX_CLASSES = 255  # train ids have 8 bits, and 255 is ignored
_PACKAGE = Path(__file__).resolve().parents[2]
# In a checkout and in a wheel; what is in the wheel goes before.
_DIRECTORIES = (_PACKAGE.parent / "data" / "classes", _PACKAGE / "_data" / "classes")
_EXAMPLE = "classes: [background, crack]"
# Pictures show ignored pixels in the first of these that no class uses.
_IGNORE_COLORS = ((0, 0, 0), (224, 224, 192), (255, 255, 255))


def load_class_file(
    name_or_path: str, *, needs_colors: bool = False, overlapping: bool = False
) -> ClassFile:
    """The class file of a known data set (`cityscapes`, `camvid`, `voc`, `ade20k`) or at a path.

    needs_colors: the file must give the colour of each class, as where labels are in colours: a
        default colour could stand for another class there.
    overlapping: see `ClassFile`.

    Raises:
        ConfigError: no such file, or one line for every mistake in it.
    """
    path = _find(name_or_path)
    try:
        text = read_text(path)
    except ConfigError as error:
        raise ConfigError(f"data.classes: {error}") from None
    return parse_class_file(text, path, needs_colors=needs_colors, overlapping=overlapping)


def class_file_from_json(text: str) -> ClassFile:
    """The class file that a checkpoint stores.

    Raises:
        pydantic.ValidationError: `text` is no class file.
        ConfigError: a name, id or colour is given twice.
    """
    stored = _StoredClassFile.model_validate_json(text)
    resolved = _resolve(stored, stored.name, overlapping=stored.overlapping)
    # A checkpoint has a colour for each class, and not which of them the file gave.
    classes = replace(resolved, given_colors=frozenset())
    if problems := [finding.message for finding in _repeated(classes)]:
        raise ConfigError("; ".join(problems))
    return classes


# Without signs and blanks. What is not labelled may be an area; unlabeled litter is litter.
_NO_CLASS = (
    "void unknown undefined nodata noclass unannotated unclassified invalid outside "
    "outofroi outsideroi outofbounds dontcare"
)
_WORDS_FOR_NO_CLASS = frozenset(_NO_CLASS.split())
_NOT_LABELLED = re.compile(
    "(un|not?)label(l?ed)?s?({0})?|ignored?({0})?".format(
        "regions?|areas?|pixels?|parts?|objects?|class(es)?|data|voids?|label|static|rest"
    )
)


def says_no_class(name: str) -> bool:
    """Whether the name of a class says that its pixels have none: `void`, `_ignore_`, `No data`.

    Also if one of several names of it does: `background/unlabelled`.
    """
    parts = (re.sub(r"[^a-z]", "", part) for part in re.split("[/|]", name.lower()))
    return any(x in _WORDS_FOR_NO_CLASS or _NOT_LABELLED.fullmatch(x) for x in parts)


def known_names() -> list[str]:
    """Names of the class files that come with segtrain."""
    return sorted(_known_files())


def _known_files() -> dict[str, Path]:
    return {p.stem: p for folder in _DIRECTORIES for p in folder.glob("*.yaml")}


def _find(name_or_path: str) -> Path:
    path = Path(os.path.expanduser(name_or_path))  # Path.expanduser raises for unknown users
    # A bare word names a file that comes with segtrain; a path has a folder or a suffix.
    if path.name == name_or_path and not path.suffix:
        known = _known_files()
        if name_or_path in known:
            return known[name_or_path]
        expected = f"; expected one of {', '.join(known_names())}, or a path ending in .yaml"
        hint = did_you_mean(name_or_path, known_names()) or expected
        name = printable(name_or_path, MAX_NAME)
        raise ConfigError(f"data.classes: no class file named '{name}'{hint}")
    return path


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _check_name(name: str) -> str:
    if problem := name_problem(name):
        raise ValueError(problem)
    return name


_Byte = Annotated[int, Field(ge=0, le=255)]
_RawId = Annotated[int, Field(ge=0, le=65535)]  # labels have at most 16 bits


class _ClassEntry(_Section):
    name: Annotated[str, Field(min_length=1), AfterValidator(_check_name)]
    color: tuple[_Byte, _Byte, _Byte] | None = None
    ids: Annotated[tuple[_RawId, ...], Field(min_length=1)] | None = None
    more_colors: tuple[tuple[_Byte, _Byte, _Byte], ...] = ()
    category: Annotated[str, Field(min_length=1), AfterValidator(_check_name)] | None = None
    instance_px: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class _ClassFileEntry(_Section):
    classes: Annotated[tuple[_ClassEntry, ...], Field(min_length=1, max_length=_MAX_CLASSES)]
    ignore_ids: tuple[_RawId, ...] | None = None
    ignore_color: tuple[_Byte, _Byte, _Byte] | None = None


class _StoredClassFile(_ClassFileEntry):
    name: str
    overlapping: bool = False


def parse_class_file(
    text: str, path: Path, *, needs_colors: bool = False, overlapping: bool = False
) -> ClassFile:
    """The class file with this `text`; `path` gives its name, and the place of its mistakes.

    needs_colors, overlapping: as in `load_class_file`.
    """
    document = scan_yaml(text, source=printable(path), example=_EXAMPLE)
    mistakes, data = list(document.mistakes), document.data
    if isinstance(data.get("classes"), list):
        entries = [{"name": item} if isinstance(item, str) else item for item in data["classes"]]
        data = {**data, "classes": entries}
    hint = f"expected a list 'classes' in the order of the ids, such as '{_EXAMPLE}'"
    entry = validate(_ClassFileEntry, data, hints={"names": hint})
    if isinstance(entry, list):
        # A value that was refused is missing from the data, which is no second mistake.
        refused = {mistake.path for mistake in document.mistakes}
        mistakes += [f for f in entry if not any(f.path == p[: len(f.path)] for p in refused)]
    elif not mistakes:
        classes = _resolve(entry, path.stem, overlapping=overlapping)
        mistakes += _repeated(classes)
        missing = [c.name for c in entry.classes if c.color is None]
        if missing and needs_colors:
            what = "data.label_format is colors, and these classes have no `color`"
            mistakes.append(Mistake(("classes",), f"{what}: {first_of(missing)}"))
        if not mistakes:
            return classes
    raise ConfigError("\n".join(report(mistakes, document.places, source=document.source)))


def _resolve(entry: _ClassFileEntry, name: str, *, overlapping: bool) -> ClassFile:
    """The class file of `entry` with the defaults filled in."""
    given = {c.color for c in entry.classes if c.color}
    given |= {color for c in entry.classes for color in c.more_colors}
    # Pictures leave black clear, which serves a background, and no class that lies on one.
    given |= {(0, 0, 0)} if overlapping else set()
    free = iter([color for color in default_palette(256) if color not in given])
    classes = tuple(
        SegClass(
            **dict(c)
            | {
                "color": c.color or next(free),
                "ids": c.ids or (1 if overlapping else train_id,),
            }
        )
        for train_id, c in enumerate(entry.classes)
    )
    ignore_ids = entry.ignore_ids
    if ignore_ids is None and overlapping:
        ignore_ids = ()  # 255 is the class in many masks: the file must say what it means
    if ignore_ids is None:
        # In a 0/255 mask 255 is the foreground.
        is_class = any(IGNORE_INDEX in c.ids for c in classes)
        ignore_ids = () if is_class else (IGNORE_INDEX,)
    used = {color for c in classes for color in c.label_colors}
    unused = (c for c in (*_IGNORE_COLORS, *default_palette(256)) if c not in used)
    return ClassFile(
        printable(name, MAX_NAME),
        classes,
        ignore_ids,
        entry.ignore_color or next(unused),
        given_colors=frozenset(i for i, c in enumerate(entry.classes) if c.color),
        ignores_color=entry.ignore_color is not None,
        overlapping=overlapping,
    )


def _repeated(class_file: ClassFile) -> Iterator[Mistake]:
    """Names, ids and colours that are given twice, and categories that are incomplete."""
    owners: dict[tuple[str, object], str] = {}
    for path, kind, value, owner in _given(class_file):
        if (kind, value) in owners:
            shown = list(value) if isinstance(value, tuple) else value
            yield Mistake(path, f"{shown} is also {kind} of {owners[kind, value]}")
        owners[kind, value] = owner
    without = [c.name for c in class_file.classes if c.category is None]
    if 0 < len(without) < class_file.num_classes:
        what = f"a category is given for some classes, but not for {first_of(without)}"
        yield Mistake(("classes",), f"{what}; give all one, or none")
    for i, c in enumerate(class_file.classes):
        if c.instance_px is not None and c.category is None:
            yield Mistake(("classes", i, "instance_px"), "needs a category for each class")
        # Of an instance map only values above 1000 are counted, as by Cityscapes' evaluator.
        if c.instance_px is not None and min(c.ids, default=2) < 2:
            what = "instances are 1000 times the id and a number, so the id must be 2 or larger"
            yield Mistake(("classes", i, "instance_px"), what)


def _given(class_file: ClassFile) -> Iterator[tuple[KeyPath, str, object, str]]:
    """All that must be given once: its key, its kind in words, the value, and whose it is."""
    for i, c in enumerate(class_file.classes):
        key = ("classes", i)
        yield (*key, "name"), "the name", c.name, f"class {i}"
        yield (*key, "color"), "the color", c.color, c.name
        for color in c.more_colors:
            yield (*key, "more_colors"), "the color", color, c.name
        # Where classes overlap each has a band of its own, in which 0 is its absence.
        kind = f"an id in the band of {c.name}" if class_file.overlapping else "an id"
        if class_file.overlapping:
            yield (*key, "ids"), kind, 0, "what is absent"
        for raw in c.ids:
            yield (*key, "ids"), kind, raw, c.name
        for raw in class_file.ignore_ids if class_file.overlapping else ():
            yield ("ignore_ids",), kind, raw, "what is ignored"
    for raw in class_file.ignore_ids:
        yield ("ignore_ids",), "an id", raw, "what is ignored"
    if class_file.ignores_color:
        yield ("ignore_color",), "the color", class_file.ignore_color, "what is ignored"
