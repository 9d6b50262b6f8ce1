"""Ranks that share samples (`parallel.mesh.sequence`), before one is started: what they cannot draw alike is refused,
and what they will exchange is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.launch.worker import alone
from raytune_fsdp.model.split.sequence import _exchange, check_sequence
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.advise.changes import with_changes
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.host import host_needs
from raytune_fsdp.predict.page.text import as_page
from raytune_fsdp.predict.planned import Planned
from raytune_fsdp.predict.prediction import Cluster, predict
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import sharding_of
from raytune_fsdp.record.console import event_in_words, gibibytes
from raytune_fsdp.record.names import SHARDED
from tests.models import ARCHITECTURES, EXPERTS, architecture
from tests.runs import LLAMA, make_config
from tests.unit.test_planner_memory import config_of

_SMALL = {"vocab_size": 131, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
OPT = {
    "model_type": "opt", **_SMALL, "ffn_dim": 64, "max_position_embeddings": 128, "word_embed_proj_dim": 32,
}  # fmt: skip
BIOGPT = {
    "model_type": "biogpt", **_SMALL, "intermediate_size": 64, "max_position_embeddings": 128,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def network(name: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": name, **{**ARCHITECTURES, **EXPERTS}[name], **changes}


def needs_of(architecture: dict[str, Any], **overrides: Any) -> Any:
    config = config_of(architecture)
    model = config.model.model_copy(update={"overrides": overrides})
    return ModelSpec.of(FinetuneConfig.model_validate(config.model_copy(update={"model": model}))).needs


def refusal(architecture: dict[str, Any], **overrides: Any) -> str:
    needs = needs_of(architecture, **overrides)
    check_sequence(1, needs)  # one rank with whole samples draws for all tokens
    with pytest.raises(ConfigError) as refused:
        check_sequence(2, needs)
    assert refused.value.exit_code == 2
    return str(refused.value)


def as_values(way_out: str) -> dict[str, float]:
    """The overrides that a message names."""
    named = way_out.rpartition("; set ")[2].removesuffix(", or parallel.mesh.sequence=1").split(", ")
    fields = (each.removeprefix("model.overrides.").split("=") for each in named)
    return {name: float(value) for name, value in fields}


@pytest.mark.parametrize(
    ("architecture", "rates", "where"),
    [
        (OPT, {"dropout": 0.1}, "OPTDecoderLayer"),
        (network("starcoder2"), {"residual_dropout": 0.1}, "Starcoder2MLP"),
        (network("starcoder2"), {"embedding_dropout": 0.1}, "Starcoder2Model"),
        (BIOGPT, {"hidden_dropout_prob": 0.1}, "BioGptDecoderLayer"),
        (network("mixtral"), {"router_jitter_noise": 0.1}, "MixtralSparseMoeBlock"),
    ],
    ids=["opt", "starcoder2", "starcoder2-embedding", "biogpt", "mixtral-noise"],
)
def test_random_numbers_of_a_network_s_own_code_are_refused(
    architecture: dict[str, Any], rates: dict[str, float], where: str
) -> None:
    """They would be drawn for a part as if it were a whole; the way out that the message names works."""
    said = refusal({**architecture, "attention_dropout": 0.0}, **rates)
    assert said.startswith("parallel.mesh.sequence=2: the code of a ") and where in said
    assert all(f"{name}={value:g}" in said for name, value in rates.items())
    check_sequence(2, needs_of({**architecture, "attention_dropout": 0.0}, **as_values(said)))


@pytest.mark.parametrize(
    ("architecture", "rates"),
    [
        (network("gpt2", attn_pdrop=0.0), {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        (network("gpt_neox"), {"hidden_dropout": 0.1}),
        (network("phi"), {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    ],
    ids=["gpt2", "gpt_neox", "phi"],
)
def test_dropout_modules_are_shared(architecture: dict[str, Any], rates: dict[str, float]) -> None:
    check_sequence(2, needs_of(architecture, **rates))


@pytest.mark.parametrize(
    ("architecture", "rate"),
    [(network("llama"), "attention_dropout"), (network("gpt2"), "attn_pdrop")],
    ids=["llama", "gpt2"],
)
def test_attention_dropout_is_refused_by_its_name(architecture: dict[str, Any], rate: str) -> None:
    said = refusal(architecture, **{rate: 0.1})
    assert said == (
        f"parallel.mesh.sequence=2: attention dropout ({rate}=0.1) draws a mask over all pairs of tokens of all heads, "
        f"and ranks that share samples have some heads each; set model.overrides.{rate}=0.0, or "
        "parallel.mesh.sequence=1"
    )
    check_sequence(2, needs_of(architecture, **as_values(said)))


def test_rotations_that_ask_for_the_longest_document_are_refused() -> None:
    """Each rank would ask for that of its own part."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    longrope = {**LLAMA, "rope_parameters": {**rope, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}
    said = refusal(longrope)
    assert said.startswith("parallel.mesh.sequence=2: its rotary embedding (longrope) is another one")
    assert said.endswith("; set data.seq_len=32, or parallel.mesh.sequence=1")
    config = config_of(longrope)
    short = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": 32})})
    check_sequence(2, ModelSpec.of(short).needs)


