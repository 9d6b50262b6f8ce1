"""Parquet, Arrow, folders of the datasets library and datasets of the hub as sources."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("datasets")

import datasets
from datasets.packaged_modules.json.json import Json

from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config.rules import Section
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.config.sections.formats import COLUMNS, ChatFormat, CompletionFormat, InstructionFormat, TokensFormat
from raytune_fsdp.data.sources import handles
from raytune_fsdp.data.sources import hub as hub_module
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Source

ROWS = [
    {
        "id": i,
        "text": None if i % 7 == 0 else f"é{i}" * (i % 5),
        "turns": [{"role": "user", "n": j} for j in range(i % 3)],
    }
    for i in range(2500)
]
TABLE = pa.Table.from_pylist(ROWS)


def opened(path: Path, *, in_place: bool = False, **fields: Any) -> Source:
    cache = next(parent for parent in path.parents if parent.name.startswith("test_")) / "cache"
    source = open_source(DatasetConfig(path=str(path), **fields), cache=cache, in_place=in_place)
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    again: Source = pickle.loads(pickled)
    assert again.columnar
    return again


def check(source: Source, rows: list[dict[str, Any]], *, blocks: list[int]) -> None:
    indices = [*range(len(rows)), *random.Random(0).choices(range(len(rows)), k=500), 0, 0]
    assert len(source) == len(rows)
    assert list(source.blocks) == blocks
    assert source.rows(indices) == [rows[index] for index in indices]
    assert source.rows([len(rows) - 1]) == [rows[-1]]


@pytest.fixture
def unbounded() -> Iterator[None]:
    handles.DECODED._limit, limit = 1, handles.DECODED._limit
    yield
    handles.DECODED._limit = limit


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize("in_place", [True, False])
def test_parquet(tmp_path: Path, in_place: bool) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(TABLE, path, row_group_size=1100)
    source = opened(path, in_place=in_place)
    check(source, ROWS, blocks=[1100, 1100, 300])
    assert source.where(0) == f"{path}, row 1"
    other = opened(path, in_place=not in_place)
    assert source.fingerprints == other.fingerprints
    assert list(source.blocks) == list(other.blocks)
    assert bool(list((tmp_path / "cache").rglob("rows.arrow"))), "written once as Arrow"
    assert not list((tmp_path / "cache").rglob("copy"))


def write_arrow(path: Path, form: str, compression: str | None, table: pa.Table = TABLE) -> None:
    new = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[form]
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=900)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_in_place(tmp_path: Path, form: str, compression: str | None) -> None:
    path = tmp_path / "rows.arrow"
    write_arrow(path, form, compression)
    check(opened(path), ROWS, blocks=[900, 900, 700])
    assert not list((tmp_path / "cache").rglob("rows.arrow"))


@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_with_dictionaries_is_written_plainly(tmp_path: Path, form: str) -> None:
    inner = pa.array([[{"kind": "x"}], [], [{"kind": "y"}, {"kind": "x"}]])
    kind = pa.list_(pa.struct([("kind", pa.dictionary(pa.int32(), pa.string()))]))
    table = pa.table({"a": pa.array(["p", None, "p"]).dictionary_encode(), "b": inner.cast(kind)})
    write_arrow(tmp_path / "rows.arrow", form, None, table)
    check(opened(tmp_path / "rows.arrow"), table.to_pylist(), blocks=[3])
    pq.write_table(table, tmp_path / "rows.parquet")
    check(opened(tmp_path / "rows.parquet"), table.to_pylist(), blocks=[3])


@pytest.mark.parametrize("kind", ["in place", "written as Arrow", "Arrow"])
def test_only_columns_of_the_format_are_read(tmp_path: Path, kind: str) -> None:
    names = ["messages", "tools", "turns.x", "instruction", "input", "output", "text", "input_ids", "labels", "other"]
    table = pa.table({name: pa.array([{"a": 1, "messages": 2}, None]) for name in names})
    path = tmp_path / ("rows.arrow" if kind == "Arrow" else "rows.parquet")
    if kind == "Arrow":
        write_arrow(path, "file", None, table)
    else:
        pq.write_table(table, path)
    for format, expected in [
        ({"type": "chat"}, ["messages", "tools"]),
        ({"type": "chat", "messages": "turns.x", "tools": None}, ["turns.x"]),
        ({"type": "chat", "tools": "absent"}, ["messages"]),
        ({"type": "instruction"}, ["instruction", "input", "output"]),
        ({"type": "instruction", "system": "other", "input": None}, ["instruction", "output", "other"]),
        ({"type": "completion"}, ["text"]),
        ({"type": "tokens", "mask": "other", "labels": None}, ["input_ids", "other"]),
        ({"type": "tokens", "labels": "absent"}, ["input_ids"]),
        # So that people are shown what there is.
        ({"type": "completion", "text": "absent"}, names),
        ({"type": "instruction", "prompt": "absent"}, names),
    ]:
        source = opened(path, in_place=kind == "in place", format=format)
        assert source.rows([1, 0]) == table.select(expected).take([1, 0]).to_pylist(), format


def test_every_column_of_the_formats_is_known() -> None:
    formats: dict[str, type[Section]] = {
        "chat": ChatFormat,
        "instruction": InstructionFormat,
        "completion": CompletionFormat,
        "tokens": TokensFormat,
    }
    for kind, format in formats.items():
        fields = {name for name, field in format.model_fields.items() if (field.description or "").startswith("Column")}
        needed, optional = COLUMNS[kind]
        assert {*needed, *optional} == fields


def test_packed_parquet_and_arrow(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "rows.parquet", row_group_size=2000)
    write_arrow(tmp_path / "rows.arrow", "file", None)
    for name in ("rows.parquet", "rows.arrow"):
        content = (tmp_path / name).read_bytes()
        plain = opened(tmp_path / name)
        (tmp_path / f"{name}.zst").write_bytes(pa.compress(content, "zstd", asbytes=True))
        packed = opened(tmp_path / f"{name}.zst", in_place=True)
        check(packed, ROWS, blocks=list(plain.blocks))
        assert list(packed.fingerprints.values()) == list(plain.fingerprints.values())


def test_rows_that_python_cannot_hold(tmp_path: Path) -> None:
    bad = pa.array([b"ok", b"\xff\xfe", b"fine"] * 5).cast(pa.binary()).view(pa.string())
    when = pa.array([0, 0, 1 << 60] * 5, pa.timestamp("s"))
    write_arrow(tmp_path / "rows.arrow", "file", None, pa.table({"text": bad, "when": when}))
    rows = opened(tmp_path / "rows.arrow").rows(range(15))
    reasons = [row.reason if isinstance(row, RowError) else row["text"] for row in rows]
    assert reasons == ["ok", "invalid_utf8", "broken_row"] * 5
    assert f"{tmp_path}/rows.arrow, row 5: not UTF-8" in str(rows[4])
    assert "row 6: has a value that Python cannot hold" in str(rows[5])


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    write_arrow(tmp_path / "whole.arrow", "stream", None)
    arrow = (tmp_path / "whole.arrow").read_bytes()
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    write_arrow(tmp_path / "twice.arrow", "file", None, twice)
    write_arrow(tmp_path / "none.arrow", "file", None, TABLE.slice(0, 0))
    pq.write_table(TABLE.slice(0, 0), tmp_path / "none.parquet")
    for name, content, message in [
        ("cut.parquet", whole[:-100], "cut.parquet: cannot be read (.*); check that it exists, is complete"),
        ("text.parquet", b"no parquet at all", "text.parquet: cannot be read"),
        ("flipped.parquet", whole[:4] + bytes(3000) + whole[3004:], "flipped.parquet: cannot be read"),
        ("cut.arrow", arrow[:-5000], "cut.arrow: cannot be read"),
        ("text.arrow", b"no arrow at all", "text.arrow: cannot be read"),
        ("empty.arrow", b"", "empty.arrow: cannot be read"),
        ("twice.arrow", None, "twice.arrow: has two columns called a"),
        ("none.arrow", None, "none.arrow: has no rows"),
        ("none.parquet", None, "none.parquet: has no rows"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message.replace("(", r"\(").replace(")", r"\)")):
            opened(tmp_path / name)
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_parquet_that_changed_since_it_was_opened(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    source = opened(tmp_path / "rows.parquet", in_place=True)
    pq.write_table(TABLE.slice(1), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="rows.parquet: has .* when it was opened; a dataset must not change"):
        source.rows([0])


def test_folders_of_the_datasets_library(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS[:100])
    whole.save_to_disk(tmp_path / "shards", num_shards=3)
    source = opened(tmp_path / "shards")
    check(source, ROWS[:100], blocks=[34, 33, 33])
    assert source.where(34) == f"{tmp_path}/shards/data-00001-of-00003.arrow, row 1"
    whole.select([7, 3, 3]).save_to_disk(tmp_path / "selected")
    check(opened(tmp_path / "selected"), [ROWS[7], ROWS[3], ROWS[3]], blocks=[3])
    assert not list((tmp_path / "cache").rglob("rows.arrow"))
    datasets.DatasetDict(train=whole, test=whole.select([1])).save_to_disk(tmp_path / "splits")
    check(opened(tmp_path / "splits", split="train"), ROWS[:100], blocks=[100])
    check(opened(tmp_path / "splits", split="test"), ROWS[1:2], blocks=[1])
    assert len(opened(tmp_path / "splits", split="all")) == 101
    with pytest.raises(DataError, match=r"has several splits; set split to one of train, test, or to all for every"):
        opened(tmp_path / "splits")
    with pytest.raises(DataError, match=r"splits: split='dev' does not exist; set split to one of train, test"):
        opened(tmp_path / "splits", split="dev")
    state = tmp_path / "selected/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(
        DataError, match=r"selected/state\.json: cannot be read \(its rows are selected by .*save_to_disk"
    ):
        opened(tmp_path / "selected")


@pytest.mark.parametrize("name", ["plain.arrow", "plain.arrow.gz", "coded.arrow"])
@pytest.mark.parametrize("nested", [False, True])
def test_offsets_that_lead_out_of_a_file_are_refused(tmp_path: Path, name: str, nested: bool) -> None:
    """Using them would crash the process. The first and the last one are right, as the quick check wants it."""
    wild = np.array([0, 1 << 30, 2, 3], dtype=np.int32)
    column = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(wild.tobytes()), pa.py_buffer(b"abc")])
    column.validate()
    if nested:
        turns = pa.StructArray.from_arrays([column], ["content"])
        column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turns)
    columns = {"text": column, "code": pa.array(["x"] * 3)}
    if name == "coded.arrow":  # must be rewritten to be read in any order
        columns["code"] = columns["code"].dictionary_encode()
    plain = tmp_path / "written.arrow"
    table = pa.table(columns)
    with pa.OSFile(str(plain), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    path = tmp_path / name
    path.write_bytes(gzip.compress(plain.read_bytes()) if path.suffix == ".gz" else plain.read_bytes())
    with pytest.raises(DataError, match=rf"{name}: cannot be read \(.*offset for slot 1 out of bounds: .* > 3\)"):
        open_source(DatasetConfig(path=str(path)), cache=tmp_path / "cache", in_place=False)


def test_values_that_are_only_wrong_are_bad_rows_or_taken(tmp_path: Path) -> None:
    text = pa.array([b"good", b"\xff"]).view(pa.string())
    date = pa.array([1, 2]).view(pa.date64())  # no whole days
    price = pa.array([10**8, 1], pa.decimal128(9, 0)).view(pa.binary(16)).view(pa.decimal128(3, 0))
    table = pa.table({"text": text, "date": date, "price": price})
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    dataset = DatasetConfig.model_validate({"path": str(tmp_path / "rows.arrow"), "format": {"type": "completion"}})
    good, bad = open_source(dataset, cache=tmp_path / "cache", in_place=False).rows([0, 1])
    assert good == {"text": "good"} and isinstance(bad, RowError) and bad.reason == "invalid_utf8"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Source]:
    """The cache of the datasets library as it is after org/chats was loaded from the hub, and no network."""
    library = tmp_path / "library"
    files = {}
    for split, rows in {"train": ROWS[:1200], "test": ROWS[:3]}.items():
        files[split] = [str(tmp_path / f"{split}.jsonl")]
        Path(files[split][0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for subset in ("plain", "other"):
        builder = Json(dataset_name="chats", config_name=subset, cache_dir=str(library), hash=COMMIT, data_files=files)
        builder.download_and_prepare()
        # Loaded by name, the directory has the name of the subset and not a hash of the files.
        (library / "org___chats").mkdir(exist_ok=True)
        next((library / "chats").glob(f"{subset}-*")).rename(library / "org___chats" / subset)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", library)

    def open_hub(**fields: Any) -> Source:
        dataset = DatasetConfig(**{"hub": "org/chats", "subset": "plain", **fields})
        return open_source(dataset, cache=tmp_path / "cache", in_place=False)

    return open_hub


def test_hub_name_without_network(hub: Callable[..., Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hub()
    assert source.label == "org/chats"
    assert list(source.fingerprints) == ["org/chats"]
    check(source, ROWS[:1200], blocks=list(source.blocks))
    assert max(source.blocks) <= 1024
    assert source.where(16) == "org/chats, row 17"
    check(hub(split="test", revision=COMMIT), ROWS[:3], blocks=[3])
    assert hub(subset="other").fingerprints == source.fingerprints, "the content is the same"
    for fields, message in [
        ({"split": "dev"}, r"split=dev: cannot be loaded \(Unknown split .*'train', 'test'.*\); correct hub, subset"),
        ({"subset": "nope"}, r"subset=nope, .*: cannot be loaded \(.*configs in the cache: .*'other', 'plain'.*\)"),
        ({"hub": "org/none"}, r"hub=org/none, .*: cannot be loaded \(Couldn't reach .*same HF_HOME on a"),
        ({"revision": "v2"}, rf"revision=v2: the hub cannot be asked .* has {COMMIT}; set revision to that"),
    ]:
        with pytest.raises(DataError, match=message):
            hub(**fields)
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    # Another node, which never loaded it, needs nothing but our cache.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "nothing")
    assert hub().rows([1199]) == ROWS[1199:1200]


def test_hub_name_is_no_directory_here(
    hub: Callable[..., Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org/chats").mkdir(parents=True)
    (tmp_path / "org/chats/train.jsonl").write_text('{"id": "a stranger\'s"}\n')
    monkeypatch.chdir(tmp_path)
    assert len(hub()) == 1200
    with pytest.raises(DataError, match="subset=default, .*configs in the cache: .*'other', 'plain'"):
        hub(subset="default")


def test_another_commit_of_the_library_is_not_kept_under_the_one_that_the_hub_named(
    hub: Callable[..., Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str | None] = [COMMIT, COMMIT]
    monkeypatch.setattr(hub_module, "_ask", lambda _: answers.pop(0) if answers else None)
    for fields in ({}, {"revision": COMMIT}):
        assert len(hub(**fields)) == 1200
    for entry in (tmp_path / "cache/files").iterdir():
        if entry.is_dir():  # a clean-up: that the hub has named this commit is still noted
            shutil.rmtree(entry)
    assert len(hub()) == 1200
    (entry,) = (each for each in (tmp_path / "cache/files").iterdir() if each.is_dir())
    shutil.rmtree(entry)
    newer = "f" * 40
    for directory in (tmp_path / "library").glob(f"org___chats/*/*/{COMMIT}"):
        directory.rename(directory.with_name(newer))
    for fields, answer in (({}, None), ({"revision": COMMIT}, None), ({}, COMMIT)):
        answers.append(answer)
        with pytest.raises(DataError, match=rf"commit {COMMIT}, which cannot be .* has {newer}; connect .* revision"):
            hub(**fields)
    assert len(hub(revision=newer)) == 1200
