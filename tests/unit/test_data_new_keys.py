"""What rows say beside roles and contents: weights, a system column, functions, messages as text; and by which version
of the order a run reads that."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config import (
    ChatFormat,
    CompletionFormat,
    DatasetConfig,
    InstructionFormat,
    PythonFormat,
    TemplateFormat,
    TokensFormat,
)
from raytune_fsdp.data.open import open_data
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.templates import load_template
from raytune_fsdp.data.sources.keys import ANY, Keys, KeySearch
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.plan.identity import named
from tests.rows import all_samples, make_windows
from tests.runs import make_config
from tests.unit.made_tokenizers import chat, convert, demo, pieces, refusal

CHATML = load_template("chatml")
USER, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "The GPU."}
ROW = {"messages": [USER, ANSWER]}
SAID = "The GPU.<|im_end|>"
ALPACA = InstructionFormat(type="instruction")


def said(row: dict[str, Any], format: Any = None, **options: Any) -> list[tuple[str, bool]]:
    return pieces(convert(row, format or ChatFormat(), chat(), CHATML, **options), chat())


def of_version(order: int, row: dict[str, Any], format: Any = None) -> Document | RowError:
    formatter = Formatter(format or ChatFormat(), tokenizer=chat(), vocab_size=5000, template=CHATML, order=order)
    (document,) = pickle.loads(pickle.dumps(formatter)).documents([row], ["f.jsonl:7"])
    return document


@pytest.mark.parametrize("key", [{"weight": 0}, {"weight": 0.0}, {"training": False}, {"train": False}])
@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_message_of_weight_0_is_not_trained_on(key: dict[str, Any], loss: str) -> None:
    """OpenAI's own format, SlimOrca's and axolotl's."""
    turns = [USER, {**ANSWER, **key}, {**USER, "weight": None}, {**ANSWER, "weight": 1, "training": True}]
    trained = [text for text, trained in said({"messages": turns}, ChatFormat(loss=loss)) if trained]
    assert "".join(trained).count(SAID) == 1
    if loss == "assistant":
        assert trained == [SAID]
    shared = {
        "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "Hm.", **key}, *turns[2:]]
    }
    assert [text for text, trained in said(shared, ChatFormat(messages="conversations")) if trained] == [SAID]


@pytest.mark.parametrize("given", [0.5, 2, -1, "0", True, [], float("nan")])
def test_any_other_weight_is_a_bad_row(given: Any) -> None:
    error = refusal({"messages": [USER, {**ANSWER, "weight": given}]}, ChatFormat(), demo())
    assert error.reason == "wrong_type" and "messages[1].weight=" in str(error) and "neither 0 nor 1" in str(error)


@pytest.mark.parametrize("given", [0, 1, "false", []])
def test_training_is_true_or_false(given: Any) -> None:
    error = refusal({"messages": [USER, {**ANSWER, "training": given}]}, ChatFormat(), demo())
    assert error.reason == "wrong_type" and "messages[1].training=" in str(error)


