"""What does not fit is refused before it is started, with what would fit; nothing else is."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.measured import NotPredicted, Predicted
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.plan import Plan, resolve
from raytune_fsdp.predict import prediction, preflight
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.host import kept_at_once, more_by_clock
from raytune_fsdp.predict.preflight import check_memory, check_room, predict_for_run
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume_point import RunInputs
from tests.clock import Clock
from tests.runs import LLAMA, make_config

GIB = 2**30
FOUND = Predicted(
    kept=8 * GIB, peak=15 * GIB, where="backward of layer 3", assumed=GIB, checkpoint=6 * GIB, seconds=None
)
WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 6, "max_position_embeddings": 512}
LONG = {"data": {"seq_len": 512}, "parallel": {"precision": "fp32"}}


def prepared(directory: Path, layers: int = 3, **sections: Any) -> tuple[FinetuneConfig, RunInputs, Plan]:
    """The batch has room for 8 ranks."""
    train = {"global_batch": 8, "micro_batch": 1, "max_steps": 10, **sections.pop("train", {})}
    data = {**make_config(directory).model_dump()["data"], **LONG["data"]}
    parallel = {**LONG["parallel"], **sections}
    deep = {**WIDE, "num_hidden_layers": layers}
    config = make_config(directory, deep, data=data, train=train, parallel=parallel, checkpoint={"every": 5})
    return config, prepare(config, 1)[0], resolve(config, 1)


def check(found: Predicted | NotPredicted, memory: int | None, **how: Any) -> None:
    nothing: Any = SimpleNamespace(cluster=SimpleNamespace(workers="auto"))
    plan: Any = SimpleNamespace(layout=SimpleNamespace(world=2))
    check_memory(nothing, nothing, plan, found, kind="cuda", memory=memory, **{"forced": False, "look": False, **how})


@pytest.mark.parametrize(
    ("gibibytes", "ranks", "says"),
    [
        (7.9, 1, "a rank keeps 8.0 GiB of weights, buffers and the optimizer's state from step to step (counted, not "),
        (15.8, 2, "a rank keeps 8.0 GiB"),  # two share it
        (15.8, 2, "and it has 7.9 GiB of the 15.8 GiB that 2 ranks share"),
        (8 - 2 / GIB, 1, "a rank keeps 8,589,934,592 bytes of weights"),  # else it would have as much as it needs
        (8 - 2 / GIB, 1, "its device has 8,589,934,590 bytes"),
        (14.5, 1, "estimated to need 16.0 GiB at the most (backward of layer 3), and its device has 14.5 GiB"),
    ],
)
def test_what_cannot_fit_is_refused(gibibytes: float, ranks: int, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as refused:
        check(FOUND, round(gibibytes * GIB), ranks=ranks)
    assert says in str(refused.value) and str(refused.value).endswith("--force starts it all the same")
    with caplog.at_level(logging.WARNING):
        check(FOUND, round(gibibytes * GIB), ranks=ranks, forced=True)
    assert says in caplog.text


def test_what_may_fit_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The estimate may be too much by a tenth; what is exact may not."""
    with caplog.at_level(logging.WARNING):
        check(FOUND, 16 * GIB)
        check(FOUND, None)  # of an unknown device
        check(NotPredicted("no reason"), 1)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        check(FOUND, round(14.6 * GIB))
    assert "it may run out of memory: a rank is estimated to need 16.0 GiB" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for nodes without a GPU")
