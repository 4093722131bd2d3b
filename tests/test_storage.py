"""Packs and runs behind addresses: an S3 server and a web server on this machine."""

import contextlib
import http.server
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.request
from functools import partial

import numpy as np
import pytest
from experiments import bits, last, refusal, segtrain, small, write_config, write_data
from processes import Command, end_all

from segtrain.config import DataConfig
from segtrain.data import open_dataset
from segtrain.data.pack import writer
from segtrain.errors import DataError, ExecutionError
from segtrain.files import cache_folder, remote
from segtrain.files.remote import Store
from segtrain.run.remote_run import cached_run, run_folder

STEPS = 4


@pytest.fixture(scope="module")
def server():
    moto_server = pytest.importorskip("moto.server", reason="pip install '.[dev]'")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield running.get_host_and_port()
    running.stop()


@pytest.fixture(scope="module")
def made(tmp_path_factory, server):
    """A data set and its pack on the disk; the pack is also in the bucket `data`."""
    root = tmp_path_factory.mktemp("made")
    (root / "set").mkdir()
    write_data(root / "set")
    sections = {"train": {"steps": STEPS}, "optim": {"ema_decay": None}}
    sections |= {"augment": {"crop_size": [25, 33]}, "checkpoint": {"every_steps": 1}}
    config = write_config(root / "config.yaml", small(root / "set", **sections))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SHARD_BYTES", 40_000)  # two images
        assert segtrain("data", "pack", config, "--output", root / "pack") == 0
        use(patch, server, root / "unused")
        bucket("data")
        upload(root, "data", "pack")
    return root


@pytest.fixture(autouse=True)
def machine(monkeypatch, server, tmp_path):
    """A machine with an empty cache, whose attempts follow each other at once."""
    monkeypatch.setattr(remote, "WAITS_S", (0.01, 0.02))
    use(monkeypatch, server, tmp_path / "cache")


def use(patch, address, cache):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*address))
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("SEGTRAIN_CACHE", str(cache))


def client(service="s3"):
    import boto3

    return boto3.client(service)


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
    """A bucket of the test alone, with the pack."""
    name = bucket(f"own-{abs(hash(request.node.name)) % 10**9}")
    upload(made, name, "pack")
    return name


def packed(made, pack="s3://data/pack"):
    """The data of a machine that has the class file alone."""
    classes = str(made / "set/classes.yaml")
    return DataConfig(layout="folders", root=str(made / "none"), classes=classes, pack=str(pack))


def train(config, output, *words):
    return segtrain("train", config, "--nproc", 1, "--output", output, *words)


def resume(run):
    return segtrain("train", run, "--nproc", 1, "--resume")


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


def shards():
    """The whole shards in the cache."""
    return {path.name for path in cache_folder("packs").glob("*/0*.safetensors")}


@pytest.fixture
def fetched(monkeypatch):
    """The names of the objects that are fetched into files."""
    names, get = [], Store.get

    def noted(self, name, target):
        names.append(name)
        get(self, name, target)

    monkeypatch.setattr(Store, "get", noted)
    return names


def test_every_pixel_is_that_of_the_disk_and_a_split_fetches_its_shards_once(made, fetched):
    for split, names in (("val", "45"), ("train", "0123")):
        expected = open_dataset(packed(made, made / "pack"), split)
        found = open_dataset(packed(made), split)
        assert_same_pixels(expected, found)
        assert_same_pixels(expected, pickle.loads(pickle.dumps(found)))
        assert sorted(fetched) == [f"0000{name}.safetensors" for name in names]
        open_dataset(packed(made), split)
        assert len(fetched) == len(names)
        fetched.clear()


def test_a_run_goes_on_from_disk_to_address_and_back(made, on_disk, tmp_path):
    run = tmp_path / "run"
    assert train(made / "config.yaml", run, "--until", "1") == 0
    moved = setting(root=tmp_path / "none", pack="s3://data/pack", num_workers=2)
    assert train(made / "config.yaml", run, "--resume", "--until", "2", *moved) == 0
    assert train(made / "config.yaml", run, "--resume") == 0
    assert bits(last(run)) == on_disk


