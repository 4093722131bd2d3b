"""Lists of splits in all their forms: which images are to train on, and which to evaluate on."""

import csv
import io
import json
import re
from pathlib import PurePosixPath

import numpy as np
import pytest
from folders import images_in, labels_of, quick_init, save, scene
from PIL import Image

from segtrain.desk.survey.choose_set import choose_labels
from segtrain.desk.survey.listings import unused_lists
from segtrain.desk.survey.questions import Answers, UndecidedError
from segtrain.desk.survey.splits import choose_splits
from segtrain.desk.survey.survey import survey
from segtrain.errors import ConfigError

SEQUENCES = "bear", "camel", "dog", "elk", "fox", "goat"
FRAMES = 3


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


def write_images(folder, image="images/{seq}_{k}.png", label="labels/{seq}_{k}.png"):
    """Three frames of each sequence; returns the paths of the images."""
    paths = []
    for number, (i, path, classes) in enumerate(
        images_in(folder, "tmp/{i}.png", FRAMES * len(SEQUENCES))
    ):
        fields = {"seq": SEQUENCES[i // FRAMES], "k": i % FRAMES}
        target = folder / image.format(**fields)
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / path).rename(target)
        save(folder / label.format(**fields), classes)
        paths.append(image.format(**fields))
        assert number == i
    (folder / "tmp").rmdir()
    return paths


def put(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        path.write_text(content if isinstance(content, str) else "\n".join(content))


def table(rows, delimiter=","):
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue()


def divide(folder, **answers):
    """The division as init decides it: paths to train and to evaluate on, and what is said."""
    val_list = answers.pop("val_list", None)
    found = survey(folder, Answers(val=None if val_list is None else str(val_list)))
    given = Answers(val=None if val_list is None else str(val_list), **answers)
    splits = choose_splits(found, choose_labels(found, given), given)
    said = "\n".join([splits.reason, *splits.warnings, *found.notes])
    return [{x.path for x in part} for part in (splits.train, splits.val)], said


def stem(path):
    return PurePosixPath(path).stem


def sequence(path):
    return stem(path).split("_")[0]


def two_files(name, line=stem):
    """A file for each split; line: what it says of an image."""

    def build(folder, train, val):
        for split, paths in (("train", train), ("val", val)):
            put(folder, name.format(split), list(dict.fromkeys(map(line, paths))))

    return build


def one_table(name, header, row, delimiter=","):
    def build(folder, train, val):
        both = [*((x, "train") for x in train), *((x, "val") for x in val)]
        rows = [row(path, split, i) for i, (path, split) in enumerate(sorted(both))]
        put(folder, name, table([header, *rows] if header else rows, delimiter))

    return build


def one_json(name, content):
    return lambda folder, train, val: put(folder, name, content(train, val))


def yolo(folder, train, val):
    two_files("lists/{}.txt", "./{}".format)(folder, train, val)
    put(folder, "data.yaml", "train: lists/train.txt\nval: lists/val.txt\nnc: 2\n")


def coco(folder, train, val):
    for split, paths in (("train", train), ("val", val)):
        images = [{"id": i, "file_name": PurePosixPath(x).name} for i, x in enumerate(paths)]
        put(folder, f"instances_{split}2017.json", {"images": images, "info": {}})


FORMS = {
    "stems": two_files("{}.txt"),
    "files": two_files("{}.lst", lambda x: PurePosixPath(x).name),
    "paths": two_files("lists/{}_list.list", str),
    "without_suffix": two_files("splits/{}"),
    "another_machine": two_files("{}.txt", lambda x: "C:\\work\\" + x.replace("/", "\\")),
    "labels": two_files("{}.txt", lambda x: f"labels/{stem(x)}_mask.png"),
    "glued": two_files("{}2017.txt"),
    "of_objects": two_files("cat_{}.txt", lambda x: f"{stem(x)} -1"),
    "pairs": two_files("{}.csv", lambda x: f"{x},labels/{stem(x)}.png"),
    "sequences": two_files("ImageSets/2017/{}.txt", sequence),
    "names_in_json": two_files("{}.json"),
    "column": one_table("meta.csv", ("image", "split"), lambda x, s, _: (x, s)),
    "last_column": one_table("m.tsv", ("", "file", "set"), lambda x, s, i: (i, x, s), "\t"),
    "subset": one_table("m.csv", ("Subset", "Id"), lambda x, s, _: (s.title(), stem(x)), ";"),
    "fold": one_table(
        "folds.csv", ("id", "fold"), lambda x, s, i: (x, 0 if s == "val" else 1 + i % 3)
    ),
    "of_sequences": one_table("seqs.csv", ("scene", "partition"), lambda x, s, _: (sequence(x), s)),
    "mapping": one_json("splits.json", lambda train, val: {"train": train, "valid": val}),
    "records": one_json(
        "meta.json",
        lambda train, val: [{"image": x, "split": s} for s in ("train", "val")
                            for x in (train if s == "train" else val)],
    ),
    "split_of_each": one_json(
        "by_name.json",
        lambda train, val: dict.fromkeys(map(stem, train), "train") | dict.fromkeys(val, "val"),
    ),
    "nnunet": one_json(
        "splits_final.json",
        lambda train, val: [{"train": [*map(stem, train)], "val": [*map(stem, val)]}] * 2
        + [{"train": [*map(stem, val)], "val": [*map(stem, train)]}],
    ),
    "yolo": yolo,
    "coco": coco,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_list_say_the_same_division(folder, form):
    """Whole sequences of three frames, drawn by chance; the reason names the file."""
    paths = write_images(folder)
    chosen = np.random.default_rng(len(form)).choice(SEQUENCES, 2, replace=False)
    val = [x for x in paths if sequence(x) in chosen]
    FORMS[form](folder, [x for x in paths if x not in val], val)
    (train, evaluated), said = divide(folder)
    assert evaluated == {*val}
    assert train == {*paths} - {*val}
    sources = said.splitlines()[0].partition("the splits of ")[2]
    assert (folder / re.split(", |: ", sources)[0]).is_file()


@pytest.mark.parametrize(
    ("image", "line"),
    [
        ("frames/{seq}/{k}.png", "{seq}"),
        ("frames/{seq}/{k}.png", "{seq}/{k}"),
        ("images/{seq}/{k}.png", "images/{seq}"),
        ("images/{seq} no {k}, small.png", "{seq} no {k}, small.png"),
        ("images/img_{seq}{k}.png", "{seq}{k}"),
        ("images/{seq}_{k}_0000.png", "{seq}_{k}"),
        ("images/{seq}.v{k}.png", "{seq}.v{k}"),
    ],
)
def test_a_line_may_be_a_folder_or_a_part_of_a_name(folder, image, line):
    paths = write_images(
        folder, image, image.replace("frames/", "masks/").replace("images/", "masks/")
    )
    for split, part in (("train", SEQUENCES[:4]), ("val", SEQUENCES[4:])):
        lines = [line.format(seq=x, k=k) for x in part for k in range(FRAMES)]
        put(folder, f"{split}.txt", list(dict.fromkeys(lines)))
    (train, val), _ = divide(folder)
    assert val == {x for x in paths if "fox" in x or "goat" in x}
    assert train == {*paths} - val


def test_lines_that_name_nothing_are_counted(folder):
    """Most images of val.txt are gone; those that are left are evaluated on."""
    paths = write_images(folder)
    put(folder, "train.txt", paths[:15])
    put(folder, "val.txt", paths[15:] + [f"images/gone_{i}.png" for i in range(9)])
    (train, val), said = divide(folder)
    assert (train, val) == ({*paths[:15]}, {*paths[15:]})
    assert "val.txt: 9 of 12 lines name no image, or several" in said


def test_a_list_of_other_names_is_not_used_and_is_told(folder):
    paths = write_images(folder)
    put(folder, "train.txt", paths[:15])
    put(folder, "val.txt", [f"{i:05}" for i in range(32)])
    _, said = divide(folder)
    assert "val.txt: 32 of 32 lines name no image, or several: it is not used" in said


def test_another_split_is_not_meant_by_a_name_alone(folder):
    """val/goat_0 is gone; train/goat_0 is another image."""
    paths = write_images(folder, "images/train/{seq}_{k}.png", "labels/train/{seq}_{k}.png")
    put(folder, "train.txt", paths[:-3])
    put(folder, "val.txt", [*paths[-3:-1], "images/val/bear_0.png"])
    (train, val), said = divide(folder)
    assert paths[0] in train
    assert val == {*paths[-3:-1]}
    assert "val.txt: 1 of 3 lines names no image" in said


def test_images_without_a_label_are_told_of_lists(folder):
    paths = write_images(folder)
    put(folder, "train.txt", paths[:9])
    put(folder, "val.txt", paths[9:])
    for path in paths[12:]:
        (folder / path.replace("images", "labels")).unlink()
    (_, val), said = divide(folder)
    assert len(val) == 3
    assert "train.txt, val.txt: 6 of 9 images of val have no label, and are not used" in said


def test_labels_of_one_split_are_divided_and_it_is_told(folder):
    paths = write_images(folder)
    put(folder, "train.txt", paths[:12])
    put(folder, "val.txt", paths[12:])
    for path in paths[12:]:
        (folder / path.replace("images", "labels")).unlink()
    (train, val), said = divide(folder)
    assert train | val == {*paths[:12]}
    assert "of the splits of train.txt, val.txt only train has labels" in said


def test_many_images_in_no_list_are_asked_about(folder):
    paths = write_images(folder)
    put(folder, "train.txt", paths[:9])
    put(folder, "val.txt", paths[9:12])
    found = survey(folder)
    labels = choose_labels(found, Answers())
    with pytest.raises(UndecidedError, match="6 images with a label are in none of these") as asked:
        choose_splits(found, labels, Answers())
    assert [x.option for x in asked.value.readings] == ["--val 0.2", "--leave-out images"]
    anew = choose_splits(found, labels, Answers(val=0.2))
    assert len(anew.train) + len(anew.val) == len(paths)
    kept = choose_splits(found, labels, Answers(leave_out=frozenset({"images"})))
    assert [len(kept.train), len(kept.val)] == [9, 3]
    assert "6 of no list are not used" in kept.reason


def test_a_few_images_in_no_list_are_told(folder):
    paths = write_images(folder)
    put(folder, "train.txt", paths[:12])
    put(folder, "val.txt", paths[12:17])
    assert "; 1 of no list are not used" in divide(folder)[1]


def folds_in_folders(folder, paths):
    for k in range(3):
        val = paths[6 * k : 6 * k + 6]
        put(folder, f"fold{k}/train.txt", [x for x in paths if x not in val])
        put(folder, f"fold{k}/val.txt", [*val, "gone"])
    return [f"fold{k}/val.txt" for k in range(3)]


def folds_in_names(folder, paths):
    for k in range(3):
        val = paths[6 * k : 6 * k + 6]
        put(folder, f"train_fold{k}.txt", [x for x in paths if x not in val])
        put(folder, f"val_fold{k}.txt", val)
    return [f"val_fold{k}.txt" for k in range(3)]


def folds_alone(folder, paths):
    for k in range(3):
        put(folder, f"folds/fold_{k}.txt", paths[6 * k : 6 * k + 6])
    return [f"folds/fold_{k}.txt" for k in range(3)]


@pytest.mark.parametrize("build", [folds_in_folders, folds_in_names, folds_alone])
def test_folds_are_asked_about_and_each_answer_is_that_fold(folder, build):
    paths = write_images(folder)
    files = build(folder, paths)
    with pytest.raises(
        UndecidedError, match="3 lists say different images to evaluate on"
    ) as asked:
        divide(folder)
    options = [x.option for x in asked.value.readings]
    assert options == [f"--val {folder / x}" for x in files]
    for k, option in enumerate(options):
        (train, val), said = divide(
            folder, val_list=folder / option.removeprefix(f"--val {folder}/")
        )
        assert val == {*paths[6 * k : 6 * k + 6]}
        assert train == {*paths} - val
        assert files[k] in said
    found = survey(folder, Answers(val=str(folder / files[0])))
    assert unused_lists(folder, found.others, found.lists, found.images) == {}


def test_lists_of_each_sequence_are_taken_together(folder):
    paths = write_images(folder, "scans/{seq}/{k}.png", "masks/{seq}/{k}.png")
    for name in SEQUENCES:
        own = [x for x in paths if f"/{name}/" in x]
        put(folder, f"scans/{name}/train.txt", own[:2])
        put(folder, f"scans/{name}/val.txt", own[2:])
    (train, val), _ = divide(folder)
    assert val == {x for x in paths if x.endswith("2.png")}
    assert train == {*paths} - val


def test_lists_that_agree_ask_nothing_and_the_larger_counts(folder):
    """VOC has lists for each object, and trainval; none of them says another division."""
    paths = write_images(folder)
    for name in ("", "cat_", "small_"):
        number = 12 if name == "small_" else 15
        put(folder, f"Main/{name}train.txt", [f"{stem(x)}  1" for x in paths[:number]])
        put(folder, f"Main/{name}val.txt", [f"{stem(x)} -1" for x in paths[15:]])
        put(folder, f"Main/{name}trainval.txt", [stem(x) for x in paths])
    (_, val), said = divide(folder)
    assert val == {*paths[15:]}
    assert said.startswith("the splits of Main/train.txt, Main/val.txt: train and val")


def test_a_list_of_the_test_alone_is_kept_from_the_training(folder):
    paths = write_images(folder)
    put(folder, "test.txt", paths[:6])
    (train, val), said = divide(folder)
    assert (train, val) == ({*paths[6:]}, {*paths[:6]})
    assert "the splits of test.txt: train and test" in said


@pytest.mark.parametrize("split", ["val", "test"])
def test_an_image_in_two_lists_is_evaluated_on_and_told(folder, split):
    paths = write_images(folder)
    put(folder, "train.txt", paths[:14])
    put(folder, f"{split}.txt", paths[12:])
    (train, val), said = divide(folder)
    assert (train, val) == ({*paths[:12]}, {*paths[12:]})
    what = f"2 images are in both, and count as {split}: images/fox_0"
    assert f"train.txt and another list: {what}" in said


def test_a_table_may_say_what_is_evaluated_on(folder, tmp_path):
    paths = write_images(folder)
    rows = [(x, "val" if i < 5 else "train") for i, x in enumerate(paths)]
    (tmp_path / "mine.csv").write_text(table([("name", "split"), *rows]))
    (_, val), _ = divide(folder, val_list=tmp_path / "mine.csv")
    assert val == {*paths[:5]}


@pytest.mark.parametrize("place", ["mine.csv", "data/meta.csv"])
def test_a_table_of_train_and_test_evaluates_on_the_test_alone(folder, tmp_path, place):
    paths = write_images(folder)
    rows = [(x, "test" if i < 5 else "train") for i, x in enumerate(paths)]
    (tmp_path / place).write_text(table([("name", "split"), *rows]))
    (train, val), said = divide(folder, val_list=tmp_path / place)
    assert (train, val) == ({*paths[5:]}, {*paths[:5]})
    assert said.startswith(f"the splits of {tmp_path / place}: train and val")


def test_a_table_of_train_alone_names_nothing_to_evaluate_on(folder, tmp_path):
    rows = [(x, "train") for x in write_images(folder)]
    (tmp_path / "mine.csv").write_text(table([("name", "split"), *rows]))
    with pytest.raises(ConfigError, match=r"mine\.csv: its rows say train alone"):
        divide(folder, val_list=tmp_path / "mine.csv")


def test_a_link_to_a_list_of_the_folder_is_that_list(folder, tmp_path):
    paths = write_images(folder)
    files = folds_in_folders(folder, paths)
    (tmp_path / "link").symlink_to(folder / files[1])
    (train, val), _ = divide(folder, val_list=tmp_path / "link")
    assert (train, val) == ({*paths} - {*paths[6:12]}, {*paths[6:12]})


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("mine.csv", "name\nnothing\n", "line 2 names no image"),
        (
            "mine.txt",
            "# mine\nbear_0\n\nnothing\nfox_0\n",
            "line 4 names no image, or several: nothing;",
        ),
        ("mine.json", '["bear_0", "nothing", "fox_0"]', "entry 2 names no image.*: nothing;"),
        ("mine.txt", "\n", "it lists no image"),
    ],
)
def test_a_line_that_names_nothing_is_told_by_its_number(folder, tmp_path, name, text, what):
    write_images(folder)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"--val .*{name}: {what}"):
        divide(folder, val_list=tmp_path / name)


