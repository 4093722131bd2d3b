"""The rendezvous: machines that meet by files, and who else may write these."""

import os
import pickle
import threading
from pathlib import Path

import pytest
from attacker import listening
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from segtrain.distributed import machine, rendezvous
from segtrain.distributed.rendezvous import SharedFolder, listening_store
from segtrain.errors import ConfigError, ExecutionError


def test_of_several_writers_only_who_has_seen_the_last_state_replaces_it(tmp_path):
    first, second = SharedFolder(tmp_path / "run" / "m"), SharedFolder(tmp_path / "run" / "m")
    assert first.get_state() is None
    state, token, has_set = first.set_state(b"first")
    assert (state, has_set) == (b"first", True)
    assert second.get_state() == (b"first", token)
    assert second.set_state(b"second", token)[0::2] == (b"second", True)
    assert first.set_state(b"too late", token)[0::2] == (b"second", False)
    assert first.set_state(b"as if there were none")[0::2] == (b"second", False)


def test_no_change_is_lost_where_many_write_at_once(tmp_path):
    SharedFolder(tmp_path / "m").set_state(b"0")

    def count():
        folder, done = SharedFolder(tmp_path / "m"), 0
        while done < 20:
            state, token = folder.get_state()
            done += folder.set_state(str(int(state) + 1).encode(), token)[2]

    threads = [threading.Thread(target=count) for _ in range(6)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert SharedFolder(tmp_path / "m").get_state()[0] == b"120"


def test_a_closed_rendezvous_opens_with_another_round_and_an_open_one_stays(tmp_path):
    folder, state = SharedFolder(tmp_path / "m"), _RendezvousState()
    state.round = 7
    folder.set_state(pickle.dumps(state))
    folder.open_anew()
    assert pickle.loads(folder.get_state()[0]).round == 7
    state.closed = True
    folder.set_state(pickle.dumps(state), folder.get_state()[1])
    folder.open_anew()
    found = pickle.loads(folder.get_state()[0])
    assert (found.closed, found.round) == (False, 8)


def test_the_stores_of_earlier_rounds_go_and_those_without_a_state_too(tmp_path):
    folder = SharedFolder(tmp_path / "m")
    folder.store(2).set("address", "of the dead")
    folder.store(10).set("address", "here")
    assert [path.name for path in (tmp_path / "m").glob("round*")] == ["round10"]
    assert SharedFolder(tmp_path / "m").store(10).get("address") == b"here"
    folder.open_anew()
    assert list((tmp_path / "m").glob("round*")) == []


def of_another_user(path):
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user takes root")
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)


def link(path):
    path.with_name("other").mkdir(mode=0o700)
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    "make",
    [lambda path: (path.mkdir(), path.chmod(0o720)), of_another_user, link, Path.touch],
    ids=["mode", "user", "link", "file"],
)
def test_a_folder_into_which_others_could_write_a_pickle_is_refused(tmp_path, make):
    make(tmp_path / "m")
    with pytest.raises(ConfigError, match="nobody else may write"):
        SharedFolder(tmp_path / "m")


def test_only_this_user_may_enter_the_folder(tmp_path):
    old = os.umask(0)
    try:
        SharedFolder(tmp_path / "m")
    finally:
        os.umask(old)
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_or_goes_away_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ExecutionError, match="machines cannot meet there"):
        SharedFolder(tmp_path / "file" / "m")
    folder = SharedFolder(tmp_path / "m")
    (tmp_path / "m").rmdir()
    monkeypatch.setattr(rendezvous, "_PATIENCE_S", 0.1)
    with pytest.raises(RendezvousConnectionError, match="m: No such file"):
        folder.get_state()


def test_a_store_listens_at_the_address_asked_for_only():
    before = listening(os.getpid())
    store = listening_store("127.0.0.1")
    assert listening(os.getpid()) - before == {("127.0.0.1", store.port)}
    TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    ("known", "way", "named", "address"),
    [
        ({"eth0": "10.0.0.7", "ib0": "10.1.0.7"}, "10.0.0.7", None, "10.0.0.7"),
        ({"eth0": "10.0.0.7", "ib0": "10.1.0.7"}, "10.0.0.7", "ib0", "10.1.0.7"),
        ({"eth0": "10.0.0.7"}, None, None, "10.0.0.7"),  # a network without a way out of it
        ({"eth0": "10.0.0.7", "ib0": "10.1.0.7"}, None, None, None),
        ({"eth0": "10.0.0.7"}, "10.0.0.7", "eth7", None),
        ({}, None, None, None),
    ],
)
def test_the_address_for_other_machines_is_known_or_not(monkeypatch, known, way, named, address):
    monkeypatch.setattr(machine, "addresses", lambda: {"lo": "127.0.0.1"} | known)
    monkeypatch.setattr(machine, "address_toward", lambda *_: way)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if named:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    assert machine.own_address() == address
