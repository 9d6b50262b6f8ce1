"""What follows from a config: batches, lengths, meshes, and the reasons why some cannot be had."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.plan import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.without_ray import check_without_ray
from raytune_fsdp.model.precision.quantized import Kind, quantize
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import Plan, resolve, sizes_of
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run.checks import check_first
from tests.runs import LLAMA, make_config


def config(**sections: Mapping[str, Any]) -> FinetuneConfig:
    values: dict[str, Any] = {
        "run": {"name": "plan", "storage": "/runs"},
        "model": {"path": "model"},
        "data": {"train": [{"path": "rows.jsonl"}]},
        "train": {"global_batch": 16, "micro_batch": 2, "max_steps": 100},
    }
    return FinetuneConfig.model_validate({**values, **sections})


def census(samples: int) -> Census:
    return Census(seq_len=8, epochs=(samples,))


def train(**fields: Any) -> dict[str, Any]:
    return {"global_batch": 16, "micro_batch": 2, **fields}


@pytest.mark.parametrize(
    ("world", "rounds", "fillers"), [(1, 8, 0), (2, 4, 0), (3, 3, 1), (4, 2, 0), (5, 2, 2), (7, 2, 6), (8, 1, 0)]
)
def test_blocks_are_dealt_to_all_ranks_and_filled_up(world: int, rounds: int, fillers: int) -> None:
    plan = resolve(config(), world)
    assert (plan.division.micro_batches, plan.division.full_rounds, plan.division.fillers) == (8, rounds, fillers)


@given(micro=st.integers(1, 5), blocks=st.integers(1, 50), world=st.integers(1, 50))
def test_every_block_is_computed_once(micro: int, blocks: int, world: int) -> None:
    wanted = config(train={"global_batch": micro * blocks, "micro_batch": micro, "max_steps": 1})
    if blocks < world:
        with pytest.raises(ConfigError):
            resolve(wanted, world)
        return
    division = resolve(wanted, world).division
    assert division.full_rounds * world == blocks + division.fillers
    assert 0 <= division.fillers < world


def test_a_batch_that_leaves_ranks_idle_is_refused() -> None:
    with pytest.raises(ConfigError) as failure:
        resolve(config(), 9)
    message = str(failure.value)
    for part in (
        "train.global_batch=16",
        "train.micro_batch=2",
        "8 micro-batch(es)",
        "9 ranks",
        "at most 8",
        "at least 18",
    ):
        assert part in message


def test_what_does_not_depend_on_the_length_is_checked_before_the_data_is_counted(tmp_path: Path) -> None:
    run = {"name": "a", "storage": str(tmp_path)}
    wanted = config(run=run, train=train(epochs=2.0), optim={"warmup_steps": 5})
    assert check_first(wanted, 2) == RunDir.of(wanted), "whether 5 steps of warmup are too many is not known yet"
    with pytest.raises(ConfigError, match="for 9 ranks"):
        check_first(wanted, 9)
    with pytest.raises(ConfigError, match=r"optim.warmup_steps=101 is more than the 100 steps"):
        check_first(config(run=run, optim={"warmup_steps": 101}), 1)


def test_under_torchrun_no_rank_refuses_its_storage_before_all_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those on other nodes would wait for it for minutes; what is wrong in the config all refuse at once."""
    (tmp_path / "file").touch()
    wanted = config(run={"name": "a", "storage": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="run.storage"):
        check_without_ray(wanted)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_without_ray(wanted)
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(ConfigError, match="for 9 ranks"):
        check_without_ray(wanted)


def test_copies_on_other_nodes_need_ray(tmp_path: Path) -> None:
    wanted = config(run={"name": "a", "storage": str(tmp_path)}, checkpoint={"peer_copies": 2})
    with pytest.raises(
        ConfigError, match=r"checkpoint.peer_copies=2: Ray keeps them .* set it to 0, or cluster.launch"
    ):
        check_without_ray(wanted)


def test_steps_count_themselves() -> None:
    plan = resolve(config(), 2)
    assert (plan.steps, plan.division.total_samples, plan.samples_per_epoch) == (100, None, None)
    assert plan.division.samples_of(1) == plan.division.samples_of(100) == 16
    assert plan.division.samples_before(1) == 0 and plan.division.samples_before(101) == 1600


@pytest.mark.parametrize(
    ("epochs", "samples", "total", "steps"),
    [(1, 160, 160, 10), (1, 161, 161, 11), (2.5, 10, 25, 2), (0.01, 10, 1, 1), (1.1, 10, 11, 1), (0.07, 100, 7, 1)],
)
def test_epochs_become_steps_by_a_count_of_the_data(epochs: float, samples: int, total: int, steps: int) -> None:
    plan = resolve(config(train=train(epochs=epochs)), 2, census(samples))
    assert (plan.steps, plan.division.total_samples, plan.samples_per_epoch) == (steps, total, samples)
    assert sum(plan.division.samples_of(step) for step in range(1, steps + 1)) == total
    assert all(plan.division.samples_of(step) == 16 for step in range(1, steps))


def test_epochs_without_a_count_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs=2\.0 needs a count.*train\.max_steps does not"):
        resolve(config(train=train(epochs=2.0)), 2)


@pytest.mark.parametrize(
    ("optim", "warmup"),
    [
        ({}, 3),
        ({"warmup_ratio": 0.07}, 7),
        ({"warmup_ratio": 0.071}, 8),
        ({"warmup_ratio": 0}, 0),
        ({"warmup_ratio": 1}, 100),
        ({"warmup_steps": 20}, 20),
        ({"warmup_steps": 0}, 0),
        ({"schedule_steps": 1000}, 30),
    ],
)
def test_warmup_is_part_of_the_schedule(optim: dict[str, Any], warmup: int) -> None:
    assert resolve(config(optim=optim), 1).warmup_steps == warmup


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError) as failure:
        resolve(config(optim={"warmup_steps": 101}), 1)
    assert "optim.warmup_steps=101" in str(failure.value) and "100 steps" in str(failure.value)
    assert "train.max_steps" in str(failure.value)