def test_a_list_within_the_name_of_another_is_not_used(folder):
    paths = write_images(folder)
    put(folder, "x, b.txt, y.txt", [f"{x}\tlabels/{stem(x)}.png" for x in paths])
    put(folder, "b.txt", paths[:7])
    found = survey(folder)
    assert found.lists == ("x, b.txt, y.txt",)
    assert unused_lists(folder, found.others, found.lists, found.images) == {"b.txt": 7}


def test_lists_that_are_not_used_are_found(folder):
    paths = write_images(folder)
    lines = [f"{stem(x)},{i}" for i, x in enumerate(paths)]
    put(folder, "weather.csv", ["image,rain", *lines[:12]])
    put(folder, "good.txt", paths[:7])
    put(folder, "notes.txt", ["These are images", "of animals", paths[0]])
    put(folder, "anchors.txt", ["0 0.5 0.5 0.1 0.1", "1 0.2 0.2 0.1 0.1"])
    for path in paths:
        put(folder, f"boxes/{stem(path)}.txt", ["0 0.5 0.5 0.1 0.1"])
    for i in range(30):
        put(folder, f"more/{i:05}.json", paths[:2])
    put(folder, "Segmentation/train.txt", paths[:15])
    put(folder, "Segmentation/val.txt", paths[15:])
    put(folder, "Main/cat_train.txt", paths[2:17])
    put(folder, "trainval.txt", paths)
    put(folder, "list.txt", [f"{stem(x)} 1 2" for x in paths])
    found = survey(folder)
    unused = unused_lists(folder, found.others, found.lists, found.images)
    assert unused == {"weather.csv": 12, "good.txt": 7}


