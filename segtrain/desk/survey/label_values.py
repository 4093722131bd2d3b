"""All values of the labels of a set, from all of its files; and what is wrong with some of them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from segtrain.data.read.concurrent import for_each_pair, num_processes
from segtrain.data.read.decode import exchanges_sides
from segtrain.data.read.georeference import SAME_EXTENT, other_place
from segtrain.desk.annotations.label_maps import presence_counts
from segtrain.desk.survey import class_masks, contents
from segtrain.desk.survey.contents import Color, Kind, LabelFacts, Value, ValueFacts
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet, total_values
from segtrain.desk.survey.label_sizes import (
    are_upright,
    both_sizes,
    common_factor,
    with_size,
)
from segtrain.desk.survey.names import Legend
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.shades import nearest
from segtrain.desk.survey.survey import Survey
from segtrain.distributed.machine import process_pool
from segtrain.errors import DataError
from segtrain.text import counted, first_of

_OTHER_COLORS = "its palette gives the same values other colours than those before it"


def count_values(survey: Survey, labels: LabelSet, answers: Answers, jobs: int | None) -> LabelSet:
    """`labels` with the values of all of its files.

    Raises:
        DataError: files that are no labels, or of another size or at another place than the image.
        UndecidedError: all are larger or smaller than the image by one factor.
        ConfigError: --resize, where they are not.
    """
    folder, by_path = survey.root, {image.path: image for image in survey.images}
    files = [(image, file) for image, found in labels.labels.items() for file in found]
    work = partial(_facts_or_problem, folder, labels.threshold)
    with process_pool(num_processes(len(files), jobs)) as pool:
        read = list(for_each_pair(work, [file for _, file in files], pool, "reading labels"))
    if not labels.classes and () not in labels.labels.values():
        read = _by_palettes(read, survey.legends)
    labels, read = _with_one_white(labels, read)
    # One file in colours means that greys of the others are colours, too: 7 is (7, 7, 7).
    is_colored = any(not isinstance(facts, str) and facts.kind == "colors" for facts in read)
    kind = "colors" if is_colored else labels.kind
    found = [(*names, facts) for names, facts in zip(files, read, strict=True)]
    # In a file for each class all kinds of masks are one: 0 and 1, 0 and 255, or a JPEG.
    shows_one = labels.classes and not (labels.numbered or is_colored)
    kinds = {"ids", "two"} if shows_one else {kind}
    # Masks of several files are painted at the size of the image as stored, and never turned.
    sizes_say = are_upright(found, by_path)
    upright = bool(sizes_say) and not labels.classes
    # Labels of background alone lie alike either way.
    with_exif = frozenset(image for image, *_ in found if by_path[image].orientation != 1)
    unclear = with_exif if sizes_say is None else frozenset()
    turned = {image for image, x in by_path.items() if upright and exchanges_sides(x.orientation)}
    wanted = {i: x.size[::-1] if i in turned else x.size for i, x in by_path.items()}
    factor = common_factor([(x.size, wanted[i]) for i, _, x in found if not isinstance(x, str)])
    shown = _checked(folder, found, kinds, by_path, {} if factor else wanted)
    labels = with_size(labels, factor, found, wanted, answers)
    if labels.classes:
        labels = _with_painted(folder, labels, by_path, jobs)
        values, shown_in = labels.values, labels.shown_in
    else:
        counts: list[dict[Value, ValueFacts]] = []
        shown_in: dict[Value, set[str]] = defaultdict(set)
        for image, _, facts in found:
            for value, count in facts.values.items():
                if is_colored and facts.kind == "ids":
                    value = (value,) * 3
                counts.append({value: count})
                shown_in[value].add(image)
        values = dict(sorted(total_values(counts).items()))
    # The longest one: some palettes end at the last value of their file.
    palette = max((facts.palette for facts in read), key=len, default=())
    palette = tuple(shown.get(value, color) for value, color in enumerate(palette))
    no_data = frozenset(facts.no_data for facts in read if facts.no_data is not None)
    has_alpha = any(facts.has_alpha for facts in read)
    known = {"has_alpha": has_alpha, "palette": palette, "no_data": no_data, "shown_in": shown_in}
    known |= {"upright": upright, "unclear": unclear, "twin": labels.twin or shown}
    return replace(labels, kind=kind, values=values, **known)


def _with_one_white(labels: LabelSet, read: list[LabelFacts | str]) -> tuple[LabelSet, list]:
    """Both; masks of 0 and 255, of which some are of 1 bit and have 1 for white, divided at 1."""
    if labels.classes or any(isinstance(x, str) or x.kind != "ids" for x in read):
        return labels, read
    shown = [facts.values.keys() - {0} for facts in read if not facts.is_bit]
    if len(shown) == len(read) or {255} not in shown or not all(x <= {255} for x in shown):
        return labels, read
    white = ({255 * bool(v): x for v, x in facts.values.items()} for facts in read)
    read = [x._replace(kind="two", values=v) for x, v in zip(read, white, strict=True)]
    return replace(labels, kind="two", threshold=1.0), read


def _by_palettes(read: list[LabelFacts | str], legends: Sequence[Legend]) -> list[LabelFacts | str]:
    """The facts, with colours in the place of indices where palettes were made file by file.

    It is so where the same index has other colours, and all of them are those of a list of classes.
    """
    shown = [{} if isinstance(facts, str) else _shown(facts) for facts in read]
    pairs = {pair for colors in shown for pair in colors.items()}
    # An index with two colours: each file has a palette of its own.
    differ = len({value for value, _ in pairs}) < len(pairs)
    are_named = any(
        all(len(nearest(color, [c.color for c in legend.classes])) == 1 for _, color in pairs)
        for legend in legends
        if legend.has_colors
    )
    if not (differ and are_named and all(map(_is_shown, read))):
        return read
    return [_in_colors(facts) for facts in read]


def _is_shown(facts: LabelFacts | str) -> bool:
    """Whether a palette has a colour for each value, and none means no data."""
    is_read = not isinstance(facts, str) and facts.no_data is None
    return is_read and facts.values.keys() == _shown(facts).keys()


def _in_colors(facts: LabelFacts) -> LabelFacts:
    counts = ({facts.palette[value]: count} for value, count in facts.values.items())
    values = {color: count._replace(files=1) for color, count in total_values(counts).items()}
    return facts._replace(kind="colors", values=values, palette=())


def _with_painted(
    folder: Path, labels: LabelSet, images: Mapping[str, Image], jobs: int | None
) -> LabelSet:
    """A set with a file for each class, with the values of the labels that these make together.

    Raises:
        DataError: of a class nothing is left.
    """
    totals, shown_in, claimed, example = Counter(), defaultdict(set), 0, {}
    how = labels.void, labels.threshold, labels.overlapping
    work = partial(_count_painted, len(labels.classes) + 1, *how)
    items = [(path, labels.class_files(folder, path), images[path].size) for path in labels.labels]
    with process_pool(num_processes(len(items), jobs)) as pool:
        for image, counts, twice in for_each_pair(work, items, pool, "overlaps"):
            claimed += twice
            for number, pixels in enumerate(counts.tolist()):
                totals[number] += pixels
                if pixels:
                    shown_in[number].add(image)
                    files = (x for x in labels.labels[image] if labels.class_of.get(x, 1) == number)
                    example.setdefault(number, next(files, ""))
    values = {
        number: ValueFacts(pixels, 0, len(shown_in[number]), example.get(number, ""))
        for number, pixels in sorted(totals.items())
    }
    # A class that others cover wholly would be in no label.
    hidden = [name for i, name in enumerate(labels.classes, 1) if not totals[i]]
    if hidden and claimed and not labels.overlapping:
        raise DataError(
            f"{folder}: {labels.pattern}: nothing is left of {first_of(hidden)}: other classes, in "
            "smaller areas, lie on all of it; choose classes by --names"
        )
    return replace(labels, values=values, shown_in=shown_in, claimed=claimed)


def _count_painted(
    num_values: int,
    void: Sequence[int],
    threshold: float | None,
    overlapping: bool,
    item: tuple[str, Sequence[tuple[Path, int]], tuple[int, int]],
) -> tuple[str, np.ndarray, int]:
    """The image, its pixels of each class, the background first, and those of several classes."""
    image, files, size = item
    if overlapping:
        bands = class_masks.presence(files, size, num_values - 1, void, threshold)
        counts = presence_counts(bands)[:num_values]
        return image, counts, np.count_nonzero((bands == 1).sum(2) > 1)
    label, claimed = class_masks.painted(files, size, void, threshold)
    return image, np.bincount(label.ravel(), minlength=num_values), np.count_nonzero(claimed)


def _checked(
    folder: Path,
    found: Iterable[tuple[str, str, LabelFacts | str]],
    kinds: Set[Kind],
    images: Mapping[str, Image],
    sizes: Mapping[str, tuple[int, int]],
) -> dict[int, Color]:
    """The colours that palettes give to the values; found: image, file and facts of each label.

    sizes: that labels of these images must have; of others any is right.

    Raises:
        DataError: as `count_values`.
    """
    shown, unfit, wrong, elsewhere = {}, [], [], []
    for image, file, facts in found:
        if problem := _problem(facts, file, shown, kinds):
            unfit.append(problem)
        elif facts.size != sizes.get(image, facts.size):
            wrong.append(both_sizes(file, facts, images[image].size))
        elif what := other_place(images[image].map_place, facts.place):
            elsewhere.append(f"{file}: {what}")
        else:
            shown |= _shown(facts)
    if unfit:
        what = counted(len(unfit), "label cannot", "labels cannot")
        repair = "replace them or move them away"
        if any(problem.endswith(_OTHER_COLORS) for problem in unfit):
            repair += ", or name the colours in class_dict.csv (name,r,g,b), and they will count"
        raise DataError(f"{folder}: {what} be read: {first_of(unfit, 5)}; {repair}")
    if wrong:
        what = counted(len(wrong), "label has", "labels have")
        cut = "cut both to the same part, and resize labels by nearest neighbour alone"
        raise DataError(
            f"{folder}: {what} another size than the image: {first_of(wrong, 5)}; {cut}"
        )
    if elsewhere:
        what = counted(len(elsewhere), "label lies", "labels lie")
        where = f"elsewhere on the map than the image: {first_of(elsewhere, 5)}"
        raise DataError(f"{folder}: {what} {where}; {SAME_EXTENT}")
    return shown


def _shown(facts: LabelFacts) -> dict[int, Color]:
    """The colours of the values in a file; none if it has no palette."""
    return {v: facts.palette[v] for v in facts.values if facts.palette and v < len(facts.palette)}


def _problem(
    facts: LabelFacts | str, file: str, shown: Mapping[int, Color], kinds: Set[Kind]
) -> str:
    """Why a file does not belong to the labels beside it, or empty.

    shown: the colours of values in those before it. kinds: of them.
    """
    if isinstance(facts, str):
        return facts
    if facts.kind not in kinds and not (facts.is_rgb and "colors" in kinds):
        wanted = contents.KINDS[min(kinds)]
        return f"{file}: holds {contents.KINDS[facts.kind]}, other labels hold {wanted}"
    if facts.kind != "two" and "two" in kinds and len(facts.values.keys() | {0}) > 2:
        return (
            f"{file}: holds {len(facts.values)} values, where each of several files shows one class"
        )
    if any(shown.get(value, color) != color for value, color in _shown(facts).items()):
        return f"{file}: {_OTHER_COLORS}"
    return ""


def _facts_or_problem(folder: Path, threshold: float | None, file: str) -> LabelFacts | str:
    try:
        return contents.label_facts(folder, file, threshold)
    except DataError as error:
        return str(error)
