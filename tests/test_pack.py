"""Packs: `segtrain data pack`, and what reads them by `data.pack`."""

import errno
import json
import math
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from experiments import bits, flip_bit, last, small, stopped_after, train, write_config
from PIL import Image
from safetensors import safe_open
from test_fingerprint import on_a_machine_of_its_own

from segtrain.cli import main as segtrain
from segtrain.config import DataConfig
from segtrain.data import open_dataset
from segtrain.data.check.checks import check_data
from segtrain.data.check.stats import measure
from segtrain.data.pack import open_pack, reader, writer
from segtrain.data.pack.index import MANIFEST, checksum, sha256_of
from segtrain.data.pack.reader import split_rows
from segtrain.data.read.image import RGB
from segtrain.errors import ConfigError, DataError
from segtrain.run.directory import RunLock

SIZES = {"a": (5, 8), "b c": (1, 1), "d/\udce4": (9, 4), "e": (7, 6), "f": (3, 11)}


def save(root, split, name, size, mode="RGB", seed=0):
    rng = np.random.default_rng(seed)
    for kind in ("images", "labels"):
        (root / kind / split / name).parent.mkdir(parents=True, exist_ok=True)
    path = root / f"images/{split}/{name}.{'jpg' if mode == 'JPEG' else 'png'}"
    image = Image.fromarray(rng.integers(30, 256, (*size, 3), dtype=np.uint8))
    image.convert("RGB" if mode == "JPEG" else mode).save(path)
    label = rng.choice(np.array([0, 1, 2, 255], np.uint8), size)
    if label.size > 2:
        label[0, :3] = 0, 1, 2
    Image.fromarray(label).save(root / f"labels/{split}/{name}.png", compress_level=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with images of all kinds and sizes, and their pack, which two processes made."""
    folder = tmp_path_factory.mktemp("made")
    root = folder / "data"
    modes = ("RGB", "L", "P", "LA", "JPEG")
    for i, ((name, size), mode) in enumerate(zip(SIZES.items(), modes, strict=True)):
        save(root, "train", name, size, mode, i)
    save(root, "val", "v", (6, 5), "RGBA", 10)
    save(root, "val", "w", (4, 7), "RGB", 11)
    (root / "toy.yaml").write_text("classes: [sky, road, car]\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SHARD_BYTES", 400)
        patch.setattr("segtrain.data.read.concurrent.num_processes", lambda *_: 2)
        assert pack(root, folder / "pack") == 0
    return folder


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made / "data", tmp_path / "data")


@pytest.fixture
def packed(made, root, tmp_path):
    """The options of the packed data set."""
    return data_of(root, pack=str(shutil.copytree(made / "pack", tmp_path / "pack")))


def data_of(root, **options):
    places = {"root": str(root), "classes": str(root / "toy.yaml")}
    return DataConfig(**{"layout": "folders"} | places | options)


def pack(root, output, **options):
    """The exit code of `segtrain data pack`."""
    config = root.parent / "c.yaml"
    content = data_of(root, **options).model_dump(mode="json", exclude_defaults=True)
    config.write_text(yaml.safe_dump({"data": content}))
    return segtrain(["data", "pack", str(config), "--output", str(output)])


def shards(data):
    return sorted(Path(data.pack).glob("*.safetensors"))


def assert_same_items(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def forge(directory, change):
    """Changes the manifest, and its hash so that it fits."""
    path = Path(directory) / MANIFEST
    content = json.loads(path.read_text())["pack"]
    change(content)
    path.write_text(json.dumps({"sha256": sha256_of(content), "pack": content}))


def first_image(content):
    return content["splits"]["train"]["images"][0]


def errors_of(result):
    return [finding for finding in result.findings if finding.severity == "error"]


# What comes out.


def test_images_and_labels_come_out_bit_for_bit(root, packed):
    assert len(shards(packed)) == 3
    for split in ("train", "val"):
        files, rows = open_dataset(data_of(root), split), open_dataset(packed, split)
        assert [rows.name(i) for i in range(len(rows))] == [p.name for p in files.pairs]
        assert rows.pairs == files.pairs
        assert rows.warnings == files.warnings
        assert_same_items(rows, files)
        for i, (image, label) in enumerate(rows):
            assert image.flags.c_contiguous
            assert image.flags.writeable
            assert label.flags.writeable
            for part, view in zip((image, label), rows.view(i), strict=True):
                assert np.shares_memory(view, rows.shards.rows(rows.images[i]))
                assert not view.flags.writeable
                np.testing.assert_array_equal(view, part)
        assert_same_items(pickle.loads(pickle.dumps(rows)), files)


def test_shards_are_safetensors_files(packed):
    found = {}
    for path in shards(packed):
        with safe_open(path, framework="np") as file:
            assert file.metadata()["format"] == "segtrain pack 3"
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert sorted(found) == [f"{i:07d}" for i in range(7)]
    # Four bytes a pixel: RGB and the label.
    items = [split_rows(rows, rows.shape[1] // 4, RGB) for _, rows in sorted(found.items())[:5]]
    assert_same_items(items, open_dataset(packed, "train"))


@pytest.mark.parametrize("label_format", ["colors", "train_ids"])
def test_labels_are_stored_as_train_ids_whatever_their_format(root, tmp_path, label_format):
    colors = np.zeros((256, 3), np.uint8)
    colors[:3] = [[9, 0, 0], [0, 8, 0], [0, 0, 7]]
    lines = [f"  - {{name: c{i}, ids: [{9 - i}], color: {colors[i].tolist()}}}" for i in range(3)]
    text = "\n".join(["classes:", *lines, "ignore_color: [0, 0, 0]"])
    (root / "toy.yaml").write_text(text)
    if label_format == "colors":
        for path in root.glob("labels/**/*.png"):
            Image.fromarray(colors[np.array(Image.open(path))]).save(path)
    options = {"label_format": label_format}
    assert pack(root, tmp_path / "p", **options) == 0
    rows = open_dataset(data_of(root, pack=str(tmp_path / "p"), **options), "train")
    assert_same_items(rows, open_dataset(data_of(root, **options), "train"))
    assert {0, 1, 2, 255} == set(np.unique(rows[3][1]).tolist())


# Training.


@pytest.fixture(scope="module")
def scenes(data, tmp_path_factory):
    """A pack of the small data set."""
    folder = tmp_path_factory.mktemp("scenes")
    config = write_config(folder / "c.yaml", small(data))
    assert segtrain(["data", "pack", str(config), "--output", str(folder / "pack")]) == 0
    return str(folder / "pack")


def test_a_run_goes_on_from_a_pack_to_its_files(run_ranks, scenes, data, tmp_path):
    """With all that reads a sample in another way: parts of images, centroids, partners."""
    configs = {}
    for name, places in {"files": {}, "pack": {"pack": scenes}}.items():
        model = {"backbone": "resnet18", "num_stages": 2, "output_stride": 8}
        sections = {"train": {"steps": 2}, "data": {"class_uniform": 0.4} | places}
        options = small(data, model=model, **sections)
        options["augment"] |= {"class_mix_prob": 0.6, "max_class_share": 0.6}
        configs[name] = write_config(tmp_path / f"{name}.yaml", options)
    run, other = tmp_path / "run", tmp_path / "other"
    assert run_ranks(1, stopped_after, 1, configs["pack"], run) == [143]
    shutil.copytree(run, other)
    assert run_ranks(1, train, configs["pack"], run, True) == [0]
    assert run_ranks(1, train, configs["files"], other, True) == [0]
    assert bits(last(run)) == bits(last(other))
    assert last(run).data == last(other).data
    log = (other / "train.log").read_text()
    assert "changed" not in log
    assert "warning" not in log


def test_machines_with_packs_of_different_pixels_are_refused(run_ranks, scenes, data, tmp_path):
    """As two versions of a JPEG decoder make them."""
    other = Path(shutil.copytree(scenes, tmp_path / "other"))
    forge(other, lambda content: first_image(content).update(crc=1))
    configs = [
        write_config(tmp_path / f"{i}.yaml", small(data, data={"pack": str(where)}))
        for i, where in enumerate((scenes, other))
    ]
    found = run_ranks(2, on_a_machine_of_its_own, configs, tmp_path / "run")
    assert found[0] == found[1]
    assert found[0][:2] == ("DataError", 3)
    assert "than that of rank 0: the pixels in data.pack differ" in found[0][2]


def test_images_of_a_pack_without_their_labels(root, packed):
    shutil.rmtree(root / "labels" / "val")
    dataset = open_dataset(packed, "val", labelled=False)
    image, label = dataset[1]
    assert image.shape == (4, 7, 3)
    assert (label == 255).all()


# Other options than those of the pack.


@pytest.mark.fault(94)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("classes: [sky, car, road]", "class 1 is road there, car now"),
        ("classes: [{name: sky}, {name: road, ids: [2]}, {name: car, ids: [1]}]", "ids of road"),
        ("classes: [sky, road, car]\nignore_ids: [7, 255]", "ignore_ids: [255] there, [7, 255]"),
        ({"label_format": "train_ids"}, "data.label_format: ids there, train_ids now"),
        ({"train_exclude": ("e",)}, "data.train_exclude: [] there, ['e'] now"),
        ({"images_dir": "x"}, "data.images_dir: images there, x now"),
        ({"layout": "camvid"}, "data.layout: folders there, camvid now"),
        ({"train_split": "trainval"}, "holds no split 'trainval', only 'train', 'val'"),
    ],
)
def test_a_pack_of_another_class_file_or_other_options_is_refused(root, packed, changed, said):
    """changed: the text of the class file, or options."""
    if isinstance(changed, str):
        (root / "toy.yaml").write_text(changed)
        changed = {}
    data = packed.model_copy(update=changed)
    with pytest.raises(ConfigError) as refused:
        open_dataset(data, data.train_split)
    assert said in str(refused.value)


def test_excluded_images_stay_out_and_colours_of_pictures_may_change(root, tmp_path):
    assert pack(root, tmp_path / "p", train_exclude=("e", "b c")) == 0
    (root / "toy.yaml").write_text("classes: [{name: sky, color: [1, 2, 3]}, road, car]\n")
    data = data_of(root, pack=str(tmp_path / "p"), train_exclude=("b c", "e"))
    dataset = open_dataset(data, "train")
    assert [pair.name for pair in dataset.pairs] == ["a", "d/\udce4", "f"]
    assert dataset.classes.palette[0] == (1, 2, 3)
    assert len(open_dataset(data, "val")) == 2


# Files that change.


def same_size(path):
    """Other content of the same size."""
    size, content = path.stat().st_size, path.read_bytes()
    Image.fromarray(1 - np.array(Image.open(path)) % 2).save(path, compress_level=0)
    assert path.stat().st_size == size
    assert path.read_bytes() != content


def grow(path):
    """Another size at the same time."""
    before = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.fault(94)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: grow(r / "images/train/a.png"), "images/train/a.png: changed since it was"),
        (lambda r: same_size(r / "labels/train/e.png"), "labels/train/e.png: changed since it"),
        (lambda r: (r / "labels/train/e.png").unlink(), "labels/train/e.png: gone since it was"),
        (lambda r: save(r, "train", "z", (3, 3)), "z: added, removed or of other files since"),
    ],
)
def test_files_that_changed_after_packing_are_named(root, packed, change, said):
    change(root)
    with pytest.raises(DataError, match="delete the pack and make it again") as refused:
        open_dataset(packed, "train")
    assert said in str(refused.value)


def test_a_pack_is_enough_without_its_files(root, packed):
    expected = list(open_dataset(packed, "train"))
    for kind in ("images", "labels"):
        shutil.rmtree(root / kind)
    dataset = open_dataset(packed, "train")
    assert_same_items(dataset, expected)
    assert [line for line in dataset.warnings if "are not noticed" in line]
    assert check_data(packed, jobs=1).ok


def test_a_root_with_other_images_is_not_taken_for_a_root_without(root, packed):
    """As where an evaluation on other data names another root."""
    for path in root.glob("images/val/*.png"):
        for kind in ("images", "labels"):
            file = root / kind / "val" / path.name
            file.rename(file.with_stem(f"other {file.stem}"))
    with pytest.raises(DataError, match="which holds others; delete the pack and make it again"):
        open_dataset(packed, "val")


def test_copied_files_are_no_others(root, packed, monkeypatch):
    for path in root.glob("*/train/**/*.*"):
        os.utime(path, (1, 1))
    assert open_dataset(packed, "train").warnings == []
    monkeypatch.setattr(open_pack, "_MAX_HASHED", 9)
    (line,) = open_dataset(packed, "train").warnings
    assert "10 files have other times than when they were packed" in line


def test_a_change_that_keeps_size_and_time_is_found_by_data_check(root, packed):
    label = root / "labels" / "train" / "e.png"
    before = label.stat()
    same_size(label)
    os.utime(label, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_dataset(packed, "train").warnings == []
    (found,) = errors_of(check_data(packed, jobs=1))
    said = "changed since it was packed; delete the pack and make it again"
    assert found.places == {said: [str(label)]}


# Shards that change.


@pytest.mark.fault(95)
@pytest.mark.parametrize("moment", ["before the start", "after the start"])
def test_a_shard_that_is_cut_off_or_gone_is_named(packed, moment):
    dataset = open_dataset(packed, "train")
    path = dataset.shards.path(dataset.images[0])
    content = path.read_bytes()

    def refused(said):
        with pytest.raises(DataError, match=rf"00000\.safetensors: {said}"):
            open_dataset(packed, "train") if moment == "before the start" else dataset[0]

    for broken in (content[:-1], content + b"\0"):
        path.write_bytes(broken)
        refused(f"a shard of {len(broken)} bytes, expected {len(content)}; copy it again")
    path.unlink()
    refused("cannot be read: no such file")


def test_a_flipped_bit_is_noticed_at_the_first_touch(packed, monkeypatch):
    dataset = open_dataset(packed, "train")
    image = dataset.images[1]
    path = dataset.shards.path(image)
    flip_bit(path, image.offset + 2)
    with pytest.raises(DataError, match=rf"{path}: damaged: image b c is not what was packed"):
        dataset.view(1)
    counted = []
    monkeypatch.setattr(reader, "checksum", lambda rows: counted.append(1) or checksum(rows))
    worker = multiprocessing.get_context("fork").Process(target=dataset.view, args=(2,))
    worker.start()
    worker.join()
    for index in (0, 0, 2):  # a loader worker has looked at 2
        dataset.view(index)
    assert len(counted) == 1


@pytest.mark.fault(95)
def test_data_check_reads_the_pack(root, packed):
    expected, found = (check_data(data, jobs=1) for data in (data_of(root), packed))
    assert found.ok
    for one, other in zip(expected.scans, found.scans, strict=True):
        np.testing.assert_array_equal(one.pixels, other.pixels)
        assert (one.sizes, one.ignored_pixels) == (other.sizes, other.ignored_pixels)
        peaks = ([values.peak for values in scan.values_of_images] for scan in (one, other))
        assert next(peaks) == next(peaks)
    stats = [measure(data, "train", jobs=1) for data in (data_of(root), packed)]
    assert stats[0].numbers == stats[1].numbers

    image = open_dataset(packed, "val").images[1]
    flip_bit(shards(packed)[image.shard], image.offset + math.prod(image.shape) - 1)
    (found,) = errors_of(check_data(packed, jobs=1))
    assert found.kind == "unreadable"
    assert "image w is not what was packed" in next(iter(found.places))


def test_a_manifest_that_was_changed_is_refused(packed):
    path = Path(packed.pack) / MANIFEST
    text = path.read_text()
    for broken in (text.replace('"height": 5', '"height": 4'), text[:-9], "[]", ""):
        path.write_text(broken)
        with pytest.raises(DataError, match=r"pack\.json: damaged"):
            open_dataset(packed, "train")
    for forged in (
        lambda c: c["shards"][0].update(name="../x.safetensors"),
        lambda c: first_image(c).update(offset=-1),
        lambda c: first_image(c).update(height=8, width=5),  # exchanged
    ):
        path.write_text(text)
        forge(packed.pack, forged)
        with pytest.raises(DataError, match="damaged"):
            open_dataset(packed, "train").view(0)


# Making a pack.


@pytest.mark.parametrize("function", ["_fill_one", "to_json"])
def test_an_interrupted_pack_does_not_open_and_begins_again(
    root, tmp_path, monkeypatch, capsys, function
):
    """Its space is reserved before it is filled."""
    output = tmp_path / "p"

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, function, stop)
        assert pack(root, output) == 130
    place = (output / "00000.safetensors").stat()
    assert 512 * place.st_blocks >= place.st_size > 4096
    data = data_of(root, pack=str(output))
    with pytest.raises(DataError, match="no finished pack there; make one with segtrain data pack"):
        open_dataset(data, "train")
    Image.fromarray(np.full((7, 6, 3), 77, np.uint8)).save(root / "images/train/e.png")
    assert pack(root, output) == 0
    assert "packed 7 images, 0.0 GB: set data.pack: " in capsys.readouterr().out
    assert sorted(path.name for path in output.iterdir()) == ["00000.safetensors", MANIFEST]
    assert_same_items(open_dataset(data, "train"), open_dataset(data_of(root), "train"))


def test_damaged_images_are_all_named(root, tmp_path, monkeypatch, capsys):
    for name in ("images/train/e.png", "labels/train/f.png"):
        flip_bit(root / name, (root / name).stat().st_size // 2)
    monkeypatch.setattr("segtrain.data.check.checks.check_split", lambda _: [])
    assert pack(root, tmp_path / "p") == 3
    said = capsys.readouterr().err
    assert "not finished; repair these and run the command again: 2 problems" in said
    assert "images/train/e.png: " in said
    assert "labels/train/f.png: " in said


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("full", 3, "holds holiday.jpg, which is no pack"),
        ("pack", 3, "holds another pack; ...train_exclude: [] there, ['a'] now"),
        ("data/images/train/p", 2, "where images or labels of the data set are read"),
        ("used", 2, "in use by process"),
    ],
)
def test_a_folder_with_something_else_is_refused(
    root, tmp_path, packed, capsys, output, code, said
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "holiday.jpg").write_bytes(b"x")
    with RunLock(tmp_path / "used"):
        assert pack(root, tmp_path / output, train_exclude=("a",)) == code
    error = capsys.readouterr().err
    assert [part for part in said.split("...") if part not in error] == []


def test_a_pack_is_not_made_twice(root, tmp_path, monkeypatch, capsys):
    assert pack(root, tmp_path / "p") == 0
    monkeypatch.setattr(writer, "write_pack", lambda *_: pytest.fail("again"))
    assert pack(root, tmp_path / "p") == 0
    assert "is packed already" in capsys.readouterr().out
    grow(root / "images/train/a.png")
    assert pack(root, tmp_path / "p") == 3
    assert "a.png: changed since it was packed" in capsys.readouterr().err


def test_a_disk_that_is_full_is_told_before_it_is_filled(root, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    assert pack(root, tmp_path / "p") == 6
    assert "the pack cannot be written: no space left on device" in capsys.readouterr().err


def test_what_was_odd_before_packing_is_said_at_each_start(root, tmp_path):
    for path in list(root.glob("images/**/*.*")):
        size = np.array(Image.open(path)).shape[:2]
        path.unlink()
        deep = np.random.default_rng(0).integers(0, 2**12, (*size, 3), dtype=np.uint16)
        _, content = cv2.imencode(".png", deep * 16 if path.stem in "av" else deep)
        path.with_suffix(".png").write_bytes(content)
    assert pack(root, tmp_path / "p") == 0
    dataset = open_dataset(data_of(root, pack=str(tmp_path / "p")), "train")
    assert [line for line in dataset.warnings if "if these are not just dark" in line]
