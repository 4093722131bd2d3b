"""What a network tells of a pixel: its class, or each class by itself, or what a plugin adds.

A task is asked wherever tasks differ, from a label in a batch to a picture on disk (`Task`).
"""

from segtrain import plugins
from segtrain.task.contract import Task
from segtrain.task.multilabel_task import Multilabel
from segtrain.task.semantic_task import Semantic
from segtrain.types import Choices

__all__ = ["TASKS", "Task", "task_of"]

TASKS: Choices[type[Task]] = Choices({task.name: task for task in (Semantic, Multilabel)})
"""`task`: what each name stands for."""


def task_of(name: str) -> Task:
    """The task of this name, one of segtrain's own or of a plugin."""
    return plugins.choose("task", name, TASKS)()
