"""Which image belongs to which label: the directory layouts that segtrain reads.

A layout is one function from (data config, split) to a `Listing`; `LAYOUTS` names them all. Nothing
here opens an image: a listing costs one walk of the folders.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.config import DataConfig
from segtrain.config.messages import nearest
from segtrain.data.listfile import clean_relative_path, list_file_rows, list_file_words
from segtrain.errors import DataError
from segtrain.files import walk
from segtrain.text import printable

# Other formats are refused: two decoders are enough to keep safe, and both keep what they store.
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
LABEL_SUFFIX = ".png"
MAX_SHOWN = 10
# What other programs put behind the name of an image to name its label.
_WORDS = r"(masks?|gt|labels?|seg|segmentation|annotations?|groundtruth)"
_LABEL_WORD = re.compile(rf"[-_. ]?{_WORDS}\Z", re.IGNORECASE)
# And in front of it.
_LABEL_PREFIX = re.compile(rf"{_WORDS}[-_. ]?\Z", re.IGNORECASE)
# What people call the folders that images_dir and labels_dir name.
_FOLDER_WORDS = {
    "images_dir": re.compile(r"images?|imgs?|photos?|pictures?|jpegimages|rgb", re.IGNORECASE),
    "labels_dir": re.compile(
        rf"{_WORDS}|ann|anns|targets?|ground[-_ ]truth|segmentationclass(raw)?", re.IGNORECASE
    ),
}

_FEW = 3
# Pictures of other formats: what is not even one of these is no loss.
OTHER_IMAGES = (
    *(".apng", ".arw", ".avif", ".bmp", ".cr2", ".dib", ".dng", ".exr", ".gif", ".hdr", ".heic"),
    *(".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpf", ".jpx", ".jxl", ".nef", ".npy", ".pbm"),
    *(".pgm", ".pnm", ".ppm", ".raw", ".tga", ".tif", ".tiff", ".webp"),
)
_LISTED_IN_A_FILE = ("list", "voc")

_ADE20K_ALIASES = {"train": "training", "val": "validation"}


class Pair(NamedTuple):
    """One image with its label. `name` is unique in the split: a relative path without suffix."""

    image: Path
    label: Path
    name: str


class Listing(NamedTuple):
    """What a layout finds for one split.

    pairs: images whose label exists, sorted by name.
    problems: one line for each thing that makes the split unusable, such as a missing label.
    warnings: one line for each oddity that does not.
    extra_labels: labels without an image, which training never reads.
    left_out: images of formats that are not read, of which no copy in another format is there.
    """

    pairs: list[Pair]
    problems: list[str]
    warnings: list[str]
    extra_labels: list[Path]
    left_out: Sequence[Path] = ()

    def warnings_of_start(self) -> list[str]:
        """What must not go unsaid where training or evaluation starts."""
        lines = []
        if self.left_out:
            lines.append(f"{left_out_text(self.left_out)}: {_first_names(self.left_out)}")
        if self.extra_labels:
            text = extra_labels_text(self.extra_labels)
            lines.append(f"{text}: {_first_names(self.extra_labels)}")
        return lines


def extra_labels_text(files: Sequence[Path]) -> str:
    """How many labels have no image."""
    labels = "1 label has" if len(files) == 1 else f"{len(files)} labels have"
    return f"{labels} no image and {'is' if len(files) == 1 else 'are'} not used"


def _first_names(files: Sequence[Path]) -> str:
    more = f" and {len(files) - _FEW} more" if len(files) > _FEW else ""
    return ", ".join(printable(path) for path in files[:_FEW]) + more


def left_out_text(files: Sequence[Path]) -> str:
    """How many images are left out for their format, with the repair."""
    suffixes = sorted({file.suffix.lower() for file in files})
    images = "1 image is" if len(files) == 1 else f"{len(files)} images are"
    return f"{images} left out: {' '.join(suffixes)} is not read, only JPEG and PNG; convert to PNG"


def list_pairs(data: DataConfig, split: str) -> list[Pair]:
    """The pairs of `split`, sorted by name (a list file keeps its own order).

    Raises:
        DataError: no such split, no images in it, or files missing; all of them are counted and
            the first ten shown.
    """
    return list_split(data, split).pairs


def list_split(data: DataConfig, split: str, *, quoted: bool = True) -> Listing:
    """All that the layout finds in `split`, which is complete.

    quoted: whether messages may show lines of a text file that lists the split.

    Raises:
        DataError: as `list_pairs`.
    """
    listing = scan_layout(data, split)
    title = f"{printable(data.root)}, split {split!r}"
    if listing.problems and not quoted and data.layout in _LISTED_IN_A_FILE:
        raise DataError(
            f"{title}: {len(listing.problems)} problems with a list file and what it names; the "
            "checkpoint names that file, so they are not shown; --split shows them"
        )
    if listing.problems:
        raise DataError(first_lines(title, listing.problems))
    return listing


def scan_layout(data: DataConfig, split: str) -> Listing:
    """All that the layout finds in `split`; unlike `list_pairs` it also returns when files miss.

    Raises:
        DataError: the split itself is missing or holds no image.
    """
    try:
        root = _root(data)
        listing = LAYOUTS[data.layout](data, split)
    except OSError as error:
        place = printable(error.filename or data.root)
        raise DataError(f"{place}: {error.strerror or error}") from error
    if not listing.pairs and not listing.problems:
        raise DataError(f"{printable(root)}, split {split!r}: no images in it")
    return listing


def first_lines(title: str, findings: Sequence[str], limit: int = MAX_SHOWN) -> str:
    """`title` and the first findings below it, the rest counted; on one line if there is one."""
    if len(findings) == 1:
        return f"{title}: {findings[0]}"
    shown = [f"  {finding}" for finding in findings[:limit]]
    if len(findings) > limit:
        shown.append(f"  and {len(findings) - limit} more")
    return "\n".join([f"{title}: {len(findings)} problems", *shown])


class _Tree(NamedTuple):
    """Two mirrored folders. The ends are what the stems carry after the common name."""

    images: Path
    labels: Path
    image_end: str = ""
    label_end: str = ""


def _cityscapes(data: DataConfig, split: str) -> Listing:
    root = _root(data)
    images = _split_folder(root, "leftImg8bit", split)
    coarse = not (root / "gtFine" / split).is_dir() and (root / "gtCoarse" / split).is_dir()
    kind = "gtCoarse" if coarse else "gtFine"
    file_kind = "color" if data.label_format == "colors" else "labelIds"
    labels = _split_folder(root, kind, split)
    return _match_trees(_Tree(images, labels, "_leftImg8bit", f"_{kind}_{file_kind}"))


def _camvid(data: DataConfig, split: str) -> Listing:
    root = _root(data)
    if (root / split).is_dir() and not (root / "images").is_dir():
        return _match_trees(_Tree(root / split, _folder(root / f"{split}annot", root)))
    images = _split_folder(root, "images", split)
    return _match_trees(_Tree(images, _split_folder(root, "labels", split)))


def _voc(data: DataConfig, split: str) -> Listing:
    root = _root(data)
    names_file = _split_folder(root, "ImageSets/Segmentation", f"{split}.txt")
    names, problems = list_file_words(names_file)
    images = _index(_folder(root / "JPEGImages", root), IMAGE_SUFFIXES)
    # The augmented set (SBD) comes with labels of its own for all of VOC's images; a split is read
    # from the folder that has all of them, so that the two kinds of label are never mixed.
    folders = [root / "SegmentationClass", root / "SegmentationClassAug"]
    indexes = {folder: _index(folder, (LABEL_SUFFIX,)) for folder in folders if folder.is_dir()}
    if not indexes:
        _folder(folders[0], root)
    folder = min(indexes, key=lambda folder: sum(name not in indexes[folder] for name in names))
    pairs = []
    for name in names:
        image, label = images.get(name, []), indexes[folder].get(name, [])
        if not image:
            problems.append(
                f"{printable(name)}: no image {printable(root / 'JPEGImages' / name)}.jpg"
            )
        elif not label:
            problems.append(
                f"{printable(image[0])}: no label {printable(folder / name)}{LABEL_SUFFIX}"
            )
        else:
            pairs.append(Pair(image[0], label[0], name))
    return Listing(sorted(pairs, key=_by_name), problems, [], [])


def _ade20k(data: DataConfig, split: str) -> Listing:
    root = _root(data)
    if not (root / "images" / split).is_dir():
        split = _ADE20K_ALIASES.get(split, split)
    images = _split_folder(root, "images", split)
    return _match_trees(_Tree(images, _split_folder(root, "annotations", split)))


def _folders(data: DataConfig, split: str) -> Listing:
    root = _root(data)
    _check_named(root, "images_dir", data.images_dir)
    images = _split_folder(root, data.images_dir, split)
    _check_named(root, "labels_dir", data.labels_dir)
    labels = _split_folder(root, data.labels_dir, split)
    if images.resolve() == labels.resolve():
        raise DataError(
            f"{printable(images)}: images and labels lie in one folder; "
            "separate them, or name every pair in a text file (data.layout: list)"
        )
    return _match_trees(_Tree(images, labels))


def _check_named(root: Path, key: str, name: str) -> None:
    """Refuses a folder that is not there, where one by a usual name is."""
    if (root / name).exists():
        return
    found = sorted(
        entry.name
        for entry in root.iterdir()
        if entry.is_dir() and _FOLDER_WORDS[key].fullmatch(entry.name)
    )
    if len(found) == 1:
        raise DataError(
            f"{printable(root / name)}: no such folder; if {printable(root / found[0])} is meant, "
            f"set data.{key}: {printable(found[0])}"
        )


def _list(data: DataConfig, split: str) -> Listing:
    root = _root(data)
    path = root / split
    if not path.is_file():
        texts = [file.name for file in root.glob("*.txt")] + [f.name for f in root.glob("*.csv")]
        raise DataError(
            f"{printable(path)}: no such list file; {_there_are('text files', sorted(texts))}"
        )
    rows, problems = list_file_rows(path)
    inside = os.path.realpath(root)
    pairs, first_line = [], {}
    for row in rows:
        image, label = (clean_relative_path(name, inside) for name in (row.image, row.label))
        bad = [file.problem for file in (image, label) if file.problem]
        bad += _suffix_problems(image.path, label.path)
        if not bad:
            bad = [
                f"{printable(file.path)}: no such file below {printable(root)}"
                for file in (image, label)
                if not os.path.isfile(root / file.path)  # Path.is_file raises at long names
            ]
        if not bad and image.path in first_line:
            bad = [f"{printable(image.path)}: already on line {first_line[image.path]}"]
        first_line.setdefault(image.path, row.line)
        problems += [f"{printable(path)}:{row.line}: {problem}" for problem in bad]
        if not bad:
            name = image.path.rpartition(".")[0]
            pairs.append(Pair(root / image.path, root / label.path, name))
    problems += _same_names(pairs)
    return Listing(pairs, problems, _case_clashes(pair.name for pair in pairs), [])


LAYOUTS: dict[str, Callable[[DataConfig, str], Listing]] = {
    "cityscapes": _cityscapes,
    "camvid": _camvid,
    "voc": _voc,
    "ade20k": _ade20k,
    "folders": _folders,
    "list": _list,
}


def _match_trees(tree: _Tree) -> Listing:
    pictures = _index(tree.images, IMAGE_SUFFIXES + OTHER_IMAGES, tree.image_end)
    readable = {
        name: [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        for name, files in pictures.items()
    }
    images = {name: files for name, files in readable.items() if files}
    labels = _index(tree.labels, (LABEL_SUFFIX,), tree.label_end)
    pairs, problems = [], []
    for name, files in images.items():
        for others in (files, labels.get(name, [])):
            if len(others) > 1:
                names = ", ".join(printable(file.name) for file in others)
                problems.append(f"{printable(others[0].parent)}: {names} have one name; keep one")
        if name in labels:
            pairs.append(Pair(files[0], labels[name][0], name))
    if not images:
        raise DataError(_no_images(tree))
    if not _index(tree.labels, (LABEL_SUFFIX,)):
        return Listing([], [_no_png(tree.labels)], _case_clashes(images), [])
    missing = [name for name in images if name not in labels]
    problems += [
        f"{printable(images[name][0])}: no label "
        f"{printable(tree.labels / (name + tree.label_end + LABEL_SUFFIX))}"
        + (_near_miss(tree, name, images) if i < MAX_SHOWN else "")
        for i, name in enumerate(missing)
    ]
    extra = [file for name, files in labels.items() if name not in images for file in files]
    left_out = [file for name in pictures.keys() - images.keys() for file in pictures[name][:1]]
    return Listing(
        sorted(pairs, key=_by_name),
        problems,
        _case_clashes(images),
        sorted(extra),
        sorted(left_out),
    )


def _near_miss(tree: _Tree, name: str, images: Collection[str]) -> str:
    """The end of the message about the missing label of `name`: a file that resembles it.

    images: the names of all images.
    """
    folder = (tree.labels / name).parent
    if not folder.is_dir():
        return ""
    place, _, stem = name.rpartition("/")
    near = []
    for file in folder.iterdir():
        before, found, after = file.stem.lower().rpartition(stem.lower())
        other = f"{place}/{file.stem}" if place else file.stem
        if found and file.suffix.lower() == LABEL_SUFFIX and other not in images:
            rename = not tree.label_end and _is_only_a_word(before, after)
        else:
            rename = False
        if rename or file.name.lower().startswith(stem.lower()):
            near.append((not rename, file.name))
    if not near:
        return ""
    other_label, found = min(near)
    # "photo_mask.png" for "photo.jpg": nothing but the name is wrong.
    advice = "" if other_label else f"; rename it to {printable(stem + LABEL_SUFFIX)}"
    return f" (found {printable(found)}{advice})"


def _is_only_a_word(before: str, after: str) -> bool:
    """Whether a label has just a word, or the suffix of its image, around the image's name."""
    if before:
        return not after and _LABEL_PREFIX.match(before) is not None
    return after in ("", *IMAGE_SUFFIXES) or _LABEL_WORD.match(after) is not None


