"""A network is built in one order, for whoever asks, and what is said of it is what is built."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.cli.plan import main
from raytune_fsdp.model.precision.quantized import QuantizedLayer
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import as_rank_of, assume_kernels, first_rank, sharding_of
from raytune_fsdp.run.build import Build, build, optimizer_of
from tests.config_text import dump_config
from tests.runs import LLAMA, make_config

GIB = 2**30


def built(config: Any, world: int, memory: int = 80 * GIB) -> Build:
    spec, plan = ModelSpec.of(config), resolve(config, world)
    with as_rank_of(world):
        site, kernels = first_rank(plan, "cpu", memory, None), partial(assume_kernels, config, spec.needs, "cpu")
        return build(config, spec.hf_config, spec.needs, site, kernels, added=spec.added)


@pytest.mark.parametrize(("memory", "gathered"), [(80 * GIB, "once a step"), (1000, "in forward, and again in")])
def test_a_plan_names_the_strategy_that_one_rank_alone_will_have(tmp_path: Path, memory: int, gathered: str) -> None:
    """Not the one of the config: with enough memory the copy in 16 bits stays from forward to backward."""
    config = make_config(tmp_path, LLAMA, parallel={"precision": "bf16"})
    said = sharding_of(config, resolve(config, 1), ModelSpec.of(config), "cpu", memory)
    assert said is not None and said["gathered"].startswith(gathered)
    found = built(config, 1, memory)
    assert found.sharding == said
    assert found.parallel.strategy == ("shard_grad_op" if memory > 1000 else "full_shard")
    assert config.parallel.strategy == "full_shard"


def test_counts_are_of_the_whole_network_in_numbers(tmp_path: Path) -> None:
    """Whatever becomes of it afterwards: bytes in 4 bits, this rank's part of layers, layers that others stand for."""
    architecture = {**LLAMA, "num_hidden_layers": 4}
    plain = built(make_config(tmp_path, architecture, parallel={"precision": "bf16"}), 2)
    cut = {"precision": "bf16", "mesh": {"tensor": 2}}
    assert built(make_config(tmp_path, architecture, parallel=cut), 2).counts == plain.counts
    method = {"type": "qlora", "rank": 2, "alpha": 4}
    config = make_config(tmp_path, architecture, parallel={"precision": "bf16"}, method=method)
    packed = built(config, 2)
    assert any(isinstance(module, QuantizedLayer) for module in packed.model.modules())
    adapters = packed.counts.parameters.trainable
    assert packed.counts.parameters.total == plain.counts.parameters.total + adapters
    optimizer = optimizer_of(packed, config)
    optimizer.init_state()
    assert {"lora_" in key for key in optimizer.state_tensors()} == {True}


def test_a_plan_names_what_is_gathered_without_the_packages_of_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(make_config(tmp_path, LLAMA, parallel={"precision": "bf16"})))
    assert main(["--config", str(file), "--units", "--world-size", "2", "--model.attention", "flash_attention_2"]) == 0
    assert "units" in capsys.readouterr().out
