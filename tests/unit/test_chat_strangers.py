"""Chat templates and rows that are not like others: what fails, what is searched for, thoughts in contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import ResumeError, RowError
from raytune_fsdp.config import ChatFormat, DatasetConfig
from raytune_fsdp.data.mixture import FIFTH_ORDER, FOURTH_ORDER, OLDEST_ORDER
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.templates import ChatTemplate, TemplateChoice, TooMuchWork
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.plan.identity import check_identity
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
    kept: Any = {f"data.{key}": value for key, value in new.identity.items()}
    other = {key: value for key, value in kept.items() if not key.endswith(".turns")}
    with pytest.raises(
        ResumeError, match="datasets.0: the turns of its chats were rendered one by one when .* together"
    ):
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
        ("Hm.[/THINK]Yes.", "Yes."),
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


def test_template_that_cannot_be_tried_is_not_trusted_and_what_is_wrong_is_said_later(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "What?"}, ANSWER]
    windows = opened(tmp_path, f"{DEEP}messages[0].content == 'What?' }}}}{PRINTED}", asked)
    assert windows.identity["datasets.0.turns"] == "one by one"
    with pytest.raises(TooMuchWork, match=r"rows\.jsonl:1: the chat template does too much work: it goes too deep"):
        windows.get(0, 0)