def test_lists_in_folders_of_their_splits_go_together(folder):
    paths = write_images(folder)
    put(folder, "Training/train_id.txt", [stem(x) for x in paths[:13]])
    put(folder, "Validation/val_id.txt", [stem(x) for x in paths[13:]])
    assert divide(folder)[0] == [{*paths[:13]}, {*paths[13:]}]


def test_a_lone_list_of_those_to_train_on_leaves_the_others_to_evaluate(folder):
    paths = write_images(folder)
    put(folder, "train.txt", paths[:13])
    (train, val), reason = divide(folder)
    assert (train, val) == ({*paths[:13]}, {*paths[13:]})
    assert "train.txt" in reason


def test_a_column_of_splits_in_other_words_is_asked_about(folder, lab):
    paths = write_images(folder)
    rows = [f"{stem(x)},{'holdout' if i % 4 == 0 else 'fit'}" for i, x in enumerate(paths)]
    put(folder, "meta.csv", ["image,split", *rows])
    words = "init", folder, "--output", folder.with_name("made"), "--jobs", "1"
    assert "lists of images (1): meta.csv" in lab.command(*words).err
    said = lab.command(*words, "--val", folder / "meta.csv").err
    assert "meta.csv: it names all images, so none is left to train on" in said


@pytest.mark.parametrize("name", ["split.mat", "meta/dataset_split.xlsx", "fold_1.h5"])
def test_splits_in_a_form_that_is_not_read_are_asked_about(folder, lab, monkeypatch, name):
    quick_init(monkeypatch)
    paths = write_images(folder)
    for other in ("net_train_features.npz", "stats.mat", name):
        put(folder, other, "\0")
    made = folder.with_name("made")
    words = "init", folder, "--output", made, "--jobs", "1"
    said = lab.command(*words).err
    assert f"which images train, in a form that is not read (1): {name}; write the names" in said
    lab.done(*words, *re.search("--leave-out lists", said)[0].split())
    # Where a list says the splits, no other file need.
    put(folder, "val.txt", paths[:3])
    lab.done("init", folder, "--output", f"{made}_2", "--jobs", "1")
    assert written(folder.with_name("made_2"), "val.txt") == {*paths[:3]}


