"""Pairs by names alone, and names of classes from the files that tools leave behind."""

import json
import signal
from itertools import chain

import numpy as np
import pytest

from segtrain.config.strict_yaml import foreign_yaml
from segtrain.data.read.classes import says_no_class
from segtrain.desk.survey.affixes import parse_names
from segtrain.desk.survey.class_words import said_beside
from segtrain.desk.survey.names import read_legend
from segtrain.desk.survey.pair_lists import listed_pairs
from segtrain.desk.survey.pairs import match
from segtrain.desk.survey.questions import UndecidedError
from segtrain.errors import ConfigError

FIVE = [f"{i:03}" for i in range(5)]
PAIRS = {
    "mirrored folders": [
        (f"images/{s}/{i}.jpg", f"labels/{s}/{i}.png") for s in ("train", "val") for i in FIVE
    ],
    "an end": [(f"a/{i}.jpg", f"a/{i}_mask.png") for i in FIVE],
    "two ends": [(f"{i}_sat.jpg", f"{i}_mask.png") for i in FIVE],
    "the same number": [(f"foo/img{i}.png", f"bar/lab{int(i)}.png") for i in FIVE],
    "scenes": [(f"s{i}/rgb.png", f"s{i}/seg.png") for i in FIVE],
    "numbers that repeat": [
        (f"s{s}/rgb/{i}.png", f"s{s}/semantic/{i}.png") for s in FIVE for i in FIVE
    ],
    "long ends": [
        (f"leftImg8bit/{c}/{c}_{i}_leftImg8bit.png", f"gtFine/{c}/{c}_{i}_gtFine_labelIds.png")
        for c, number in (("aachen", 5), ("ulm", 2), ("jena", 1))
        for i in FIVE[:number]
    ],
    "signs": [(f"{i}.jpg", f"{i}_mask.png") for i in ("img-1", "img_1", "img 1", "img-2", "img_2")],
    "upper case": [(f"train/DSC{i}.JPG", f"train_masks/dsc{i}_mask.gif") for i in FIVE],
    "two frames a folder": [
        (f"rgb_anon/fog/{s}/{s}_{i}_rgb_anon.png", f"gt/fog/{s}/{s}_{i}_gt_labelIds.png")
        for s in ("G475", "G476", "G477")
        for i in FIVE[:2]
    ],
    "several roots": [
        (f"{r}/deep/photos/{i}.jpg", f"{r}/masks/{i}.png") for r in ("north", "south") for i in FIVE
    ],
}


def found(images, labels):
    names = parse_names([*images, *labels])
    return match(names[: len(images)], names[len(images) :])[1]


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_labels_are_found_by_names(pairs):
    images, labels = zip(*pairs, strict=True)
    matches = found(sorted(images), sorted(labels))
    assert matches.labels == {image: [label] for image, label in pairs}
    assert (matches.unclear, matches.alone, matches.bands) == ([], [], {})


def test_an_order_of_names_is_no_pairing():
    images, labels = [f"a/{i}.jpg" for i in "pqrst"], [f"b/{i}.png" for i in "uvwxy"]
    matches = found(images, labels)
    assert (matches.labels, matches.alone) == ({}, labels)
    # The same name in the other split belongs to another image.
    matches = found(["images/train/1.jpg"], ["labels/val/1.png"])
    assert (matches.labels, matches.alone) == ({}, ["labels/val/1.png"])


SCENES = [(f"scene_{s}/img/{i}.png", f"scene_{s}/mask/{i}.png") for s in (1, 2, 3) for i in FIVE]


@pytest.mark.parametrize(
    ("gone", "unclear", "alone"),
    [
        # One image: its label fits the images of that name in both other scenes.
        (lambda x: x == "scene_3/img/002.png", ["scene_3/mask/002.png"], []),
        # A scene of labels alone, and one of images alone.
        (lambda x: x.startswith(("scene_2/img", "scene_3/mask")), "scene_2", []),
        # The only label of its name, beside the only image of its name.
        (
            lambda x: (
                x.startswith("scene_3") or x in ("scene_1/mask/002.png", "scene_2/img/002.png")
            ),
            [],
            ["scene_2/mask/002.png"],
        ),
    ],
)
def test_a_label_is_not_given_to_another_scene(gone, unclear, alone):
    images, labels = ([x for x in side if not gone(x)] for side in zip(*SCENES, strict=True))
    matches = found(images, labels)
    pairs = {image: [label] for image, label in SCENES if not (gone(image) or gone(label))}
    assert matches.labels == pairs
    unclear = [f"scene_2/mask/{i}.png" for i in FIVE] if unclear == "scene_2" else unclear
    assert (matches.unclear, matches.alone, matches.bands) == (unclear, alone, {})


