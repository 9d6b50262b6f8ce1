"""Tokens that a run adds: what the tokenizer makes of them, and which rows they start from."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import GPT2Config

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import ModelConfig
from raytune_fsdp.config.sections.model import NewToken
from raytune_fsdp.model.weights.source import GrownWeights
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume import identity_of
from raytune_fsdp.run.tokenizer import add_tokens
from tests.models import save_checkpoint
from tests.runs import make_config, write_tokenizer
from tests.unit.made_tokenizers import demo

WANTED = [
    NewToken(text="<call>", special=True, like="ask a tool"),
    NewToken(text="tramway"),
    NewToken(text="<end>"),
]


def test_tokens_are_texts_or_say_more() -> None:
    model = ModelConfig.model_validate({"path": "x", "add_tokens": ["<a>", {"text": "<b>", "special": True}]})
    assert model.add_tokens == [NewToken(text="<a>"), NewToken(text="<b>", special=True)]
    with pytest.raises(ValidationError, match="names '<a>' twice: leave one out"):
        ModelConfig.model_validate({"path": "x", "add_tokens": ["<a>", {"text": "<a>", "like": "b"}]})


def test_each_is_one_token_and_only_control_tokens_are_left_out_of_answers() -> None:
    tokenizer = copy.deepcopy(demo())
    described = tokenizer("ask a tool", add_special_tokens=False)["input_ids"]
    text = "Die tramway<call>kommt<end>"
    plain = tokenizer(text)["input_ids"]
    rows = add_tokens(tokenizer, WANTED)
    assert rows == {1024: tuple(described), 1025: (), 1026: ()}
    ids = tokenizer(text)["input_ids"]
    assert [id_ for id_ in ids if id_ >= 1024] == [1025, 1024, 1026] and len(ids) < len(plain)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<call>", "")


def test_a_token_that_is_there_keeps_its_row(caplog: pytest.LogCaptureFixture) -> None:
    """As where a run branches from one that added it, and trained it since."""
    tokenizer = copy.deepcopy(demo())
    add_tokens(tokenizer, WANTED)
    before = tokenizer.backend_tokenizer.to_str()
    with caplog.at_level(logging.WARNING):
        assert add_tokens(tokenizer, WANTED[1:2]) == {}
    assert "'tramway' is a token of this tokenizer already" in caplog.text
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_description_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="like='' of '<x>' has no tokens: describe it in words"):
        add_tokens(copy.deepcopy(demo()), [NewToken(text="<x>", like="")])


def test_a_token_that_would_not_be_decoded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'Straße' would be 'Stra.+e' in answers.*: write it with ASCII characters"):
        add_tokens(copy.deepcopy(demo()), [NewToken(text="Straße")])


LORA = {"type": "lora", "target_modules": ["q_proj"]}
WHOLE = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("model", "method", "frozen", "way_out"),
    [
        ("llama", LORA, "lm_head.weight, model.embed_tokens.weight", r"modules_to_save \(\[embed_tokens, lm_head\]\)"),
        pytest.param(
            "llama",
            {**LORA, "modules_to_save": ["lm_head"]},
            "model.embed_tokens.weight",
            r"\(\[embed_tokens\]\)",
            marks=pytest.mark.slow,
        ),
        ("llama", {**LORA, "modules_to_save": WHOLE}, "", ""),
        pytest.param("llama", {**LORA, "target_modules": ["q_proj", *WHOLE]}, "", "", marks=pytest.mark.slow),
        pytest.param(
            "llama",
            {"type": "ia3"},
            "lm_head.weight, model.embed_tokens.weight",
            r"method.modules_to_save \(",
            marks=pytest.mark.slow,
        ),
        (
            "llama",
            {"type": "freeze", "trained": ["layers"]},
            "lm_head.weight, model.emb",
            r"trained \(\[embed_.*head\]",
        ),
        pytest.param("llama", {"type": "freeze", "trained": WHOLE}, "", "", marks=pytest.mark.slow),
        ("qwen3", LORA, "model.embed_tokens.weight", r"method.type=freeze with method.trained=\[embed_tokens\], or "),
        ("qwen3", {"type": "freeze", "trained": ["embed_tokens"]}, "", ""),
        pytest.param("qwen3", {"type": "full"}, "", "", marks=pytest.mark.slow),
    ],  # fmt: skip
)
def test_rows_that_stay_as_they_begin_are_named_with_a_way_out_that_works(
    tmp_path: Path, model: str, method: dict[str, Any], frozen: str, way_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every way out that a row of this table names is another row, without a warning."""
    pytest.importorskip("peft")
    save_checkpoint(tmp_path / "base", model)
    plain = make_config(tmp_path)
    values = {"path": str(tmp_path / "base"), "tokenizer": plain.model.tokenizer, "init": "pretrained"}
    for field, vocabulary, more in (
        ("model.add_tokens", 64, {"add_tokens": ["tramway"]}),
        ("model.resize_embeddings=true", 140, {"resize_embeddings": True}),
    ):
        write_tokenizer(tmp_path / "tokenizer", vocabulary)
        config = make_config(tmp_path, model={**values, **more, "architecture": None}, method=method)
        caplog.clear()
        prepare(config, 1)
        said = [each.getMessage() for each in caplog.records if "rows of new tokens" in each.getMessage()]
        assert len(said) == bool(frozen)
        for text in said:
            assert text.startswith(
                f"{field}: with method.type={method['type']} the rows of new tokens stay as they begin"
            )
            assert f"({frozen}" in text and re.search(way_out, text), text
            alone = method == LORA and field == "model.add_tokens"
            assert ("to train them, set method.train_added_tokens=true; " in text) == alone, text
    if method == LORA:
        caplog.clear()
        rows = make_config(
            tmp_path,
            model={**values, "add_tokens": ["tramway"], "architecture": None},
            method={**method, "train_added_tokens": True},
        )
        prepare(rows, 1)
        assert "rows of new tokens" not in caplog.text