def test_lists_of_images_without_a_label_say_nothing_of_the_others(folder, lab, monkeypatch):
    """DDR: lesions in folders of splits, a file a class; pictures with grades and lists beside."""
    quick_init(monkeypatch)
    for i, path, classes in images_in(folder, "lesions/tmp/{i}.png", 12, num_classes=3):
        split = "train" if i < 8 else "valid"
        label = "label" if i < 8 else "segmentation label"
        target = folder / f"lesions/{split}/image/{i}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / path).rename(target)
        for k, name in enumerate(("EX", "HE"), start=1):
            mask = (classes == k).astype(np.uint8) * 255
            save(folder / f"lesions/{split}/{label}/{name}/{i}.png", mask)
    for split in ("train", "valid"):
        form = f"grades/{split}/{split[0]}{{i}}.png"
        names = [path for _, path, _ in images_in(folder, form, 5, seed=20)]
        put(folder, f"grades/{split}.txt", [f"{PurePosixPath(x).name} 2" for x in names])
    made = folder.with_name("made")
    words = "init", folder, "--output", made, "--jobs", "1"
    said = lab.command(*words).err
    assert "not used would be images without a label (10)" in said
    said = lab.done(*words, "--leave-out", "images").out
    assert "grades/train.txt, grades/valid.txt: no image of these lists has a label" in said
    assert written(made, "train.txt") == {f"lesions/train/image/{i}.png" for i in range(8)}
    assert written(made, "val.txt") == {f"lesions/valid/image/{i}.png" for i in range(8, 12)}
    assert re.findall(r"name: (\w+)", (made / "classes.yaml").read_text())[1:] == ["EX", "HE"]


