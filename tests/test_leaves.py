"""A feature is a leaf: without its files the rest still imports, and its command says that it is
not there. What a leaf is used by is a leaf that goes with it."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experiments import small, write_config, write_data

import segtrain
from segtrain.checkpoint.format import load

HOME = Path(segtrain.__file__).parent
# Each with the leaves that stand on it.
LEAVES = {
    "desk": (["desk"], []),
    "annotations": (
        ["desk.annotations", "desk.commands.polygons", "desk.commands.import_data"],
        ["survey"],
    ),
    "survey": (["desk.survey", "desk.commands.init"], ["slices"]),
    "slices": (["desk.volumes", "desk.commands.import_data"], []),
    "convert": (["desk.convert", "desk.commands.convert"], []),
    "synthetic": (["desk.synthetic"], []),
    "export": (["export", "commands.export"], ["convert"]),
    "results": (
        [
            "desk.results",
            *(f"desk.commands.{name}" for name in ("compare", "report", "runs", "watch")),
            *(f"desk.commands.{name}" for name in ("verify", "suspects", "score")),
        ],
        ["folds", "population"],
    ),
    "folds": (["desk.commands.folds", "desk.commands.seeds"], ["population"]),
    "population": (["desk.commands.population"], []),
    "bench": (["desk.commands.bench"], []),
    "doctor": (["desk.commands.doctor"], []),
    "finish": (["desk.commands.finish"], []),
    "fit": (["desk.commands.fit"], []),
    "rasters": (["predict.raster_inputs"], []),
    "videos": (["predict.video_inputs", "predict.video"], []),
    "volumes": (["predict.volume_inputs"], []),
    "hogwild": (["training.ways.hogwild_way"], []),
    "server": (["training.ways.server_way"], []),
}


def modules():
    """Each module by its name without `segtrain.`."""
    found = {}
    for path in HOME.rglob("*.py"):
        *folders, name = path.relative_to(HOME).with_suffix("").parts
        found[".".join(folders if name == "__init__" else [*folders, name])] = path
    return found


def imported(path, known):
    """The modules that a file imports when it is imported itself."""
    left, found = [ast.parse(path.read_text())], set()
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("segtrain."):
            module = node.module.removeprefix("segtrain").removeprefix(".")
            names = (f"{module}.{alias.name}".removeprefix(".") for alias in node.names)
            found |= {name if name in known else module for name in names}
        left += ast.iter_child_nodes(node)
    return found


def inside(name, leaf):
    return any(f"{name}.".startswith(f"{part}.") for part in LEAVES[leaf][0])


def gone_with(leaf):
    """The leaf, and those that stand on it."""
    return {leaf}.union(*map(gone_with, LEAVES[leaf][1]))


@pytest.fixture(scope="module")
def imports():
    """What each module imports."""
    known = modules()
    return {name: imported(path, known) for name, path in known.items()}


def test_each_part_of_a_leaf_is_there(imports):
    assert {name for parts, _ in LEAVES.values() for name in parts} <= imports.keys()


@pytest.mark.parametrize("leaf", LEAVES)
def test_nothing_that_stays_imports_a_leaf(imports, leaf):
    gone = gone_with(leaf)
    assert all(any(inside(name, one) for name in imports) for one in gone)
    stays = {name for name in imports if not any(inside(name, one) for one in gone)}
    users = {(name, x) for name in stays for x in imports[name] if inside(x, leaf)}
    assert not users


# What is imported with the command or the step, before anything is chosen; thousands of lines.
MOST_LINES = {"training.step": 10, "trainer.loop": 29, "predict": 20.6}


@pytest.mark.parametrize("start", MOST_LINES)
def test_what_is_not_chosen_is_not_imported(imports, start):
    files, reached, left = modules(), set(), [start]
    while left:
        name = left.pop()
        if name in reached:
            continue
        reached.add(name)
        # Python runs the packages around a module, too.
        left += [*imports[name], *([name.rpartition(".")[0]] if "." in name else [])]
    lines = sum(len(files[name].read_text().splitlines()) for name in reached)
    assert lines <= 1000 * MOST_LINES[start], lines


IMPORT_ALL = """
import importlib, pathlib, sys
from segtrain import cli
home = pathlib.Path(cli.__file__).parent.parent
for path in sorted(home.rglob("*.py")):
    parts = path.relative_to(home.parent).with_suffix("").parts
    if parts[-1] != "__main__":
        importlib.import_module(".".join(part for part in parts if part != "__init__"))
for command in sys.argv[1:]:
    print(cli.main(command.split("+")))
"""


@pytest.mark.slow("desk", "commands", "trainer", "cli")
def test_without_any_leaf_the_rest_trains_to_the_same_bits(tmp_path):
    """And their commands say that they are not there."""
    home = shutil.copytree(
        HOME, tmp_path / "segtrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in {name for own, _ in LEAVES.values() for name in own}:
        path = home.joinpath(*name.split("."))
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink(missing_ok=True)
    write_data(tmp_path)
    config = write_config(
        tmp_path / "config.yaml", small(tmp_path, train={"steps": 2}, log={"charts": True})
    )
    gone = "doctor", "init+photos", "compare+a+b", "convert+a+--output+b"
    run = f"train+{config}+--nproc+1+--output+", "eval+"
    for folder, there, *words in (tmp_path, "", *gone, *run), (HOME.parent, "whole", *run):
        words = [f"{word}{tmp_path}/run{there}" if word.endswith("+") else word for word in words]
        done = subprocess.run(
            [sys.executable, "-P", "-c", IMPORT_ALL, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
        codes = [line for line in done.stdout.splitlines() if line.isdigit()]
        assert codes == ["2"] * (len(words) - 2) + ["0"] * 2, done.stderr
        said = done.stdout + done.stderr
        if there:
            assert "no report" not in said
            continue
        assert "warning: no report: segtrain.desk is not installed" in said
        assert said.count("this needs segtrain.desk, which is not installed") == len(gone)
    ours, whole = (
        load(tmp_path / run / "checkpoints/last.pt").model for run in ("run", "runwhole")
    )
    assert ours.keys() == whole.keys()
    assert all(torch.equal(ours[name], whole[name]) for name in whole)