def test_queries_that_are_scaled_by_their_place_in_a_row_are_refused() -> None:
    """Each rank would begin with the first place."""
    scaled = architecture("llama4_text", floor_scale=32, no_rope_layers=[0, 1])
    said = refusal(scaled)
    assert said.startswith("parallel.mesh.sequence=2: it scales queries from token 32 of a row on (floor_scale)")
    assert said.endswith("; set data.seq_len to less than 16, or parallel.mesh.sequence=1")
    assert needs_of({**scaled, "floor_scale": 8192}).unshared is None


def test_what_is_exchanged_is_a_tensor_with_memory() -> None:
    """And not one that waits for it when an operation of torch reads it."""
    with alone(torch.device("cpu")):
        given = torch.ones(1, 3, requires_grad=True)
        found = _exchange(given, dist.group.WORLD)
        found.sum().backward()
    assert type(found) is torch.Tensor and given.grad is not None and type(given.grad) is torch.Tensor


@pytest.mark.parametrize(
    ("parallel", "method", "times"),
    [
        pytest.param({}, {}, 8, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": "full"}, {}, 12, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": "selective"}, {}, 12, marks=pytest.mark.slow),
        ({"activation_checkpointing": "every_n", "recompute_every": 3}, {}, 10),
        # Below what is trained nothing comes back, and nothing is computed again.
        pytest.param(
            {"activation_checkpointing": "full"},
            {"type": "freeze", "trained": ["layers.[23]", "lm_head"]},
            8,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["none", "full", "selective", "every_n", "freeze"],
)
def test_what_attention_exchanges_is_said_and_is_what_the_trace_has(
    tmp_path: Path, parallel: dict[str, Any], method: dict[str, Any], times: int
) -> None:
    config = make_config(
        tmp_path, {**LLAMA, "num_hidden_layers": 4}, train={"global_batch": 4, "micro_batch": 2, "max_steps": 3},
        parallel={"precision": "bf16", "mesh": {"sequence": 2}, **parallel}, **({"method": method} if method else {}),
    )  # fmt: skip
    spec = ModelSpec.of(config)
    said = sharding_of(config, resolve(config, 2), spec, "cuda", 80 << 30)
    assert said is not None
    # Two blocks of two samples of 48 tokens; 4 heads of queries and results, 2 of keys and values, of width 8; half of
    # what goes to the other rank is received by each. Two bytes a number.
    layer = 2 * 96 // 2 * (2 * 4 + 2 * 2) * 8 // 2 * 2
    assert said["attention_bytes"] == times * layer
    cluster = Cluster(device=find_device("A100-80GB"))
    found = predict(spec, config, 2, cluster)
    assert found.seconds.exchanged == times * layer
    assert f" and {gibibytes(times * layer)} for attention" in event_in_words(SHARDED, said)


def test_the_page_says_what_attention_exchanges(tmp_path: Path) -> None:
    config = make_config(tmp_path, LLAMA, parallel={"precision": "bf16", "mesh": {"sequence": 2}})
    for sequence, expected in ((1, 0), (2, 1)):
        mesh = config.parallel.mesh.model_copy(update={"sequence": sequence})
        here = config.model_copy(update={"parallel": config.parallel.model_copy(update={"mesh": mesh})})
        found = predict(ModelSpec.of(here), here, 2, Cluster(device=find_device("A100-80GB")))
        # Without what else `plan` looks for: each would be dozens of predictions.
        page = as_page(
            Planned(
                prediction=found, host_needs=host_needs(here, found), advice=(), largest_micro_batch=None,
                allowed_micro_batch=1, paying_micro_batch=None, step_down=None, alternatives=(), shared=None,
                price=None, free=None, stopping=None, basis="its config",
            )
        )  # fmt: skip
        assert page.count("GB a GPU of it for attention)") == expected


@pytest.mark.slow
def test_the_page_on_meshes_has_the_planner_s_figures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mesh.md").read_text()
    recipe = load_config("llama3-8b-131072-8gpus", ["--train.max_steps", "10", "--train.epochs", "null"])
    subject, cluster = ModelSpec.of(recipe), Cluster(device=find_device("A100-80GB"))
    for members in (1, 2, 4, 8):
        found = predict(subject, with_changes(recipe, {"parallel.mesh.sequence": members}), 8, cluster)
        cells = [
            f"{members}", f"{recipe.data.seq_len // members:,}", f"{found.needed / 2**30:.1f} GiB",
            f"{found.memory.peak['activations'] / 2**30:.1f} GiB", "fits" if found.fits else "does not fit",
            f"{found.seconds.exchanged / 1e9:.1f} GB", f"{found.seconds.step:.1f} s",
        ]  # fmt: skip
        assert f"| {' | '.join(cells)} |" in page
