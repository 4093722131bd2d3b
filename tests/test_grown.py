"""`segtrain init --like`: what was evaluated on stays so when a folder has grown."""

import shutil
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from folders import save, scene
from test_init import no_network

from segtrain.desk.commands.init import config_of, write_experiment
from segtrain.errors import ConfigError

__all__ = ["no_network"]  # a fixture
MISSING = "--missing=background:good"


def add(folder, names, *, split=""):
    for name in names:
        seed = crc32(name.encode())
        for kind, array in zip(("images", "masks"), scene(seed), strict=True):
            save(folder / kind / split / f"{name}.png", array)


def sides(experiment):
    """The images to train and to evaluate on, as the two lists name them."""
    texts = [(experiment / f"{side}.txt").read_text() for side in ("train", "val")]
    rows = [[x.split("\t")[0] for x in text.splitlines() if x[0] != "#"] for text in texts]
    return [{x.rpartition("/")[2].removesuffix(".png") for x in of_side} for of_side in rows]


def numbers(first, last):
    """Names without order, of which none is a sequence."""
    return [np.random.default_rng(i).bytes(4).hex() for i in range(first, last)]


def test_old_images_stay_where_they_were_and_the_share_is_kept(tmp_path, lab):
    data, one = tmp_path / "data", tmp_path / "one"
    add(data, numbers(0, 30))
    lab.done("init", data, "--output", one, "--val", "0.3")
    train, val = sides(one)
    assert (len(train), len(val)) == (21, 9)
    add(data, numbers(30, 40))
    # Drawn anew, some would have been trained on: the reason for the option.
    lab.done("init", data, "--output", tmp_path / "anew", "--val", "0.3")
    assert val & sides(tmp_path / "anew")[0]
    gone = min(val)
    for kind in ("images", "masks"):
        (data / kind / f"{gone}.png").unlink()
    said = lab.done("init", data, "--output", tmp_path / "two", "--like", one).out
    new_train, new_val = sides(tmp_path / "two")
    assert train <= new_train
    assert val - {gone} <= new_val
    # 39 images, of which 0.3 are 11.7; eight old ones are there.
    assert (len(new_val - val), len(new_train | new_val)) == (4, 39)
    assert f"29 images as {one} has them; of 10 new ones 6 to train and 4 to evaluate on" in said
    assert f"1 of 30 images have no label or are gone: images/{gone}.png" in said
    # Again, of the new one; and where nothing has grown, all is equal.
    lab.done("init", data, "--output", tmp_path / "three", "--like", tmp_path / "two")
    assert sides(tmp_path / "three") == [new_train, new_val]


def test_an_image_under_another_name_stays_on_its_side(tmp_path, lab):
    """A week has a copy of the folder in which photos are renamed; the old one is still there."""
    add(tmp_path / "old", numbers(0, 30))
    lab.done("init", tmp_path / "old", "--output", tmp_path / "one", "--val", "0.3")
    train, val = sides(tmp_path / "one")
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    add(tmp_path / "new", numbers(30, 40))
    moved = sorted(val)[1:]
    for name in moved:
        for kind in ("images", "masks"):
            (tmp_path / f"new/{kind}/{name}.png").rename(tmp_path / f"new/{kind}/RE_{name}.png")
    command = "init", tmp_path / "new", "--like", tmp_path / "one", "--output"
    said = lab.done(*command, tmp_path / "two").out
    new_train, new_val = sides(tmp_path / "two")
    assert train <= new_train
    assert {f"RE_{name}" for name in moved} <= new_val
    assert "30 images as" in said
    assert "8 old ones have another name here" in said
    assert "are gone" not in said
    # Where no file has the old name any more, nobody knows what the new one was.
    shutil.rmtree(tmp_path / "old")
    said = lab.done(*command, tmp_path / "three").out
    assert "8 of 30 images have no label or are gone" in said
    assert "8 of them were evaluated on" in said


def test_new_images_of_a_sequence_go_to_it_and_new_sequences_stay_whole(tmp_path, lab):
    data, one, two = (tmp_path / x for x in ("data", "one", "two"))
    add(data, [f"drive{i}_{frame:03}" for i in range(6) for frame in range(3)])
    group = "--group", "(drive[0-9])"
    lab.done("init", data, "--output", one, *group)
    add(data, [f"drive{i}_{frame:03}" for i in range(9) for frame in range(3, 6)])
    lab.done("init", data, "--output", two, "--like", one, *group)
    old, new = sides(one), sides(two)
    assert all(a <= b for a, b in zip(old, new, strict=True))
    drives = [{x[:6] for x in side} for side in new]
    assert not drives[0] & drives[1]
    assert len(drives[0] | drives[1]) == 9
    assert len(new[0] | new[1]) == 18 + 27


