"""Rows with two answers, or a judged one, become groups of documents; bad rows are errors with a way out."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.batch import Role
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config import BinaryFormat, ChatFormat, PreferenceFormat, PythonFormat
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.row_keys import RowKeys
from raytune_fsdp.data.rows.templates import load_template
from tests.runs import make_config
from tests.unit.chat_structures import STRUCTURES
from tests.unit.made_tokenizers import chat, convert, demo, pieces, without_tags

PAIR = PreferenceFormat(type="preference")
PLAIN = PreferenceFormat(type="preference", style="plain")
JUDGED = BinaryFormat(type="binary")
WHAT = {"role": "user", "content": "What?"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def made(row: Any, format: Any = PAIR, **options: Any) -> Document | RowError:
    template = options.pop("template", None)
    tokenizer = chat() if template else demo()
    formatter = Formatter(format, tokenizer=tokenizer, vocab_size=2000, template=template, **options)
    (found,) = formatter.documents([row], ["f:7"])
    return found


def sides(row: Any, format: Any = PAIR, **options: Any) -> list[list[tuple[str, bool]]]:
    found = made(row, format, **options)
    assert isinstance(found, Document), found
    return [pieces(each, chat() if "template" in options else demo()) for each in found.members]


ASKED = "<|user|>What?<|assistant|>"
ASKED_IN_CHATML = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
EXPECTED = [[(ASKED, False), ("The GPU.<|endoftext|>", True)], [(ASKED, False), ("No.<|endoftext|>", True)]]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"prompt": "What?", "chosen": "The GPU.", "rejected": "No."}, id="texts"),
        pytest.param({"prompt": [WHAT], "chosen": [said("The GPU.")], "rejected": [said("No.")]}, id="TRL"),
        pytest.param({"prompt": [WHAT], "chosen": "The GPU.", "rejected": said("No.")}, id="mixed"),
        pytest.param({"chosen": [WHAT, said("The GPU.")], "rejected": [WHAT, said("No.")]}, id="implicit"),
        pytest.param(
            {"prompt": "What?", "chosen": [WHAT, said("The GPU.")], "rejected": [WHAT, said("No.")]}, id="UltraFeedback"
        ),
        pytest.param(
            {"prompt": [WHAT], "chosen": [WHAT, said("The GPU.")], "rejected": [said("No.")]},
            id="prompt repeated in one",
        ),
        pytest.param(
            {
                "prompt": {"from": "human", "value": "What?"},
                "chosen": {"from": "gpt", "value": "The GPU."},
                "rejected": {"from": "gpt", "value": "No."},
            },
            id="ShareGPT",
        ),
    ],
)
def test_all_forms_of_a_pair_are_the_same_documents(row: Any) -> None:
    assert sides(row) == EXPECTED
    found = made(row)
    assert isinstance(found, Document) and found.length == sum(len(each.input_ids) for each in found.members)
    assert [each.columns for each in found.members] == [(1.0, 1.0, 0.0, 0.0), (2.0, 1.0, 0.0, 0.0)]
    # Each side is what a conversation of its own would be.
    alone = convert({"messages": [WHAT, said("The GPU.")]}, ChatFormat(), demo())
    assert alone.labels.tolist() == found.labels.tolist() and alone.input_ids.tolist() == found.input_ids.tolist()


def test_columns_have_other_names_and_numbers_reach_the_loss() -> None:
    format = PreferenceFormat(
        type="preference", prompt="question", chosen="yes", rejected="no", system="role", margin="gap", weight="w"
    )
    row = {"question": "What?", "yes": "The GPU.", "no": "No.", "role": "Be brief.", "gap": 0.25, "w": 2}
    found = made(row, format)
    assert isinstance(found, Document)
    assert [each.columns for each in found.members] == [(1.0, 2.0, 0.25, 0.0), (2.0, 2.0, 0.25, 0.0)]
    assert sides(row, format)[1] == [
        ("<|system|>Be brief.<|user|>What?<|assistant|>", False),
        ("No.<|endoftext|>", True),
    ]
    assert sides({**row, "role": ""}, format) == EXPECTED


@pytest.mark.parametrize("prompt", ["What?", [{"who": "Pupil", "says": "What?"}]])
def test_messages_may_have_other_keys_and_roles(prompt: Any) -> None:
    names: dict[str, Any] = {"role": "who", "content": "says", "roles": {"Pupil": "user", "Sage": "assistant"}}
    row = {"prompt": prompt, "chosen": [{"who": "Sage", "says": "The GPU."}], "rejected": "No."}
    assert sides(row, PreferenceFormat(type="preference", **names)) == EXPECTED
    judged = {"prompt": prompt, "completion": row["chosen"], "label": True}
    assert sides(judged, BinaryFormat(type="binary", **names)) == EXPECTED[:1]


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ({"type": "chat"}, "format.type=chat with train.objective.type=dpo.*or format.type=preference \\["),
        (
            {"type": "python", "function": "m:f"},
            "format.then.type=chat with train.objective.type=dpo.*or format.then.type=preference \\[",
        ),
    ],
)
def test_a_function_is_kept_by_what_makes_its_rows_pairs(tmp_path: Path, format: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, data={"train": [{"path": "x", "format": format}]}, train={"objective": {"type": "dpo"}})


def test_the_answer_is_what_both_do_not_share() -> None:
    """Turns before it count only if all of the assistant's are asked for."""
    before = [WHAT, said("The GPU."), {"role": "user", "content": "Why?"}]
    row = {"chosen": [*before, said("Fast.")], "rejected": [*before, said("No.")]}
    start = "<|user|>What?<|assistant|>The GPU.<|endoftext|><|user|>Why?<|assistant|>"
    assert sides(row) == [[(start, False), (f"{each}<|endoftext|>", True)] for each in ("Fast.", "No.")]
    every = sides(row, PreferenceFormat(type="preference", loss="assistant"))
    assert every[0] == [
        ("<|user|>What?<|assistant|>", False), ("The GPU.<|endoftext|>", True),
        ("<|user|>Why?<|assistant|>", False), ("Fast.<|endoftext|>", True),
    ]  # fmt: skip
    # An answer may have several turns, and what is between them is not trained on.
    several = {"prompt": [WHAT], "chosen": [said("The GPU."), *before[2:], said("Fast.")], "rejected": [said("No.")]}
    assert sides(several)[0] == every[0]
    muted = {"chosen": [*before, said("Fast.")], "rejected": [*before, {**said("No."), "train": False}]}
    assert "f:7: rejected: no token of the row can be trained on" in str(made(muted))


