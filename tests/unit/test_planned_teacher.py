"""The plan of a distillation says what its teacher's pass needs."""

from __future__ import annotations

from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.advise.advice import advice
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.prediction import Cluster, predict
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.teacher import teacher_pass

TEACHER = "meta-llama/Llama-3.1-70B"


def config_of(**teacher: Any) -> FinetuneConfig:
    return FinetuneConfig.model_validate({
        "run": {"name": "student"}, "model": {"path": "meta-llama/Llama-3.1-8B"},
        "data": {"train": [{"path": "x.jsonl"}], "seq_len": 4096}, "parallel": {"precision": "bf16"},
        "train": {"global_batch": 64, "max_steps": 1000, "objective": {"type": "distill"}},
        "teacher": {"model": TEACHER, **teacher},
    })  # fmt: skip


@pytest.mark.slow
def test_a_teacher_is_planned_with_its_own_sizes() -> None:
    cluster = Cluster(device=find_device("H100"))
    config = config_of()
    plan = resolve(config, 8)
    found = teacher_pass(config, plan, cluster)
    assert found is not None and found.memory is not None and found.seconds is not None
    assert found.tokens == 1000 * 64 * 4096 and found.token_bytes == 64 * 8 + 4
    share = 70_553_706_496 * 4 // 8  # of weights in fp32, which are gathered in bf16
    assert share < found.memory < 1.3 * share and found.fits
    student = predict(ModelSpec.of(config), config, plan, cluster)
    # 8.8 times the weights; attention and what moves make up for the rest.
    assert 0.6 < found.seconds / (1000 * student.seconds.compute / 3) / 8.8 < 1.2
    (said,) = (each.text for each in advice(config, student, teacher=found) if each.id == "teacher")
    assert TEACHER in said and "DOES NOT FIT" not in said and "135.3 GB are kept" in said
    alone = teacher_pass(config, resolve(config, 1), cluster)
    assert alone is not None and not alone.fits


def test_a_teacher_of_unknown_sizes_is_said_to_be_one() -> None:
    config = config_of(model="nobody/nothing", top_k=8, dtype="fp64")
    found = teacher_pass(config, resolve(config, 8), Cluster(device=find_device("H100")))
    assert found is not None and found.memory is None and found.token_bytes == 8 * 12 + 8
    assert "nobody/nothing" in found.because and found.bytes == 104 * found.tokens
