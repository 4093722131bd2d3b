"""Atomic writes, and reading files and folders."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from experiments import fill
from processes import REPOSITORY

from segtrain import files
from segtrain.checkpoint import format as checkpoint_format
from segtrain.desk.convert.read import read_file
from segtrain.errors import CheckpointError
from segtrain.files import torch_file
from segtrain.models.pretrained import load_backbone


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_full_disk_leaves_the_old_file_and_nothing_else(small_disk):
    path = small_disk / "config.yaml"
    files.write_atomic(path, "old")
    fill(small_disk, room=8192)
    with pytest.raises(OSError, match="No space left on device"):
        files.write_atomic(path, "new" * 9000)
    assert path.read_text() == "old"
    assert names(small_disk) == ["config.yaml", "other"]
    files.write_atomic(path, "new")
    assert path.read_text() == "new"


def test_a_write_reaches_the_disk_before_its_name(tmp_path):
    """The system calls of another process, in order: the bytes, the name, then its directory."""
    code = "import sys; from pathlib import Path; from segtrain import files\n"
    code += "files.write_atomic(Path(sys.argv[1]), 'text')"
    trace = tmp_path / "trace"
    if shutil.which("strace") is None:
        pytest.skip("strace is not there")
    watched = "trace=openat,write,fsync,rename,close"
    command = ["strace", "-f", "-o", trace, "-e", watched, sys.executable, "-c", code]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*command, tmp_path / "name"], env=environ, check=True)
    calls = [line for line in trace.read_text().splitlines() if "ENOENT" not in line]
    first = next(i for i, line in enumerate(calls) if "/.name." in line)
    kinds = [line.split(maxsplit=1)[1].split("(")[0] for line in calls[first:]]
    assert [kind for kind in kinds if kind != "close"][:6] == [
        *("openat", "write", "fsync", "rename", "openat", "fsync")
    ]


def test_a_link_and_a_leftover_are_replaced_and_the_target_stays(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "name").symlink_to("mine")
    # Of an earlier process with the same id.
    (tmp_path / f".name.{os.getpid()}.tmp").write_text("half")
    files.write_atomic(tmp_path / "name", "new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "name").read_text() == "new"
    assert not (tmp_path / "name").is_symlink()
    assert names(tmp_path) == ["mine", "name"]


def test_an_output_that_is_no_plain_file_is_written_in_place(tmp_path):
    os.mknod(tmp_path / "null", 0o20666, os.makedev(1, 3)) if os.geteuid() == 0 else None
    (tmp_path / "target").write_text("old and longer")
    (tmp_path / "link").symlink_to("target")
    kinds = {path: path.lstat().st_ino for path in tmp_path.iterdir()}
    for path in kinds:
        files.write_output(path, "new")
    changed = [path.name for path in kinds if path.lstat().st_ino != kinds[path]]
    assert changed == ["target"]  # a plain file is replaced
    assert (tmp_path / "target").read_text() == "new"


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    for name, target, problem in (
        ("a", "a", "Too many levels"),
        ("b", "no/folder", "No such file"),
    ):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(OSError, match=problem):
            files.check_output(tmp_path / name)
    (tmp_path / "there").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    files.check_output(tmp_path / "there")
    with pytest.raises(PermissionError, match="its folder may not"):
        files.check_output(tmp_path / "new")


def test_an_output_replaces_nothing_but_an_earlier_one(tmp_path):
    for content, begins in ((b"", ()), (b"", ("x",)), (b"{ours} 1", ("{theirs}", "{ours}"))):
        (tmp_path / "there").write_bytes(content)
        files.check_output(tmp_path / "there", *begins)
    for content, begins in ((b"0", ()), (b"\x89PNG", ("{ours}",)), (b"{our", ("{ours}",))):
        (tmp_path / "there").write_bytes(content)
        with pytest.raises(OSError, match="exists, and is no earlier file of this option; remove"):
            files.check_output(tmp_path / "there", *begins)


def test_a_file_is_read_up_to_its_bound(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        files.read_bytes(tmp_path / "x", 4)
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):  # which is not waited for
        with pytest.raises(files.NotRegularError):
            files.read_bytes(path, 4)


def listed_by_the_disk(monkeypatch, *, reverse):
    """From here on folders are listed in this order."""
    walk = os.walk

    def listed(top, **options):
        for here, folders, names in walk(top, **options):
            folders.sort(reverse=reverse)
            yield here, folders, sorted(names, reverse=reverse)

    monkeypatch.setattr(os, "walk", listed)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_and_the_names_do_not_depend_on_the_disk(tmp_path, monkeypatch, reverse):
    """Two links to one folder, a link beside what it leads to, and a loop."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for name in ("root/b/1", "root/c/2", "root/z", "outside/deep/3", "outside/4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (root / "a").symlink_to("c")
    (root / "itself").symlink_to("itself")
    (root / "b" / "up").symlink_to(root)
    (root / "y").symlink_to(outside)
    (root / "x").symlink_to(outside)
    (root / ".hidden").mkdir()
    (root / ".hidden" / "5").touch()
    listed_by_the_disk(monkeypatch, reverse=reverse)
    found = files.walk(root, hidden=False)
    listed = [str((place / name).relative_to(root)) for place, names in found for name in names]
    assert listed == ["itself", "z", "b/1", "c/2", "x/4", "x/deep/3"]


def flip_a_weight(path):
    """Changes one bit in the first tensor of a file of torch.save."""
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((9,), 1.5).numpy().tobytes()) + 3] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize(
    "read",
    [torch_file.read, read_file, lambda x: load_backbone(None, str(x)), checkpoint_format.load],
    ids=["weights", "convert", "pretrained", "checkpoint"],
)
def test_a_flipped_bit_in_a_weight_is_noticed_by_the_crc_of_the_file(read, tmp_path):
    """torch.load does not compare it, and 1.5 becomes 5e38."""
    path = tmp_path / "w.pth"
    torch.save({"weight": torch.full((9,), 1.5)}, path)
    flip_a_weight(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() == "w/data/0"
    with pytest.raises((CheckpointError, torch_file.DamagedError)) as refused:
        read(path)
    assert "damaged" in str(refused.value)


def test_files_without_a_crc_are_loaded(tmp_path):
    """torch stores 0 for every record then; the old format has none."""
    content = {"weight": torch.full((9,), 1.5)}
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, tmp_path / "zero.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(content, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("zero.pth", "old.pth"):
        assert torch.equal(torch_file.read(tmp_path / name)["weight"], content["weight"])
