"""Chat templates and rows that are not like others: what fails, what is searched for, thoughts in contents."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import DataError, OtherRunError, ResumeError, RowError
from raytune_fsdp.config import ChatFormat, DatasetConfig
from raytune_fsdp.data.mixture import FIFTH_ORDER, FOURTH_ORDER, OLDEST_ORDER
from raytune_fsdp.data.rows import lost, thoughts
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.learn import learn, needs_newer
from raytune_fsdp.data.rows.marks import Mark
from raytune_fsdp.data.rows.sandbox import SANDBOX, TimeLimitError
from raytune_fsdp.data.rows.templates import ChatTemplate, TemplateChoice, TooMuchWork, TooSlow
from raytune_fsdp.data.rows.thoughts import without_thought
from raytune_fsdp.data.sources.source import unreadable
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.identity import check_identity
from raytune_fsdp.run.resume import data_identity_of
from tests.rows import make_windows
from tests.unit.chat_structures import STRUCTURES
from tests.unit.made_tokenizers import demo, pieces
from tests.unit.test_chat_structures import tokenizer_for

USER = {"role": "user", "content": "Is it?"}
ANSWER = {"role": "assistant", "content": "Yes."}
PRINTED = (
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{%- for c in m.tool_calls or [] -%}"
    "{{ c.function.name ~ ': ' ~ c.function.arguments }}{%- endfor -%}{{ '<|endoftext|>' }}{%- endfor -%}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
ARGUMENTS = {"at": "Köln", "now": True, "of": None}


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [USER, asked, {"role": "tool", "content": "It is."}, ANSWER]


def formatter(template: str, name: str = "", *, order: int = FIFTH_ORDER, **format: Any) -> Formatter:
    tokenizer = tokenizer_for(name, "byte-level") if name else demo()
    choice = TemplateChoice(text=template)
    return Formatter(ChatFormat(**format), tokenizer=tokenizer, vocab_size=9000, template=choice, order=order)


def document(made: Formatter, messages: Any) -> Document | RowError:
    return made.documents([{"messages": messages}], ["f.jsonl:7"])[0]


def trained(made: Document | RowError, name: str = "") -> list[str]:
    assert isinstance(made, Document), made
    tokenizer = tokenizer_for(name, "byte-level") if name else demo()
    return [text for text, flag in pieces(made, tokenizer) if flag]


def opened(directory: Path, template: str, messages: Any, **options: Any) -> Windows:
    (directory / "own.jinja").write_text(template)
    (directory / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    rows = DatasetConfig.model_validate({"path": str(directory / "rows.jsonl"), "format": {"type": "chat"}})
    options = {"chat_template": str(directory / "own.jinja"), "seq_len": 512, "cache": directory, **options}
    return make_windows([rows], **options)


@pytest.mark.parametrize("given", [ARGUMENTS, json.dumps(ARGUMENTS)])
def test_template_that_prints_arguments_as_they_are_gets_json(given: Any) -> None:
    """Objects or text, as the rows have it. A run of an older version of the order keeps Python's text."""
    made = formatter(PRINTED)
    assert made.order_version == FIFTH_ORDER
    said = 'look: {"at": "Köln", "now": true, "of": null}<|endoftext|>'
    assert trained(document(made, calling(given))) == [said, "Yes.<|endoftext|>"]
    escaping = Formatter(
        ChatFormat(), tokenizer=demo(), vocab_size=9000, template=PRINTED, special_tokens="escape", order=FIFTH_ORDER
    )
    assert trained(document(escaping, calling({"at": "<|endoftext|>"})))[0] == (
        'look: {"at": "<|endoftext|>"}<|endoftext|>'
    )
    older = trained(document(formatter(PRINTED, order=FOURTH_ORDER), calling(given)))
    assert older[0] == "look: {'at': 'Köln', 'now': True, 'of': None}<|endoftext|>"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("c.function.arguments | tojson", '{"at": "Köln", "now": true, "of": null}'),
        ("'text' if c.function.arguments is string else c.function.arguments | length", "3"),
        ("c.function | tojson", '{"name": "look", "arguments": {"at": "Köln", "now": true, "of": null}}'),
    ],
)
def test_other_templates_get_arguments_as_objects(written: str, said: str) -> None:
    """As servers give them: these write JSON themselves, or look into them."""
    made = formatter(PRINTED.replace("c.function.arguments", f"({written})"))
    assert made.order_version == OLDEST_ORDER
    assert trained(document(made, calling(ARGUMENTS)))[0] == f"look: {said}<|endoftext|>"


