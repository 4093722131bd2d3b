"""Opens a split of a data set, from its files or from a pack."""

from collections.abc import Collection

from segtrain.config import DataConfig
from segtrain.data.class_file import load_class_file
from segtrain.data.dataset import SegDataset, UnlabelledDataset
from segtrain.data.layouts import list_split
from segtrain.data.pack.opening import open_packed


def open_dataset(
    data: DataConfig, split: str, *, hidden: Collection[str] = (), labelled: bool = True
) -> SegDataset:
    """The images and labels of `split`, listed and complete, not yet opened; of a pack if asked.

    labelled: False for a split without labels.

    hidden: "data.classes" for a class file, "data.eval_split" for a list file, if messages must
        show none of its lines: a checkpoint names it, not the user.

    Raises:
        ConfigError: no such class file, or it is wrong; or `data.pack` was made with others.
        DataError: no such split, no images, or files missing, all of them counted; or a pack that
            is damaged or older than its files.
    """
    classes = load_class_file(
        data.classes, label_format=data.label_format, quoted="data.classes" not in hidden
    )
    quoted = "data.eval_split" not in hidden
    if data.pack is not None:
        return open_packed(data, split, classes, quoted=quoted, labelled=labelled)
    listing = list_split(data, split, quoted=quoted, labelled=labelled)
    return (SegDataset if labelled else UnlabelledDataset)(
        listing.pairs,
        classes,
        split=split,
        label_format=data.label_format,
        warnings=listing.warnings_of_start(),
        may_exclude=split == data.train_split,
    )