def test_a_table_that_names_two_copies_of_each_image_pairs_and_divides_the_first(
    folder, lab, monkeypatch
):
    """As of Massachusetts Buildings: png/ repeats tiff/, whose files the first columns name."""
    quick_init(monkeypatch)
    rows = [
        ("id", "split", "tiff_image_path", "tif_label_path", "png_image_path", "png_label_path")
    ]
    for i, path, classes in images_in(folder, "png/img/p{i}.png", 12):
        names = f"tiff/img/p{i}.tif", f"tiff/gt/p{i}.tif", path, f"png/gt/p{i}.png"
        save(folder / names[0], scene(i)[0])
        save(folder / names[1], classes)
        save(folder / names[3], classes)
        rows.append((f"p{i}", "val" if i % 4 == 1 else "train", *names))
    put(folder, "metadata.csv", table(rows))
    made = folder.with_name("made")
    words = "init", folder, "--output", made, "--jobs", "1"
    said = lab.command(*words).err
    assert "12 of these images are copies of images with a label" in said
    lab.done(*words, *re.search("--leave-out .*", said)[0].split())
    assert written(made, "val.txt") == {f"tiff/img/p{i}.tif" for i in (1, 5, 9)}
    assert written(made, "train.txt") == {f"tiff/img/p{i}.tif" for i in range(12) if i % 4 != 1}


