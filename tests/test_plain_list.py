"""Long list files are read at once; the strict reader of single lines says what must come out."""

import os
import random
import tracemalloc

import pytest

from segtrain.config import DataConfig
from segtrain.data.read import layouts, lists
from segtrain.data.read.layouts import scan_layout
from segtrain.data.read.lists import PairTable, plain_pairs


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """`listed(content)`: what the quick reader finds, and what the strict one does."""
    monkeypatch.setattr(lists, "_MIN_BYTES", 0)
    images = ("i/a.png", "i/b.jpg", "i/d-e/f.1.JPEG", "i/ä.png", "top.png")
    labels = ("l/a.png", "l/b.png", "l/d-e/f.1.png", "l/ä.png", "i/A.png", "i/a.jpg")
    for name in images + labels:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "b.png").touch()
    os.symlink(outside, tmp_path / "out")
    os.symlink(tmp_path / "l", tmp_path / "within")
    os.symlink(tmp_path / "l/b.png", tmp_path / "l/link.png")

    def read(content):
        path = tmp_path / "list.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return plain_pairs(path, tmp_path), strictly(tmp_path, monkeypatch)

    return read


def strictly(root, monkeypatch):
    data = DataConfig(layout="list", root=str(root), classes="voc", train_split="list.txt")
    with monkeypatch.context() as patch:
        patch.setattr(layouts, "plain_pairs", lambda *_: None)
        return scan_layout(data, "list.txt")


@pytest.mark.parametrize(
    "content",
    [
        "i/a.png l/a.png\ni/b.jpg   l/b.png\n",
        "i/b.jpg\tl/b.png\ni/a.png\tl/a.png",
        "i/a.png,l/a.png\ni/b.jpg, l/b.png\n",
        "\ufeff# i/b.jpg l/b.png\r\n\r\ni/a.png l/a.png\r\ni/b.jpg l/b.png\r\n",
        "i/d-e/f.1.JPEG l/d-e/f.1.png\ntop.png top.png\n",
        "i/a.png l/a.png\ni/ä.png l/ä.png\ni/b.jpg l/b.png\n",
        "i/a.png within/a.png\n",
        "i/a.png out/b.png\ni/b.jpg l/link.png\n",
    ],
    ids=["blanks", "tabs", "commas", "comments-crlf", "folders", "letters", "link", "out"],
)
@pytest.mark.parametrize("chunk", [1, 20, 1 << 20])
def test_plain_lists_are_read_as_line_by_line(listed, content, chunk, monkeypatch):
    monkeypatch.setattr(lists, "_CHUNK", chunk)
    quick, strict = listed(content)
    assert not strict.problems
    assert not strict.warnings
    assert list(quick) == strict.pairs
    assert quick[-1] == strict.pairs[-1]
    assert quick[:1] == strict.pairs[:1]
    with pytest.raises(IndexError):
        quick[len(quick)]


@pytest.mark.parametrize(
    "line",
    [
        *(
            "i/a.png",
            "i/a.png l/a.png 3",
            "i/ä.png l/a.png",
            "i/b.jpg l/a.png",
            "i/c.jpg l/b.png",
            "i/a.jpg l/a.png",
        ),
        *("i/A.png l/b.png", "i/b.jpg l/../l/b.png"),
        *("i/b.tif l/b.png", "i/b.jpg l/b.jpg", "/etc/b.png l/b.png", "i/b.jpg l/c.png"),
        *('"i/b.jpg" l/b.png', "./i/b.jpg l/b.png", "i//b.jpg l/b.png", "i/b.jpg l", "i l/b.png"),
        *("i/b.jpg\x00 l/b.png", "i/b\x07.jpg l/b.png", "# a\ri/b.jpg l/b.png", b"i/\xe4.png l/b"),
        *("  # indented", "i/b.jpg,\tl/b.png", "none/b.jpg l/b.png"),
    ],
)
def test_lines_that_need_a_look_are_left_to_the_strict_reader(listed, line):
    line = line if isinstance(line, bytes) else line.encode()
    quick, _ = listed(b"i/b.jpg l/b.png\ni/a.png l/a.png\n" + line + b"\n")
    assert quick is None


def test_short_and_odd_files_are_left_to_the_strict_reader(tmp_path):
    for content in (b"i/a.png l/a.png\n", b"", "i/a.png l/a.png\n".encode("utf-16") * 9000):
        (tmp_path / "list.txt").write_bytes(content)
        assert plain_pairs(tmp_path / "list.txt", tmp_path) is None
    assert plain_pairs(tmp_path, tmp_path) is None


def test_a_long_list_is_read_at_once(tmp_path):
    lines = [f"{kind}/{i:05}.png" for i in range(4000) for kind in ("i", "l")]
    for name in lines:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    rows = list(zip(lines[::2], lines[1::2], strict=True))
    random.Random(0).shuffle(rows)
    (tmp_path / "list.txt").write_text("".join(f"{image} {label}\n" for image, label in rows))
    data = DataConfig(layout="list", root=str(tmp_path), classes="voc", train_split="list.txt")
    pairs = scan_layout(data, "list.txt").pairs
    assert isinstance(pairs, PairTable)
    assert [
        (str(p.image.relative_to(tmp_path)), str(p.label.relative_to(tmp_path))) for p in pairs
    ] == rows


def test_a_table_takes_little_more_than_its_paths(tmp_path):
    images = [f"images/{i:07}.jpg" for i in range(20_000)]
    labels = [f"labels/{i:07}.png" for i in range(20_000)]
    tracemalloc.start()
    table = PairTable(tmp_path, images, labels)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / len(table) < 36 + 16 + 20
    assert table[19_999].name == "images/0019999"
