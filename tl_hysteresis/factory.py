"""From a study's settings to its task: one of the package's, or one of your own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter

from tl_hysteresis.config import CustomTaskConfig, TaskConfig
from tl_hysteresis.errors import HysteresisError
from tl_hysteresis.sentences import SentenceRecall
from tl_hysteresis.tasks import AssociativeRecall, Task

TASKS: dict[str, Callable[..., Task]] = {
    "associative_recall": AssociativeRecall,
    "sentence_recall": SentenceRecall,
}
TASK_MEMBERS = ("d_vocab", "n_ctx", "role_names", "corruptions", "sample", "corrupt")


def make_task(settings: TaskConfig) -> Task:
    """The task that the settings describe.

    Raises:
        HysteresisError: a factory that cannot be imported or called, or that makes no `Task`.

    Example:
        >>> from tl_hysteresis import AssociativeRecallConfig
        >>> make_task(AssociativeRecallConfig(n_pairs=4)).n_ctx
        9
    """
    if not isinstance(settings, CustomTaskConfig):
        return TASKS[settings.name](**settings.model_dump(exclude={"name"}))
    module, _, name = settings.factory.partition(":")
    try:
        made = attrgetter(name)(import_module(module))(**settings.parameters)
    except Exception as error:  # whatever a user's code may raise
        raise HysteresisError(
            f"task.factory = {settings.factory!r} made no task: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Task):
        missing = [name for name in TASK_MEMBERS if not hasattr(made, name)]
        raise HysteresisError(
            f"task.factory = {settings.factory!r} made {type(made).__name__}, which is no task: "
            f"it has no {', '.join(missing)}"
        )
    return made
