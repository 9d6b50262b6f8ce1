"""A packed document sees itself only, or packing is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ConfigError
from tests.ranks import resident_ranks
from tests.runs import GPT2, LLAMA, make_config, train_rank

OPT = {
    "model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 48, "word_embed_proj_dim": 32,
}  # fmt: skip


def packed_and_alone(values: dict[str, Any]) -> float:
    """Largest difference between the logits of packed documents and of the same documents alone."""
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.run.assemble import assemble
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    model = assemble(config, *prepare_on_rank0(config), torch.device("cpu")).model.eval()
    documents = [torch.arange(3, 3 + length) for length in (5, 1, 17, 9)]
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    largest, start = 0.0, 0
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        for document in documents:
            alone = model(input_ids=document[None], use_cache=False).logits[0]
            largest = max(largest, (packed[start : start + len(document)] - alone).abs().max().item())
            start += len(document)
    return largest


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        pytest.param(GPT2, "eager", id="gpt2-eager"),
        pytest.param(LLAMA, "sdpa", id="llama-sdpa"),
        pytest.param(GPT2, "sdpa", id="gpt2-sdpa", marks=pytest.mark.slow),
        pytest.param(LLAMA, "eager", id="llama-eager", marks=pytest.mark.slow),
    ],
)
def test_packed_equals_alone(tmp_path: Any, architecture: dict[str, Any], attention: str) -> None:
    config = make_config(tmp_path, architecture).model_dump()
    config["model"]["attention"] = attention
    config["parallel"]["precision"] = "fp32"
    assert max(resident_ranks(packed_and_alone, 2, config)) < 1e-5


def test_an_architecture_whose_documents_see_each_other_is_refused(tmp_path: Any) -> None:
    """OPT takes position_ids, but its mask does not look at them. With a kernel that is told the borders it packs."""
    train = {"global_batch": 4, "micro_batch": 2, "max_steps": 1}
    config = make_config(tmp_path, OPT, run={"name": "borders"}, train=train)
    assert resident_ranks(train_rank, 2, config.model_dump()) == [False, False]
    config = make_config(tmp_path, OPT, train=train, model={"attention": "sdpa"})
    # By the name that transformers gives the class, not FSDPOPTForCausalLM.
    with pytest.raises(AssertionError, match="in OPTForCausalLM with .* packed documents see each other"):
        resident_ranks(train_rank, 2, config.model_dump())
    assert not (tmp_path / "runs" / "run").exists()
    data = {**config.model_dump()["data"], "packing": "none"}
    padded = make_config(tmp_path, OPT, train=train, data=data)
    assert resident_ranks(train_rank, 2, padded.model_dump()) == [False, False]


def test_prompts_are_checked_before_anything_starts(tmp_path: Any) -> None:
    from raytune_fsdp.base.errors import DataError
    from raytune_fsdp.run.prepare import prepare

    for prompt, complaint in (("", "has 0 tokens"), ("w5 " * 60, "fewer than the 48 positions")):
        config = make_config(tmp_path, GPT2, eval={"prompts": [prompt]})
        with pytest.raises((DataError, ConfigError), match=complaint):
            prepare(config, 1)
