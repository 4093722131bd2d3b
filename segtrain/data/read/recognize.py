"""What a folder seems to hold, by its file names: for the first message about it."""

import os
import re
import shlex
from collections import Counter
from itertools import islice
from pathlib import Path

from segtrain.data.read.find import IMAGE_SUFFIXES
from segtrain.files import walk
from segtrain.text import counted, first_of, printable

_MOST_FOLDERS = 1000
_MOST_NAMES = 100_000

# A file is what the first of these says that matches the end of its path in small letters.
_SIGNS = {
    "a COCO export of Roboflow": r"_annotations\.coco\.json",
    "masks of Roboflow": r"_classes\.csv",
    "annotations of COCO": r"(instances_[^/]*|annotations/[^/]*|coco[^/]*|result)\.json",
    "an export of Label Studio": r"project-\d+-at-[^/]*\.json",
    "a data set of nnU-Net": r"imagestr/[^/]*",
    "annotations of YOLO": r"data\.ya?ml",
    "annotations of VIA": r"via_[^/]*\.json",
    "annotations of Supervisely": r"ann/[^/]*\.(jpe?g|png|tiff?|bmp|webp)\.json",
    "annotations of CVAT": r"annotations\.xml",
    "masks of CVAT": r"labelmap\.txt",
    "Pascal VOC's boxes, which are no outlines": r"annotations/[^/]*\.xml",
    "a data set of mmsegmentation": r"ann_dir/[^/]*/[^/]*\.png",
}
_PATTERNS = {what: re.compile(rf"(^|.*/){end}") for what, end in _SIGNS.items()}


def with_recognized(message: str, folder: Path) -> str:
    """`message`, and below it what `folder` holds."""
    return "\n".join(filter(None, (message, recognize(folder))))


def recognize(folder: Path) -> str:
    """A line about what `folder` holds and the command that makes a config of it; "" if nothing.

    Looks at names only, and at the first 100,000 of them.
    """
    suffixes: Counter[str] = Counter()
    signs: dict[str, str] = {}
    try:
        for here, names in islice(walk(folder, hidden=False), _MOST_FOLDERS):
            # LabelMe writes NAME.json beside the image NAME.
            stems = {os.path.splitext(name)[0] for name in names if _is_image(name)}
            for name in names:
                stem, suffix = os.path.splitext(name)
                path = name if here == folder else f"{here.relative_to(folder)}/{name}"
                if _is_image(name):
                    suffixes[suffix.lower()] += 1
                elif suffix == ".json" and stem in stems:
                    signs.setdefault("annotations of LabelMe", path)
                lower = path.lower()
                what = next((w for w, p in _PATTERNS.items() if p.fullmatch(lower)), None)
                if what:
                    signs.setdefault(what, path)
            if suffixes.total() > _MOST_NAMES:
                break
    except OSError:
        return ""  # the message that this line follows is about something else
    facts = [counted(n, f"{end} file", f"{end} files") for end, n in suffixes.most_common()]
    facts += [f"{what} ({printable(path)})" for what, path in signs.items()]
    if not facts:
        return ""
    make = f"segtrain init {shlex.quote(str(folder))}"
    return f"{printable(folder)} holds {first_of(facts, 8)}; {printable(make)} makes a config of it"


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)