def test_splits_of_the_folder_go_before_unless_a_share_is_given(tmp_path, lab):
    data, one, two = (tmp_path / x for x in ("data", "one", "two"))
    names = numbers(0, 16)
    add(data, names[:8], split="train"), add(data, names[8:10], split="val")
    lab.done("init", data, "--output", one)
    add(data, names[10:14], split="train"), add(data, names[14:15], split="val")
    add(data, names[15:], split="test")
    said = lab.refused("init", data, "--output", two, "--like", one)
    assert "--like: no effect on the splits of folders; or add --val 0.2" in said
    said = lab.done("init", data, "--output", two, "--like", one, "--val", 0.25).out
    train, val = sides(two)
    assert train >= {*names[:8]}
    assert val >= {*names[8:10]}
    assert train | val == {*names[:15]}
    # A quarter of 15 images.
    assert (len(val), "of 5 new ones 3 to train and 2 to evaluate on" in said) == (4, True)


def test_new_tiles_that_show_what_is_on_the_other_side_are_left_out(tmp_path, lab):
    """Tiles of 80x64 in a row; the new ones lie between two old ones each."""
    data, one, two = (tmp_path / x for x in ("data", "one", "two"))
    rng = np.random.default_rng(0)
    picture, classes = rng.integers(0, 256, (64, 1600, 3), np.uint8), np.zeros((64, 1600), np.uint8)
    classes[20:40, ::3] = 1

    def cut(lefts):
        for x in lefts:
            save(data / f"images/map_{x}_0.png", picture[:, x : x + 80])
            save(data / f"masks/map_{x}_0.png", classes[:, x : x + 80])

    cut(range(0, 1600, 80))
    lab.done("init", data, "--output", one)
    cut(range(40, 1520, 80))
    said = lab.done("init", data, "--output", two, "--like", one).out
    old, new = sides(one), sides(two)
    assert all(a <= b for a, b in zip(old, new, strict=True))
    trained, evaluated = ([int(x.split("_")[1]) for x in side] for side in new)
    assert all(abs(a - b) >= 80 for a in trained for b in evaluated)
    assert "that overlap the other side left out" in said


def test_what_divides_nothing_here_is_refused(tmp_path, lab):
    data, one = tmp_path / "data", tmp_path / "one"
    add(data, numbers(0, 8))
    lab.done("init", data, "--output", one)
    said = lab.refused("init", data, "--output", one)
    assert (
        f"choose another folder, where --like {one} keeps there what is evaluated on here" in said
    )
    command = ["init", data, "--output", tmp_path / "two", "--like"]
    assert "cannot be read" in lab.refused(*command, tmp_path / "none")
    add(tmp_path / "other", numbers(8, 16))
    said = lab.refused("init", tmp_path / "other", "--output", tmp_path / "two", "--like", one)
    assert f"--like {one}: of its 8 images 0 have a label in {tmp_path / 'other'}" in said
    config = one / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("layout: list", "layout: folders"))
    assert "expected data.layout list" in lab.refused(*command, one)
    config.write_text(text)
    listed = one / "val.txt"
    listed.write_text(listed.read_text().replace(".png\t", ".png#xywh=0,0,32,32\t"))
    assert "expected some to train and some to evaluate on" in lab.refused(*command, one)


