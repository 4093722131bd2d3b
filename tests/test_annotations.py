"""`segtrain data import`: annotation files of other tools against masks known before."""

import base64
import io
import json
import re
import sys
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image, ImageOps
from pycocotools import mask as masks

from segtrain.data.read.classes import load_class_file
from segtrain.data.read.label_formats import label_format_of
from segtrain.data.read.lists import list_pairs
from segtrain.desk.annotations import detect, draw, label_maps, read_annotations
from segtrain.desk.annotations.coco import unpacked
from segtrain.desk.annotations.regions import mask_of_runs
from segtrain.errors import EXIT_INTERRUPTED, ConfigError, DataError

SIZE = H, W = 23, 31
# Corners of pixels, so the pixels inside are known without a rule of drawing.
ELL = [(2, 3), (20, 3), (20, 9), (8, 9), (8, 19), (2, 19)]
BAR = [(5, 5), (29, 5), (29, 8), (17, 8), (17, 12), (5, 12)]
BLOB = np.random.default_rng(0).random((6, 11)) < 0.5  # with its corner at x 18, y 14
FLAGS = ["background", "ell", "bar", "blob"]


def inside(*slices):
    mask = np.zeros(SIZE, bool)
    for rows, columns in slices:
        mask[slice(*rows), slice(*columns)] = True
    return mask


MASKS = {
    "ell": inside(((3, 9), (2, 20)), ((9, 19), (2, 8))),
    "bar": inside(((5, 8), (5, 29)), ((8, 12), (5, 17))),
    "blob": np.pad(BLOB, ((14, H - 20), (18, W - 29))),
}


def drawn(*names, classes=FLAGS):
    """The label in which each of the masks covers those before it."""
    label = np.zeros(SIZE, np.uint8)
    for name in names:
        label[MASKS[name]] = classes.index(name)
    return label


def image(path, size=SIZE, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(str(path))).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, **options)


def flat(points):
    return [float(x) for point in points for x in point]


def runs(mask):
    """Lengths of equal values of a flat mask, the first outside."""
    ends = np.flatnonzero(np.diff(mask)) + 1
    lengths = np.diff([0, *ends, mask.size]).tolist()
    return [0, *lengths] if mask[0] else lengths


def read(*paths, root=None, overlap=None, **options):
    """What is found in files or folders, and the label of each image by its name."""
    found = read_annotations([*paths], root, **options)
    overlap = overlap or found.overlap
    return found, {x.name: draw(x, found.classes, overlap) for x in found.images}


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def coco(root, name="a.png", **changes):
    """Its ids have gaps, its categories another order than its annotations, `bar` is a crowd."""
    packed = masks.encode(np.asfortranarray(MASKS["bar"], np.uint8))["counts"].decode()
    blob = {"size": SIZE, "counts": runs(MASKS["blob"].T.ravel())}
    found = [
        {"image_id": 7, "category_id": 40, "segmentation": [flat(ELL)]},
        {"image_id": 7, "category_id": 41, "segmentation": {"size": SIZE, "counts": packed}},
        {"image_id": 7, "category_id": 90, "segmentation": blob},
    ]
    content = {
        "images": [{"id": 7, "file_name": name, "height": H, "width": W}],
        "annotations": [{"id": i, "iscrowd": i % 2, **x} for i, x in enumerate(found)],
        "categories": [
            {"id": 1, "name": "all", "supercategory": "none"},
            *({"id": i, "name": x, "supercategory": "all"} for i, x in ((40, "ell"), (41, "bar"))),
            {"id": 90, "name": "blob"},
        ],
    }
    return write_json(root / "annotations.json", content | changes)


def labelme(root, name="a.png", **changes):
    png = io.BytesIO()
    Image.fromarray(BLOB).save(png, "PNG")
    packed = base64.b64encode(png.getvalue()).decode()
    shapes = [
        {"label": "ell", "points": [(20, 3), (2, 9)], "shape_type": "rectangle"},
        {"label": "ell", "points": [(2, 19), (8, 3)], "shape_type": "rectangle"},
        {"label": "bar", "points": BAR, "shape_type": "polygon"},
        {"label": "blob", "points": [[18, 14], [28, 19]], "shape_type": "mask", "mask": packed},
    ]
    content = {"version": "5.5", "shapes": shapes, "imagePath": name, "imageData": None}
    content |= {"imageHeight": H, "imageWidth": W}
    return write_json(root / f"{Path(name).stem}.json", content | changes)


def polygon(name, points, level=0):
    corners = ";".join(f"{x},{y}.0" for x, y in points)
    return f'<polygon label="{name}" points="{corners}" z_order="{level}"/>'


def cvat(root, shapes=None, name="a.png", head=""):
    rle = ", ".join(map(str, runs(BLOB.ravel())))
    blob = f'<mask label="blob" rle="{rle}" left="18" top="14" width="11" height="6" z_order="2"/>'
    shapes = shapes or blob + polygon("bar", BAR, 1) + polygon("ell", ELL)
    labels = "".join(f"<label><name>{x}</name><color>#aa0000</color></label>" for x in FLAGS[1:])
    path = root / "annotations.xml"
    path.write_text(
        f"<?xml version='1.0' encoding='utf-8'?>{head}<annotations><version>1.1</version>"
        f"<meta><task><labels>{labels}</labels></task></meta>"
        f'<image id="0" name="{name}" width="{W}" height="{H}">{shapes}</image></annotations>'
    )
    return path


def packed_stroke(mask):
    """A mask as an RGBA image packed by @thi.ng/rle-pack: value by value at first, then runs."""
    values = np.repeat(np.where(mask, 255, 0).ravel(), 4)
    bits = f"{values.size:032b}{7:05b}" + "".join(f"{n - 1:04b}" for n in (3, 4, 8, 16))
    at = 0
    while at < values.size:
        same = int((np.diff(values[at:], append=-1) != 0).argmax()) + 1
        if at < 40:
            bits += f"0{1:02b}{9:04b}" + "".join(f"{v:08b}" for v in values[at : at + 10])
            at += 10
        else:
            width, choice = (8, 2) if same <= 256 else (16, 3)
            bits += f"1{choice:02b}{same - 1:0{width}b}{values[at]:08b}"
            at += same
    bits += "0" * (-len(bits) % 8)
    return [int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)]


def label_studio(root, name="/data/upload/3/0a1b2c3d-a.png", results=None, **task):
    sides = {"original_width": W, "original_height": H, "image_rotation": 0}
    ell, bar = ([[100 * x / W, 100 * y / H] for x, y in points] for points in (ELL, BAR))
    stroke = {"rle": packed_stroke(MASKS["blob"]), "brushlabels": ["blob"]}
    results = results or [
        {"type": "polygonlabels", "value": {"points": ell, "polygonlabels": ["ell"]}},
        {"type": "polygonlabels", "value": {"points": bar, "polygonlabels": ["bar"]}},
        {"type": "brushlabels", "value": stroke},
        {"type": "choices", "value": {"choices": ["sunny"]}},
    ]
    done = {"result": [sides | result for result in results]}
    cancelled = {"result": [], "was_cancelled": True}
    task = {"id": 3, "annotations": [cancelled, done], "data": {"image": name}} | task
    return write_json(root / "project-1-at-2026.json", [task])