def test_what_a_killed_process_has_fetched_stays_and_half_a_shard_is_nobody_s(
    made, server, tmp_path, monkeypatch, fetched
):
    """And nothing waits for the one that died."""
    proxy = Proxy(server, stops_after=130_000)
    use(monkeypatch, proxy.address, tmp_path / "cache")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            open_dataset(packed(made), "train")
        os._exit(1)
    assert proxy.has_stopped.wait(60)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    whole = shards()
    (left,) = cache_folder("packs").glob("*/.*")
    assert 0 < len(whole) < 4
    use(monkeypatch, server, tmp_path / "cache")
    expected = open_dataset(packed(made, made / "pack"), "train")
    assert_same_pixels(expected, open_dataset(packed(made), "train"))
    assert {*fetched} == {f"0000{i}.safetensors" for i in range(4)} - whole
    assert left.exists()
    for path in (*left.iterdir(), left):
        os.utime(path, (1, 1))
    open_dataset(packed(made), "val")
    assert not left.exists()


def test_processes_that_fetch_at_the_same_time_all_read_the_pack(made):
    expected = open_dataset(packed(made, made / "pack"), "train")
    pids = [os.fork() for _ in range(2)]
    if 0 in pids:
        code = 1
        with contextlib.suppress(BaseException):
            assert_same_pixels(expected, open_dataset(packed(made), "train"))
            code = 0
        os._exit(code)
    assert_same_pixels(expected, open_dataset(packed(made), "train"))
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert not list(cache_folder("packs").glob("*/.*"))


def test_another_pack_at_the_address_is_not_read_from_the_cache(made, own, tmp_path, monkeypatch):
    """Of the same names and sizes; first its index alone is there, as while it is copied."""
    data = packed(made, f"s3://{own}/pack")
    before = open_dataset(packed(made, made / "pack"), "train")
    assert_same_pixels(before, open_dataset(data, "train"))
    other = tmp_path / "other"
    shutil.copytree(made / "set", other / "set")
    for path in (other / "set/images/train").iterdir():
        shutil.copy(other / "set/images/val/0.png", path)
    config = write_config(other / "config.yaml", small(other / "set"))
    monkeypatch.setattr(writer, "SHARD_BYTES", 40_000)
    assert segtrain("data", "pack", config, "--output", other / "pack") == 0
    sizes = [[p.stat().st_size for p in sorted(root.glob("pack/0*"))] for root in (made, other)]
    assert sizes[0] == sizes[1]
    client().upload_file(str(other / "pack/pack.json"), own, "pack/pack.json")
    with pytest.raises(DataError, match=rf"s3://{own}/pack/0000\d.safetensors: not the shard that"):
        open_dataset(data, "train")
    upload(other, own, "pack")
    expected = open_dataset(packed(made, other / "pack"), "train")
    assert_same_pixels(expected, open_dataset(data, "train"))


def test_a_shard_that_is_cut_off_is_fetched_again_and_a_missing_one_is_named(made, own, fetched):
    data = packed(made, f"s3://{own}/pack")
    open_dataset(data, "val")
    (here,) = cache_folder("packs").glob("*/00005.safetensors")
    os.truncate(here, 99)
    expected = open_dataset(packed(made, made / "pack"), "val")
    assert_same_pixels(expected, open_dataset(data, "val"))
    assert fetched.count("00005.safetensors") == 2
    client().delete_object(Bucket=own, Key="pack/00000.safetensors")
    with pytest.raises(DataError, match=f"s3://{own}/pack/00000.safetensors: no such shard"):
        open_dataset(data, "train")


class Proxy:
    """Forwards connections to the S3 server, which may be cut, late, or end in the midst.

    drops: so many connections are cut at first. delay_s: each begins so late.
    stops_after: so many bytes come from the server, no more.
    """

    def __init__(self, target, drops=0, delay_s=0.0, stops_after=10**9):
        self.target, self.drops, self.delay_s = target, drops, delay_s
        self.left, self.has_stopped = stops_after, threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = self.socket.getsockname()
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
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(*ends, far), daemon=True).start()

    def _pump(self, source, sink, far):
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(4096):
                if source is far:
                    self.left -= len(data)
                    if self.left < 0:
                        self.has_stopped.set()
                        threading.Event().wait()
                sink.sendall(data)