def test_system_column_becomes_the_first_message() -> None:
    first = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat?"
    for row in (
        {**ROW, "system": "Be kind."},
        {"messages": [{"role": "system", "content": " "}, USER, ANSWER], "system": "Be kind."},
        {"messages": [{"role": "system", "content": "Be kind."}, USER, ANSWER], "system": " Be kind.\n"},
    ):
        (before, _), (answer, _), *_ = said(row)
        assert before.startswith(first) and answer == SAID, row
    assert said({**ROW, "sys": "Be kind."}, ChatFormat(system="sys")) == said({**ROW, "system": "Be kind."})
    for nothing in ("", " \n", None):
        assert said({**ROW, "system": nothing}) == said(ROW)
    assert said({**ROW, "system": "Be kind."}, ChatFormat(system=None)) == said(ROW)
    muted = {"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER], "system": "Be kind."}
    assert [text for text, trained in said(muted) if trained] == [SAID], "weights stay with their messages"


def test_system_column_that_cannot_be_read_is_named_with_a_way_out() -> None:
    developer = [{"role": "developer", "content": "Be short."}, USER, ANSWER]
    error = refusal({"messages": developer, "system": "Be kind."}, ChatFormat(), demo())
    assert "system=Be kind. is another system message than that of messages[0]" in str(error)
    assert "format.system to null" in str(error)
    error = refusal({**ROW, "system": {"id": 3}}, ChatFormat(), demo())
    assert error.reason == "wrong_type" and "is not text; correct the row, or set the dataset's format.system" in str(
        error
    )
    # What the template does with it is no reason to lose it; messages keep the numbers that they have in the file.
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    error = refusal({**ROW, "system": "Be kind."}, ChatFormat(), chat(), template)
    assert "no system" in str(error) and "or set the dataset's format.system to null" in str(error)
    without = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    error = refusal({**ROW, "system": "Be kind."}, ChatFormat(), chat(), without)
    assert "leaves out the content of the system message" in str(error) and "format.system to null" in str(error)
    error = refusal({"messages": [USER, {**ANSWER, "weight": 3}], "system": "Be kind."}, ChatFormat(), demo())
    assert "messages[1].weight=3" in str(error)


@pytest.mark.parametrize("write", [list, json.dumps, lambda tools: [json.dumps(tool) for tool in tools]])
def test_functions_are_tools(write: Callable[[Any], Any]) -> None:
    """OpenAI's older name for them, without what stands around them now."""
    row = {**ROW, "functions": write([{"name": "now", "parameters": {}}])}
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    assert said(row) == said({**ROW, "tools": [tool]}) != said(ROW)
    assert said({**row, "tools": [{"name": "then"}]}) == said({**ROW, "tools": [{"name": "then"}]})
    assert said({**row, "tools": []}) == said(row)
    assert said(row, ChatFormat(tools=None)) == said(ROW)


@pytest.mark.parametrize("columnar", [False, True])
def test_messages_as_json_text_are_read(columnar: bool) -> None:
    calls = [{"function": {"name": "f", "arguments": {"x": None}}}]
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": calls, "weight": 1}]
    formatter = Formatter(ChatFormat(), tokenizer=chat(), vocab_size=5000, template=CHATML, columnar=columnar)
    rows = [{"messages": json.dumps(turns)}, {"messages": " \n" + json.dumps(ROW["messages"], indent=1)}]
    first, second = formatter.documents(rows, ["f:1", "f:2"])
    assert isinstance(first, Document) and isinstance(second, Document)
    assert '"arguments": {"x": null}' in pieces(first, chat())[1][0], "a null in JSON is a value"
    assert pieces(second, chat())[1] == (SAID, True)
    for text, message in (("What?", "is not a list of messages as JSON"), ('{"a": 1}', "is not a list of messages;")):
        assert message in str(refusal({"messages": text}, ChatFormat(), demo()))


@pytest.mark.parametrize("order", [2, 3])
def test_runs_of_older_versions_read_rows_as_they_did(order: int) -> None:
    weighted = {"messages": [USER, {**ANSWER, "weight": 0, "training": False}], "system": "Be kind.", "functions": [{}]}
    before, plain = of_version(order, weighted), of_version(order, ROW)
    assert isinstance(before, Document) and isinstance(plain, Document)
    assert before.labels.tolist() == plain.labels.tolist() and (before.labels != IGNORE).any()
    text = of_version(order, {"messages": json.dumps(ROW["messages"])})
    assert isinstance(text, RowError) and "is not a list of messages;" in str(text)


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("a weight", {"messages": [USER, {**ANSWER, "weight": 1}]}),
    ("training", {"messages": [USER, {**ANSWER, "training": True}]}),
    ("a system column", {**ROW, "system": "Be kind."}),
    ("functions", {**ROW, "functions": [{"name": "f"}]}),
    ("messages as text", {"messages": json.dumps(ROW["messages"])}),
]
SAME: list[tuple[str, dict[str, Any]]] = [
    ("a system message", {"messages": [{"role": "system", "content": "Be kind."}, USER, ANSWER]}),
    ("words that are no keys", {"messages": [{**USER, "content": 'What is "weight": 0, "system" here?'}, ANSWER]}),
    ("tools as text", {**ROW, "tools": json.dumps([{"name": "f"}])}),
    ("train", {"messages": [USER, {**ANSWER, "train": True}]}),
]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if ".parquet" in path.name:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif ".arrow" in path.name:
        table = pa.Table.from_pylist(list(rows))
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        text = json.dumps(list(rows)) if ".jsonl" not in path.name else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".jsonl.gz", ".parquet", ".arrow"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_new_run_has_the_lowest_version_that_reads_its_rows(tmp_path: Path, ending: str, in_place: bool) -> None:
    """And so finds the windows that older versions have cached of rows that have always meant the same."""
    if in_place and ending not in (".parquet", ".arrow"):
        pytest.skip("text is always read in place")

    def version(name: str, row: dict[str, Any], **format: Any) -> int:
        path = write(tmp_path / f"{name.replace(' ', '-')}{ending}", [row, ROW, ROW] if "text" not in name else [row])
        dataset = DatasetConfig(path=str(path), format=ChatFormat(**format))
        # First as a run of an older version opens it: what that keeps in the cache does not say which keys there are.
        old = open_source(dataset, cache=tmp_path / "cache", in_place=in_place, order=2)
        assert old.order_version == 2
        found = {
            open_source(dataset, cache=tmp_path / cache, in_place=in_place).order_version
            for cache in ("cache", "cache", "fresh", "fresh")
        }
        assert len(found) == 1
        return found.pop()

    assert {name: version(name, row) for name, row in OTHERS} == {name: 4 for name, _ in OTHERS}
    assert {name: version(name, row) for name, row in SAME} == {name: 2 for name, _ in SAME}
    assert version("b", {**ROW, "system": "x"}, system=None) == 2
    assert version("c", {**ROW, "functions": [{"name": "f"}]}, tools=None) == 2
    assert version("g", {**ROW, "functions": [{"name": "f"}]}, tools="functions") == 2, "as it always was"
    assert version("d", {**ROW, "sys": "x"}, system="sys") == 4
    assert version("e text", {"turns": json.dumps(ROW["messages"])}, messages="turns") == 4


