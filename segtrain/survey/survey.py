"""The survey: what a folder holds, as facts; what to make of them is for `decide`.

Names and headers of all files are read; contents of a sample, where a sample is enough. The labels
that are going to be used are counted whole, since one rare value decides whether training works.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from segtrain.annotations import detect
from segtrain.data.read import formats
from segtrain.data.read.concurrent import for_each_pair, num_processes
from segtrain.distributed.machine import process_pool
from segtrain.errors import DataError
from segtrain.files import os_errors_as, walk
from segtrain.survey import contents, pairing
from segtrain.survey.contents import ImageFacts, Kind, LabelFacts, Value
from segtrain.survey.names import Legend, read_legend
from segtrain.survey.pairing import FileName
from segtrain.text import first_of

_SAMPLE_A_GROUP = 6
_SAMPLE = 200  # images
_COMPARED = 24
_ALIKE_BESIDE = 0.15
_MOST_THUMBS = 4000
_MAX_LIST_BYTES = 64 << 20
# Pictures made for people, or predictions: neither images nor labels to train on.
_PICTURES = (
    "overlay overlays vis viz visual visualization visualizations preview previews blend "
    "blended debug pred preds prediction predictions contact thumbs thumbnails"
)
_MADE_OF_BOTH = frozenset(_PICTURES.split())


@dataclass(frozen=True)
class Image:
    """An image of the folder; paths are relative to it.

    files: its file, or its bands in order. size: (height, width). name: without suffix.
    alpha: whether the last channel is marked as transparency.
    split: train, val or test, if a folder or a list says so. scene: its folder without words of
        role and split. sequence: its name without the last number.
    """

    files: tuple[str, ...]
    size: tuple[int, int]
    channels: int
    alpha: bool
    dtype: str
    split: str | None
    scene: str
    sequence: str

    @property
    def name(self) -> str:
        """The path of the first file without its suffix."""
        return str(PurePosixPath(self.files[0]).with_suffix(""))

    @property
    def place(self) -> tuple[str, str, str]:
        """What images are sorted by as frames, whichever split they are in."""
        return self.scene, self.sequence, PurePosixPath(self.files[0]).name


@dataclass(frozen=True)
class ValueFacts:
    """One value of a label set: how many pixels and files hold it, and one of these files.

    edge: the part of its pixels with a neighbour of another value.
    """

    pixels: int
    files: int
    edge: float
    example: str


@dataclass(frozen=True)
class LabelSet:
    """Labels of the same kind: one file for each image, or several.

    pattern: of their names, such as `masks/*_mask.png`. labels: by the first file of the image.
    values: of the sample, or of all files once they are `counted`. sizes: of each label file.
    classes: with several files an image, the word that each stands for.
    """

    pattern: str
    kind: Kind
    labels: Mapping[str, tuple[str, ...]]
    values: Mapping[Value, ValueFacts]
    palette: tuple[tuple[int, int, int], ...] = ()
    classes: tuple[str, ...] = ()
    counted: bool = False
    wrong_size: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """What a folder holds."""

    root: Path
    images: tuple[Image, ...]
    sets: tuple[LabelSet, ...]
    equal_sets: frozenset[tuple[str, str]]  # patterns of sets that divide the images alike
    legends: tuple[Legend, ...]
    facts: Mapping[str, ImageFacts]  # of a sample of images
    similar: frozenset[tuple[str, str]]  # images that are nearly alike, by their first files
    moving: bool  # whether neighbours by name are more alike than others, as frames of a video
    split_source: str  # what says the splits; "" if nothing does
    alone: tuple[str, ...]  # labels without an image
    unclear: tuple[str, ...]  # labels that fit several images
    unread: Mapping[str, int]  # suffixes of files that nothing reads
    unreadable: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # patterns of pictures that are made of images and labels
    annotations: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)  # files by format
    notes: tuple[str, ...] = field(default=())


def survey(folder: Path, *, jobs: int | None = None) -> Survey:
    """Looks at all files below `folder`; writes nothing.

    Raises:
        DataError: there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    with os_errors_as(DataError):
        paths = [
            name if here == folder else f"{here.relative_to(folder).as_posix()}/{name}"
            for here, names in walk(folder, hidden=False)
            for name in names
        ]
    suffixes = [PurePosixPath(path).suffix.lower() for path in paths]
    pictures = [p for p, s in zip(paths, suffixes, strict=True) if s in formats.SUFFIXES]
    others = [p for p, s in zip(paths, suffixes, strict=True) if s not in formats.SUFFIXES]
    if not pictures:
        kinds = ", ".join(
            f"{n} {s or 'without suffix'}" for s, n in Counter(suffixes).most_common(5)
        )
        raise DataError(
            f"{folder}: no images ({' '.join(formats.SUFFIXES)}); found {kinds or 'no files'}"
        )
    legends = [read_legend(folder / path, path) for path in others]
    names = pairing.parse_names(pictures)
    groups = _sampled(folder, names)
    for trusted in (True, False):  # a word that all names have says nothing about the role
        roles = {pattern: _role(pattern, facts, trusted) for pattern, facts in groups.items()}
        image_names, label_names = (
            [name for name in names if roles[name.pattern] == role] for role in ("image", "label")
        )
        matches = pairing.match(image_names, label_names)
        if len(matches.labels) < len(image_names) / 2 and matches.alone:
            image_names, matches = _with_channel_ends(image_names, label_names, matches)
        if matches.labels:
            break
    if not image_names:  # drawn images may look like labels
        raise DataError(f"{folder}: all pictures look like labels, none like an image")
    images, unreadable = _images(folder, image_names, matches)
    lists = [path for path in others if path.endswith((".txt", ".csv"))]
    notes: list[str] = []
    split_source, images = _with_splits(folder, images, lists, notes)
    blurred = sorted(p for p, role in roles.items() if role == "made" and _is_jpeg(p))
    if blurred and not label_names:
        notes.append(
            f"{first_of(blurred, 3)} are called labels, but JPEG has blurred their values: "
            "save them as PNG"
        )
    similar, moving = _similar(folder, images)
    sets = tuple(_label_sets(folder, matches, {n.path: n.pattern for n in label_names}, groups))
    return Survey(
        root=folder,
        images=tuple(images),
        sets=sets,
        equal_sets=frozenset(_equal_sets(folder, sets)),
        legends=tuple(one for one in legends if one is not None),
        facts=_facts(folder, images),
        similar=similar,
        moving=moving,
        split_source=split_source,
        alone=tuple(matches.alone),
        unclear=tuple(matches.unclear),
        unread=Counter(PurePosixPath(path).suffix.lower() for path in others),
        unreadable=tuple(unreadable),
        annotations={kind: tuple(files) for kind, files in detect(folder)},
        notes=tuple(notes),
        left_out=tuple(sorted(p for p, role in roles.items() if role == "made")),
    )


