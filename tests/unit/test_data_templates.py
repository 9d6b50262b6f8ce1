"""The shipped chat templates: written out by hand, what they refuse, and that generation starts where training does."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import raytune_fsdp
from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config import ChatFormat, CompletionFormat, InstructionFormat
from raytune_fsdp.data.rows.formats import Formatter
from raytune_fsdp.data.rows.templates import TemplateChoice, chat_template, load_template
from tests.unit.made_tokenizers import chat, convert, demo, refusal

SHIPPED = ("chatml", "llama-2", "llama-3", "openassistant")

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is FSDP?"}
ANSWER = {"role": "assistant", "content": "Sharding."}
WHY = {"role": "user", "content": "Why?"}
MEMORY = {"role": "assistant", "content": "Memory."}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
TIME = {"type": "function", "function": {"name": "time", "arguments": {}}}


def rendered(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(chat().apply_chat_template(messages, chat_template=load_template(name), tokenize=False, **options))


EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is FSDP?<|im_end|>\n"
        "<|im_start|>assistant\nSharding.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\nMemory.<|im_end|>\n"
    ),
    "llama-2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is FSDP? [/INST] Sharding. <|endoftext|>"
        "<s>[INST] Why? [/INST] Memory. <|endoftext|>"
    ),
    "llama-3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhat is FSDP?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nSharding.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nMemory.<|eot_id|>"
    ),
    "openassistant": (
        "<|system|>Be brief.<|endoftext|><|prompter|>What is FSDP?<|endoftext|><|assistant|>Sharding.<|endoftext|>"
        "<|prompter|>Why?<|endoftext|><|assistant|>Memory.<|endoftext|>"
    ),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_conversation_is_written_as_the_format_says(name: str) -> None:
    assert rendered(name, [SYSTEM, QUESTION, ANSWER, WHY, MEMORY]) == EXPECTED[name]


def test_chatml_writes_tools_as_hermes_and_qwen_do() -> None:
    messages = [
        SYSTEM,
        QUESTION,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.\n", "tool_calls": [CALL, TIME]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "", "tool_calls": [TIME]},
        {"role": "tool", "content": "one"},
        ANSWER,
    ]
    assert rendered("chatml", messages, tools=[WEATHER]) == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nWhat is FSDP?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nSharding.<|im_end|>\n"
    )


@pytest.mark.parametrize("first", [SYSTEM, {"role": "developer", "content": "Be brief."}, None])
def test_chatml_has_each_message_once_with_tools(first: dict[str, Any] | None) -> None:
    text = rendered("chatml", [*([first] if first else []), QUESTION, ANSWER], tools=[WEATHER])
    assert text.count("# Tools\n") == text.count("What is FSDP?") == 1 and text.count("Be brief.") == bool(first)
    assert text.count("<|im_start|>system\n") == 1


@pytest.mark.parametrize("name", SHIPPED)
def test_generation_starts_where_training_does(name: str) -> None:
    """The generation prompt and then what is trained is the text, in characters and in tokens."""
    tokenizer, template = chat(), load_template(name)
    messages = [SYSTEM, QUESTION, ANSWER, WHY, MEMORY]
    ends = {"chatml": "\n"}.get(name, "")
    for count in (3, 5):
        document = convert({"messages": messages[:count]}, ChatFormat(loss="last_turn"), tokenizer, template)
        trained = document.input_ids[document.labels != IGNORE]
        prompt = tokenizer.apply_chat_template(
            messages[: count - 1], chat_template=template, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert document.input_ids.tolist() == [*prompt, *trained.tolist(), *tokenizer.encode(ends)]
        assert tokenizer.decode(trained).strip().startswith(messages[count - 1]["content"])
        assert not tokenizer.decode(trained).endswith("\n")


def test_threads_that_render_at_once_do_not_get_spans_of_each_other() -> None:
    template = chat_template(chat(), TemplateChoice(text=load_template("chatml")))
    conversations = [[QUESTION, {"role": "assistant", "content": "word " * n}] for n in range(400)]
    expected = [template.render(messages, None) for messages in conversations]
    assert len({tuple(spans) for _, spans in expected}) == 400
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda messages: template.render(messages, None), conversations)) == expected
    finally:
        sys.setswitchinterval(interval)


TOOL = {"role": "tool", "content": "rain"}
CALLING = {"role": "assistant", "content": "x", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("llama-2", {"messages": [QUESTION, QUESTION, ANSWER]}, "take turns, user first; user is out of turn"),
        ("llama-2", {"messages": [SYSTEM, ANSWER]}, "take turns, user first; assistant is out of turn"),
        ("llama-2", {"messages": [QUESTION, ANSWER, SYSTEM, WHY, MEMORY]}, "has no role system here"),
        ("llama-2", {"messages": [QUESTION, ANSWER, TOOL, MEMORY]}, "has no role tool"),
        ("llama-2", {"messages": [QUESTION, CALLING]}, "has no tool calls"),
        ("llama-2", {"messages": [QUESTION, ANSWER], "tools": [WEATHER]}, "has no tools"),
        ("llama-3", {"messages": [QUESTION, ANSWER, TOOL, MEMORY]}, "has no role tool"),
        ("llama-3", {"messages": [QUESTION, CALLING]}, "has no tool calls"),
        ("llama-3", {"messages": [QUESTION, ANSWER], "tools": [WEATHER]}, "has no tools"),
        ("openassistant", {"messages": [{"role": "developer", "content": "x"}, ANSWER]}, "has no role developer"),
        ("openassistant", {"messages": [QUESTION, CALLING]}, "has no tool calls"),
        ("openassistant", {"messages": [QUESTION, ANSWER], "tools": [WEATHER]}, "has no tools"),
    ],
)
def test_what_a_format_cannot_express_is_refused(name: str, row: dict[str, Any], reason: str) -> None:
    error = refusal(row, ChatFormat(), chat(), load_template(name))
    assert error.reason == "template"
    assert f"{name}" in str(error) and reason in str(error) and "data.chat_template" in str(error)


@pytest.mark.parametrize("name", ["llama-2", "openassistant"])
def test_format_that_ends_turns_with_a_token_that_is_not_there(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=demo().backend_tokenizer)
    error = refusal({"messages": [QUESTION, ANSWER]}, ChatFormat(), tokenizer, load_template(name))
    assert error.reason == "template" and f"{name} needs a tokenizer with" in str(error)


def test_templates_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    shipped = Path(raytune_fsdp.__file__).parent / "data" / "rows" / "templates"
    assert sorted(path.stem for path in shipped.iterdir()) == list(SHIPPED)
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages }} é", encoding="utf-8")
    assert load_template(str(own)) == "{{ messages }} é"
    with pytest.raises(DataError, match=r"data\.chat_template='chatlm'.*one of chatml, .*openassistant; nearest: cha"):
        load_template("chatlm")
    own.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"data\.chat_template='.*own\.jinja' cannot be read \(.*codec"):
        load_template(str(own))
    with pytest.raises(DataError, match=r"cannot be read \(.*Is a directory"):
        load_template(str(tmp_path))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", r"not valid Jinja: .*endfor.*\(line 1\); correct it"),
        ("{{ messages | nonsense }}", r"not valid Jinja: No filter named 'nonsense'"),
        (
            "{% macro say(m) %}{% generation %}{{ m }}{% endgeneration %}{% endmacro %}",
            r"has \{% generation %\} inside another block \(line 1: a macro",
        ),
        ("{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x }}", r"inside another block"),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            r"inside another block \(line 1: .* or generation\)",
        ),
    ],
)
def test_templates_that_no_row_can_be_used_with(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Formatter(ChatFormat(), tokenizer=demo(), vocab_size=5000, template=template)


def test_date_that_a_template_asks_for_is_always_the_same() -> None:
    template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}{{ date_string }}"
    )
    own = str(demo().chat_template)
    document = convert({"messages": [QUESTION, ANSWER]}, ChatFormat(), demo(), template + own)
    assert demo().decode(document.input_ids).startswith("26 Jul 2024<|user|>What")
    document = convert({"messages": [QUESTION, ANSWER]}, ChatFormat(), demo(), "{{ strftime_now('%Y') }}" + own)
    assert demo().decode(document.input_ids).startswith("2024<|user|>What")


def test_tokenizer_without_what_a_format_needs() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?")))
    for format in (ChatFormat(), InstructionFormat(type="instruction", style="chat")):
        message = r"has no chat template, .*data\.chat_template to one of chatml, .* or a file"
        with pytest.raises(DataError, match=message):
            Formatter(format, tokenizer=bare, vocab_size=5, template=None)
    for format in (CompletionFormat(type="completion"), InstructionFormat(type="instruction")):
        with pytest.raises(DataError, match=r"has no eos_token, which must end every document with format\.type="):
            Formatter(format, tokenizer=bare, vocab_size=5, template=None)


def test_template_for_tools_of_a_tokenizer_with_several() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=demo().backend_tokenizer, eos_token="<|endoftext|>")
    tokenizer.chat_template = {
        "default": str(demo().chat_template),
        "tool_use": "{{ tools }}" + str(demo().chat_template),
    }
    row: dict[str, Any] = {"messages": [QUESTION, ANSWER]}
    assert tokenizer.decode(convert(row, ChatFormat(), tokenizer).input_ids).startswith("<|user|>")
    row["tools"] = [WEATHER]
    assert tokenizer.decode(convert(row, ChatFormat(), tokenizer).input_ids).startswith("[{'type': 'function'")
