"""The sizes of labels beside those of their images: as EXIF turns these, or all by one factor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from segtrain.data.read.decode import exchanges_sides
from segtrain.desk.survey.contents import LabelFacts
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError
from segtrain.errors import refuse_unused


def both_sizes(file: str, facts: LabelFacts, size: tuple[int, int]) -> str:
    """The sizes of a file and of its image, in words."""
    label, image = ("x".join(map(str, sides)) for sides in (facts.size, size))
    return f"{file}: {label}, image {image}"


def common_factor(sizes: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> float | None:
    """How many times as large as images labels are, all and both sides, up to rounding.

    None: there is no such factor, or it is 1. sizes: of each label, and that of its image.

    >>> round(common_factor([((57, 64), (114, 127)), ((50, 70), (100, 140))]), 2)
    0.5
    >>> common_factor([((88, 128), (96, 128))])  # without a band of rows
    """
    # A side was rounded up or down.
    sides = [side for label, image in sizes for side in zip(label, image, strict=True)]
    low = max(((label - 1) / image for label, image in sides), default=1)
    high = min(((label + 1) / image for label, image in sides), default=1)
    is_one = low < high and not low <= 1 <= high
    return (low + high) / 2 if is_one else None


def with_size(
    labels: LabelSet,
    factor: float | None,
    found: Sequence[tuple[str, str, LabelFacts | str]],
    sizes: Mapping[str, tuple[int, int]],
    answers: Answers,
) -> LabelSet:
    """`labels`, resized if the command line says so and they are so many times as large as images.

    found: image, file and facts of each label. sizes: of the images, by their paths.

    Raises:
        UndecidedError, ConfigError: it does not say so; it says so of others.
    """
    if factor is None:
        refuse_unused(vars(answers), "resize", "labels of the size of the images")
        return labels
    if answers.resize is None:
        image, file, facts = found[0]
        raise UndecidedError(
            f"{labels.pattern}: labels are {factor:.3g} times as large as the images in all "
            f"{len(found)} files, as {both_sizes(file, facts, sizes[image])}: were they drawn on "
            "pictures of another size, or on a part of them?",
            [Reading("whole pictures of another size: drawn anew", "--resize labels")],
        )
    return replace(labels, resized=True)


def are_upright(
    found: Iterable[tuple[str, str, LabelFacts | str]], images: Mapping[str, Image]
) -> bool | None:
    """Whether labels were made on the pictures as EXIF turns them; None: their sizes do not tell.

    All labels of turned pictures that are not square have height and width exchanged. Then those
    of upside-down and square ones were made so, too.
    """
    turned = [
        facts.size == images[image].size[::-1]
        for image, _, facts in found
        if not isinstance(facts, str)
        and exchanges_sides(images[image].orientation)
        and len({*images[image].size}) == 2
    ]
    return all(turned) if turned else None
