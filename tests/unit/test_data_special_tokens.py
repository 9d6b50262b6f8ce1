"""The text of special tokens in the contents of rows: kept, encoded as plain text, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config import ChatFormat, CompletionFormat, InstructionFormat
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.templates import load_template
from tests.unit.made_tokenizers import chat, metaspace, pieces, spelled, without_tags

CHATML = load_template("chatml")


def made(row: Any, format: Any, policy: Any, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> Any:
    formatter = Formatter(format, tokenizer=tokenizer, vocab_size=5000, template=template, special_tokens=policy)
    (document,) = formatter.documents([row], ["f.jsonl:7"])
    return document


def turns(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def specials(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Which of a document's tokens are special, without the bytes that one of the tokenizers counts among these."""
    ids = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special and not t.content.startswith("<0x")}
    return [str(tokenizer.convert_ids_to_tokens(int(i))) for i in document.input_ids if int(i) in ids]


@pytest.mark.parametrize("template", [CHATML, without_tags(CHATML)])
@pytest.mark.parametrize("loss", ["assistant", "last_turn", "all"])
def test_escaped_special_tokens_are_plain_text_and_masks_stay(template: str, loss: Any) -> None:
    row = turns("a <|im_end|>\n<|im_start|>system", "It ends <|im_end|><|im_end|> here.")
    kept = made(row, ChatFormat(loss=loss), "keep", chat(), template)
    escaped = made(row, ChatFormat(loss=loss), "escape", chat(), template)
    assert specials(kept, chat()).count("<|im_end|>") == 5
    assert specials(escaped, chat()) == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]
    text = [(text, trained) for text, trained in pieces(escaped, chat())]
    assert text == pieces(kept, chat())  # the same text, and the same of it trained on


def test_rows_without_special_tokens_are_the_same_under_every_policy() -> None:
    row = turns("What?", "The GPU. <|im_ end|>")
    documents = [made(row, ChatFormat(), policy, chat(), CHATML) for policy in ("keep", "escape", "error")]
    for other in documents[1:]:
        assert np.array_equal(other.input_ids, documents[0].input_ids)
        assert np.array_equal(other.labels, documents[0].labels)


@pytest.mark.parametrize("scheme", ["always", "first", "prepend"])
def test_escape_with_tokenizers_that_put_a_space_in_front(scheme: str) -> None:
    tokenizer = metaspace(scheme)
    escaped = made({"text": "The GPU</s>. <s>What?</s>"}, CompletionFormat(type="completion"), "escape", tokenizer)
    assert specials(escaped, tokenizer) == ["</s>"]  # the end, added
    assert spelled(escaped.input_ids.tolist(), tokenizer).strip() == "The GPU</s>. <s>What?</s></s>"
    assert (escaped.labels == escaped.input_ids).all()


@pytest.mark.parametrize("style", ["alpaca", "plain", "chat"])
def test_escape_in_instructions(style: Any) -> None:
    format = InstructionFormat(type="instruction", style=style)
    row = {"instruction": "What is <|im_end|>?", "output": "<|endoftext|> ends."}
    escaped = made(row, format, "escape", chat(), CHATML)
    own = {"chat": ["<|im_start|>", "<|im_end|>"] * 2}.get(style, ["<|endoftext|>"])
    assert specials(escaped, chat()) == own
    trained = chat().decode(escaped.input_ids[escaped.labels != IGNORE])
    assert trained.startswith("<|endoftext|> ends.")


def test_tools_and_calls_are_escaped_too() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "<|im_end|>"}}}
    row = turns("Do.", "Done.")
    row["messages"][1]["tool_calls"] = [call]
    row["tools"] = [{"type": "function", "function": {"name": "f", "description": "<|im_start|>"}}]
    escaped = made(row, ChatFormat(), "escape", chat(), CHATML)
    assert specials(escaped, chat()) == ["<|im_start|>", "<|im_end|>"] * 3


def test_error_names_the_row_and_the_token() -> None:
    for format, row in (
        (ChatFormat(), turns("a <|im_end|>", "b")),
        (CompletionFormat(type="completion"), {"text": "a <|im_end|>"}),
        (InstructionFormat(type="instruction"), {"instruction": "a", "output": "<|im_end|>"}),
    ):
        error = made(row, format, "error", chat(), CHATML)
        assert isinstance(error, RowError) and error.reason == "special_token"
        assert str(error).startswith("f.jsonl:7: the text has the special token '<|im_end|>'; ")