def yolo(root, lines=None, names="[ell, bar]"):
    fractions = [" ".join(f"{x / W} {y / H}" for x, y in points) for points in (ELL, BAR)]
    (root / "labels").mkdir(exist_ok=True)
    text = lines or "".join(f"{i} {line}\n" for i, line in enumerate(fractions))
    (root / "labels" / "a.txt").write_text(text)
    path = root / "data.yaml"
    path.write_text(f"train: ../train/images\nval: nowhere\nnc: 2\nnames: {names}\n")
    return path


def numbered(mask):
    """The runs of a mask as Kaggle has them: down the columns, the first pixel is 1."""
    pixels = np.flatnonzero(mask.T) + 1
    parts = np.split(pixels, np.flatnonzero(np.diff(pixels) > 1) + 1)
    return " ".join(f"{part[0]} {len(part)}" for part in parts if part.size)


def rle_table(root, lines=None, header="Image_Label,EncodedPixels"):
    lines = lines or [f"a.png_{x},{numbered(MASKS[x])}" for x in ("ell", "bar", "blob")]
    path = root / "train.csv"
    path.write_text("\n".join([header, *lines, ""]))
    return path


def via_region(name, shape="polygon", **numbers):
    if not numbers:
        xs, ys = zip(*{"ell": ELL, "bar": BAR}[name], strict=True)
        numbers = {"all_points_x": xs, "all_points_y": ys}
    return {"shape_attributes": {"name": shape, **numbers}, "region_attributes": {"kind": name}}


def via(root, regions=None, name="a.png", **project):
    """A project of version 2 if there are further keys, else what version 1 exports."""
    regions = regions or [via_region("ell"), via_region("bar")]
    if not project:
        regions = {str(i): region for i, region in enumerate(regions)}
    one = {"filename": name, "size": 99, "regions": regions, "file_attributes": {}}
    images = {f"{name}99": one}
    content = {"_via_settings": {}, "_via_img_metadata": images, **project} if project else images
    return write_json(root / "via_region_data.json", content)


def packed_png(mask, mode="P"):
    """A bitmap as Supervisely has it: a palette whose first colour is clear, or another mode."""
    png, values, options = io.BytesIO(), mask.astype(np.uint8), {}
    picture = Image.fromarray(values)
    if mode == "P":
        picture.putpalette([0, 0, 0, 255, 255, 255])
        options = {"transparency": 0}
    elif mode == "RGBA":
        picture = Image.fromarray(np.dstack([values * 0 + 7, values, values, 255 * values]))
    elif mode == "1":
        picture = Image.fromarray(mask)
    picture.save(png, "PNG", **options)
    return base64.b64encode(zlib.compress(png.getvalue())).decode()


def super_shape(name, kind, **content):
    return {"classTitle": name, "geometryType": kind, "tags": [], **content}


def bitmap(mask=BLOB, name="blob", mode="P", **changes):
    content = {"data": packed_png(mask, mode), "origin": [0, 0], **changes}
    return super_shape(name, "bitmap", bitmap=content)


def super_box(name, *corners):
    return super_shape(name, "rectangle", points={"exterior": corners, "interior": []})


def supervisely(root, objects=None, name="a.png", **changes):
    """Rectangles include their last row and column."""
    objects = objects or [
        *(super_box("ell", (2, 3), (19, 8)), super_box("ell", (7, 18), (2, 8))),
        *(bitmap(MASKS["bar"], "bar"), bitmap(BLOB, "blob", origin=[18, 14])),
    ]
    classes = [("bar", "bitmap"), ("edge", "line"), ("ell", "rectangle"), ("blob", "any")]
    meta = {"classes": [{"title": x, "shape": y, "color": "#ff0000"} for x, y in classes]}
    write_json(root / "meta.json", meta)
    content = {"description": "", "tags": [], "size": {"height": H, "width": W}}
    return write_json(root / f"ds/ann/{name}.json", content | {"objects": objects} | changes)


def qupath_shape(name, *outlines, **properties):
    """A polygon with holes, or of (several) (outlines)."""
    kind = "MultiPolygon" if np.ndim(outlines[0][0][0]) else "Polygon"
    geometry = {"type": kind, "coordinates": outlines}
    properties = {"objectType": "annotation", "classification": name} | properties
    if isinstance(name, str):
        properties["classification"] = {"name": name, "color": [200, 0, 0]}
    return {"type": "Feature", "id": "PathAnnotationObject", "geometry": geometry} | {
        "properties": properties
    }


def on_plane(**plane):
    found = qupath_shape("x", BAR)
    found["geometry"]["plane"] = {"c": -1, "z": 0, "t": 0} | plane
    return found


def qupath(root, found=None, name="a.geojson", is_list=False):
    found = found or [qupath_shape("ell", [*ELL, ELL[0]]), qupath_shape("bar", [*BAR, BAR[0]])]
    whole = found if is_list else {"type": "FeatureCollection", "features": found}
    return write_json(root / name, whole)


