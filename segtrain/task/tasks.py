"""The tasks by their names in a config."""

from segtrain import plugins
from segtrain.task.contract import Task
from segtrain.task.multilabel_task import Multilabel
from segtrain.task.semantic_task import Semantic
from segtrain.types import Choices

TASKS: Choices[type[Task]] = Choices({task.name: task for task in (Semantic, Multilabel)})
"""`task`: what each name stands for."""


def task_of(name: str) -> Task:
    """The task of this name, one of segtrain's own or of a plugin."""
    return plugins.choose("task", name, TASKS)()
