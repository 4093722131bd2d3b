"""Whatever a file says, it is loaded or refused: properties, and hostile files.

FUZZ_EXAMPLES=2000 tries so many examples of each property, other ones every time; FUZZ_SECONDS=600
damages files of each kind for so long, others for every FUZZ_SEED. What it found lies in corpus/.
"""

import json
import os
import pickle
import re
import resource
import tempfile
import time
import zipfile
from collections import Counter
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from random import Random

import fuzz
import pytest
from fuzz_inputs import malicious_pickles, zipped
from fuzz_targets import TARGETS, Target, archive_of, hostile_archives
from hypothesis import HealthCheck, configuration, given, settings
from hypothesis import strategies as st

from segtrain.config import Config, DataConfig, config_to_yaml, load_config
from segtrain.config import parse_config as parse
from segtrain.config.strict_yaml import MAX_BYTES
from segtrain.data.read.layouts import list_split, scan_layout
from segtrain.errors import ConfigError, DataError

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
SECONDS, SEED = float(os.environ.get("FUZZ_SECONDS", "0")), int(os.environ.get("FUZZ_SEED", "20"))
# Tables of characters would be kept below the current directory.
configuration.set_hypothesis_home_dir(tempfile.gettempdir() + "/segtrain-hypothesis")


def examples(number):
    return settings(
        max_examples=EXAMPLES or number,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


SECTIONS = {
    name: list(field.annotation.model_fields)
    for name, field in Config.model_fields.items()
    if hasattr(field.annotation, "model_fields")
}
PRINTABLE = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")))
PLAIN = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | PRINTABLE
PLAIN |= st.floats(allow_nan=False, allow_infinity=False)
TREES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PRINTABLE, inner, max_size=4)
)
KEYS = st.sampled_from([(section, key) for section, keys in SECTIONS.items() for key in keys])
NEARLY = (
    *("0", "-1", "1", "2.5", "1e-3", "[1, 2]", "[0.5, 1.5]"),
    *("null", "true", "group", "sgd", "x"),
)


def smallest():
    return {"data": {"layout": "list", "root": "x", "classes": "voc"}}


# Configs and YAML


@pytest.mark.fault(83)
@pytest.mark.parametrize(
    "text",
    [
        *("1" + "_" * 90_000 + "x", "0" * 90_000 + "x", "0." * 45_000, "1:" * 45_000, "9" * 90_000),
        *("[" * 90_000, "a: " * 30_000, "- " * 45_000, "'" * 90_000, "{? " * 30_000, "\n" * 90_000),
        *("? " * 45_000, "!" * 90_000, "%YAML 1." + "1" * 5000 + "\n---\na: 1", "&a " * 30_000),
    ],
    ids=lambda text: text[:9],
)
def test_no_text_of_the_largest_size_takes_long(text):
    assert len(text) < MAX_BYTES
    started = time.process_time()
    with pytest.raises(ConfigError):
        parse("data: " + text, source="f")
    with pytest.raises(ConfigError):
        parse(text, source="f")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("text", [r'"\UFFFFFFFF"', r'"\U00110000"'])
def test_escapes_of_no_character_are_refused_with_their_line(text):
    with pytest.raises(ConfigError, match=r"f:2: .*character"):
        parse(f"data:\n  root: {text}", source="f")
    with pytest.raises(ConfigError, match=r"--set data.root: .*character"):
        parse("data: {}", source="f", overrides=[f"data.root={text}"])


@examples(50)
@given(st.text(), st.text())
def test_any_text_is_a_config_or_refused(before, after):
    valid = config_to_yaml(parse(json.dumps(smallest()), source="x"))
    for text in (before, before + valid + after, valid.replace("root: x", f"root: {before}")):
        with suppress(ConfigError):
            parse(text, source="f", overrides=[after, f"data.root={before}"])


