"""Peer copies on real ranks: made while training goes on, found by the next attempt, verified by all; the same bits."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raytune_fsdp.checkpoint.catalogue import committed
from raytune_fsdp.checkpoint.peers.keeper import Keeper
from raytune_fsdp.checkpoint.peers.storage import PeerStorage
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from raytune_fsdp.run.resume_point import ResumePoint, RunInputs
from tests.peers import reach, serving
from tests.ranks import resident_ranks, run_ranks
from tests.runs import make_config, trajectory

TRAIN = {"global_batch": 8, "micro_batch": 2, "max_steps": 8}
COPIES = {"every": 5, "peer_copies": 1, "peer_every": 2}


def stand(
    values: Mapping[str, Any], served: dict[str, Any]
) -> tuple[FinetuneConfig, RunInputs, ResumePoint, PeerStorage]:
    """Where a rank, on a node of its own, begins."""
    from raytune_fsdp.base.collectives import on_rank0
    from raytune_fsdp.checkpoint.location import hold
    from raytune_fsdp.run.peers.going_on import look_with_peers
    from raytune_fsdp.run.prepare import prepare
    from raytune_fsdp.run.resume_point import agree

    config, world = FinetuneConfig.model_validate(values), dist.get_world_size()
    storage = reach(served, f"n{dist.get_rank()}", nodes=[f"n{each}" for each in range(world)])
    hold(storage)
    prepared, _ = on_rank0(lambda: prepare(config, world), what="prepare the run")
    standing = agree(config, prepared, lambda: look_with_peers(config, prepared, world, storage))
    return config, prepared, standing, storage


def where(values: Mapping[str, Any], served: dict[str, Any]) -> tuple[int, bool]:
    """The step from which an attempt would go on, and whether that is in a peer copy."""
    standing = stand(values, served)[2]
    return standing.state.step, standing.from_peers


def attempt(values: Mapping[str, Any], served: dict[str, Any], dies: int | None = None) -> tuple[int, bool]:
    """`where` an attempt begins, that is trained to its end, or until rank 1 is killed in step `dies`."""
    from raytune_fsdp.launch.worker import work
    from raytune_fsdp.run.assemble import LauncherHooks

    config, prepared, standing, storage = stand(values, served)
    step = standing.state.step

    def stop() -> None:
        nonlocal step
        step += 1
        for thread in threading.enumerate():
            if thread.name.startswith("save-"):  # what was begun is whole before the next step
                thread.join(60)
        if step == dies and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    work(config, prepared, standing, torch.device("cpu"), stop, LauncherHooks(peers=storage))
    return standing.state.step, standing.from_peers


def die(config: FinetuneConfig, served: dict[str, Any], step: int, world: int = 2) -> None:
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(attempt, world, config.model_dump(), served, step)


@pytest.fixture
def config(tmp_path: Path) -> FinetuneConfig:
    return make_config(tmp_path, train=TRAIN, parallel={"precision": "fp32"}, checkpoint=COPIES, run={"exact": True})


def undisturbed(config: FinetuneConfig, world: int = 2) -> list[dict[str, Any]]:
    values = config.model_dump()
    values["run"]["name"] = "whole"
    values["checkpoint"].update(peer_copies=0, peer_every=None)
    return trajectory(FinetuneConfig.model_validate(values), world)


def test_a_run_goes_on_from_the_newest_copy_and_learns_the_same(config: FinetuneConfig) -> None:
    """First before there is any checkpoint, then after one, then on another number of ranks."""
    place = RunDir.of(config)
    with serving(["n0", "n1", "n2"]) as (keepers, served):
        die(config, served, 4)
        assert committed(place.checkpoints) == [], "a copy is no checkpoint"
        die(config, served, 8)
        assert [each.step for each in committed(place.checkpoints)] == [5]
        assert resident_ranks(attempt, 3, config.model_dump(), served) == [(6, True)] * 3
        assert sum(keeper.nbytes() > 0 for keeper in keepers.values()) >= 2
    started = [each["fields"] for each in read_events(place.events) if each["event"] == "attempt_started"]
    assert [(each["resumed_from"], each.get("from_peers", False)) for each in started] == [
        (0, False), (2, True), (6, True),
    ]  # fmt: skip
    assert [each["fields"]["step"] for each in read_events(place.events) if each["event"] == "saved"] == [5, 8]
    assert [each.step for each in committed(place.checkpoints)] == [5, 8]
    assert read_trajectory(place.metrics) == undisturbed(config)


def harm(keepers: Mapping[str, Keeper], kind: str) -> None:
    """Plant what must not be taken, on all nodes."""
    for keeper in keepers.values():
        for files in keeper._copies.values():
            for file, each in files.items():
                if file.endswith(kind):
                    start = max(each.pieces)
                    piece = bytearray(each.pieces[start])
                    piece[len(piece) // 2] ^= 1
                    each.pieces[start] = bytes(piece)
                if kind == "not sealed" and file.startswith("__1"):
                    each.size = None
        if kind == "dropped":
            keeper.forget(99, None)


def test_a_copy_that_is_not_whole_or_not_on_record_is_never_taken(config: FinetuneConfig) -> None:
    place, nodes = RunDir.of(config), ["n0", "n1"]
    values = config.model_dump()
    with serving(nodes) as (keepers, served):
        die(config, served, 8)
        assert resident_ranks(where, 2, values, served) == [(6, True)] * 2
        kept = {node: keeper._copies for node, keeper in keepers.items()}
        for kind in ("state.json", ".distcp", "tensors.json", "manifest.json", "not sealed", "dropped"):
            for node, keeper in keepers.items():
                keeper._copies = copy.deepcopy(kept[node])
            harm(keepers, kind)
            assert resident_ranks(where, 2, values, served) == [(5, False)] * 2, kind
        assert not [each for each in read_events(place.events) if each["event"] == "checkpoint_damaged"]
        for node, keeper in keepers.items():
            keeper._copies = copy.deepcopy(kept[node])
        with serving(nodes) as (_, others):  # an attempt that does not reach it goes on from the checkpoint,
            die(config, others, 6)  # and is lost before that step
        assert resident_ranks(where, 2, values, served) == [(5, False)] * 2
        with serving(nodes) as (_, others):
            die(config, others, 7)
        assert resident_ranks(where, 2, values, served) == [(5, False)] * 2, "or has trained it by itself"


def test_what_was_loaded_has_the_digest_of_what_was_copied(config: FinetuneConfig) -> None:
    """A copy whose manifest has another digest is whole; the attempt after it goes on from the checkpoint."""
    with serving(["n0", "n1"]) as (keepers, served):
        die(config, served, 4)
        for keeper in keepers.values():
            for files in keeper._copies.values():
                manifest = files["manifest.json"]
                text = manifest.pieces[0].decode()
                at = text.index('"everything": "') + 15
                manifest.pieces[0] = f"{text[:at]}{'0' if text[at] != '0' else '1'}{text[at + 1 :]}".encode()
        assert resident_ranks(where, 2, config.model_dump(), served) == [(2, True)] * 2
        with pytest.raises(AssertionError, match="is not that of what was loaded from it"):
            resident_ranks(attempt, 2, config.model_dump(), served)
        assert resident_ranks(where, 2, config.model_dump(), served) == [(0, False)] * 2


@pytest.mark.slow
def test_a_fork_goes_on_from_its_own_copy_and_without_one_begins_again(config: FinetuneConfig) -> None:
    whole, values = undisturbed(config), config.model_dump()
    values["run"]["fork"] = {"run": "whole", "step": 5}
    fork = FinetuneConfig.model_validate(values)
    place = RunDir.of(fork)
    with serving(["n0", "n1"]) as (keepers, served):
        die(fork, served, 8)
        assert committed(place.checkpoints) == []
        assert resident_ranks(where, 2, values, served) == [(6, True)] * 2
        kept = {node: copy.deepcopy(keeper._copies) for node, keeper in keepers.items()}
        harm(keepers, "dropped")
        assert resident_ranks(where, 2, values, served) == [(5, False)] * 2
        for node, keeper in keepers.items():
            keeper._copies = kept[node]
        assert resident_ranks(attempt, 2, values, served) == [(6, True)] * 2
    assert read_trajectory(place.metrics) == whole[5:]
    assert [each.step for each in committed(place.checkpoints)] == [8]
