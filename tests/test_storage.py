"""Data sets, packs and runs behind addresses: an S3 server and a web server on this machine."""

import http.server
import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from experiments import bits, last, refusal, small, write_config, write_data
from processes import Command, end_all

from segtrain import cli
from segtrain.config import DataConfig
from segtrain.data import open_dataset
from segtrain.errors import DataError, ExecutionError
from segtrain.files import ABSENT_NS, mirror, remote
from segtrain.files.mirror import Mirror, cache_folder, local_path
from segtrain.files.remote import Store
from segtrain.run.remote_run import run_folder

moto_server = pytest.importorskip("moto.server", reason="pip install 'segtrain[dev]'")
boto3 = pytest.importorskip("boto3")

STEPS = 6


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield running.get_host_and_port()
    running.stop()


@pytest.fixture(scope="module")
def made(tmp_path_factory, server):
    """A data set and its pack on the disk, which are also in the bucket `data`."""
    root = tmp_path_factory.mktemp("made")
    (root / "set").mkdir()
    write_data(root / "set")
    config = write_config(
        root / "config.yaml",
        small(root / "set", train={"steps": STEPS}, checkpoint={"every_steps": 2}),
    )
    assert cli.main(["data", "pack", str(config), "--output", str(root / "pack")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        use(patch, server, root / "unused")
        bucket("data")
        upload(root, "data", "set", "pack")
    return root


@pytest.fixture(autouse=True)
def machine(monkeypatch, server, tmp_path):
    """A machine with an empty cache, whose attempts follow each other at once."""
    monkeypatch.setattr(remote, "WAITS_S", (0.01, 0.02))
    use(monkeypatch, server, tmp_path / "cache")


def use(patch, address, cache):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    environ = {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*address),
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "SEGTRAIN_CACHE": str(cache),
    }
    for name, value in environ.items():
        patch.setenv(name, value)


def client():
    return boto3.client("s3")


def bucket(name):
    client().create_bucket(Bucket=name)
    return name


def upload(root, name, *folders):
    for folder in folders:
        for path in (root / folder).rglob("*"):
            if path.is_file():
                client().upload_file(str(path), name, path.relative_to(root).as_posix())


@pytest.fixture
def own(made, request):
    """A bucket of the test alone, with the data set and the pack."""
    name = bucket(f"own-{abs(hash(request.node.name)) % 10**9}")
    upload(made, name, "set", "pack")
    return name


def data_of(root, classes=None, **options):
    classes = str(classes or f"{root}/classes.yaml")
    return DataConfig(layout="folders", root=str(root), classes=classes, **options)


def train(config, output, *words):
    return cli.main(["train", str(config), "--nproc", "1", "--output", str(output), *words])


def setting(**options):
    return [word for key, value in options.items() for word in ("--set", f"data.{key}={value}")]


@pytest.fixture(scope="module")
def on_disk(made):
    """The bits of the run from the disk."""
    assert train(made / "config.yaml", made / "run") == 0
    return bits(last(made / "run"))


def assert_same_pixels(one, other):
    assert one.names == other.names
    for (image, label), (image2, label2) in zip(one, other, strict=True):
        np.testing.assert_array_equal(image, image2)
        np.testing.assert_array_equal(label, label2)


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_pixel_is_that_of_the_disk(made, split):
    expected = open_dataset(data_of(made / "set"), split)
    files = open_dataset(data_of("s3://data/set"), split)
    pack = open_dataset(data_of("s3://data/set", pack="s3://data/pack"), split)
    assert_same_pixels(expected, files)
    assert_same_pixels(expected, pack)
    # As loader workers on CUDA get them, and fetch by themselves.
    assert_same_pixels(expected, pickle.loads(pickle.dumps(files)))
    shutil.rmtree(cache_folder())
    assert_same_pixels(expected, pickle.loads(pickle.dumps(pack)))
    assert pack.is_fetched
    assert not pack.warnings


def test_training_ends_with_the_bits_of_the_disk(made, on_disk, tmp_path, monkeypatch):
    classes = "s3://data/set/classes.yaml"
    options = setting(root="s3://data/set", classes=classes, num_workers=2)
    assert train(made / "config.yaml", tmp_path / "files", *options) == 0
    assert bits(last(tmp_path / "files")) == on_disk
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path / "cache2"))
    monkeypatch.setenv("SEGTRAIN_CACHE_GB", "0.00006")  # three images of eleven
    options = setting(root="s3://data/none", pack="s3://data/pack", num_workers=2)
    assert train(made / "config.yaml", tmp_path / "packed", *options) == 0
    assert bits(last(tmp_path / "packed")) == on_disk
    kept = [path.stat().st_size for path in (tmp_path / "cache2").rglob("*.ranges/*")]
    assert 0 < sum(kept) <= 60_000