def test_lost_and_slow_connections_are_tried_again(made, server, monkeypatch, tmp_path):
    proxy = Proxy(server, drops=2, delay_s=0.05)
    use(monkeypatch, proxy.address, tmp_path / "cache")
    found = open_dataset(packed(made), "val")
    assert proxy.drops == 0
    proxy.drops = 10**6
    # What was fetched is read without a connection.
    assert_same_pixels(open_dataset(packed(made, made / "pack"), "val"), found)
    kind, code, text = refusal(open_dataset, packed(made), "val")
    assert (kind, code) == ("ExecutionError", 6)
    assert text.startswith("s3://data/pack/pack.json: ")
    assert "tried 3 times; check the connection" in text
    assert "\n" not in text
    proxy.socket.close()


def test_a_silent_server_is_told(made, server, monkeypatch, tmp_path):
    proxy = Proxy(server, stops_after=0)
    monkeypatch.setattr(remote, "_SILENT_S", 0.3)
    use(monkeypatch, proxy.address, tmp_path / "cache")
    _, code, text = refusal(open_dataset, packed(made), "val")
    assert code == 6
    assert "imeout" in text
    proxy.socket.close()


def test_refusals_are_lines_with_their_exit_codes(made, monkeypatch):
    for pack, code, text in (
        ("s3://none-there/pack", 3, "data.pack: s3://none-there/pack: no finished pack there; m"),
        ("s3://data/set", 3, "data.pack: s3://data/set: no finished pack there; make one with"),
        ("foo://data/set", 2, "foo://data/set/pack.json: no library for this kind of address"),
        ("gs://data/set", 2, "gs://data/set/pack.json: Please install gcsfs to access Google St"),
    ):
        found = refusal(open_dataset, packed(made, pack), "train")
        assert (found[1], found[2][: len(text)]) == (code, text)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    found = refusal(open_dataset, packed(made), "train")
    assert found[1] == 2
    assert found[2].endswith("; in the checkout of segtrain: pip install '.[storage]'")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "CONFIG", *setting(root="s3://data/set")], "data.root: s3:// is not read: exp"),
        (["train", "CONFIG", *setting(classes="s3://data/set")], "data.classes: s3:// is not read"),
        (["train", "CONFIG", *setting(pack="https://me:hidden@host/set")], "host/set"),
        (["train", "CONFIG", *setting(pack="https://host/set?key=hidden")], "host/set"),
        (["train", "CONFIG", "--output", "https://me:hidden@host/run"], "host/run"),
        (["eval", "sftp://me:hidden@host/run"], "host/run"),
        (["predict", "runs/a", "x", "--output", "s3://me:hidden@host/run"], "host/run"),
    ],
)
def test_addresses_of_files_are_refused_and_those_with_a_password_without_it(
    made, lab, words, said
):
    words = [made / "config.yaml" if word == "CONFIG" else word for word in words]
    code, *shown = lab.command(*words)
    assert code == 2
    assert said in "".join(shown)
    assert "hidden" not in "".join(shown)