@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("qwen 3", ASKED_IN_CHATML, "<think>\n\n</think>\n\nNo.<|im_end|>"),
        ("qwen 3.5, prompt opens the thought", f"{ASKED_IN_CHATML}<think>\n", "\n</think>\n\nNo.<|im_end|>"),
        ("nemotron", f"{ASKED_IN_CHATML}<think>", "</think>No.<|im_end|>"),
        ("glm 4.5", "[gMASK]<sop><|user|>\nWhat?<|assistant|>", "\n<think></think>\nNo.<|user|>"),
    ],
)
def test_both_answers_count_from_where_they_part(name: str, begins: str, ends: str) -> None:
    """Also where the template writes an empty thought, which no mask of a chat has, in front of one of them."""
    template = STRUCTURES[name].template
    thinking = {**said("Yes."), "reasoning_content": "Hm."}
    row = {"prompt": [WHAT], "chosen": [thinking], "rejected": [said("No.")]}
    for loss in ("completion", "assistant"):
        chosen, rejected = sides(row, PreferenceFormat(type="preference", loss=loss), template=template)
        assert chosen[0] == rejected[0] == (begins, False) and rejected[1] == (ends, True)
        assert chosen[1][1] and chosen[1][0].endswith(f"Yes.{ends.partition('No.')[2]}") and "Hm." in chosen[1][0]
    # Where both have it, it is of neither, as in a chat; nor does a turn count that is not to be trained on.
    assert sides({**row, "chosen": [said("Yes.")]}, template=template)[1][1][0].startswith("No.")
    muted = {**row, "rejected": [{**said("No."), "train": False}, WHAT, said("Never.")]}
    assert sides(muted, template=template)[1][1][0].startswith("Never.")


