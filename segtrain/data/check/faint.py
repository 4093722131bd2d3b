"""Whether the images of a split are nearly black after reading, judged by a sample of them."""

from collections.abc import Mapping, Sequence

from segtrain.data.brightness import Brightness, brightness, lost_bits, whole_split_problem
from segtrain.data.dataset import SegDataset
from segtrain.data.decode import read_header, read_image
from segtrain.errors import DataError
from segtrain.text import printable

# Images to look at in any case: of all, and of those with 16 bits.
_SAMPLES = 4
_DEEP_SAMPLES = 8
# A whole split is called faint only if this many images more are faint.
_MORE_SAMPLES = 32


def faint_lines(dataset: SegDataset) -> list[str]:
    """Warnings about the images of `dataset`, from a sample of at most 64.

    A pack brings its own. Images that cannot be read give no warning: reading them later fails
    with a message.
    """
    if dataset.is_packed:
        return []
    indices = spread(range(len(dataset)), _MORE_SAMPLES)
    try:
        depths = {i: read_header(dataset.pairs[i].image).depth for i in indices}
        problem, warnings = check_brightness(dataset, depths)
    except DataError:
        return []
    return [problem] if problem else warnings


def check_brightness(dataset: SegDataset, depths: Mapping[int, int]) -> tuple[str, list[str]]:
    """Why the images cannot be what is meant, empty if they can; and warnings about some of them.

    depths: bits per sample of the images to choose from, by their index.
    """

    def look(i: int) -> Brightness:
        path = dataset.pairs[i].image
        return brightness(read_image(path), depths[i], printable(path))

    indices = list(depths)
    deep = [i for i in indices if depths[i] > 8]
    seen = [look(i) for i in [*spread(indices, _SAMPLES), *spread(deep, _DEEP_SAMPLES)]]
    # Only while all images are suspicious are more needed.
    more = iter(spread(deep or indices, _MORE_SAMPLES))
    while problem := whole_split_problem(seen):
        i = next(more, None)
        if i is None:
            return f"split {dataset.split!r}, such as {seen[-1].name}: {problem}", []
        seen.append(look(i))
    lost = {image.name: image for image in seen if image.lost}
    if not lost:
        return "", []
    num_seen = len({image.name for image in seen})
    return "", [
        f"split {dataset.split!r}, such as {next(iter(lost))}: {len(lost)} of {num_seen} images "
        f"looked at: {lost_bits(list(lost.values()))}, if these are not just dark"
    ]


def spread(indices: Sequence[int], count: int) -> Sequence[int]:
    """`count` of the indices or a few more, evenly spread; all if they are fewer."""
    return indices[:: max(1, len(indices) // count)]
