"""Masks by hand: every conversation below is written as pieces of text and whether the model is trained on them."""

from __future__ import annotations

import copy
import functools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.config import ChatFormat
from raytune_fsdp.data.mixture import FOURTH_ORDER, ORDER_VERSION
from raytune_fsdp.data.rows import encoding
from raytune_fsdp.data.rows.encoding import ByteTokens, SpanEncoder, is_byte_level
from raytune_fsdp.data.rows.templates import load_template
from tests.unit.made_tokenizers import GLUED, chat, convert, demo, metaspace, pieces, refusal, spelled, without_tags

# Without {% generation %}. Drops the reasoning of all but the last turn, as Qwen3 does; results are the user's.
FORGETFUL = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}<|user|>({{ m.content }})\n"
    "{%- else -%}<|{{ m.role }}|>"
    "{%- if m.reasoning_content and loop.last -%}[{{ m.reasoning_content }}]{%- endif -%}{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{%- endfor -%}<|endoftext|>\n"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
).replace("\n{%- e", "{{ '\n' }}{%- e")

# Ends a conversation with a token of its own, behind the one that ends a turn, as Phi-3 does.
FINAL = (
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- else -%}<|endoftext|>{%- endif -%}"
)

# Its generation prompt opens the reasoning, which turns in the text do not have, as DeepSeek-R1's does.
OPENS = (
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>' }}{{ '(' ~ m.reasoning_content ~ ')' if m.reasoning_content }}"
    "{{ m.content }}{%- for call in m.tool_calls or [] -%}"
    "{{ '!' ~ call.function.name ~ (call.function.arguments | tojson) }}{%- endfor -%}<|endoftext|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>[think]\n' }}{%- endif -%}"
)

# Its generation prompt opens and closes the reasoning, as that of Qwen3.5 does where it is not to think.
SHUTS = (
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>' }}{{ '[' ~ m.reasoning_content ~ ']' if m.reasoning_content }}"
    "{{ m.content ~ '<|endoftext|>' }}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>[]{%- endif -%}"
)

# What ends a turn is in {% generation %} tags of its own.
SPLIT = (
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>' }}{%- if m.role == 'assistant' -%}"
    "{%- generation -%}{{ m.content }}{%- endgeneration -%}{%- generation -%}<|endoftext|>{%- endgeneration -%}"
    "{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
)

# Headers in words, and no end of any kind.
PLAIN = (
    "{%- for m in messages -%}{{ '### ' ~ m.role ~ ':\n' ~ (m.content | trim) ~ '\n\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '### assistant:\n' }}{%- endif -%}"
)


def turns(*given: tuple[str, str]) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[role], "content": content} for role, content in given]


TWO_TURNS = turns(("s", "Be brief."), ("u", "What?"), ("a", "The model."), ("u", "And why?"), ("a", "It is so."))
CALL = {"function": {"name": "weather", "arguments": '{"city": "Ulm", "day": null}'}}
TOOL_TURNS = [
    *turns(("u", "Weather?")),
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Look."},
    *turns(("t", "rain"), ("a", "It rains."), ("u", "And?")),
    {"role": "assistant", "content": "Wait.", "reasoning_content": "Done."},
]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Weather?"},
    {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Ulm"}}'},
    {"from": "observation", "value": "rain"},
    {"from": "gpt", "value": "It rains."},
]
UNTRAINED = [dict(m, train=False) if m["content"] == "The model." else m for m in TWO_TURNS]

