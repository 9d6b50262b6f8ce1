"""What counts as getting on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from raytune_fsdp.answers import answers
from raytune_fsdp.pulse import pulse
from tests.runs import GPT2, write_tokenizer


def test_every_token_of_an_answer(tmp_path: Path) -> None:
    """Many long answers take longer than a run may be silent."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**GPT2, "eos_token_id": None}))
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    tokenizer.eos_token = None
    before = pulse().beats
    answers(model, tokenizer, ["w5 w6"] * 2, max_new_tokens=7, device=torch.device("cpu"), attention="sdpa")
    assert pulse().beats == before + 14
    model(torch.tensor([[5]]))
    assert pulse().beats == before + 14, "other passes are none of its business"
