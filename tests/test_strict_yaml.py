"""PyYAML's own reading is the foil: every trap is shown to be one before it is shown closed."""

import numpy as np
import pytest
import yaml

from segtrain.config.messages import report
from segtrain.config.strict_yaml import MAX_BYTES, parse_value, read_text, scan_yaml
from segtrain.errors import ConfigError


def read(text):
    document = scan_yaml(text, source="f.yaml")
    if document.mistakes:
        raise ConfigError("\n".join(report(document.mistakes, {}, source="f.yaml")))
    return document


def refusal(text):
    with pytest.raises(ConfigError) as caught:
        read(text)
    return str(caught.value)


@pytest.mark.fault(81)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        (".5", 0.5),
        ("2.", 2.0),
        ("~", None),
        ("no", "no"),
        ("True", "True"),
        ("2020-01-01", "2020-01-01"),
        ("'012'", "012"),
        ("{p: 0.5}", {"p": 0.5}),
    ],
)
def test_a_value_means_what_it_looks_like(text, value):
    found = read(f"key: {text}").data["key"]
    assert found == value
    assert type(found) is type(value)
    assert parse_value(text, source="--set key") == value


@pytest.mark.parametrize(
    ("text", "pyyaml"),
    [("012", 10), ("12:30", 750), ("1_000", 1000), ("0x1f", 31), (".inf", np.inf), ("08.5", 8.5)],
)
def test_spellings_that_readers_disagree_about_are_refused(text, pyyaml):
    assert yaml.safe_load(f"key: {text}")["key"] == pyyaml
    assert refusal(f"a: 1\nkey: {text}").startswith(f"f.yaml:2: key: {text} is refused")
    with pytest.raises(ConfigError, match="--set key"):
        parse_value(text, source="--set key")


@pytest.mark.fault(81)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((f"key: {x}", "f.yaml:1: key: ") for x in (".nan", "None", "00", "1e400", "-01")),
        ("a: 1\nb: 2\na: 3", "f.yaml:3: a: is given twice, first on line 1"),
        ("t:\n  a: 1\n  a: 1", "f.yaml:3: t.a: is given twice, first on line 2"),
        ("a: &x 1\nb: *x", "f.yaml:1: anchors and aliases"),
        ("t:\n  <<: {a: 1}", "f.yaml:2: t: merge keys"),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1: tags such as !!python"),
        ("a:\n  b:\n", "f.yaml:2: a.b: has no value"),
        ("a: [1, ~, ]\nb: [x, '']\nc:", "f.yaml:3: c: has no value"),
        ("", "f.yaml: is empty"),
        ("\n- 1\n- 2", "f.yaml:2: a list at the top"),
        ("a:\n\tb: 1", "f.yaml:2: a tab; use spaces"),
        ("a: 1\n---\nb: 2", "f.yaml:2: a second document"),
        ("a: [1, 2", "f.yaml:1: the file ends inside"),
        ("a: @x", "f.yaml:1: found character '@' that cannot start"),
        ("a: 1\nb: \x07", r"f.yaml:2: character '\x07' is not allowed"),
        ("1: 2", "f.yaml:1: a key must be text, got 1"),
        (" a: 1\nb: 2", "f.yaml:2: "),
    ],
)
def test_a_refusal_names_line_and_reason(text, message):
    assert refusal(text).startswith(message)


@pytest.mark.fault(81)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xef\xbb\xbfa: 1", ":1: starts with a byte order mark"),
        ("a: 1".encode("utf-16"), ":1: byte 0xff is not UTF-8"),
        (b"a: 1\nb: \xff", ":2: byte 0xff is not UTF-8"),
        (b"a: 1\n" * MAX_BYTES, ": larger than"),
    ],
)
def test_bytes_that_are_no_settings_are_refused(tmp_path, content, message):
    path = tmp_path / "x y.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_text(path)
    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.fault(82)
@pytest.mark.parametrize("text", ["", "  ", "[1", "[1] x", "'a': 1", "{a: 1, a: 2}", "\udc80"])
def test_a_broken_command_line_value_is_refused(text):
    """A plain one may hold signs of YAML."""
    assert parse_value("/data/a #1: *b", source="s") == "/data/a #1: *b"
    with pytest.raises(ConfigError, match=r"^--set a\.b: "):
        parse_value(text, source="--set a.b")
