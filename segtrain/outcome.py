"""How the ranks ended, told to the launcher that started them.

Exit codes alone do not tell a cause from its consequences: when one rank fails, the others lose
their connections to it and fail too, often before it has ended. So every rank leaves a note in a
directory of the launcher's, one for each attempt to run.
"""

import json
import os
import stat
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Names the launcher's directory, in the environment of the ranks that it starts.
VARIABLE = "SEGTRAIN_OUTCOMES"

# Set where all ranks of the run are on this machine.
ONE_MACHINE = "SEGTRAIN_ONE_MACHINE"


class Outcome(NamedTuple):
    """The end of one rank.

    code: its exit code; None if it began to train and has left no other note.
    consequence: it failed because another rank did.
    time: seconds since the epoch.
    """

    rank: int
    code: int | None
    consequence: bool
    time: float


def is_wanted() -> bool:
    """Whether this process is a rank that segtrain's own launcher started."""
    return VARIABLE in os.environ and "RANK" in os.environ


def meeting_file() -> Path | None:
    """The file through which the ranks of this attempt meet, if all of them are on this machine.

    Raises:
        OSError: its directory cannot be made.
    """
    return directory() / "store" if is_wanted() and ONE_MACHINE in os.environ else None


def directory() -> Path:
    """Where the ranks of this attempt leave their notes; made if need be.

    Raises:
        OSError: it cannot be, or the launcher's directory is gone.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = Path(os.environ[VARIABLE]) / attempt
    # Without its parents: what lies in the temporary folder under the name of a directory that was
    # removed could be anybody's. Its launcher makes it again.
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def keep_root(root: Path) -> bool:
    """Makes the launcher's directory again where it was removed, as by a cleaner of /tmp.

    Returns:
        whether it is there, and this user's alone.
    """
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    )


def tell(code: int | None, *, consequence: bool = False) -> None:
    """Leaves the note of this rank, in the place of an earlier one."""
    rank = int(os.environ["RANK"])
    note = Outcome(rank, code, consequence, time.time())
    try:
        path = directory() / f"{rank}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(note))
        temporary.replace(path)
    except OSError:
        pass  # the launcher is gone, or its disk full: then it goes by the exit code


def is_first_to_say(text: str) -> bool:
    """Whether no other rank of this machine has said `text`: a mistake is shown once."""
    try:
        (directory() / f"{zlib.crc32(text.encode()):08x}.said").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # better twice than never
    return True


def last_attempt(root: Path) -> Path:
    """Where the ranks of the last attempt leave their notes; it need not be there yet."""
    try:
        attempts = [path for path in root.iterdir() if path.name.isdigit()]
    except OSError:  # it was removed
        attempts = []
    return max(attempts, key=lambda path: int(path.name), default=root / "0")


def read(root: Path) -> list[Outcome]:
    """The notes of the last attempt, in the order of time."""
    notes = []
    for path in last_attempt(root).glob("*.json"):
        with suppress(FileNotFoundError):  # removed in this moment
            notes.append(Outcome(*json.loads(path.read_text())))
    return sorted(notes, key=lambda note: note.time)
