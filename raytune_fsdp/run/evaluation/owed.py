"""What the ranks of a run measure, and which evaluation the run still owes.

An evaluation comes after the checkpoint of its step. A crash between the two would lose it, and after the last step no
attempt would return to it. So the run's own record says whether it was due there, and what of it is missing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.questions import Questions
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.objective.scores import LossOfGroups
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import each_event, read_evaluations
from raytune_fsdp.run.evaluation.evaluation import Evaluation

logger = logging.getLogger(__name__)

EVALUATES = "evaluates"
"""The field of the event that an attempt has started which says what the attempt's evaluations consist of."""


def evaluation_of_run(
    config: FinetuneConfig,
    evals: Mapping[str, Windows],
    tasks: Sequence[Questions],
    groups: LossOfGroups | None = None,
    *,
    dry: bool = False,
) -> Evaluation:
    """Return what the ranks measure: nothing if a task measures instead, or the run is dry."""
    return Evaluation.of(config, evals, tasks, groups) if config.eval.where == "ranks" and not dry else Evaluation()


def described(exam: Evaluation) -> dict[str, Any]:
    """Return how the event that an attempt has started describes the evaluation; nothing if it measures nothing."""
    measured, prompts = bool(exam.datasets or exam.tasks), len(exam.prompts)
    return {EVALUATES: {"values": measured, "prompts": prompts}} if measured or prompts else {}


def is_missing(place: RunDir, step: int, exam: Evaluation) -> bool:
    """Return whether anything that this evaluation measures after this step is not on record."""
    return _missing(place, step, values=bool(exam.datasets or exam.tasks), prompts=len(exam.prompts))


def owes(place: RunDir, step: int, exam: Evaluation) -> bool:
    """Return whether a run that ended at this step was to be measured there, and was not.

    Runs of older versions do not say whether they were to be; for them, what is missing is only logged.
    """
    due, finished = None, False
    for event in each_event(place.events):
        if event["event"] == names.ATTEMPT_STARTED:
            due, finished = event["fields"].get(EVALUATES), False
        elif event["event"] == names.ATTEMPT_ENDED:
            finished = event["fields"].get("status") == "finished"
    if finished:  # an attempt says so after its last evaluation
        return False
    try:
        if isinstance(due, dict):
            values, prompts = due.get("values") is True, due.get("prompts")
            return _missing(
                place, step,
                values=values and bool(exam.datasets or exam.tasks),
                prompts=min(prompts if isinstance(prompts, int) else 0, len(exam.prompts)),
            )  # fmt: skip
        if is_missing(place, step, exam):
            logger.warning(
                "the run is complete, and its evaluation after step %d is not on record: "
                "`raytune-fsdp eval %s` makes it",
                step, place.path,
            )  # fmt: skip
    except RaytuneError:  # a broken record: a complete run mends it first of all
        pass
    return False


def _missing(place: RunDir, step: int, *, values: bool, prompts: int) -> bool:
    if values and step not in read_evaluations(place.metrics, step):
        return True
    if not prompts:
        return False
    answered = Counter(
        event["attempt"]
        for event in each_event(place.events)
        if event["event"] == names.ANSWERED and event["fields"].get("step") == step
    )
    return max(answered.values(), default=0) < prompts  # an attempt answers all prompts, if nothing ends it