# What is trained on stands between « and ».
BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
WHY = "\n<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n"
LLAMA_3 = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«The model.<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd why?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«It is so.<|eot_id|>»"
)
OPENASSISTANT = (
    "<|system|>Be brief.<|endoftext|><|prompter|>What?<|endoftext|><|assistant|>«The model.<|endoftext|>»"
    "<|prompter|>And why?<|endoftext|><|assistant|>«It is so.<|endoftext|>»"
)
TOOLS_IN_CHATML = (
    "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
    "«<think>\nLook.\n</think>\n\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Ulm", "day": null}}\n</tool_call><|im_end|>»\n'
    "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n«It rains.<|im_end|>»\n<|im_start|>user\nAnd?<|im_end|>\n"
    "<|im_start|>assistant\n«<think>\nDone.\n</think>\n\nWait.<|im_end|>»\n"
)
SHAREGPT_IN_CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
    '«<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>»\n'
    "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n«It rains.<|im_end|>»\n"
)
FORGOTTEN = (
    '<|user|>Weather?<|endoftext|>\n<|assistant|>«weather({"city": "Ulm", "day": null})<|endoftext|>»\n'
    "<|user|>(rain)\n<|assistant|>«It rains.<|endoftext|>»\n"
    "<|user|>And?<|endoftext|>\n<|assistant|>«[Done.]Wait.<|endoftext|>»\n"
)
ALL_BUT_TWO = (
    "«<|system|>»Be brief.«<|endoftext|>\n<|user|>What?<|endoftext|>\n<|assistant|>»The model.<|endoftext|>"
    "«\n<|user|>And why?<|endoftext|>\n<|assistant|>It is so.<|endoftext|>\n»"
)
BEGUN = turns(("a", "The"), ("u", "What?"), ("a", "It."))
REASONED = turns(("u", "What?"), ("a", "[think]\nSo.\n[/think]It."))
PADDED = turns(("u", "What?"), ("a", " The model. "), ("u", "And?"))
MERGED = turns(("u", "The Wh"), ("a", "at model "), ("u", "is"), ("a", " so"))
CUT = turns(("u", "The mo"), ("a", "del is"), ("u", "</s>What"), ("a", "?"))

