"""What a data layout finds for a split: pairs of image and label, and what is wrong or odd."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.text import counted, printable

# Other formats are refused: two decoders are enough to keep safe, and both keep what they store.
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
LABEL_SUFFIX = ".png"
# Images of these formats are reported, because they look like lost data; other files are not.
OTHER_IMAGES = (
    *(".apng", ".arw", ".avif", ".bmp", ".cr2", ".dib", ".dng", ".exr", ".gif", ".hdr", ".heic"),
    *(".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpf", ".jpx", ".jxl", ".nef", ".npy", ".pbm"),
    *(".pgm", ".pnm", ".ppm", ".raw", ".tga", ".tif", ".tiff", ".webp"),
)
MAX_SHOWN = 10
_FEW = 3


class Pair(NamedTuple):
    """One image with its label. `name` is unique in the split: a relative path without suffix."""

    image: Path
    label: Path
    name: str


class Listing(NamedTuple):
    """What a layout finds for one split.

    pairs: images whose label exists, sorted by name.
    problems: a line for each thing that makes the split unusable, such as a missing label.
    warnings: a line for each oddity that does not.
    extra_labels: labels without an image, which are not used.
    left_out: images of formats that are not read and that exist in no other format.
    notes: further lines that training and evaluation show when they start.
    """

    pairs: Sequence[Pair]
    problems: list[str]
    warnings: Sequence[str] = ()
    extra_labels: Sequence[Path] = ()
    left_out: Sequence[Path] = ()
    notes: Sequence[str] = ()

    def warnings_of_start(self) -> list[str]:
        """What training and evaluation must say when they start."""
        lines = list(self.notes)
        if self.left_out:
            lines.append(f"{left_out_text(self.left_out)}: {first_names(self.left_out, _FEW)}")
        if self.extra_labels:
            text = extra_labels_text(self.extra_labels)
            lines.append(f"{text}: {first_names(self.extra_labels, _FEW)}")
        return lines


def extra_labels_text(files: Sequence[Path]) -> str:
    """How many labels have no image."""
    words = "label has no image and is not used", "labels have no image and are not used"
    return counted(len(files), *words)


def left_out_text(files: Sequence[Path]) -> str:
    """How many images are left out because of their format, with the repair."""
    suffixes = sorted({file.suffix.lower() for file in files})
    images = counted(len(files), "image is", "images are")
    return f"{images} left out: {' '.join(suffixes)} is not read, only JPEG and PNG; convert to PNG"


def first_lines(title: str, findings: Sequence[str]) -> str:
    """`title` and up to MAX_SHOWN findings below it; a single finding stands on the same line."""
    if len(findings) == 1:
        return f"{title}: {findings[0]}"
    shown = [f"  {finding}" for finding in findings[:MAX_SHOWN]]
    if len(findings) > MAX_SHOWN:
        shown.append(f"  and {len(findings) - MAX_SHOWN} more")
    return "\n".join([f"{title}: {len(findings)} problems", *shown])


def first_names(names: Sequence[object], limit: int = MAX_SHOWN, *, separator: str = ", ") -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(printable(name) for name in names[:limit]) + more
