"""volumes.json: where the slices of `segtrain data import` lie in their volumes."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from segtrain.data.read.image_formats import read_stored
from segtrain.data.read.volumes import AXES, nifti_library, write_volume
from segtrain.errors import DataError
from segtrain.files import os_errors_as, read_bytes
from segtrain.text import counted, first_of, printable

CUT_VOLUMES_FILE = "volumes.json"


class CutVolume(BaseModel):
    """A volume and its slices: names below the root, without suffix, in order.

    size: (height, width) of each. spacing_mm, stored: as of Stack; stored and axis are None for
    TIFFs, which say no place.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    slices: list[str]
    size: tuple[int, int]
    axis: Literal["x", "y", "z"] | None
    spacing_mm: tuple[float, float, float] | None
    stored: tuple[tuple[int, int, int], list[list[float]], int] | None


# The content of the file: volumes by their names.
CUT_VOLUMES = TypeAdapter(dict[str, CutVolume])


def read_cut_volumes(root: Path) -> dict[str, CutVolume]:
    """Those below the folder of an import, by name; empty: no volumes were cut there.

    DataError: the file is damaged.
    """
    path = root / CUT_VOLUMES_FILE
    if not path.is_file():
        return {}
    with os_errors_as(DataError, path):
        content = read_bytes(path)
    with suppress(ValueError):  # another program's file of this name says nothing of slices
        found = json.loads(content)
        ours = isinstance(found, dict) and all(
            isinstance(x, dict) and "slices" in x for x in found.values()
        )
        if not ours:
            return {}
    try:
        return CUT_VOLUMES.validate_json(content)
    except ValidationError as error:
        what = f"damaged: {printable(error, 300)}; import the volumes again"
        raise DataError(f"{printable(path)}: {what}") from None


def places_of(
    volumes: Mapping[str, CutVolume], root: Path, images: Iterable[Path]
) -> list[tuple[str, int] | None]:
    """The volume of each image, and its number there; None: it is no slice of these."""
    places = {x: (name, i) for name, v in volumes.items() for i, x in enumerate(v.slices)}
    return [places.get(os.path.splitext(os.path.relpath(x, root))[0]) for x in images]


def join_slices(volumes: Mapping[str, CutVolume], folder: Path) -> list[str]:
    """Writes volumes/NAME.nii.gz below `folder`, of the label maps of slices there, PNGs.

    They lie where their sources do; TIFF stacks are left out. Returns what to say.
    """
    num_done, parts = 0, []
    for name, volume in volumes.items():
        files = [path for x in volume.slices if (path := folder / f"{x}.png").is_file()]
        if volume.stored is None or not files:
            continue
        if len(files) < len(volume.slices):
            parts.append(f"{name} ({len(files)} of {len(volume.slices)} slices)")
            continue
        shape, affine, units = volume.stored
        image = nifti_library().Nifti1Image(np.zeros(shape, np.uint8), np.array(affine))
        image.header["xyzt_units"] = units
        labels = np.stack([read_stored(file)[..., 0] for file in files])
        output = folder / "volumes" / f"{name}.nii.gz"
        write_volume(output, labels, image, AXES.index(volume.axis))
        num_done += 1
    lines = [f"{counted(num_done, 'volume', 'volumes')} of slices: {printable(folder)}/volumes"]
    left = f"warning: predicted in part, and not joined: {first_of(parts, 5)}"
    return [*lines, left] if parts else lines