# Writer, its image, and the regions from the first drawn to the last.
WRITERS = {
    "COCO": (coco, "a.png", ("ell", "bar", "blob")),
    "LabelMe": (labelme, "a.png", ("ell", "bar", "blob")),
    "CVAT": (cvat, "a.png", ("ell", "bar", "blob")),
    "Label Studio": (label_studio, "a.png", ("ell", "bar", "blob")),
    "YOLO": (yolo, "images/a.png", ("ell", "bar")),
    "RLE table": (rle_table, "a.png", ("ell", "bar", "blob")),
    "VIA": (via, "a.png", ("ell", "bar")),
    "Supervisely": (supervisely, "ds/img/a.png", ("ell", "bar", "blob")),
    "GeoJSON": (qupath, "a.png", ("ell", "bar")),  # of QuPath
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_format_is_found_and_drawn_as_what_it_was_made_from(tmp_path, kind):
    write, name, names = WRITERS[kind]
    image(tmp_path / name)
    path = write(tmp_path)
    assert detect(tmp_path) == {kind: [path]}
    found, labels = read(tmp_path, overlap="order")
    assert set(found.classes) == {"background", *names}
    assert found.classes[0] == "background"
    assert [(x.name, x.path, x.size) for x in found.images] == [(name, tmp_path / name, SIZE)]
    assert labels[name].dtype == np.uint8
    assert np.array_equal(labels[name], drawn(*names, classes=found.classes))


@pytest.mark.parametrize("is_list", [False, True])
def test_areas_of_qupath_come_back_as_the_pixels_that_they_were_traced_from(tmp_path, is_list):
    """Islands in holes of islands: the outlines are those of rasterio, along edges of pixels."""
    features = pytest.importorskip("rasterio.features")
    label = np.zeros(SIZE, np.uint8)
    label[1:20, 2:28] = np.random.default_rng(3).integers(0, 3, (19, 26))
    label[0, 0], label[-1, -1] = 1, 2
    label[4:15, 6:20], label[6:13, 8:18], label[8:11, 10:16] = 1, 0, 1
    found = []
    for i, name in ((2, "bar"), (1, "ell")):
        parts = features.shapes(label, mask=label == i)
        found.append(qupath_shape(name, *(shape["coordinates"] for shape, _ in parts)))
    image(tmp_path / "images/a.tif")
    image(tmp_path / "images/b.png")
    qupath(tmp_path / "geojson", found, is_list=is_list)
    qupath(tmp_path / "geojson", [{}], "b.geojson").write_text(
        '{"type": "FeatureCollection", "features": []}'
    )
    found, labels = read(tmp_path / "geojson", root=tmp_path / "images")
    assert (found.format, found.classes) == ("QuPath", ("background", "bar", "ell"))
    expected = np.array([0, 2, 1])[label]
    assert np.array_equal(labels["a.tif"], expected)
    assert not labels["b.png"].any()


def test_objects_of_qupath_lie_in_each_other_and_have_derived_classes(tmp_path):
    """The smaller is on top, as QuPath paints them, whatever stands first."""
    image(tmp_path / "a.png")
    everything = [(0, 0), (W, 0), (W, H), (0, H), (0, 0)]
    child = qupath_shape({"names": ["Tumor", "Positive"]}, BAR)
    parent = {"name": "Positive", "parentClass": {"name": "Tumor", "colorRGB": -1}}
    point = qupath_shape("Tumor", BAR)
    point["geometry"] = {"type": "MultiPoint", "coordinates": [[1, 2]]}
    ignored = qupath_shape("Ignore*", [(29, 20), (31, 20), (31, 23), (29, 23)])
    found = [qupath_shape(parent, ELL), ignored, point]
    found.append(qupath_shape("Stroma", everything, childObjects=[child]))
    qupath(tmp_path, found)
    found, labels = read(tmp_path)
    assert found.classes == ("background", "Stroma", "Tumor: Positive")
    expected = 1 + (MASKS["ell"] | MASKS["bar"])
    expected[20:, 29:] = 255
    assert np.array_equal(labels["a.png"], expected)
    assert any("feature 2: point: left out" in line for line in found.notes)


def test_a_circle_of_labelme_goes_through_its_second_point(tmp_path):
    image(tmp_path / "a.png", (64, 80))
    disc = {"label": "disc", "shape_type": "circle", "points": [[25, 30], [25, 45]]}
    labelme(tmp_path, shapes=[disc], imageHeight=64, imageWidth=80)
    y, x = np.indices((64, 80)) + 0.5
    off = np.hypot(x - 25, y - 30) - 15
    assert ((read(tmp_path)[1]["a.png"] == (off < 0)) | (abs(off) < 1)).all()


def test_coco_by_id_and_with_quoted_ids_is_drawn_as_the_lists_are(tmp_path):
    """Keys and ids go together, whatever their order and whether they are text."""
    for name in ("a.png", "b.png"):
        image(tmp_path / name)
    content = json.loads(coco(tmp_path).read_text())
    first, *others = content["annotations"]
    first |= {"category_id": "40", "segmentation": flat(ELL), "image_id": 8}
    images = {
        "8": {"file_name": "b.png", "height": H, "width": W},
        "7": {"id": "7", "file_name": "a.png", "height": H, "width": W},
    }
    annotations = {"x": first, **{str(9 - i): one for i, one in enumerate(others)}}
    categories = {"90": {"name": "blob"}, "41": {"name": "bar"}, "40": {"id": 40, "name": "ell"}}
    coco(tmp_path, images=images, annotations=annotations, categories=categories)
    found, labels = read(tmp_path, overlap="order")
    assert found.classes == ("background", "blob", "bar", "ell")
    assert np.array_equal(labels["a.png"], drawn("bar", "blob", classes=found.classes))
    assert np.array_equal(labels["b.png"], drawn("ell", classes=found.classes))


def test_coco_is_drawn_as_by_pycocotools_pixel_by_pixel(tmp_path):
    """Polygons of fractions of pixels that cross, leave the image and have several parts."""
    from pycocotools.coco import COCO

    rng = np.random.default_rng(4)
    shapes = []
    for i in range(40):
        parts = [[5.5, 6.25, *rng.uniform(-9, 33, 2 * (3 + i % 5))] for _ in range(1 + i % 3)]
        shapes.append({"id": i, "image_id": 7, "category_id": (40, 41, 90)[i % 3], "iscrowd": 0})
        mask = rng.random(SIZE) < 0.05
        packed = masks.encode(np.asfortranarray(mask, np.uint8))["counts"].decode()
        counts = (packed, runs(mask.T.ravel()))[i % 2]
        shapes[-1]["segmentation"] = {"size": SIZE, "counts": counts} if i % 4 == 3 else parts
    image(tmp_path / "a.png")
    path = coco(tmp_path, annotations=shapes)
    found = read_annotations([path])
    theirs = COCO(path)
    drawn_masks = [theirs.annToMask(shape).astype(bool) for shape in shapes]
    ids = [found.classes.index(theirs.cats[s["category_id"]]["name"]) for s in shapes]
    orders = {
        "order": range(40),
        "area": sorted(range(40), key=lambda i: -drawn_masks[i].sum()),
        "class": sorted(range(40), key=lambda i: ids[i]),
    }
    for overlap, order in orders.items():
        expected = np.zeros(SIZE, np.uint8)
        for i in order:
            expected[drawn_masks[i]] = ids[i]
        assert np.array_equal(draw(found.images[0], found.classes, overlap), expected), overlap


def test_shapes_of_via_are_drawn_by_the_attribute_that_names_the_class(tmp_path, lab):
    """Points and lines have no area; the ellipse is turned by 0.6 radians, clockwise."""
    data = tmp_path / "data"
    image(data / "a.png", (64, 80))
    shapes = [
        via_region("disc", "circle", cx=20, cy=40, r=15),
        via_region("box", "rect", x=50, y=2, width="20", height="11"),
        via_region("egg", "ellipse", cx=55, cy=40, rx=20, ry=8, theta=0.6),
        via_region("box", "point", cx=3, cy=3),
        via_region("box", "polyline", all_points_x=[1, 9, 9], all_points_y=[1, 1, 9]),
    ]
    options = {"options": {"box": "", "egg": "", "disc": "", "cup": ""}}
    project = {"_via_attributes": {"region": {"kind": options}}}
    via(data, shapes, **project)
    found, labels = read(data)
    assert found.classes == ("background", "box", "egg", "disc", "cup")
    y, x = np.indices((64, 80)) + 0.5
    along = (x - 55) * np.cos(0.6) + (y - 40) * np.sin(0.6)
    across = (y - 40) * np.cos(0.6) - (x - 55) * np.sin(0.6)
    disc, egg = np.hypot(x - 20, y - 40) / 15, np.hypot(along / 20, across / 8)
    truth = np.select([egg < 1, disc < 1, (x > 50) & (x < 70) & (y > 2) & (y < 13)], [2, 3, 1])
    rim = (abs(disc - 1) < 1 / 15) | (abs(egg - 1) < 1 / 8)
    label = labels["a.png"]
    assert ((label == truth) | rim).all()
    notes = "\n".join(found.notes)
    assert "regions[3]: point: left out, because it has no area" in notes
    assert "regions[4]: polyline: left out, because it has no area" in notes

    for region in shapes:
        region["region_attributes"]["is it dirty"] = {"yes": True}
    via(data, shapes, **project)
    message = "may name the class: --attribute 'is it dirty' or --attribute kind"
    command = ("data", "import", data, "--output", tmp_path / "out")
    assert message in lab.refused(*command)
    assert message in lab.refused("init", data, "--output", tmp_path / "exp")
    lab.done(*command, "--attribute", "kind")
    classes = load_class_file(str(tmp_path / "out" / "classes.yaml"))
    assert np.array_equal(
        label_format_of("ids").read(tmp_path / "out" / "labels" / "a.png", classes), label
    )
    found = read_annotations([data], attribute="is it dirty")
    assert found.classes == ("background", "yes")
    with pytest.raises(DataError, match="its attribute 'is' does not name one class"):
        read_annotations([data], attribute="is")

    for region in shapes:
        region["region_attributes"] = {"kind": ""}
    via(data, shapes)
    found, labels = read(data)
    assert found.classes == ("background", "object")
    assert np.array_equal(labels["a.png"], label > 0)
    assert found.notes[0].endswith("no attribute names a class, so all regions are 'object'")


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("ImageId,ClassId,EncodedPixels", "{image},{label},{runs}"),
        ("ImageId_ClassId,EncodedPixels", "{image}_{label},{runs}"),
        ('"EncodedPixels","class","Height","image_id"', '"{runs}","{label}",23,"{image}"\r'),
    ],
)
def test_numbers_of_classes_in_a_table_stay_and_images_without_runs_are_background(
    tmp_path, header, line
):
    """Class 2 occurs only without pixels, class 4 in two lines; `e.png` is in another folder."""
    for name in ("train/a_1.png", "train/b.png", "train/c.png", "test/e.png", "train/d.jpg"):
        image(tmp_path / name)
    half = MASKS["blob"] & (np.indices(SIZE)[1] < 23)
    shown = [(3, MASKS["bar"]), (4, half), (4, MASKS["blob"] & ~half), (1, MASKS["ell"])]
    rows = [("a_1.png", label, numbered(mask)) for label, mask in shown]
    rows += [("b.png", 2, ""), ("b.png", 0, "")]
    lines = [line.format(image=x, label=label, runs=runs) for x, label, runs in rows]
    rle_table(tmp_path, lines, header)
    (tmp_path / "sample_submission.csv").write_text("ImageId,EncodedPixels\ne.png,1 1\n")
    found, labels = read(tmp_path)
    assert found.classes == ("background", "class_1", "class_2", "class_3", "class_4")
    truth = np.zeros(SIZE, np.uint8)
    for i, name in sorted(((1, "ell"), (3, "bar"), (4, "blob")), key=lambda x: -MASKS[x[1]].sum()):
        truth[MASKS[name]] = i
    assert labels.keys() == {"train/a_1.png", "train/b.png", "train/c.png"}
    assert np.array_equal(labels["train/a_1.png"], truth)
    assert not labels["train/b.png"].any()
    assert not labels["train/c.png"].any()
    assert "train/b.png, train/c.png: no region, so all of it is background" in found.notes
    assert f"{tmp_path}: 2 images are not named by any annotation and left out" in found.notes
    rle_table(tmp_path, [f"b.png,{numbered(MASKS['bar'])}"], "ImageId,EncodedPixels")
    found, labels = read(tmp_path)
    assert found.classes == ("background", "class_1")  # of a table without classes
    assert np.array_equal(labels["train/b.png"], MASKS["bar"])