class Stored(dict[str, torch.Tensor]):
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self[name][start:stop]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [40, 43], ids=["padded", "grown"])
def test_rows_start_as_means_however_many_ranks_read_them(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stored = Stored(embed=torch.randn(40, 8).to(dtype), head=torch.randn(40, 8).to(dtype), other=torch.randn(40, 2))
    before = {name: tensor.clone() for name, tensor in stored.items()}
    first = vocabulary - 3
    added: dict[int, tuple[int, ...]] = {first: (4, 9, 4), first + 1: (), first + 2: (7,)}
    grown = {"embed": vocabulary, "head": vocabulary} if vocabulary > 40 else {}

    def read(ranks: int) -> dict[str, torch.Tensor]:
        found = {}
        for name in stored:
            rows = vocabulary if name != "other" else 40
            step = -(-rows // ranks)
            pieces = []
            for start in range(0, rows, step):  # every rank has an object of its own
                weights = GrownWeights(stored, grown, {"embed": added, "head": added})
                pieces.append(weights.read(name, start, min(rows, start + step)))
            found[name] = torch.cat(pieces)
        return found

    whole = read(1)
    for name in ("embed", "head"):
        old = before[name].double()
        assert torch.equal(whole[name][:first], before[name][:first])
        assert torch.equal(whole[name][first], (old[4] + old[9] + old[4]).div(3).to(dtype))
        assert torch.equal(whole[name][first + 1], old.sum(0).div(40).to(dtype))
        assert torch.equal(whole[name][first + 2], before[name][7])
    assert torch.equal(whole["other"], before["other"])
    assert all(torch.equal(stored[name], before[name]) for name in stored), "what was read from is as it was"
    for ranks in (2, 3, 7):
        assert all(torch.equal(tensor, whole[name]) for name, tensor in read(ranks).items())


def test_added_tokens_are_part_of_what_a_run_is_and_none_are_as_before(tmp_path: Any) -> None:
    def identity(**model: Any) -> dict[str, Any]:
        config = make_config(tmp_path)
        config = config.model_copy(update={"model": config.model.model_copy(update=model)})
        return identity_of(config, GPT2Config(), SimpleNamespace(identity={}))  # type: ignore[arg-type]

    assert "model.add_tokens" not in identity()
    with_tokens = identity(add_tokens=WANTED)
    assert with_tokens["model.add_tokens"][0] == {"text": "<call>", "special": True, "like": "ask a tool"}
    assert {key: value for key, value in with_tokens.items() if key != "model.add_tokens"} == identity()