def test_a_training_of_a_folder_that_has_grown_names_what_it_does_not_use(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    add(data, numbers(0, 10))
    save(data / "images/alone.png", scene(1)[0])
    answers = {"leave_out": frozenset({"images"})}
    config = write_experiment(data, Path("data_segtrain"), **answers)
    assert config_of(data, may_write=True) == config
    assert "newer" not in capsys.readouterr().out
    add(data, [new := numbers(10, 11)[0]])
    (data / "images/gone.png").symlink_to("nowhere.png")
    config_of(data, may_write=True)
    said = capsys.readouterr().out
    names = f"images/{new}.png, masks/{new}.png"
    assert f"2 pictures are newer than it, and in none of its lists: {names}" in said
    assert "--like data_segtrain --output OTHER" in said


def parts_of_a_line(folder, kinds):
    """Parts in folders by their defect; those of good/ have no mask."""
    for i, kind in enumerate(kinds):
        name = f"{kind}/part_{i:05}"
        pixels, classes = scene(i, num_classes=3)
        save(folder / f"images/{name}.png", pixels)
        if kind != "good":
            save(folder / f"masks/{name}_mask.png", classes)


def test_classes_and_options_stay_those_of_the_experiment(tmp_path, lab):
    data, one, two = (tmp_path / x for x in ("data", "one", "two"))
    parts_of_a_line(data, [*("pit", "good", "scratch") * 4])
    lab.done("init", data, "--output", one, "--names", "background,scratch,pit", MISSING)
    first = (one / "classes.yaml").read_text()
    like = ["init", data, "--output", two, "--like", one]
    said = lab.refused(*like, "--names", "background,pit,scratch")
    assert "classes are background, pit, scratch here, and background, scratch, pit in" in said
    assert (
        f"--names background,scratch,pit, if the labels mean what they did; else --val {one}"
        in said
    )
    for names in ("background,pit,dent", "background,dent,scratch"):
        said = lab.refused(*like, "--names", names)
        assert f"classes are {names.replace(',', ', ')} here" in said
    # Nothing is said anew: as before, in a line, and in the config for the next time.
    for out in (two, tmp_path / "three"):
        said = lab.done("init", data, "--output", out, "--like", one).out
        assert f"of {one} --names background,scratch,pit --missing background:good\n" in said
        assert (out / "classes.yaml").read_text().split("classes:")[1] == first.split("classes:")[1]
        one = out
    # The config of a run says no command: names that nobody gives are no silent class_1.
    config = one / "config.yaml"
    config.write_text("# segtrain\n" + config.read_text().partition("\n")[2])
    like = ["init", data, "--output", tmp_path / "four", "--like", one]
    said = lab.refused(*like, MISSING)
    assert "classes are class_0, class_1, class_2 here, and background, scratch, pit in" in said


def test_new_classes_at_the_end_are_said_and_nameless_ones_may_be_named(tmp_path, lab):
    data, one, two = (tmp_path / x for x in ("data", "one", "two"))
    add(data, numbers(0, 8))
    lab.done("init", data, "--output", one)
    for name in numbers(8, 12):
        pixels, classes = scene(crc32(name.encode()))
        save(data / f"images/{name}.png", pixels)
        classes[:20] = 4
        save(data / f"masks/{name}.png", classes)
    said = lab.done("init", data, "--output", two, "--like", one).out
    assert "one/classes.yaml does not have: class_4" in said
    names = "ground,sky,road,car,tree"
    said = lab.done(
        "init", data, "--output", tmp_path / "three", "--like", one, "--names", names
    ).out
    assert "classes ground, sky, road, car, tree: " in said
    assert "calls them class_0, class_1, class_2, class_3" in said
    # One between the others would move the values of those behind it.
    like = ["init", data, "--output", tmp_path / "four", "--like", one, "--names"]
    said = lab.refused(*like, "class_0,class_1,dent,class_2,class_3")
    assert "class_2 is 3 here, and 2 in" in said
    # Of two names one is another class now.
    add(data, numbers(12, 14))
    like = ["init", data, "--output", tmp_path / "four", "--like", tmp_path / "three"]
    lab.refused(*like, "--names", "ground,road,sky,car,tree")
    (tmp_path / "three/classes.yaml").unlink()
    assert "its classes are not compared" in lab.done(*like).out


def test_a_folder_of_a_new_class_is_asked_about_where_names_are_the_old_ones(tmp_path, lab):
    data, one, two = (tmp_path / x for x in ("data", "one", "two"))

    def masks(kind, first):
        for i in range(first, first + 6):
            pixels, classes = scene(i, num_classes=2)
            save(data / f"images/{kind}/{i:03}.png", pixels)
            save(data / f"masks/{kind}/{i:03}.png", classes * np.uint8(255))

    masks("pit", 0), masks("scratch", 6)
    lab.done("init", data, "--output", one, "--names", "scratch,pit")
    masks("dent", 12)
    said = lab.command("init", data, "--output", two, "--like", one).err
    assert f"files show dent, no class of --like {one}" in said
    assert "classes, behind the others: --names scratch,pit,dent\n" in said
    said = lab.done("init", data, "--output", two, "--like", one, "--names", "scratch,pit,dent").out
    assert "one/classes.yaml does not have: dent" in said


def test_half_an_experiment_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data, made = tmp_path / "data", Path("data_segtrain")
    add(data, numbers(0, 10))
    config = config_of(data, may_write=True)
    listed = (made / "train.txt").read_text()
    path = listed.splitlines()[-1].split("\t")[0]
    (data / path).rename(tmp_path / "away.png")
    assert config_of(data, may_write=True) == config
    assert f"1 images of its lists are gone: {path}; segtrain init " in capsys.readouterr().out
    (made / "train.txt").unlink()
    with pytest.raises(ConfigError, match=r"train.txt is missing: half an experiment; delete"):
        config_of(data, may_write=True)
    config.unlink()
    with pytest.raises(ConfigError, match=r"no config.yaml: half an experiment.*delete it for seg"):
        config_of(data, may_write=True)