def test_a_prompt_never_counts_also_if_the_template_writes_it_in_two_ways() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    prompt = [WHAT, {**said(""), "tool_calls": [call], "reasoning_content": "Hm."}, {"role": "tool", "content": "3"}]
    row = {"prompt": prompt, "chosen": [said("Yes.")], "rejected": [said("No."), WHAT, said("Never.")]}
    chosen, rejected = sides(row, template=STRUCTURES["qwen 3"].template)
    assert "Hm." in chosen[0][0] and "Hm." not in rejected[0][0], "Qwen drops thoughts before the last question"
    assert [chosen[1][0], rejected[1][0]] == ["Yes.<|im_end|>", "No.<|im_end|>"]


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("name", ["chatml", "llama-2", "llama-3", "openassistant"])
def test_a_side_has_the_tokens_and_the_mask_of_a_chat(name: str, tags: bool) -> None:
    """In every template, whether it says what is generated or not."""
    template = load_template(name) if tags else without_tags(load_template(name))
    before = [WHAT, said("The GPU."), {"role": "user", "content": "Why? <|im_end|>"}]
    row = {"prompt": before, "chosen": [said("Fast.")], "rejected": [said("So."), WHAT, said("No.")]}
    for loss in ("assistant", "completion"):
        found = made(row, PreferenceFormat(type="preference", loss=loss), template=template, special_tokens="escape")
        assert isinstance(found, Document), found
        muted = before if loss == "assistant" else [{**each, "train": False} for each in before]
        for each, answer in zip(found.members, (row["chosen"], row["rejected"]), strict=True):
            alone = made({"messages": [*muted, *answer]}, ChatFormat(), template=template, special_tokens="escape")
            assert isinstance(alone, Document), alone
            assert each.input_ids.tolist() == alone.input_ids.tolist() and each.labels.tolist() == alone.labels.tolist()


def test_plain_texts_follow_one_another() -> None:
    row = {"prompt": "What?", "chosen": " The GPU.", "rejected": " No."}
    assert sides(row, PLAIN) == [[("What?", False), (f"{each}<|endoftext|>", True)] for each in (" The GPU.", " No.")]
    for none in ("[]", " null ", "", [], None):
        assert sides({**row, "tools": none}, PLAIN) == sides(row, PLAIN)
    hh = "\n\nHuman: What?\n\nAssistant:"
    transcripts = {"chosen": f"{hh} The GPU.", "rejected": f"{hh} The CPU."}
    assert sides(transcripts, PLAIN)[0] == [(hh, False), (" The GPU.<|endoftext|>", True)]
    # Without speakers: up to the last whole word.
    words = sides({"chosen": "It is thin", "rejected": "It is thick"}, PLAIN)
    assert words == [[("It is", False), (f" {each}<|endoftext|>", True)] for each in ("thin", "thick")]


def test_all_of_a_chosen_document_may_be_targets() -> None:
    """`sft.over: all`: `skipped` says how many of its first targets are not the answer's."""
    row = {"prompt": "What?", "chosen": "The GPU.", "rejected": "No."}
    template = load_template("chatml")
    found, plain = made(row, over_all=True, template=template), made(row, template=template)
    assert isinstance(found, Document) and isinstance(plain, Document)
    skipped = int(found.columns[3])
    assert skipped > 0 and found.target_tokens - skipped == plain.target_tokens
    assert found.labels[1:][found.labels[1:] >= 0][skipped:].tolist() == plain.labels[plain.labels >= 0].tolist()
    # The line break that the template writes behind the turn is nobody's.
    assert pieces(found, chat())[-1] == ("\n", False)
    assert found.others[0].columns == (2.0, 1.0, 0.0, 0.0)
    assert found.others[0].labels.tolist() == plain.others[0].labels.tolist()
    turns = {"prompt": [WHAT], "chosen": [said("A"), WHAT, said("B")], "rejected": [said("No.")]}
    refused = made(turns, over_all=True)
    assert isinstance(refused, RowError) and refused.reason == "several_turns"
    assert "set that to answer" in str(refused)


ROW = {"prompt": "What?", "chosen": "The GPU.", "rejected": "No."}