def test_a_longer_run_keeps_the_schedule_it_started_with() -> None:
    first = resolve(config(), 1)
    longer = resolve(config(train=train(max_steps=200)), 1, planned_schedule=first.schedule_steps)
    assert (longer.steps, longer.schedule_steps, longer.warmup_steps) == (200, 100, 3)
    asked = config(train=train(max_steps=200), optim={"schedule_steps": 200})
    assert resolve(asked, 1, planned_schedule=100).schedule_steps == 200
    assert resolve(config(optim={"schedule_steps": 50}), 1).schedule_steps == 50


@pytest.mark.parametrize(
    ("parallel", "world", "mesh"),
    [
        ({}, 4, (1, 4)),
        ({"strategy": "shard_grad_op"}, 4, (1, 4)),
        ({"strategy": "replicate"}, 4, (4, 1)),
        ({"strategy": "hybrid_shard", "shard_size": 2}, 4, (2, 2)),
        ({"strategy": "hybrid_shard", "shard_size": 3}, 6, (2, 3)),
        ({"strategy": "hybrid_shard", "shard_size": 4}, 4, (1, 4)),
        ({"strategy": "hybrid_shard", "shard_size": 1}, 4, (4, 1)),
        ({}, 1, (1, 1)),
    ],
)
def test_the_mesh_follows_the_strategy(parallel: dict[str, Any], world: int, mesh: tuple[int, int]) -> None:
    layout = resolve(config(parallel=parallel), world).layout
    assert (layout.replicas, layout.shard_size) == mesh


@pytest.mark.parametrize(("size", "world", "valid"), [(4, 6, [1, 2, 3, 6]), (8, 4, [1, 2, 4]), (2, 7, [1, 7])])
def test_a_shard_size_that_does_not_divide_names_those_that_do(size: int, world: int, valid: list[int]) -> None:
    with pytest.raises(ConfigError) as failure:
        resolve(config(parallel={"strategy": "hybrid_shard", "shard_size": size}), world)
    assert f"parallel.shard_size={size}" in str(failure.value) and f"valid: {valid}" in str(failure.value)


@given(world=st.integers(1, 8), epochs=st.sampled_from([None, 0.5, 3]))
def test_what_is_written_does_not_depend_on_the_world(world: int, epochs: float | None) -> None:
    def plan(size: int) -> Plan:
        section = train(max_steps=7) if epochs is None else train(epochs=epochs)
        return resolve(config(train=section), size, None if epochs is None else census(100))

    written = plan(world).to_dict()
    assert written == plan(1).to_dict()
    assert json.loads(json.dumps(written)) == written, "plan.json holds plain data"
    assert "layout" not in written and "run_dir" not in written and "checkpoints" not in written


def between(fewest: int, most: int, **parallel: Any) -> FinetuneConfig:
    return config(cluster={"workers": {"min": fewest, "max": most}}, parallel=parallel)


