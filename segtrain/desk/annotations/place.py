"""Which file an annotated image is, and whether its regions fit that file."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.decode import exchanges_sides
from segtrain.data.read.find import IMAGE_SUFFIXES, visible_files
from segtrain.data.read.image_formats import read_info
from segtrain.desk.annotations.regions import Annotated, Findings, Region
from segtrain.errors import DataError
from segtrain.text import first_of, printable

# Reading headers waits for the disk, not for the processor.
_THREADS = 16
# A polygon may reach out of its image by this fraction of a side without a word.
_MARGIN = 0.1
_MAX_OUTLINE_PX = 10_000_000  # pycocotools takes 100 bytes for each pixel of its length
# Label Studio puts eight digits before the name of an uploaded file.
_UPLOAD = re.compile(r"^[0-9a-f]{8}-")
_ELSEWHERE = "name the folder of the images: segtrain data import --images FOLDER"


def place_images(
    images: Iterable[Annotated], folder: Path, findings: Findings, *, others_are_empty: bool
) -> tuple[list[Annotated], int]:
    """The annotated images with their files below `folder`, their sizes and checked regions.

    Images that are missing, ambiguous or of another size are refused in `findings`. Also returns
    how many images below `folder` no annotation names. others_are_empty: those of the same suffix
    beside an annotated image have no region, and are returned, too.
    """
    by_name: dict[str, list[str]] = {}
    for file in visible_files(folder):
        if file.lower().endswith(IMAGE_SUFFIXES):
            name = file.rpartition("/")[2]
            for key in (name, _uploaded(name), f"{PurePosixPath(name).stem}.*"):
                by_name.setdefault(key, []).append(file)
    by_file: dict[str, Annotated] = {}
    found = [(image, *_file_of(image, folder, by_name)) for image in images]
    # A second file of many images, all of which were not downloaded, while others' are here.
    here = {image.source for image, file, _ in found if file}
    number = Counter(image.source for image, *_ in found if image.source not in here)
    absent = {source for source, count in number.items() if here and count > 1}
    for source in sorted(absent):
        findings.note(source, f"left out: none of its {number[source]} images is here")
    for image, file, problem in found:
        if image.source in absent:
            continue
        if problem:
            findings.refuse(image.place or image.name, problem)
        elif file in by_file:
            both = f"{by_file[file].source} and {image.source}"
            findings.refuse(file, f"is annotated twice, in {both}; keep one annotation")
        else:
            by_file[file] = image._replace(name=file, path=folder / file)
    files = sorted({file for files in by_name.values() for file in files} - by_file.keys())
    if others_are_empty:
        kinds = {_folder_and_suffix(file): image.source for file, image in by_file.items()}
        for file in files:
            if source := kinds.get(_folder_and_suffix(file)):
                by_file[file] = Annotated(source, file, None, [], path=folder / file)
    placed = []
    for image, problem in prefetch(_fitted, by_file.values(), _THREADS):
        if problem:
            findings.refuse(image.name, problem)
        else:
            checked = (_checked(region, image, findings) for region in image.regions)
            placed.append(image._replace(regions=[region for region in checked if region]))
    return placed, len([file for file in files if file not in by_file])


def _folder_and_suffix(file: str) -> tuple[Path, str]:
    return Path(file).parent, Path(file).suffix.lower()


def _file_of(image: Annotated, folder: Path, by_name: dict[str, list[str]]) -> tuple[str, str]:
    """The file of `image`, relative to `folder`, or why it is not clear.

    The name in the annotation ends with the whole path of the file, or that path with the name. Of
    several such files the nearest to the annotation file is meant.
    """
    parts = [x for x in PurePosixPath(image.name.replace("\\", "/")).parts if x not in "/.."]
    base = parts[-1] if parts else ""
    own = _UPLOAD.sub("", base)
    # As it is called, without the digits of an upload, or as Label Studio has stored it; tables
    # leave the suffix out.
    keys = (
        base,
        own,
        _uploaded(own),
        *([] if own.lower().endswith(IMAGE_SUFFIXES) else [f"{own}.*"]),
    )
    named = next((by_name[key] for key in keys if key in by_name), [])
    files = [file for file in named if _is_end(parts[:-1], file.split("/")[:-1])]
    ranks = [_nearness(folder / file, image.source) for file in files]
    best = [file for file, rank in zip(files, ranks, strict=True) if rank == max(ranks)]
    if len(best) == 1:
        return best[0], "" if best[0].isprintable() else "a name with control characters; rename it"
    if best:
        return "", f"may be {first_of(best, 3)}; {_ELSEWHERE}"
    others = f", but {first_of(named, 3)}" if named else ""
    return "", f"no such image in {printable(folder)}{others}; {_ELSEWHERE}"


def _uploaded(name: str) -> str:
    """A key for the name that Label Studio stores, by Django's `get_valid_filename`; no name."""
    return "/" + re.sub(r"[^-\w.]", "", name.strip().replace(" ", "_"))