@pytest.fixture
def permit(server, monkeypatch):
    """Sets the credentials of somebody who may do this alone."""

    def check_after(num_requests):
        url = "http://{}:{}/moto-api/reset-auth".format(*server)
        headers = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, num_requests, headers)).read()

    def only(*actions):
        iam = client("iam")
        iam.create_user(UserName="somebody")
        key = iam.create_access_key(UserName="somebody")["AccessKey"]
        statement = {"Effect": "Allow", "Action": [*actions], "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName="somebody", PolicyName="p", PolicyDocument=policy)
        for name, value in (("ACCESS_KEY_ID", "AccessKeyId"), ("SECRET_ACCESS_KEY",) * 2):
            monkeypatch.setenv(f"AWS_{name}", key.get(value) or key["SecretAccessKey"])
        check_after(b"0")

    yield only
    check_after(b"1000000000")


def test_a_missing_permission_is_a_line_and_no_reason_to_give_up(made, permit, tmp_path, capfd):
    """Not exit code 2, after which schedulers do not start a job again."""
    permit("s3:GetObject", "s3:ListBucket")
    open_dataset(packed(made), "val")
    assert train(made / "config.yaml", "s3://data/runs/new") == 6
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("segtrain: s3://data/runs/new/train.log: access is refused (Permis")
    assert said.endswith("; renew the credentials, or ask for the permission")


class Expired(http.server.BaseHTTPRequestHandler):
    """What S3 answers when a session has ended; to HEAD without a word."""

    def do_GET(self):
        self.do_HEAD()
        text = "<Code>ExpiredToken</Code><Message>The provided token has expired.</Message>"
        self.wfile.write(f'<?xml version="1.0"?><Error>{text}</Error>'.encode())

    def do_HEAD(self):
        self.send_response(400)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(handler):
    """The address of a web server on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_address
        running.shutdown()


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--output", "s3://data/runs/a"], "s3://data/runs/a/checkpoints/manifest.json"),
        (["--output", "RUN", *setting(pack="s3://data/pack")], "s3://data/pack/pack.json"),
    ],
)
def test_expired_credentials_are_a_line(made, monkeypatch, tmp_path, capfd, words, place):
    words = [tmp_path / "run" if word == "RUN" else word for word in words]
    with served(Expired) as address:
        use(monkeypatch, address, tmp_path / "cache")
        assert segtrain("train", made / "config.yaml", "--nproc", 1, *words) == 6
    assert capfd.readouterr().err == (
        f"segtrain: {place}: access is refused (PermissionError: The provided token has expired.); "
        "renew the credentials, or ask for the permission\n"
    )


@pytest.fixture
def no_keys(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def shared_file(monkeypatch, tmp_path, no_keys):
    """Writes the shared credentials of AWS; the server takes those of the last call alone."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Server

    path, valid, answer = tmp_path / "credentials", [], Server.__call__

    def guarded(self, environ, start):
        if f"Credential={valid[-1]}/" in environ.get("HTTP_AUTHORIZATION", ""):
            return answer(self, environ, start)
        start("400 Bad Request", [("Content-Length", "0")])
        return []

    def write(key):
        valid.append(key)
        path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setattr(Server, "__call__", guarded)
    write("key")
    return path, write


def test_credentials_that_are_renewed_in_the_shared_file_are_taken(own, shared_file, tmp_path):
    path, write = shared_file
    store = Store(f"s3://{own}/pack")
    index = store.read("pack.json")
    (tmp_path / "file").write_bytes(index)
    write("renewed")
    store.put(tmp_path / "file", "other.json")
    write("renewed again")
    assert store.read("other.json") == index
    write("missing")
    path.write_text(path.read_text().replace("missing", "expired"))
    with pytest.raises(ExecutionError, match=r"access is refused \(OSError.*; renew the credentia"):
        store.read("pack.json")


@pytest.mark.usefixtures("no_keys")
def test_a_lost_program_for_credentials_is_no_lost_object(made, monkeypatch, tmp_path, capfd):
    """Not "no such bucket" and exit code 2, after which schedulers do not start a job again."""
    (tmp_path / "aws").write_text("[default]\ncredential_process = /none/renew\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    assert train(made / "config.yaml", "s3://data/runs/new") == 6
    assert "access is refused (FileNotFoundError: [Errno 2] No such file" in capfd.readouterr().err


@pytest.mark.usefixtures("no_keys")
def test_no_credentials_are_a_line(made, monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    _, code, text = refusal(open_dataset, packed(made), "train")
    assert code == 6
    assert "access is refused (NoCredentialsError: Unable to locate credentials)" in text


def test_a_web_server_serves_packs_and_refuses(made):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/private"):
                self.send_error(403)
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    with served(partial(Quiet, directory=made)) as address:
        url = f"http://127.0.0.1:{address[1]}"
        expected = open_dataset(packed(made, made / "pack"), "train")
        assert_same_pixels(expected, open_dataset(packed(made, f"{url}/pack"), "train"))
        _, code, text = refusal(open_dataset, packed(made, f"{url}/private"), "train")
        assert code == 6
        said = f"{url}/private/pack.json: access is refused (ClientResponseError: 403"
        assert text.startswith(said)


def test_names_that_lead_out_of_the_folder_are_left_out(own):
    for key in ("bad/a/../../../x", "bad/../y", "bad//z", "bad/fine.txt", "bad/folder/"):
        client().put_object(Bucket=own, Key=key, Body=b"text")
    assert Store(f"s3://{own}/bad").find() == ["fine.txt"]


def keys(name):
    return {one["Key"] for one in client().list_objects_v2(Bucket=name).get("Contents", [])}


def test_a_killed_run_ends_with_the_same_bits_on_another_machine(
    made, on_disk, own, server, tmp_path, monkeypatch
):
    url = f"s3://{own}/runs/a"
    command = Command(tmp_path, "train", made / "config.yaml", "--nproc", "1", "--output", url)
    listed = "runs/a/checkpoints/manifest.json"
    command.wait_for_step(cached_run(url), 2)  # asking the server all the time takes its time
    command.wait_until(lambda: listed in keys(own) and "runs/a/checkpoints/last.pt" in keys(own))
    command.kill()
    end_all()
    use(monkeypatch, server, tmp_path / "b")
    assert resume(url) == 0
    assert bits(last(cached_run(url))) == on_disk
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path / "c"))
    left = cached_run(url) / "checkpoints/.last.pt.7.tmp"  # of a process that was killed
    left.parent.mkdir(parents=True)
    left.touch()
    assert bits(last(run_folder(url))) == on_disk
    assert not left.exists()
    written = tmp_path / "b/runs" / cached_run(url).name
    for name in ("config.yaml", "metrics.jsonl", "train.log", "environment.json"):
        assert (cached_run(url) / name).read_bytes() == (written / name).read_bytes()
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path / "d"))
    assert segtrain("eval", url, "--nproc", 1) == 0
    assert [path.name for path in (cached_run(url) / "checkpoints").glob("*.pt")] == ["best.pt"]
    assert segtrain("predict", url, made / "set/images/val", "--output", tmp_path / "p") == 0
    assert segtrain("report", url) == 0


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
    assert train(made / "config.yaml", url, "--set", "train.steps=2") == 0
    assert steps == sorted(steps)
    assert {*steps} == {1, 2}
    assert seen[-1] == "checkpoints/manifest.json"
    first = seen.index("checkpoints/last.pt")
    assert {"config.yaml", "metrics.jsonl"} <= set(seen[:first])
    assert not any("previous" in name for name in keys(own))