def test_a_table_of_ids_and_runs_names_images_without_their_suffix(tmp_path):
    image(tmp_path / "train/41.png")
    rle_table(tmp_path, [f"41,lung,{numbered(MASKS['ell'])}"], "id,organ,rle")
    found, labels = read(tmp_path)
    assert found.classes == ("background", "class_1")
    assert np.array_equal(labels["train/41.png"], MASKS["ell"])


def test_a_file_of_which_no_image_is_here_is_left_out_beside_one_of_images_that_are(tmp_path):
    """As a second list of pictures that were not downloaded; of two here one is missing."""
    image(tmp_path / "a.png")
    coco(tmp_path, "a.png")
    gone = [{"id": i, "file_name": f"gone/{i}.png", "height": H, "width": W} for i in range(2)]
    (tmp_path / "more").mkdir()
    path = coco(tmp_path / "more", images=[*gone, gone[0] | {"id": 7, "file_name": "gone/7.png"}])
    found, labels = read(tmp_path)
    assert labels.keys() == {"a.png"}
    assert f"{path}: left out: none of its 3 images is here" in found.notes
    gone[1]["file_name"] = "b.png"
    image(tmp_path / "b.png")
    coco(tmp_path / "more", images=[*gone, gone[0] | {"id": 7, "file_name": "gone/7.png"}])
    with pytest.raises(DataError, match=r"gone/0\.png, gone/7\.png: no such image"):
        read(tmp_path)


