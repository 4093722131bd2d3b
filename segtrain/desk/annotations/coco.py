"""COCO's JSON of instances: polygons, run lengths and crowds; also as Roboflow exports it.

The polygons of one annotation are joined: only run lengths have holes. A crowd is drawn as its
class, as in COCO-Stuff. Some writers quote ids, give mappings by id instead of lists, or leave out
the brackets around a single polygon.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.desk.annotations.regions import (
    Annotated,
    Findings,
    Region,
    entries,
    image_size,
    mask_of_runs,
    read_text,
)
from segtrain.files import parse_json


def read(path: Path, findings: Findings) -> tuple[list[str], list[Annotated]]:
    """The classes and the images of one file."""
    file = parse_json(read_text(path))
    categories = dict(_by_id(file["categories"]))
    names = {key: category["name"] for key, category in categories.items()}
    images = {
        key: Annotated(path, image["file_name"], image_size(image, "height", "width"), [])
        for key, image in _by_id(file["images"])
    }
    if len(images) < len(file["images"]) or len(names) < len(file["categories"]):
        raise ValueError("two images or two categories have one id")
    used = set()
    for i, annotation in entries(file["annotations"]):
        with findings.refusing(place := f"{path}: annotations[{i}]"):
            if "segments_info" in annotation:
                raise ValueError("panoptic: its labels are PNG files, not this file")
            shown_in, category = str(annotation["image_id"]), str(annotation["category_id"])
            if shown_in not in images or category not in names:
                raise ValueError("its image_id or category_id is not in the file")
            image, name = images[shown_in], names[category]
            drawn = annotation.get("segmentation")
            if not drawn:
                findings.no_region("box", place)
            # Run lengths, as of a crowd.
            elif isinstance(drawn, dict):
                image.regions.append(Region.of_mask(name, _mask(drawn, image.size), image.size))
            else:
                # Numbers without inner brackets are a single polygon.
                outlines = drawn if isinstance(drawn[0], list) else [drawn]
                image.regions.append(Region.of_outlines(name, *outlines))
            used.add(name)
            if annotation.get("iscrowd"):
                findings.note(place, "a crowd, drawn as its class")
    # Roboflow adds the group of all classes as one more category, which nothing has.
    parents = ((c.get("supercategory"), c["name"]) for c in categories.values())
    groups = {parent for parent, name in parents if parent != name} - used
    return [name for name in names.values() if name not in groups], list(images.values())


def _by_id(found: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a list, or of a mapping by id, with their ids as text."""
    for key, entry in entries(found):
        name = str(entry.get("id", key) if isinstance(found, dict) else entry["id"])
        if isinstance(found, dict) and name != key:
            raise ValueError(f"the entry with the key {key} has the id {name}")
        yield name, entry


def _mask(found: dict[str, Any], size: tuple[int, int] | None) -> np.ndarray:
    """The mask (H, W) of run lengths, which go column by column."""
    if size is None or tuple(found["size"]) != size:
        raise ValueError("the size of its run lengths is not height and width of the image")
    counts = found["counts"]
    return mask_of_runs(unpacked(counts) if isinstance(counts, str) else counts, size[::-1]).T


def unpacked(text: str) -> list[int]:
    """The run lengths in COCO's compressed text, by the rule of `rleFrString` in its maskApi.c.

    pycocotools itself reads past the end of a text that is cut off.

    Raises:
        ValueError: the text is damaged.
    """
    runs, value, bits = [], 0, 0
    for digit in (ord(character) - 48 for character in text):
        if not 0 <= digit < 64 or bits > 30:  # a run of more than 2 ** 34 pixels
            raise ValueError("damaged run lengths")
        value |= (digit & 31) << bits
        bits += 5
        if digit & 32:
            continue
        signed = value - (1 << bits) if digit & 16 else value
        # From the fourth on, a run is stored as its difference from the last but one.
        runs.append(signed + runs[-2] if len(runs) > 2 else signed)
        value = bits = 0
    if bits:
        raise ValueError("damaged run lengths")
    return runs
