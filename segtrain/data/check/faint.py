"""Whether the images of a split are as good as black once they are read, by a few of them."""

from collections.abc import Mapping

from segtrain.data.brightness import Brightness, brightness, lost_bits, whole_split_problem
from segtrain.data.dataset import SegDataset
from segtrain.data.decode import read_header, read_image
from segtrain.errors import DataError
from segtrain.text import printable

# Of these, evenly spread, none may be more than faint before a whole split is called so.
_MORE_SAMPLES = 32
_FIRST = 4
# Deep images that are looked at in any case.
_DEEP_SAMPLES = 8


def faint_lines(dataset: SegDataset) -> list[str]:
    """Warnings about the images of `dataset`, by a sample of at most 64.

    An image that cannot be read is left out: it is refused where it is needed.
    """
    sample = range(0, len(dataset), max(1, len(dataset) // _MORE_SAMPLES))
    try:
        depths = {i: read_header(dataset.pairs[i].image).depth for i in sample}
        first = list(depths)[:: max(1, len(depths) // _FIRST)]
        seen = [_look(dataset, depths, i) for i in first]
        problem = faint_problem(dataset, depths, seen)
    except DataError:
        return []
    return [problem] if problem else faint_warnings(dataset, seen)


def faint_problem(dataset: SegDataset, depths: Mapping[int, int], seen: list[Brightness]) -> str:
    """Why the images are not what was meant, with the split and an example; empty if they may be.

    16-bit images are looked at in any case; where the sample is suspicious, more images decide.

    Args:
        depths: bits of a sample of the images to choose from, by their index.
        seen: images that were looked at; more are added.
    """
    deep = [i for i, depth in depths.items() if depth > 8]
    order = deep or list(depths)
    rest = iter(order[:: max(1, len(order) // _MORE_SAMPLES)])
    seen += [_look(dataset, depths, i) for i in deep[:: max(1, len(deep) // _DEEP_SAMPLES)]]
    while text := whole_split_problem(seen):
        i = next(rest, None)
        if i is None:
            return f"split {dataset.split!r}, such as {seen[-1].name}: {text}"
        seen.append(_look(dataset, depths, i))
    return ""


def faint_warnings(dataset: SegDataset, seen: list[Brightness]) -> list[str]:
    """A line if some of the images that were `seen` have lost their bits."""
    lost = {one.name: one for one in seen if one.lost}
    if not lost:
        return []
    of = len({one.name for one in seen})
    return [
        f"split {dataset.split!r}, such as {next(iter(lost))}: {len(lost)} of {of} images looked "
        f"at: {lost_bits(list(lost.values()))}, if these are not just dark"
    ]


def _look(dataset: SegDataset, depths: Mapping[int, int], i: int) -> Brightness:
    path = dataset.pairs[i].image
    return brightness(read_image(path), depths[i], printable(path))