def test_keys_are_found_in_many_small_files_and_in_tables_of_text(tmp_path: Path) -> None:
    for number in range(40):
        weight = {"weight": 0} if number == 33 else {}
        write(tmp_path / f"{number}.jsonl", [{"messages": [USER, {**ANSWER, **weight}]}])
    dataset = DatasetConfig(path=f"{tmp_path}/*.jsonl", format=ChatFormat())
    assert open_source(dataset, cache=tmp_path / "cache", in_place=False, order=2).order_version == 2
    for cache in ("cache", "cache", "fresh"):
        assert open_source(dataset, cache=tmp_path / cache, in_place=False).order_version == 4
    text = json.dumps(ROW["messages"]).replace('"', '""')
    (tmp_path / "table.csv").write_text(f'messages,system\n"{text}",Be kind.\n')
    table = DatasetConfig(path=str(tmp_path / "table.csv"), format=ChatFormat())
    source = open_source(table, cache=tmp_path / "cache", in_place=False)
    assert source.order_version == 4
    assert said(source.rows([0])[0]) == said({**ROW, "system": "Be kind."})  # type: ignore[arg-type]
    other = DatasetConfig(path=str(tmp_path / "table.csv"), format=CompletionFormat(type="completion", text="system"))
    assert open_source(other, cache=tmp_path / "cache", in_place=False).order_version == 2


def test_keys_are_found_wherever_the_file_is_cut_into_pieces() -> None:
    data = json.dumps({"a": "x" * 300, "weight": 1, "turns": "[ \n{}]", "system": 1, "functions": 2}).encode()
    for cut in range(1, len(data)):
        search = KeySearch()
        search.update(data[:cut])
        search.update(data[cut:])
        assert search.found() == Keys(frozenset({"weight", "system", "functions"}), frozenset({"turns"})), cut
    search = KeySearch()
    search.update(json.dumps({f"key {i}": "[{}]" for i in range(40)}).encode())
    assert ANY in search.found().texts


@pytest.mark.parametrize("between", [":", " : ", ":  ", "\t:\n"])
@pytest.mark.parametrize("front", ["", " ", "\n"])
def test_messages_as_text_are_found_however_they_are_spelled(between: str, front: str) -> None:
    search = KeySearch()
    search.update(f'{{"other": 1, "messages"{between}{json.dumps(front + json.dumps([{"role": "user"}]))}}}'.encode())
    assert search.found().texts == {"messages"}