Case = tuple[PreTrainedTokenizerBase, str | None, dict[str, Any], list[dict[str, Any]], str]
CONVERSATIONS: dict[str, Case] = {
    "own template": (
        demo(),
        None,
        {},
        TWO_TURNS,
        "<|system|>Be brief.<|user|>What?<|assistant|>«The model.<|endoftext|>»"
        "<|user|>And why?<|assistant|>«It is so.<|endoftext|>»",
    ),
    "own template, user last": (
        demo(),
        None,
        {},
        turns(("u", "What?"), ("a", "The"), ("u", "The")),
        "<|user|>What?<|assistant|>«The<|endoftext|>»<|user|>The",
    ),
    "own template, several bytes": (
        demo(),
        None,
        {},
        turns(("u", "☃"), ("a", "☃é")),
        "<|user|>☃<|assistant|>«☃é<|endoftext|>»",
    ),
    "chatml": (chat(), "chatml", {}, TWO_TURNS, f"{BRIEF}«The model.<|im_end|>»{WHY}«It is so.<|im_end|>»\n"),
    "chatml, last turn": (
        chat(),
        "chatml",
        {"loss": "last_turn"},
        TWO_TURNS,
        f"{BRIEF}The model.<|im_end|>{WHY}«It is so.<|im_end|>»\n",
    ),
    "chatml, train: false": (
        chat(),
        "chatml",
        {},
        UNTRAINED,
        f"{BRIEF}The model.<|im_end|>{WHY}«It is so.<|im_end|>»\n",
    ),
    "chatml, all": (
        chat(),
        "chatml",
        {"loss": "all"},
        TWO_TURNS,
        f"«{BRIEF}The model.<|im_end|>{WHY}It is so.<|im_end|>\n»",
    ),
    "chatml, all but one": (
        chat(),
        "chatml",
        {"loss": "all"},
        UNTRAINED,
        f"«{BRIEF}»The model.<|im_end|>«{WHY}It is so.<|im_end|>\n»",
    ),
    "chatml, tools and reasoning": (chat(), "chatml", {}, TOOL_TURNS, TOOLS_IN_CHATML),
    "chatml, ShareGPT": (chat(), "chatml", {"messages": "conversations"}, SHAREGPT, SHAREGPT_IN_CHATML),
    "llama-2": (
        metaspace("prepend"),
        "llama-2",
        {},
        TWO_TURNS,
        "<s> [INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat? [/INST]« The model. </s>»"
        "<s> [INST] And why? [/INST]« It is so. </s>»",
    ),
    "llama-3": (chat(), "llama-3", {}, TWO_TURNS, LLAMA_3),
    "openassistant": (chat(), "openassistant", {}, TWO_TURNS, OPENASSISTANT),
    "no tags, reasoning dropped": (chat(), FORGETFUL, {}, TOOL_TURNS, FORGOTTEN),
    "no tags, train: false": (
        chat(),
        FORGETFUL,
        {},
        UNTRAINED[1:],
        "<|user|>What?<|endoftext|>\n<|assistant|>The model.<|endoftext|>\n"
        "<|user|>And why?<|endoftext|>\n<|assistant|>«It is so.<|endoftext|>»\n",
    ),
    "no tags, all but two": (
        chat(),
        FORGETFUL,
        {"loss": "all"},
        [dict(TWO_TURNS[0], train=False), *UNTRAINED[1:]],
        ALL_BUT_TWO,
    ),
    "no tags, assistant first": (
        chat(),
        FORGETFUL,
        {},
        BEGUN,
        "<|assistant|>«The<|endoftext|>»\n<|user|>What?<|endoftext|>\n<|assistant|>«It.<|endoftext|>»\n",
    ),
    "no tags, a token behind all": (
        chat(),
        FINAL,
        {},
        TWO_TURNS[1:],
        "<|user|>\nWhat?<|im_end|>\n<|assistant|>\n«The model.<|im_end|>»\n"
        "<|user|>\nAnd why?<|im_end|>\n<|assistant|>\n«It is so.<|im_end|>»\n<|endoftext|>",
    ),
    "no tags, prompt opens more": (
        chat(),
        OPENS,
        {},
        TWO_TURNS[1:],
        "<|user|>What?<|endoftext|><|assistant|>«The model.<|endoftext|>»"
        "<|user|>And why?<|endoftext|><|assistant|>«It is so.<|endoftext|>»",
    ),
    "no tags, prompt opens what is there": (
        chat(),
        OPENS,
        {},
        REASONED,
        "<|user|>What?<|endoftext|><|assistant|>[think]\n«So.\n[/think]It.<|endoftext|>»",
    ),
    "no tags, call behind a prompt that opens more": (
        chat(),
        OPENS,
        {},
        TOOL_TURNS[:2],
        '<|user|>Weather?<|endoftext|><|assistant|>«(Look.)!weather{"city": "Ulm", "day": null}<|endoftext|>»',
    ),
    "no tags, reasoning where the prompt has none": (
        chat(),
        SHUTS,
        {},
        TOOL_TURNS[-2:],
        "<|user|>And?<|endoftext|><|assistant|>[«Done.]Wait.<|endoftext|>»",
    ),
    "tags in two parts, last turn": (
        demo(),
        SPLIT,
        {"loss": "last_turn"},
        TWO_TURNS[1:],
        "<|user|>What?<|assistant|>The model.<|endoftext|><|user|>And why?<|assistant|>«It is so.<|endoftext|>»",
    ),
    "no tags, nothing but line breaks": (
        chat(),
        PLAIN,
        {},
        PADDED,
        "### user:\nWhat?\n\n### assistant:\n«The model.\n\n»### user:\nAnd?\n\n",
    ),
    "byte-level BPE across the border": (demo(), GLUED, {}, MERGED, "The Wh«at model »is« so»"),
    "Metaspace, always": (metaspace("always"), GLUED, {}, CUT, " The mo«del is»</s> What«?»"),
    "Metaspace, first": (metaspace("first"), GLUED, {}, CUT, " The mo«del is»</s>What«?»"),
    "Metaspace, prepended": (metaspace("prepend"), GLUED, {}, CUT, " The mo«del is»</s> What«?»"),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_mask(name: str) -> None:
    tokenizer, template, options, messages, expected = CONVERSATIONS[name]
    source = load_template(template) if template and "{" not in template else template
    format = ChatFormat(**options)
    order = FOURTH_ORDER if source == GLUED else ORDER_VERSION
    document = convert({format.messages: messages}, format, tokenizer, source, order=order)
    parts = re.split("[«»]", expected)
    assert pieces(document, tokenizer) == [(part, bool(index % 2)) for index, part in enumerate(parts) if part]


def test_mask_token_by_token() -> None:
    document = convert({"messages": TWO_TURNS[1:3]}, ChatFormat(), demo())
    tokens = [demo().decode([token]) for token in document.input_ids]
    assert tokens == ["<|user|>", "What", "?", "<|assistant|>", "The", " model", ".", "<|endoftext|>"]
    assert (document.labels != IGNORE).tolist() == [False] * 4 + [True] * 4


WORDS = st.text(
    st.sampled_from([*"aeThWnt .?\n", "é", "☃", "👍", "\u0301"]), min_size=1, max_size=12
).filter(lambda text: text.strip())  # fmt: skip
ENDS = {"chatml": "<|im_end|>", "llama-2": " <|endoftext|>", "llama-3": "<|eot_id|>", "openassistant": "<|endoftext|>"}


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(ENDS)),
    system=st.none() | WORDS,
    rounds=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=4),
    last=st.none() | WORDS,
    loss=st.sampled_from(["assistant", "last_turn", "all"]),
)
def test_both_ways_to_a_mask_agree(
    name: str, system: str | None, rounds: list[tuple[str, str, bool]], last: str | None, loss: Any
) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for question, answer, train in rounds:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, "train": train or answer == rounds[-1][1]},
        ]
    messages += [{"role": "user", "content": last}] if last else []
    source, tokenizer = load_template(name), chat()
    document = convert({"messages": messages}, ChatFormat(loss=loss), tokenizer, source)
    other = convert({"messages": messages}, ChatFormat(loss=loss), tokenizer, without_tags(source))
    assert document.input_ids.tolist() == other.input_ids.tolist()
    assert document.labels.tolist() == other.labels.tolist()
    # The tokens are the text, and what is trained is what the assistant says and how it ends.
    plain = [{key: value for key, value in message.items() if key != "train"} for message in messages]
    text = tokenizer.apply_chat_template(plain, chat_template=source, tokenize=False)
    assert tokenizer.decode(document.input_ids) == text
    if loss == "all":
        return
    answers = [m["content"] for m in messages if m["role"] == "assistant" and m["train"]]
    answers = answers[-1:] if loss == "last_turn" else answers
    clean = {"llama-2": lambda text: " " + text.strip(), "llama-3": str.strip}.get(name, str)
    expected = [clean(answer) + ENDS[name] for answer in answers]
    assert "".join(text for text, trained in pieces(document, tokenizer) if trained) == "".join(expected)