def test_polygons_of_supervisely_have_holes_and_vertices_in_the_middle_of_pixels(tmp_path):
    """Points and lines have no area; the order of the classes is that of meta.json."""
    for folder in ("ds", "ds2"):
        image(tmp_path / folder / "img/a.png")
    hole, box = [(4.0, 5.25), (6.0, 5.25), (6.0, 7.75), (4.0, 7.75)], np.s_[5:8, 4:6]
    outline = [(x + 0.25, y) for x, y in ELL]
    pixels, inner = [(3, 2), (25, 4), (18, 20), (6, 15)], [(9, 8), (14, 8), (11, 12)]
    whole = super_shape("blob", "polygon", points={"exterior": pixels, "interior": [inner]})
    path = supervisely(tmp_path, [whole])
    (tmp_path / "ds2/ann").mkdir()
    path.rename(tmp_path / "ds2/ann/a.png.json")
    objects = [
        super_shape("ell", "polygon", points={"exterior": outline, "interior": [hole]}),
        super_shape("edge", "line", points={"exterior": [[1, 1], [5, 5]], "interior": []}),
        super_shape("edge", "point", points={"exterior": [[1, 1]], "interior": []}),
    ]
    supervisely(tmp_path, objects)
    found, labels = read(tmp_path)
    assert found.classes == ("background", "bar", "ell", "blob")
    first, second = labels.values()
    truth = np.where(MASKS["ell"], 2, 0)
    truth[box] = 0
    assert np.array_equal(first, truth)
    parts = (masks.frPyObjects([[x + 0.5 for x in flat(p)]], *SIZE) for p in (pixels, inner))
    outer, hole = (masks.decode(part)[..., 0] for part in parts)
    assert np.array_equal(second, 3 * (outer & ~hole & 1))
    notes = "\n".join(found.notes)
    assert "objects[1]: line: left out, because it has no area" in notes
    assert "objects[2]: point: left out, because it has no area" in notes
    alone = read_annotations([tmp_path / "ds/ann"])
    assert [x.name for x in alone.images] == ["img/a.png"]


