"""Image and label are called alike but for words of roles, as most data sets have it.

    images/train/a_1.jpg    gt/train/a_1_mask.png
    images/val/a_1.jpg      gt/val/a_1_mask.png
    images/val/a_2.jpg      gt/val/a_2_mask.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
gt/train/a_1_mask.png: images/train/a_1.jpg
gt/val/a_1_mask.png: images/val/a_1.jpg
gt/val/a_2_mask.png: images/val/a_2.jpg

A label belongs to the image with the same core; if no image has it, to the one with the same stem.
Of several such images, the one that shares the most folders and words with the label counts. If
several are left, they must be bands of one image: the order of names never decides.
A label is not given to an image of another scene: see `_Partners.are_of_other_scenes`.
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
    # The core first. Stems may be equal where cores differ: each folder cuts off its own words.
    fitting = [
        (label, nearest(label, by_core.get(label.core) or by_stem.get(label.stem, ())))
        for label in labels
    ]
    partners = _Partners(fitting)
    owners: dict[str, str] = {}
    bands: dict[str, Sequence[str]] = {}
    unclear, of_other_scenes, whole = [], [], set()
    for label, candidates in fitting:
        # Three outcomes: the only candidate is of another scene, as scene_1/img/002.png is for
        # scene_2/mask/002.png; one image fits, perhaps in several bands; or it is unclear, as
        # several images fit, or one of several candidates is of another scene.
        is_stray = any(partners.are_of_other_scenes(label, image) for image in candidates)
        if is_stray and len(candidates) == 1:
            of_other_scenes.append(label.path)
        elif not is_stray and _are_bands_of_one(candidates):
            first, *further = _photo_first(candidates)
            owners[label.path] = first
            if further:
                bands[first] = further
            # If one candidate has the label's stem, `nearest` has dropped those that do not.
            if label.stem == candidates[0].stem and has_letter(label.stem):
                whole.add(label.path)
        elif candidates:
            unclear.append(label.path)
    return OwnerClaim(owners, whole, bands, unclear, of_other_scenes)


def _are_bands_of_one(candidates: Sequence[FileName]) -> bool:
    """Whether these are files of one image, each another band: t0_B02.tif and t0_B03.tif."""
    return bool(candidates) and len(set(map(band_of, candidates))) == len(candidates)


def _photo_first(candidates: Sequence[FileName]) -> list[str]:
    """The files of an image, a photo first: rgb/0.png before nir/0.png."""
    is_other = [not is_photo for is_photo in are_photos(candidates)]
    paths = [candidate.path for candidate in candidates]
    return [path for _, path in sorted(zip(is_other, paths, strict=True))]


class _Partners:
    """Counts how often folders pair: that of a label with that of its only candidate."""

    def __init__(self, fitting: Iterable[tuple[FileName, Sequence[FileName]]]) -> None:
        self._of_labels: dict[str, Counter[str]] = defaultdict(Counter)
        self._of_images: dict[str, Counter[str]] = defaultdict(Counter)
        self._cores: dict[str, set[str]] = defaultdict(set)  # of matched images, by image folder
        for label, images in fitting:
            for image in images:
                self._cores[image.folder].add(image.core)
                if len(images) == 1:
                    self._of_labels[label.folder][image.folder] += 1
                    self._of_images[image.folder][label.folder] += 1

    def are_of_other_scenes(self, label: FileName, image: FileName) -> bool:
        """Whether both folders mainly pair with other folders, and names come again there.

        scene_1/img   001.png 002.png           scene_1/mask   001.png 002.png
        scene_2/img   001.png         003.png   scene_2/mask   001.png 002.png 003.png

        003.png pairs scene_2/mask with scene_2/img, and both img folders have a 001.png. So
        002.png of scene_2/mask is no label of scene_1/img. If no name is in both, as in masks of
        several people, folders say nothing. A label folder without any partner needs no such name.
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
    """Whether `folder` is counted, and none is counted more often."""
    return folder in counts and counts[folder] == max(counts.values())
