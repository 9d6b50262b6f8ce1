"""The demo: it can be rebuilt, and is what its description says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from raytune_fsdp.demo import CLASSES, CONVERSATIONS, HELDOUT, PREFERENCES, TOKENIZER
from raytune_fsdp.demo.make_classes import classes
from raytune_fsdp.demo.make_preferences import first_part, pairs
from raytune_fsdp.demo.make_tokenizer import make_tokenizer


def conversations(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_tokenizer_can_be_made_again(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == sorted(path.name for path in TOKENIZER.iterdir())
    for name in made:
        assert (tmp_path / name).read_bytes() == (TOKENIZER / name).read_bytes(), name


def test_tokenizer_loads_without_a_network() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    assert tokenizer.is_fast and len(tokenizer) == 1024
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    text = "Any text: ☃ é 12345\n\t  spaces"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|user|>Hi<|assistant|>"


@pytest.mark.parametrize("path", [CONVERSATIONS, HELDOUT])
def test_answers_are_short(path: Path) -> None:
    for messages in conversations(path):
        assert messages[-1]["role"] == "assistant"
        assert all(len(m["content"].split()) <= 25 for m in messages if m["role"] == "assistant")


def test_heldout_asks_in_other_words() -> None:
    def questions(path: Path) -> list[str]:
        return [m["content"] for messages in conversations(path) for m in messages if m["role"] == "user"]

    assert len(conversations(CONVERSATIONS)) >= 160 and 12 <= len(conversations(HELDOUT)) <= 20
    assert not set(questions(CONVERSATIONS)) & set(questions(HELDOUT))


def test_preferences_can_be_made_again_and_are_for_short_answers() -> None:
    rows = [json.loads(line) for line in PREFERENCES.read_text(encoding="utf-8").splitlines()]
    assert rows == list(pairs()) and len(rows) == len(conversations(CONVERSATIONS))
    for row, (*prompt, _) in zip(rows, conversations(CONVERSATIONS), strict=True):
        (short,), (long,) = ([each["content"] for each in row[side]] for side in ("chosen", "rejected"))
        assert row["prompt"] == prompt and len(short) < len(long)
    assert sum(row["chosen"][0]["content"] not in row["rejected"][0]["content"] for row in rows) >= 20, (
        "parts of answers"
    )
    assert first_part("It is fast, and safe.") == "It is fast."
    assert first_part("No. It is safe.") is None and first_part("Fast, small, and safe.") is None


def test_classes_can_be_made_again_and_are_as_many_of_each() -> None:
    rows = [json.loads(line) for line in CLASSES.read_text(encoding="utf-8").splitlines()]
    assert rows == list(classes())
    plain, wordy = ([row["messages"] for row in rows if row["label"] == label] for label in ("plain", "wordy"))
    assert plain == conversations(CONVERSATIONS) and len(wordy) == len(plain)
    for short, long in zip(plain, wordy, strict=True):
        assert short[:-1] == long[:-1] and short[-1]["content"] in long[-1]["content"] != short[-1]["content"]
