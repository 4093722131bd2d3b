"""Likely reasons why label ids do not fit a class file, from the mistakes people report most."""

from collections.abc import Iterable

from segtrain.data.classes import ClassFile

_CITYSCAPES_CLASSES, _CITYSCAPES_LAST_ID = 19, 33
# More values than any label needs: a photograph, or a label resized with interpolation.
_MANY_VALUES = 64


def repair_for_ids(counts: dict[int, int], class_file: ClassFile) -> str:
    """The end of a message about unknown ids, from "; " on; empty if nothing typical is seen.

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
        return "; these look like Cityscapes labelIds: set data.classes: cityscapes"
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
    """The line of a class file that ignores `ids` too.

    Whole, with what is ignored now: a list in the file replaces the default, [255].
    """
    return f"`ignore_ids: {[*class_file.ignore_ids, *sorted(ids)]}`"


def looks_like_train_ids(counts: dict[int, int], class_file: ClassFile) -> bool:
    """Whether the ids are 0 .. K-1 and 255 only, although the class file numbers them otherwise."""
    ids = {i for i in counts if i != 255}
    if not ids or _counts_from_zero(class_file):
        return False
    # The 255 of a 0/255 mask is no sign of raw ids.
    last = max((i for one in class_file.classes for i in one.ids if i != 255), default=0)
    return max(ids) < class_file.num_classes <= last


def _counts_from_zero(class_file: ClassFile) -> bool:
    return all(one.ids == (i,) for i, one in enumerate(class_file.classes))