def test_a_run_goes_on_from_disk_to_address_and_back(made, on_disk, tmp_path):
    run = tmp_path / "run"
    classes = "s3://data/set/classes.yaml"
    assert train(made / "config.yaml", run, "--until", "2") == 0
    moved = setting(root="s3://data/set", classes=classes)
    assert train(made / "config.yaml", run, "--resume", "--until", "4", *moved) == 0
    moved = setting(root="s3://data/set", pack="s3://data/pack")
    assert train(made / "config.yaml", run, "--resume", "--until", "5", *moved) == 0
    assert train(made / "config.yaml", run, "--resume") == 0
    assert bits(last(run)) == on_disk


def test_check_and_stats_read_addresses(made, capfd):
    moved = setting(root="s3://data/set", classes="s3://data/set/classes.yaml")
    for words in (["check"], ["check", "--set", "data.pack=s3://data/pack"], ["stats"]):
        here = ["data", *words, str(made / "config.yaml"), "--jobs", "1"]
        assert cli.main(here) == 0
        expected = capfd.readouterr().out.replace(str(made / "set"), "s3://data/set")
        assert cli.main([*here, *moved]) == 0
        cached = str(local_path("s3://data/set"))
        assert capfd.readouterr().out.replace(cached, "s3://data/set") == expected


def test_files_larger_than_the_cache_are_refused_and_a_pack_is_not(made, monkeypatch):
    monkeypatch.setenv("SEGTRAIN_CACHE_GB", "0.00004")
    with pytest.raises(DataError, match="may take 4e-05: give it more by SEGTRAIN_CACHE_GB, or ma"):
        open_dataset(data_of("s3://data/set"), "train")
    assert len(list(open_dataset(data_of("s3://data/set", pack="s3://data/pack"), "train"))) == 8
    monkeypatch.setenv("SEGTRAIN_CACHE_GB", "much")
    found = refusal(open_dataset, data_of("s3://data/set", "camvid"), "train")
    assert found[1:] == (2, "environment: SEGTRAIN_CACHE_GB: expected GB above 0, got much")


def read_many(split, seed):
    """Reads items in a random order, with a cache that has room for few."""
    pack = open_dataset(data_of("s3://data/set", pack="s3://data/pack"), split)
    rng = np.random.default_rng(seed)
    return {int(i): tuple(part.tobytes() for part in pack[i]) for i in rng.permutation(8)}


def test_processes_and_threads_share_a_small_cache(made, monkeypatch):
    monkeypatch.setenv("SEGTRAIN_CACHE_GB", "0.00004")  # two images
    expected = open_dataset(data_of(made / "set"), "train")
    pid = os.fork()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(partial(read_many, "train"), range(4)))
    for one in found:
        assert one == {i: tuple(part.tobytes() for part in expected[i]) for i in range(8)}
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_the_cache_keeps_its_size_while_many_write(monkeypatch):
    """None removes what another is writing, nor what it has taken the room for."""
    monkeypatch.setenv("SEGTRAIN_CACHE_GB", "0.00006")  # three files
    folder = cache_folder("data", "some")
    folder.mkdir(parents=True)

    def write(number):
        for i in range(20):
            path = folder / "shard.ranges" / f"{number}-{i}"
            with mirror._writing(path, 20_000) as draft:
                time.sleep(0.002)
                draft.write_bytes(bytes(20_000))
                draft.replace(path)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(write, range(5)))
    kept = [path.stat().st_size for path in (folder / "shard.ranges").iterdir()]
    assert 0 < sum(kept) <= 60_000