def test_labels_of_several_people_go_to_images_of_several_cameras():
    """All names differ, so each is the label of its image, however the folders divide them."""
    images = [f"cam{i % 2}/photo/{i:03}.jpg" for i in range(12)]
    labels = [f"{'ann' if i < 7 else 'bob'}/masks/{i:03}.png" for i in range(12)]
    wanted = {image: [label] for image, label in zip(images, labels, strict=True)}
    assert found(sorted(images), labels).labels == wanted


def test_an_image_in_several_files_is_one_with_bands():
    bands = [f"s2/t{i}_B0{b}.tif" for i in FIVE for b in (2, 3, 4)]
    matches = found(bands, [f"mask/t{i}.png" for i in FIVE])
    assert matches.labels == {f"s2/t{i}_B02.tif": [f"mask/t{i}.png"] for i in FIVE}
    assert matches.bands == {
        f"s2/t{i}_B02.tif": [f"s2/t{i}_B03.tif", f"s2/t{i}_B04.tif"] for i in FIVE
    }


@pytest.mark.parametrize("word", ["class", "Class", "LABEL"])
def test_the_number_of_a_file_that_is_called_a_class_tells_the_class(word):
    labels = [f"s{i}/masks/{word}_{k}.png" for i in range(4) for k in (1, 2)]
    names = {x.path: x for x in parse_names([*(f"s{i}/image.jpg" for i in range(4)), *labels])}
    said = said_beside({label: f"{label[:2]}/image.jpg" for label in labels}, names)
    wanted = [f"masks/{word.lower()}_{k}" for k in (1, 2)] * 4
    assert [said[label].text for label in labels] == wanted


@pytest.mark.parametrize(
    ("image", "label", "wanted"),
    [
        ("img/{i}.jpg", "masks_v1/masks_v1/{i}.png", ("masks_v1",)),
        ("train_city/{i}.jpg", "train_city/{i}_mask.png", ()),
    ],
)
def test_a_folder_of_a_label_counts_by_its_place_and_is_none_of_the_image(image, label, wanted):
    """The last role folder stays below one of its name; a folder of the image says nothing."""
    images = {label.format(i=i): image.format(i=i) for i in FIVE}
    names = {x.path: x for x in parse_names([*images.values(), *images])}
    assert {x.folders for x in said_beside(images, names).values()} == {wanted}


OBJECTS = [
    ("{i}", "{i}/{k}", lambda i: 3),
    ("{i}", "{i}/mask_{k}", lambda i: 2 + (i == 1)),
    ("{i}", "{i:04}/{k:04}", lambda i: 3),
    ("{i:04}", "{i:04}/{k:04}", lambda i: 2 + i % 4),
    ("img_{i}", "img_{i}/{k}", lambda i: 3),
    ("img_{i}", "img_{i}/{k}", lambda i: 8),
    ("part{i}a", "part{i}a/{k}", lambda i: 9),
]


def objects(image, label, count):
    """The files of each of 8 images, `count(i)` objects of one class."""
    return {
        f"images/{image.format(i=i)}.jpg": [
            f"masks/{label.format(i=i, k=k)}.png" for k in range(count(i))
        ]
        for i in range(8)
    }