TEXT = st.lists(
    st.sampled_from([*"aeThWntmodl .?\n", "é", "☃", "The", " model", "What", "</s>", "<|endoftext|>"]), max_size=14
).map("".join)


@settings(max_examples=100, deadline=None)
@given(
    which=st.sampled_from(["demo", "always", "first", "prepend"]),
    parts=st.lists(st.tuples(TEXT, st.booleans()), min_size=1, max_size=6),
)
def test_spans_are_kept_to_the_character(which: str, parts: list[tuple[str, bool]]) -> None:
    """Whatever merges across their borders: the tokens of each part together are the part."""
    tokenizer = demo() if which == "demo" else metaspace(which)
    spans, text = [], ""
    for part, trained in parts:
        if trained and part:
            spans.append((len(text), len(text) + len(part)))
        text += part
    (tokens,) = SpanEncoder(tokenizer).encode([text], [spans])
    assert tokens.trained is not None and len(tokens.trained) == len(tokens.ids) and tokens.missed is None
    ids = tokens.ids.tolist()
    assert plain(ids, tokenizer) == plain(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer)
    trained = [token for token, flag in zip(ids, tokens.trained, strict=True) if flag]
    expected = "".join(text[start:end] for start, end in spans)
    assert plain(trained, tokenizer) == (expected if tokenizer is demo() else expected.replace(" ", ""))


@functools.cache
def normalizing() -> PreTrainedTokenizerBase:
    """Byte-level, as Qwen's: an e and an accent become one character."""
    backend = copy.deepcopy(demo().backend_tokenizer)
    backend.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@functools.cache
