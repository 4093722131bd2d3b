"""YOLO's outlines: a text file for each image, and the names of the classes in a data.yaml.

A line is a class and the points of a polygon, as fractions of width and height. An image without a
text file, or with an empty one, is background.
"""

from pathlib import Path

import numpy as np

from segtrain.config.strict_yaml import foreign_yaml
from segtrain.data.read.find import IMAGE_SUFFIXES, visible_files
from segtrain.desk.annotations.regions import Annotated, Findings, Region, read_text

_BOX_COLUMNS = 5


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """The classes of a data.yaml, and the images below its folder that have labels.

    As in Ultralytics, the label of a/images/b/c.jpg is a/labels/b/c.txt. A label may also lie
    beside its image.
    """
    names, root = _class_names(path), path.parent
    files = set(visible_files(root))
    folders = {file.rpartition("/")[0] for file in files if file.endswith(".txt")}
    images = []
    for file in sorted(files):
        if not file.lower().endswith(IMAGE_SUFFIXES):
            continue
        beside = file.rpartition(".")[0] + ".txt"
        above, separator, below = f"/{beside}".rpartition("/images/")
        label = f"{above}/labels/{below}"[1:] if separator else beside
        if label in files or beside in files:
            label = label if label in files else beside
            regions = _regions(root / label, names, findings)
        # Beside labelled images: without a file there is no object on it.
        elif separator and label.rpartition("/")[0] in folders:
            regions = []
        else:
            continue  # an image of something else
        images.append(Annotated(root / label, file, None, regions, are_fractions=True))
    return list(names.values()), images


def _class_names(path: Path) -> dict[int, str]:
    """The names by number, from a list or a mapping."""
    try:
        # All values as text: a class may be called `no`.
        content = foreign_yaml(read_text(path), as_text=True)
        names = content["names"]
        if isinstance(names, str):
            raise ValueError
        pairs = names.items() if isinstance(names, dict) else enumerate(names)
        by_number = {int(number): name for number, name in pairs}
    except (LookupError, TypeError, ValueError):
        raise ValueError("expected `names`, a list of class names") from None
    if "kpt_shape" in content:
        raise ValueError("kpt_shape: key points, which are no outlines")
    return by_number


def _regions(path: Path, names: dict[int, str], findings: Findings) -> list[Region]:
    regions = []
    for i, line in enumerate(read_text(path).split(b"\n"), start=1):
        with findings.refusing(place := f"{path}:{i}"):
            numbers = np.array(line.split(), np.float64)
            if numbers.size == _BOX_COLUMNS:
                findings.no_region("box", place)
            elif numbers.size and numbers[0] not in names:
                raise ValueError("expected a class of the data.yaml, then x and y")
            elif numbers.size:
                regions.append(Region.of_outlines(names[numbers[0]], numbers[1:]))
    return regions