def test_what_was_removed_from_the_cache_is_fetched_when_it_is_opened(made, monkeypatch):
    expected = open_dataset(data_of(made / "set"), "train")
    found = open_dataset(data_of("s3://data/set"), "train")
    used = [path for pair in found.pairs for path in (pair.image, pair.label)]
    assert all(path.stat().st_mtime_ns != ABSENT_NS for path in used)
    held = sum(path.stat().st_size for path in used)
    mirror._shrink(cache_folder("data"), held, held // 2)
    gone = [path for path in used if path.stat().st_mtime_ns == ABSENT_NS]
    assert 0 < len(gone) < len(used)
    assert_same_pixels(expected, found)


def replace(name, key, change):
    """Replaces an object by one of the same size."""
    content = client().get_object(Bucket=name, Key=key)["Body"].read()
    changed = change(content)
    assert len(changed) == len(content)
    client().put_object(Bucket=name, Key=key, Body=changed)


def test_a_replaced_object_is_noticed(made, own, tmp_path):
    """A label of the same name and size, with other pixels; then one while it is fetched."""
    config = yaml.safe_load((made / "config.yaml").read_text())
    config["data"] |= {"root": f"s3://{own}/set", "classes": f"s3://{own}/set/classes.yaml"}
    config = write_config(tmp_path / "c.yaml", config)
    assert train(config, tmp_path / "run", "--until", "2") == 0
    # A PNG without compression has its pixels one after another.
    label = cv2.imread(str(made / "set/labels/train/3.png"), -1)
    key = "set/labels/train/3.png"
    for i, value in enumerate((1, 2)):
        label[:9, :9] = value
        raw = cv2.imencode(".png", label, [cv2.IMWRITE_PNG_COMPRESSION, 0])[1].tobytes()
        if i == 0:
            client().put_object(Bucket=own, Key=key, Body=raw)
            open_dataset(data_of(f"s3://{own}/set"), "train")
        else:
            replace(own, key, lambda _, raw=raw: raw)
    now = open_dataset(data_of(f"s3://{own}/set"), "train")
    np.testing.assert_array_equal(now[3][1], label)
    assert train(config, tmp_path / "run", "--resume") == 2  # other data
    assert not list((tmp_path / "run/checkpoints").glob("step*"))


def test_an_object_that_is_replaced_while_it_is_fetched_is_no_data(own, monkeypatch):
    whole, key = Store.get, "set/images/train/5.png"

    def get(self, name, target):
        whole(self, name, target)
        if name.endswith("train/5.png") and "images" in name:
            replace(own, key, lambda old: old[:-20] + bytes(20))

    monkeypatch.setattr(Store, "get", get)
    with pytest.raises(DataError, match=r"1 objects, such as images/train/5.png, were replaced"):
        open_dataset(data_of(f"s3://{own}/set"), "train")
    monkeypatch.setattr(Store, "get", whole)
    broken = open_dataset(data_of(f"s3://{own}/set"), "train")
    assert broken.pairs[5].image.read_bytes()[-20:] == bytes(20)


def test_a_pack_that_is_not_what_its_index_says_is_refused(made, own):
    data = data_of("s3://data/none", made / "set/classes.yaml", pack=f"s3://{own}/pack")
    pack = open_dataset(data, "train")
    offset = pack.images[2].offset + 1000
    key = "pack/00000.safetensors"
    replace(own, key, lambda old: old[:offset] + bytes([old[offset] ^ 1]) + old[offset + 1 :])
    where = pack.images[2].offset
    with pytest.raises(DataError, match=f"s3://{own}/{key}: damaged: bytes {where}"):
        pack[2]
    assert len(pack[1]) == 2
    client().put_object(Bucket=own, Key=key, Body=b"short")
    with pytest.raises(DataError, match="a shard of 5 bytes"):
        open_dataset(data, "train")


class Proxy:
    """Forwards connections to the S3 server; the first `drops` are cut, all are `delay_s` late."""

    def __init__(self, target, drops=0, delay_s=0.0):
        self.target, self.drops, self.delay_s = target, drops, delay_s
        self.socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                near, _ = self.socket.accept()
            except OSError:
                return
            if self.drops > 0:
                self.drops -= 1
                near.close()
                continue
            time.sleep(self.delay_s)
            try:
                far = socket.create_connection(self.target)
            except OSError:  # the server of the tests has ended meanwhile
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, sink):
                with threading.Lock():
                    one.close()


