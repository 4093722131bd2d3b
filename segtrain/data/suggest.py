"""Likely reasons why label ids do not fit a class file."""

from collections.abc import Iterable, Sequence

from segtrain.data.classes import ClassFile
from segtrain.text import MAX_NAME, printable

_CITYSCAPES_CLASSES, _CITYSCAPES_LAST_ID = 19, 33
# More unknown ids than this come from a photograph or from resizing with interpolation.
_MANY_VALUES = 64


def repair_for_ids(counts: dict[int, int], class_file: ClassFile) -> str:
    """The end of a message about unknown ids, from "; " on; empty if no usual mistake fits.

    counts: pixels of each raw id in one label or in many.
    """
    found = set(counts)
    unknown = found - set(class_file.train_id_of)
    num_classes = class_file.num_classes
    if found <= {0, 255} and 255 in unknown:
        return "; this is a 0/255 mask: give the foreground class `ids: [255]` in the class file"
    if unknown == {255} and looks_like_train_ids(counts, class_file):
        return (
            f"; these look like train ids (0..{num_classes - 1} and 255), but the class file wants "
            "the raw ids: use the files with raw ids (Cityscapes: labelIds, not labelTrainIds)"
        )
    if unknown == {255}:
        return f"; if 255 marks pixels to ignore, write {ignoring(class_file, [255])} there"
    if len(unknown) > _MANY_VALUES:
        return "; so many values come from a photograph, JPEG, or resizing with interpolation"
    if not _counts_from_zero(class_file):
        return ""
    if num_classes == _CITYSCAPES_CLASSES and max(unknown - {255}) <= _CITYSCAPES_LAST_ID:
        return (
            "; these look like Cityscapes labelIds: set data.classes: cityscapes and "
            "data.label_format: ids"
        )
    if unknown - {255} == {num_classes}:
        if 0 not in found:
            return (
                f"; the files seem to count from 1, the class file from 0: give the classes "
                f"`ids: [1]` to `ids: [{num_classes}]` there"
            )
        return (
            f"; the class file names 0..{num_classes - 1}: add the class to it, or, if those "
            f"pixels are to be ignored, write {ignoring(class_file, unknown)} there"
        )
    return ""


def ignoring(class_file: ClassFile, ids: Iterable[int]) -> str:
    """The line for the class file that ignores `ids` and all that is ignored now.

    A list in the file replaces the default, [255], so the line must repeat it.
    """
    return f"`ignore_ids: {[*class_file.ignore_ids, *sorted(ids)]}`"


def looks_like_train_ids(counts: dict[int, int], class_file: ClassFile) -> bool:
    """Whether all ids are 0..K-1 or 255, although the class file has other, larger ids."""
    ids = {i for i in counts if i != 255}
    if not ids or _counts_from_zero(class_file):
        return False
    # A class with id 255 is the foreground of a 0/255 mask, not a raw id.
    last = max((i for c in class_file.classes for i in c.ids if i != 255), default=0)
    return max(ids) < class_file.num_classes <= last


def train_ids(ids: Iterable[int]) -> str:
    """A warning about `ids` that look like train ids."""
    return (
        f"no label holds an id above {max(i for i in ids if i != 255)}, although the class file "
        "goes further: these may be train ids where raw ids are expected"
    )


def single_class(present: Sequence[str], *, is_mask: bool) -> str:
    """Why labels with the classes `present`, at most one, cannot be what is meant.

    is_mask: whether the labels are masks of 0 and 255.
    """
    occurs = f"only '{printable(present[0], MAX_NAME)}' ever" if present else "no class ever"
    text = (
        f"{occurs} occurs; every other pixel is ignored: check ids and ignore_ids in the class file"
    )
    if is_mask:
        text += ". For a 0/255 mask give the foreground `ids: [255]` and set `ignore_ids: []`"
    return text


def _counts_from_zero(class_file: ClassFile) -> bool:
    return all(c.ids == (i,) for i, c in enumerate(class_file.classes))
