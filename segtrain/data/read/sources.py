"""Which images belong together: by a pattern (patients, drives), or as copies of one picture.

Copies are flipped, turned, brightened ones, as their names say.
"""

import re
from collections import Counter
from collections.abc import Sequence

from segtrain.errors import ConfigError
from segtrain.text import counted, first_of

_ROBOFLOW = re.compile(r"(_(jpe?g|png|bmp|tiff?|webp))?\.rf\.[0-9a-z]{6,}$", re.IGNORECASE)
_NUMBER = r"[-_]?\d{0,3}"
_CHANGES = (
    rf"(h|v|hor|vert|horizontal|vertical)?[-_]?flip(ped)?({_NUMBER}|[-_]?(lr|ud|h|v|x|y|hv))|fliplr|"
    rf"flipud|mirror(ed)?|rot(at(ed?|ion))?{_NUMBER}|aug(mented|mentation)?{_NUMBER}|copy{_NUMBER}|"
    r"blur(red)?|nois[ey]|bright(er|ness)?|dark(er)?|contrast|gamma|jitter(ed)?|transposed?|orig(inal)?"
)
_AT_END = re.compile(rf"[-_. ]+({_CHANGES})$", re.IGNORECASE)
_AT_START = re.compile(rf"^({_CHANGES})[-_. ]+(?=.)", re.IGNORECASE)
# More images of one such name are numbered by it: aug_1 to aug_500.
_MOST_COPIES = 24
# A number, as of a patient, a counter of one or two digits, and perhaps nnU-Net's channel.
_COUNTED = re.compile(
    r"(.*\d[^/_\-. ]*)[/_\-. ]+[a-z]{0,10}[-_]?(?:\d{1,2}|(?:19|20)\d{6})(_0000)?\D*",
    re.IGNORECASE,
)
_MOST_COUNTED = 24
_SUBJECT = re.compile(r"(?:.*/)?(sub-[a-z0-9]+)[_/].*", re.IGNORECASE)  # as BIDS has it
_TIME = re.compile(
    r"(visit|session|ses|time|timepoint|week|month|year|day|scan|exam|t)[-_ ]?\d{1,4}"
    r"|(19|20)\d\d|baseline|follow[-_ ]?up\d*",
    re.IGNORECASE,
)


def groups_of(pattern: re.Pattern[str], paths: Sequence[str]) -> list[str]:
    r"""The group of each image: what the pattern finds in its path, or the parentheses in it.

    >>> groups_of(re.compile(r"(p\d+)_"), ["a/p1_0.png", "a/p1_1.png", "b/p2_0.png"])
    ['p1', 'p1', 'p2']

    Raises:
        ConfigError: it finds nothing in one of them.
    """
    matches = [pattern.search(path) for path in paths]
    if missing := [path for path, match in zip(paths, matches, strict=True) if match is None]:
        what = f"{counted(len(missing), 'image has', 'images have')} no group: {first_of(missing)}"
        raise ConfigError(f"--group {pattern.pattern}: {what}")
    return [" ".join(map(str, match.groups() or [match.group()])) for match in matches]


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


def sources_of(names: Sequence[str]) -> list[str]:
    """The source of each name, by all of them; a name without copies is its own source,
    and so is one of too many.

    `photo (2)` is a copy where there is a `photo`; a folder of `photo (1)`, `photo (2)` ... has
    none.

    >>> sources_of(["a_flip", "a", "b (1)", "b (2)", "c", "c (1)"])
    ['a', 'a', 'b (1)', 'b (2)', 'c', 'c']
    """
    sources = list(map(source_of, names))
    # Before any is changed: `photo (2)` is a copy only where `photo` itself is there.
    there = set(sources)
    for i, source in enumerate(sources):
        bare = re.sub(r" ?\(\d+\)$", "", source)
        sources[i] = bare if bare in there else source
    sizes = Counter(sources)
    return [
        source if 1 < sizes[source] <= _MOST_COPIES and len(sizes) > 1 else name
        for name, source in zip(names, sources, strict=True)
    ]


def without_times(name: str) -> str:
    """A path without folders that are called as a time is, such as `visit2` or `2019`.

    >>> without_times("visit1/p01"), without_times("p01/t1"), without_times("baseline/p02")
    ('p01', 'p01/t1', 'p02')
    """
    *folders, last = name.split("/")
    # Of a file that is called as a time, or has no number, the folders say the patient.
    if _TIME.fullmatch(last) or not re.search(r"\d", last):
        return name
    return "/".join([*(x for x in folders if not _TIME.fullmatch(x)), last])


def stems_of(names: Sequence[str]) -> list[str]:
    """Each name without its counter, as of the scans of a patient; else the name.

    Else: all names have one stem, or one is of more names than a patient has scans.

    >>> stems_of(["p01_t1", "p01_t2", "p02_t1"]), stems_of(["2012_1", "2012_2"])
    (['p01', 'p01', 'p02'], ['2012_1', '2012_2'])
    """
    stems = {name: _stem(without_times(name)) for name in {*names}}
    sizes = Counter(stems.values())
    if len(sizes) < 2 or max(sizes.values()) > _MOST_COUNTED:
        return list(names)
    return [stems[name] for name in names]


def _stem(name: str) -> str:
    match = _SUBJECT.fullmatch(name) or _COUNTED.fullmatch(name)
    return match[1] if match else name