def _no_images(tree: _Tree) -> str:
    files = _walk(tree.images)
    wanted = "*" + tree.image_end + "|".join(IMAGE_SUFFIXES)
    if not files:
        return f"{printable(tree.images)}: the folder is empty; expected images {wanted}"
    return (
        f"{printable(tree.images)}: none of its {len(files)} files is an image {wanted}; "
        f"the first is {printable(files[0])}; only JPEG and PNG are read"
    )


def _no_png(labels: Path) -> str:
    files = _walk(labels)
    if not files:
        return f"{printable(labels)}: the folder is empty; expected labels *{LABEL_SUFFIX}"
    text = (
        f"{printable(labels)}: none of its {len(files)} files is a label *{LABEL_SUFFIX}; "
        f"the first is {printable(files[0])}"
    )
    if files[0].lower().endswith((".jpg", ".jpeg")):
        # Its values are gone: a file made from it would be wrong without looking wrong.
        text += ", and JPEG has changed its values: make PNG files from the original labels"
    return text


def _index(folder: Path, suffixes: tuple[str, ...], end: str = "") -> dict[str, list[Path]]:
    """Files below `folder` by their name without `end` and suffix; only those with `suffixes`."""
    index: dict[str, list[Path]] = {}
    for file in _walk(folder):
        stem, suffix = os.path.splitext(file)
        if suffix.lower() in suffixes and stem.endswith(end):
            index.setdefault(stem.removesuffix(end), []).append(folder / file)
    return index