def test_a_manifest_of_ground_truth_pairs_and_names_labels_whose_indices_change(
    folder, lab, monkeypatch
):
    """SageMaker: the palette of each label numbers its classes anew; two files say the same."""
    quick_init(monkeypatch)
    colors, truth, lines = np.uint8([(255, 255, 255), (31, 119, 180), (44, 160, 44)]), {}, []
    for i, path, classes in images_in(folder, "raw/IMG_{i}.jpg", 8, num_classes=3):
        order = [0, 2, 1] if i % 2 else [0, 1, 2]  # the class of each index
        label = Image.fromarray(np.argsort(order).astype(np.uint8)[classes])
        label.putpalette(colors[order].tobytes())
        name = f"job/out/{7 - i}_2023.04.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        label.save(folder / name)
        names = dict(zip((0, 1, 2), ("BACKGROUND", "dent", "scratch"), strict=True))
        shown = {
            str(k): {"class-name": names[c], "hex-color": f"#{bytes(colors[c]).hex()}"}
            for k, c in enumerate(order)
        }
        ref = {"source-ref": f"s3://plant/{path}", "job-ref": f"s3://plant/gt/{name}"}
        lines.append(json.dumps(ref | {"job-ref-metadata": {"internal-color-map": shown}}))
        truth[path] = classes
    put(folder, "job/manifests/output.manifest", lines)
    put(folder, "job/a/output.manifest", lines[:-2])
    put(folder, "job/z/output.manifest", lines[:-2])
    made = folder.with_name("made")
    lab.done("init", folder, "--output", made, "--jobs", "1")
    said = re.findall(r"name: (\w+)", (made / "classes.yaml").read_text())
    assert said == ["BACKGROUND", "dent", "scratch"]
    found, _ = labels_of(made)
    assert found.keys() == truth.keys()
    assert all((found[path] == truth[path]).all() for path in truth)