def swallowing() -> PreTrainedTokenizerBase:
    """Byte-level, with a special token that takes the white space behind it."""
    backend = copy.deepcopy(demo().backend_tokenizer)
    backend.add_special_tokens([AddedToken("</s>", rstrip=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@functools.cache
def swallowing_and_prefixing() -> PreTrainedTokenizerBase:
    """Puts a space in front of every piece, perhaps in place of one that was swallowed."""
    backend = copy.deepcopy(swallowing().backend_tokenizer)
    backend.pre_tokenizer = ByteLevel(add_prefix_space=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@settings(max_examples=120, deadline=None)
@example(tokenizer=swallowing_and_prefixing, parts=[(" q</s> ", False), ("7", True), ("x", False)])
@given(
    tokenizer=st.sampled_from([demo, chat, normalizing, swallowing, swallowing_and_prefixing]),
    parts=st.lists(st.tuples(TEXT, st.booleans()), min_size=1, max_size=6),
)
def test_what_is_known_by_bytes_is_what_the_tokenizer_says(tokenizer: Any, parts: list[tuple[str, bool]]) -> None:
    spans, text = [], ""
    for part, trained in parts:
        if trained and part:
            spans.append((len(text), len(text) + len(part)))
        text += part
    quick, asking = SpanEncoder(tokenizer()), SpanEncoder(tokenizer())
    asking._bytes = None
    (found,), (wanted,) = quick.encode([text], [spans]), asking.encode([text], [spans])
    assert found.ids.tolist() == wanted.ids.tolist() and found.missed == wanted.missed
    assert found.trained is not None and wanted.trained is not None
    assert found.trained.tolist() == wanted.trained.tolist()


def test_places_by_bytes() -> None:
    backend = normalizing().backend_tokenizer
    tokens = ByteTokens(backend)
    text = "<|endoftext|>The caf\u00e9 \u2603\n<|endoftext|>"
    ids = np.array(backend.encode(text).ids, dtype=np.int32)
    snow = text.index("\u2603")
    places = tokens.places(text, ids, [0, 13, snow + 1, len(text)])
    assert places is not None and places[0] == 0 and places[len(text)] == len(ids) and places[13] == 1
    assert backend.decode(ids[: places[snow + 1]].tolist(), skip_special_tokens=False) == text[: snow + 1]
    assert tokens.places(text, ids, [4]) is None, "inside of a token"
    assert tokens.places(text + " ", ids, [0]) is None, "not its tokens"
    composed = np.array(backend.encode("cafe\u0301").ids, dtype=np.int32)
    assert tokens.places("cafe\u0301", composed, [0]) is None, "normalized"
    assert is_byte_level(json.loads(backend.to_str())) and is_byte_level({"pre_tokenizer": {"type": "ByteLevel"}})
    assert not is_byte_level(json.loads(metaspace("first").backend_tokenizer.to_str()))
    assert not is_byte_level({"pre_tokenizer": None})


def plain(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokens' text; of SentencePiece without the spaces, as it puts some where none are: see the masks by hand."""
    text = spelled(ids, tokenizer)
    return text if tokenizer is demo() else text.replace(" ", "")


def test_text_is_cut_only_where_it_must_be() -> None:
    """Borders that no token stands across change no token, of this text nor of others in the batch."""
    texts = ["The model. What?", "The model. What?", "x"]
    whole = [demo()(text)["input_ids"] for text in texts]
    tokens = SpanEncoder(demo()).encode(texts, [[(3, 10)], [(1, 3)], None])
    assert tokens[0].ids.tolist() == whole[0] and tokens[2].ids.tolist() == whole[2]
    assert (
        tokens[0].trained is not None
        and tokens[0].trained.tolist() == [False, True, True, False, False, False][: len(whole[0])]
    )
    assert tokens[1].ids.tolist() == [*demo()("T")["input_ids"], *demo()("he")["input_ids"], *whole[1][1:]]
    assert tokens[2].trained is None


def test_threads_share_an_encoder_that_gives_its_bytes_up() -> None:
    """One thread finds that bytes do not tell where its tokens lie, while another one is encoding by them."""
    encoder = SpanEncoder(demo())
    whole = encoder._whole
    encoding_it, given_up = threading.Event(), threading.Event()

    class Slow:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                encoding_it.set()
                assert given_up.wait(30)
            return whole.encode_batch_fast(texts, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

    encoder._whole = Slow()  # type: ignore[assignment]
    texts, spans = ["Answer: The model is so."], [[(8, 24)]]  # a token lies across the border
    with ThreadPoolExecutor(1) as other:
        coming = other.submit(encoder.encode, texts, spans)
        assert encoding_it.wait(30)
        (here,) = encoder.encode(texts, spans)
        assert encoder._bytes is None
        given_up.set()
        (there,) = coming.result()
    assert here.ids.tolist() == there.ids.tolist() and here.trained is not None and there.trained is not None
    assert here.trained.tolist() == there.trained.tolist()


def test_batches_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["The model. " * count for count in (1, 7, 2, 40, 1, 3)]
    spans = [[(0, 3)], None, [(4, 9)], [(5, 100)], None, []]
    encoder = SpanEncoder(demo())
    once = encoder.encode(texts, spans)
    monkeypatch.setattr(encoding, "_CHARACTERS_AT_ONCE", 100)
    parts = encoder.encode(texts, spans)
    assert [tokens.ids.tolist() for tokens in parts] == [tokens.ids.tolist() for tokens in once]
    assert [None if t.trained is None else t.trained.tolist() for t in parts] == [
        None if t.trained is None else t.trained.tolist() for t in once
    ]


def test_offsets_that_leave_out_spaces() -> None:
    """The post-processor of GPT-NeoX's tokenizer says that ' model' stands for 'model'."""
    backend = copy.deepcopy(demo().backend_tokenizer)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    assert tokenizer("The model", return_offsets_mapping=True)["offset_mapping"][1] == (4, 9)
    row = {"messages": turns(("u", "The "), ("a", "model"))}
    document = convert(row, ChatFormat(), tokenizer, GLUED, order=FOURTH_ORDER)
    assert pieces(document, tokenizer) == [("The ", False), ("model", True)]


def test_end_token_that_takes_the_line_break_behind_it() -> None:
    """As Phi-3's: it is the token that generation ends with, so it is trained on and the text is not cut."""
    backend = copy.deepcopy(demo().backend_tokenizer)
    backend.add_special_tokens([AddedToken("<|im_end|>", rstrip=True), AddedToken("<|im_start|>", rstrip=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    source = load_template("chatml")
    document = convert({"messages": TWO_TURNS[1:]}, ChatFormat(), tokenizer, source)
    assert pieces(document, tokenizer) == [
        ("<|im_start|>user\nWhat?<|im_end|><|im_start|>assistant\n", False),
        ("The model.<|im_end|>", True),
        ("<|im_start|>user\nAnd why?<|im_end|><|im_start|>assistant\n", False),
        ("It is so.<|im_end|>", True),
    ]


def test_tokenizer_that_drops_characters() -> None:
    words = Tokenizer(models.WordLevel({"u": 0, "x": 1, "y": 2, "a": 3, "[END]": 4}, unk_token="u"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    source = (
        "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{{- ' a ' -}}"
        "{%- generation -%}{{- m['content'] -}}{%- endgeneration -%}{%- else -%}{{- ' u ' ~ m['content'] -}}"
        "{%- endif -%}{%- endfor -%}"
    )
    for said in ("y", "y\n", "\ny", " \n y \n"):
        document = convert(
            {"messages": turns(("u", "x"), ("a", said), ("u", "x"), ("a", "y"))}, ChatFormat(), tokenizer, source
        )
        assert document.input_ids.tolist() == [0, 1, 3, 2] * 2
        assert (document.labels != IGNORE).tolist() == [False, False, False, True] * 2
    blank = "{% for m in messages %}{{ m.content }}{% generation %}{{ ' ' }}{% endgeneration %}{% endfor %}"
    error = refusal({"messages": turns(("u", "x"), ("a", "y"))}, ChatFormat(), tokenizer, blank)
    assert error.reason == "no_targets" and "makes no token of ' '" in str(error)


FORGETS_WORDS = (
    "{% for m in messages %}{% if loop.last or m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}"
)
FLAG = "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{%- endfor -%}<|assistant|>"
CLOSES = (
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>' ~ ('[]' if m.role == 'assistant') ~ m.content }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>[' ~ '\n' }}{%- endif -%}"
)
COUNTS = "{%- for m in messages -%}{{ m.content | length ~ m.content }}{%- endfor -%}"
SWAPS = "{%- for m in messages | reverse -%}{{ m.role ~ m.content }}{%- endfor -%}"
ONE_BLOCK = "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}{% generation %}" + (
    "{% for m in messages %}{{ m.content if m.role != 'user' }}{% endfor %}{% endgeneration %}"
)


@pytest.mark.parametrize(
    ("source", "loss", "message"),
    [
        (
            FORGETS_WORDS,
            "assistant",
            r"leaves out the content of messages\[2\] \(role assistant\), which would be lost",
        ),
        (
            FLAG,
            "assistant",
            r"renders messages\[2\] with a different end when the conversation goes on.*put \{% generation",
        ),
        (CLOSES, "assistant", r"renders messages\[2\] after something other than the generation prompt"),
        (COUNTS, "assistant", r"differently when one character is added to it.*put \{% generation %\}"),
        (SWAPS, "assistant", r"renders messages\[2\] between parts of other messages"),
        (ONE_BLOCK, "last_turn", r"spans cannot be assigned to single messages, which loss=last_turn"),
    ],
)
def test_turns_that_cannot_be_found_are_not_guessed(source: str, loss: Any, message: str) -> None:
    error = refusal({"messages": TWO_TURNS}, ChatFormat(loss=loss), chat(), source)
    assert error.reason == "template" and re.match(rf"f\.jsonl:7: the chat template.*{message}", str(error)), error


def test_private_use_characters_of_a_row() -> None:
    row = {"messages": turns(("u", "a \U000f0001"), ("a", "b"))}
    assert pieces(convert(row, ChatFormat(), demo()), demo())[1] == ("b<|endoftext|>", True)
    error = refusal(row, ChatFormat(), demo(), GLUED)
    assert error.reason == "template" and "private-use characters" in str(error)
