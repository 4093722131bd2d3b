"""Which names are of changed copies of one picture: flipped, turned, brightened ones beside it."""

import re
from collections import Counter
from collections.abc import Sequence

_ROBOFLOW = re.compile(r"(_(jpe?g|png|bmp|tiff?|webp))?\.rf\.[0-9a-z]{6,}$", re.IGNORECASE)
_NUMBER = r"[-_]?\d{0,3}"
_CHANGES = (
    rf"(h|v|hor|vert|horizontal|vertical)?[-_]?flip(ped)?({_NUMBER}|[-_]?(lr|ud|h|v|x|y|hv))|fliplr|"
    rf"flipud|mirror(ed)?|rot(at(ed?|ion))?{_NUMBER}|aug(mented|mentation)?{_NUMBER}|copy{_NUMBER}|"
    r"blur(red)?|nois[ey]|bright(er|ness)?|dark(er)?|contrast|gamma|jitter(ed)?|transposed?|orig(inal)?"
)
_AT_END = re.compile(rf"[-_. ]+({_CHANGES})$|[ ]?\(\d+\)$", re.IGNORECASE)
_AT_START = re.compile(rf"^({_CHANGES})[-_. ]+(?=.)", re.IGNORECASE)


def source_of(name: str) -> str:
    """The name without what copies of a picture are called; folders stay.

    >>> source_of("images/IMG_7_jpg.rf.0a1b2c3d4e"), source_of("a/img_001_flip_rot90")
    ('images/IMG_7', 'a/img_001')
    """
    folder, slash, stem = name.rpartition("/")
    stem = _ROBOFLOW.sub("", stem)
    while (shorter := _AT_START.sub("", _AT_END.sub("", stem))) not in ("", stem):
        stem = shorter
    return folder + slash + stem


def copies_in(names: Sequence[str]) -> int:
    """How many of the names are of a picture that another one of them shows too.

    >>> copies_in(["img_1", "img_1_flip", "img_2"])
    2
    """
    numbers = Counter(map(source_of, names))
    return sum(number for number in numbers.values() if number > 1)