def test_a_list_of_all_of_a_split_of_folders_says_nothing(folder):
    """As Kaggle's sample_submission.csv, and annotations of each split."""
    names = []
    for i, path, classes in images_in(folder, "images/{i}.png", 12):
        split = "test" if i < 4 else "train"
        pixels = folder / path
        name = f"{split}/images/{i}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels.rename(folder / name)
        if split == "train":
            save(folder / f"{split}/labels/{i}.png", classes)
        names.append(name)
    put(folder, "sample_submission.csv", ["id,rle", *(f"{stem(x)},1 1" for x in names[:3])])
    put(folder, "panoptic.csv", ["id,kind", *(f"{stem(x)},a" for x in names[4:])])
    found = survey(folder)
    assert unused_lists(folder, found.others, found.lists, found.images) == {}


def test_boxes_of_classes_that_are_numbers_as_images_are_no_list(folder):
    for _, path, classes in images_in(folder, "images/{i}.png"):
        save(folder / path.replace("images", "labels"), classes)
    put(folder, "anchors.txt", [f"{i} 0.5 0.5 0.1 0.1" for i in range(4)])
    found = survey(folder)
    assert unused_lists(folder, found.others, found.lists, found.images) == {}


def written(made, name):
    lines = (made / name).read_text().splitlines()
    return {line.split("\t")[0] for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("form", ["without_suffix", "of_sequences", "nnunet"])
def test_the_lists_of_the_experiment_are_those_of_the_folder(folder, lab, monkeypatch, form):
    quick_init(monkeypatch)
    paths = write_images(folder)
    FORMS[form](folder, paths[3:], paths[:3])
    made = folder.with_name("made")
    said = lab.done("init", folder, "--output", made, "--jobs", "1").out
    assert written(made, "val.txt") == {*paths[:3]}
    assert written(made, "train.txt") == {*paths[3:]}
    assert ("the first of 3 folds is used" in said) == (form == "nnunet")


def test_each_fold_that_is_offered_is_what_the_experiment_evaluates_on(folder, lab, monkeypatch):
    quick_init(monkeypatch)
    paths = write_images(folder)
    folds_in_folders(folder, paths)
    made = folder.with_name("made")
    offered = re.findall(r"--val (\S+)$", lab.command("init", folder, "--output", made).err, re.M)
    assert len(offered) == 3
    lab.done("init", folder, "--output", made, "--jobs", "1", "--val", offered[1])
    assert written(made, "val.txt") == {*paths[6:12]}
    assert written(made, "train.txt") == {*paths[:6], *paths[12:]}


def test_a_class_of_one_side_is_told_by_its_name(folder, lab, monkeypatch):
    quick_init(monkeypatch)
    paths = write_images(folder)
    put(folder, "train.txt", paths[:12])
    put(folder, "val.txt", paths[12:])
    put(folder, "classes.txt", ["ground", "car", "road", "tree", "bridge", "pond"])
    for path, value in ((paths[0], 4), (paths[-1], 5)):
        label = np.zeros((64, 80), np.uint8)
        label[:20] = value
        save(folder / path.replace("images", "labels"), label)
    said = lab.done("init", folder, "--output", folder.with_name("made"), "--jobs", "1").out
    assert "warning: no image to train on shows pond\n" in said
    assert "warning: no image to evaluate on shows bridge\n" in said
    assert labels_of(folder.with_name("made"))[0].keys() == {*paths}