def test_what_a_run_with_flash_attention_needs_is_known_where_there_is_no_gpu(tmp_path: Path) -> None:
    config, run, plan = prepared(tmp_path)
    asked = config.model_copy(update={"model": config.model.model_copy(update={"attention": "flash_attention_2"})})
    found = predict_for_run(asked, run, plan, "cuda", None)
    assert isinstance(found, Predicted) and found == predict_for_run(config, run, plan, "cuda", None)
    # Without flash-attn, all scores would be kept for a soft cap.
    capped = replace(run, needs=replace(run.needs, softcap=True))
    assert isinstance(predict_for_run(asked, capped, plan, "cuda", None), NotPredicted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_named_as_a_way_out_fits(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PROCESS", 0)
    config, run, plan = prepared(tmp_path, layers=6, train={"micro_batch": 4})
    found = predict_for_run(config, run, plan, kind, None)
    assert isinstance(found, Predicted)
    full = config.parallel.model_copy(update={"activation_checkpointing": "full"})
    changed = config.model_copy(update={"parallel": full})
    less = predict_for_run(changed, run, plan, kind, None)
    assert isinstance(less, Predicted) and less.kept == found.kept
    assert less.needed * 1.1 < found.needed  # else nothing is shown here
    with pytest.raises(ConfigError, match=r"It fits with parallel\.activation_checkpointing=full; --force"):
        check_memory(config, run, plan, found, kind=kind, memory=less.needed, forced=False)
    with pytest.raises(
        ConfigError, match=r"It fits with parallel\.activation_checkpointing=full, train\.micro_batch=1"
    ):
        check_memory(config, run, plan, found, kind=kind, memory=less.needed - 1, forced=False)
    with pytest.raises(ConfigError, match=r"Nothing that was tried makes it fit: use more (ranks|machines), "):
        check_memory(config, run, plan, found, kind=kind, memory=found.assumed + 1000, forced=False)


@pytest.mark.parametrize(("gibibytes", "tried"), [(15, 2), (12, 5)])
def test_a_way_out_is_looked_for_longer_before_a_refusal_than_before_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gibibytes: int, tried: int
) -> None:
    """For 5 s, and for 20 s; each takes 4 s here."""
    clock, asked = Clock(), list[object]()

    def fits(*changes: object) -> bool:
        asked.append(changes)
        clock.now += 4
        return False

    monkeypatch.setattr(preflight, "time", clock)
    monkeypatch.setattr(preflight, "_fits", fits)
    config, run, plan = prepared(tmp_path, train={"micro_batch": 4})
    with suppress(ConfigError):
        check_memory(config, run, plan, FOUND, kind="cuda", memory=gibibytes * GIB, forced=False)
    assert len(asked) == tried


@pytest.mark.slow
def test_more_ranks_are_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "CONTEXT", 0)
    config, run, plan = prepared(tmp_path, activation_checkpointing="full")
    alone, four = (predict_for_run(config, run, resolve(config, world), "cuda", None) for world in (1, 4))
    assert isinstance(alone, Predicted) and isinstance(four, Predicted) and four.kept < alone.kept
    with pytest.raises(ConfigError, match=r"It fits on (2|4) ranks \(cluster\.workers=(2|4)\); --force"):
        check_memory(config, run, plan, alone, kind="cuda", memory=four.needed, forced=False)
    with pytest.raises(ConfigError, match=r"Nothing that was tried .* use more machines"):
        check_memory(config, run, plan, alone, kind="cpu", memory=four.needed, forced=False)


@pytest.mark.slow
def test_fewer_ranks_are_a_way_out_where_they_share_memory(tmp_path: Path) -> None:
    config, run, _ = prepared(tmp_path, activation_checkpointing="full")
    eight = resolve(config, 8)
    found, half = (predict_for_run(config, run, resolve(config, world), "cpu", None) for world in (8, 4))
    assert isinstance(found, Predicted) and isinstance(half, Predicted)
    assert 4 * half.needed < 8 * found.needed, "each is a process, with what it imports"
    with pytest.raises(ConfigError, match=r"It fits on fewer ranks, which .* \(cluster\.workers=4\); --force"):
        check_memory(config, run, eight, found, kind="cpu", memory=4 * half.needed, ranks=8, forced=False)


def test_a_network_that_cannot_be_traced_is_trained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("aten::odd")

    config, run, plan = prepared(tmp_path)
    monkeypatch.setattr(preflight, "trace", fails)
    found = preflight.preflight(config, run, plan, "cpu", None, memory=1, forced=False)
    assert found == NotPredicted("NotImplementedError: aten::odd")


@pytest.mark.slow
def test_the_time_of_a_step_is_predicted_of_devices_that_are_known(tmp_path: Path) -> None:
    config, run, plan = prepared(tmp_path)
    found = {
        name: preflight.preflight(config, run, plan, "cuda", name, memory=80 * GIB, forced=False)
        for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100", "Toaster 3000", None)  # an A100 has 40 or 80 GB
    }
    assert all(isinstance(each, Predicted) and each.assumed >= GIB for each in found.values())
    assert [getattr(each, "seconds", 0) is not None for each in found.values()] == [True, False, False, False]


def test_ranks_that_share_samples_need_a_kernel_for_their_precision(tmp_path: Path) -> None:
    parallel = {"precision": "fp32", "mesh": {"sequence": 2}}
    config = make_config(tmp_path, WIDE, parallel=parallel)
    run, plan = prepare(config, 2)[0], resolve(config, 2)
    preflight.preflight(config, run, plan, "cpu", None, memory=80 * GIB, forced=False)
    with pytest.raises(ConfigError, match="sequence=2: .*compute in 16 bits, not in float32"):
        preflight.preflight(config, run, plan, "cuda", "H100", memory=80 * GIB, forced=False)


