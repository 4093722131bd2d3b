"""Nothing disappears: every file of a folder has one fate, whatever convention it follows.

Folders are drawn from a grammar of conventions: how images and labels are called, what labels hold,
what lies beside them. Each is read as its truth, pixel by pixel, or refused.
"""

import re
import shlex
from collections import Counter
from itertools import chain
from typing import NamedTuple

import cv2
import numpy as np
import pytest
from folders import COLORS, NAMES, assert_same_division, labels_of, quick_init, save, scene

from segtrain.desk.survey import decide, reasons

# Image and label of one name; {s} is a folder of a split, or nothing.
PAIRS = [
    ("{s}images/{n}.jpg", "{s}labels/{n}.png"),
    ("images/{s}{n}.png", "masks/{s}{n}_mask.png"),
    ("{s}img/img_{n}.png", "{s}gt/gt_{n}.png"),
    ("{s}{n}.jpg", "{s}{n}_seg.png"),
    ("JPEGImages/{n}.jpg", "SegmentationClass/{n}.png"),
    ("imagesTr/{n}_0000.png", "labelsTr/{n}.png"),
    ("scenes/{n}/image.png", "scenes/{n}/mask.png"),
    ("photos/{s}{n}.bmp", "annotations/{s}{n}.tif"),
]
STEMS = ["{i}", "{i:04}", "frame_{i:03}", "IMG_20{i:02}", "{c}-plot-{i}", "tile.{i}", "{c}{c}{i}x"]
KINDS = ["ids", "spread ids", "colors", "colors without a table", "mask", "mask of 1"]
# A file for each class; {k} is its name.
CLASS_FILES = {
    "class folders": "{s}masks/{k}/{n}.png",
    "folders of classes and splits": "masks/{k}/{s}{n}.png",
    "class ends": "{s}masks/{n}_{k}.png",
    "class starts": "{s}masks/{k}_{n}.png",
    "image folders": "{s}masks/{n}/{k}.png",
    "masks beside": "{s}images/{n}_{k}.png",
}
CLASS_WORDS = [("cat", "big_dog", "sea"), ("ground", "sky", "high grass"), ("A1", "liver", "B-x")]
SPLITS = [(), ("train", "val"), ("training", "validation"), ("train", "test")]
NOISE = ["readme", "preview", "table", "second labels", "more images", "more labels", "damaged"]


class Folder(NamedTuple):
    """One that was drawn: its words, and the classes of each labelled image by its path."""

    words: str
    truth: dict[str, np.ndarray]


SLOW = pytest.mark.slow("desk")


def content(kind, classes):
    """What a label file of this kind holds."""
    if kind.startswith("colors"):
        return COLORS[classes]
    if kind == "spread ids":
        return np.array([0, 7, 11, 26], np.uint8)[classes]
    return classes * np.uint8(255) if kind == "mask" else classes


