"""What blocks do in training (computing again, waiting on the host, being compiled) and how they are grouped for
sharding changes memory and time, and never a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.record.jsonl import read_events, read_trajectory
from tests.ranks import run_ranks
from tests.runs import GPT2, LLAMA, largest_difference, make_config, train_rank

UNTIED = {**LLAMA, "num_hidden_layers": 4, "tie_word_embeddings": False}
DROPOUT = {**GPT2, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
"""Its embeddings are tied."""

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"activation_checkpointing": "full"},
    "every_n": {"activation_checkpointing": "every_n", "recompute_every": 3},
    "selective": {"activation_checkpointing": "selective"},
    "offload": {"activation_offload": True},
    "full-offload": {"activation_checkpointing": "full", "activation_offload": True},
    "cpu-offload": {"cpu_offload": True},
    "wrap": {"wrap": 3},
    "wrap-selective-kept": {"wrap": 2, "activation_checkpointing": "selective", "strategy": "shard_grad_op"},
}


def train_all(configs: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[list[Any]]]:
    """Train them one after the other. How many tensors each sent to the host, and its first step's gradients."""
    from raytune_fsdp.model import offload_activations
    from raytune_fsdp.step import train_step

    sent: list[int] = []
    first: list[list[Any]] = []
    send, local_gradients = offload_activations.Offload._send, train_step.local_gradients

    def counted(self: Any, *tensors: Any) -> Any:
        sent[-1] += 1
        return send(self, *tensors)

    def noted(parameters: Any) -> Any:
        found = local_gradients(parameters)
        first[-1] = first[-1] or [gradient.double().numpy().copy() for gradient in found]
        return found

    offload_activations._SMALLEST = 1
    offload_activations.Offload._send = counted  # type: ignore[method-assign]
    train_step.local_gradients = noted
    for values in configs:
        sent.append(0)
        first.append([])
        assert train_rank(values) is False
    return sent, first


def run_modes(
    directory: Path, architecture: Mapping[str, Any], precision: str, world: int, modes: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int], list[dict[str, Any]]]:
    """Trajectories, tensors that were sent to the host, and each rank's gradients, by mode."""
    configs = {
        name: make_config(
            directory,
            architecture,
            run={"name": name},
            parallel={"precision": precision, **mode},
            train={"global_batch": 10, "micro_batch": 2, "max_steps": 4},
        )
        for name, mode in modes.items()
    }
    found = run_ranks(train_all, world, [config.model_dump() for config in configs.values()])
    rows = {name: read_trajectory(directory / "runs" / name / "metrics.jsonl") for name in modes}
    sent = dict(zip(modes, found[0][0], strict=True))
    return rows, sent, [dict(zip(modes, gradients, strict=True)) for _, gradients in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "precision", "world"),
    [
        pytest.param(UNTIED, "fp32", 1, id="llama-fp32-1"),
        pytest.param(UNTIED, "bf16", 1, id="llama-bf16-1"),
        pytest.param(DROPOUT, "fp32", 2, id="gpt2-fp32-2"),
        pytest.param(UNTIED, "bf16", 2, id="llama-bf16-2"),
    ],
)
def test_every_mode_gives_the_same_trajectory(
    tmp_path: Path, architecture: Mapping[str, Any], precision: str, world: int
) -> None:
    rows, sent, _ = run_modes(tmp_path, architecture, precision, world, MODES)
    for name in MODES:
        assert rows[name] == rows["none"], name
    assert sent["none"] == sent["full"] == 0
    layers, micro_batches = architecture.get("num_hidden_layers", 2), 4 * (5 if world == 1 else 3)
    assert sent["full-offload"] >= layers * micro_batches, "each block's input"
    assert sent["offload"] > sent["full-offload"]


@pytest.mark.parametrize(
    ("architecture", "world", "names"),
    [
        pytest.param(DROPOUT, 2, ["selective"], marks=pytest.mark.slow),
        pytest.param(UNTIED, 1, ["none", "full", "selective"], marks=pytest.mark.slow),
        pytest.param(UNTIED, 2, ["full-offload", "none", "offload", "wrap"], marks=pytest.mark.slow),
        pytest.param(DROPOUT, 1, ["none", "full", "offload"], marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_give_the_same_gradients_and_settle(
    tmp_path: Path, architecture: Mapping[str, Any], world: int, names: list[str]
) -> None:
    modes = {"none": {}, **{f"compiled-{name}": {**MODES[name], "compile": True} for name in names}}
    rows, _, gradients = run_modes(tmp_path, architecture, "fp64", world, modes)
    bound = 1e-6 if architecture is UNTIED else 1e-12  # Llama's norms compute in fp32, whatever they get
    for name in modes:
        for of_rank in gradients:
            for eager, compiled in zip(of_rank["none"], of_rank[name], strict=True):
                assert abs(compiled - eager).max(initial=0) <= bound * abs(eager).max(initial=1e-30), name
        for key in ("loss", "grad_norm"):
            assert largest_difference(rows["none"], rows[name], key) < bound, (name, key)
        events = read_events(tmp_path / "runs" / name / "events.jsonl")
        chosen = next(event["fields"] for event in events if event["event"] == "kernels")
        assert chosen["blocks"] == ("eager" if name == "none" else "compiled")
        steps = [event["fields"]["step"] for event in events if event["event"] == "compiled"]
        assert (name == "none") == (not steps)
        assert not any(event["event"] == "kernels_changed" for event in events), "it has given way"
        assert max(steps, default=0) <= 3, "a graph was compiled after step 3"
