"""Rows become documents, in their order; bad rows become errors that name the row, the rule and the way out."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import xxhash

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config import ChatFormat, CompletionFormat, InstructionFormat, TokensFormat
from raytune_fsdp.data.mixture import FIFTH_ORDER, FOURTH_ORDER, OLDEST_ORDER, ORDER_VERSION, SIXTH_ORDER
from raytune_fsdp.data.rows.formats import DOCUMENT_VERSION, Document, Formatter
from raytune_fsdp.data.rows.templates import load_template
from raytune_fsdp.data.sources.keys import lowest_order
from raytune_fsdp.plan.identity import named
from tests.unit.made_tokenizers import GLUED, adding, chat, convert, demo, pieces, refusal, without_tags

TEXT = CompletionFormat(type="completion")
TOKENS = TokensFormat(type="tokens")
ALL_TOKENS = TokensFormat(type="tokens", labels=None)
MASKED = TokensFormat(type="tokens", mask="mask")
ALPACA = InstructionFormat(type="instruction")
PLAIN = InstructionFormat(type="instruction", prompt="prompt", completion="completion", style="plain")
AS_CHAT = InstructionFormat(type="instruction", system="system", style="chat")


def messages(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = messages(("user", "What?"), ("assistant", "The GPU."))


def test_rows_keep_their_order_and_bad_ones_are_values() -> None:
    formatter = Formatter(ChatFormat(), tokenizer=demo(), vocab_size=1024, template=None)
    unread = RowError("f:3: broken", "json")
    rows = [messages(("user", "x")), GOOD, unread, {}, messages(("user", "y"), ("assistant", "z"))]
    results = formatter.documents(rows, [f"f:{number}" for number in range(1, 6)])
    assert [type(result) for result in results] == [RowError, Document, RowError, RowError, Document]
    assert results[2] is unread
    assert str(results[0]).startswith("f:1: ") and str(results[3]).startswith("f:4: ")
    assert isinstance(results[4], Document)
    assert demo().decode(results[4].input_ids) == "<|user|>y<|assistant|>z<|endoftext|>"
    assert formatter.documents([], []) == []


@pytest.mark.parametrize(
    ("format", "row", "template"),
    [(ChatFormat(), GOOD, "chatml"), (TEXT, {"text": "The GPU."}, None), (ALL_TOKENS, {"input_ids": [5, 6]}, None)],
)
def test_formatter_can_be_sent_to_other_processes(format: Any, row: Any, template: str | None) -> None:
    source = load_template(template) if template else None
    formatter = Formatter(format, tokenizer=chat(), vocab_size=2000, template=source)
    again = pickle.loads(pickle.dumps(formatter))
    (first,), (second,) = formatter.documents([row], ["f:1"]), again.documents([row], ["f:1"])
    assert isinstance(first, Document) and isinstance(second, Document)
    assert first.input_ids.tolist() == second.input_ids.tolist() and first.labels.tolist() == second.labels.tolist()


def test_padding_of_the_tokenizer_does_not_matter() -> None:
    tokenizer = copy.deepcopy(demo())
    tokenizer(["x", "x x"], padding=True, truncation=True, max_length=3)
    for format, row in ((TEXT, {"text": "The GPU. What?"}), (ChatFormat(), GOOD)):
        assert convert(row, format, tokenizer).input_ids.tolist() == convert(row, format, demo()).input_ids.tolist()


def test_completion_trains_every_token_and_ends() -> None:
    document = convert({"body": "The GPU."}, CompletionFormat(type="completion", text="body"), demo())
    assert pieces(document, demo()) == [("The GPU.<|endoftext|>", True)]
    assert (document.target_tokens, document.input_ids.dtype, document.labels.dtype) == (3, "int32", "int32")
    ended = convert({"text": "The GPU.<|endoftext|>"}, TEXT, demo())
    assert ended.input_ids.tolist() == document.input_ids.tolist()


@pytest.mark.parametrize(("single", "around"), [("<s> $A", ("<s>", "")), ("<s> $A <|endoftext|>", ("<s>", ""))])
def test_special_tokens_around_a_text_are_the_tokenizers(single: str, around: tuple[str, str]) -> None:
    tokenizer = adding(single)
    assert pieces(convert({"text": "What?"}, TEXT, tokenizer), tokenizer) == [("<s>What?<|endoftext|>", True)]
    document = convert({"prompt": "The Wh", "completion": "at?"}, PLAIN, tokenizer)
    assert pieces(document, tokenizer) == [("<s>The Wh", False), ("at?<|endoftext|>", True)]
    document = convert(GOOD, ChatFormat(), tokenizer, GLUED, order=FOURTH_ORDER)
    assert pieces(document, tokenizer) == [("What?", False), ("The GPU.", True)]


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A <|endoftext|>"])
def test_a_text_that_has_the_tokens_around_it_gets_no_second_ones(single: str) -> None:
    """As a chat that was rendered before. Begun runs keep both."""
    tokenizer = adding(single)
    once = [("<s>What?<|endoftext|>", True)]
    for text in ("What?", "<s>What?", "What?<|endoftext|>", "<s>What?<|endoftext|>"):
        assert pieces(convert({"text": text}, TEXT, tokenizer), tokenizer) == once, text
    document = convert({"prompt": "<s>The Wh", "completion": "at?<|endoftext|>"}, PLAIN, tokenizer)
    assert pieces(document, tokenizer) == [("<s>The Wh", False), ("at?<|endoftext|>", True)]
    older = convert({"text": "<s>What?"}, TEXT, tokenizer, order=FIFTH_ORDER)
    assert pieces(older, tokenizer) == [("<s><s>What?<|endoftext|>", True)]
    inside = convert({"text": "What?<s>What?"}, TEXT, tokenizer)
    assert pieces(inside, tokenizer) == [("<s>What?<s>What?<|endoftext|>", True)]
    versions = [
        Formatter(format, tokenizer=each, vocab_size=2000, template=None).order_version
        for format, each in ((TEXT, tokenizer), (PLAIN, tokenizer), (ALL_TOKENS, tokenizer), (TEXT, demo()))
    ]
    assert versions == [SIXTH_ORDER, SIXTH_ORDER, OLDEST_ORDER, OLDEST_ORDER]


def test_instructions_in_three_styles() -> None:
    row = {"instruction": "What?", "input": "", "output": "The GPU."}
    assert pieces(convert(row, ALPACA, demo()), demo()) == [
        (
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nWhat?\n\n### Response:\n",
            False,
        ),
        ("The GPU.<|endoftext|>", True),
    ]
    row["input"] = "A tensor."
    assert pieces(convert(row, ALPACA, demo()), demo())[0][0] == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request."
        "\n\n### Instruction:\nWhat?\n\n### Input:\nA tensor.\n\n### Response:\n"
    )
    row["system"] = "Be brief."
    with_system = convert(row, ALPACA.model_copy(update={"system": "system"}), demo())
    assert demo().decode(with_system.input_ids).startswith("Be brief.\n\n### Instruction:\nWhat?\n\n### Input:")
    assert pieces(convert(row, AS_CHAT, demo()), demo()) == [
        ("<|system|>Be brief.<|user|>What?\n\nA tensor.<|assistant|>", False),
        ("The GPU.<|endoftext|>", True),
    ]
    plain = {"prompt": "The Wh", "completion": "at?"}
    assert pieces(convert(plain, PLAIN, demo()), demo()) == [("The Wh", False), ("at?<|endoftext|>", True)]
    for format, given in ((PLAIN, plain), (AS_CHAT, row)):
        everything = convert(given, format.model_copy(update={"loss": "all"}), demo())
        assert (everything.labels == everything.input_ids).all()
    assert demo().decode(convert(plain, PLAIN.model_copy(update={"loss": "all"}), demo()).input_ids) == (
        "The What?<|endoftext|>"
    )


def test_tokens_are_taken_as_they_are() -> None:
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "mask": [0, 1, 1]}
    assert convert(row, TOKENS, demo()).labels.tolist() == [-100, 6, -100]
    assert convert(row, ALL_TOKENS, demo()).labels.tolist() == [5, 6, 7]
    assert convert(row, MASKED, demo()).labels.tolist() == [-100, 6, 7]
    assert convert({**row, "mask": [False, True, True]}, MASKED, demo()).labels.tolist() == [-100, 6, 7]
    assert convert(row, MASKED, demo()).cut(2).labels.tolist() == [-100, 6]


CALL = {"name": "weather", "arguments": {"city": "Ulm"}}
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": None, "function": CALL}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {**CALL, "arguments": '{"city": "Ulm"}'}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {**CALL, "strict": None}}], "name": None},
        {"role": "assistant", "content": "", "tool_calls": f'[{{"function": {str(CALL)}}}]'.replace("'", '"')},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
        {"from": "function_call", "value": str(CALL).replace("'", '"')},
        {"from": "tool_call", "value": f"[{CALL}]".replace("'", '"'), "role": None, "content": None},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "type": None, "function": None}], "train": None},
    ],
)
def test_calls_however_they_are_written(message: dict[str, Any]) -> None:
    row = {"messages": [{"role": "user", "content": "Weather?"}, message]}
    document = convert(row, ChatFormat(), chat(), load_template("chatml"))
    assert pieces(document, chat())[1] == (WRITTEN, True)


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_call_without_arguments(arguments: Any) -> None:
    calls = [{"function": {"name": "now", "arguments": arguments}}]
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": " \n", "tool_calls": calls}]}
    document = convert(row, ChatFormat(), chat(), load_template("chatml"))
    said = ' \n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>'
    assert pieces(document, chat())[1] == (said, True)


def test_null_is_a_value_in_json_and_a_missing_key_in_columns() -> None:
    """Arrow gives every row the keys of all others; what is JSON in a column of text is JSON."""
    arguments, tool = {"city": None, "day": [{"at": None}, None]}, {"name": "now", "default": None}
    calls = [{"function": {"name": "weather", "arguments": given}} for given in (arguments, json.dumps(arguments))]
    asked = {"role": "user", "content": "Weather?", "tool_calls": None}
    row = {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": calls}]}
    for columnar, first in ((False, arguments), (True, {"day": [{}, None]})):
        formatter = Formatter(
            ChatFormat(), tokenizer=chat(), vocab_size=5000, template=load_template("chatml"), columnar=columnar
        )
        (document,) = pickle.loads(pickle.dumps(formatter)).documents(
            [{**row, "tools": [tool, json.dumps(tool)]}], ["f"]
        )
        said = [json.dumps({"name": "weather", "arguments": given}) for given in (first, arguments)]
        expected = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in said) + "<|im_end|>"
        assert pieces(document, chat())[1] == (expected, True)
        tools = [json.dumps({"name": "now"} if columnar else tool), json.dumps(tool)]
        assert "<tools>\n{}\n{}\n</tools>".format(*tools) in pieces(document, chat())[0][0]


@pytest.mark.parametrize("tools", ['[{"name": "now"}]', [{"name": "now"}], ['{"name": "now"}']])
def test_tools_however_they_are_written(tools: Any) -> None:
    document = convert({**GOOD, "tools": tools}, ChatFormat(), chat(), load_template("chatml"))
    assert '<tools>\n{"name": "now"}\n</tools>' in chat().decode(document.input_ids)
    unread = convert({**GOOD, "tools": tools}, ChatFormat(tools=None), chat(), load_template("chatml"))
    nothing = [
        convert({**GOOD, "tools": no}, ChatFormat(), chat(), load_template("chatml")) for no in (None, [], "", " ")
    ]
    assert all(document.input_ids.tolist() == unread.input_ids.tolist() for document in nothing)


@pytest.mark.parametrize(
    ("turns", "roles"),
    [
        ([("system", "s"), ("human", "u"), ("gpt", "a")], {}),
        ([("system", "s"), ("user", "u"), ("model", "a")], {}),
        ([("system", "s"), ("user", "u"), ("bot", "a")], {}),
        ([("system", "s"), ("user", "u"), ("chatgpt", "a")], {}),
        ([("Boss", "s"), ("gpt", "u"), ("Me", "a")], {"Boss": "system", "gpt": "user", "Me": "assistant"}),
        ([("system", "s"), ("human", "u"), ("function_call", "a")], {"function_call": "assistant"}),
    ],
)
def test_names_of_roles_and_keys(turns: list[tuple[str, str]], roles: dict[str, str]) -> None:
    expected = [("<|system|>s<|user|>u<|assistant|>", False), ("a<|endoftext|>", True)]
    for role, content in (("role", "content"), ("from", "value")):
        given = [{role: name, content: text, "weight": None} for name, text in turns]
        assert pieces(convert({"messages": given}, ChatFormat(roles=roles), demo()), demo()) == expected
    own = [{"who": name, "says": text, "role": 3, "content": 4} for name, text in turns]
    format = ChatFormat(messages="m", role="who", content="says", roles=roles)
    assert pieces(convert({"m": own}, format, demo()), demo()) == expected


@pytest.mark.parametrize("name", ["tool", "function", "observation", "function_response"])
def test_results_of_tools(name: str) -> None:
    row = {
        "messages": [{"from": "human", "value": "?"}, {"from": name, "value": "rain"}, {"from": "gpt", "value": "So."}]
    }
    text = chat().decode(convert(row, ChatFormat(), chat(), load_template("chatml")).input_ids)
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in text


PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two?"}]
PROMPT += [{"role": "assistant", "content": "Three."}, {"role": "user", "content": "And what?"}]
COMPLETION = [{"role": "assistant", "content": "The GPU."}]
OF_LISTS = ChatFormat(prompt="prompt", messages="completion")


@pytest.mark.parametrize("template", ["chatml", "llama-3"])
def test_a_prompt_and_a_completion_of_messages_are_trained_on_as_by_trl(template: str) -> None:
    """It renders the prompt with the head of an answer, and all tokens after these are trained on; here the end of the
    turn is the last of them, without the line that templates begin after it."""
    tokenizer, source = chat(), load_template(template)
    for tags in (source, without_tags(source)):
        document = convert({"prompt": PROMPT, "completion": COMPLETION}, OF_LISTS, tokenizer, tags)

        def rendered(turns: list[dict[str, str]], text: str = tags, **options: Any) -> list[int]:
            return list(tokenizer.encode(tokenizer.apply_chat_template(
                turns, chat_template=text, tokenize=False, **options
            ), add_special_tokens=False))  # fmt: skip

        asked, whole = rendered(PROMPT, add_generation_prompt=True), rendered(PROMPT + COMPLETION)
        assert whole[: len(asked)] == asked and document.input_ids.tolist() == whole
        by_trl = np.arange(len(whole)) >= len(asked)
        line = len(tokenizer.decode(whole)) - len(tokenizer.decode(whole).rstrip("\n"))
        trained = document.labels != IGNORE
        assert trained[len(asked) : len(whole) - line].all() and not (trained & ~by_trl).any()
        joined = {"messages": [{**each, "weight": 0} for each in PROMPT] + COMPLETION}
        assert convert(joined, ChatFormat(), tokenizer, tags).labels.tolist() == document.labels.tolist()
        everything = convert({"prompt": PROMPT, "completion": COMPLETION}, OF_LISTS.model_copy(
            update={"loss": "all"}), tokenizer, tags)  # fmt: skip
        assert (everything.labels != IGNORE).all()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"completion": COMPLETION}, "has no column 'prompt', it has 'completion'; name the right one in"),
        ({"prompt": "And what?", "completion": COMPLETION}, "prompt=And what?"),
        ({"prompt": [], "completion": COMPLETION}, "prompt=[] has no messages"),
        ({"prompt": [{"role": "user"}], "completion": COMPLETION}, "prompt[0].content is missing or null"),
        ({"prompt": PROMPT, "completion": PROMPT[:1]}, "no token of the row can be trained on"),
    ],
)
def test_prompts_of_messages_that_are_none(row: dict[str, Any], said: str) -> None:
    assert said in str(refusal(row, OF_LISTS, chat(), load_template("chatml")))


def test_a_run_that_was_begun_before_prompts_of_messages_is_the_same_run() -> None:
    assert "prompt" not in named("format", ChatFormat())
    assert named("format", OF_LISTS)["prompt"] == "prompt" and lowest_order(OF_LISTS, []) == FOURTH_ORDER


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "The ", "image_url": None}, {"type": "text", "text": "GPU."}]
    document = convert(messages(("user", "What?"), ("assistant", parts)), ChatFormat(), demo())
    assert pieces(document, demo())[1] == ("The GPU.<|endoftext|>", True)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_by_any_of_its_names(key: str) -> None:
    row = messages(("user", "What?"), ("assistant", "So."))
    row["messages"][1][key] = "Hm."
    document = convert(row, ChatFormat(), chat(), load_template("chatml"))
    assert pieces(document, chat())[1] == ("<think>\nHm.\n</think>\n\nSo.<|im_end|>", True)
    for nothing in ("", "\n\n", None):
        row["messages"][1][key] = nothing
        assert pieces(convert(row, ChatFormat(), chat(), load_template("chatml")), chat())[1] == ("So.<|im_end|>", True)


@pytest.mark.parametrize("empty", ["", " \n", []])
def test_empty_messages_that_are_usual(empty: Any) -> None:
    """A system message that is there for the form; a tool that has nothing to say."""
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    row = messages(("system", empty), ("user", "Weather?"), ("tool", empty), ("assistant", "So."), ("developer", empty))
    row["messages"].insert(2, called)
    said = empty or ""
    expected = [
        (f"<|im_start|>system\n{said}<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n", False),
        (WRITTEN, True),
        (
            f"\n<|im_start|>user\n<tool_response>\n{said}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("So.<|im_end|>", True),
        (f"\n<|im_start|>developer\n{said}<|im_end|>\n", False),
    ]
    for source in (load_template("chatml"), without_tags(load_template("chatml"))):
        assert pieces(convert(row, ChatFormat(), chat(), source), chat()) == expected


def assistant(**keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **keys}]}


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "x"}, "missing_column", "no column 'messages', it has 'text'; set the dataset's format to"),
    ({"messages": None}, "null", "column 'messages' is null"),
    ({"messages": "hi"}, "wrong_type", "messages=hi is not a list of messages"),
    ({"messages": []}, "empty", "messages=[] has no messages"),
    ({"messages": ["hi"]}, "wrong_type", "messages[0]=hi is not an object"),
    (messages(("narrator", "x")), "unknown_role", "messages[0].role=narrator is missing or unknown; it must be one"),
    ({"messages": [{"from": "alien", "value": "x"}]}, "unknown_role", "messages[0].from=alien is missing or unknown"),
    ({"messages": [{"content": "x"}]}, "unknown_role", "messages[0].from=None is missing or unknown"),
    ({"messages": [{"role": 3, "content": "x"}]}, "unknown_role", "messages[0].role=3 is missing or unknown"),
    ({"messages": [{"role": "user"}]}, "null", "messages[0].content is missing or null, not text"),
    (messages(("user", None)), "null", "is missing or null, not text"),
    (messages(("user", 3)), "wrong_type", "messages[0].content=3 is not text but int"),
    (messages(("user", ""), ("assistant", "y")), "empty", "messages[0].content='' is empty"),
    (messages(("tool", None), ("assistant", "y")), "null", "messages[0].content is missing or null"),
    (messages(("user", "x"), ("assistant", " \n")), "empty", "messages[1].content=' \\n' is empty"),
    (messages(("user", [{"type": "image", "url": "u"}])), "wrong_type", "messages[0].content[0]={'type': 'image'"),
    (messages(("user", [{"type": "image_url"}])), "wrong_type", "is not text, and only text can be trained on: leave"),
    (messages(("user", [{"type": "input_audio"}])), "wrong_type", "or train on them with TRL's SFTTrainer"),
    (messages(("user", ["x"])), "wrong_type", "messages[0].content[0]=x is not {"),
    (messages(("user", "a\ud800")), "invalid_utf8", "messages[0].content has half a surrogate pair, '\\ud800'"),
    (messages(("user", "x")), "no_targets", "no token of the row can be trained on (2 tokens"),
    (assistant(train=False), "no_targets", "it needs a message of the assistant that the template marks"),
    (assistant(train="no"), "wrong_type", "messages[1].train=no is not true or false"),
    (assistant(train=0), "wrong_type", "messages[1].train=0 is not true or false"),
    (assistant(tool_calls=3), "wrong_type", "messages[1].tool_calls=3 is not a list of calls"),
    (assistant(tool_calls="[{"), "wrong_type", "messages[1].tool_calls=[{ is not a list of calls as JSON"),
    (assistant(tool_calls=[{"id": "1"}]), "wrong_type", "messages[1].tool_calls[0]={'id': '1'} is not a call"),
    (assistant(tool_calls=[{"name": "f", "arguments": "{"}]), "wrong_type", "arguments={ is not an object as JSON"),
    (assistant(tool_calls=[{"name": "f", "arguments": "[1]"}]), "wrong_type", "arguments=[1] is not an object"),
    (assistant(reasoning_content=["x"]), "wrong_type", "messages[1].reasoning_content=['x'] is not text but list"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "wrong_type", "only the assistant"),
    ({"messages": [{"from": "function_call", "value": "f()"}]}, "wrong_type", "value=f() is not a call as JSON"),
    ({**GOOD, "tools": 3}, "wrong_type", "tools=3 is not a list of JSON schemas; correct the row, or set"),
    ({**GOOD, "tools": "[{"}, "wrong_type", "tools=[{ is not a list of JSON schemas as JSON"),
    ({**GOOD, "tools": [3]}, "wrong_type", "tools=[3] is not a list of JSON schemas"),
    (messages(("tool", "x"), ("assistant", "y")), "template", "the chat template refused the conversation"),
    (assistant(reasoning_content="x"), "template", "leaves out the reasoning_content of messages[1]"),
    (assistant(tool_calls=[CALL]), "template", "leaves out tool_calls of messages[1], which"),
    ({**GOOD, "tools": [{"name": "f"}]}, "template", "leaves out the tools, which would be lost"),
]  # fmt: skip

BAD_TOKENS: list[tuple[dict[str, Any], str, str]] = [
    ({"labels": [5]}, "missing_column", "no column 'input_ids', it has 'labels'"),
    ({"input_ids": None}, "null", "column 'input_ids' is null"),
    ({"input_ids": "5 6", "labels": []}, "wrong_type", "input_ids=5 6 is not a list of integers"),
    ({"input_ids": [], "labels": []}, "empty", "input_ids=[] has no tokens"),
    ({"input_ids": [5, 1.0], "labels": []}, "wrong_type", "input_ids[1]=1.0 is not an integer"),
    ({"input_ids": [5, True], "labels": []}, "wrong_type", "input_ids[1]=True is not an integer"),
    ({"input_ids": [5, None], "labels": []}, "wrong_type", "input_ids[1]=None is not an integer"),
    ({"input_ids": [5, 1024], "labels": [5, 1024]}, "outside_vocabulary", "token 1 has id 1024, the model's voc"),
    ({"input_ids": [-1, 5], "labels": [-1, 5]}, "outside_vocabulary", "token 0 has id -1"),
    ({"input_ids": [5, 2**40], "labels": [5, 6]}, "outside_vocabulary", "input_ids[1]=1099511627776 is larger"),
    ({"input_ids": [5, 6]}, "missing_column", "no column 'labels'; name the right one in the"),
    ({"input_ids": [5, 6], "labels": None}, "null", "column 'labels' is null"),
    ({"input_ids": [5, 6], "labels": [5]}, "wrong_type", "labels has 1 entries, input_ids has 2"),
    ({"input_ids": [5, 6], "labels": [6, -100]}, "wrong_type", "labels[0]=6, input_ids[0]=5; it must be -100 or equal"),
    ({"input_ids": [5, 6], "labels": [5, True]}, "wrong_type", "labels[1]=True is not an integer"),
    ({"input_ids": [5, 6], "labels": [5, -100]}, "no_targets", "no token of the row can be trained on"),
]  # fmt: skip

BAD_MASKS: list[tuple[dict[str, Any], str, str]] = [
    ({"input_ids": [5, 6]}, "missing_column", "no column 'mask'; name the right one in the dataset's format.mask"),
    ({"input_ids": [5, 6], "mask": [0, 2]}, "wrong_type", "mask[1]=2, input_ids[1]=6; it must be 1 where"),
    ({"input_ids": [5, 6], "mask": [0, 0.5]}, "wrong_type", "mask[1]=0.5 is not an integer"),
    ({"input_ids": [5, 6], "mask": [1, 0]}, "no_targets", "or mask must be 1"),
]

BAD_TEXTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "missing_column", "no column 'text', it has none; name the right one in the dataset's format.text"),
    ({"text": None}, "null", "column 'text' is null"),
    ({"text": ["x"]}, "wrong_type", "text=['x'] is not text but list"),
    ({"text": ""}, "empty", "text='' is empty"),
    ({"text": "\ud800"}, "invalid_utf8", "text has half a surrogate pair, '\\ud800', at character 0"),
    ({"text": "<|endoftext|>"}, "no_targets", "a text needs at least two tokens"),
]

BAD_INSTRUCTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"instruction": [{"role": "user"}], "output": "x"}, "wrong_type", "is not text; for lists of messages, set"),
    ({"output": "x"}, "missing_column", "no column 'instruction'"),
    ({"instruction": "x"}, "missing_column", "no column 'output', it has 'instruction'; name"),
    ({"instruction": None, "output": "x"}, "null", "column 'instruction' is null"),
    ({"instruction": "x", "output": " "}, "empty", "output=' ' is empty"),
    ({"instruction": "x", "output": 3}, "wrong_type", "output=3 is not text but int"),
    ({"instruction": "x", "output": "y", "input": 3}, "wrong_type", "input=3 is not text but int"),
    ({"instruction": "x", "output": "y\ud800"}, "invalid_utf8", "output has half a surrogate pair"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "row", "reason", "message"),
    [
        (format, *case)
        for format, cases in (
            (ChatFormat(), BAD_CHATS),
            (TOKENS, BAD_TOKENS),
            (MASKED, BAD_MASKS),
            (TEXT, BAD_TEXTS),
            (ALPACA, BAD_INSTRUCTIONS),
            (AS_CHAT, BAD_INSTRUCTIONS),
        )
        for case in cases
    ],
)
def test_bad_rows(format: Any, row: dict[str, Any], reason: str, message: str) -> None:
    error = refusal(row, format, demo(), vocab_size=1024)
    assert error.reason == reason and message in str(error), error
    assert str(error).startswith("f.jsonl:7: ") and "\n" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason) == (str(error), reason)


@pytest.mark.parametrize(
    "keys",
    [
        {"tool_calls": [{"name": "f", "arguments": '{"x": "\\ud800"}'}]},
        {"reasoning_content": "\ud800"},
        {"tools": [{"name": "f\ud800"}]},
    ],
)
def test_half_a_character_anywhere(keys: dict[str, Any]) -> None:
    row = {**assistant(**{key: value for key, value in keys.items() if key != "tools"}), "tools": keys.get("tools")}
    error = refusal(row, ChatFormat(), chat(), load_template("chatml"))
    assert error.reason == "invalid_utf8" and "half a surrogate pair" in str(error)


def test_template_that_leaves_out_a_role() -> None:
    """The system message must not be lost without a word, even if its text is in the conversation anyway."""
    deaf = "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    for said in ("Be brief.", "What", "u"):
        error = refusal(messages(("system", said), ("user", "What?"), ("assistant", "It.")), ChatFormat(), demo(), deaf)
        assert error.reason == "template" and "leaves out the content of messages[0] (role system)" in str(error)
    kept = "{% for m in messages %}{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}{% endfor %}"
    error = refusal(assistant(tool_calls=[CALL]), ChatFormat(), demo(), kept)
    assert "leaves out the content of messages[1] (role assistant)" in str(error)
    row = assistant(tool_calls=[CALL, CALL], content="")
    assert "leaves out tool_calls of messages[1]" in str(refusal(row, ChatFormat(), demo(), kept))


# What templates that are in use do to reasoning, as few lines as it takes.
LAST_CUT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ (m.content | string).split('</think>')[-1] }}<|endoftext|>{% endfor %}"
)
MIDDLE_CUT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('<think>')[0] ~ m.content.split('</think>')[-1] }}"
    "<|endoftext|>{% endfor %}"
)
MOVED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if '</think>' in m.content %}"
    "[{{ m.content.split('</think>')[0].split('<think>')[-1] | trim }}]{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}<|endoftext|>{% endfor %}"
)
ONLY_WITH_CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and m.tool_calls %}{{ m.reasoning_content }}"
    "{% endif %}{{ m.content }}<|endoftext|>{% endfor %}"
)
THOUGHT = "<think>\nIt is\n  small.\n</think>\n\nSo."


@pytest.mark.parametrize(
    ("template", "keys", "lost"),
    [
        (LAST_CUT, {"content": THOUGHT}, "'It is\\n  small.' in the content of messages[3]"),
        (MIDDLE_CUT, {"content": f"Hm. {THOUGHT}"}, "'It is\\n  small.' in the content of messages[3]"),
        (ONLY_WITH_CALLS, {"reasoning_content": "Hm."}, "the reasoning_content of messages[3]"),
        (MOVED, {"content": THOUGHT}, None),
        (MOVED, {"content": "a < b, b<c and 1>0"}, None),
    ],
)
def test_the_last_turn_is_trained_as_it_is_given(template: str, keys: dict[str, str], lost: str | None) -> None:
    """A template may drop the reasoning of earlier turns; that of the last turn would be lost silently."""
    row = {"messages": [*GOOD["messages"], {"role": "user", "content": "Why?"}, {**GOOD["messages"][1], **keys}]}
    if lost is None:
        assert convert(row, ChatFormat(), demo(), template).target_tokens
    else:
        error = refusal(row, ChatFormat(), demo(), template)
        assert error.reason == "template" and f"the chat template leaves out {lost}, which would be" in str(error)
    followed = {"messages": [*row["messages"], {"role": "user", "content": "Why?"}]}
    assert convert(followed, ChatFormat(), demo(), template).target_tokens


UNENDED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
TAGS_TOO_NARROW = (
    "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}{% endgeneration %}<|endoftext|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "loss", "order", "warnings"),
    [
        (UNENDED, "assistant", FOURTH_ORDER, 1),
        (UNENDED, "assistant", ORDER_VERSION, 0),  # the next message ends it
        (UNENDED, "all", FOURTH_ORDER, 0),
        (UNENDED + "{{ raise_exception('no') }}", "assistant", FOURTH_ORDER, 0),
        (TAGS_TOO_NARROW, "last_turn", ORDER_VERSION, 1),
        (load_template("chatml"), "assistant", FOURTH_ORDER, 0),
        (without_tags(load_template("llama-3")), "assistant", FOURTH_ORDER, 0),
        (None, "assistant", FOURTH_ORDER, 0),
    ],
)
def test_template_that_ends_no_turn(
    template: str | None, loss: Any, order: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "raytune_fsdp.data.rows.formats"):
        formatter = Formatter(ChatFormat(loss=loss), tokenizer=demo(), vocab_size=5000, template=template, order=order)
        formatter.documents([GOOD, GOOD], ["f:1", "f:2"])
    assert len(caplog.messages) == warnings
    assert all("does not learn to end its turn" in m and "data.chat_template" in m for m in caplog.messages)


def golden_documents() -> list[Document]:
    """A few rows through every format, style, loss and shipped template, and through a template without tags."""
    texts = {"prompt": "What?\n", "input": "The GPU.", "output": "It is so. é☃", "system": "Be brief.", "text": "x"}
    documents = [convert(texts, TEXT, demo())]
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "mask": [0, 1, 1]}
    documents += [convert(row, format, demo()) for format in (TOKENS, ALL_TOKENS, MASKED)]
    for style in ("alpaca", "plain", "chat"):
        for loss in ("completion", "all"):
            for system, context in ((None, None), (None, "input"), ("system", "input")):
                format = InstructionFormat(
                    type="instruction", prompt="prompt", system=system, input=context, style=style, loss=loss
                )
                documents.append(convert(texts, format, demo()))
    talk = messages(("system", "Be brief."), ("human", "What?"), ("gpt", "It."), ("user", "Why?"), ("model", " So. "))
    muted = {"messages": [*talk["messages"][:2], {**talk["messages"][2], "train": False}, *talk["messages"][3:]]}
    shipped = [load_template(name) for name in ("chatml", "llama-2", "llama-3", "openassistant")]
    dated = "{{ date_string }}" + str(demo().chat_template)
    for template in (*shipped, *map(without_tags, shipped), dated, GLUED):
        order = FOURTH_ORDER if template == GLUED else ORDER_VERSION
        for loss in ("assistant", "last_turn", "all"):
            documents += [convert(row, ChatFormat(loss=loss), chat(), template, order=order) for row in (talk, muted)]
    calls = messages(("function_call", str([CALL]).replace("'", '"')), ("observation", "rain"), ("gpt", "It rains."))
    calls["messages"][0]["reasoning_content"] = "Hm."
    documents.append(convert({**calls, "tools": [CALL]}, ChatFormat(), chat(), shipped[0]))
    return documents


def test_documents_are_those_of_their_version() -> None:
    golden = xxhash.xxh3_128()
    for document in golden_documents():
        for part in (document.input_ids, document.labels):
            golden.update(np.array([len(part), *part], dtype="<i4").tobytes())
    assert (DOCUMENT_VERSION, golden.hexdigest()) == (2, "b42937d9b49342cb40e8e51cf10ed98e"), (
        "rows become other tokens or masks than before: raise DOCUMENT_VERSION, so that no cached window and no run "
        "that was begun is continued with them, and write the new hash here"
    )


def test_tokens_outside_the_vocabulary_of_the_model() -> None:
    formatter = Formatter(TEXT, tokenizer=demo(), vocab_size=500, template=None)
    low, high = formatter.documents([{"text": "The"}, {"text": "The ZeRO sharding"}], ["f:1", "f:2"])
    assert isinstance(low, Document)
    assert isinstance(high, RowError) and high.reason == "outside_vocabulary"
    assert "model.resize_embeddings=true" in str(high)


def test_slow_tokenizers_are_refused_for_text() -> None:
    class Slow:
        is_fast = False
        added_tokens_decoder: dict[int, Any] = {}

    for format in (ChatFormat(), TEXT, ALPACA):
        with pytest.raises(DataError, match=r"Slow is not a fast tokenizer.*format\.type=tokens"):
            Formatter(format, tokenizer=Slow(), vocab_size=9, template=None)  # type: ignore[arg-type]
    (document,) = Formatter(ALL_TOKENS, tokenizer=Slow(), vocab_size=9, template=None).documents(  # type: ignore[arg-type]
        [{"input_ids": [5, 6]}], ["f:1"]
    )
    assert isinstance(document, Document) and (document.labels != IGNORE).all()
