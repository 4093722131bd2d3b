"""Image and label are called alike but for words of roles, as most data sets have it.

    images/train/a_1.jpg    gt/train/a_1_mask.png
    images/val/a_1.jpg      gt/val/a_1_mask.png
    images/val/a_2.jpg      gt/val/a_2_mask.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
gt/train/a_1_mask.png: images/train/a_1.jpg
gt/val/a_1_mask.png: images/val/a_1.jpg
gt/val/a_2_mask.png: images/val/a_2.jpg

A label belongs to the one image with the same core that has the most folders and words in common
with it. If there are several such images, none is chosen: an order of names is never taken for a
pairing. Nor is a label given to an image of another scene, whose folders go with each other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from segtrain.desk.survey.conventions.claims import OwnerClaim, has_letter, nearest
from segtrain.desk.survey.file_names import FileName, are_photos, band_of


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """See the top of the file."""
    by_core: dict[str, list[FileName]] = defaultdict(list)
    by_stem: dict[str, list[FileName]] = defaultdict(list)
    for image in images:
        by_core[image.core].append(image)
        by_stem[image.stem].append(image)
    # The core first. Names may still be equal as a whole: what is cut off is decided folder by
    # folder.
    fitting = [
        (label, nearest(label, by_core.get(label.core) or by_stem.get(label.stem, ())))
        for label in labels
    ]
    partners = _Partners(fitting)
    owners: dict[str, str] = {}
    bands: dict[str, Sequence[str]] = {}
    unclear, others, whole = [], [], set()
    for label, candidates in fitting:
        # Three outcomes: the only fitting image is of another scene, as scene_1/img/002.png is for
        # scene_2/mask/002.png; one image fits, perhaps in several bands; or several images fit, and
        # nothing says which is meant.
        is_stray = any(partners.are_others(label, image) for image in candidates)
        if is_stray and len(candidates) == 1:
            others.append(label.path)
        elif not is_stray and _are_bands_of_one(candidates):
            first, *further = _photo_first(candidates)
            owners[label.path] = first
            if further:
                bands[first] = further
            if label.stem == candidates[0].stem and has_letter(label.stem):
                whole.add(label.path)
        elif candidates:
            unclear.append(label.path)
    return OwnerClaim(owners, whole, bands, unclear, others)


def _are_bands_of_one(candidates: Sequence[FileName]) -> bool:
    """Whether there is one image, or each file is another band: t0_B02.tif and t0_B03.tif."""
    return bool(candidates) and len(set(map(band_of, candidates))) == len(candidates)


def _photo_first(candidates: Sequence[FileName]) -> list[str]:
    """The files of an image, a photo first: rgb/0.png before nir/0.png."""
    is_other = [not is_photo for is_photo in are_photos(candidates)]
    paths = [candidate.path for candidate in candidates]
    return [path for _, path in sorted(zip(is_other, paths, strict=True))]


class _Partners:
    """Which folders go together: those of labels with the folders of their only images."""

    def __init__(self, fitting: Iterable[tuple[FileName, Sequence[FileName]]]) -> None:
        self._of_labels: dict[str, Counter[str]] = defaultdict(Counter)
        self._of_images: dict[str, Counter[str]] = defaultdict(Counter)
        self._cores: dict[str, set[str]] = defaultdict(set)  # in folders of images
        for label, images in fitting:
            for image in images:
                self._cores[image.folder].add(image.core)
                if len(images) == 1:
                    self._of_labels[label.folder][image.folder] += 1
                    self._of_images[image.folder][label.folder] += 1

    def are_others(self, label: FileName, image: FileName) -> bool:
        """Whether the folders of both go with others, in which the same names come again.

        scene_1/img   001.png 002.png           scene_1/mask   001.png 002.png
        scene_2/img   001.png         003.png   scene_2/mask   001.png 002.png 003.png

        scene_2/mask goes with scene_2/img by 003.png, and 001.png comes again: 002.png of
        scene_2/mask is not of scene_1/img. Where no name comes twice, as in masks of several
        people, folders say nothing.
        """
        here, there = label.folder, image.folder
        partners, rivals = self._of_labels[here], self._of_images[there]
        if not rivals or _is_main_partner(partners, there) or _is_main_partner(rivals, here):
            return False
        repeated = self._cores[there] - {image.core}
        return not partners or any(
            self._cores[folder] & repeated
            for folder in partners
            if _is_main_partner(partners, folder)
        )


def _is_main_partner(counts: Counter[str], folder: str) -> bool:
    """Whether no folder comes more often in these counts."""
    return folder in counts and counts[folder] == max(counts.values())