def test_one_version_reads_rows_in_one_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run gets its version from a function's module; a key that no search finds is read by it from the beginning."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_one.py").write_text("def same(x):\n    return x\n")
    (tmp_path / "function_of_one.py").write_text(
        "import helper_of_one\n\n\ndef go(row):\n    return {'text': helper_of_one.same(row['text'])}\n"
    )
    row = json.dumps({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]})
    hidden = row.replace('"weight"', '"\\u0077eight"')
    assert hidden != row
    (tmp_path / "chats.jsonl").write_text(f"{hidden}\n" * 6)
    (tmp_path / "texts.jsonl").write_text('{"text": "hello you"}\n' * 6)
    function = PythonFormat(type="python", function="function_of_one:go", then=CompletionFormat(type="completion"))
    datasets = [
        DatasetConfig(path=str(tmp_path / "chats.jsonl")),
        DatasetConfig(path=str(tmp_path / "texts.jsonl"), format=function),
    ]
    new = make_windows(datasets, cache=tmp_path / "new", chat_template="chatml", seq_len=128)
    again = make_windows(datasets, cache=tmp_path / "again", chat_template="chatml", seq_len=128, order_version=4)
    assert new.order_version == 4 and new.fingerprint == again.fingerprint
    labels, others = ([each.labels.tolist() for each in all_samples(data)] for data in (new, again))
    assert labels == others