@pytest.mark.parametrize(("image", "label", "count"), OBJECTS)
def test_objects_in_a_folder_that_is_called_as_an_image_are_of_it(image, label, count):
    wanted = objects(image, label, count)
    assert found([*wanted], [*chain(*wanted.values())]).labels == wanted


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("s{i:02}/image.png", "s{i:02}/masks/{name}.png"),
        # p00_z03_liver.png is of p00_z03.png: numbers of slices are no roles.
        ("images/p{patient:02}_z{z:02}.png", "masks/p{patient:02}_z{z:02}_{name}.png"),
    ],
)
def test_the_files_of_a_case_are_known_by_its_folder_or_its_number(image, label):
    wanted = {}
    for i in range(12):
        case = {"i": i, "patient": i // 4, "z": i % 4}
        files = [label.format(name=name, **case) for name in ("kidney", "liver")]
        wanted[image.format(**case)] = files
    assert found([*wanted], [*chain(*wanted.values())]).labels == wanted


# The latter as four classes in five images.
@pytest.mark.parametrize("count", [lambda i: 8, lambda i: 5 * (i < 4)])
def test_objects_whose_folder_and_file_are_images_are_asked_about(count):
    wanted = objects("{i}", "{i}/{k}", count)
    images, labels = map(parse_names, ([*wanted], [*chain(*wanted.values())]))
    with pytest.raises(UndecidedError, match="2 ways to find the images of labels") as error:
        match(images, labels)
    assert [x.option for x in error.value.readings] == ["--pairs names", "--pairs folders"]
    by_folder = match(images, labels, "folders")[1].labels
    assert by_folder == {image: files for image, files in wanted.items() if files}
    by_name = match(images, labels, "names")[1].labels
    assert all(x.endswith("/1.png") for x in by_name["images/1.jpg"])


@pytest.mark.parametrize("header", ["image,mask", "mask,image", ""])
def test_a_table_of_pairs_counts_whatever_it_is_called(tmp_path, header):
    order = np.random.default_rng(0).permutation(16).tolist()
    pairs = [(f"{i:03}.png", f"{k:03}.png") for i, k in enumerate(order)]
    rows = [",".join(pair[::-1] if header == "mask,image" else pair) for pair in pairs]
    (tmp_path / "mapping.csv").write_text("\n".join([header, *rows]).strip())
    sides = zip(*((f"images/{image}", f"masks/{mask}") for image, mask in pairs), strict=True)
    images, masks = map(parse_names, sides)
    wanted = {image.path: mask.path for image, mask in zip(images, masks, strict=True)}
    assert listed_pairs(tmp_path, ["mapping.csv"], images, masks) == (wanted, ("mapping.csv",))


def test_tables_that_disagree_are_refused(tmp_path):
    for name, step in (("a.csv", 0), ("b.txt", 1)):
        rows = (f"images/{i}.png,masks/{(i + step) % 8}.png\n" for i in range(8))
        (tmp_path / name).write_text("".join(rows))
    images, masks = (parse_names([f"{x}/{i}.png" for i in range(8)]) for x in ("images", "masks"))
    said = "has the label masks/0.png in a.csv and masks/1.png in b.txt"
    with pytest.raises(ConfigError, match=said):
        listed_pairs(tmp_path, ["a.csv", "b.txt"], images, masks)


ROAD_CAR = [("road", None, None), ("car", None, None)]
VALUES = [("road", 3, None), ("car", 7, None)]
COLORS = [("road", None, (128, 64, 128)), ("car", None, (0, 0, 142))]
NUMBERED = [("road", 3, (1, 2, 3)), ("car", 7, (4, 5, 6))]
SUPERVISELY = """
{"classes": [{"title": "road", "color": "#804080"}, {"title": "car", "color": "#00008E"}]}"""
OF_COLORS = (("road", "#804080"), ("car", "#00008E"))
GROUND_TRUTH = "\n".join(
    json.dumps(
        {"job-ref-metadata": {"internal-color-map": {"1": {"class-name": x, "hex-color": y}}}}
    )
    for x, y in OF_COLORS
)
LEGENDS = [
    ("output.manifest", f'{{"source-ref": "a"}}\n{GROUND_TRUTH}\n[1]', COLORS),
    ("classes.txt", "road\ncar\n", ROAD_CAR),
    ("classes.txt", "lane 1\nlane 2\n", [("lane 1", None, None), ("lane 2", None, None)]),
    ("labels.txt", "3: road\n7: car\n", VALUES),
    ("labelmap.txt", "# label:color_rgb:parts:actions\nroad:128,64,128::\ncar:0,0,142::\n", COLORS),
    ("_classes.csv", "Pixel Value, Class\n 3, road\n 7, car\n", VALUES),
    ("class_dict.csv", "name;r;g;b\nroad;128;64;128\ncar;0;0;142\n", COLORS),
    ("class_dict.csv", "name,r,g,b\nroad,128,64,128\ncar,0,0,142\n", COLORS),
    ("class_dict_seg.csv", "name, r, g, b\nroad, 128, 64, 128\ncar, 0, 0, 142\n", COLORS),
    ("label_colors.txt", "128 64 128\troad\n0 0 142\t\tcar\n", COLORS),
    ("a-colormap.txt", "3 road 1 2 3\n7 car 4 5 6\n", NUMBERED),
    ("data.yaml", "train: ../train\nnc: 2\nnames: [road, car]\n", ROAD_CAR),
    ("data.yaml", "names: {3: road, 7: car}\n", VALUES),
    ("ontology.yaml", "- {3: road, 7: car}\n- {3: [1, 2, 3], 7: [4, 5, 6]}\n", NUMBERED),
    ("data.yaml", "names: {0: 747, 1: 0}\n", [("747", 0, None), ("0", 1, None)]),
    ("data.yaml", "names: [747, no]\n", [("747", None, None), ("no", None, None)]),
    ("dataset.json", '{"labels": {"road": 3, "car": 7}, "numTraining": 9}', VALUES),
    ("dataset.json", '{"labels": {"3": "road", "7": "car"}}', VALUES),
    ("notes.json", '{"categories": [{"id": 3, "name": "road"}, {"id": 7, "name": "car"}]}', VALUES),
    ("meta.json", SUPERVISELY, COLORS),
    ("palette.json", '{"#804080": "road", "#00008E": "car"}', COLORS),
    ("palette.json", '{"road": [128, 64, 128], "car": [0, 0, 142]}', COLORS),
    ("Class-Names.txt", "road\ncar\n", ROAD_CAR),
    ("class_list.txt", "road\ncar\n", ROAD_CAR),
    ("label_names.csv", "road\ncar\n", ROAD_CAR),
    ("label_names.csv", "name\nroad\ncar\n", ROAD_CAR),
    ("classes.csv", "3,road\n7,car\n", VALUES),
    ("class_map.csv", "Class ID,Class\n3,road\n7,car\n", VALUES),
    ("class_dict.tsv", "name\tr\tg\tb\nroad\t128\t64\t128\ncar\t0\t0\t142\n", COLORS),
    ("gtruth_codes.tsv", "label\tGT_code\nroad\t3\ncar\t7\n", VALUES),
    ("Legend.txt", "3 road\n7 car\n", VALUES),
    ("labelmap.txt", "3: road\n7: car\n", VALUES),
    ("labels.txt", "id,name\n3,road\n7,car\n", VALUES),
    ("labels.yaml", "3: road\n7: car\n", VALUES),
    ("classes.yaml", "[road, car]\n", ROAD_CAR),
    ("classes.json", '{"3": {"name": "road"}, "7": {"name": "car"}}', VALUES),
    ("classes.json", '{"road": {"id": 3}, "car": {"id": 7}}', VALUES),
    ("id2label.json", '{"3": "road", "7": "car"}', VALUES),
    ("config.json", '{"id2label": {"3": "road", "7": "car"}, "depth": 4}', VALUES),
    ("meta.json", '{"class_names": ["road", "car"]}', ROAD_CAR),
    ("ontology.json", SUPERVISELY.replace("classes", "tools"), COLORS),
]


@pytest.mark.parametrize(("name", "text", "wanted"), LEGENDS)
def test_names_values_and_colours_come_from_what_tools_leave(tmp_path, name, text, wanted):
    (tmp_path / name).write_text(text)
    legend = read_legend(tmp_path / name, name)
    assert [one[:3] for one in legend.classes] == wanted


# Of merge keys in merge keys, PyYAML makes 4 ** 12 copies.
MERGED = "l0: &l0 {a: 1}\n" + "".join(
    f"l{i}: &l{i} {{<<: [*l{i - 1}, *l{i - 1}, *l{i - 1}, *l{i - 1}]}}\n" for i in range(1, 13)
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.yaml", MERGED + "names: [road, car]\n"),
        *(("classes.txt", f"a{50_000 * filler}b\n") for filler in (" ", "1 ", ", ", "\t:", '"')),
        *(("colors.txt", f"a{50_000 * filler}b\n") for filler in (" ", "1 ", ", ", "\t:", '"')),
        ("labelmap.txt", f"a{50_000 * ':'}\n"),
        ("class_dict.csv", f"name,value\n{50_000 * ','}\n"),
    ],
)
def test_no_list_takes_longer_than_its_length(tmp_path, name, text):
    """Squares of such lengths take a minute, cubes a year."""

    def end(*_):
        pytest.fail("it takes more than 20 s of the processor")

    (tmp_path / name).write_text(text)
    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, 20)
    try:
        read_legend(tmp_path / name, name)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def test_yaml_of_others_is_read_without_guesses(tmp_path):
    text = "names: {0: 'no', 1: no, 2: 1.5, 3: [10, 010, true, ~]}\nempty:\n"
    names = {"0": "no", "1": "no", "2": 1.5, "3": [10, "010", True, None]}
    assert foreign_yaml(text) == {"names": names, "empty": None}
    assert foreign_yaml("[yes, 1]", as_text=True) == ["yes", "1"]
    for wrong in ("a: &x 1", "a: !!python/name:os.system", "[1, 2", "? [1]\n: 2", "[" * 50):
        with pytest.raises(ValueError, match=r"not allowed|not YAML|nested deeper"):
            foreign_yaml(wrong)


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16", "utf-8-sig", "utf-16-le"])
def test_lists_are_read_in_the_encoding_of_their_file(tmp_path, encoding):
    (tmp_path / "classes.csv").write_text("name,value\nStraße,3\n", encoding)
    legend = read_legend(tmp_path / "classes.csv", "classes.csv")
    if encoding == "utf-16-le":  # without a mark
        assert legend is None
        return
    assert [one[:3] for one in legend.classes] == [("Straße", 3, None)]
    assert ("not UTF-8: read as Windows-1252" in legend.source) == (encoding == "cp1252")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("readme.txt", "road\ncar\n"),
        ("config.json", '{"width": 512, "height": 256}'),
        ("classes.json", "{broken"),
        ("settings.yaml", "lr: 0.1\n"),
        ("classes.csv", "a,b\n1,2\n"),
        ("classes.txt", "road\nroad\n"),
        ("class_statistics.csv", "class,pixels\nroad,3\ncar,7\n"),
        ("colors.txt", "128 64 128 road\nand more\n"),
        ("label_counts.json", '{"road": 300, "car": 7}'),
        ("labels.csv", "image,label\n1.png,road\n2.png,car\n"),
        ("labels.txt", "images/1.png\nimages/2.png\n"),
        ("palette.txt", "128 64 128\n0 0 142\n"),
        ("labels.json", '{"1.png": {"id": 3}, "2.png": {"id": 7}}'),
    ],
)
def test_other_files_are_no_lists_of_classes(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_legend(tmp_path / name, name) is None


@pytest.mark.parametrize(
    ("name", "is_none"),
    [
        *((x, True) for x in ("void", "Un-labelled", "don't care", "out of ROI", "not labeled")),
        *((x, True) for x in ("background/unlabelled", "ignore_region", "unclassified")),
        *((x, True) for x in ("Unlabeled", "not labelled", "unlabelled area", "Ignored")),
        ("Unlabeled litter", False),
        *((x, False) for x in ("background", "avoid", "road/sidewalk", "outside wall", "label")),
    ],
)
def test_names_say_that_there_is_no_class(name, is_none):
    assert says_no_class(name) == is_none


def test_what_means_no_class_is_seen_by_mark_or_name(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"labels": [{"readable": "Bird", "evaluate": true},'
        ' {"readable": "Car", "evaluate": false},'
        ' {"readable": "Un-labelled"}, {"readable": "VOID"}]}'
    )
    classes = read_legend(tmp_path / "config.json", "config.json").classes
    assert [one.means_no_class for one in classes] == [False, True, True, True]


@pytest.mark.parametrize(
    ("folder", "split"),
    [("DIS-TR", "train"), ("DIS-VD", "val"), ("DIS-TE4", "test"), ("t2", None), ("TEM1", None)],
)
def test_words_of_splits_may_be_short_or_numbered(folder, split):
    """DIS5K has four test sets, of which none is to be trained on."""
    (name,) = parse_names([f"data/{folder}/im/a.jpg"])
    assert name.split == split
