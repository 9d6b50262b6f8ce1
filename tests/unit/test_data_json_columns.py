"""JSON in columns: read as what it is, by runs that are begun now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("datasets")

import datasets

from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.config.sections.formats import ChatFormat, CompletionFormat, InstructionFormat, PreferenceFormat
from raytune_fsdp.data.rows.conversation import Conversation, read_conversation
from raytune_fsdp.data.rows.pairs import read_group
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import JsonText, Source
from tests.rows import all_samples, make_windows


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "How warm?"},
            {"role": "assistant", "content": "", "tool_calls": [call("heat", {"room": None, "unit": "C"})]},
            {"role": "tool", "content": "21"},
            {"role": "assistant", "content": "21 degrees."},
        ],
        "tools": [tool("heat", {"room": {"type": "string"}, "unit": {"enum": ["C", 1, None]}})],
    },
    {
        "messages": [
            {"role": "user", "content": "Add these."},
            {"role": "assistant", "content": "", "tool_calls": [call("add", {"numbers": [1, 2.5], "exact": True})]},
            {"role": "tool", "content": "3.5"},
            {"role": "assistant", "content": "3.5"},
        ],
        "tools": [tool("add", {"numbers": {"type": "array"}, "exact": {"type": ["boolean", "null"]}})],
    },
]


def opened(path: Path, cache: Path, *, in_place: bool = False, **options: Any) -> Source:
    return open_source(DatasetConfig(path=str(path), format=ChatFormat()), cache=cache, in_place=in_place, **options)


def conversations(source: Source) -> list[Conversation]:
    rows = source.rows(range(len(source)))
    assert not any(isinstance(row, RowError) for row in rows)
    return [read(row, columnar=source.columnar) for row in rows]


def read(row: Any, *, columnar: bool = True) -> Conversation:
    return read_conversation(row, ChatFormat(), "a row", columnar=columnar)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_conversations_are_those_of_the_same_rows_as_text(tmp_path: Path, kind: str, in_place: bool) -> None:
    """The library writes every message as JSON if the calls of rows have different arguments."""
    written = datasets.Dataset.from_list(ROWS * 5, on_mixed_types="use_json")
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        written.to_parquet(path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, written.data.schema) as writer:
            writer.write_table(written.data.table)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 5))
    assert "arrow.json" in str(written.data.schema)
    new, text = opened(path, tmp_path / "cache", in_place=in_place), opened(tmp_path / "rows.jsonl", tmp_path / "cache")
    assert conversations(new) == conversations(text)
    assert [new.rows([i])[0] for i in range(10)] == new.rows(range(10)), "one by one, as many at a time"
    old = opened(path, tmp_path / "cache", in_place=in_place, order=5)
    assert (new.order_version, old.order_version) == (6, 2)
    assert isinstance(old.rows([0])[0]["messages"][0], str), "as it always was"  # type: ignore[index,call-overload]


def column(texts: list[str | None]) -> Any:
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def test_a_null_in_json_is_a_value_and_a_null_of_a_column_a_missing_key(tmp_path: Path) -> None:
    calls = column([None, json.dumps([call("heat", {"room": None})])])
    contents = column(['"Hi"', None])
    messages = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"]), contents, calls], ["role", "content", "tool_calls"]
    )
    tools = pa.StructArray.from_arrays(
        [pa.array(["f"]), pa.array([None], pa.string()), column(['{"default": null}'])],
        ["name", "description", "parameters"],
    )
    table = {"messages": pa.ListArray.from_arrays([0, 2], messages), "tools": pa.ListArray.from_arrays([0, 1], tools)}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    (found,) = conversations(opened(tmp_path / "rows.parquet", tmp_path / "cache", in_place=True))
    assert found.messages == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call("heat", {"room": None})]},
    ]
    assert found.tools == [{"name": "f", "parameters": {"default": None}}]


def test_a_text_that_is_json_itself_is_still_a_text(tmp_path: Path) -> None:
    """The library writes it without quotation marks, and others with them."""
    said = ["How warm?", '{"temp": 21}', '[{"id": 1}]', "42", "[1, 2]", "[" * 2000, '"quoted"']
    parts = [{"type": "text", "text": "In "}, {"type": "text", "text": "parts."}]
    rows = [{"messages": [{"role": "user", "content": each}] * 2} for each in [*said, parts]]
    written = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    assert "content: extension<arrow.json>" in str(written.data.schema)
    written.to_parquet(tmp_path / "rows.parquet")
    found = conversations(opened(tmp_path / "rows.parquet", tmp_path / "cache"))
    assert [each.messages[0]["content"] for each in found] == [*said[:-1], "quoted", "In parts."]


def test_calls_of_sharegpt_and_deep_messages() -> None:
    calls = JsonText('[{"name": "f", "arguments": {"x": null}}]')
    turns = [{"from": "human", "value": JsonText("21")}, {"from": "function_call", "value": calls}]
    found = read({"messages": turns})
    assert found.messages[0]["content"] == "21"
    assert found.messages[1]["tool_calls"] == [call("f", {"x": None})]
    deep: Any = {}
    for _ in range(500):
        deep = {"x": deep}
    for each in ({"role": "user", "content": "Hi", "more": deep}, JsonText(json.dumps({"role": "user", "more": deep}))):
        with pytest.raises(RowError, match=r"messages\[0\]: is nested more than 300 levels deep"):
            read({"messages": [each]})


def test_words_in_calls_stay_words_and_parts_are_refused_by_name() -> None:
    asked = {**call("f", {"n": JsonText("42")}), "id": JsonText("123456789")}
    missing = {"role": "user", "content": "Hi", "function_call": JsonText("null")}
    found = read({"messages": [missing, {"role": "assistant", "tool_calls": [asked]}]}).messages
    assert found[0] == {"role": "user", "content": "Hi"}
    assert found[1]["tool_calls"] == [{**call("f", {"n": 42}), "id": "123456789"}]
    for other in ('{"type": "file"}', '{"type": "image", "url": "x"}'):
        content = JsonText(f'[{{"type": "text", "text": "a"}}, {other}]')
        with pytest.raises(RowError, match=r"content\[1\]="):
            read({"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize("text", ["[]", "{}", '{"from": "Berlin", "to": "Rome"}', '[{"role": "engineer"}]'])
def test_an_answer_that_is_json_is_a_text(text: str) -> None:
    format = PreferenceFormat(type="preference")
    row = {"prompt": "Extract.", "chosen": JsonText(text), "rejected": "nothing"}
    found, same = (
        read_group({**row, "chosen": kind(text)}, format, "a row", columnar=True) for kind in (JsonText, str)
    )
    assert found.sides == same.sides


def test_formats_of_texts_read_texts(tmp_path: Path) -> None:
    answers = column(['"Paris"', '{"city": "Paris"}', "12", '"broken', None])
    pq.write_table(pa.table({"prompt": pa.array(["Where?"] * 5), "answer": answers}), tmp_path / "rows.parquet")
    format = InstructionFormat(type="instruction", prompt="prompt", completion="answer", style="plain")
    dataset = DatasetConfig(path=str(tmp_path / "rows.parquet"), format=format)
    source = open_source(dataset, cache=tmp_path / "cache", in_place=False)
    assert source.order_version == 6
    assert [row["answer"] for row in source.rows(range(5))] == ["Paris", '{"city": "Paris"}', "12", '"broken', None]  # type: ignore[index,call-overload]


def test_pairs_whose_prompts_are_texts_or_messages(tmp_path: Path) -> None:
    pair = {
        "chosen": ROWS[0]["messages"],
        "rejected": [*ROWS[0]["messages"][:-1], {"role": "assistant", "content": "No."}],
    }
    rows = [
        {"prompt": "Which?", "chosen": "this one", "rejected": "that one"},
        {"prompt": ROWS[0]["messages"][:1], **pair},
        {"prompt": [], **pair},
        {
            "prompt": {"role": "user", "content": "[{}]"},
            "chosen": {"role": "assistant", "content": "a"},
            "rejected": "b",
        },
    ]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"chat_template": "chatml", "seq_len": 512, "cache": tmp_path / "cache"}
    found = []
    for name in ("rows.parquet", "rows.jsonl"):
        format = PreferenceFormat(type="preference")
        windows = make_windows([DatasetConfig(path=str(tmp_path / name), format=format)], shuffle="none", **options)
        found.append([each.input_ids.tolist() for each in all_samples(windows)])
    assert found[0] == found[1]


def test_what_is_not_json_is_a_bad_row(tmp_path: Path) -> None:
    texts = [json.dumps(ROWS[0]["messages"]), "[{", "[" * 100_000, None, "null"]
    pq.write_table(pa.table({"messages": column(texts)}), tmp_path / "rows.parquet")
    good, *bad = opened(tmp_path / "rows.parquet", tmp_path / "cache").rows(range(5))
    assert read(good).messages == read({"messages": ROWS[0]["messages"]}, columnar=False).messages
    for row in bad:
        with pytest.raises(RowError):
            read(row)


def test_only_what_is_read_decides(tmp_path: Path) -> None:
    """Nor does it matter that an older version has prepared the file, which did not note where its JSON is."""
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "notes": {"x": 1}}
    table = datasets.Dataset.from_list([row, {**row, "notes": 3}], on_mixed_types="use_json")
    table.to_parquet(tmp_path / "rows.parquet")
    formats = (PreferenceFormat(type="preference"), 2), (CompletionFormat(type="completion", text="notes"), 6)
    for format, version in formats:
        for in_place in (True, False):
            dataset = DatasetConfig(path=str(tmp_path / "rows.parquet"), format=format)
            old = open_source(dataset, cache=tmp_path / "cache", in_place=in_place, order=5)
            new = open_source(dataset, cache=tmp_path / "cache", in_place=in_place)
            assert (old.order_version, new.order_version) == (2, version)
            assert old.fingerprints == new.fingerprints, "what is held out is the same"


def test_a_run_keeps_the_version_that_it_was_begun_with(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS * 3, on_mixed_types="use_json").to_parquet(tmp_path / "rows.parquet")
    dataset = DatasetConfig(path=str(tmp_path / "rows.parquet"), format=ChatFormat(tools=None))
    options: dict[str, Any] = {"chat_template": "chatml", "seq_len": 256, "bad_rows": "skip"}
    new = make_windows([dataset], cache=tmp_path / "cache", **options)
    again = make_windows([dataset], cache=tmp_path / "cache", order_version=6, **options)
    old = make_windows([dataset], cache=tmp_path / "cache", order_version=5, **options)
    assert new.order_version == new.identity["order_version"] == 6 and new.fingerprint == again.fingerprint
    assert old.order_version == 5 and old.fingerprint != new.fingerprint
