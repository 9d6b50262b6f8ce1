"""Identities may grow: what an old one does not name is what it was before the name existed."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.config import OptimConfig, TrainConfig
from raytune_fsdp.config.sections.formats import Format
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.config.sections.objectives import ObjectiveChoice
from raytune_fsdp.config.sections.optim import Schedule
from raytune_fsdp.config.sections.optimizers import OptimizerChoice
from raytune_fsdp.data.rows import elsewhere
from raytune_fsdp.plan import identity
from raytune_fsdp.plan.identity import ABSENT, check_identity, named

NAMED_FROM_THE_BEGINNING = {
    "optim": "lr weight_decay beta1 beta2 eps max_grad_norm warmup_ratio warmup_steps schedule schedule_steps "
    "max_skipped",
    "optim.schedule.constant": "type",
    "optim.schedule.linear": "type floor",
    "optim.schedule.cosine": "type floor",
    "optim.schedule.wsd": "type decay floor",
    "optim.schedule.polynomial": "type power floor",
    "optim.schedule.inverse_sqrt": "type timescale",
    "optim.schedule.one_cycle": "type rise start floor",
    "train": "global_batch micro_batch max_steps epochs log_every",
    "optim.optimizer.adamw": "type",
    "optim.optimizer.adafactor": "type decay_power clip",
    "optim.optimizer.sgd": "type momentum nesterov",
    "optim.optimizer.muon": "type momentum nesterov iterations rest_lr_ratio",
    "optim.optimizer.lion": "type beta1 beta2",
    "method.full": "type",
    "method.freeze": "type trained",
    "method.lora": "type rank alpha rank_stabilized dropout target_modules target_parameters modules_to_save dora "
    "lr_ratio adapter",
    "method.qlora": "type rank alpha rank_stabilized dropout target_modules target_parameters modules_to_save dora "
    "lr_ratio adapter quantization",
    "method.ia3": "type target_modules feedforward_modules modules_to_save adapter",
    "format.chat": "type messages role content roles tools loss",
    "format.instruction": "type prompt input completion system style loss",
    "format.completion": "type text",
    "format.tokens": "type input_ids labels mask",
    "format.template": "type prompt completion style loss",
    "format.python": "type function then",
    "format.preference": "type prompt chosen rejected role content roles system tools margin weight style loss",
    "format.binary": "type prompt completion label role content roles system tools weight style",
    "format.score": "type text messages label score role content roles weight",
    "train.objective.sft": "type",
    "train.objective.dpo": "type beta loss label_smoothing normalize sft",
    "train.objective.ipo": "type beta sft",
    "train.objective.simpo": "type beta gamma label_smoothing sft",
    "train.objective.cpo": "type beta loss label_smoothing sft",
    "train.objective.orpo": "type beta sft",
    "train.objective.kto": "type beta desirable_weight undesirable_weight",
    "train.objective.reward": "type center",
    "train.objective.classification": "type class_weights",
    "train.objective.regression": "type",
    "train.objective.distill": "type forward reverse cross_entropy",
}
"""Never to be changed: the fields that each section had when it came, the first ones in the first version. A field that
came later has an entry in ABSENT."""

SCHEDULES = get_args(get_args(Schedule)[0])
FORMATS = get_args(get_args(Format)[0])
METHODS = get_args(get_args(Method)[0])
OPTIMIZERS = get_args(get_args(OptimizerChoice)[0])
OBJECTIVES = get_args(get_args(ObjectiveChoice)[0])


def tag(section: Any) -> str:
    """The value of `type` that chooses a section of a union."""
    (found,) = get_args(section.model_fields["type"].annotation)
    return str(found)


SECTIONS: dict[str, Any] = {
    "optim": OptimConfig,
    "train": TrainConfig,
    **{f"optim.schedule.{tag(each)}": each for each in SCHEDULES},
    **{f"optim.optimizer.{tag(each)}": each for each in OPTIMIZERS},
    **{f"format.{tag(each)}": each for each in FORMATS},
    **{f"train.objective.{tag(each)}": each for each in OBJECTIVES},
    **{f"method.{tag(each)}": each for each in METHODS},
}


@pytest.mark.parametrize("path", SECTIONS)
def test_every_field_that_came_later_says_what_its_absence_means(path: str) -> None:
    for field in SECTIONS[path].model_fields:
        if field not in NAMED_FROM_THE_BEGINNING[path].split():
            assert f"{path}.{field}" in ABSENT, (
                f"{path}.{field} is new: write into identity.ABSENT what a run is that does not name it, or every run "
                "and cache from before is lost"
            )


def test_every_section_of_an_identity_is_known() -> None:
    assert SECTIONS.keys() == NAMED_FROM_THE_BEGINNING.keys(), "a section that came later: list its first fields"


def test_a_value_equal_to_the_meaning_of_its_absence_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = named("optim", OptimConfig())
    later = {"optimizer", "stochastic_rounding", "groups"}
    assert plain == OptimConfig().model_dump(exclude=later), "nothing that was named before is left out"
    monkeypatch.setitem(ABSENT, "optim.beta2", 0.999)
    monkeypatch.setitem(ABSENT, "optim.schedule.cosine.floor", 0.0)
    said = named("optim", OptimConfig(), exclude=("max_skipped",))
    assert "beta2" not in said and "max_skipped" not in said and said["schedule"] == {"type": "cosine"}
    assert named("optim", OptimConfig(beta2=0.95))["beta2"] == 0.95
    # The meaning stays when the default of the field moves on.
    monkeypatch.setitem(ABSENT, "optim.beta2", 0.9)
    assert named("optim", OptimConfig())["beta2"] == 0.999


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("data.order_version", "version 1 of the order of samples"),
        ("data.document_version", "version 1 of the tokens of documents"),
    ],
)
def test_a_run_of_an_older_order_is_refused_by_name(key: str, what: str) -> None:
    now = {"data.order_version": 2, "data.document_version": 2, "run.seed": 0}
    before = {**now, key: 1, "run.seed": 7}
    with pytest.raises(ResumeError) as failure:
        check_identity(before, now, "runs/a/checkpoints/step-00000004.a1", files_before={}, files_now={})
    message = str(failure.value)
    assert what in message and "makes version 2" in message and "under another run.name" in message
    assert "run.seed" not in message, "this is why, whatever else differs"


def test_the_type_of_a_section_is_always_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ABSENT, "optim.schedule.cosine.type", "cosine")
    assert named("optim", OptimConfig())["schedule"]["type"] == "cosine"


@pytest.mark.parametrize(
    "key",
    [
        "data.train.0.function_modules.__mp_main__", "train.loss_modules.raytune_fsdp.data.rows",
        "data.train.12.function_modules._remote_module_non_scriptable", "data.columns", "model.quantization_config",
    ],
)  # fmt: skip
def test_what_an_old_identity_should_not_have_had_is_not_missed(key: str) -> None:
    now = {"run.seed": 0, "data.train.0.function_modules.mine": "18c7"}
    check_identity({**now, key: "18c7"}, now, "runs/a", files_before={}, files_now={})
    for other in ({**now, key: "18c7", "run.seed": 7}, {**now, "data.train.0.function_modules.mp_main": "18c7"}):
        with pytest.raises(ResumeError, match="was trained with other settings"):
            check_identity(other, now, "runs/a", files_before={}, files_now={})


@pytest.mark.parametrize("module", sorted(elsewhere._NOT_USERS))
def test_modules_that_are_not_the_users_are_left_out_of_older_identities(module: str) -> None:
    assert identity._GONE.fullmatch(f"data.train.0.function_modules.{module}")