def _walk(folder: Path) -> list[str]:
    """All visible files below `folder`, relative to it, sorted; links to folders are followed."""
    # macOS leaves "._name.png" beside "name.png" on foreign disks: no picture.
    return sorted(
        name if place == folder else f"{place.relative_to(folder)}/{name}"
        for place, files in walk(folder, hidden=False)
        for name in files
    )


def _root(data: DataConfig) -> Path:
    root = Path(os.path.expanduser(data.root))  # Path.expanduser raises at unknown users
    if root.is_dir():
        return root
    if root.exists():
        raise DataError(f"data.root: {printable(root)} is not a folder")
    above = root.parent
    beside = [entry.name for entry in above.iterdir()] if above.is_dir() else []
    near = nearest(root.name, beside)
    hint = f"; did you mean {printable(above / near)}?" if near else ""
    # A relative path is the usual mistake: it counts from where the command is run.
    where = "" if root.is_absolute() else f" in {printable(Path.cwd())}"
    raise DataError(f"data.root: there is no folder {printable(root)}{where}{hint}")


def _split_folder(root: Path, kind: str, split: str) -> Path:
    """`root/kind/split`, or an error that lists the splits that exist."""
    place = root / kind / split
    if place.exists():
        return place
    as_file = split.endswith(".txt")
    turned = root / split / kind
    if turned.is_dir() and not (root / kind).exists():
        raise DataError(f"{place}: no such folder; {turned} is there: move it to {place}")
    parent = _folder(root / kind, root)
    if not as_file and _index(parent, IMAGE_SUFFIXES) and not any(parent.glob("*/")):
        raise DataError(
            f"{place}: no split {split!r}: the files lie in {parent} itself; move them into a "
            f"folder for each split, such as {place}/photo.png"
        )
    found = sorted(
        entry.stem if as_file else entry.name
        for entry in parent.iterdir()
        if entry.is_file() == as_file and not entry.name.startswith(".")
    )
    name = split.removesuffix(".txt")
    raise DataError(f"{printable(place)}: no split {name!r}; {_there_are('splits', found)}")