def draw(seed, folder, *, stem="", noise=None):
    """Draws a folder; the same seed draws the same one but for `stem`, which all names get.

    noise: what lies beside; None: some of it.
    """
    rng = np.random.default_rng(seed)

    def one_of(choices):
        return choices[int(rng.integers(len(choices)))]

    pair, stem_form, splits = one_of(PAIRS), one_of(STEMS), one_of(SPLITS)
    kind, words = one_of([*KINDS, *CLASS_FILES]), one_of(CLASS_WORDS)
    if kind in CLASS_FILES:
        pair = "{s}images/{n}.jpg", CLASS_FILES[kind]
    splits = splits if "{s}" in pair[0] else ()
    chosen = [x for x in NOISE if rng.random() < 0.3] if noise is None else noise
    num_classes, number, truth = 2 if kind.startswith("mask") else 4, int(rng.integers(8, 14)), {}

    def named(form, i, word=""):
        part = f"{splits[i % 4 == 3]}/" if splits else ""
        name = stem + stem_form.format(i=i, c="abcdefghijklmnop"[i])
        return form.format(s=part, n=name, k=word)

    def save_label(i, classes):
        if kind not in CLASS_FILES:
            save(folder / named(pair[1], i), content(kind, classes))
        for k, word in enumerate(words, start=1) if kind in CLASS_FILES else ():
            # The last class is on few images, and no others have a file of it.
            if k < 3 or i in (3, 4):
                save(folder / named(pair[1], i, word), np.uint8(classes == k) * 255)

    for i in range(number):
        pixels, classes = scene(100 * seed + i, num_classes)
        path = named(pair[0], i)
        if kind in CLASS_FILES and i not in (3, 4):
            classes[classes == 3] = 0
        if "more images" in chosen and i == 1:
            save(folder / path, pixels)
            continue
        if not ("more labels" in chosen and i == 2):
            save(folder / path, pixels)
            truth[path] = classes
        save_label(i, classes)
        if "preview" in chosen:
            shown = COLORS[classes] // 2 + pixels // 2
            save(folder / named("overlay/{s}{n}.jpg", i), shown)
        if "second labels" in chosen:
            _, objects = cv2.connectedComponents((classes > 0).astype(np.uint8))
            save(folder / named("instances/{s}{n}.png", i), objects.astype(np.uint8))
    if kind == "colors":
        rows = (f"{n},{r},{g},{b}" for n, (r, g, b) in zip(NAMES, COLORS, strict=True))
        (folder / "class_dict.csv").write_text("\n".join(["name,r,g,b", *rows]))
    if "readme" in chosen:
        (folder / "README.md").write_text("# Data\n")
        (folder / "LICENSE").write_text("CC BY 4.0\n")
    if "table" in chosen:
        (folder / "weather.csv").write_text("day,rain\n1,0\n")
    if "damaged" in chosen:
        path = folder / named(pair[0], number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff\xe0 no picture")
    return Folder(f"{pair} {stem_form} {kind} {splits} {chosen}", truth)


@pytest.fixture(autouse=True)
def no_network_and_no_contact_sheet(monkeypatch):
    quick_init(monkeypatch)


@pytest.fixture(autouse=True)
def every_value_is_of_a_class_or_ignored(monkeypatch):
    """Checked of each decision."""
    choose = decide.choose_classes

    def checked(survey, labels, answers):
        chosen = choose(survey, labels, answers)
        fates = Counter(chain(*(one.values for one in chosen.classes), chosen.ignored))
        held = {value for value, facts in labels.values.items() if facts.pixels}
        assert held <= fates.keys()
        assert set(fates.values()) == {1}
        return chosen

    monkeypatch.setattr(decide, "choose_classes", checked)


@pytest.fixture
def init(lab, tmp_path):
    """Runs init on a folder; the labels of each image, and the line of files; None: refused.

    A question about what would be left out is answered by its option, and one about several sets
    by the labels that were drawn.
    """

    def run(folder):
        output, more = tmp_path / f"made_{folder.name}", []
        for _ in range(3):
            outcome = lab.command("init", folder, "--output", output, "--jobs", "1", *more)
            if option := re.search(r"(--leave-out \S+)$", outcome.err, re.M):
                more += option[1].split()
            elif "sets of labels fit" in outcome.err and "--labels" not in more:
                options = re.findall(r"--labels (.*)$", outcome.err, re.M)
                more += ["--labels", *shlex.split(next(x for x in options if "instances" not in x))]
            else:
                break
        if outcome.code:
            assert outcome.code in (2, 3), outcome.err
            return None, outcome.err
        (line,) = re.findall(r"^files +(.*)$", outcome.out, re.M)
        return labels_of(output)[0], line

    return run


def files_of(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


SEEDS = [*range(10), *(pytest.param(i, marks=pytest.mark.slow("desk")) for i in range(10, 150))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_folder_is_its_truth_or_is_refused_and_every_file_has_a_fate(seed, tmp_path, init):
    drawn = draw(seed, tmp_path / "drawn")
    labels, said = init(tmp_path / "drawn")
    if labels is None:
        return
    numbers = re.findall(r"(?:^|: |, )(\d+)", re.sub(r"\(.*\)", "", said))
    total, *parts = map(int, numbers)
    assert total == sum(parts) == len(files_of(tmp_path / "drawn")), said
    assert reasons.UNKNOWN not in said
    assert labels.keys() <= drawn.truth.keys(), drawn.words
    assert_same_division(labels, {name: drawn.truth[name] for name in labels})
    # No image with a label is lost without a word.
    assert len(labels) == len(drawn.truth) or "images of" in said, (drawn.words, said)


@pytest.mark.parametrize("seed", [1, 3, *(pytest.param(i, marks=SLOW) for i in range(150, 180))])
def test_other_names_and_unrelated_files_change_no_pixel(seed, tmp_path, init):
    """All names get the same beginning; a text, a licence and a table come along."""
    found = {}
    for name, how in {
        "as_it_is": {"noise": []},
        "renamed": {"noise": [], "stem": "site_"},
        "beside_others": {"noise": ["readme", "table"]},
    }.items():
        drawn = draw(seed, tmp_path / name, **how)
        labels, said = init(tmp_path / name)
        # In the order of the truth, which is that of the numbers.
        found[name] = said[:40] if labels is None else [labels.get(x) for x in drawn.truth]
    if isinstance(found["as_it_is"], str):
        assert all(isinstance(x, str) for x in found.values()), found
        return
    shown = [x for x in found["as_it_is"] if x is not None]
    assert shown
    for name in ("renamed", "beside_others"):
        assert len(found[name]) == len(found["as_it_is"])
        for before, now in zip(found["as_it_is"], found[name], strict=True):
            assert (before is None) == (now is None), name
            np.testing.assert_array_equal(before, now, err_msg=name)
