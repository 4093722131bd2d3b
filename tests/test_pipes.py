"""Pipes and devices in the place of files: refused at once, never waited for."""

import os
import signal

import pytest
from experiments import small, write_config

from segtrain.checkpoint.format import load
from segtrain.checkpoint.loading import load_initial, resolve
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.config import DataConfig, ModelConfig, load_config
from segtrain.data.read.classes import load_class_file
from segtrain.data.read.layouts import list_split
from segtrain.errors import CheckpointError, ConfigError, DataError
from segtrain.files import NotRegularError, manifest, read_bytes
from segtrain.models import build_backbone
from segtrain.models.pretrained import load_backbone
from segtrain.run import directory as run_directory
from segtrain.run.environment import changed_versions
from segtrain.synthetic.write import write_dataset


@pytest.fixture(autouse=True)
def at_once():
    """Whatever waits is told to stop: no test of this file takes a second."""

    def late(number, frame):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def pipe(tmp_path):
    def make(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return path

    return make


def voc(root):
    for name in ("JPEGImages/a.jpg", "SegmentationClass/a.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return DataConfig(layout="voc", root=str(root), classes="voc")


def test_a_file_is_read_up_to_its_bound(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_bytes(tmp_path / "x", 4)
    with pytest.raises(NotRegularError):
        read_bytes("/dev/null", 4)


def test_a_config_or_class_file_is_a_plain_file(pipe):
    path = pipe("c.yaml")
    for read, file in ((load_config, path), (load_config, "/dev/zero"), (load_class_file, path)):
        with pytest.raises(ConfigError, match=f"{file}: cannot be read: not a regular file"):
            read(str(file))


def test_a_split_file_is_a_plain_file(pipe, tmp_path):
    path = pipe("ImageSets/Segmentation/val.txt")
    with pytest.raises(DataError, match=f"{path}: cannot be read: not a regular file"):
        list_split(voc(tmp_path), "val")
    pipe("list.txt")
    data = DataConfig(layout="list", root=str(tmp_path), classes="voc")
    with pytest.raises(DataError, match="no such list file"):
        list_split(data, "list.txt")


def test_a_checkpoint_is_a_plain_file(pipe, tmp_path):
    path = pipe("a.pt")
    for function in (load, resolve, lambda path: load_initial(None, path)):
        with pytest.raises(CheckpointError, match=rf"^{path}: .*not a regular file$"):
            function(path)
    for suffix in ("pth", "safetensors"):
        path = pipe(f"w.{suffix}")
        with pytest.raises(
            CheckpointError, match=f"{path}: expected a file of weights, found a pipe"
        ):
            load_backbone(build_backbone(ModelConfig(backbone="resnet18")), str(path))


def test_a_manifest_is_a_plain_file_and_so_is_what_it_names(pipe, tmp_path):
    entry = manifest.Entry(1, 2, "x")
    manifest.write(tmp_path, {"last.pt": [entry]})
    pipe("last.pt")
    store = CheckpointManager(tmp_path, keep_limit=1)
    store.clean_up()
    with pytest.raises(CheckpointError, match=r"last\.pt: cannot be read: not a regular file"):
        store.newest()
    pipe("manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read \(not a regular"):
        store.clean_up()


def test_a_run_directory_holds_plain_files(pipe, tmp_path, data):
    """What concerns metrics.jsonl and train.log stands in test_log."""
    config = load_config(write_config(tmp_path / "c.yaml", small(data)))
    run_directory.write_description(tmp_path / "run", config, ["cpu"])
    pipe("run/environment.json")
    assert changed_versions(tmp_path / "run") == []
    pipe("run/config.yaml")
    (tmp_path / "run/checkpoints").mkdir()
    (tmp_path / "run/checkpoints/last.pt").touch()
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read: not a regular file"):
        run_directory.check_directory(tmp_path / "run", config, resume=True)


def test_drawn_scenes_are_described_by_a_plain_file(pipe, tmp_path):
    pipe("synthetic.json")
    with pytest.raises(DataError):
        write_dataset(tmp_path, {"train": 1, "val": 1}, size=(32, 32), seed=0, jobs=1)
