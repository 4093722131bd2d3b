"""Names from elsewhere: nothing that leaves the program can command a terminal."""

import io
import json
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from segtrain.commands.exit_code import repair_stdio
from segtrain.config import DataConfig, config_to_yaml, parse_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file
from segtrain.data.read.layouts import LAYOUTS
from segtrain.errors import ConfigError, DataError, UserError
from segtrain.metrics import ConfusionMatrix, score_table
from segtrain.run.charts import confusion_picture
from segtrain.run.console import say
from segtrain.run.log import RunLog
from segtrain.run.pictures import class_labels, legend, panel
from segtrain.text import MAX_NAME, name_problem, printable, printable_lines

# Clears the screen, turns the direction of the line, ends it, and is 300 kB long.
HOSTILE = ["\x1b[2J\x1b]0;title\x07", "gpj.\u202eexe", "a\u2028b\u2029c\x85d", "x" * 300_000]


def is_fit(text):
    """By Unicode's own categories: no control, no format character, no separator of lines."""
    return not any(unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs") for c in text)


def test_any_text_is_one_short_line_once_it_is_printable():
    assert printable("a\nb\udce4\x1b") == "a\\nb\\udce4\\x1b"
    assert printable(Path("\u202egnp.exe")) == "\\u202egnp.exe"
    assert printable("façade 建築 naïve") == "façade 建築 naïve"
    for text in HOSTILE:
        shown = printable(text, 50)
        assert is_fit(shown)
        assert len(shown) <= 53
        assert printable(shown, 53) == shown
    assert printable_lines("a\n  b\x1b\n") == ["a", "  b\\x1b"]
    assert printable_lines("x\n" * 1000, limit=3) == ["x", "x", "x", "and 997 more lines"]


def test_letters_that_a_terminal_lacks_are_escaped(monkeypatch):
    """As of LC_ALL=C."""
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding="ascii", write_through=True) as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        repair_stdio()
        print("Straße")
        assert written.getvalue() == b"Stra\\xdfe\n"
        monkeypatch.undo()


def test_names_of_any_language_can_name_a_class():
    for name in ("road", "Straße", "砂", "traffic light/sign", "می‌خواهم", "a" * 100):
        assert name_problem(name) == ""


@pytest.mark.parametrize("name", [*HOSTILE, "a\u200bb", "tab\t", " "])
def test_names_that_are_unfit_for_a_line_are_refused(tmp_path, name):
    assert name_problem(name)
    path = tmp_path / "own.yaml"
    path.write_text("classes:\n- road\n- " + json.dumps(name[:90_000]) + "\n")
    with pytest.raises(ConfigError, match=r"own\.yaml:3: classes\[1\]\.name: ") as caught:
        load_class_file(str(path))
    assert is_fit(str(caught.value))
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.mark.parametrize("text", HOSTILE)
def test_errors_and_wrong_arguments_reach_the_terminal_escaped_and_cut(monkeypatch, lab, text):
    def fail(args):
        raise DataError(f"{text}: bad\nsecond")

    monkeypatch.setattr("segtrain.commands.config.write_schema", fail)
    first, second = lab.refused("config", "schema", code=3).splitlines()
    assert is_fit(first)
    assert len(first) < 6000
    assert second == "segtrain: second"
    assert is_fit(lab.refused("train", "c.yaml", f"--{text[:9]}").replace("\n", ""))


def test_the_log_and_the_score_table_escape_what_they_are_given(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    matrix = ConfusionMatrix(4)
    with RunLog(tmp_path, enabled=True) as log:
        log.lines([f"warning: {text}" for text in HOSTILE])
        log.lines(score_table(matrix.scores(), HOSTILE))
        log.text("config", HOSTILE[0])
        log.scalars(1, {f"eval/IoU/{HOSTILE[1]}": 0.5})
        say(HOSTILE[2])
    shown = capsys.readouterr().out
    written = (tmp_path / "train.log").read_text()
    for text in (shown, written):
        assert all(is_fit(line) for line in text.split("\n"))
        assert max(map(len, text.split("\n"))) < 6000
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert board.Tags()["scalars"] == ["eval/IoU/gpj.\\u202eexe"]
    assert b"\x1b" not in board.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_pictures_are_drawn_with_any_names():
    """A line end in a name stops Pillow, and a long one takes all memory."""
    palette = [(i, 0, 0) for i in range(4)]
    image, label = np.zeros((8, 9, 3), np.uint8), np.zeros((8, 9), np.uint8)
    assert legend(class_labels(["a\nb", *HOSTILE[1:]]), palette).shape[1] == 640
    assert max(confusion_picture(np.eye(4), HOSTILE).shape) < 30 * MAX_NAME
    for title in ("a\nb", HOSTILE[3]):
        panel(image, label, label, palette=palette, names=HOSTILE, title=title)


def test_a_config_is_printed_without_format_characters_and_reads_back():
    config = parse_config(
        'data: {layout: folders, root: "a\\u202eb\\xa0", classes: "\\e[2J"}', source="f"
    )
    shown = config_to_yaml(config)
    assert all(is_fit(line) for line in shown.split("\n"))
    assert parse_config(shown, source="printed") == config


FORGED = "x\nsegtrain: all is well"


@pytest.mark.parametrize(
    "key", ["root", "classes", "class file", "split", "images_dir", "labels_dir"]
)
def test_no_path_adds_a_line_to_a_message(tmp_path, key):
    """A checkpoint from elsewhere names paths, too."""
    for name in ("leftImg8bit", "gtFine", "images/val", "labels", "annotations", "ImageSets"):
        (tmp_path / name).mkdir(parents=True)
    values = {"root": str(tmp_path), "classes": "voc", "split": "val"}
    forged = {"root": f"{tmp_path}/{FORGED}", "class file": f"{FORGED}.yaml"}.get(key, FORGED)
    values["classes" if key == "class file" else key] = forged
    split = values.pop("split")
    for layout in ("folders",) if "dir" in key else LAYOUTS:
        with pytest.raises(UserError) as caught:
            open_dataset(DataConfig(layout=layout, **values), split)
        assert "\nsegtrain" not in str(caught.value)