# Roles


def _sampled(folder: Path, names: Sequence[FileName]) -> dict[str, list[LabelFacts]]:
    """Facts about some files of each group, by its pattern; groups of one form share them."""
    by_form: dict[str, list[FileName]] = defaultdict(list)
    for name in names:
        by_form[_form(name.pattern)].append(name)
    found = {}
    for members in by_form.values():
        patterns = {name.pattern for name in members}
        chosen = [members[i] for i in _spread(len(members), _SAMPLE_A_GROUP)]
        facts = []
        for name in chosen:
            try:
                facts.append(contents.label_facts(folder / name.path))
            except DataError:
                continue
        found |= dict.fromkeys(patterns, facts)
    return found


def _form(pattern: str) -> str:
    """The pattern with folders that say no role as `*`, where many folders are alike."""
    *folders, name = pattern.split("/")
    words = [pairing.words_of(part) for part in folders]
    roles = pairing.IMAGE_WORDS | pairing.LABEL_WORDS
    kept = [
        part
        if roles & set(found) or _MADE_OF_BOTH & set(found) or not re.search(r"\d", part)
        else "*"
        for part, found in zip(folders, words, strict=True)
    ]
    return "/".join([*kept, name])


def _role(pattern: str, facts: Sequence[LabelFacts], trusted: bool) -> str:
    """image, label or made; by words in the name and the nearest folder, and by what files hold.

    A label must look like one: what is called so and does not was made for people, or blurred.
    trusted: whether a word in the name makes an image of what looks like a label.
    """
    said, has_folder = set(), False
    for i, part in enumerate(reversed(pattern.split("/"))):
        words = set(pairing.words_of(part.replace("*", " ")))
        if words & _MADE_OF_BOTH:
            return "made"
        kinds = {
            name
            for name, known in (("image", pairing.IMAGE_WORDS), ("label", pairing.LABEL_WORDS))
            if words & known
        }
        if i == 0:
            said |= kinds if trusted else kinds - {"image"}
        elif kinds and not has_folder:
            said |= kinds
            has_folder = True
    like_label = sum(one.kind != "picture" for one in facts) > len(facts) / 2
    if "label" in said and (like_label or "image" not in said):
        return "label" if like_label else "made"
    return "image" if "image" in said or not like_label else "label"


