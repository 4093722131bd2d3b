"""tools/bench_growth.py runs on small sizes and prints a row for each."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tools/bench_growth.py"


def rows(*arguments):
    """The numbers that it prints below the heading."""
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.strip().splitlines()
    return [[float(word.replace(",", "")) for word in line.split()] for line in lines]


def test_lists_of_every_length_are_opened():
    found = rows("list", "--pairs", 10, 3000)
    assert [row[0] for row in found] == [10, 3000]
    assert all(seconds > 0 and mib >= 0 for _, seconds, mib in found)


def test_memory_of_a_run_is_read_at_several_steps():
    found = rows("steps", "--steps", 20)
    assert len(found) >= 2
    assert found[-1][0] <= 20
    assert all(0 < rank <= everything + 1 for _, rank, everything in found)
