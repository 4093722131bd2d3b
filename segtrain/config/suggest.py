"""The known word that an unknown word may be a misspelling of."""

import difflib
import re
from collections.abc import Iterable, Mapping


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` may be a misspelling or a part of; None if no choice is similar."""
    choices = list(choices)
    # At difflib's usual cutoff of 0.6 "unet" is similar to "pspnet".
    similar = difflib.get_close_matches(word, choices, n=1, cutoff=0.75)
    if not similar:
        parts = [choice for choice in choices if _is_part(word, choice) or _is_part(choice, word)]
        similar = difflib.get_close_matches(word, parts, n=1, cutoff=0)
    return similar[0] if similar else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean ...?` or ""; a mapping gives what to show for each choice."""
    near = nearest(word, choices)
    if near is None:
        return ""
    return f"; did you mean {choices[near] if isinstance(choices, Mapping) else near}?"


def _is_part(short: str, long: str) -> bool:
    """Whether all words of `short` are words of `long`: "crop" and "crop_size"."""
    words = set(re.findall(r"[a-z]{3,}", short.lower()))
    return bool(words) and words <= set(re.findall(r"[a-z]{3,}", long.lower()))
