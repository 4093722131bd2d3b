"""Every example in a docstring of the package shows what really comes out."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import segtrain

HOME = Path(segtrain.__file__).parent
PROMPT = ">>>"
# Where a reader would otherwise have to run the code in his head.
ROOMS = {
    *("data", "desk", "distributed", "inference", "norm", "training"),
    *("metrics", "text"),
}
LEAST = 20


def module_name(file):
    return ".".join(file.relative_to(HOME.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(file): text
    for file in sorted(HOME.rglob("*.py"))
    if PROMPT in (text := file.read_text(encoding="utf-8"))
}


def prompts(text):
    """How many lines of docstrings begin with the prompt, one for each example."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    lines = [line for node in nodes for line in (ast.get_docstring(node) or "").splitlines()]
    return sum(line.lstrip().startswith(PROMPT) for line in lines)


@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_comes_out(name):
    said, runner = [], doctest.DocTestRunner()
    for found in doctest.DocTestFinder().find(importlib.import_module(name), name):
        runner.run(found, out=said.append)
    assert not runner.failures, "".join(said)
    # doctest overlooks a nested function, whose example would prove nothing.
    assert runner.tries == prompts(MODULES[name]) > 0


def test_the_rooms_that_are_hard_to_read_have_examples():
    assert {name.split(".")[1] for name in MODULES} >= ROOMS
    assert len(MODULES) >= LEAST