def test_a_number_of_ranks_that_may_change() -> None:
    """Blocks of a step and copies of the model decide which numbers there are."""
    assert sizes_of(between(1, 4)) == [1, 2, 3, 4]
    assert sizes_of(between(3, 3)) == [3]
    hybrid = {"strategy": "hybrid_shard", "shard_size": 2}
    assert sizes_of(between(1, 7, **hybrid)) == [2, 4, 6]
    assert sizes_of(config(cluster={"workers": "auto"}), 4) == [4]
    with pytest.raises(ConfigError, match=r"\{min: 3, max: 3\}: no number in between is a multiple of .*=2.*max=4"):
        sizes_of(between(3, 3, **hybrid))
    with pytest.raises(ConfigError, match="use at most 8 rank"):
        sizes_of(between(1, 9))


def test_numbers_of_ranks_that_a_mesh_allows() -> None:
    """`auto` is at first the least of them, as nobody knows yet what there is."""

    def sizes(workers: Any, **mesh: int) -> list[int]:
        strategy = "hybrid_shard" if "replicate" in mesh else "full_shard"
        return sizes_of(config(cluster={"workers": workers}, parallel={"strategy": strategy, "mesh": mesh}))

    assert sizes("auto", sequence=2) == [2]
    assert sizes("auto", tensor=2, shard=2) == [4]
    assert sizes("auto", shard=2, replicate=2) == [4]
    assert sizes({"min": 1, "max": 8}, sequence=2) == [2, 4, 6, 8]
    assert sizes({"min": 4, "max": 8}, shard=8) == [8]
    assert sizes({"min": 4, "max": 8}, shard=2, replicate=2) == [4]
    with pytest.raises(ConfigError, match=r"sequence=2 does not divide the world size 3; .*workers=2 or .*workers=4"):
        sizes(3, sequence=2)
    with pytest.raises(
        ConfigError, match=r"no number in between is a multiple of 16, as parallel.mesh=.*; set a larger"
    ):
        sizes({"min": 4, "max": 8}, shard=16)
    with pytest.raises(ConfigError, match=r"no number in between is a multiple of 2, .*; set cluster.workers=2$"):
        sizes({"min": 5, "max": 5}, shard=2)
    with pytest.raises(ConfigError, match=r"of 12, as parallel.shard_size=4 and .*replicate=3 need it; set a larger"):
        sizes_of(between(5, 6, strategy="hybrid_shard", shard_size=4, mesh={"replicate": 3}))


def test_every_way_out_that_is_offered_is_one() -> None:
    """Of numbers of ranks that hybrid_shard cannot have, and of those for which a step has no blocks."""
    offered = set()
    for blocks, most, size in product(range(1, 8), range(1, 8), range(1, 8)):
        for fewest in range(1, most + 1):
            asked = {"blocks": blocks, "min": fewest, "max": most, "shard_size": size}
            try:
                sizes_with(**asked)
            except ConfigError as error:
                if most > blocks:
                    continue  # the blocks are named first
                ways = re.findall(r"(min|max|shard_size)=(\d+)", str(error).split("; set ")[1])
                assert {"shard_size"} < {name for name, _ in ways} or size > blocks, error
                for name, value in ways:
                    assert sizes_with(**{**asked, name: int(value)}), error
                    offered.add(name)
    assert offered == {"min", "max", "shard_size"}


def sizes_with(blocks: int, shard_size: int, **workers: int) -> list[int]:
    return sizes_of(
        config(
            train={"global_batch": blocks, "micro_batch": 1, "max_steps": 1},
            cluster={"workers": workers},
            parallel={"strategy": "hybrid_shard", "shard_size": shard_size},
        )
    )


def test_cadences_end_with_the_run() -> None:
    plan = resolve(config(train=train(max_steps=10, log_every=4)), 1)
    assert (plan.eval_every, plan.save_every) == (10, 10)
    assert [step for step in range(1, 11) if plan.due(step, plan.log_every)] == [4, 8, 10]


def test_the_run_lives_below_its_storage(tmp_path: Path) -> None:
    place = RunDir.of(config(run={"name": "a", "storage": str(tmp_path)}))
    assert place == RunDir(tmp_path / "a", str(tmp_path / "a" / "checkpoints"))
    assert RunDir.of(config(run={"name": "a", "storage": "~/runs"})).path == Path.home() / "runs" / "a"
    assert RunDir.of(config(run={"name": "a", "storage": "runs"})).path.is_absolute()


