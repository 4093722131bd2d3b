"""The whole name of the image begins or ends that of the label; the rest may name a class.

    images/001.jpg      masks/cat_001.png       masks/big_dog_001.png
    images/002.jpg      masks/cat_002.png
    images/img_2b.jpg   masks/img_2b_part7.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
masks/cat_001.png: images/001.jpg
masks/big_dog_001.png: images/001.jpg
masks/cat_002.png: images/002.jpg
masks/img_2b_part7.png: images/img_2b.jpg
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from segtrain.desk.survey.conventions.claims import OwnerClaim, has_letter, nearest
from segtrain.desk.survey.file_names import FileName


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """The longest name counts: of img_1 and img_1_flip, img_1_flip_car is of img_1_flip."""
    by_stem: dict[str, list[FileName]] = defaultdict(list)
    for image in images:
        by_stem[image.stem].append(image)
    owners: dict[str, str] = {}
    whole: set[str] = set()
    unclear: list[str] = []
    for label in labels:
        inside = [part for part in _ends(label.stem) if part in by_stem]
        if not inside:
            continue
        longest = max(inside, key=len)
        fitting = nearest(label, by_stem[longest])
        # cat_tree.png is of cat.jpg or of tree.jpg.
        if len(fitting) > 1 or any(part not in longest for part in inside):
            unclear.append(label.path)
        elif fitting:
            owners[label.path] = fitting[0].path
            if has_letter(fitting[0].stem):
                whole.add(label.path)
    return OwnerClaim(owners, whole, unclear=unclear)


def _ends(stem: str) -> Iterator[str]:
    """What begins or ends a name, up to a sign; a number only if no other number is beside it.

    obj_1_3 is of the object 3 of an image 1, perhaps; A1_3 is of 3.
    """
    for sign in re.finditer(r"[_\-. ]+", stem):
        before, after = stem[: sign.start()], stem[sign.end() :]
        for part, rest in ((before, after), (after, before)):
            has_number = any(x.isdigit() for x in re.split(r"[_\-. ]+", rest))
            if has_letter(part) or not has_number:
                yield part