def test_a_second_run_is_refused_and_a_newer_manifest_is_not_replaced(
    made, own, tmp_path, monkeypatch, capfd
):
    url = f"s3://{own}/runs/a"
    assert train(made / "config.yaml", url, "--until", "2") == 0
    again = f"segtrain train {url} --resume\n"
    assert f"to train on: {again}" in capfd.readouterr().out
    assert segtrain("runs", cached_run(url)) == 0
    assert f"stopped: {again}" in capfd.readouterr().out
    assert segtrain("train", url) == 2
    assert f"to go on with the run: {again}" in capfd.readouterr().err
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
    assert resume(url) == 6
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
    here = cached_run(url)
    assert f"it is whole in {here}; to put it: segtrain train {here} --resume" in said.err
    assert bits(last(here)) == on_disk
    fails[0] = False
    assert resume(here) == 0
    monkeypatch.setenv("SEGTRAIN_CACHE", str(here.parent / "fresh"))
    assert bits(last(run_folder(url))) == on_disk


def test_no_bucket_for_the_output_is_told_before_training(made, capfd):
    assert train(made / "config.yaml", "s3://none-there/runs/a") == 2
    assert capfd.readouterr().err.endswith("segtrain: s3://none-there/runs/a: no such bucket\n")
    assert segtrain("train", "s3://data/runs/a", "--resume") == 2
    assert capfd.readouterr().err == "segtrain: s3://data/runs/a: no run is there\n"


def test_ranks_that_are_stopped_put_what_they_have_saved(made, own, tmp_path, monkeypatch):
    url = f"s3://{own}/runs/a"
    words = ["--nproc", "2", "--output", url, "--set", "train.steps=5000"]
    words += ["--set", "checkpoint.every_steps=2"]
    command = Command(tmp_path, "train", made / "config.yaml", *words)
    command.wait_for_step(cached_run(url), 2)
    command.wait_until(lambda: "runs/a/checkpoints/last.pt" in keys(own))
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.wait() == 143
    here = last(cached_run(url))
    monkeypatch.setenv("SEGTRAIN_CACHE", str(tmp_path / "b"))
    assert last(run_folder(url)).step == here.step
    assert bits(last(run_folder(url))) == bits(here)
    assert not list((tmp_path / "cache").rglob(".outbox/*"))
