"""The label files of a folder in sets of one kind, and what their images say about them."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from segtrain.data.read import formats
from segtrain.data.read.concurrent import for_each_pair, num_processes
from segtrain.distributed.machine import process_pool
from segtrain.errors import DataError
from segtrain.survey import contents, pairing
from segtrain.survey.contents import Kind, LabelFacts, Value, spread
from segtrain.survey.images import Image

# Files of a set that are read where a sample is enough; images that are compared with labels.
SAMPLE, _COMPARED = 6, 24


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
    values: of the sample; after `counted`, of all files, and then also wrong_size and unreadable.
    classes: with several files an image, the word that each stands for.
    """

    pattern: str
    kind: Kind
    labels: Mapping[str, tuple[str, ...]]
    values: Mapping[Value, ValueFacts]
    palette: tuple[tuple[int, int, int], ...] = ()
    classes: tuple[str, ...] = ()
    wrong_size: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


def label_sets(
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
    for i in spread(len(shared), SAMPLE) if shared else ():
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
    """Whether many images have labels in several of the sets."""
    everywhere = set.union(*(set(one) for one in sets))
    return sum(map(len, sets)) > 1.2 * len(everywhere)


def equal_sets(folder: Path, sets: Sequence[LabelSet]) -> Iterator[tuple[str, str]]:
    """Pairs of sets whose labels divide the images alike: ids and the same in colours."""
    for i, one in enumerate(sets):
        for other in sets[i + 1 :]:
            shared = sorted(one.labels.keys() & other.labels.keys())
            chosen = [shared[k] for k in spread(len(shared), SAMPLE)] if shared else []
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
    with process_pool(num_processes(len(files), jobs)) as pool:
        read = list(for_each_pair(work, [file for _, file in files], pool, "reading labels"))
    is_colored = any(not isinstance(facts, str) and facts.kind == "colors" for facts in read)
    values: dict[Value, list] = {}
    wrong, unreadable, palette = [], [], labels.palette
    for (image, file), facts in zip(files, read, strict=True):
        problem = facts if isinstance(facts, str) else _problem(facts, file, palette, is_colored)
        if problem:
            unreadable.append(problem)
            continue
        if facts.size != sizes[image]:
            wrong.append(f"{file}: {_by(facts.size)}, image {_by(sizes[image])}")
        palette = palette or facts.palette
        for value, count in facts.values.items():
            key = (value,) * 3 if is_colored and isinstance(value, int) else value
            one = values.setdefault(key, [0, 0, 0, file])
            one[0] += count.pixels
            one[1] += 1
            one[2] += count.edge
    found = {v: ValueFacts(p, n, e / p, file) for v, (p, n, e, file) in sorted(values.items())}
    return replace(
        labels,
        kind="colors" if is_colored else labels.kind,
        values=found,
        palette=palette,
        wrong_size=tuple(wrong),
        unreadable=tuple(unreadable),
    )


def _problem(facts: LabelFacts, file: str, palette: Sequence[object], is_colored: bool) -> str:
    """Why a file does not belong to the labels beside it, or empty."""
    if facts.kind == "picture":
        return f"{file}: no label: too many values"
    if is_colored and facts.kind == "ids" and not facts.is_rgb:
        return f"{file}: one channel of values, where other labels have colours"
    used = [
        v for v in facts.values if isinstance(v, int) and v < min(len(palette), len(facts.palette))
    ]
    if any(palette[v] != facts.palette[v] for v in used):
        return f"{file}: its palette gives the same values other colours than those before it"
    return ""


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
    for i in spread(len(pairs), _COMPARED) if len(pairs) > 2 else ():
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
