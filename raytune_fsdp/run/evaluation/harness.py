"""Measure a model by tasks of EleutherAI's lm-evaluation-harness, as that tool alone measures it.

The only file that knows the tool. It gets the model and its tokenizer as they are loaded here, and does all else
itself: it finds the tasks and their data, writes the prompts, and computes the values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.base.errors import ConfigError, DataError, RaytuneError, first_line, in_one_line, pip_install


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessTasks:
    """Tasks of the tool, and how they are asked. What is not said is as the tool has it."""

    names: Sequence[str]
    directory: Path | None = None
    """A directory with tasks of the user's own, in the tool's YAML files. They can run any code."""
    shots: int | None = None
    """Solved examples before each question; None: as many as each task says."""
    limit: int | None = None
    """How many rows of each task are asked; None: all."""
    chat: bool = False
    """Whether the chat template is applied."""
    batch: int = 1
    """How many prompts go through the model at once. Shorter ones are padded, which changes the last digits."""

    def opened(self) -> Any:
        """Return the tool's manager, which knows these tasks, once their data could be opened."""
        if find_spec("lm_eval") is None:
            raise ConfigError(f"--lm-eval: lm-evaluation-harness is not installed: {pip_install('lm-eval')}")
        from lm_eval.tasks import TaskManager

        with _errors_only():
            manager = None
            if self.directory is not None:
                # The tool reads 14,000 files to know its own tasks: not where all names are the user's.
                manager = TaskManager(include_path=str(self.directory), include_defaults=False)
            if manager is None or not set(self.names) <= set(manager.all_tasks):
                manager = TaskManager(include_path=None if self.directory is None else str(self.directory))
            for name in self.names:
                if name not in manager.all_tasks:  # the tool would take it for the path of a file
                    near = get_close_matches(name, manager.all_tasks, n=1)
                    raise ConfigError(
                        f"--lm-eval {name}: no task, group or tag has this name"
                        f"{f'; nearest: {near[0]}' if near else ''}; `lm-eval ls tasks` lists those that come with the "
                        "tool, and --lm-eval-tasks DIR adds yours"
                    )
            try:
                opened = manager.load(list(self.names))
            except Exception as error:  # code of tasks, and libraries that read their data
                raise DataError(f"{self._words}: cannot be opened: {first_line(error)}") from error
        for name, task in opened["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise ConfigError(
                    f"--lm-eval: {name} runs the code that the model writes, which is not done here: leave it out, or "
                    "export the model and run the tool itself, in a sandbox"
                )
        return manager

    def measure(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, manager: Any) -> dict[str, float]:
        """Return the values of the tasks by `lm_eval/<task>/<metric>`, with metrics called as the tool calls them."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        try:
            with _errors_only():
                # The tasks are opened once more: some draw at random then, after the tool has set its seeds.
                found = simple_evaluate(
                    HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.batch),
                    tasks=list(self.names),
                    task_manager=manager,
                    num_fewshot=self.shots,
                    limit=self.limit,
                    batch_size=self.batch,
                    apply_chat_template=self.chat,
                    log_samples=False,
                )
        except Exception as error:  # code of tasks
            raise RaytuneError(f"{self._words}: the tool has failed: {in_one_line(error)}") from error
        return {
            f"lm_eval/{task}/{metric}": float(value)
            for task, values in {**found["results"], **found.get("groups", {})}.items()
            for metric, value in values.items()
            # A metric has its filter in its name; the rest is the task's name, and how many rows it has.
            if "," in metric and isinstance(value, int | float) and not math.isnan(value)
        }

    @property
    def _words(self) -> str:
        return f"--lm-eval {','.join(self.names)}"


@contextmanager
def _errors_only() -> Iterator[None]:
    """Let the tool report errors only: it says in warnings what it is meant to do here."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