@examples(75)
@given(
    st.dictionaries(KEYS, PLAIN | st.lists(PLAIN, max_size=3), max_size=4),
    st.lists(st.tuples(KEYS, st.sampled_from(NEARLY) | st.text()), max_size=3),
    st.dictionaries(st.sampled_from(list(SECTIONS)) | PRINTABLE, TREES, max_size=1),
)
def test_settings_close_to_real_ones_are_loaded_or_refused(changes, overrides, others):
    options = smallest() | others
    for (section, key), value in changes.items():
        if isinstance(options.setdefault(section, {}), dict):
            options[section][key] = value
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(json.dumps(options, ensure_ascii=False))
        file.flush()
        try:
            config = load_config(file.name, [f"{a}.{b}={value}" for (a, b), value in overrides])
        except ConfigError:
            pass
        else:
            assert parse(config_to_yaml(config), source="printed") == config


# Where data lies


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz") / "data"
    for name in ("a.png", "b c.png", "d/e.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root.parent / "outside.png").touch()
    (root / "link.png").symlink_to(root.parent / "outside.png")
    return root


PIECES = (
    *("a.png", "b c.png", "d/e.png", "link.png", "../outside.png", "d/../a.png", "//a.png"),
    *("C:\\a", '"b c.png"', *'",\t \n\0\u2028\x85#', "\r\n", "x" * 300),
)


def as_list(data_root, content):
    (data_root / "list.txt").write_bytes(content)
    return DataConfig(layout="list", root=str(data_root), classes="voc", train_split="list.txt")


@pytest.mark.fault(63, 64)
@examples(150)
@given(st.binary() | st.lists(st.sampled_from(PIECES)).map(lambda words: "".join(words).encode()))
def test_any_list_is_read_or_refused_and_stays_below_the_root(data_root, content):
    try:
        pairs = list_split(as_list(data_root, content), "list.txt").pairs
    except DataError:
        return
    assert pairs
    for pair in pairs:
        for file in pair[:2]:
            assert ".." not in file.relative_to(data_root).parts
            assert file.is_file()


GOOD = ("", "   ", "# a comment", '#"')
BAD = (
    *("a.png", "a.png a.png a.png", "../x.png a.png", "no.png a.png", "a.png no.png", "\xff a.png"),
    *('"a.png a.png', "/a.png a.png", "a.gif a.png", "a.png\0 a.png", "a.png a.jpg"),
    *("x" * 300 + ".png a.png", "d/" * 3000 + "a.png a.png", "a.png/b.png a.png"),
)


@pytest.mark.fault(63)
@examples(80)
@given(
    st.lists(st.sampled_from([(line, False) for line in GOOD] + [(line, True) for line in BAD])),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_the_line_numbers_of_a_lists_problems_are_right(data_root, lines, end, start):
    text = end.join([*(line for line, _ in lines), "b c.png\td/e.png"]) + end
    listing = scan_layout(as_list(data_root, start + text.encode("latin-1")), "list.txt")
    found = Counter(int(re.match(r".*?list\.txt:(\d+): ", one)[1]) for one in listing.problems)
    assert set(found) == {i for i, (_, bad) in enumerate(lines, start=1) if bad}
    assert [pair.name for pair in listing.pairs] == ["b c"]


@pytest.mark.parametrize(
    "name", ["~no-such-user/x.yaml", "x" * 300, "x" * 300 + ".yaml", "\0", "\0.yaml"]
)
def test_a_class_file_of_an_impossible_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"data.classes: "):
        TARGETS["classes"].run(Path(name))


# Bytes

CORPUS = [(name, path.name) for name in TARGETS for path in fuzz.corpus(name)]


@pytest.mark.fault(34, 36, 37, 59, 62)
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_files_are_loaded_or_refused(name, tmp_path):
    target, until, verdict = TARGETS[name], time.monotonic() + (SECONDS or 0.5), None
    stream, left = fuzz.inputs(target, name, Random(SEED)), 200
    while time.monotonic() < until and (left or SECONDS):
        file_name, data = stream.send(verdict)
        verdict, left = fuzz.judge(target, data, tmp_path, file_name), left - 1
        assert not verdict.finding, verdict.trace  # pytest keeps the file


@pytest.mark.parametrize(("name", "file"), CORPUS)
def test_what_was_a_finding_is_loaded_or_refused_now(name, file, tmp_path):
    (path,) = (path for path in fuzz.corpus(name) if path.name == file)
    for file_name in TARGETS[name].names:
        verdict = fuzz.judge(TARGETS[name], path.read_bytes(), tmp_path, file_name)
        assert not verdict.finding, verdict.trace


@pytest.mark.fault(36)
@pytest.mark.parametrize("name", ["checkpoint", "pretrained"])
def test_no_malicious_pickle_runs(name, tmp_path):
    for data in hostile_archives():
        verdict = fuzz.judge(TARGETS[name], data, tmp_path)
        assert verdict.refusal


WORD = b"x" * 100_000
LONG_WORDS = {
    "name": b"c" + WORD + b"\n" + WORD + b"\n)R.",
    "name that does not end": b"cx\n" + WORD,
    "text": b"X" + len(WORD).to_bytes(4, "little") + WORD + b")R.",
}


@pytest.mark.parametrize("pickled", LONG_WORDS.values(), ids=LONG_WORDS)
def test_a_long_word_in_a_pickle_does_not_take_minutes_to_refuse(pickled, tmp_path):
    """torch searches its own complaint in quadratic time."""
    alone = b"\x80\x02" + pickled
    for data in (alone, archive_of(alone)):
        verdict = fuzz.judge(TARGETS["pretrained"], data, tmp_path)
        assert not verdict.finding
        assert verdict.refusal


def test_an_archive_that_inflates_is_refused_before_it_does(tmp_path):
    bomb = zipped({"a/data.pkl": bytes(3 << 20)}, zipfile.ZIP_DEFLATED)
    verdict = fuzz.judge(TARGETS["pretrained"], bomb, tmp_path)
    assert "compressed" in verdict.refusal


def test_the_malicious_pickles_run_where_nothing_forbids_it(tmp_path):
    target = Target(lambda path: pickle.loads(path.read_bytes()), list, ("x.pkl",))
    verdicts = [fuzz.judge(target, data, tmp_path).finding for data in malicious_pickles()]
    assert verdicts.count("the input ran code") > len(verdicts) / 2


def test_the_judge_notices_a_hang_and_an_exception(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.1)
    sleeper = Target(lambda path: time.sleep(9), list, ("x",))
    assert fuzz.judge(sleeper, b"", tmp_path).finding.startswith("more than 0.1 s")
    monkeypatch.setattr(fuzz, "LIMIT_S", 10)
    failing = Target(lambda path: path.read_bytes()[7], list, ("x",))
    assert fuzz.judge(failing, b"", tmp_path).finding.startswith("IndexError")


@pytest.mark.parametrize(
    ("peak", "held", "new_peak", "is_finding"),
    [
        (1.0, 0.5, 2.6, True),
        (1.0, 0.5, 2.4, False),
        (2.5, 2.5, 2.6, False),  # nearly all of it was there before
        (2.5, 2.5, 4.6, True),
        (4.0, 0.5, 4.0, False),  # what it took is hidden by an older peak
    ],
)
def test_the_judge_notices_the_memory_of_an_input_and_not_what_was_held_before(
    tmp_path, monkeypatch, peak, held, new_peak, is_finding
):
    peaks = iter((peak, new_peak))
    monkeypatch.setattr(fuzz, "peak_bytes", lambda: next(peaks) * 2**30)
    monkeypatch.setattr(fuzz, "_held_bytes", lambda: held * 2**30)
    nothing = Target(lambda path: None, list, ("x",))
    assert (fuzz.judge(nothing, b"", tmp_path).finding == "more than 2 GiB") == is_finding


def test_memory_is_measured_in_bytes():
    # Pages of the kernel's: `bytes` may get memory that an earlier test has left to the allocator.
    before, kept = fuzz._held_bytes(), mmap(-1, 256 << 20)
    kept[:: resource.getpagesize()] = bytes(len(kept) // resource.getpagesize())
    assert (200 << 20) < fuzz._held_bytes() - before < (300 << 20)
    assert fuzz.peak_bytes() >= len(kept)
