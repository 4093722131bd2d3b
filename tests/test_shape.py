"""The centre stays short: what lies between the command and `backward()` in a real step.

Features add a call, a generator and a global at a time, and nobody sees it.
"""

import ast
import inspect
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from experiments import small, write_config, write_data

import segtrain
from segtrain import cli
from segtrain.data.sample.loader import TrainLoader
from segtrain.training.step import TrainStep

HOME = Path(segtrain.__file__).parent
MOST_FRAMES = 7
# Around a step: the loss of the newest step waits in an object, not in a module.
AMBIENT = {("segtrain.distributed.passes", "_current")}


def own_frames():
    """The frames of segtrain on the stack, the outermost first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(HOME):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


def module_state():
    """What the names of all modules stand for, and how much containers hold."""
    return {
        (module, name): (id(value), len(value) if isinstance(value, list | dict | set) else 0)
        for module, loaded in list(sys.modules.items())
        if module.split(".")[0] == "segtrain"
        for name, value in vars(loaded).items()
        if not isinstance(value, ModuleType) and not name.startswith("__")
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Of a run of some steps: the frames of `backward`, those of a batch, what modules changed."""
    root = tmp_path_factory.mktemp("shape")
    write_data(root)
    options = small(root, train={"steps": 3, "accumulate_steps": 2}, eval={"every_steps": 2})
    config = write_config(root / "config.yaml", options)
    patch, found = pytest.MonkeyPatch(), {"backward": [], "batch": [], "changed": set()}
    backward, take, step, before = (
        torch.Tensor.backward,
        TrainLoader.__next__,
        TrainStep.__call__,
        {},
    )

    def watched_backward(self, *args, **kwargs):
        found["backward"].append([(f.f_code.co_filename, f.f_code.co_name) for f in own_frames()])
        now = module_state()
        found["changed"] |= {key for key, value in before.items() if now.get(key) != value}
        return backward(self, *args, **kwargs)

    def watched_take(self):
        generators = [f for f in own_frames() if f.f_code.co_flags & inspect.CO_GENERATOR]
        found["batch"].append([f.f_code.co_name for f in generators])
        return take(self)

    def watched_step(self, local):
        before.clear(), before.update(module_state())
        return step(self, local)

    patch.setattr(torch.Tensor, "backward", watched_backward)
    patch.setattr(TrainLoader, "__next__", watched_take)
    patch.setattr(TrainStep, "__call__", watched_step)
    try:
        arguments = ["train", str(config), "--nproc", "1", "--output", str(root / "run")]
        assert cli.main(arguments) == 0
    finally:
        patch.undo()
    return found


def test_from_the_command_to_backward_are_seven_calls_as_the_readme_lists_them(seen):
    assert len(seen["backward"]) == 6
    for frames in seen["backward"]:
        # The test's own frame stands for the step that it watches.
        assert len(frames) <= MOST_FRAMES, frames
    way = [(str(Path(file).relative_to(HOME)), name) for file, name in seen["backward"][0]]
    text = (HOME / "README.md").read_text().partition("The way of one step")[2].split("```")[1]
    rows, file = [], ""
    for line in text.strip().splitlines():
        words = re.match(r"(\S*)\s+(\S+)", line).groups()
        file = words[0] or file
        rows.append((file, words[1].replace("TrainStep", "__call__")))
    assert rows == way


def test_one_generator_is_around_a_batch(seen):
    assert len(seen["batch"]) == 6
    assert all(names == ["batches"] for names in seen["batch"])


def test_no_module_changes_around_a_microbatch_but_for_the_pass(seen):
    assert seen["changed"] == AMBIENT


def table_below(heading):
    """The rows of the first table after `heading` in segtrain/README.md, as lists of cells."""
    text = (HOME / "README.md").read_text()
    lines = text[text.index(heading) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_readme_walks_a_batch_by_names_that_exist():
    rows = table_below("One batch on its way")
    files = [file.strip("`") for _, file, *_ in rows]
    assert len(set(files)) == len(files) == 8
    for file, (_, _, name, _) in zip(files, rows, strict=True):
        defined = rf"^ *(class|def) {name.strip('`')}\b"
        assert re.search(defined, (HOME / file).read_text(), re.M), name


def test_the_readme_says_where_additions_go_by_names_that_exist():
    rows = table_below("## Where do I add")
    assert len(rows) == 14
    tables = []
    for _, where, commit in rows:
        places = re.findall(r"`([^`]+)`", where)
        tables += [place for place in places if place.isupper()]
        files = [place for place in places if "/" in place]
        assert files
        assert [file for file in files if not (HOME / file).exists()] == []
        assert re.fullmatch(r"[0-9a-f]{7}", commit)
    source = "".join(path.read_text() for path in HOME.rglob("*.py"))
    assert [name for name in tables if not re.search(rf"^{name}\b.* = ", source, re.M)] == []


def test_a_class_and_a_file_have_names_of_their_own():
    """Two of the same name are two ideas under one word; the library's Predictor hides one.

    But for commands, which are called as what they are about.
    """
    found = Counter(
        name
        for path in HOME.rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(), re.M)
    )
    assert {name for name, count in found.items() if count > 1} <= {"Predictor"}
    files = [path for path in HOME.rglob("*.py") if path.name != "__init__.py"]
    found = Counter(path.name for path in files if path.parent.name != "commands")
    assert [name for name, count in found.items() if count > 1] == []


# Which task, and which way to take steps. `overlapping` is a word of class files.
_ASKS = re.compile(
    r"is_multilabel|has_own_task|is_asynchronous|\b(task|parallel|label_format) (==|!=|in|not in) "
)
_OF_CLASS_FILES = re.compile(r"\boverlapping\b(?!\()")


def conditions(path):
    """The conditions of a file, as they are written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield ast.unparse(node.test)
        elif isinstance(node, ast.comprehension):
            yield from map(ast.unparse, node.ifs)


def asking(pattern, *without):
    """How often files ask what the pattern says, but for those in some folders."""
    found = Counter()
    for path in HOME.rglob("*.py"):
        file = path.relative_to(HOME).as_posix()
        if not file.startswith(without):
            found[file] += sum(map(bool, map(pattern.search, conditions(path))))
    return {file: number for file, number in found.items() if number}


def test_which_task_and_which_way_is_asked_in_their_own_rooms():
    """The survey writes configs, so it may."""
    assert asking(_ASKS, "config/", "task/", "training/ways/", "desk/survey/") == {
        "checkpoint/trained.py": 1,  # whether two models have one
        "desk/commands/bench.py": 1,  # measures steps that all ranks take together
        "desk/commands/fit.py": 1,  # as well
        "distributed/layout.py": 2,  # what a batch of parts by themselves needs
        "training/rank_passes.py": 1,  # whether gradients are added up
    }
    rooms = "desk/survey/", "data/read/classes.py", "data/check/"
    assert asking(_OF_CLASS_FILES, "config/", "task/", *rooms) == {}


def test_shares_are_asked_for_once_in_the_step():
    """`passes_of`; the others are about what a run promises."""
    found = asking(re.compile(r"\bshares\b"), "config/", "desk/")
    assert found == {
        "training/state.py": 1,
        "distributed/layout.py": 2,  # who computes which image
        "trainer/preflight.py": 1,  # idle ranks
        "run/directory.py": 1,  # changes that leave the bits
    }
