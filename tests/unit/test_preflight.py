"""What does not fit is refused before it is started, with what would fit; nothing else is."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.estimate.predicted import NotPredicted, Predicted
from raytune_fsdp.launch import preflight
from raytune_fsdp.launch.preflight import check_memory, check_room, predict
from raytune_fsdp.plan import Plan, resolve
from raytune_fsdp.planner import prediction
from raytune_fsdp.planner.beside import kept_at_once
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.standing import Prepared
from tests.runs import LLAMA, make_config

GIB = 2**30
FOUND = Predicted(
    kept=8 * GIB, peak=15 * GIB, where="backward of block 3", beside=GIB, checkpoint=6 * GIB, seconds=None
)
WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 6, "max_position_embeddings": 512}
LONG = {"data": {"seq_len": 512}, "parallel": {"precision": "fp32"}}


def prepared(directory: Path, **sections: Any) -> tuple[FinetuneConfig, Prepared, Plan]:
    """The batch has room for 8 ranks."""
    train = {"global_batch": 8, "micro_batch": 1, "max_steps": 10, **sections.pop("train", {})}
    data = {**make_config(directory).model_dump()["data"], **LONG["data"]}
    parallel = {**LONG["parallel"], **sections}
    config = make_config(directory, WIDE, data=data, train=train, parallel=parallel, checkpoint={"every": 5})
    return config, prepare(config, 1)[0], resolve(config, 1)


def check(found: Predicted | NotPredicted, memory: int | None, **how: Any) -> None:
    nothing: Any = SimpleNamespace()
    plan: Any = SimpleNamespace(layout=SimpleNamespace(world=2))
    check_memory(nothing, nothing, plan, found, kind="cuda", memory=memory, **{"forced": False, "look": False, **how})


@pytest.mark.parametrize(
    ("gibibytes", "ranks", "says"),
    [
        (7.9, 1, "a rank keeps 8.0 GiB of weights, buffers and the optimizer's state from step to step (counted, not "),
        (15.9, 2, "a rank keeps 8.0 GiB"),  # two share it
        (14.5, 1, "estimated to need 16.0 GiB at the most (backward of block 3), and its device has 14.5 GiB"),
    ],
)
def test_what_cannot_fit_is_refused(gibibytes: float, ranks: int, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as refused:
        check(FOUND, int(gibibytes * GIB), ranks=ranks)
    assert says in str(refused.value) and str(refused.value).endswith("--force starts it all the same")
    with caplog.at_level(logging.WARNING):
        check(FOUND, int(gibibytes * GIB), ranks=ranks, forced=True)
    assert says in caplog.text


def test_what_may_fit_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The estimate may be too much by a tenth; what is exact may not."""
    with caplog.at_level(logging.WARNING):
        check(FOUND, 16 * GIB)
        check(FOUND, None)  # of an unknown device
        check(NotPredicted("no reason"), 1)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        check(FOUND, int(14.6 * GIB))
    assert "it may run out of memory: a rank is estimated to need 16.0 GiB" in caplog.text


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_named_as_a_way_out_fits(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PROCESS", 0)
    config, run, plan = prepared(tmp_path, train={"micro_batch": 4})
    found = predict(config, run, plan, kind, None)
    assert isinstance(found, Predicted)
    full = config.parallel.model_copy(update={"activation_checkpointing": "full"})
    changed = config.model_copy(update={"parallel": full})
    less = predict(changed, run, plan, kind, None)
    assert isinstance(less, Predicted) and less.kept == found.kept
    assert less.needed * 1.1 < found.needed  # else nothing is shown here
    with pytest.raises(ConfigError, match=r"It fits with parallel\.activation_checkpointing=full; --force"):
        check_memory(config, run, plan, found, kind=kind, memory=less.needed, forced=False)
    with pytest.raises(
        ConfigError, match=r"It fits with parallel\.activation_checkpointing=full, train\.micro_batch=1"
    ):
        check_memory(config, run, plan, found, kind=kind, memory=less.needed - 1, forced=False)
    with pytest.raises(ConfigError, match=r"Nothing that was tried makes it fit: use more (ranks|machines), "):
        check_memory(config, run, plan, found, kind=kind, memory=found.beside + 1000, forced=False)


def test_more_ranks_are_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "CONTEXT", 0)
    config, run, plan = prepared(tmp_path, activation_checkpointing="full")
    alone, four = (predict(config, run, resolve(config, world), "cuda", None) for world in (1, 4))
    assert isinstance(alone, Predicted) and isinstance(four, Predicted) and four.kept < alone.kept
    with pytest.raises(ConfigError, match=r"It fits on (2|4) ranks \(cluster\.workers=(2|4)\); --force"):
        check_memory(config, run, plan, alone, kind="cuda", memory=four.needed, forced=False)
    with pytest.raises(ConfigError, match=r"Nothing that was tried .* use more machines"):
        check_memory(config, run, plan, alone, kind="cpu", memory=four.needed, forced=False)


def test_a_network_that_cannot_be_traced_is_trained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("aten::odd")

    config, run, plan = prepared(tmp_path)
    monkeypatch.setattr(preflight, "trace", fails)
    found = preflight.preflight(config, run, plan, "cpu", None, memory=1, forced=False)
    assert found == NotPredicted("NotImplementedError: aten::odd")


def test_the_time_of_a_step_is_predicted_of_devices_that_are_known(tmp_path: Path) -> None:
    config, run, plan = prepared(tmp_path)
    found = {
        name: preflight.preflight(config, run, plan, "cuda", name, memory=80 * GIB, forced=False)
        for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100", "Toaster 3000", None)  # an A100 has 40 or 80 GB
    }
    assert all(isinstance(each, Predicted) and each.beside >= GIB for each in found.values())
    assert [getattr(each, "seconds", 0) is not None for each in found.values()] == [True, False, False, False]


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
            with pytest.raises(ConfigError, match=r"run\.storage: 5\.9 GiB are free at .*, and a checkpoint has 6\.0"):
                check_room(config, run, plan, FOUND, forced=False)
            assert not caplog.text
            check_room(config, run, plan, FOUND, forced=True)
            assert "saving will fail until there is room" in caplog.text
        else:
            check_room(config, run, plan, FOUND, forced=False)
            assert ("3 more come before one is removed" in caplog.text) is warned
    store: Any = SimpleNamespace(place=SimpleNamespace(checkpoints="s3://bucket/run"))
    check_room(config, store, plan, FOUND, forced=False)  # nobody says how much is left there


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