DEEP = "{%- macro deep() -%}{{ deep() }}{%- endmacro -%}{{ deep() if "


@pytest.mark.parametrize("when", ["messages[0].content == 'Is it?'", "messages | selectattr('tool_calls') | list"])
def test_template_that_fails_with_our_conversations_opens_and_each_turn_is_rendered(when: str, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "The model."}]
    windows = opened(tmp_path, f"{DEEP}{when} }}}}{PRINTED}", said)
    assert windows.order_version == FIFTH_ORDER and windows.identity["datasets.0.turns"] == "one by one"
    counts = windows.get(0, 0)[0].counts.datasets[0]
    assert counts.rows == 1 and not counts.dropped
    assert trained(document(formatter(f"{DEEP}{when} }}}}{PRINTED}"), said)) == ["The model.<|endoftext|>"]


@pytest.mark.parametrize(
    "template",
    [
        "{%- set end = '</think>' -%}{{ 'x' if end in messages[0].content }}",
        "{%- set ns = namespace(end='</think>') -%}{{ messages[0].content.split(ns.end)[-1] }}",
        "{%- set end -%} </think> {%- endset -%}{{ messages[0].content.split(end)[-1] }}",
        "{%- for end in ['</think>'] -%}{{ messages[0].content.split(end)[-1] }}{%- endfor -%}",
        "{%- macro last(text, end='</think>') -%}{{ text.split(end)[-1] }}{%- endmacro -%}{{ last('') }}",
        "{{ 'x' if messages[0].content == '</think>' }}",
        "{{ 'x' if messages[0].content[:8] != '</think>' else 'y' }}",
        "{{ 'x' if messages[0].content is equalto '</think>' }}",
        "{{ messages[0].content | replace('</think>', '') }}",
        "{{ messages[0].content.split('</think>') | join(', ') }}",
    ],
)  # fmt: skip
def test_text_that_a_template_searches_for(template: str) -> None:
    assert ChatTemplate(template, {}).looked_for == ("</think>",)


def test_text_that_a_template_only_writes_is_not_searched_for() -> None:
    template = ChatTemplate(
        "{%- set role = 'model' if messages[0].role == 'ipython' else 'user' -%}"
        "{%- set system = 'Be brief: ' ~ messages[0]['content'] -%}{{ '<s>' ~ role + '</s>' if tools else ' .' }}"
        "{{ ', '.join(tools) }}{{ tools | tojson(separators=(',', ':')) }}{{ tools | join(', ') }}"
        "{{ raise_exception('one call') if messages | length > 9 }}{{ strftime_now('%Y') }}{{ {'key': 'value'} }}",
        {},
    )
    assert template.looked_for == ()


PROMPT = "{{ ('<|assistant|>' if messages | length < 9 or not ns.text else '<|user|>')"
BY_FORM = (
    "{%- set ns = namespace(text=false) -%}{%- for m in messages -%}{%- for c in m.tool_calls or [] -%}"
    "{%- set ns.text = ns.text or c.function.arguments is string -%}{%- endfor -%}{%- endfor -%}"
    + PRINTED.replace("{{ '<|assistant|>'", PROMPT)
)


def test_a_template_is_tried_by_the_rules_of_the_run_and_the_run_knows_the_outcome(tmp_path: Path) -> None:
    """Its prompt changes after eight messages, but only where arguments are text, as version 5 has them."""
    options: Any = {"bad_rows": "skip"}
    messages = calling(ARGUMENTS) * 4
    new = opened(tmp_path, BY_FORM, messages, **options)
    raised = opened(tmp_path, BY_FORM, messages, order_version=FOURTH_ORDER, **options)
    before = raised.identity
    assert "datasets.0.turns" not in before, "alike by these rules"
    raised.raise_order(FIFTH_ORDER)
    assert new.order_version == FIFTH_ORDER and new.identity["datasets.0.turns"] == "one by one"
    assert raised.identity == new.identity and raised.fingerprint == new.fingerprint
    assert new.get(0, 0)[0].counts.datasets[0].dropped == {"template": 1}
    kept = data_identity_of(new)
    other = {key: value for key, value in kept.items() if not key.endswith(".turns")}
    with pytest.raises(ResumeError, match="data.train.0: the turns of its chats were .* one by one when .* together"):
        check_identity(kept, other, "runs/a", files_before={}, files_now={})