def test_lost_and_slow_connections_are_tried_again(made, server, monkeypatch, tmp_path):
    proxy = Proxy(server, drops=2, delay_s=0.05)
    use(monkeypatch, proxy.socket.getsockname(), tmp_path / "cache")
    found = open_dataset(data_of("s3://data/set"), "val")
    assert proxy.drops == 0
    assert_same_pixels(open_dataset(data_of(made / "set"), "val"), found)
    proxy.drops = 10**6
    # What is in the cache is read without a connection.
    assert_same_pixels(open_dataset(data_of(made / "set"), "val"), found)
    kind, code, text = refusal(open_dataset, data_of("s3://data/set"), "val")
    assert (kind, code) == ("ExecutionError", 6)
    assert text.startswith("s3://data/set")
    assert "tried 3 times; check the connection" in text
    assert "\n" not in text
    proxy.socket.close()


def test_a_silent_server_is_told(server, monkeypatch, tmp_path):
    proxy = Proxy(server, delay_s=60)
    monkeypatch.setattr(remote, "_SILENT_S", 0.3)
    use(monkeypatch, proxy.socket.getsockname(), tmp_path / "cache")
    began = time.monotonic()
    _, code, text = refusal(open_dataset, data_of("s3://data/set", "camvid"), "val")
    assert code == 6
    assert "imeout" in text
    assert time.monotonic() - began < 10
    proxy.socket.close()


def test_a_training_whose_pack_is_gone_ends_with_a_line(made, server, monkeypatch, tmp_path, capfd):
    proxy = Proxy(server)
    use(monkeypatch, proxy.socket.getsockname(), tmp_path / "cache")
    whole = Store.read

    def read(self, name, *args):
        if name.endswith(".safetensors"):
            proxy.drops = 10**6
        return whole(self, name, *args)

    monkeypatch.setattr(Store, "read", read)
    options = setting(root="s3://data/none", pack="s3://data/pack")
    assert train(made / "config.yaml", tmp_path / "run", *options) == 6
    assert "s3://data/pack/00000.safetensors: " in capfd.readouterr().err
    proxy.socket.close()


def test_refusals_are_lines_with_their_exit_codes(made, server, monkeypatch, tmp_path):
    for root, code, text in (
        ("s3://none-there/set", 3, "s3://none-there/set: no such bucket, or nothing in it"),
        ("s3://data/sett", 3, "s3://data/sett: no such bucket, or nothing in it"),
        ("foo://data/set", 2, "foo://data/set: no library for this kind of address"),
        ("gs://data/set", 2, "gs://data/set: needs pip install 'segtrain[storage]' (Please ins"),
    ):
        found = refusal(open_dataset, data_of(root, "camvid"), "train")
        assert (found[1], found[2][: len(text)]) == (code, text)
    found = refusal(open_dataset, data_of("s3://data/set", "s3://data/set/no.yaml"), "train")
    assert found[1:] == (2, "s3://data/set/no.yaml: no such object")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    found = refusal(open_dataset, data_of("s3://data/set"), "train")
    assert found[1] == 2
    assert "needs pip install 'segtrain[storage]'" in found[2]