@pytest.mark.parametrize(
    ("row", "format", "reason", "message"),
    [
        ({**ROW, "rejected": "The GPU."}, PAIR, "equal_answers", "have the same 4 trained token(s)"),
        ({"chosen": [WHAT, said("x")], "rejected": [WHAT, said("x")]}, PAIR, "equal_answers", "neither is to"),
        ({"prompt": "What?", "chosen": "x"}, PAIR, "missing_column", "has no column 'rejected'"),
        ({**ROW, "chosen": None}, PAIR, "null", "column 'chosen' is null"),
        ({**ROW, "chosen": 4}, PAIR, "wrong_type", "chosen=4 is neither a text nor a list of messages"),
        ({**ROW, "prompt": 4}, PAIR, "wrong_type", "prompt=4 is neither a text nor a list of messages"),
        ({**ROW, "chosen": []}, PAIR, "empty", "chosen=[] has no messages"),
        ({**ROW, "chosen": " "}, PAIR, "empty", "chosen=' ' is empty"),
        ({**ROW, "prompt": ""}, PAIR, "no_prompt", "format.style to plain"),
        ({"chosen": [said("x")], "rejected": [said("y")]}, PAIR, "no_prompt", "the row has no prompt"),
        (
            {"chosen": [WHAT, said("x")], "rejected": [{**WHAT, "content": "Who?"}, said("y")]},
            PAIR, "wrong_prompt", "or name the column of the prompt in the dataset's format.prompt",
        ),
        (
            {"prompt": [{**WHAT, "content": "Who?"}], "chosen": [WHAT, said("x")], "rejected": [WHAT, said("y")]},
            PAIR, "wrong_prompt", "chosen begins with 'What?' and not with the messages of prompt ('Who?')",
        ),
        (
            {"prompt": "Who?", "chosen": [WHAT, said("x")], "rejected": [WHAT, said("y")]},
            PAIR, "wrong_prompt", "set the dataset's format.prompt to null",
        ),
        ({"chosen": [WHAT, said("x")], "rejected": [WHAT]}, PAIR, "no_targets", "no message after the prompt"),
        ({**ROW, "chosen": [WHAT]}, PLAIN, "wrong_type", "format.style to chat, which reads messages"),
        ({"chosen": "yes", "rejected": "no"}, PLAIN, "no_prompt", "name the column of the prompt"),
        ({"chosen": "yes it", "rejected": "yes"}, PLAIN, "no_prompt", "name the column of the prompt"),
        ({**ROW, "tools": [{"name": "f"}]}, PLAIN, "wrong_type", "set the dataset's format.tools to null"),
        (ROW, PAIR.model_copy(update={"margin": "gap"}), "missing_column", "name the right one in format.margin"),
        ({**ROW, "gap": "2"}, PAIR.model_copy(update={"margin": "gap"}), "wrong_type", "gap='2' is text, not"),
        ({**ROW, "w": -1}, PAIR.model_copy(update={"weight": "w"}), "wrong_type", "w=-1 is less than 0"),
        ({**ROW, "w": None}, PAIR.model_copy(update={"weight": "w"}), "null", "format.weight tells it to the loss"),
        ({"prompt": "What?", "completion": "x", "label": 2}, JUDGED, "wrong_type", "label=2 is neither true"),
        ({"prompt": "What?", "completion": "x", "label": "good"}, JUDGED, "wrong_type", "format.label"),
        ({"prompt": "What?", "completion": "x"}, JUDGED, "missing_column", "has no column 'label'"),
        ({"prompt": "What?", "completion": "x", "label": 1}, PAIR, "missing_column", "format to {type: binary}"),
        (ROW, JUDGED, "missing_column", "set the dataset's format to {type: preference}"),
        ({**ROW, "chosen": {"role": "Sage", "content": "x"}}, PAIR, "unknown_role", "be mapped by format.roles"),
        ({"completion": "x", "label": True}, JUDGED, "no_prompt", "completion is a text, and the row has no prompt"),
    ],
)  # fmt: skip
def test_bad_rows_say_what_is_wrong_in_a_line(row: Any, format: Any, reason: str, message: str) -> None:
    error = made(row, format)
    assert isinstance(error, RowError), error
    assert error.reason == reason and message in str(error)
    assert str(error).startswith("f:7: ") and "\n" not in str(error)


