"""`segtrain data import`: annotations and volumes, to label maps and slices."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from segtrain.desk.annotations import AnnotationSet, detect, label_maps, read_annotations, roi_files
from segtrain.desk.volumes.cases import find_all
from segtrain.desk.volumes.cut import import_volumes
from segtrain.errors import EXIT_OK, ConfigError, DataError, refuse_unused
from segtrain.run.console import say
from segtrain.text import counted, first_of, printable, table_lines
from segtrain.types import IGNORE_INDEX


def main(args: argparse.Namespace) -> int:
    """The exit code: 0; annotations that cannot be drawn completely are an error.

    Raises:
        ConfigError: --output is wrong, or what reads the files is not installed.
        DataError: annotations or volumes that are wrong or do not fit their images.
    """
    sources = [*args.sources, *([args.images] if args.images else [])]
    # The folder of the images may be one of the sources, too; it counts once.
    sources = list({path.resolve(): path for path in sources}.values())
    are_annotations = any(map(detect, sources))
    if are_annotations:
        _refuse_volumes([path for path in args.sources if not detect(path)])
    rois = (
        [] if are_annotations else roi_files(path for x in sources for path in (x, *x.rglob("*")))
    )
    if rois:
        how = "draw them into label maps in ImageJ, one TIFF an image, or move them elsewhere"
        raise DataError(f"{printable(first_of(rois))}: ROIs of ImageJ are not read; {how}")
    volumes, notes = ([], []) if are_annotations else find_all(sources)
    if volumes:
        refuse_unused(vars(args), "overlap names attribute jobs", "volumes")
        how = {"axis": args.axis, "group": args.group, "overwrite": args.overwrite}
        lines = import_volumes(sources, volumes, args.output, **how)
        for line in (*notes, *lines):
            say(line)
        print(printable(f"next: segtrain init {shlex.quote(str(args.output))} writes a config"))
        return EXIT_OK
    refuse_unused(vars(args), "axis group", "annotation files")
    how = {"attribute": args.attribute, "names": args.names}
    annotations = read_annotations(args.sources, args.images, **how)
    if (overlap := args.overlap or annotations.overlap) is None:
        what = "differ in which region is on top"
        raise ConfigError(
            f"{annotations.format} {what}: --overlap order, area or class says it for all"
        )
    label_maps.claim(args.output, annotations.folder, overwrite=args.overwrite)
    pixels, images = label_maps.write_labels(
        annotations, args.output, overlap=overlap, jobs=args.jobs
    )
    for line in annotations.notes:
        say(f"warning: {line}")
    ids = {name: i for i, name in enumerate(annotations.classes) if i or pixels[i]}
    ids |= {"(ignored)": IGNORE_INDEX} if pixels[IGNORE_INDEX] else {}
    total = pixels.sum()
    if overlap == "keep":  # of all pixels: classes may share some
        ids = {name: i for name, i in ids.items() if i}
        total = sum(
            height * width for height, width in (image.size for image in annotations.images)
        )
    percentages = [f"{100 * pixels[i] / total:.3f} %" for i in ids.values()]
    shown = [str(images[i]) for i in ids.values()]
    columns = ["class", *ids], ["pixels", *percentages], ["images", *shown]
    print("\n".join(table_lines(columns)))
    print(
        f"{counted(len(annotations.images), 'label', 'labels')} from {annotations.format}, "
        f"overlaps by {overlap}: {printable(args.output)}/"
        f"{{{label_maps.LABELS},{label_maps.CLASSES},{label_maps.PAIRS}}}; "
        f"images in {label_maps.PAIRS} are relative to {printable(annotations.folder)}"
    )
    order = ",".join(annotations.classes[1:])
    print(printable(f"--names {shlex.quote(order)} gives another import the same ids"))
    if annotations.is_one_format:  # else init asks which
        print(printable(f"next: {_next_step(annotations, args)} writes a config, with splits"))
    return EXIT_OK


def _next_step(found: AnnotationSet, args: argparse.Namespace) -> str:
    """The init that reads these images and SOURCEs, and no others."""
    paths = [os.path.realpath(x) for x in (found.folder, *args.sources)]
    both, first = os.path.commonpath(paths), ""
    own = {os.path.relpath(x, both) for x in paths}
    # Outlines of a map name no images: others that lie there would be taken, too.
    if found.on_map and both != paths[0] and {*os.listdir(both)} - own:
        both, first = paths[0], f"copy {first_of(args.sources)} into {paths[0]}; then "
    options = {"--names": ",".join(args.names or ()), "--attribute": args.attribute}
    words = [x for option, said in options.items() if said for x in (option, said)]
    return first + shlex.join(["segtrain", "init", both, *words])


def _refuse_volumes(sources: Sequence[Path]) -> None:
    """DataError: these, which are given beside annotations, hold volumes."""
    if volumes := find_all(sources)[0] if sources else ():
        places = printable(first_of(volume.path for volume in volumes))
        raise DataError(f"{places}: volumes and annotations are imported one after the other")