def test_wrong_credentials_are_a_line(server, monkeypatch, tmp_path):
    import urllib.request

    def require(number):
        url = "http://{}:{}/moto-api/reset-auth".format(*server)
        headers = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, number, headers)).read()

    require(b"0")
    try:
        use(monkeypatch, server, tmp_path / "cache")
        kind, code, text = refusal(open_dataset, data_of("s3://data/set"), "train")
        assert (kind, code) == ("ConfigError", 2)
        assert "access is refused (" in text
        assert "are the credentials right?" in text
    finally:
        require(b"1000000000")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "CONFIG", "--set", "data.root=https://me:hidden@host/set"],
        ["train", "CONFIG", "--set", "data.root=https://host/set?key=hidden"],
        ["train", "CONFIG", "--output", "https://me:hidden@host/run"],
        ["eval", "sftp://me:hidden@host/run"],
        ["predict", "runs/a", "x", "--output", "s3://me:hidden@host/run"],
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(made, words, capfd):
    words = [str(made / "config.yaml") if word == "CONFIG" else word for word in words]
    try:
        code = cli.main(words)
    except SystemExit as error:
        code = error.code
    shown = "".join(capfd.readouterr())
    assert code == 2
    assert "hidden" not in shown
    assert "host/" in shown


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files, with ranges; no listing of folders."""

    def log_message(self, *_):
        pass

    def list_directory(self, _):
        self.send_error(404)

    def do_GET(self):
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
        if wanted is None or not path.is_file():
            return super().do_GET()
        first, _, final = wanted.removeprefix("bytes=").partition("-")
        content = path.read_bytes()[int(first) : int(final) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        return None


def test_a_web_server_without_listings_serves_lists_and_packs(made, tmp_path):
    site = shutil.copytree(made, tmp_path / "site")
    lines = [f"images/train/{i}.png labels/train/{i}.png\n" for i in (4, 0, 2)]
    (site / "set/few.txt").write_text("".join(lines))
    handler = partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_address[1]}"
        options = {"layout": "list", "train_split": "few.txt", "eval_split": "few.txt"}
        classes = str(made / "set/classes.yaml")
        listed = DataConfig(root=f"{url}/set", classes=f"{url}/set/classes.yaml", **options)
        expected = DataConfig(root=str(site / "set"), classes=classes, **options)
        assert_same_pixels(open_dataset(expected, "few.txt"), open_dataset(listed, "few.txt"))
        packed = data_of(f"{url}/none", classes, pack=f"{url}/pack")
        whole = open_dataset(data_of(made / "set"), "train")
        assert_same_pixels(whole, open_dataset(packed, "train"))
        (site / "set/few.txt").write_text(lines[0] + "images/train/9.png labels/train/9.png\n")
        with pytest.raises(DataError, match=r"few.txt:2: images/train/9.png: no such file"):
            open_dataset(listed, "few.txt")
        web.shutdown()


def test_names_that_lead_out_of_the_folder_are_left_out(own, tmp_path):
    for key in ("bad/a/../../../x", "bad/../y", "bad//z", "bad/fine.txt", "bad/folder/"):
        client().put_object(Bucket=own, Key=key, Body=b"text")
    place = Mirror(f"s3://{own}/bad")
    place.look()
    found = [path.name for path in place.folder.rglob("*") if path.is_file()]
    assert sorted(found) == [".lock", ".objects.json", "fine.txt"]


def keys(name):
    return {one["Key"] for one in client().list_objects_v2(Bucket=name).get("Contents", [])}


def folder_of(url):
    """Where this machine has the run."""
    return cache_folder("runs", mirror.cached_name(url))


def test_a_killed_run_ends_with_the_same_bits_on_another_machine(
    made, on_disk, own, server, tmp_path, monkeypatch
):
    url = f"s3://{own}/runs/a"
    command = Command(tmp_path, "train", made / "config.yaml", "--nproc", "1", "--output", url)
    listed = "runs/a/checkpoints/manifest.json"
    command.wait_until(lambda: listed in keys(own) and "runs/a/checkpoints/last.pt" in keys(own))
    command.kill()
    end_all()
    use(monkeypatch, server, tmp_path / "b")
    assert cli.main(["train", url, "--nproc", "1", "--resume"]) == 0
    assert bits(last(folder_of(url))) == on_disk
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path / "c"))
    assert bits(last(run_folder(url))) == on_disk
    for name in ("config.yaml", "metrics.jsonl", "train.log", "environment.json"):
        assert (folder_of(url) / name).read_bytes() == (
            tmp_path / "b/runs" / folder_of(url).name / name
        ).read_bytes()
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path / "d"))
    assert cli.main(["eval", url, "--nproc", "1"]) == 0
    assert [path.name for path in (folder_of(url) / "checkpoints").glob("*.pt")] == ["best.pt"]
    words = ["predict", url, str(made / "set/images/val"), "--output", str(tmp_path / "p")]
    assert cli.main(words) == 0
    assert cli.main(["report", url]) == 0


def test_a_reader_never_finds_half_and_the_manifest_is_put_last(made, own, tmp_path, monkeypatch):
    url, put, seen = f"s3://{own}/runs/a", Store.put, []

    def watched(self, source, name):
        put(self, source, name)
        seen.append(name)
        if any(one.endswith(".pt") for one in seen):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SEGTRAIN_CACHE", str(tmp_path / f"reader{len(seen)}"))
                steps.append(last(run_folder(url)).step)

    steps = []
    monkeypatch.setattr(Store, "put", watched)
    assert train(made / "config.yaml", url) == 0
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    assert seen[-1] == "checkpoints/manifest.json"
    first = seen.index("checkpoints/last.pt")
    assert {"config.yaml", "metrics.jsonl"} <= set(seen[:first])
    assert not any("previous" in name for name in keys(own))


def test_a_second_run_is_refused_and_a_newer_manifest_is_not_replaced(
    made, own, tmp_path, monkeypatch, capfd
):
    url = f"s3://{own}/runs/a"
    assert train(made / "config.yaml", url, "--until", "2") == 0
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path / "b"))
    assert train(made / "config.yaml", url) == 2
    assert f"{url}: another run is there" in capfd.readouterr().err
    key, put = "runs/a/checkpoints/manifest.json", Store.put
    foreign = b'{"last.pt": [{"step": 9, "num_bytes": 1, "sha256": "0"}]}'

    def overtaken(self, source, name):
        put(self, source, name)
        if name.endswith("last.pt"):  # another machine goes on at this moment
            client().put_object(Bucket=own, Key=key, Body=foreign)
            monkeypatch.setattr(Store, "put", put)
            going_on.set()

    going_on = threading.Event()
    monkeypatch.setattr(Store, "put", overtaken)
    assert cli.main(["train", url, "--nproc", "1", "--resume"]) == 6
    assert going_on.is_set()
    said = "".join(capfd.readouterr())
    assert "this one stops before it replaces that" in said
    assert "it is whole in" in said


def test_what_could_not_be_put_is_told_and_put_later(made, on_disk, own, monkeypatch, capfd):
    url, put, fails = f"s3://{own}/runs/a", Store.put, [True]

    def broken(self, source, name):
        if fails[0] and name.endswith(".pt"):
            raise ExecutionError(f"{self.url}/{name}: the line is cut")
        put(self, source, name)

    monkeypatch.setattr(Store, "put", broken)
    assert train(made / "config.yaml", url) == 6
    said = capfd.readouterr()
    assert "the line is cut; it is tried again with the next checkpoint" in said.out
    assert f"{url}: the newest state of the run is not there: " in said.err
    here = folder_of(url)
    assert f"it is whole in {here}; to put it: segtrain train {here} --resume" in said.err
    assert bits(last(here)) == on_disk
    fails[0] = False
    assert cli.main(["train", str(here), "--nproc", "1", "--resume"]) == 0
    monkeypatch.setenv("SEGTRAIN_CACHE", str(here.parent / "fresh"))
    assert bits(last(run_folder(url))) == on_disk


def test_no_bucket_for_the_output_is_told_before_training(made, capfd):
    assert train(made / "config.yaml", "s3://none-there/runs/a") == 2
    assert capfd.readouterr().err.endswith("segtrain: s3://none-there/runs/a: no such bucket\n")
    assert cli.main(["train", "s3://data/runs/a", "--resume"]) == 2
    assert capfd.readouterr().err == "segtrain: s3://data/runs/a: no run is there\n"


def test_ranks_that_are_stopped_put_what_they_have_saved(made, own, tmp_path, monkeypatch):
    url = f"s3://{own}/runs/a"
    words = ["--nproc", "2", "--output", url, "--set", "train.steps=5000"]
    command = Command(tmp_path, "train", made / "config.yaml", *words)
    command.wait_until(lambda: "runs/a/checkpoints/last.pt" in keys(own))
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.wait() == 143
    here = last(folder_of(url))
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path / "b"))
    assert last(run_folder(url)).step == here.step
    assert bits(last(run_folder(url))) == bits(here)
    assert not list((tmp_path / "cache").rglob(".outbox/*"))