def _spread(total: int, number: int) -> list[int]:
    return sorted({int(i) for i in np.linspace(0, total - 1, min(total, number)).round()})


# Images


def _with_channel_ends(
    images: list[FileName], labels: list[FileName], before: pairing.Matches
) -> tuple[list[FileName], pairing.Matches]:
    """nnU-Net: `case_001_0000.png` is the first channel of the image of `case_001.png`."""
    stripped = [
        image._replace(core=image.core[:-5], pattern=f"{image.pattern[:-4]}{image.core[-5:]}")
        if re.search(r"._\d{4}$", image.core)
        else image
        for image in images
    ]
    after = pairing.match(stripped, labels)
    return (stripped, after) if len(after.labels) > len(before.labels) else (images, before)


def _images(
    folder: Path, names: Sequence[FileName], matches: pairing.Matches
) -> tuple[list[Image], list[str]]:
    """The images with their headers, and those that cannot be read."""
    further = {band for bands in matches.bands.values() for band in bands}
    found, unreadable = [], []
    for name in names:
        if name.path in further:
            continue
        files = (name.path, *matches.bands.get(name.path, ()))
        try:
            infos = [formats.read_info(folder / path) for path in files]
            if len({info.size for info in infos}) > 1 or any(i.channels > 1 for i in infos[1:]):
                files, infos = files[:1], infos[:1]  # other pictures of the same name
        except DataError as error:
            unreadable.append(str(error))
            continue
        folders = PurePosixPath(name.path).parent.parts
        scene = "/".join(
            part
            for part in folders
            if not set(pairing.words_of(part)) <= pairing._ROLE_WORDS | pairing.SPLIT_WORDS.keys()
        )
        found.append(
            Image(
                files=files,
                size=infos[0].size,
                channels=sum(info.channels for info in infos),
                alpha=infos[-1].alpha,
                dtype=str(infos[0].dtype),
                split=name.split,
                scene=scene,
                sequence=re.sub(r"\d+\D*$", "", name.core),
            )
        )
    return found, unreadable


def _facts(folder: Path, images: Sequence[Image]) -> dict[str, ImageFacts]:
    """Facts about a sample of the images, spread over all."""
    found = {}
    for i in _spread(len(images), _SAMPLE):
        try:
            found[images[i].files[0]] = contents.image_facts(
                tuple(folder / path for path in images[i].files)
            )
        except DataError:
            continue
    return found


def _similar(folder: Path, images: Sequence[Image]) -> tuple[frozenset[tuple[str, str]], bool]:
    """Pairs of nearly equal images of a sample; whether neighbours by name are alike."""
    images = sorted(images, key=lambda image: image.place)
    chosen = [images[i] for i in _spread(len(images), _MOST_THUMBS)]
    thumbs = []
    for image in chosen:
        try:
            thumbs.append(contents.small_thumbnail(folder / image.files[0]).reshape(-1))
        except DataError:
            thumbs.append(np.zeros(contents.THUMB**2, np.float32))
    rows = np.stack(thumbs)
    pairs = set()
    for start in range(0, len(rows), 512):
        alike = rows[start : start + 512] @ rows.T
        for i, j in zip(*np.nonzero(alike > contents.ALIKE), strict=True):
            if start + i < j:
                pairs.add((chosen[start + i].files[0], chosen[j].files[0]))
    order = np.random.default_rng(0).permutation(len(rows))
    beside, apart = (
        float(np.median((one[1:] * one[:-1]).sum(axis=1))) if len(rows) > 2 else 0.0
        for one in (rows, rows[order])
    )
    return frozenset(pairs), len(images) == len(chosen) and beside > apart + _ALIKE_BESIDE