CUTTING = PRINTED.replace("~ m.content", "~ (m.content if loop.last else m.content.split('</think>')[-1])")


def test_reasoning_that_a_template_cuts_out_of_contents_is_not_kept() -> None:
    """Also where a later turn thinks the same."""
    thinking = {"role": "assistant", "content": "<think>Hm, so.</think>Yes."}
    given = [USER, thinking, USER, thinking]
    kept = formatter(CUTTING, reasoning="keep")
    error = document(kept, given)
    assert isinstance(error, RowError) and error.reason == "template"
    assert "leaves out 'Hm, so.' in the content of messages[1]" in str(error)
    assert "format.reasoning to template or drop" in str(error)
    assert trained(document(kept, given[:2])) == ["<think>Hm, so.</think>Yes.<|endoftext|>"]
    assert len(trained(document(formatter(PRINTED, reasoning="keep"), given))) == 2
    assert trained(document(formatter(CUTTING), given))[0] == "Yes.<|endoftext|>"
    dropped = document(formatter(CUTTING, reasoning="drop"), given)
    assert trained(dropped) == ["Yes.<|endoftext|>"] * 2


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "Yes."),
        ("Hm,\nso.\n</think>\n\nYes.", "Yes."),
        (" [THINK]Hm.[/THINK] Yes.", "Yes."),
        ("Hm.\r\n</think>\r\n\r\nYes.", "Yes."),
        ("\n</think>\n\nYes.", "Yes."),
        ("Hm: `</think>` ends it.\n</think>\n\nYes.", "Yes."),
        ("<think>Hm.</think>\n<think>\nSo.\n</think>\n[THINK][/THINK] Yes.", "Yes."),
        ("Hm.\n</think>\n\n<think></think>Yes.", "Yes."),
        ("The tag </think> ends a thought.", "The tag </think> ends a thought."),
        ("It is </think>\nor not.", "It is </think>\nor not."),
        ("Write\n<think>\nHm.\n</think>\nthere.", "Write\n<think>\nHm.\n</think>\nthere."),
        ("Hm.[/THINK]Yes.", "Hm.[/THINK]Yes."),
        ("Hm.\n[/THINK]\nYes.", "Hm.\n[/THINK]\nYes."),
        ("<think>Hm.", "<think>Hm."),
        ("Yes. <think>Hm.</think> It is.", "Yes. <think>Hm.</think> It is."),
        ("Yes.", "Yes."),
    ],
)
def test_thoughts_that_are_dropped(content: str, left: str) -> None:
    given = [USER, {"role": "assistant", "content": content}]
    assert trained(document(formatter(PRINTED, reasoning="drop"), given)) == [f"{left}<|endoftext|>"]


def test_row_of_gpt_oss_that_ends_with_the_user_trains_words_and_no_end() -> None:
    """As any turn that is not the last: a model that stops never writes what the template puts in the end's place."""
    made = formatter(STRUCTURES["gpt-oss"].bare(), "gpt-oss")
    thinking = {**ANSWER, "reasoning_content": "Hm."}
    for given in ([USER, ANSWER, USER], [USER, thinking, USER]):
        assert trained(document(made, given), "gpt-oss") == ["<|channel|>final<|message|>Yes."]
    whole = ["<|channel|>final<|message|>Yes.", "<|channel|>final<|message|>Yes.<|return|>"]
    assert trained(document(made, [USER, ANSWER, USER, ANSWER]), "gpt-oss") == whole
    alone = document(made, [USER])
    assert isinstance(alone, RowError) and alone.reason == "no_targets"


NO_EOS = STRUCTURES["llama 2, mistral 7b"].bare().replace("~ ' </s>'", "")


def test_answer_without_eos_ends_with_the_token_that_begins_the_next_turn() -> None:
    name = "llama 2, mistral 7b"
    assert trained(document(formatter(NO_EOS, name), [USER, ANSWER] * 2), name) == [" Yes.<s>", " Yes.<s>"]
    words = "{{ '<s>' }}" + NO_EOS.replace("<s>[INST]", "[INST]")
    error = document(formatter(words, name), [USER, ANSWER] * 2)
    assert isinstance(error, RowError) and "would not learn to end its turn" in str(error)


