"""`segtrain data polygons`: label maps to GeoJSON."""

import argparse

from segtrain.errors import EXIT_OK, ConfigError
from segtrain.text import printable, table_lines


def main(args: argparse.Namespace) -> int:
    """Writes the file and says what is in it; returns the exit code.

    Raises:
        ConfigError: rasterio is not installed, or --output exists.
        DataError: a label map or the class file cannot be read.
    """
    from segtrain.data.read.georeference import geo_library
    from segtrain.data.read.label_formats import label_format_of
    from segtrain.desk.annotations.polygons import find_label_maps, write_polygons

    geo_library(args.labels[0])
    if args.output.exists() and not args.overwrite:
        raise ConfigError(f"--output {printable(args.output)}: exists; --overwrite replaces it")
    classes = label_format_of(args.label_format or "ids").class_file(args.classes)
    options = {"label_format": args.label_format, "simplify_m": args.simplify or 0.0}
    by_class = write_polygons(find_label_maps(args.labels), classes, args.output, **options)
    numbers = [f"{number}" for number, _ in by_class.values()]
    areas = [f"{area:,.1f}" for _, area in by_class.values()]
    columns = ["class", *by_class], ["polygons", *numbers], ["m2", *areas]
    print("\n".join(table_lines(columns)))
    print(f"{sum(number for number, _ in by_class.values())} polygons: {printable(args.output)}")
    return EXIT_OK
