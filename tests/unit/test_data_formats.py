"""Rows become documents: masks by hand, token for token, and errors that name the row."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from raytune_fsdp.config import ChatFormat, CompletionFormat, TokensFormat
from raytune_fsdp.data.formats import Document, to_document
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.errors import DataError
from raytune_fsdp.types import IGNORE

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def convert(
    row: dict[str, Any],
    format: Any,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    vocab_size: int = 1024,
) -> Document:
    return to_document(
        row, format, tokenizer=tokenizer, vocab_size=vocab_size, where="f.jsonl:7", chat_template=template
    )


def shown(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Each token as text, and whether it is trained on."""
    for token, label in zip(document.input_ids.tolist(), document.labels.tolist(), strict=True):
        assert label in (IGNORE, token)
    tokens = [tokenizer.decode([token]) for token in document.input_ids.tolist()]
    return list(zip(tokens, (document.labels != IGNORE).tolist(), strict=True))


def masked(*tokens: str) -> list[tuple[str, bool]]:
    return [(token, False) for token in tokens]


def trained(*tokens: str) -> list[tuple[str, bool]]:
    return [(token, True) for token in tokens]


def test_mask_of_one_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat(("user", "What does ZeRO-3 shard?"), ("assistant", "The gradients."))
    assert shown(convert(row, ChatFormat(), tokenizer), tokenizer) == [
        *masked("<|user|>", "What", " does", " ZeRO", "-", "3", " shard", "?", "<|assistant|>"),
        *trained("The", " gradients", ".", "<|endoftext|>"),
    ]


def test_mask_of_two_turns_after_a_system_message(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat(
        ("system", "You"), ("user", "What?"), ("assistant", "The GPU."), ("user", "And?"), ("assistant", "The model.")
    )
    assert shown(convert(row, ChatFormat(), tokenizer), tokenizer) == [
        *masked("<|system|>", "You", "<|user|>", "What", "?", "<|assistant|>"),
        *trained("The", " GPU", ".", "<|endoftext|>"),
        *masked("<|user|>", "And", "?", "<|assistant|>"),
        *trained("The", " model", ".", "<|endoftext|>"),
    ]


def test_mask_of_a_turn_that_the_user_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat(("user", "What?"), ("assistant", "The"), ("user", "The"))
    assert shown(convert(row, ChatFormat(), tokenizer), tokenizer) == [
        *masked("<|user|>", "What", "?", "<|assistant|>"),
        *trained("The", "<|endoftext|>"),
        *masked("<|user|>", "The"),
    ]


def test_mask_of_characters_of_several_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    document = convert(chat(("user", "☃"), ("assistant", "☃")), ChatFormat(), tokenizer)
    assert [flag for _, flag in shown(document, tokenizer)] == [False] * 5 + [True] * 4


def test_mask_without_generation_tags(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat(("user", "What?"), ("assistant", "The GPU."), ("user", "And?"), ("assistant", "The"))
    assert shown(convert(row, ChatFormat(), tokenizer, CHATML), tokenizer) == [
        *masked("<|user|>", "\n", "What", "?", "<|endoftext|>", "<|assistant|>", "\n"),
        *trained("The", " GPU", ".", "<|endoftext|>"),
        *masked("<|user|>", "\n", "And", "?", "<|endoftext|>", "<|assistant|>", "\n"),
        *trained("The", "<|endoftext|>"),
    ]


def test_both_ways_to_the_mask_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    tagged = (
        "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{{- '<|assistant|>\n' -}}"
        "{%- generation -%}{{- m['content'] ~ '<|endoftext|>' -}}{%- endgeneration -%}"
        "{%- else -%}{{- '<|' ~ m['role'] ~ '|>\n' ~ m['content'] ~ '<|endoftext|>' -}}{%- endif -%}{%- endfor -%}"
    )
    row = chat(("system", "Be é."), ("user", "Why ☃?"), ("assistant", "So ☃ be it."), ("user", "?"), ("assistant", "é"))
    with_tags = convert(row, ChatFormat(), tokenizer, tagged)
    without = convert(row, ChatFormat(), tokenizer, CHATML)
    assert with_tags.input_ids.tolist() == without.input_ids.tolist()
    assert with_tags.labels.tolist() == without.labels.tolist()


def test_completion_trains_every_token_and_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    document = convert({"body": "The GPU."}, CompletionFormat(type="completion", text="body"), tokenizer)
    assert shown(document, tokenizer) == trained("The", " GPU", ".", "<|endoftext|>")
    assert document.target_tokens == 3


def test_tokens_are_taken_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    document = convert({"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}, TokensFormat(type="tokens"), tokenizer)
    assert (document.input_ids.tolist(), document.labels.tolist()) == ([5, 6, 7], [-100, 6, -100])
    everything = convert({"input_ids": [5, 6, 7]}, TokensFormat(type="tokens", labels=None), tokenizer)
    assert everything.labels.tolist() == [5, 6, 7]


CHAT_ERRORS = [
    ({"text": "x"}, r"no column 'messages', it has 'text'; name the right one in the dataset's format\.messages"),
    ({"messages": None}, r"column 'messages' is null"),
    ({"messages": "hi"}, r"messages=hi is not a list of messages"),
    ({"messages": []}, r"messages=\[\] is not a list of messages"),
    ({"messages": ["hi"]}, r"messages\[0\]=hi is not an object"),
    (chat(("human", "x")), r"messages\[0\]\.role=human is missing or unknown; .*rename human to user"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\]\.role=None is missing or unknown"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content=None is missing or null, not text"),
    ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content=3 is a int, not text"),
    (chat(("user", "x"), ("assistant", " \n")), r"messages\[1\]\.content=' \\n' is empty"),
    (chat(("user", "a\ud800")), r"messages\[0\]\.content has half a surrogate pair, '\\ud800', at character 1"),
    (chat(("user", "x")), r"no token of the row can be trained on \(2 tokens.*role assistant"),
    (chat(("tool", "x"), ("assistant", "y")), r"the chat template refused the conversation \(the demo template knows"),
]

TOKEN_ERRORS = [
    ({"input_ids": [5, 1024, 6], "labels": [5, 1024, 6]}, r"token 1 has id 1024, the model's vocabulary ends at 1023"),
    ({"input_ids": [-1], "labels": [-1]}, r"token 0 has id -1"),
    ({"input_ids": [5, 1.0], "labels": []}, r"input_ids\[1\]=1\.0 is not an integer"),
    ({"input_ids": [5, True], "labels": []}, r"input_ids\[1\]=True is not an integer"),
    ({"input_ids": [], "labels": []}, r"input_ids=\[\] is not a list of token ids"),
    ({"input_ids": [5, 6]}, r"no column 'labels'; .*or set it to null to train on every token"),
    ({"input_ids": [5, 6], "labels": [5]}, r"labels has 1 entries, input_ids has 2"),
    ({"input_ids": [5, 6], "labels": [6, -100]}, r"labels\[0\]=6, input_ids\[0\]=5; .*do not shift labels"),
    ({"input_ids": [5, 6], "labels": [5, -100]}, r"no token of the row can be trained on"),
]

COMPLETION_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"text": ["x"]}, r"text=\['x'\] is a list, not text"),
    ({"text": ""}, r"text='' is empty"),
]