def _is_end(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether the shorter of the two is the end of the other."""
    shared = min(len(a), len(b))
    return not shared or a[-shared:] == b[-shared:]


def _nearness(file: Path, source: Path) -> tuple[bool, bool, int]:
    """Beside the annotation file; below its folder; how many words both paths share."""
    here, there = (set(re.split(r"[\W_]+", str(p))) for p in (file.parent, source.with_suffix("")))
    return file.parent == source.parent, file.is_relative_to(source.parent), len(here & there)


def _fitted(image: Annotated) -> tuple[Annotated, str]:
    """`image` with the size in which its regions were drawn, and why they do not fit the file."""
    try:
        header = read_info(image.path)
    except DataError as error:
        return image, str(error)
    stored, orientation = header.size, header.orientation
    if orientation != 1:
        # Most tools show such an image turned, some do not; only the size tells.
        if not exchanges_sides(orientation) or image.size is None or stored[0] == stored[1]:
            upright = "store the pixels upright, and annotate that file"
            return image, f"EXIF asks for a rotation, which regions may follow or not; {upright}"
        if image.size == stored[::-1]:
            return image._replace(orientation=orientation), ""
    if image.size not in (None, stored):
        sizes = f"{image.size[0]}x{image.size[1]} px in {image.source}"
        return image, f"{sizes}, {stored[0]}x{stored[1]} px in the file: sizes must be equal"
    return image._replace(size=stored), ""


def _checked(region: Region, image: Annotated, findings: Findings) -> Region | None:
    """`region` in pixels, without polygons of fewer than three points; None: nothing is left."""
    assert image.size is not None
    if region.runs is not None:
        with findings.refusing(region.place):
            return region.with_mask(image.size)
        return None
    place = f"{image.name} ({region.name})"
    kept, holes = (
        tuple(_checked_polygons(polygons, image, place, findings))
        for polygons in (region.polygons, region.holes)
    )
    return region._replace(polygons=kept, holes=holes) if kept or region.mask else None


def _checked_polygons(
    polygons: Sequence[np.ndarray], image: Annotated, place: str, findings: Findings
) -> Iterator[np.ndarray]:
    """The polygons in pixels, but those of fewer than three points, which are noted."""
    assert image.size is not None
    sides = np.array(image.size[::-1], np.float64)  # of x and y
    for polygon in polygons:
        points = polygon * sides if image.are_fractions else polygon
        if len(points) < 3:
            findings.note(place, "an outline of fewer than three points: left out")
            continue
        is_near = (points >= -_MARGIN * sides) & (points <= (1 + _MARGIN) * sides)
        touches = (points.max(axis=0) > 0).all() and (points.min(axis=0) < sides).all()
        # Fractions beyond the image are pixels by mistake. Pixels may lie far out if they touch the
        # image.
        fits = is_near.all() if image.are_fractions else np.isfinite(points).all() and touches
        if not fits:
            problem = "outside of the image: drawn on another one, or in another size or unit"
            findings.refuse(f"{place} at {points[0]}", problem)
        elif np.abs(points - np.roll(points, 1, 0)).max(axis=1).sum() > _MAX_OUTLINE_PX:
            findings.refuse(place, f"an outline of more than {_MAX_OUTLINE_PX:,} px")
        else:
            yield points
            if not is_near.all():
                findings.note(place, "reaches far out of the image, and is cut off at its border")
