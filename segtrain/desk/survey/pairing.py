"""Which label belongs to which image, by names alone; no file is opened.

A name has a core, which image and label share, and what surrounds it: folders, and a beginning or
an end that says the role, as in `masks/0001_mask.png`. A label belongs to the one image with the
same core that has the most folders and words in common with it. If there are several such images,
none is chosen: an order of names is never taken for a pairing. Nor is a label given to an image of
another scene, whose folders go with each other otherwise.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from segtrain.desk.survey.file_names import (
    FileName,
    are_photos,
    band_of,
    band_words,
    is_split,
    parse_names,
    words_of,
)
from segtrain.errors import DataError


class Matches(NamedTuple):
    """labels: the labels of each image that has any, by path; in the order of the names.

    bands: further files of an image, each of another group: perhaps its bands.
    unclear: labels that fit several images equally well. alone: labels without an image.
    """

    labels: dict[str, list[str]]
    bands: dict[str, list[str]]
    unclear: list[str]
    alone: list[str]


def match(images: Sequence[FileName], labels: Iterable[FileName]) -> Matches:
    """The labels of each image; see the top of the file.

    DataError: folders and files of labels are called as images, and nothing says which counts.

    >>> images = parse_names(["img/a_1.jpg", "img/a_2.jpg"])
    >>> found = match(images, parse_names(["gt/a_1_mask.png", "gt/a_7_mask.png"]))
    >>> found.labels, found.alone
    ({'img/a_1.jpg': ['gt/a_1_mask.png']}, ['gt/a_7_mask.png'])
    """
    by_core: dict[str, list[FileName]] = defaultdict(list)
    by_stem: dict[str, list[FileName]] = defaultdict(list)
    for image in images:
        by_core[image.core].append(image)
        by_stem[image.stem].append(image)
    result = Matches(defaultdict(list), {}, [], [])
    unmatched = []
    # The core first. Names may still be equal as a whole: what is cut off is decided folder by
    # folder.
    fitting = [
        (label, _nearest(label, by_core.get(label.core) or by_stem.get(label.stem, ())))
        for label in labels
    ]
    decided = _called_as_images(images, fitting)
    partners = _Partners(fitting)
    for label, candidates in fitting:
        # As masks/img_3/1.png: the folder names the image.
        if (owner := decided.get(label.path)) is not None:
            result.labels[owner].append(label.path)
            continue
        # The only image of this name may be of another scene: scene_2/mask/002.png is not of
        # scene_1/img/002.png.
        strays = [image for image in candidates if partners.are_others(label, image)]
        if strays and len(candidates) == 1:
            result.alone.append(label.path)
        elif strays:
            result.unclear.append(label.path)
        # One image, or its bands, which differ in what tells bands: t0_B02.tif and t0_B03.tif. A
        # photo comes first, as rgb/0.png before nir/0.png.
        elif candidates and len(set(map(band_of, candidates))) == len(candidates):
            is_other = [not is_photo for is_photo in are_photos(candidates)]
            order = sorted(zip(is_other, (x.path for x in candidates), strict=True))
            first, *bands = [path for _, path in order]
            result.labels[first].append(label.path)
            if bands:
                result.bands[first] = bands
        # Several images of one kind, and nothing says which is meant.
        elif candidates:
            result.unclear.append(label.path)
        else:
            unmatched.append(label)
    # No image has the name of these. Each rule sees what the rules before it have left.
    for rule in (_by_number, _by_folder, _by_only_image):
        # For 3/1.png, where the file's own name counts, only its number may still say the image.
        remaining = [x for x in unmatched if rule is _by_number or x.path not in decided]
        matched = rule(images, remaining) if remaining else {}
        for label, image in matched.items():
            result.labels[image].append(label)
        unmatched = [label for label in unmatched if label.path not in matched]
    result.alone.extend(label.path for label in unmatched)
    order = [image.path for image in images if image.path in result.labels]
    return result._replace(labels={path: sorted(result.labels[path]) for path in order})


def with_pairs(
    matches: Matches,
    images: Sequence[FileName],
    pairs: Mapping[str, str],
    pattern_of: Mapping[str, str],
) -> Matches:
    """`matches`, but the label of an image in `pairs` is that, and no other of its pattern.

    Nor is such an image a band of another one.
    """
    placed = set(pairs.values())
    labels = {}
    for image in images:
        own = pairs.get(image.path)
        # What a list gives to another image is taken from this one.
        files = [x for x in matches.labels.get(image.path, ()) if x not in placed]
        if own is not None:
            files = [*(x for x in files if pattern_of[x] != pattern_of[own]), own]
        if files:
            labels[image.path] = sorted(files)
    unclear, alone = (
        [x for x in paths if x not in placed] for paths in (matches.unclear, matches.alone)
    )
    bands = {first: x for first, x in matches.bands.items() if pairs.keys().isdisjoint(x)}
    return matches._replace(labels=labels, bands=bands, unclear=unclear, alone=alone)


def match_scenes(
    images: Sequence[FileName], labels: Sequence[FileName]
) -> tuple[list[FileName], Matches]:
    """A folder for each scene, and in all the same bands: `s1/B02.tif`, `s1/B03.tif`, `s2/B02.tif`.

    The label lies there too, or is called as the folder: `s1/mask.tif`, `labels/s1.tif`. Matched as
    if each band had a folder of its own: `B02/s1.tif`.
    """
    bands: dict[str, list[str]] = defaultdict(list)
    for image in images:
        bands[_folder(image)].append(PurePosixPath(image.path).name.lower())
    # Only where every file is called as a band is, and every folder holds the same names: other
    # folders are no scenes.
    are_bands = all(band_words(stem) for stem in {image.stem for image in images})
    if not are_bands or len({frozenset(x) for x in bands.values()}) > 1 or "" in bands:
        return [], Matches({}, {}, [], [])
    names = [*images, *labels]
    turned = [PurePosixPath(name.path) for name in names]
    for i, (name, path) in enumerate(zip(names, turned, strict=True)):
        if _folder(name) in bands:
            # s1/B02.tif becomes B02/s1.tif: now image and label share the core s1.
            scene = path.parent.name
            turned[i] = path.parents[1] / path.stem / f"{scene}{path.suffix}"
    parsed = parse_names([str(path) for path in turned])
    parsed = [new._replace(path=name.path) for new, name in zip(parsed, names, strict=True)]
    renamed = parsed[: len(images)]
    return renamed, match(renamed, parsed[len(images) :])


def match_channels(
    images: Sequence[FileName], labels: Sequence[FileName]
) -> tuple[list[FileName], Matches]:
    """nnU-Net: `case_001_0000.png` is the first channel of the image of `case_001.png`."""
    # The channel goes into the pattern, by which `match` tells the bands of an image apart.
    stripped = [
        image._replace(core=image.core[:-5], pattern=f"{image.pattern[:-4]}{image.core[-5:]}")
        if re.search(r"._\d{4}$", image.core)
        else image
        for image in images
    ]
    return stripped, match(stripped, labels)


def _nearest(label: FileName, images: Collection[FileName]) -> list[FileName]:
    """Those of `images` with the most folders and words in common with `label`, if any fits."""
    # Never across splits: train/1.png and val/1.png are two images.
    images = [
        image
        for image in images
        if None in (image.split, label.split) or image.split == label.split
    ]
    if len(images) < 2:
        return images
    scores = [
        # Of `img_1` and its copy `img_1_flip`, the former is that of `img_1_mask`.
        (
            len(image.folders & label.folders),
            len(image.words & label.words),
            -len(image.words - label.words),
        )
        for image in images
    ]
    best = max(scores)
    images = [image for image, score in zip(images, scores, strict=True) if score == best]
    if len({image.words for image in images}) == 1:  # `img-1` and `img_1` differ in a sign
        stem = PurePosixPath(label.path).stem
        images = [
            candidate for candidate in images if PurePosixPath(candidate.path).stem in stem
        ] or images
    return images


class _Partners:
    """Which folders go together: those of labels with the folders of their only images."""

    def __init__(self, fitting: Iterable[tuple[FileName, Sequence[FileName]]]) -> None:
        self._of_labels: dict[str, Counter[str]] = defaultdict(Counter)
        self._of_images: dict[str, Counter[str]] = defaultdict(Counter)
        self._cores: dict[str, set[str]] = defaultdict(set)  # in folders of images
        for label, images in fitting:
            for image in images:
                self._cores[_folder(image)].add(image.core)
                if len(images) == 1:
                    self._of_labels[_folder(label)][_folder(image)] += 1
                    self._of_images[_folder(image)][_folder(label)] += 1

    def are_others(self, label: FileName, image: FileName) -> bool:
        """Whether the folders of both go with others, in which the same names come again."""
        here, there = _folder(label), _folder(image)
        partners, rivals = self._of_labels[here], self._of_images[there]
        if not rivals or _is_first(partners, there) or _is_first(rivals, here):
            return False
        # Scenes hold the same names again, as 001.png in each. Where no name comes twice, as in
        # masks of several people, folders say nothing.
        repeated = self._cores[there] - {image.core}
        return not partners or any(
            self._cores[folder] & repeated for folder in partners if _is_first(partners, folder)
        )


def _folder(name: FileName) -> str:
    return name.path.rpartition("/")[0]


def _is_first(counts: Counter[str], key: str) -> bool:
    return key in counts and counts[key] == max(counts.values())


def _called_as_images(
    images: Sequence[FileName], fitting: Iterable[tuple[FileName, Sequence[FileName]]]
) -> dict[str, str | None]:
    """The image of each label whose folder is called as one; None: that of its own name counts.

    `masks/3/1.png` may be an object in image 3, or image 1 in a folder of class or bucket 3. Labels
    below one folder are of one kind: what names (nearly) all images there counts, or far more.

    DataError: neither does.
    """
    by_name: dict[str, list[FileName]] = defaultdict(list)
    by_number: dict[int | None, list[FileName]] = defaultdict(list)
    for image in images:
        by_number[_number(image)].append(image)
        for name in {image.core, image.stem}:
            by_name[name].append(image)
    kinds: dict[tuple[str, ...], list[_Claim]] = defaultdict(list)
    for label, fits in fitting:
        number = _number(label)
        of_file = fits or ([] if number is None else _nearest(label, by_number.get(number, ())))
        *folders, _ = PurePosixPath(label.path).parts
        # From the nearest folder up: the first that names one image is weighed against the file.
        for i, folder in reversed([*enumerate(folders)]):
            numbered = by_number.get(int(folder), ()) if folder.isdecimal() else ()
            of_folder = _nearest(label, by_name.get(folder.lower()) or numbered)
            if len(of_folder) == 1:
                words = {*words_of(folder)}
                if not any(words <= image.folders for image in of_file):  # no scene of both
                    # Of one kind are labels whose other folders are equal: masks/3/1.png and
                    # masks/7/1.png.
                    kind = (x for k, x in enumerate(folders) if k != i and not is_split(x))
                    kinds[tuple(kind)].append(_Claim(label, folder, of_folder[0], of_file))
                break
    decided: dict[str, str | None] = {}
    for claims in kinds.values():
        # Where no file is called as an image, nothing is to be weighed: the rules of `match` do it.
        if any(claim.of_file for claim in claims):
            counts = _folders_count(images, claims)
            decided |= {x.label.path: x.of_folder.path if counts else None for x in claims}
    return decided


class _Claim(NamedTuple):
    """A label, and the images that its folder and its own name are called as."""

    label: FileName
    folder: str
    of_folder: FileName
    of_file: Sequence[FileName]


def _folders_count(images: Sequence[FileName], claims: Sequence[_Claim]) -> bool:
    """Whether folders say the image, and not files; see `_called_as_images`."""
    of_folders = {claim.of_folder.path for claim in claims}
    of_files = {image.path for claim in claims for image in claim.of_file}
    places = {path.rpartition("/")[0] for path in of_folders | of_files}
    # Not all: some images may show no object.
    most = 0.9 * sum(_folder(image) in places for image in images)
    folder_is_whole = [claim.folder.lower() == claim.of_folder.stem for claim in claims]
    file_is_whole = [claim.label.stem in [x.stem for x in claim.of_file] for claim in claims]
    is_word = all(re.search("[a-z]", claim.of_folder.stem) for claim in claims)
    # Objects: img_3/1.png beside img_3.jpg. A whole name with letters is no accident.
    if all(folder_is_whole) and is_word and not any(file_is_whole):
        return True
    stems = {claim.label.stem for claim in claims}
    # Buckets: 3/img_12.png beside img_12.jpg. Every file is called as one image, and none twice.
    if all(file_is_whole) and not any(folder_is_whole) and len(stems) == len(claims):
        return False
    # Else what reaches twice as many images counts, or nearly all of them and more than the other.
    if 2 * len(of_files) <= len(of_folders) or (of_files < of_folders and len(of_folders) >= most):
        return True
    is_more = of_folders < of_files or 2 * len(of_folders) <= len(of_files)
    if is_more and len(of_files) >= most:
        return False
    raise DataError(
        f"{claims[0].label.path}: its folder and its own name are both called as images; name "
        "folders of classes by words, or images and the folders of their objects with a letter, "
        "such as a3.jpg and a3/1.png"
    )


def _by_number(images: Sequence[FileName], labels: Sequence[FileName]) -> dict[str, str]:
    """Pairs with the same number, `img_7` and `label007`, if all labels have one image each.

    Several labels of an image must lie in one folder: `00007_hair`, `00007_skin`.
    """
    by_number: dict[tuple[str | None, int], list[str]] = defaultdict(list)
    for image in images:
        if (number := _number(image)) is not None:
            by_number[image.split, number].append(image.path)
    image_of: dict[str, str] = {}
    for label in labels:
        number = _number(label)
        candidates = [] if number is None else by_number.get((label.split, number), [])
        # All or none: a number that no image has, or several, shows that numbers do not pair here.
        if len(candidates) != 1:
            return {}
        image_of[label.path] = candidates[0]
    # 00007_hair and 00007_skin have two patterns; two labels of one pattern would be a mistake.
    of_images = {(image_of[label.path], label.pattern) for label in labels}
    places = {(image_of[label.path], _folder(label)) for label in labels}
    is_one_each = len(of_images) == len(labels) and len(places) == len(set(image_of.values()))
    return image_of if is_one_each else {}


def _number(name: FileName) -> int | None:
    numbers = re.findall(r"\d+", name.core)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 19 else None


def _by_folder(images: Sequence[FileName], labels: Sequence[FileName]) -> dict[str, str]:
    """Labels in a folder of the image's name, as in `masks/0001/car.png`."""
    by_core: dict[str, list[str]] = defaultdict(list)
    for image in images:
        for name in {image.core, image.stem}:
            by_core[name].append(image.path)
    image_of: dict[str, str] = {}
    for label in labels:
        for folder in reversed(PurePosixPath(label.path).parts[:-1]):
            candidates = by_core.get(folder.lower(), [])
            if len(candidates) == 1:
                image_of[label.path] = candidates[0]
                break
    return image_of


def _by_only_image(images: Sequence[FileName], labels: Sequence[FileName]) -> dict[str, str]:
    """Labels below the folder of one image alone: `s01/masks/car.png` and `s01/image.png`."""
    in_folder: dict[str, list[str]] = defaultdict(list)
    for image in images:
        in_folder[_folder(image)].append(image.path)
    image_of: dict[str, str] = {}
    for label in labels:
        above = map(str, PurePosixPath(label.path).parents)
        there = next((in_folder[folder] for folder in above if folder in in_folder), [])
        if len(there) == 1:
            image_of[label.path] = there[0]
    return image_of
