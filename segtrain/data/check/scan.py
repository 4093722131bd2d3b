"""One split, read completely: each pair is decoded once, in processes, from files or a pack."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.data.check.values import ImageValues, image_values
from segtrain.data.read.classes import ClassFile, Color
from segtrain.data.read.concurrent import for_each_pair
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.decode import Scaling, printed_lines, read_bytes
from segtrain.data.read.find import Pair
from segtrain.data.read.georeference import other_place, place_of
from segtrain.data.read.image import ImageForm, drops_alpha, read_image
from segtrain.data.read.image_formats import open_stored, read_info
from segtrain.data.read.label_formats import LabelCounts, LabelFormat, Value
from segtrain.errors import DataError
from segtrain.text import printable

# The colour of each index that occurs in a label.
Palette = Mapping[int, Color]
# What libjpeg prints of an image that it decodes all the same.
_JPEG, OF_DAMAGE = b"\xff\xd8", ("Corrupt JPEG data", "Premature end")
# Pixels of a split by which percentiles are estimated, and the least of an image.
_SAMPLE, _MIN_SAMPLE = 1 << 20, 16
_KINDS = (
    "unreadable",
    "sizes",
    "values",
    "all ignored",
    "orientation",
    "images",
    "map places",
    "scales",
    "damaged",
)


@dataclass
class SplitScan:
    """The contents of all pairs of a split, or of one pair.

    pixels, images: (K,) int64, pixels of each class and number of images that hold it.
    pixels_beside: (K,) int64, valid pixels of all images that hold the class.
    blended: (K,) int64, the `pixels` that are `blended_pixels`; none of a pack. thin, contacts: as
        of `is_lining`; none where labels hold colours.
    absent: (K,) int64, where classes overlap: pixels that are known not to be of the class.
    ignored_pixels: pixels that are ignored or unknown; where classes overlap, of the class of which
        most are known.
    sizes: number of images of each (height, width).
    values: pixels of each raw id; empty where labels hold colours.
    unknown: pixels of each id or colour that the class file does not name.
    palettes: the colours of the ids that occur, by the name of the label.
    values_of_images: of each image.
    moments: (3, C) Python numbers, whole ones exact: the pixels of each channel that have a value,
        and the sums of these values and of their squares; zeros unless asked for.
    sample: (n, C) values of some pixels; empty unless asked for.
    places: files or names of images by the kind of finding, and for some kinds by what is found:
        unreadable files by the reason, damaged images by what is said of them, labels by the
        unknown value, images by the hash of the file, or by their scaling.
    """

    split: str
    num_pairs: int
    num_classes: InitVar[int]
    pixels: np.ndarray = field(init=False)
    images: np.ndarray = field(init=False)
    pixels_beside: np.ndarray = field(init=False)
    blended: np.ndarray = field(init=False)
    thin: np.ndarray = field(init=False)
    contacts: np.ndarray = field(init=False)
    absent: np.ndarray = field(init=False)
    ignored_pixels: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    values: Counter[int] = field(default_factory=Counter)
    unknown: Counter[Value] = field(default_factory=Counter)
    values_of_images: list[ImageValues] = field(default_factory=list)
    palettes: dict[str, Palette] = field(default_factory=dict)
    moments: np.ndarray = field(default_factory=lambda: np.zeros((3, 1), object))
    sample: list[np.ndarray] = field(default_factory=list)
    places: dict[str, dict[Value | str | bytes | Scaling, list[str]]] = field(
        default_factory=lambda: {kind: defaultdict(list) for kind in _KINDS}
    )

    def __post_init__(self, num_classes: int) -> None:
        zeros = np.zeros((7, num_classes), np.int64)
        self.pixels, self.images, self.pixels_beside, self.absent = zeros[:4]
        self.blended, self.thin, self.contacts = zeros[4:]

    @property
    def valid(self) -> np.ndarray:
        """(K,) int64: the pixels among which each class is counted."""
        if self.absent.any():
            return self.pixels + self.absent
        return np.full(len(self.pixels), self.pixels.sum())

    def add(self, pair: "SplitScan") -> None:
        """Adds what one pair holds."""
        self.pixels += pair.pixels
        self.images += pair.images
        self.pixels_beside += pair.pixels_beside
        self.blended += pair.blended
        self.thin += pair.thin
        self.contacts += pair.contacts
        self.absent += pair.absent
        self.ignored_pixels += pair.ignored_pixels
        # Not in place: the first pair brings the number of channels.
        self.moments = self.moments + pair.moments
        self.sample += pair.sample
        self.sizes.update(pair.sizes)
        self.values.update(pair.values)
        self.unknown.update(pair.unknown)
        self.values_of_images += pair.values_of_images
        self.palettes |= pair.palettes
        for kind, found in pair.places.items():
            for what, names in found.items():
                self.places[kind][what] += names

    def add_unreadable(self, path: Path, error: DataError) -> None:
        """Notes that the file at `path` cannot be used; the text of `error` may start with it."""
        place = printable(path)
        self.places["unreadable"][str(error).removeprefix(f"{place}: ")].append(place)

    def compare_sizes(self, pair: Pair, image: Sequence[int], label: Sequence[int]) -> None:
        """Notes that image and label have these sizes, (height, width), if they differ."""
        if tuple(image) != tuple(label):
            what = f"height x width {label[0]}x{label[1]} instead of {image[0]}x{image[1]}"
            self.places["sizes"][what].append(printable(pair.label))

    def compare_places(self, pair: Pair) -> None:
        """Notes that a label lies elsewhere on the map than its image, as both files say."""
        try:
            image, label = (place_of(x, read_info(x)) for x in (pair.image, pair.label))
        except DataError:  # said elsewhere
            return
        if what := other_place(image, label):
            self.places["map places"][what].append(printable(pair.label))

    def counts(self, class_names: Sequence[str]) -> dict[str, Any]:
        """The pixels, sizes and classes of the split, for JSON."""
        counts = zip(class_names, self.pixels.tolist(), self.images.tolist(), strict=True)
        return {
            "ignored_pixels": self.ignored_pixels,
            "sizes": [[*size, count] for size, count in sorted(self.sizes.items())],
            "classes": {name: {"pixels": n, "images": m} for name, n, m in counts},
        }

    def add_image(
        self,
        image: np.ndarray,
        values: ImageValues,
        digest: bytes,
        orientation: int,
        sample_size: int,
    ) -> None:
        """Adds an image (H, W, C) whose files have this hash; the first has this orientation.

        sample_size: pixels to take for `sample`; 0: neither these nor the moments.
        """
        self.places["images"][digest].append(values.name)
        self.sizes[image.shape[:2]] += 1
        self.values_of_images.append(values)
        if orientation != 1:
            self.places["orientation"][""].append(values.name)
        if sample_size:
            form = values.form
            self.moments = _moments(image.clip(*form.limits) if form.clip else image)
            pixels = image.reshape(-1, image.shape[2])
            self.sample.append(pixels[:: max(1, len(pixels) // sample_size)].astype(np.float32))

    def add_counts(self, name: str, found: LabelCounts) -> None:
        """Adds what the label of an image holds."""
        for key in ("blended", "thin", "contacts", "absent"):
            setattr(self, key, getattr(self, key) + getattr(found, key))
        self.values.update(found.values)
        self.unknown.update(found.unknown)
        for value in found.unknown:
            self.places["values"][value].append(name)
        if found.palette:
            self.palettes[name] = found.palette
        self.add_label(name, found.pixels, math.prod(found.size), found.num_valid)

    def add_label(
        self, name: str, pixels: np.ndarray, num_pixels: int, num_valid: int | None = None
    ) -> None:
        """Adds a label of `num_pixels` with this many `pixels` (K,) of each class."""
        if num_valid is None:
            # Where classes overlap each has known pixels of its own; the class with most of them
            # counts.
            num_valid = int((pixels + self.absent).max() if self.absent.any() else pixels.sum())
        self.pixels += pixels
        self.images += pixels > 0
        self.pixels_beside += (pixels > 0) * num_valid
        self.ignored_pixels += num_pixels - num_valid
        # Unknown values are an error of their own, which says more.
        if not num_valid and not self.unknown:
            self.places["all ignored"][""].append(name)


def scan_split(
    dataset: SegDataset,
    pool: ProcessPoolExecutor | None,
    *,
    measure: bool = False,
    compare: bool = False,
) -> SplitScan:
    """Reads every pair of `dataset` in the processes of `pool`, or in this one if it is None.

    What is wrong with a pair is recorded, not raised.

    measure: also `SplitScan.moments` and `sample`.
    compare: also compare a pack with the files that it was made from.

    Raises:
        ExecutionError: a process was killed.
    """
    total = SplitScan(dataset.split, len(dataset), dataset.classes.num_classes)
    sample_size = max(_MIN_SAMPLE, _SAMPLE // len(dataset)) if measure else 0
    # This goes to the processes with their pairs, so it does not hold the data set.
    settings = {"classes": dataset.classes, "form": dataset.form, "sample_size": sample_size}
    if dataset.is_packed:
        from segtrain.data.check.scan_pack import scan_packed

        settings |= {"shards": dataset.shards, "compare": compare and dataset.source_is_there}
        work = partial(scan_packed, **settings)
        items = list(zip(dataset.images, dataset.pairs, strict=True))
    else:
        work = partial(scan_pair, **settings, labels=dataset.labels)
        items = dataset.pairs
    for scan in for_each_pair(work, items, pool, dataset.split):
        total.add(scan)
    return total


def scan_pair(
    pair: Pair, classes: ClassFile, form: ImageForm, labels: LabelFormat, sample_size: int = 0
) -> SplitScan:
    """What one pair holds; sample_size: see `SplitScan.add_image`."""
    scan = SplitScan("", 1, classes.num_classes)
    try:
        # A file is read once, for the header, the pixels and the hash; of a raster only the window
        # is read.
        contents = None if pair.window else [read_bytes(path) for path in pair.images]
        is_jpeg = any(content.startswith(_JPEG) for content in contents or ())
        # Others are decoded side by side.
        with printed_lines(OF_DAMAGE) if is_jpeg else nullcontext([]) as said:
            image = read_image(pair.images, form, pair.window, contents=contents)
        if said:
            scan.places["damaged"][printable(said[0])].append(pair.name)
        first = open_stored(pair.image, pair.window, content=contents and contents[0])
        info = first.info
        if contents is None:  # many windows may be blank
            contents = [repr(pair.window).encode(), image.tobytes()]
        # Equal digests in both splits tell that an image is in both.
        digest = hashlib.blake2b(b"".join(contents), digest_size=16).digest()
        loses_band = not pair.bands and drops_alpha(info, form.channels)
        # An alpha channel that is the same everywhere tells nothing.
        loses_band = loses_band and bool(np.ptp(first.pixels()[..., -1]))
        # Windows of one raster may well have the same least and largest value.
        keeps_all = info.lossless and pair.window is None
        values = image_values(image, form, pair.name, keeps_all=keeps_all, loses_band=loses_band)
    except DataError as error:
        scan.add_unreadable(pair.image, error)
    else:
        scan.add_image(image, values, digest, info.orientation, sample_size)
        scan.places["scales"][info.scaling].append(pair.name)
    # Also of an image that cannot be read, so that one scan names both files.
    scan.add(scan_label(pair, classes, labels, scan.sizes))
    scan.compare_places(pair)
    return scan


def _moments(image: np.ndarray) -> np.ndarray:
    """The `SplitScan.moments` of an image (H, W, C), NaN where a channel has no value."""
    band_moments = []
    for band in np.moveaxis(image, 2, 0):
        if image.dtype.kind == "f":
            valid = band[~np.isnan(band)].astype(np.float64)
            band_moments.append((valid.size, float(valid.sum()), float(valid @ valid)))
        else:
            counts = np.bincount(band.ravel())
            values = np.arange(counts.size)
            band_moments.append(tuple(int(counts @ values**power) for power in (0, 1, 2)))
    # Python's numbers: sums over a split of whole numbers neither overflow nor round.
    moments = np.empty((3, len(band_moments)), object)
    moments[:] = np.array(band_moments, object).T
    return moments


def scan_label(
    pair: Pair, classes: ClassFile, labels: LabelFormat, image_sizes: Iterable[tuple[int, int]] = ()
) -> SplitScan:
    """What the label of one pair holds. image_sizes: of its image, if that could be read."""
    scan = SplitScan("", 1, classes.num_classes)
    try:
        counts = labels.count(pair.label, classes, pair.window)
        if not labels.has_classes:  # each number of a pixel is known, or none
            counts.num_valid = int(counts.pixels.max())
    except DataError as error:
        scan.add_unreadable(pair.label, error)
        return scan
    scan.add_counts(pair.name, counts)
    for size in image_sizes:
        scan.compare_sizes(pair, size, counts.size)
    return scan