def _folder(folder: Path, root: Path) -> Path:
    """`folder` if it exists, or an error that says what `root` holds instead."""
    if folder.is_dir():
        return folder
    relative = os.path.relpath(folder, root)
    above = [place for depth in ("*", "*/*") for place in root.glob(depth)]
    deeper = sorted(place / relative for place in above if (place / relative).exists())
    # data.root is one or two folders too high, or one too deep.
    depth = len(Path(relative).parts)
    candidates = [path.parents[depth - 1] for path in deeper]
    candidates += [root.parent] if (root.parent / relative).is_dir() else []
    if candidates:
        raise DataError(
            f"{printable(folder)}: no such folder; did you mean data.root: "
            f"{printable(candidates[0])}"
        )
    found = sorted(e.name for e in root.iterdir() if e.is_dir() and not e.name.startswith("."))
    raise DataError(
        f"{printable(folder)}: no such folder; {_there_are(f'folders in {printable(root)}', found)}"
    )


def _there_are(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"there are no {what}"
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"{what}: {', '.join(printable(name) for name in names[:MAX_SHOWN])}{more}"


def _suffix_problems(image: str, label: str) -> list[str]:
    problems = []
    if not image.lower().endswith(IMAGE_SUFFIXES):
        problems.append(f"{printable(image)}: images must be PNG or JPEG files")
    if not label.lower().endswith(LABEL_SUFFIX):
        problems.append(f"{printable(label)}: labels must be PNG files")
    return problems


def _same_names(pairs: Iterable[Pair]) -> list[str]:
    first: dict[str, Pair] = {}
    return [
        f"{printable(pair.image)} and {printable(first[pair.name].image)} have one name; rename one"
        for pair in pairs
        if first.setdefault(pair.name, pair) is not pair
    ]


def _case_clashes(names: Iterable[str]) -> list[str]:
    """Names that are one on a file system without upper and lower case."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.casefold(), []).append(name)
    return [
        "differ only in upper and lower case: " + ", ".join(printable(name) for name in group)
        for group in groups.values()
        if len(group) > 1
    ]


def _by_name(pair: Pair) -> str:
    return pair.name
