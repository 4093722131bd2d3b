"""Text in pictures: a line of letters as a mask, and which letters there are.

Fonts come from the libraries, not from the machine, so that pictures look the same everywhere.
OpenCV 5 has one with Latin, Greek, Cyrillic, Chinese, Japanese and Korean letters; where OpenCV is
older, Pillow's has the letters of ASCII. Letters that a font lacks are never drawn as `?`, which
would make different texts look alike: `drawable` says what can be drawn.
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
# In every font a noncharacter looks like any other letter that it lacks.
_NO_LETTER = "\uffff"
# Written from right to left, some with letters that change their form by their place in a word.
_RIGHT_TO_LEFT = ("R", "AL")


def text_mask(text: str, size_px: int) -> np.ndarray:
    """One line of `text`, (height, width) uint8 with 255 where it is covered with ink.

    The height depends on the size of the letters alone.
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


def drawable(text: str) -> str | None:
    """`text` in letters that can be drawn, if need be without accents; None: there are none."""
    for form in ("NFC", "NFKD"):
        letters = unicodedata.normalize(form, text)
        if form == "NFKD":
            letters = "".join(c for c in letters if not unicodedata.combining(c))
        if all(_has_letter(c) for c in letters):
            return letters
    return None


def class_labels(names: Sequence[str]) -> list[str]:
    """What to write for each class: its name, or `7 ...` where letters of the name are missing.

    The number is the place in the class file, from 0. No two labels are alike if no two names are:
    names that differ by accents only, which had to be dropped, get their number before them. Where
    a label has a number, so do names that begin with the number of a class and a blank.
    """
    drawn = [_drawn(name) for name in names]
    times = Counter(drawn)
    numbered = {i for i, text in enumerate(drawn) if text is None or times[text] > 1}
    if numbered:
        numbered |= {i for i, text in enumerate(drawn) if _is_like_a_number(text, len(names))}
    return [
        label if i in numbered or text is None else text
        for i, (text, label) in enumerate(zip(drawn, numbered_labels(names), strict=True))
    ]


def numbered_labels(names: Sequence[str]) -> list[str]:
    """The same with the number of every class first, for labels that may be cut at the end."""
    return [f"{i} {_drawn(name) or '...'}" for i, name in enumerate(names)]


def title_text(text: str) -> str:
    r"""`text` with every letter that cannot be drawn as its number, such as `\u0939`."""
    text = printable(text, 2 * MAX_NAME)
    return drawable(text) or "".join(
        c if _has_letter(c) else c.encode("unicode_escape").decode()
        for c in unicodedata.normalize("NFC", text)
    )


def _is_like_a_number(text: str | None, num_classes: int) -> bool:
    match = re.match(r"([0-9]+) ", text or "")
    return match is not None and int(match[1]) < num_classes


def _drawn(name: str) -> str | None:
    return drawable(printable(name, MAX_NAME)) or None


@lru_cache(maxsize=4096)
def _has_letter(letter: str) -> bool:
    if letter == " ":
        return True
    if not letter.isprintable() or unicodedata.bidirectional(letter) in _RIGHT_TO_LEFT:
        return False
    if unicodedata.category(letter).startswith("M"):
        return False  # an accent that is no part of a letter would stand beside it
    if letter.isascii():
        return True
    drawn = text_mask(letter, 16)
    return bool(drawn.any()) and not np.array_equal(drawn, text_mask(_NO_LETTER, 16))