@pytest.mark.parametrize("order", [FIFTH_ORDER, FOURTH_ORDER])
def test_loss_on_all_tokens_has_empty_thoughts_but_not_those_of_messages_that_are_not_trained_on(order: int) -> None:
    made = formatter(STRUCTURES["qwen 3"].bare(), "qwen 3", loss="all", order=order)
    assert made.order_version == OLDEST_ORDER
    asked = "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"
    empty = "<think>\n\n</think>\n\n"
    assert trained(document(made, [USER, ANSWER]), "qwen 3") == [f"{asked}{empty}Yes.<|im_end|>\n"]
    assert trained(document(made, [USER, {**ANSWER, "train": False}]), "qwen 3") == [asked, "\n"]


def test_row_that_ends_the_trial_is_an_error_and_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the error of reading it: were it left out, another attempt could find other masks."""
    asked = [{"role": "user", "content": "What?"}, ANSWER]
    with pytest.raises(TooMuchWork, match=r"rows\.jsonl:1: the chat template does too much work: it goes too deep"):
        opened(tmp_path, f"{DEEP}messages[0].content == 'What?' }}}}{PRINTED}", asked)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row has 96 bytes, more than data\.max_row_bytes=50"):
        opened(tmp_path, PRINTED, [USER, ANSWER], max_row_bytes=50)
    windows = opened(tmp_path, PRINTED, [USER, ANSWER])
    assert windows.order_version == FIFTH_ORDER and "datasets.0.turns" not in windows.identity

    def lost(source: Any, indices: Any) -> Any:
        raise unreadable("s3://b/rows.jsonl", ConnectionError("Connection reset by peer"))

    monkeypatch.setattr(type(windows.sources[0]), "rows", lost)
    with pytest.raises(DataError, match="Connection reset by peer"):
        opened(tmp_path, PRINTED, [USER, ANSWER])


def test_template_that_is_too_slow_with_our_conversations_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine it might be fast enough, and have other masks."""
    made = formatter(PRINTED)

    def slow(*_: Any, **__: Any) -> Any:
        raise TimeLimitError("it takes more than 10 s of processor time")

    monkeypatch.setattr(SANDBOX, "ask_all", slow)
    template = made.templates[0]
    for found_out in (learn.__wrapped__, needs_newer.__wrapped__):
        options: Any = {"tools": False, **({"newer": True} if found_out is learn.__wrapped__ else {})}
        with pytest.raises(TooSlow, match="does too much work: it takes more than 10 s"):
            found_out(template, ("another",), **options)


def test_another_outcome_of_the_trial_is_said_only_where_no_setting_differs(tmp_path: Path) -> None:
    identity = data_identity_of(opened(tmp_path, PRINTED, [USER, ANSWER]))
    one_by_one = {**identity, "data.train.0.turns": "one by one"}
    with pytest.raises(ResumeError, match="data.train.0: the turns of its chats were rendered together .* one by one"):
        check_identity(identity, one_by_one, "runs/a", files_before={}, files_now={})
    with pytest.raises(OtherRunError, match="data.chat_template: was ") as caught:
        check_identity(identity, {**one_by_one, "data.chat_template": "x"}, "runs/a", files_before={}, files_now={})
    assert "turns" not in str(caught.value) and "versions" not in str(caught.value)


BLANKS = 100_000


