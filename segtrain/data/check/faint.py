"""Whether the images of a split are nearly black after reading, judged by a sample of them."""

from collections.abc import Mapping

from segtrain.data.brightness import Brightness, brightness, lost_bits, whole_split_problem
from segtrain.data.dataset import SegDataset
from segtrain.data.decode import read_header, read_image
from segtrain.errors import DataError
from segtrain.text import printable

_FIRST_SAMPLES = 4
# 16-bit images to look at in any case.
_DEEP_SAMPLES = 8
# A whole split is called faint only if this many images, evenly spread, are faint.
_MORE_SAMPLES = 32


def faint_lines(dataset: SegDataset) -> list[str]:
    """Warnings about the images of `dataset`, from a sample of at most 64.

    Images that cannot be read give no warning: reading them later fails with a message.
    """
    sample = range(0, len(dataset), max(1, len(dataset) // _MORE_SAMPLES))
    try:
        depths = {i: read_header(dataset.pairs[i].image).depth for i in sample}
        first = sample[:: max(1, len(sample) // _FIRST_SAMPLES)]
        seen = [_brightness(dataset, depths, i) for i in first]
        problem = faint_problem(dataset, depths, seen)
    except DataError:
        return []
    return [problem] if problem else faint_warnings(dataset, seen)


def faint_problem(dataset: SegDataset, depths: Mapping[int, int], seen: list[Brightness]) -> str:
    """Why the images cannot be what is meant, with the split and an example; empty if they can.

    Looks at some 16-bit images always, and at more images while all seen are suspicious.

    Args:
        depths: bit depths of the images to choose from, by their index.
        seen: images that were looked at already; more are added.
    """
    deep = [i for i, depth in depths.items() if depth > 8]
    order = deep or list(depths)
    rest = iter(order[:: max(1, len(order) // _MORE_SAMPLES)])
    seen += [_brightness(dataset, depths, i) for i in deep[:: max(1, len(deep) // _DEEP_SAMPLES)]]
    while text := whole_split_problem(seen):
        i = next(rest, None)
        if i is None:
            return f"split {dataset.split!r}, such as {seen[-1].name}: {text}"
        seen.append(_brightness(dataset, depths, i))
    return ""


def faint_warnings(dataset: SegDataset, seen: list[Brightness]) -> list[str]:
    """A line if some of the images `seen` use few of their 16 bits."""
    lost = {image.name: image for image in seen if image.lost}
    if not lost:
        return []
    num_seen = len({image.name for image in seen})
    return [
        f"split {dataset.split!r}, such as {next(iter(lost))}: {len(lost)} of {num_seen} images "
        f"looked at: {lost_bits(list(lost.values()))}, if these are not just dark"
    ]


def _brightness(dataset: SegDataset, depths: Mapping[int, int], i: int) -> Brightness:
    path = dataset.pairs[i].image
    return brightness(read_image(path), depths[i], printable(path))
