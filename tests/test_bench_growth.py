"""tools/bench_growth.py runs on small sizes and prints a row for each."""

import sys

import bench_growth
import pytest
import torch


@pytest.fixture
def rows(monkeypatch, capsys, run_ranks):
    """rows(*arguments): the numbers that the tool prints below the heading."""

    def on_ranks(number, device, function, *args, group=True):
        return run_ranks(number, function, torch.device(device), *args)[0]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_growth.py", *map(str, arguments)])
        assert bench_growth.main() == 0
        _, *lines = capsys.readouterr().out.strip().splitlines()
        return [[float(word.replace(",", "")) for word in line.split()] for line in lines]

    monkeypatch.setattr(bench_growth, "on_ranks", on_ranks)
    return run


def test_lists_of_every_length_are_opened(rows):
    found = rows("list", "--pairs", 10, 3000)
    assert [row[0] for row in found] == [10, 3000]
    assert all(seconds > 0 and mib >= 0 for _, seconds, mib in found)
