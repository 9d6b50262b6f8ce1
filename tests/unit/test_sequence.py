"""What ranks that share samples (`parallel.mesh.sequence`) cannot draw alike is refused before one is started."""

from __future__ import annotations

from typing import Any

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.model.sequence import check_sequence
from raytune_fsdp.planner.subject import Subject
from tests.models import ARCHITECTURES, EXPERTS
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
    return Subject.of(FinetuneConfig.model_validate(config.model_copy(update={"model": model}))).needs


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
