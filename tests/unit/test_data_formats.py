"""Rows become documents, in their order; bad rows become errors that name the row, the rule and the way out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from raytune_fsdp.config import ChatFormat, CompletionFormat, InstructionFormat, TokensFormat
from raytune_fsdp.data.formats import Document, Formatter
from raytune_fsdp.data.templates import load_template
from raytune_fsdp.errors import DataError, RowError
from raytune_fsdp.types import IGNORE
from tests.unit.made_tokenizers import chat, convert, demo, pieces, refusal

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
    backend = copy.deepcopy(chat().backend_tokenizer)
    special = [(text, backend.token_to_id(text)) for text in ("<s>", "<|endoftext|>")]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    assert pieces(convert({"text": "What?"}, TEXT, tokenizer), tokenizer) == [("<s>What?<|endoftext|>", True)]
    document = convert({"prompt": "The Wh", "completion": "at?"}, PLAIN, tokenizer)
    assert pieces(document, tokenizer) == [("<s>The Wh", False), ("at?<|endoftext|>", True)]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert pieces(convert(GOOD, ChatFormat(), tokenizer, template), tokenizer) == [("What?", False), ("The GPU.", True)]


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
        # As Arrow gives them: with the keys of all other rows.
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "arguments": {"city": "Ulm", "to": None}}]},
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


@pytest.mark.parametrize("tools", ['[{"name": "now"}]', [{"name": "now", "strict": None}], ['{"name": "now"}']])
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
    row["messages"][1][key] = ""
    assert pieces(convert(row, ChatFormat(), chat(), load_template("chatml")), chat())[1] == ("So.<|im_end|>", True)


def assistant(**keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **keys}]}


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "x"}, "missing_column", "no column 'messages', it has 'text'; name the right one in the"),
    ({"messages": None}, "null", "column 'messages' is null"),
    ({"messages": "hi"}, "wrong_type", "messages=hi is not a list of messages"),
    ({"messages": []}, "empty", "messages=[] has no messages"),
    ({"messages": ["hi"]}, "wrong_type", "messages[0]=hi is not an object"),
    (messages(("narrator", "x")), "unknown_role", "messages[0].role=narrator is missing or unknown; it must be one"),
    ({"messages": [{"from": "alien", "value": "x"}]}, "unknown_role", "messages[0].from=alien is missing or unknown"),
    ({"messages": [{"content": "x"}]}, "unknown_role", "messages[0].from=None is missing or unknown"),
    ({"messages": [{"role": 3, "content": "x"}]}, "unknown_role", "messages[0].role=3 is missing or unknown"),
    ({"messages": [{"role": "user"}]}, "null", "messages[0].value is missing or null, not text"),
    (messages(("user", None)), "null", "is missing or null, not text"),
    (messages(("user", 3)), "wrong_type", "messages[0].content=3 is a int, not text"),
    (messages(("user", "x"), ("assistant", " \n")), "empty", "messages[1].content=' \\n' is empty"),
    (messages(("user", [{"type": "image", "url": "u"}])), "wrong_type", "messages[0].content[0]={'type': 'image'"),
    (messages(("user", ["x"])), "wrong_type", "messages[0].content[0]=x is not {"),
    (messages(("user", "a\ud800")), "invalid_utf8", "messages[0].content has half a surrogate pair, '\\ud800'"),
    (messages(("user", "x")), "no_targets", "no token of the row can be trained on (2 tokens"),
    (assistant(train=False), "no_targets", "a conversation needs a message with role assistant"),
    (assistant(train="no"), "wrong_type", "messages[1].train=no is not true or false"),
    (assistant(train=0), "wrong_type", "messages[1].train=0 is not true or false"),
    (assistant(tool_calls=3), "wrong_type", "messages[1].tool_calls=3 is not a list of calls"),
    (assistant(tool_calls="[{"), "wrong_type", "messages[1].tool_calls=[{ is not a list of calls as JSON"),
    (assistant(tool_calls=[{"id": "1"}]), "wrong_type", "messages[1].tool_calls[0]={'id': '1'} is not a call"),
    (assistant(tool_calls=[{"name": "f", "arguments": "{"}]), "wrong_type", "arguments={ is not an object as JSON"),
    (assistant(tool_calls=[{"name": "f", "arguments": "[1]"}]), "wrong_type", "arguments=[1] is not an object"),
    (assistant(reasoning_content=["x"]), "wrong_type", "messages[1].reasoning_content=['x'] is a list, not text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "wrong_type", "only an assistant"),
    ({"messages": [{"from": "function_call", "value": "f()"}]}, "wrong_type", "value=f() is not a call as JSON"),
    ({**GOOD, "tools": 3}, "wrong_type", "tools=3 is not a list of JSON schemas; correct the row, or set"),
    ({**GOOD, "tools": "[{"}, "wrong_type", "tools=[{ is not a list of JSON schemas as JSON"),
    ({**GOOD, "tools": [3]}, "wrong_type", "tools=[3] is not a list of JSON schemas"),
    (messages(("tool", "x"), ("assistant", "y")), "template", "the chat template refused the conversation"),
    (assistant(reasoning_content="x"), "template", "leaves out the reasoning_content of messages[1]"),
    (assistant(tool_calls=[CALL]), "template", "leaves out tool_calls of messages[1], so it"),
    ({**GOOD, "tools": [{"name": "f"}]}, "template", "leaves out the tools, so it would be lost"),
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
    ({"input_ids": [5, 6], "mask": [1, 0]}, "no_targets", "and mask be 1"),
]

BAD_TEXTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "missing_column", "no column 'text', it has none; name the right one in the dataset's format.text"),
    ({"text": None}, "null", "column 'text' is null"),
    ({"text": ["x"]}, "wrong_type", "text=['x'] is a list, not text"),
    ({"text": ""}, "empty", "text='' is empty"),
    ({"text": "\ud800"}, "invalid_utf8", "text has half a surrogate pair, '\\ud800', at character 0"),
    ({"text": "<|endoftext|>"}, "no_targets", "a text needs two tokens at least"),
]

BAD_INSTRUCTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"output": "x"}, "missing_column", "no column 'instruction'"),
    ({"instruction": "x"}, "missing_column", "no column 'output', it has 'instruction'; name"),
    ({"instruction": None, "output": "x"}, "null", "column 'instruction' is null"),
    ({"instruction": "x", "output": " "}, "empty", "output=' ' is empty"),
    ({"instruction": "x", "output": 3}, "wrong_type", "output=3 is a int, not text"),
    ({"instruction": "x", "output": "y", "input": 3}, "wrong_type", "input=3 is a int, not text"),
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
