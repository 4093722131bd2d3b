"""The rendezvous: the key that machines share, and states refused before they are unpickled."""

import os
import pickle
import socket
import stat
from pathlib import Path

import pytest
from attacker import listening
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from segtrain.distributed.rendezvous import (
    SignedBackend,
    is_loopback,
    listening_store,
    shared_secret,
)
from segtrain.errors import ConfigError, ExecutionError


def backends(*secrets, run_ids=("run", "run")):
    store = HashStore()
    plain = C10dRendezvousBackend(store, "run")
    pairs = zip(secrets, run_ids, strict=False)
    return plain, *(SignedBackend(plain, secret, run_id) for secret, run_id in pairs)


def test_a_signed_state_is_read_with_the_same_key():
    _, first, second = backends(b"k" * 32, b"k" * 32)
    assert first.get_state() is None
    state, token, has_set = first.set_state(b"first")
    assert (state, has_set) == (b"first", True)
    assert second.get_state() == (b"first", token)
    assert second.set_state(b"second", token)[0::2] == (b"second", True)
    assert first.set_state(b"too late", token)[0::2] == (b"second", False)


REFUSED = "not written with the key of this run"


@pytest.mark.parametrize("forged", [pickle.dumps(print), b"", b"\0" * 200])
def test_a_state_without_the_digest_is_refused(forged):
    plain, signed = backends(b"k" * 32)
    plain.set_state(forged)
    for use in (signed.get_state, lambda: signed.set_state(b"mine")):
        with pytest.raises(RendezvousStateError, match=REFUSED):
            use()


@pytest.mark.parametrize(("secret", "run_id"), [(b"b" * 32, "run"), (b"a" * 32, "another")])
def test_another_key_or_another_run_does_not_fit(secret, run_id):
    _, first, second = backends(b"a" * 32, secret, run_ids=("run", run_id))
    first.set_state(b"state")
    with pytest.raises(RendezvousStateError, match=REFUSED):
        second.get_state()


def test_the_first_machine_writes_a_key_for_its_user_alone(tmp_path):
    old = os.umask(0)
    try:
        secret = shared_secret(tmp_path / "run" / ".secret")
    finally:
        os.umask(old)
    assert len(secret) == 32
    assert shared_secret(tmp_path / "run" / ".secret") == secret
    assert stat.S_IMODE((tmp_path / "run" / ".secret").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".secret"]
    assert shared_secret(tmp_path / "another" / ".secret") != secret


def other_user(path):
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user takes root")
    shared_secret(path)
    os.chown(path, 65534, 65534)


def link(path):
    shared_secret(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: (shared_secret(path), path.chmod(0o640)),
        other_user,
        link,
        Path.mkdir,
        lambda path: os.mkfifo(path, 0o600),
        lambda path: path.write_bytes(b"short"),
    ],
    ids=["mode", "user", "link", "folder", "pipe", "short"],
)
def test_a_key_that_others_could_have_written_or_read_is_refused_without_waiting(tmp_path, make):
    path = tmp_path / ".secret"
    make(path)
    said = r"only this user may read \(mode 600\)|key that the machines share: (is a|too many)"
    with pytest.raises((ConfigError, ExecutionError), match=said):
        shared_secret(path)


def test_a_store_listens_at_the_address_asked_for_only():
    before = listening(os.getpid())
    store, exposed = listening_store("127.0.0.1", 0)
    assert not exposed
    assert listening(os.getpid()) - before == {("127.0.0.1", store.port)}
    TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        listening_store("127.0.0.1", store.port)


def test_a_name_that_leads_back_listens_where_others_can_come(monkeypatch):
    """As the name of a Debian machine, which its own /etc/hosts maps to 127.0.1.1."""
    known = socket.getaddrinfo

    def getaddrinfo(host, *args, **kwargs):
        return known("127.0.0.1" if host == "node0" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(
        "segtrain.distributed.rendezvous.TCPStore", lambda *args, **options: options
    )
    options, exposed = listening_store("node0", 0)
    with socket.socket(fileno=options["master_listen_fd"]) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert exposed
    assert not is_loopback("node0")
    assert is_loopback("127.0.0.2")
    assert is_loopback("localhost")
