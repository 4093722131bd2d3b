"""Opens a split of a data set, from its files or from a pack of them."""

from segtrain.config import DataConfig
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.find import Listing
from segtrain.data.read.image import form_of
from segtrain.data.read.label_formats import label_format_of
from segtrain.data.read.layouts import list_split
from segtrain.data.read.neighbours import with_neighbour_files
from segtrain.data.read.raster import split_rasters


def open_dataset(data: DataConfig, split: str, *, labelled: bool = True) -> SegDataset:
    """The images and labels of `split`, listed and complete, not yet read; of a pack if asked.

    labelled: False for a split without labels; in a pack, all their pixels are ignored.

    Raises:
        ConfigError: no such class file, or it is wrong; or `data.pack` was made with others, or
            does not hold the split.
        DataError: no such split, no images, or files missing, all of them counted; or there is no
            pack, it is damaged or older than its files.
    """
    classes = label_format_of(data.label_format).class_file(data.classes)
    if data.pack is not None:
        from segtrain.data.pack.open_pack import open_packed

        return open_packed(data, split, classes, labelled=labelled)
    listing = list_split(data, split, labelled=labelled)
    return dataset_of(listing, data, split, classes, labelled=labelled)


def dataset_of(
    listing: Listing, data: DataConfig, split: str, classes: ClassFile, *, labelled: bool = True
) -> SegDataset:
    """The files of `listing` as a data set; rasters are cut into windows."""
    # Before neighbours, which are refused for windows.
    pairs = split_rasters(listing.pairs, data, labelled=labelled)
    pairs = with_neighbour_files(pairs, data.neighbours) if data.neighbours else pairs
    return SegDataset(
        pairs,
        classes,
        split=split,
        form=form_of(data, pairs),
        label_format=data.label_format,
        warnings=listing.notes,
        may_exclude=split == data.train_split,
        labelled=labelled,
    )