def test_the_founding_recipe() -> None:
    plan = resolve(config(train={"global_batch": 16, "micro_batch": 1, "max_steps": 500}), 16)
    assert (plan.division.micro_batches, plan.division.full_rounds, plan.division.fillers) == (16, 1, 0)
    assert plan.warmup_steps == 15
    assert math.prod((plan.layout.replicas, plan.layout.shard_size)) == 16


@pytest.mark.parametrize(
    ("length", "shown"),
    [
        ({"epochs": 1e300}, "train.epochs=1e+300"),
        ({"max_steps": 10**20}, "train.max_steps=100,000,000,000,000,000,000"),
    ],
)
def test_a_length_beyond_all_numbers_is_refused(length: dict[str, Any], shown: str) -> None:
    made = config(train={"global_batch": 16, "max_steps": None, **length})
    with pytest.raises(ConfigError, match=re.escape(f"{shown}: a run has at most 2**62 packed samples")):
        resolve(made, 1, Census(seq_len=8, epochs=(100,)))


@pytest.mark.parametrize("tied", [False, True])
def test_the_units_of_sharding(tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {**LLAMA, "num_hidden_layers": 4, "tie_word_embeddings": tied}
    made = make_config(tmp_path, sizes, parallel={"precision": "bf16", "wrap": 3})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(made.model_dump()))
    assert main(["--config", str(file), "--world-size", "2", "--units", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sharding"]
    units = {unit["name"]: unit["count"] for unit in found["units"]}
    assert units == ({"3 blocks": 2, "the rest": 1} if tied else {"embedding": 1, "3 blocks": 2, "norm and head": 1})
    again = "in forward, and again in backward"
    assert found["gathered"] == (again if tied else f"{again} (norm and head once for both)")
    embedding = 64 * 32 * 2
    assert [u["bytes"] for u in found["units"] if u["name"] in ("embedding", "the rest")] == [embedding + 64 * tied]
    # Five blocks on two ranks are three passes of each; a rank receives half of what is gathered, in 2 bytes, and half
    # of the gradients, in 4. The root of a tied network stays for backward, as the last unit of another does.
    blocks, passes, norm = 4 * 9280, 3, 32
    gathered = 2 * blocks + (64 * 32 + norm if tied else 2 * 64 * 32 + 64 * 32 + norm)
    assert found["weights_bytes"] == passes * gathered // 2 * 2
    assert found["gradients_bytes"] == passes * (blocks + 64 * 32 * (2 - tied) + norm) // 2 * 4
    alone = ["--config", str(file), "--world-size", "1", "--parallel.precision", "fp32", "--units"]
    assert main(alone) == 0
    assert "not sharded" in capsys.readouterr().out


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP takes no bytes there: tests/unit/test_quantized.py")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_units_of_a_quantized_base_are_its_bytes(
    tmp_path: Path, kind: Kind, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    method = {"type": "qlora", "rank": 4, "quantization": kind}
    made = make_config(tmp_path, {**LLAMA, "tie_word_embeddings": False}, parallel={"precision": "bf16"}, method=method)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(made.model_dump()))
    assert main(["--config", str(file), "--world-size", "2", "--units", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sharding"]
    units = {unit["name"]: unit for unit in found["units"]}
    # A real network's block: bytes of what its linear layers are quantized to, two for every number beside them.
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "tie_word_embeddings": False}))
    linear = [module.weight for module in model.model.layers[0].modules() if isinstance(module, torch.nn.Linear)]
    packed = sum(quantize(weight.detach(), kind).nbytes for weight in linear)
    norms = sum(p.numel() for p in model.model.layers[0].parameters()) - sum(weight.numel() for weight in linear)
    adapters = sum(4 * sum(weight.shape) for weight in linear)
    block = packed + 2 * (norms + adapters)
    assert (units["block"]["count"], units["block"]["bytes"]) == (len(model.model.layers), block)
    ends = {"embedding": model.lm_head.weight.nbytes // 2, "norm and head": (model.lm_head.weight.nbytes + 4 * 32) // 2}
    assert {name: units[name]["bytes"] for name in ends} == ends, "in 16 bits"
    passes, blocks = 3, len(model.model.layers)
    assert found["weights_bytes"] == passes * (2 * blocks * block + sum(ends.values())) // 2
    assert found["gradients_bytes"] == passes * blocks * adapters * 4 // 2, "of adapters alone, in fp32"
