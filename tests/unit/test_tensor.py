"""What is refused beside `parallel.mesh.tensor`, how ranks stand, and what a plan says of layers that are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model.attention.choose import Heads, KernelNeeds
from raytune_fsdp.model.pieces.pieces import range_of
from raytune_fsdp.model.split.cuts import check_cut
from raytune_fsdp.plan.plan import layout_of, resolve
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.prediction import Cluster, Prediction, predict
from raytune_fsdp.predict.subject import ModelSpec
from tests.formulas import summed_by_layers
from tests.models import build
from tests.runs import LLAMA, make_config
from tests.unit.test_planner_memory import LLAMA as PLANNED
from tests.unit.test_planner_memory import config_of

WIDE = {
    **PLANNED,
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"precision": "fp8"}, "mesh.tensor=2 with parallel.precision=fp8.*precision=bf16"),
        ({"reduce": "hierarchical"}, "reduce=hierarchical with parallel.mesh.tensor=2.*leave reduce out"),
        ({"strategy": "hybrid_shard", "shard_size": 3}, "shard_size=3 with parallel.mesh.tensor=2.*set it to 4"),
    ],
)
def test_what_has_no_meaning_is_refused(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ParallelConfig.model_validate({"mesh": {"tensor": 2}, **parallel})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": {"type": "qlora"}}, "method.type=qlora with parallel.mesh.tensor=2.*method.type=lora"),
        ({"method": {"type": "lora", "dora": True}}, "method.dora=true with parallel.mesh.tensor=2"),
        ({"optim": {"lr": 1e-3, "optimizer": {"type": "muon"}}}, "optimizer.type=muon with parallel.mesh.tensor=2"),
        (
            {"optim": {"lr": 1e-3, "optimizer": {"type": "adamw", "moments": "8bit"}}},
            "optimizer.moments=8bit with parallel.mesh.tensor=2.*moments=as_weights",
        ),
    ],
)
def test_what_looks_at_whole_weights_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(tmp_path, LLAMA, parallel={"mesh": {"tensor": 2}}, **sections)


def test_ranks_that_share_a_layer_are_next_to_each_other(tmp_path: Path) -> None:
    config = make_config(tmp_path, LLAMA, parallel={"mesh": {"sequence": 2, "tensor": 2}})
    layout = layout_of(config, 8)
    assert (layout.data_ranks, layout.shard_size, layout.replicas, layout.together) == (2, 4, 1, 4)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [layout.member(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [layout.counts(rank) for rank in range(8)] == [True, False] * 4
    with pytest.raises(ConfigError, match="sequence=2 times parallel.mesh.tensor=2 does not divide the world size 6"):
        layout_of(config, 6)
    hybrid = make_config(tmp_path, LLAMA, parallel={"mesh": {"tensor": 2}, "strategy": "hybrid_shard", "shard_size": 4})
    layout = layout_of(hybrid, 8)
    assert (layout.data_ranks, layout.shard_size, layout.replicas) == (4, 2, 2)


def test_what_cannot_be_shared_evenly_is_refused() -> None:
    network, heads = build("llama"), (Heads(many=4, keys=2, width=8),)
    check_cut(2, network, KernelNeeds(heads=heads))
    with pytest.raises(ConfigError, match=r"tensor=3: it must divide the 4 attention heads of a Llama.*\[1, 2, 4\]"):
        check_cut(3, network, KernelNeeds(heads=heads))
    with pytest.raises(ConfigError, match=r"tensor=4: it must divide the 2 key heads.*\[1, 2\]"):
        check_cut(4, network, KernelNeeds(heads=heads))
    with pytest.raises(ConfigError, match=r"it must divide the 5 experts"):
        check_cut(2, build("mixtral"), KernelNeeds())
    with pytest.raises(ConfigError, match="nobody would have its logits, and the loss needs them"):
        check_cut(2, network, KernelNeeds(plain_loss="model.loss says so"))
    with pytest.raises(ConfigError, match=r"its attention has dropout \(attention_dropout\)"):
        check_cut(2, build("llama", attention_dropout=0.1), KernelNeeds())


def test_parts_cover_the_whole_once() -> None:
    for size in (1, 5, 8, 131):
        for parts in (1, 2, 3, 8):
            found = [range_of(size, parts, part) for part in range(parts)]
            assert [number for first, end in found for number in range(first, end)] == [*range(size)]


def _planned(mesh: dict[str, int], world: int = 8, **parallel: Any) -> Prediction:
    config = config_of(
        WIDE, parallel={"mesh": mesh, "precision": "bf16", **parallel}, train={"micro_batch": 1, "global_batch": world}
    )
    cluster = Cluster(device=find_device("H100"), per_node=8, between=50e9)
    return predict(ModelSpec.of(config), config, resolve(config, world), cluster)


@pytest.mark.slow
def test_a_plan_knows_what_is_cut_and_what_is_added_up() -> None:
    whole, cut = _planned({}), _planned({"tensor": 2})
    assert whole.traffic is not None and cut.traffic is not None
    # Of twice as many blocks for half as many groups each gathers half, over half as many ranks.
    assert cut.traffic.bytes_of_weights / 2 <= 0.55 * whole.traffic.bytes_of_weights
    assert cut.memory.peak["gathered"] <= 0.55 * whole.memory.peak["gathered"]
    assert cut.memory.peak["activations"] < whole.memory.peak["activations"]
    assert cut.memory.start["weights"] == pytest.approx(whole.memory.start["weights"], rel=1e-3)
    assert whole.seconds.added == 0
    tokens, layers = config_of(WIDE).data.seq_len, WIDE["num_hidden_layers"]
    formula = 2 * 2 * summed_by_layers(tokens=tokens, width=1024, layers=layers, members=2)
    assert formula < cut.seconds.added < 1.5 * formula
    assert cut.seconds.moving > 0