def test_bitmaps_of_supervisely_are_read_in_each_kind_of_png(tmp_path):
    image(tmp_path / "ds/img/a.png")
    for mode in ("P", "RGBA", "L", "1"):
        supervisely(tmp_path, [bitmap(mode=mode, origin=[18, 14])])
        found, labels = read(tmp_path)
        expected = np.where(MASKS["blob"], found.classes.index("blob"), 0)
        assert np.array_equal(labels["ds/img/a.png"], expected), mode


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_regions_on_a_turned_image_are_turned_back(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image(tmp_path / "a.jpg", (W, H), exif=exif)
    labelme(tmp_path, "a.jpg")
    found, labels = read(tmp_path, overlap="order")
    assert labels["a.jpg"].shape == (W, H)
    stored = io.BytesIO()
    Image.fromarray(labels["a.jpg"]).save(stored, "PNG", exif=exif)
    turned = np.array(ImageOps.exif_transpose(Image.open(stored)))
    assert np.array_equal(turned, drawn("ell", "bar", "blob", classes=found.classes))


def test_names_of_classes_merge_and_the_format_may_name_background_and_ignored_pixels(tmp_path):
    image(tmp_path / "a.png")
    names = "Bar", "bar ", "_background_", "void", "Bar"
    outlines = BAR, BAR, ELL, [(20, 20), (31, 20), (31, 23)], [(1, 1), (2, 2)]
    shapes = [{"label": x, "points": p} for x, p in zip(names, outlines, strict=True)]
    point = {"label": "x", "points": [[1, 1]], "shape_type": "point"}
    labelme(tmp_path, shapes=[*shapes, point], imageHeight=None, imageWidth=None)
    image(tmp_path / "other.png")
    found, labels = read(tmp_path, overlap="order")
    assert found.classes == ("_background_", "Bar")
    label = labels["a.png"]
    assert np.array_equal(label == 1, MASKS["bar"] & ~MASKS["ell"])
    assert (label[21, 29], label[0, 0]) == (255, 0)
    said = ["'void': ignored, as its name says", "'bar ' and 'Bar': taken as one class"]
    said += ["fewer than three", "no area", "1 image is not named by any annotation and left out"]
    assert [words for words in said if words not in "\n".join(found.notes)] == []


def test_images_without_regions_and_upright_rectangles_are_noted(tmp_path):
    for name in "ab":
        image(tmp_path / f"images/{name}.png")
    yolo(tmp_path, "0 0.1 0.1 0.5 0.1 0.5 0.6 0.1 0.6\n")
    found = read_annotations([tmp_path])
    assert not found.images[1].regions
    assert found.notes == [
        "images/b.png: no region, so all of it is background",
        "every outline: is a rectangle; boxes of a detector train wrong",
    ]
    corners = np.array([[4, 2], [10, 6], [8, 9], [2, 5]]) / (W, H)
    yolo(tmp_path, f"0 {' '.join(f'{x:.4f} {y:.4f}' for x, y in corners)}\n")
    assert read_annotations([tmp_path]).notes[-1] == found.notes[-1]  # of a box that is turned
    path = yolo(tmp_path)
    path.write_text(path.read_text() + "kpt_shape: [17, 3]\n")
    with pytest.raises(DataError, match="key points, which are no outlines"):
        read_annotations([tmp_path])


@pytest.mark.parametrize(
    ("files", "name", "where", "expected"),
    [
        (["a.png", "b.png"], "a.png", "", "a.png"),
        (["a.png", "old/a.png"], "a.png", "", "a.png"),
        (["x/a.png"], "C:\\me\\x\\a.png", "", "x/a.png"),
        (["x/a.png"], "../x/a.png", "", "x/a.png"),
        (["a 1(x).png"], "upload/0a1b2c3d-a_1x.png", "", "a 1(x).png"),
        (["a 1.png", "a_1.png"], "a_1.png", "", "a_1.png"),
        (["x/41.png", "x/41.png.png"], "41", "", "x/41.png"),
        (["train/a.png", "val/a.png"], "train/a.png", "", "train/a.png"),
        (["train/a.png", "val/a.png"], "a.png", "val", "val/a.png"),
        (["train/a.png", "val/a.png"], "a.png", "annotations/instances_val", "val/a.png"),
        (["x/a.png", "y/a.png"], "a.png", "", "may be x/a.png, y/a.png; name the folder"),
        (["imgs/a.png"], "images/a.png", "", "no such image in ROOT, but imgs/a.png; name"),
        (["a.png"], "c.png", "", "no such image in ROOT; name the folder of the images: "),
        (["a.png"], "", "", "no such image"),
    ],
)
def test_an_image_is_found_by_the_end_of_its_path_or_refused(
    tmp_path, files, name, where, expected
):
    for file in files:
        image(tmp_path / file)
    (tmp_path / where).mkdir(parents=True, exist_ok=True)
    path = coco(tmp_path / where, name)
    if expected.endswith(".png"):
        assert [x.name for x in read_annotations([path], tmp_path).images] == [expected]
    else:
        with pytest.raises(DataError) as caught:
            read_annotations([path], tmp_path)
        assert expected.replace("ROOT", str(tmp_path)) in str(caught.value)


BOX = "boxes are no masks: segtrain trains on outlines"
MASK = '<mask label="e" rle="{}" top="0" left="{}" width="{}" height="{}"/>'
ONE = {"image_id": 7, "category_id": 40}


BOMB = '<!ENTITY e0 "0123456789">' + "".join(
    f'<!ENTITY e{i + 1} "{10 * f"&e{i};"}">' for i in range(7)
)


def shape(**changes):
    return {"shapes": [{"label": "ell", "points": ELL, **changes}]}


def segment(value):
    return {"annotations": [ONE | {"segmentation": value}]}


def result(kind="polygonlabels", **value):
    return {"results": [{"type": kind, "value": {"points": [[0, 0], [9, 0], [9, 9]], **value}}]}


def stamp(**options):
    return {"objects": [bitmap(**options)]}


BOMB_OF_ZEROS = base64.b64encode(zlib.compress(bytes(1 << 24))).decode()
LS = label_studio
VIA_UNNAMED = via_region("ell") | {"region_attributes": {"kind": {"a": True, "b": True}}}
BROKEN = [
    (coco, {"annotations": [ONE]}, BOX),
    (coco, segment([flat(ELL)[:-1]]), "annotations[0]: "),
    (coco, segment([[1.0, 1.0, 9.0, 1.0, 9.0, 1e12]]), "an outline of more than"),
    (coco, segment([[1.0, 1.0, float("nan"), 1.0, 9.0, 9.0]]), "outside of the image"),
    (coco, segment([[40, 1, 50, 1, 50, 9]]), "outside of the image: drawn on another one"),
    (coco, segment(["m"]), "annotations[0]: could not convert string to float"),
    (coco, segment({"size": [H, W - 1], "counts": [H * (W - 1)]}), "size of its run lengths"),
    (coco, segment({"size": SIZE, "counts": [5, 3]}), "do not fill 713 px"),
    (coco, segment({"size": SIZE, "counts": [-5, H * W + 5]}), "do not fill 713 px"),
    (coco, segment({"size": SIZE, "counts": "o" * 9}), "damaged run lengths"),
    (coco, segment({"size": SIZE, "counts": "Y" + "f" + "P" * 6 + "0"}), "damaged run lengths"),
    (coco, segment({"size": SIZE, "counts": "ü3"}), "damaged run lengths"),
    (coco, {"annotations": [ONE | {"category_id": 5}]}, "category_id is not in the file"),
    (coco, {"annotations": [ONE | {"segments_info": []}]}, "panoptic"),
    (coco, {"categories": [{"id": 40, "name": "a\nb"}]}, "is not allowed in a name"),
    (coco, {"categories": [{"id": i, "name": f"{i}"} for i in range(300)]}, "301 classes: at most"),
    (coco, {"images": [{"id": 7, "file_name": "a.png", "height": 23, "width": 30}]}, "be equal"),
    (coco, {"images": [{"id": i, "file_name": "a.png"} for i in (7, "7")]}, "have one id"),
    (coco, {"images": {"7": {"id": 8, "file_name": "a.png"}}}, "the key 7 has the id 8"),
    (coco, {"annotations": {"3": ONE | {"category_id": "5"}}}, "annotations[3]: its image_id or"),
    (coco, {"annotations": {"7": [ONE]}}, "annotations[7]: damaged: "),
    (coco, {"images": [{"id": i, "file_name": "a.png"} for i in (7, 8)]}, "is annotated twice"),
    (labelme, shape(shape_type="ellipse"), "ellipse: only polygons and masks are read"),
    (labelme, shape(shape_type="mask", mask="aGk"), "padding"),
    (labelme, shape(shape_type="mask", mask="aGk="), "not a PNG image"),
    (labelme, shape(label=["a"]), "expected text as the names"),
    (labelme, shape(points=[[1, 2, 3]] * 4), "expected pairs of x and y"),
    (labelme, {"shapes": [7]}, "damaged: "),
    (labelme, {"imageWidth": W + 1}, "23x32 px in ROOT/a.json, 23x31 px in the file"),
    (cvat, {"shapes": '<box label="ell" xtl="1"/>'}, BOX),
    (cvat, {"shapes": '<ellipse label="ell" cx="4"/>'}, "ellipse: only polygons"),
    (cvat, {"shapes": '<polygon label="ell" points="1,1;9,1;9"/>'}, "a.png: expected pairs"),
    (cvat, {"shapes": '<mask label="ell" rle="1" top="0" left="0" width="1"/>'}, "'height'"),
    (cvat, {"shapes": MASK.format("0,6", 30, 2, 3)}, "3x2 px at 30, 0 do not lie in the image"),
    (cvat, {"shapes": MASK.format("9", 0, 99999, 99999)}, "99999x99999 px; at most"),
    (cvat, {"head": f"<!DOCTYPE a [{BOMB}]>", "shapes": "&e7;"}, "input amplification"),
    (cvat, {"shapes": "</image>"}, "no XML file: mismatched tag"),
    (LS, result("rectanglelabels"), BOX),
    (LS, result("ellipselabels"), "ellipselabels: only polygons"),
    (LS, result(polygonlabels=["a", "b"]), "expected one class"),
    (LS, result("brushlabels", brushlabels=["a"], rle=[1, 2]), "task 3: it ends"),
    (LS, result("brushlabels", brushlabels=["a"], rle=[0] * 9), "0 values of 1 bits for 23x31 px"),
    (LS, {"annotations": 2 * [{"result": []}]}, "task 3: several annotations; mark one"),
    (LS, {"annotations": [{"result": None}]}, "damaged: "),
    (LS, {"data": {"text": "hello"}}, "its data names no image"),
    (yolo, {"lines": "0 0.5 0.5 0.1 0.1\n"}, f"labels/a.txt:1: {BOX}"),
    (yolo, {"lines": "7 0 0 1 0 1 1\n"}, "a.txt:1: expected a class of the data.yaml"),
    (yolo, {"lines": "\n0 0 0 1 0 1\n"}, "a.txt:2: expected pairs of x and y"),
    (yolo, {"names": "ell"}, "expected `names`, a list of class names"),
    (via, {"regions": [via_region("x", "path", d="M")]}, "path: only polygons and masks are read"),
    (via, {"regions": [via_region("x", "rect", x=1, y=1, width=2)]}, "regions[0]: has no 'height'"),
    (via, {"regions": [via_region("x", "circle", cx=1, cy=1, r=1e9)]}, "an outline of more than"),
    (via, {"regions": [via_region("x", all_points_x=[1, 2], all_points_y=[1])]}, "regions[0]: zip"),
    (via, {"regions": [via_region("ell"), VIA_UNNAMED]}, "regions[1]: its attribute 'kind' does"),
    (supervisely, stamp(mask=np.ones((H, W + 1), bool)), "a bitmap of 23x32 px, larger than the"),
    (supervisely, stamp(origin=[18, 20]), "6x11 px at 18, 20 do not lie in the image"),
    (supervisely, stamp(origin=[-1, 0]), "6x11 px at -1, 0 do not lie in the image"),
    (supervisely, stamp(data=BOMB_OF_ZEROS), "cut off, or larger than the image"),
    (supervisely, stamp(data=packed_png(BLOB)[:40]), "cut off, or larger than the image"),
    (supervisely, stamp(data="aGk="), "objects[0]: a damaged bitmap: "),
    (supervisely, stamp(data=base64.b64encode(zlib.compress(b"a")).decode()), "not a PNG image"),
    (supervisely, {"objects": [super_shape("x", "cuboid")]}, "cuboid: only polygons and masks"),
    (supervisely, {"objects": [super_box("x", (1, 2))]}, "objects[0]: cannot reshape"),
    (supervisely, {"size": {"height": 10**6, "width": 10**6}}, "1000000x1000000 px; at most"),
    (supervisely, {"size": {"height": W, "width": H}}, "31x23 px in ROOT/ds/ann/a.png.json, 23x31"),
    (rle_table, {"lines": ["", "a.png_1,705 10"]}, "train.csv:3: a run ends at pixel 714"),
    (rle_table, {"lines": ["a.png_1,1 5 9"]}, "train.csv:2: expected pairs of start and length"),
    (rle_table, {"lines": ["a.png_1,0 5"]}, "train.csv:2: expected starts and lengths from 1 to"),
    (rle_table, {"lines": ["a.png_1,5 0"]}, "train.csv:2: expected starts and lengths from 1 to"),
    (rle_table, {"lines": [f"a.png_1,5 {2**62}"]}, "starts and lengths from 1 to 89478485"),
    (rle_table, {"lines": [f"a.png_1,5 {2**80}"]}, "train.csv:2: "),
    (rle_table, {"lines": ["a.png_1,5 6 10 2"]}, "train.csv:2: runs overlap or go back"),
    (rle_table, {"lines": ["", "b.png_1,5 6"]}, "train.csv:3: b.png: no such image in ROOT"),
    (rle_table, {"lines": ["a.png_1,1 5,x"]}, "train.csv:2: expected 2 columns"),
    (rle_table, {"lines": ["a.png,1 5"]}, "train.csv:2: expected an image and a class"),
    (rle_table, {"lines": ["a.png_0,1 5"]}, "train.csv:2: class 0 has pixels"),
    (rle_table, {"lines": ["a.png_999999999,1 5"]}, "class 999999999: at most 254"),
    (rle_table, {"header": "ImageId,Image,EncodedPixels"}, "ImageId and Image: keep one of these"),
    (rle_table, {"header": "name,EncodedPixels"}, "expected the columns ImageId,ClassId,EncodedP"),
    (qupath, {"name": "b.geojson"}, "b.geojson: no such image in ROOT"),
    (
        qupath,
        {"found": [qupath_shape(None, BAR)]},
        "feature 0: no class (classification.name)",
    ),
    (qupath, {"found": [qupath_shape("x", [(1, 2, 3)])]}, "feature 0: expected pairs of x and y"),
    (qupath, {"found": [qupath_shape("x", [(40, 2), (50, 2), (50, 9)])]}, "outside of the image"),
    (qupath, {"found": [on_plane(z=3)]}, "feature 0: lies in another plane than the first"),
    (
        qupath,
        {"found": [qupath_shape("x", BAR, childObjects=[on_plane(t=1)])]},
        "a.geojson: feature 0: childObjects: feature 0: lies in another plane",
    ),
]


@pytest.mark.parametrize(("write", "changes", "message"), BROKEN)
def test_what_could_train_wrong_is_refused_by_name(tmp_path, write, changes, message):
    folders = {yolo: "images", supervisely: "ds/img"}
    image(tmp_path / folders.get(write, "") / "a.png")
    path = write(tmp_path, **changes)
    with pytest.raises(DataError) as caught:
        read_annotations([path], tmp_path)
    assert message.replace("ROOT", str(tmp_path)) in str(caught.value)


@pytest.mark.parametrize(
    ("orientation", "size"), [(3, SIZE), (6, (W, W))], ids=["upside down", "square"]
)
def test_a_turned_image_is_refused_where_the_size_does_not_tell(tmp_path, orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image(tmp_path / "a.jpg", size, exif=exif)
    labelme(tmp_path, "a.jpg", imageHeight=size[0], imageWidth=size[1])
    with pytest.raises(DataError, match="EXIF asks for a rotation"):
        read_annotations([tmp_path])


def test_several_formats_and_no_format_are_refused(tmp_path):
    image(tmp_path / "a.png")
    with pytest.raises(DataError, match="none: cannot be read: no such file or directory"):
        read_annotations([tmp_path / "none"])
    write_json(tmp_path / "dataset.json", {"channel_names": {}, "labels": {}})
    with pytest.raises(DataError, match="no annotations of a known format"):
        read_annotations([tmp_path])
    coco(tmp_path)
    cvat(tmp_path)
    with pytest.raises(DataError, match="of several formats; name the files of one: COCO"):
        read_annotations([tmp_path])


def test_a_key_in_the_middle_of_a_large_file_tells_the_format(tmp_path):
    """COCO with the images between annotations and categories, each longer than what is read."""
    image(tmp_path / "a.png")
    coco(tmp_path)
    file = tmp_path / "annotations.json"
    whole = json.loads(file.read_text())
    rest = {"note": ["-" * 40] * 4000}
    middle = {**rest, **whole, "licence": ["=" * 40] * 4000}
    file.write_text(json.dumps(middle))
    assert detect(tmp_path) == {"COCO": [file]}


def test_the_background_has_one_name_whatever_blanks_are_around_it(tmp_path):
    image(tmp_path / "a.png")
    shapes = [{"label": x, "points": p} for x, p in (("bar", BAR), ("background ", ELL))]
    labelme(tmp_path, shapes=shapes, imageHeight=None, imageWidth=None)
    found, labels = read(tmp_path, overlap="order")
    assert found.classes == ("background ", "bar")
    assert np.array_equal(labels["a.png"] == 1, MASKS["bar"] & ~MASKS["ell"])


@pytest.mark.parametrize(
    ("here", "sources"),
    [("annotations", ["."]), ("", ["annotations/a.json", "{}/annotations/b.json"])],
)
def test_the_folder_of_the_images_is_found_from_wherever_one_stands(
    tmp_path, monkeypatch, here, sources
):
    (tmp_path / "annotations").mkdir()
    for name in "ab":
        image(tmp_path / f"{name}.png")
        coco(tmp_path, f"{name}.png")
        (tmp_path / "annotations.json").rename(tmp_path / f"annotations/{name}.json")
    monkeypatch.chdir(tmp_path / here)
    found = read_annotations([Path(source.format(tmp_path)) for source in sources])
    assert [x.name for x in found.images] == ["a.png", "b.png"]
    assert found.folder.resolve() == tmp_path


def test_packed_run_lengths_are_those_of_pycocotools_or_refused():
    """Every text that passes fills its size; damage never passes unseen."""
    rng = np.random.default_rng(9)
    for _ in range(300):
        size = tuple(int(x) for x in rng.integers(1, 40, 2))
        mask = np.asfortranarray(rng.random(size) < rng.random(), np.uint8)
        packed = masks.encode(mask)["counts"]
        assert np.array_equal(mask_of_runs(unpacked(packed.decode()), size[::-1]).T, mask)
        damaged = bytearray(packed)
        damaged[rng.integers(len(damaged))] = rng.integers(48, 112)
        for text in (bytes(damaged), packed[:-1], packed + b"5"):
            try:
                found = mask_of_runs(unpacked(text.decode()), size[::-1]).T
            except ValueError:
                continue
            assert np.array_equal(masks.decode({"size": size, "counts": text}), found)


def test_without_pycocotools_the_package_to_install_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    image(tmp_path / "a.png")
    coco(tmp_path)
    with pytest.raises(ConfigError, match=r"pip install '\.\[annotations\]'"):
        read_annotations([tmp_path])


def test_the_command_writes_labels_classes_and_pairs_that_segtrain_reads(tmp_path, lab):
    data, out = tmp_path / "data", tmp_path / "out"
    for split in ("#train", "val"):
        image(data / split / "a.png")
        coco(data / split)
    said = lab.done("data", "import", data, "--output", out, "--overlap", "order").out
    assert "2 labels from COCO, overlaps by order" in said
    assert re.search(rf"blob +{100 * MASKS['blob'].mean():.3f} % +2\n", said)
    classes = load_class_file(str(out / "classes.yaml"))
    assert classes.names == tuple(FLAGS)
    for name in ("#train/a", "val/a"):
        label = label_format_of("ids").read(out / "labels" / f"{name}.png", classes)
        assert np.array_equal(label, drawn("ell", "bar", "blob"))
    listing = list_pairs(out / "pairs.txt", data, out)
    assert not listing.problems
    assert [pair.name for pair in listing.pairs] == ["#train/a", "val/a"]

    said = lab.refused("data", "import", data, "--output", out)
    assert "--overwrite replaces them" in said
    lab.done("data", "import", data / "val", "--output", out, "--overwrite", "--jobs", 1)
    assert not (out / "labels" / "#train").exists()
    lab.refused("data", "import", data, "--output", data / "labels")
    (out / "notes.txt").touch()
    said = lab.refused("data", "import", data, "--output", out, "--overwrite")
    assert "holds notes.txt" in said


def test_half_an_import_is_no_data_set_and_the_next_one_replaces_it(tmp_path, lab, monkeypatch):
    data, out = tmp_path / "data", tmp_path / "out"
    command = ("data", "import", data, "--output", out)
    image(data / "a.png")
    coco(data)
    with monkeypatch.context() as patched:
        patched.setattr(label_maps, "write_atomic", Mock(side_effect=KeyboardInterrupt))
        assert lab.command(*command).code == EXIT_INTERRUPTED
    assert [path.name for path in out.iterdir()] == [".unfinished"]
    lab.done(*command)
    assert sorted(path.name for path in out.iterdir()) == ["classes.yaml", "labels", "pairs.txt"]


def test_a_background_that_no_pixel_shows_is_no_class(tmp_path, lab):
    image(tmp_path / "data" / "a.png")
    everything = [(0, 0), (W, 0), (W, H), (0, H)]
    shapes = [{"label": "sky", "points": everything}, {"label": "ell", "points": ELL}]
    labelme(tmp_path / "data", shapes=shapes)
    lab.done("data", "import", tmp_path / "data", "--output", tmp_path / "out")
    classes = load_class_file(str(tmp_path / "out" / "classes.yaml"))
    assert set(classes.names) == {"ell", "sky"}
    label = label_format_of("ids").read(tmp_path / "out/labels/a.png", classes)
    assert np.array_equal(label == classes.names.index("ell"), MASKS["ell"])


def both_tools(root):
    """One image of LabelMe, whose classes no file declares, and one of CVAT, which declares them
    in the other order."""
    image(root / "lm/a.png")
    outlines = {"ell": ELL, "bar": BAR}
    labelme(root / "lm", shapes=[{"label": x, "points": p} for x, p in outlines.items()])
    image(root / "cv/b.png")
    cvat(root / "cv", "".join(polygon(*one) for one in outlines.items()), "b.png")


@pytest.mark.parametrize("names", [None, "bar,blob,ell"])
def test_sources_of_several_formats_are_imported_with_one_order_of_classes(tmp_path, lab, names):
    both_tools(tmp_path / "data")
    options = ["--names", names] if names else []
    out = tmp_path / "out"
    sources = tmp_path / "data/lm", tmp_path / "data/cv"
    said = lab.done("data", "import", *sources, "--output", out, *options).out
    assert "2 labels from LabelMe and CVAT" in said
    found = load_class_file(str(out / "classes.yaml"))
    expected = ["background", *names.split(",")] if names else FLAGS
    assert found.names == tuple(expected)
    for name in ("lm/a", "cv/b"):
        label = label_format_of("ids").read(out / "labels" / f"{name}.png", found)
        assert np.array_equal(label, drawn("ell", "bar", classes=expected))
    listing = list_pairs(out / "pairs.txt", tmp_path / "data", out)
    assert not listing.problems
    assert {pair.name for pair in listing.pairs} == {"cv/b", "lm/a"}
    shown = ",".join(expected[1:])
    assert f"--names {shown} gives another import the same ids" in said
    assert "next: segtrain init" not in said  # which asks which of the formats


def test_names_that_leave_out_a_class_and_formats_that_cannot_be_joined_are_refused(tmp_path, lab):
    both_tools(tmp_path / "data")
    data, out = tmp_path / "data", ("--output", tmp_path / "out")
    said = lab.refused("data", "import", data / "lm", *out, "--names", "bar,el")
    assert "--names bar,el: annotations show ell, too; name all classes" in said
    said = lab.refused("data", "import", data / "lm", *out, "--names", "bar,background,ell")
    assert "background has the id 0; name it first" in said
    coco(data / "cv", "b.png")
    said = lab.refused("data", "import", data / "lm", data / "cv/annotations.json", *out)
    assert "differ in which region is on top: --overlap" in said
    rle_table(data / "cv")
    said = lab.refused("data", "import", data / "lm", data / "cv/train.csv", *out, code=3)
    assert "import those of RLE table alone" in said


def test_volumes_and_annotations_are_imported_one_after_the_other(tmp_path, lab):
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans/a.nii.gz").write_bytes(b"x")
    (tmp_path / "coco.json").write_text('{"images": [], "annotations": [], "categories": []}')
    words = "data", "import", tmp_path / "coco.json", tmp_path / "scans", "--output", tmp_path / "o"
    assert "a.nii.gz: volumes and annotations are imported one" in lab.refused(*words, code=3)


@pytest.mark.parametrize("option", ["--axis z", "--group a", "--attribute kind"])
def test_an_option_without_effect_on_annotations_is_refused(tmp_path, lab, option):
    both_tools(tmp_path / "data")
    words = "data", "import", tmp_path / "data/lm", "--output", tmp_path / "out", *option.split()
    assert f"{words[-2]}: no effect on annotation" in lab.refused(*words)