@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        *((ChatFormat(), row, message) for row, message in CHAT_ERRORS),
        *((TokensFormat(type="tokens"), row, message) for row, message in TOKEN_ERRORS),
        *((CompletionFormat(type="completion"), row, message) for row, message in COMPLETION_ERRORS),
    ],
)
def test_bad_rows(format: Any, row: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=rf"^f\.jsonl:7: .*{message}|^f\.jsonl:7: {message}"):
        convert(row, format, tokenizer)


def test_template_whose_turns_depend_on_each_other(tokenizer: PreTrainedTokenizerBase) -> None:
    forgetful = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    row = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(DataError, match=r"f\.jsonl:7: .*renders message 1 differently.*put \{% generation %\}"):
        convert(row, ChatFormat(), tokenizer, forgetful)


def test_token_that_is_half_the_assistants(tokenizer: PreTrainedTokenizerBase) -> None:
    glued = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"token 'What' is partly the assistant's in message 1.*put \{% generation %\}"):
        convert(chat(("user", "Wh"), ("assistant", "at")), ChatFormat(), tokenizer, glued)


def test_tokenizer_that_drops_the_end_of_a_turn() -> None:
    words = Tokenizer(models.WordLevel({"u": 0, "x": 1, "y": 2, "a": 3}, unk_token="u"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tagged = (
        "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{{- ' a ' -}}"
        "{%- generation -%}{{- m['content'] -}}{%- endgeneration -%}{%- else -%}{{- ' u ' ~ m['content'] -}}"
        "{%- endif -%}{%- endfor -%}"
    )
    row = chat(("user", "x"), ("assistant", "y"), ("user", "x"), ("assistant", "y"))
    document = convert(row, ChatFormat(), tokenizer, tagged)
    assert [flag for _, flag in shown(document, tokenizer)] == [False, False, False, True] * 2
    for spoiled in ("y\n", "\ny"):
        row["messages"][1]["content"] = spoiled
        with pytest.raises(DataError, match=r"f\.jsonl:7: the tokenizer drops characters at the border .*of 2 turns"):
            convert(row, ChatFormat(), tokenizer, tagged)


def test_template_that_prints_the_day(tokenizer: PreTrainedTokenizerBase) -> None:
    row = chat(("user", "x"), ("assistant", "y"))
    with pytest.raises(DataError, match=r"prints the current date"):
        convert(row, ChatFormat(), tokenizer, "{{ strftime_now('%Y') }}" + CHATML)
    asked = "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}{{ date_string }}"
    ids = convert(row, ChatFormat(), tokenizer, asked + CHATML).input_ids
    assert tokenizer.decode(ids.tolist()).startswith("26 Jul 2024<|user|>")


def test_tokenizer_without_what_the_format_needs() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?")))
    with pytest.raises(DataError, match=r"has no chat template, .*data\.chat_template"):
        convert(chat(("user", "x"), ("assistant", "y")), ChatFormat(), bare)
    with pytest.raises(DataError, match=r"has no eos_token"):
        convert({"text": "x x"}, CompletionFormat(type="completion"), bare)
