"""Row formats of the user's own: texts with columns in them, and functions."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raytune_fsdp.config import DatasetConfig, PythonFormat, TemplateFormat
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.errors import DataError
from tests.rows import make_windows
from tests.unit.made_tokenizers import convert, demo, pieces, refusal

ROW = {"question": "What?", "answer": "The GPU.", "the n": 3, "a.b": "dot", "none": None, "list": [1]}


def template(prompt: str, completion: str = "{answer}", **options: Any) -> TemplateFormat:
    return TemplateFormat(type="template", prompt=prompt, completion=completion, **options)


@pytest.mark.parametrize(
    ("prompt", "completion", "text"),
    [
        ("Q: {question}\nA: ", "{answer}", ["Q: What?\nA: ", "The GPU.<|endoftext|>"]),
        ("{{{question}}} {a.b} {the n}}}{{", "{answer}", ["{What?} dot 3}{", "The GPU.<|endoftext|>"]),
        ("{{question}}", "{answer}{answer}", ["{question}", "The GPU.The GPU.<|endoftext|>"]),
    ],
)
def test_template_puts_columns_into_texts_and_trains_the_answer(prompt: str, completion: str, text: list[str]) -> None:
    document = convert(ROW, template(prompt, completion), demo())
    assert pieces(document, demo()) == [(text[0], False), (text[1], True)]


def test_template_as_a_conversation_or_trained_as_a_whole() -> None:
    document = convert(ROW, template("{question}", style="chat"), demo())
    assert pieces(document, demo())[0] == ("<|user|>What?<|assistant|>", False)
    document = convert(ROW, template("{question} ", loss="all"), demo())
    assert pieces(document, demo()) == [("What? The GPU.<|endoftext|>", True)]


@pytest.mark.parametrize(
    ("prompt", "completion", "reason", "message"),
    [
        ("{query}", "{answer}", "missing_column", r"no column 'query', it has 'question', 'answer'.*format\.prompt"),
        ("", "{question.__class__}", "missing_column", r"no column 'question\.__class__'.*format\.completion"),
        ("{none}", "{answer}", "null", "'none' is null"),
        ("{list}", "{answer}", "wrong_type", r"list=\[1\] is not text or a number but list"),
    ],
)
def test_template_names_the_column_that_a_row_lacks(prompt: str, completion: str, reason: str, message: str) -> None:
    error = refusal(ROW, template(prompt, completion), demo())
    assert error.reason == reason
    with pytest.raises(DataError, match=message):
        raise error


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        ("{", "{answer}", "single {; write {{"),
        ("a } b", "{answer}", "single }; write }}"),
        ("{}", "{answer}", "without a name"),
        ("x", "yes", "names no column"),
    ],
)
def test_template_that_cannot_be_read(prompt: str, completion: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        template(prompt, completion)


MODULE = """
import itertools
calls = itertools.count()

def chat(row):
    return {"messages": [{"role": "user", "content": row.pop("q")}, {"role": "assistant", "content": row["a"]}]}

def pair(row):
    return {"instruction": row["q"], "output": row["a"]}

def changing(row):
    return {"text": f"{row['q']} {next(calls)}"}

def failing(row):
    raise KeyError("q")

def nothing(row):
    return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "rows_of_mine.py"
    file.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rows_of_mine", raising=False)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"Is it {i}?", "a": "Yes."}) + "\n" for i in range(30))
    )
    return file


def python(function: str, **returns: Any) -> PythonFormat:
    return PythonFormat.model_validate(
        {"type": "python", "function": f"rows_of_mine:{function}", **({"then": returns} if returns else {})}
    )


def test_function_makes_rows_that_are_read_in_another_format(module: Path) -> None:
    row = {"q": "What?", "a": "The GPU."}
    document = convert(row, python("chat"), demo())
    assert pieces(document, demo())[-1] == ("The GPU.<|endoftext|>", True) and row["q"] == "What?"
    document = convert(row, python("pair", type="instruction", style="plain"), demo())
    assert pieces(document, demo()) == [("What?", False), ("The GPU.<|endoftext|>", True)]


def test_bad_rows_of_a_function_are_named(module: Path) -> None:
    error = refusal({"q": "x"}, python("failing"), demo())
    assert error.reason == "function" and str(error).startswith("f.jsonl:7: rows_of_mine:failing raised KeyError: 'q';")
    error = refusal({"q": "x"}, python("nothing"), demo())
    assert "returned None, not a dict" in str(error)


def test_function_is_imported_where_rows_are_read_and_nowhere_else(module: Path) -> None:
    absent = PythonFormat(type="python", function="not_there:chat")  # as `export` and `generate` read a config
    with pytest.raises(
        DataError, match=rf"not_there cannot be imported on .* looked for in .*{module.parent}"
    ) as caught:
        Formatter(absent, tokenizer=demo(), vocab_size=5000, template=None)
    assert caught.value.exit_code == 2
    with pytest.raises(DataError, match="has no function missing"):
        Formatter(python("missing"), tokenizer=demo(), vocab_size=5000, template=None)
    for name in ("rows", "rows:", ":chat", "a b:c", "rows.py:chat"):
        with pytest.raises(ValidationError):
            PythonFormat(type="python", function=name) if name != "rows.py:chat" else PythonFormat(
                type="python", function="rows/py:chat"
            )


def test_worker_with_another_file_refuses(module: Path) -> None:
    sent = pickle.dumps(Formatter(python("chat"), tokenizer=demo(), vocab_size=5000, template=None))
    (document,) = pickle.loads(sent).documents([{"q": "x", "a": "y"}], ["f:1"])
    assert isinstance(document, Document)
    module.write_text(MODULE + "\n")
    with pytest.raises(DataError, match=r"rows_of_mine\.py on .* is not the file that the run was started with"):
        pickle.loads(sent)


def test_function_that_makes_two_documents_of_one_row_is_refused(module: Path, tmp_path: Path) -> None:
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("changing", type="completion"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the format's function, called twice, made two different"):
        make_windows([dataset], cache=tmp_path / "cache")


def test_whole_file_of_a_function_decides_the_windows(module: Path, tmp_path: Path) -> None:
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("chat"))
    before = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    assert before.get(0, 0)[0].samples.input_ids.size
    module.write_text(MODULE + "\n# another comment\n")
    after = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    assert before.fingerprint != after.fingerprint
    changed = {key for key in before.identity if before.identity[key] != after.identity[key]}
    assert changed == {"datasets.0.function_file"}