def test_white_space_takes_no_time() -> None:
    """A search for what ends a text begins anew at each of its blanks: 100,000 took minutes."""
    began = time.process_time()
    blanks, tags = " " * BLANKS, "<think>\n" * 20_000
    for end, found in (("", None), ("x", None), ("<think>\n", 9)):
        assert thoughts._thoughts_at_end(f"x <y>{blanks}{end}") == (found and 5)
        assert thoughts.behind_thought(f"{blanks}{end}Yes.", 0, BLANKS, BLANKS, "Yes.") == BLANKS
        assert thoughts.other_thought(f"{blanks}{end}Yes.", 0, f"{blanks}{end}", BLANKS, "Yes.") is None
    assert thoughts._thoughts_at_end(f"x{tags}") == 1
    assert without_thought("<think></think>\n" * 50_000 + "Yes.") == "Yes."
    assert without_thought(f"{blanks}Yes.\n{blanks}") == f"{blanks}Yes.\n{blanks}"
    made = formatter(STRUCTURES["qwen 3"].bare(), "qwen 3")
    for answer in ("Yes.", " Yes."):
        given = [{"role": "user", "content": f"Is it?{blanks}"}, {"role": "assistant", "content": answer}]
        assert trained(document(made, given), "qwen 3") == ["Yes.<|im_end|>"]
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("<|assistant|><think>\n", 13),
        ("<|assistant|>\n<think>\n\n</think>\n\n", 13),
        ("<a> [THINK] <|END_THINKING|>", 3),
        ("<think>So <Reason>", 9),
        ("<think>So", None),
        ("<thin k>", None),
        (f"<{'x' * 41}think>", None),
        ("", None),
    ],
)
def test_tags_of_thoughts_at_the_end_of_a_text(text: str, begin: int | None) -> None:
    assert thoughts._thoughts_at_end(text) == begin
    slow = re.search(rf"(?:\s*{thoughts._THOUGHT})+\s*\Z", text, re.IGNORECASE)
    assert begin == (None if slow is None else slow.start())


def test_parts_of_many_messages_are_looked_for_in_linear_time() -> None:
    """As reasoning=keep does for all of a conversation."""
    marks = [Mark(10 * place + more, place, "content") for place in range(20_000) for more in (2, 8)]
    began = time.process_time()
    found = lost._between(marks)
    assert time.process_time() - began < 2
    assert found[0] == (0, 12) and found[7] == (68, 82) and found[19_999] == (199_988, None)
    order = [Mark(1, 2, "content"), Mark(2, 0, "content"), Mark(3, 2, "content"), Mark(4, 1, "tool_calls")]
    assert lost._between(order) == {0: (0, 3), 1: (2, None), 2: (2, None)}


ADDING = PRINTED.replace("~ m.content", "~ ('<think></think>' if m.role == 'assistant') ~ m.content")


@pytest.mark.parametrize("content", ["Yes.", "<think>\nHm.\n</think>\n\nYes.", "<think></think>Yes."])
def test_empty_thought_that_a_template_adds_is_not_trained_on_before_one_of_the_row(content: str) -> None:
    answer = {"role": "assistant", "content": content}
    made = formatter(ADDING)
    assert trained(document(made, [USER, answer] * 2)) == [f"{content}<|endoftext|>"] * 2


def test_empty_thought_of_the_row_is_trained_on() -> None:
    splitting = ADDING.replace("~ m.content", "~ m.content.split('</think>')[-1]")
    answer = {"role": "assistant", "content": "<think></think>Yes."}
    assert trained(document(formatter(splitting), [USER, answer])) == ["<think></think>Yes.<|endoftext|>"]


def test_answer_that_is_only_a_thought_cannot_be_dropped() -> None:
    error = document(formatter(PRINTED, reasoning="drop"), [USER, {**ANSWER, "content": "<think>Hm.</think>\n"}])
    assert isinstance(error, RowError) and error.reason == "empty"
    assert "messages[1].content=<think>Hm.</think>\n is a thought and nothing else, which format.reasoning=drop" in str(
        error
    )
    empty = document(formatter(PRINTED, reasoning="drop"), [USER, {**ANSWER, "content": ""}])
    assert "messages[1].content='' is empty" in str(empty)


def test_a_row_that_is_nested_too_deeply_is_a_bad_row() -> None:
    """JSON allows it, and a template is given every key of a message."""
    deep: list[dict[str, Any]] = [{}]
    for _ in range(900):
        deep.append({"a": deep[-1]})
    good = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    made = formatter(PRINTED)
    row = {"messages": [{**good[0], "meta": deep[900]}, good[1]]}
    assert made.renders_alike(row, "row 0", 2)
    fine = {"messages": [{**good[0], "meta": deep[290]}, good[1]]}
    tools = {"messages": good, "tools": [{"name": "f", "more": deep[310]}]}
    found = made.documents([row, fine, tools], ["row 0", "row 1", "row 2"])
    assert str(found[0]) == "row 0: messages[0]: is nested more than 300 levels deep; correct or remove the row"
    assert isinstance(found[1], Document), found[1]
    assert isinstance(found[2], RowError) and str(found[2]).startswith("row 2: tools: is nested more than 300")