@pytest.mark.parametrize(
    ("label", "role"),
    [(True, 3), (1, 3), ("True", 3), (1.0, 3), ("1.0", 3), (False, 4), (0, 4), ("0", 4), ("0.0", 4)],
)
def test_a_judged_answer_is_desirable_or_not(label: Any, role: int) -> None:
    found = made({"prompt": "What?", "completion": "The GPU.", "label": label}, JUDGED)
    assert isinstance(found, Document) and found.columns == (role, 1.0, 0.0, 0.0)
    assert pieces(found, demo()) == EXPECTED[0]


def test_a_whole_conversation_is_judged_by_its_last_turn() -> None:
    turns = [WHAT, said("The GPU."), {"role": "user", "content": "Why?"}, said("Fast.")]
    (found,) = sides({"completion": turns, "label": True}, JUDGED)
    assert found[-1] == ("Fast.<|endoftext|>", True) and len(found) == 2


def test_a_mismatched_document_has_its_own_prompt_and_the_answer_of_another_row() -> None:
    formatter = Formatter(JUDGED, tokenizer=demo(), vocab_size=2000, template=None)
    rows: list[Any] = [
        {"prompt": "What?", "completion": "The GPU.", "label": 1},
        {"prompt": [{"role": "user", "content": "Who?"}], "completion": [said("You.")], "label": 0},
    ]
    found = formatter.mismatched(rows, rows[::-1], ["f:1", "f:2"])
    assert all(isinstance(each, Document) and each.columns == (Role.MISMATCHED, 1, 0, 0) for each in found)
    assert [pieces(each, demo()) for each in found if isinstance(each, Document)] == [
        [("<|user|>What?<|assistant|>", False), ("You.<|endoftext|>", True)],
        [("<|user|>Who?<|assistant|>", False), ("The GPU.<|endoftext|>", True)],
    ]


def test_rows_keep_their_order_among_bad_ones_and_in_other_processes() -> None:
    formatter = Formatter(PAIR, tokenizer=demo(), vocab_size=2000, template=None, over_all=True)
    rows: list[Any] = [
        {},
        ROW,
        RowError("f:3: broken", "json"),
        {**ROW, "rejected": "The GPU."},
        {**ROW, "chosen": "x"},
    ]
    wheres = [f"f:{number}" for number in range(5)]
    found = formatter.documents(rows, wheres)
    assert [type(each) for each in found] == [RowError, Document, RowError, RowError, Document]
    again = pickle.loads(pickle.dumps(formatter)).documents(rows, wheres)
    for one, other in zip(found, again, strict=True):
        if isinstance(one, Document):
            assert [each.labels.tolist() for each in one.members] == [each.labels.tolist() for each in other.members]
            assert one.columns == other.columns and one.columns[3] > 0


@pytest.mark.parametrize("format", [PAIR, PLAIN])
def test_white_space_makes_no_other_prompt(format: PreferenceFormat) -> None:
    """Some templates strip it, so the tokens may be the same; and rows of one prompt are held out together."""
    keys = RowKeys(format, tokenizer=demo(), vocab_size=2000, template=None, prompts=True)
    alike: list[Any] = [{**ROW, "prompt": prompt} for prompt in ("What?", "What? ", "\nWhat?\n")]
    if format.style == "chat":
        system = {"role": "system", "content": " "}
        alike += [{**ROW, "prompt": [{**WHAT, "content": "What?\n"}]}, {**ROW, "prompt": [system, WHAT]}]
    assert len(set(keys.keys(alike))) == 1
    assert len(set(keys.keys([alike[0], {**ROW, "prompt": "What ?"}, {**ROW, "prompt": "Who?"}]))) == 3


def test_a_function_may_make_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pairing.py").write_text(
        "def pair(row):\n    return {'prompt': row['q'], 'chosen': row['a'][0], 'rejected': row['a'][1]}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    format = PythonFormat(type="python", function="pairing:pair", then=PAIR)
    assert sides({"q": "What?", "a": ["The GPU.", "No."]}, format) == EXPECTED
    sys.modules.pop("pairing")