@pytest.mark.parametrize(
    ("per_node", "known"), [(1, False), *(pytest.param(many, True, marks=pytest.mark.slow) for many in (2, 8))]
)
def test_no_time_is_predicted_of_ranks_on_several_machines(tmp_path: Path, per_node: int, known: bool) -> None:
    """Nobody has said how fast the network between them is."""
    config, run, _ = prepared(tmp_path)
    found = predict_for_run(config, run, resolve(config, 2), "cuda", find_device("H100"), per_node)
    assert isinstance(found, Predicted) and (found.seconds is not None) is known


@pytest.mark.parametrize(
    ("free", "refused", "warned"), [(5.9, True, False), (6.1, False, True), (17.9, False, True), (18.1, False, False)]
)
def test_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    free: float, refused: bool, warned: bool,
) -> None:  # fmt: skip
    """Two are kept while a third is written."""
    config, run, plan = prepared(tmp_path, train={"max_steps": 1000})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 * GIB, 0, int(free * GIB)))
    with caplog.at_level(logging.WARNING):
        if refused:
            with pytest.raises(
                ConfigError, match=r"run\.storage: 5\.9 GiB are free at .*, and a checkpoint takes 6\.0"
            ):
                check_room(config, run, plan, FOUND, forced=False)
            assert not caplog.text
            check_room(config, run, plan, FOUND, forced=True)
            assert "saving will fail until there is room" in caplog.text
        else:
            check_room(config, run, plan, FOUND, forced=False)
            assert ("3 more checkpoints come before one is removed, which take 18.0 GiB" in caplog.text) is warned


def test_room_that_lacks_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run, plan = prepared(tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 * GIB, 0, 6 * GIB - 1))
    with pytest.raises(
        ConfigError, match=r"6,442,450,943 bytes are free at .*, and a checkpoint takes 6,442,450,944 b"
    ):
        check_room(config, run, plan, FOUND, forced=False)


def test_room_that_is_not_known_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hangs(_: object) -> None:
        raise OSError(116, "Stale file handle")

    config, run, plan = prepared(tmp_path)
    said = list[str]()
    store: Any = SimpleNamespace(place=SimpleNamespace(checkpoints="s3://bucket/run"), dry=False)
    check_room(config, store, plan, FOUND, forced=False, say=said.append)
    monkeypatch.setattr(shutil, "disk_usage", hangs)
    check_room(config, run, plan, FOUND, forced=False, say=said.append)
    assert len(said) == 2 and not caplog.text
    assert said[0] == "s3://bucket/run: an object store does not say how much room it has, so that is not checked"
    assert said[1].startswith("run.storage: how much room is left at ") and "Stale file handle" in said[1]


@pytest.mark.parametrize(
    ("steps", "checkpoint", "kept"),
    [
        (1000, {"every": 5}, {"newest": 2, "being written": 1}),
        (10, {"every": 5}, {"newest": 2}),  # the last one completes them, and none is removed
        (3, {"every": 5}, {"newest": 1}),
        (12, {"every": 5, "keep_last": 3}, {"newest": 3}),  # after steps 5, 10 and 12
        (12, {"every": 5, "keep_last": None}, {"newest": 3}),
        (1000, {"every": 5, "keep_last": 2, "keep_every": 100}, {"newest": 2, "every": 10, "being written": 1}),
    ],
)
def test_how_many_checkpoints_there_are_at_a_time(
    tmp_path: Path, steps: int, checkpoint: dict[str, Any], kept: dict[str, int]
) -> None:
    config = make_config(tmp_path, train={"max_steps": steps}, checkpoint=checkpoint)
    assert kept_at_once(config.checkpoint, resolve(config, 1)) == kept


@pytest.mark.parametrize(
    ("checkpoint", "more"),
    [
        ({"every": 5}, 0),
        ({"every": None}, 0),
        ({}, 2),  # two, and one that is being written: it or the last one, which counts as planned
        ({"every": {"minutes": 5}}, 2),
        ({"keep_best": 1}, 1),  # evaluations plan saves; of recovery points one stays until the next is complete
    ],
)
def test_how_many_more_checkpoints_the_clock_may_bring(tmp_path: Path, checkpoint: dict[str, Any], more: int) -> None:
    data = make_config(tmp_path).model_dump()["data"]
    config = make_config(tmp_path, data={**data, "eval": data["train"]}, eval={"every": 8}, checkpoint=checkpoint)
    assert more_by_clock(config.checkpoint, resolve(config, 1)) == more