def _is_jpeg(pattern: str) -> bool:
    return pattern.endswith(contents.LOSSY)


def _with_splits(
    folder: Path, images: list[Image], lists: Sequence[str], notes: list[str]
) -> tuple[str, list[Image]]:
    """What says the splits, and the images with them: list files, else folders."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for i, image in enumerate(images):
        for key in {image.name.lower(), PurePosixPath(image.name).name.lower()}:
            by_name[key].append(i)
    found: dict[int, str] = {}
    sources = []
    for path in lists:
        words = pairing.words_of(PurePosixPath(path).stem)
        split = next((pairing.SPLIT_WORDS[w] for w in words if w in pairing.SPLIT_WORDS), None)
        indices = list(_listed(folder / path, by_name)) if split else []
        if indices and None not in indices:
            sources.append(path)
            if twice := [images[i].name for i in indices if found.get(i, split) != split]:
                notes.append(f"{path} and another list name the same images: {first_of(twice, 3)}")
            found |= dict.fromkeys(indices, split)
    if set(found.values()) == {"val"} and 2 * len(found) < len(images):
        found = dict.fromkeys(range(len(images)), "train") | found  # fastai's valid.txt
    if len(set(found.values())) > 1:
        split = [found.get(i) for i in range(len(images))]
        marked = [
            _replaced(image, one or "unlisted") for image, one in zip(images, split, strict=True)
        ]
        return ", ".join(sources), marked
    has_folders = len({image.split for image in images} - {None}) > 1
    return ("folders" if has_folders else ""), images


def _replaced(image: Image, split: str) -> Image:
    return Image(**{**image.__dict__, "split": split})


def _listed(path: Path, by_name: Mapping[str, list[int]]) -> Iterator[int | None]:
    """The image that each line names; None for a line that names none, or several."""
    from segtrain.files import read_bytes

    try:
        lines = read_bytes(path, _MAX_LIST_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError):
        return
    for line in filter(None, map(str.strip, lines)):
        first = re.split(r"[\t,; ]", line)[0].lower()
        plain = str(PurePosixPath(first).with_suffix("")) if "." in first else first
        keys = (plain, PurePosixPath(plain).name)
        candidates = next((by_name[key] for key in keys if key in by_name), [])
        yield candidates[0] if len(candidates) == 1 else None


# Label sets


def _label_sets(
    folder: Path,
    matches: pairing.Matches,
    pattern_of: Mapping[str, str],
    facts: Mapping[str, list[LabelFacts]],
) -> Iterator[LabelSet]:
    """The labels of the images, in sets of one kind."""
    by_form = _by_form(matches.labels, lambda label: _set_of(pattern_of[label]))
    for form, by_image in list(by_form.items()):
        several = any(len(labels) > 1 for labels in by_image.values())
        if several and not _are_objects(by_image, pattern_of, facts):
            del by_form[form]
            by_form |= _by_form(by_image, lambda label: _without_split(pattern_of[label]))
    kinds = {
        form: facts[pattern_of[next(iter(labels.values()))[0]]] for form, labels in by_form.items()
    }
    # Several sets of two values each, such as masks/car/ and masks/road/, are one label together.
    binary = [form for form, found in kinds.items() if _is_binary(found)]
    together = _classes_of(binary)
    if (
        len(binary) > 1
        and together
        and _share_images([by_form[form] for form in binary])
        and not _show_the_same(folder, [by_form[form] for form in binary])
    ):
        labels: dict[str, list[str]] = defaultdict(list)
        for form in binary:
            for image, files in by_form.pop(form).items():
                labels[image] += files
        yield LabelSet(
            pattern=" + ".join(binary),
            kind="ids",
            labels={image: tuple(files) for image, files in labels.items()},
            values={},
            classes=tuple(together),
        )
    for form, by_image in by_form.items():
        found = [one for one in kinds[form] if one.kind != "picture"]
        kind = Counter(one.kind for one in found).most_common(1)[0][0]
        values: dict[Value, list] = defaultdict(lambda: [0, 0, 0])
        for one in found:
            for value, count in one.values.items():
                values[value][0] += count.pixels
                values[value][1] += 1
                values[value][2] += count.edge
        example = next(iter(by_image.values()))[0]
        yield LabelSet(
            pattern=form,
            kind=kind,
            labels={image: tuple(files) for image, files in by_image.items()},
            values={v: ValueFacts(p, n, e / p, example) for v, (p, n, e) in values.items()},
            palette=next((one.palette for one in found if one.palette), ()),
            classes=("foreground",) if any(len(f) > 1 for f in by_image.values()) else (),
        )


def _by_form(
    labels: Mapping[str, Sequence[str]], form_of: Callable[[str], str]
) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for image, files in labels.items():
        for label in files:
            found[form_of(label)][image].append(label)
    return found


def _are_objects(
    by_image: Mapping[str, Sequence[str]],
    pattern_of: Mapping[str, str],
    facts: Mapping[str, list[LabelFacts]],
) -> bool:
    """Whether the several labels of an image are of two values and lie in one folder of its own."""
    for labels in by_image.values():
        if len({PurePosixPath(label).parent for label in labels}) > 1:
            return False
    owners = Counter(PurePosixPath(labels[0]).parent for labels in by_image.values())
    patterns = {pattern_of[label] for labels in by_image.values() for label in labels}
    return max(owners.values()) == 1 and all(_is_binary(facts[one]) for one in patterns)


def _without_split(pattern: str) -> str:
    """The pattern without folders of splits, and with numbers of scenes as `*`."""
    kept = [
        "*" if re.search(r"\d", part) else part
        for part in pattern.split("/")[:-1]
        if not set(pairing.words_of(part)) <= pairing.SPLIT_WORDS.keys()
    ]
    return "/".join([*kept, pattern.split("/")[-1]])


def _show_the_same(folder: Path, sets: Sequence[Mapping[str, Sequence[str]]]) -> bool:
    """Whether files of two values show the same area: two labels of one thing, not two classes."""
    shared = sorted(set.intersection(*(set(one) for one in sets[:2])))
    overlaps = []
    for i in _spread(len(shared), _SAMPLE_A_GROUP) if shared else ():
        with suppress(DataError):
            one, other = (
                formats.read_stored(folder / labels[shared[i]][0])[..., 0] > 0
                for labels in sets[:2]
            )
            if one.shape == other.shape and (one | other).any():
                overlaps.append((one & other).sum() / (one | other).sum())
    return bool(overlaps) and float(np.median(overlaps)) > 0.5


def _set_of(pattern: str) -> str:
    """The pattern without folders of splits and scenes: `labels/train/*.png` is `labels/*.png`."""
    *folders, name = pattern.split("/")
    kept = [
        part for part in folders if not set(pairing.words_of(part)) <= pairing.SPLIT_WORDS.keys()
    ]
    roles = [part for part in kept if set(pairing.words_of(part)) & pairing.LABEL_WORDS]
    # Below the folder that says "labels", scenes come; above it, too.
    return "/".join([*(roles or kept[:1]), *_class_folder(kept, roles), name])


def _class_folder(kept: Sequence[str], roles: Sequence[str]) -> list[str]:
    """A folder below that of the labels whose name has no number: perhaps a class."""
    below = kept[kept.index(roles[-1]) + 1 :] if roles else []
    return [part for part in below if not re.search(r"\d", part)][:1]


def _is_binary(facts: Sequence[LabelFacts]) -> bool:
    found = [set(one.values) for one in facts if one.kind in ("ids", "two")]
    return bool(found) and all(len(values | {0}) <= 2 for values in found)


def _classes_of(forms: Sequence[str]) -> list[str]:
    """The one word in which the names of the sets differ, of each; empty if it is not one."""
    parts = [re.split(r"[/_\-.* ]+", form) for form in forms]
    if len({len(part) for part in parts}) != 1:
        return []
    columns = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    return [part[columns[0]] for part in parts] if len(columns) == 1 else []


def _share_images(sets: Sequence[Mapping[str, object]]) -> bool:
    """Whether most sets have labels of images that others have too, or none overlap at all."""
    everywhere = set.union(*(set(one) for one in sets))
    return sum(map(len, sets)) > 1.2 * len(everywhere)


def _equal_sets(folder: Path, sets: Sequence[LabelSet]) -> Iterator[tuple[str, str]]:
    """Pairs of sets whose labels divide the images alike: ids and the same in colours."""
    for i, one in enumerate(sets):
        for other in sets[i + 1 :]:
            shared = sorted(one.labels.keys() & other.labels.keys())
            chosen = [shared[k] for k in _spread(len(shared), _SAMPLE_A_GROUP)] if shared else []
            if chosen and all(
                _divide_alike(folder / one.labels[path][0], folder / other.labels[path][0])
                for path in chosen
            ):
                yield one.pattern, other.pattern


def _divide_alike(a: Path, b: Path) -> bool:
    try:
        left, right = (
            np.unique(x.reshape(-1, x.shape[2]), axis=0, return_inverse=True)[1].reshape(-1)
            for x in (formats.read_stored(a), formats.read_stored(b))
        )
    except DataError:
        return False
    if left.size != right.size:
        return False
    pairs = np.unique(np.stack([left, right]), axis=1).shape[1]
    return pairs == left.max() + 1 == right.max() + 1


def counted(
    folder: Path, labels: LabelSet, sizes: Mapping[str, tuple[int, int]], jobs: int | None
) -> LabelSet:
    """`labels` with the values of all of its files.

    sizes: of each image, by its first file.
    """
    files = [(image, file) for image, found in labels.labels.items() for file in found]
    work = partial(_facts_or_problem, folder)
    values: dict[Value, list] = {}
    wrong, unreadable, palette = [], [], labels.palette
    with process_pool(num_processes(len(files), jobs)) as pool:
        results = for_each_pair(work, [file for _, file in files], pool, "reading labels")
        for (image, file), facts in zip(files, results, strict=True):
            if isinstance(facts, str):
                unreadable.append(facts)
                continue
            if facts.kind == "picture":
                unreadable.append(f"{file}: no label: too many values")
                continue
            if facts.size != sizes[image]:
                wrong.append(f"{file}: {_by(facts.size)}, image {_by(sizes[image])}")
            palette = palette or facts.palette
            for value, count in facts.values.items():
                one = values.setdefault(value, [0, 0, 0, file])
                one[0] += count.pixels
                one[1] += 1
                one[2] += count.edge
    found = {v: ValueFacts(p, n, e / p, file) for v, (p, n, e, file) in sorted(values.items())}
    return LabelSet(
        **{
            **labels.__dict__,
            "values": found,
            "palette": palette,
            "counted": True,
            "wrong_size": tuple(wrong),
            "unreadable": tuple(unreadable),
        }
    )


@dataclass(frozen=True)
class Comparison:
    """What a sample of images says about their labels.

    scores: how much stronger the edges of an image are along the borders of its own label, of its
        neighbours' by name, and of its own when turned, than elsewhere; medians by these words.
    black: of the pixels labelled 0, the part that is black or NaN in the image.
    """

    scores: Mapping[str, float]
    black: float


OWN = "their own"


def compared(folder: Path, images: Sequence[Image], labels: LabelSet) -> Comparison:
    """Compares a sample of the images with their labels, with others' and with turned ones."""
    pairs = [
        (tuple(folder / file for file in image.files), folder / labels.labels[image.files[0]][0])
        for image in images
        if len(labels.labels.get(image.files[0], ())) == 1
    ]
    scores: dict[str, list[float]] = defaultdict(list)
    black, zeros = 0, 0
    for i in _spread(len(pairs), _COMPARED) if len(pairs) > 2 else ():
        with suppress(DataError):
            paths, own = pairs[i]
            for words, k in ((OWN, i), ("the next", i - 1), ("the previous", (i + 1) % len(pairs))):
                scores[words].append(contents.alignment(pairs[k][0], own))
            for words, turn in contents.TURNS.items():
                scores[words].append(contents.alignment(paths, own, turn))
            empty, zero = contents.black_pixels(paths, own)
            black, zeros = black + empty, zeros + zero
    medians = {
        words: float(np.median(known))
        for words, found in scores.items()
        if (known := [x for x in found if x == x])
    }
    return Comparison(medians, black / zeros if zeros else 0.0)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _facts_or_problem(folder: Path, file: str) -> LabelFacts | str:
    try:
        return contents.label_facts(folder / file)
    except DataError as error:
        return str(error)