def test_version_decides_the_windows(tmp_path: Path) -> None:
    """The tokens that are trained on, by the version that a run was begun with."""
    rows = [{"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER], "system": "Be kind."}] * 3
    dataset = DatasetConfig(path=str(write(tmp_path / "rows.jsonl", rows)), format=ChatFormat())
    options: dict[str, Any] = {"cache": tmp_path / "cache", "tokenizer": chat(), "seq_len": 128}
    new, old = (
        make_windows([dataset], order_version=order, chat_template="chatml", vocab_size=5000, **options)
        for order in (None, 2)
    )
    assert (new.order_version, old.order_version) == (4, 2)
    trained = [int(each.get(0, 0)[0].samples.trained.sum()) for each in (new, old)]
    assert trained[1] == 2 * trained[0] > 0
    assert new.identity["datasets.0.format"] == old.identity["datasets.0.format"], "the default is no other format"
    again = make_windows([dataset], order_version=4, chat_template="chatml", vocab_size=5000, **options)
    assert again.fingerprint == new.fingerprint != old.fingerprint


def test_rows_of_a_function_may_have_any_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows_with_weights.py").write_text("def rows(row): return row\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "rows.jsonl", [ROW])
    for then, version in ((ChatFormat(), 4), (InstructionFormat(type="instruction"), 2)):
        format = PythonFormat(type="python", function="rows_with_weights:rows", then=then)
        source = open_source(DatasetConfig(path=str(path), format=format), cache=tmp_path / "cache", in_place=False)
        assert source.order_version == version


UNREAD: list[tuple[Any, dict[str, Any], str, str]] = [
    (ChatFormat(), {**ROW, "history": [["Hi.", "Hello."]]}, "history", "a function (format.type=python)"),
    (ChatFormat(), {**ROW, "system_prompt": "Be kind."}, "system_prompt", "format.system"),
    (ChatFormat(system=None), {**ROW, "system": "Be kind."}, "system", "format.system"),
    (ChatFormat(tools=None), {**ROW, "functions": [{"name": "f"}]}, "functions", "format.tools"),
    (ALPACA, {"instruction": "x", "output": "y", "system": "z"}, "system", "format.system"),
    (ALPACA, {"instruction": "x", "output": "y", "context": "z"}, "context", "format.input"),
    (
        TemplateFormat(type="template", prompt="{q}", completion="{a}"),
        {"q": "x", "a": "y", "input": "z"}, "input", "format.prompt",
    ),
    (
        ChatFormat(), {**ROW, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs",
        "chat_template_kwargs of the dataset (one map for all rows)",
    ),
    (TokensFormat(type="tokens", labels=None), {"input_ids": [5, 6], "labels": [5, -100]}, "labels", "format.labels"),
    (ChatFormat(), {**ROW, "images": ["x.jpg"]}, "images", "no format"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "row", "column", "by"), UNREAD)
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_well_known_column_that_is_not_read_is_said(
    tmp_path: Path, format: Any, row: dict[str, Any], column: str, by: str, ending: str
) -> None:
    """Never refused; with its share of rows that are not empty, and silent where it is meant so."""
    rows = [row, {**row, column: None}, row, row] * 5
    path = write(tmp_path / f"rows{ending}", rows)
    options: dict[str, Any] = {"cache": tmp_path / "cache", "seq_len": 64}
    windows = make_windows([DatasetConfig(path=str(path), format=format)], **options)
    (found,) = windows.unread
    assert found.fields() == {"dataset": "rows", "column": column, "share": 0.75, "rows": 20, "read_by": by}
    assert f"column '{column}' is not read, and 75.0% of 20 rows have something in it; {by} would read it" in str(found)
    silent = format.model_copy(update={"ignore": [column]})
    again = make_windows([DatasetConfig(path=str(path), format=silent)], **options)
    assert again.unread == [] and again.fingerprint == windows.fingerprint, "what is said decides nothing"
    empty = write(tmp_path / f"empty{ending}", [{**row, column: "" if isinstance(row[column], str) else []}] * 3)
    assert make_windows([DatasetConfig(path=str(empty), format=format)], **options).unread == []


def test_columns_that_are_read_and_those_of_functions_are_not_said(tmp_path: Path) -> None:
    row = {**ROW, "system": "Be kind.", "tools": [{"name": "f"}], "functions": [], "id": "history"}
    dataset = DatasetConfig(path=str(write(tmp_path / "rows.jsonl", [row])), format=ChatFormat())
    assert make_windows([dataset], cache=tmp_path / "cache").unread == []
    # A run that was begun before it was read goes on without it, and says so.
    (old,) = make_windows([dataset], cache=tmp_path / "cache", order_version=3).unread
    assert (old.column, old.read_by) == ("system", "a run that is begun now")
    masked = {"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [0, 1]}
    path = write(tmp_path / "tokens.jsonl", [masked])
    tokens = DatasetConfig(path=str(path), format=TokensFormat(type="tokens"))
    assert make_windows([tokens], cache=tmp_path / "cache").unread == []


def test_padding_that_would_be_trained_on_is_said(tmp_path: Path) -> None:
    """Rows of a tokenizer that was asked to pad. Its mask of rows without padding says nothing."""
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, pad]} for pad in (0, 1, 1, 0)]
    format = TokensFormat(type="tokens", labels=None)
    dataset = DatasetConfig(path=str(write(tmp_path / "rows.jsonl", rows)), format=format)
    (found,) = make_windows([dataset], cache=tmp_path / "cache").unread
    assert found.fields() == {
        "dataset": "rows", "column": "attention_mask", "share": 0.5, "rows": 4, "read_by": "format.mask"
    }  # fmt: skip
    assert str(found) == (
        "dataset 'rows': its column 'attention_mask' is not read, and 50.0% of 4 rows are padded by it, so that "
        "padding is trained on; format.mask would read it, and format.ignore=[attention_mask] silences this"
    )
    plain = DatasetConfig(path=str(write(tmp_path / "plain.jsonl", rows[1:3])), format=format)
    assert make_windows([plain], cache=tmp_path / "cache").unread == []
    read = DatasetConfig(path=dataset.path, format=TokensFormat(type="tokens", labels=None, mask="attention_mask"))
    assert make_windows([read], cache=tmp_path / "cache").unread == []


def test_unread_columns_are_said_once_for_training_and_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input_ids": [5, 6, 7 + i], "labels": [5, 6, 7 + i]} for i in range(40)]
    make_config(tmp_path)
    path = str(write(tmp_path / "rows.jsonl", rows))
    data = {
        "train": [{"path": path, "format": {"type": "tokens", "labels": None}}],
        "eval": {"rows": 10},
    }
    with caplog.at_level(logging.WARNING):
        open_data(make_config(tmp_path, data=data), demo(), 5000)
    assert [record.getMessage() for record in caplog.records] == [
        "dataset 'rows': its column 'labels' is not read, and 100.0% of 30 rows have something in it; format.labels "
        "would read it, and format.ignore=[labels] silences this"
    ]


def test_what_is_ignored_is_no_part_of_a_run() -> None:
    assert named("format", ChatFormat()) == {
        "type": "chat", "messages": "messages", "role": None, "content": None, "roles": {}, "tools": "tools",
        "loss": "assistant",
    }  # fmt: skip
    assert "system" in named("format", ChatFormat(system=None))
    then = named("format", PythonFormat(type="python", function="a:b"), exclude=("ignore",))["then"]
    assert then == named("format", ChatFormat())
