"""Text in pictures: a line of text as a mask, and labels that a font can draw.

OpenCV 5 has Latin, Greek, Cyrillic, Chinese, Japanese and Korean letters; for older versions there
is Pillow's font, which has ASCII. A missing letter is never drawn as `?`: names would look alike.
"""

import unicodedata
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
    """A label for each class: its name, or `numbered_labels` if the font cannot tell them apart."""
    drawn = [_drawable(printable(name, MAX_NAME)) for name in names]
    return drawn if all(drawn) and len(set(drawn)) == len(drawn) else numbered_labels(names)


def numbered_labels(names: Sequence[str]) -> list[str]:
    """A label for each class: its position in the class file, from 0, and what can be drawn."""
    drawn = [_drawable(printable(name, MAX_NAME)) for name in names]
    return [f"{i} {text or '...'}" for i, text in enumerate(drawn)]


def title_text(text: str) -> str:
    r"""`text` with letters that the font lacks as their number, such as `\u0939`."""
    text = printable(text, 2 * MAX_NAME)
    return _drawable(text) or "".join(
        c if _has_letter(c) else c.encode("unicode_escape").decode()
        for c in unicodedata.normalize("NFC", text)
    )


def _drawable(text: str) -> str | None:
    """`text` in letters of the font, without accents if necessary; None if there are none."""
    composed = unicodedata.normalize("NFC", text)
    decomposed = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    return next((form for form in (composed, plain) if all(map(_has_letter, form))), None)


@lru_cache(maxsize=4096)
def _has_letter(letter: str) -> bool:
    # The fonts do not draw from right to left, and a separate accent beside its letter.
    right_to_left = unicodedata.bidirectional(letter) in ("R", "AL")
    is_accent = unicodedata.category(letter).startswith("M")
    if right_to_left or is_accent or not letter.isprintable():
        return False
    if letter.isascii():
        return True
    drawn = text_mask(letter, 16)
    return bool(drawn.any()) and not np.array_equal(drawn, text_mask(_NO_LETTER, 16))
