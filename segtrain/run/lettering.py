"""Text in pictures: a line of text as a mask, and labels that a font can draw.

Fonts come from the libraries, not from the machine, so that pictures look the same everywhere.
OpenCV 5 has Latin, Greek, Cyrillic, Chinese, Japanese and Korean letters; for older versions there
is Pillow's font, which has ASCII. A missing letter is never drawn as `?`: different names would
look alike.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from segtrain.text import MAX_NAME, printable

# A little above regular (400), whose lines are thin at these sizes.
_WEIGHT = 500
# A noncharacter: every font draws its sign for a missing letter.
_NO_LETTER = "\uffff"


def text_mask(text: str, size_px: int) -> np.ndarray:
    """One line of `text`: (height, width) uint8, 255 where there is ink.

    The height depends on `size_px` only.
    """
    height, baseline = round(1.4 * size_px), round(1.05 * size_px)
    if hasattr(cv2, "FontFace"):
        font = cv2.FontFace("sans")
        left, _, width, _ = cv2.getTextSize((0, 0), text, (0, 0), font, size_px, _WEIGHT)
        mask = np.zeros((height, max(1, left + width + 1)), dtype=np.uint8)
        cv2.putText(mask, text, (0, baseline), (255,), font, size_px, _WEIGHT)
        return mask
    font = ImageFont.load_default(size_px)
    picture = Image.new("L", (max(1, round(font.getlength(text)) + 1), height))
    ImageDraw.Draw(picture).text((0, baseline), text, fill=255, font=font, anchor="ls")
    return np.array(picture)


def class_labels(names: Sequence[str]) -> list[str]:
    """A label for each class: its name, or `7 ...` if the font lacks letters of the name.

    The number is the position in the class file, from 0. Different names get different labels: the
    number also comes before names that differ only by accents which the font lacks. If any label
    has a number, so has every name that itself begins with the number of a class.
    """
    drawn = [_drawn(name) for name in names]
    times = Counter(drawn)
    numbered = {i for i, text in enumerate(drawn) if text is None or times[text] > 1}
    if numbered:
        numbered |= {i for i, text in enumerate(drawn) if _has_class_number(text, len(names))}
    labels = numbered_labels(names)
    return [labels[i] if i in numbered else text for i, text in enumerate(drawn)]


def numbered_labels(names: Sequence[str]) -> list[str]:
    """The same with a number before every name, for labels whose end may be cut off."""
    return [f"{i} {_drawn(name) or '...'}" for i, name in enumerate(names)]


def title_text(text: str) -> str:
    r"""`text` with letters that the font lacks as their number, such as `\u0939`."""
    text = printable(text, 2 * MAX_NAME)
    return _drawable(text) or "".join(
        c if _has_letter(c) else c.encode("unicode_escape").decode()
        for c in unicodedata.normalize("NFC", text)
    )


def _drawn(name: str) -> str | None:
    return _drawable(printable(name, MAX_NAME)) or None


def _drawable(text: str) -> str | None:
    """`text` in letters of the font, without accents if necessary; None if there are none."""
    composed = unicodedata.normalize("NFC", text)
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    return next((form for form in (composed, plain) if all(map(_has_letter, form))), None)


def _has_class_number(text: str | None, num_classes: int) -> bool:
    match = re.match(r"([0-9]+) ", text or "")
    return match is not None and int(match[1]) < num_classes


@lru_cache(maxsize=4096)
def _has_letter(letter: str) -> bool:
    if letter == " ":
        return True
    # The fonts do not draw from right to left.
    if not letter.isprintable() or unicodedata.bidirectional(letter) in ("R", "AL"):
        return False
    if unicodedata.category(letter).startswith("M"):
        return False  # a separate accent would be drawn beside its letter
    if letter.isascii():
        return True
    drawn = text_mask(letter, 16)
    return bool(drawn.any()) and not np.array_equal(drawn, text_mask(_NO_LETTER, 16))
