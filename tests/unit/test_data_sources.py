"""Text files as sources: rows by number, broken rows as values, and messages that name file, line and way out."""

from __future__ import annotations

import csv
import gzip
import io
import json
import multiprocessing
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.data.sources import handles, scan
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Source


def opened(path: Path | str, cache: Path, **fields: Any) -> Source:
    return open_source(DatasetConfig(path=str(path), **fields), cache=cache, in_place=False)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Source]:
    def write(content: bytes, name: str = "rows.jsonl", **fields: Any) -> Source:
        (tmp_path / name).write_bytes(content)
        return opened(tmp_path / name, tmp_path / "cache", **fields)

    return write


def lines_of(source: Source) -> list[str]:
    return [source.where(index).rsplit("/", 1)[1] for index in range(len(source))]


def test_json_lines(write: Callable[..., Source]) -> None:
    source = write('\ufeff{"a": 1}\n\n  \n{"a": "é"}\r\n{"a": 3}'.encode())
    assert source.rows([2, 0, 1, 2]) == [{"a": 3}, {"a": 1}, {"a": "é"}, {"a": 3}]
    assert lines_of(source) == ["rows.jsonl:1", "rows.jsonl:4", "rows.jsonl:5"]
    assert source.rows([]) == []
    with pytest.raises(IndexError):
        source.rows([3])
    with pytest.raises(IndexError):
        source.where(-1)


def test_text_lines_are_rows(write: Callable[..., Source]) -> None:
    source = write("\ufeff first \r\n\n\t\nsecond é\u2028\n\ufefflast".encode(), "rows.txt")
    assert source.rows([0, 1, 2]) == [{"text": " first "}, {"text": "second é\u2028"}, {"text": "\ufefflast"}]
    assert lines_of(source) == ["rows.txt:1", "rows.txt:4", "rows.txt:5"]


def test_csv_with_quotes_and_line_breaks(write: Callable[..., Source]) -> None:
    source = write('\ufeffid,"te\nxt"\n1,"a ""b""\r\n\nc, d"\n\n2,5" disk\n3,é\n'.encode(), "rows.csv")
    key = "te\nxt"
    assert source.rows([2, 1, 0]) == [
        {"id": "3", key: "é"},
        {"id": "2", key: '5" disk'},
        {"id": "1", key: 'a "b"\r\n\nc, d'},
    ]
    assert lines_of(source) == ["rows.csv:3", "rows.csv:7", "rows.csv:8"]
    assert write(b"a\tb\n1,5\t2\n", "rows.tsv").rows([0]) == [{"a": "1,5", "b": "2"}]


def test_a_field_longer_than_what_csv_takes_by_default(write: Callable[..., Source]) -> None:
    assert write(b"a,b\n1," + b"x" * 200_000 + b"\n", "rows.csv").rows([0]) == [{"a": "1", "b": "x" * 200_000}]


@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 20])
def test_json_array(write: Callable[..., Source], monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(scan, "_PIECE_BYTES", piece)
    rows = [{"a": [1, {"b": "],[{"}]}, {"é\ud83d\ude00": '\\"'}, {"c": -1.5e-7}, {"d": 12345678901234567890}]
    text = json.dumps(rows, indent=3, ensure_ascii=False)
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    source = write(b"\xef\xbb\xbf \n" + text.encode() + b"\n ", f"rows-{piece}.json")
    assert source.rows([3, 1, 0, 2]) == [json.loads(text)[index] for index in (3, 1, 0, 2)]
    assert source.where(2).endswith(f"rows-{piece}.json, row 3")


def test_json_file_with_an_object_a_line(write: Callable[..., Source]) -> None:
    source = write(b'\n{"a": 1}\n{"a": 2}\n', "rows.json")
    assert source.rows([1, 0]) == [{"a": 2}, {"a": 1}]
    assert lines_of(source) == ["rows.json:2", "rows.json:3"]


def test_lines_longer_than_what_is_read_at_once(write: Callable[..., Source], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_PIECE_BYTES", 4)
    source = write(b'        {"a": 12345678}\n         \n\n{"a": 2}\n')
    assert source.rows([0, 1]) == [{"a": 12345678}, {"a": 2}]
    assert source.where(1).endswith(":4")


_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
_texts = st.text(st.characters(exclude_categories=["Cs"]))
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".jsonl.gz", ".csv.zst"])
def test_any_rows_come_back_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, data: st.DataObject
) -> None:
    monkeypatch.setattr(scan, "_PIECE_BYTES", data.draw(st.sampled_from([3, 64, 1 << 20]), "piece"))
    rows: list[dict[str, Any]]
    if ".csv" in ending:
        columns = data.draw(st.lists(_names, min_size=2, max_size=3, unique=True), "columns")
        rows = data.draw(st.lists(st.fixed_dictionaries(dict.fromkeys(columns, _texts)), min_size=1), "rows")
        text = io.StringIO(newline="")
        writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])))
        writer.writerows([columns, *([row[column] for column in columns] for row in rows)])
        content = text.getvalue()
    else:
        rows = data.draw(st.lists(st.dictionaries(_names, _values, max_size=3), min_size=1), "rows")
        ascii_only = data.draw(st.booleans())
        if ".jsonl" in ending:
            content = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
        else:
            indent = data.draw(st.sampled_from([None, 0, 2]))
            content = json.dumps(rows, ensure_ascii=ascii_only, indent=indent)
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}{ending}"
    pack = {".gz": gzip.compress, ".zst": lambda raw: pa.compress(raw, "zstd", asbytes=True)}
    path.write_bytes(pack.get(path.suffix, bytes)(content.encode()))
    source = opened(path, tmp_path / "cache")
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1)), "indices")
    assert len(source) == len(rows) == sum(source.blocks)
    assert source.rows(indices) == [rows[index] for index in indices]


# mtime: the name of a test must not depend on the second in which it is collected.
TORN = gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-12]
BROKEN = [
    (
        "r.jsonl",
        b'{"a": 1}\n{"a": \n',
        1,
        "broken_row",
        "r.jsonl:2: not valid JSON (",
        "in '{\"a\":'; a JSON Lines file",
    ),
    ("r.jsonl", b'{"a": 1}\n\n[1, 2]\n', 1, "broken_row", "r.jsonl:3: '[1, 2]' is not a JSON object but list", "one"),
    (
        "r.jsonl",
        b'{"a": "\xff"}\n',
        0,
        "invalid_utf8",
        "r.jsonl:1: not UTF-8 at byte 7 of the line, b'\\xff\"}'",
        "iconv",
    ),
    ("r.jsonl", b"[" * 100_000 + b"\n", 0, "broken_row", "r.jsonl:1: not valid JSON (", "in '" + "[" * 80 + "…'"),
    (
        "r.json",
        b'[{"a": 1}, 7, {}]',
        1,
        "broken_row",
        "r.json, row 2: '7' is not a JSON object but int",
        "array of objects",
    ),
    ("r.json", b'[{"a": "\xc3"}]', 0, "invalid_utf8", "r.json, row 1: not UTF-8 at byte 7 of the row", "iconv"),
    (
        "r.json",
        b'[{"a": "\t"}]',
        0,
        "broken_row",
        "r.json, row 1: not valid JSON (Invalid control character",
        "correct",
    ),
    ("r.json", b'[{"a": ' + b"9" * 5000 + b"}]", 0, "broken_row", "r.json, row 1: not valid JSON (Exceeds", "correct"),
    ("r.txt", b"a\n\n\xe9\n", 1, "invalid_utf8", "r.txt:3: not UTF-8 at byte 0 of the line, b'\\xe9'", "iconv"),
    ("r.csv", b"a,b\n1,2\n3\n", 1, "broken_row", "r.csv:3: 1 fields, the header has 2, in '3'", "correct or remove"),
    ("r.csv", b"a,b\n1,2,3\n", 0, "broken_row", "r.csv:2: 3 fields, the header has 2, in '1,2,3'", "CSV file is"),
    ("r.csv", b'a,b\n1,"2"3\n', 0, "broken_row", "r.csv:2: not a CSV record (", "correct or remove"),
    ("r.csv", b'a,b\n1,2\n3,"4\n5,6', 1, "broken_row", "r.csv:3: not a CSV record (unexpected end of data)", "correct"),
    ("r.csv", b"a,b\n1,\xff\n", 0, "invalid_utf8", "r.csv:2: not UTF-8 at byte 2 of the row", "iconv"),
]


@pytest.mark.parametrize(("name", "content", "index", "reason", "start", "end"), BROKEN)
def test_broken_rows_are_values(
    write: Callable[..., Source], name: str, content: bytes, index: int, reason: str, start: str, end: str
) -> None:
    source = write(content, name)
    row = source.rows(range(len(source)))[index]
    assert isinstance(row, RowError), row
    assert row.reason == reason
    assert f"/{start}" in str(row)
    assert end in str(row).split(start)[1]
    assert len(str(row).split("/")[-1]) < 400
    assert not [other for other in source.rows(range(index)) if isinstance(other, RowError)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", b"\n \n", r"r\.jsonl: has no rows \(3 bytes\); .*one JSON object a line.*remove the file"),
        ("r.jsonl", b"", r"r\.jsonl: has no rows \(0 bytes\)"),
        ("r.csv", b"a,b\n", r"r\.csv: has no rows \(4 bytes\)"),
        ("r.csv", b"a,a\n1,2\n", r"r\.csv:1: the header names a column twice \(\['a', 'a'\]\)"),
        ("r.csv", b"a,\xff\n1,2\n", r"r\.csv:1: the header is not UTF-8; .*iconv"),
        ("r.json", b"[]", r"r\.json: has no rows"),
        ("r.json", b'[{"a": 1}, {"b": }]', r"r\.json, row 2: not valid JSON \(.*\) at byte 11, .*; .*JSON Lines"),
        ("r.json", b'[{"a": 1}, {"b": 2}', r"row 3: not valid JSON \(the file ends in the array\)"),
        ("r.json", b'[{"a": 1} {"b": 2}]', r"row 2: not valid JSON \('\{' follows where ',' or '\]' must\)"),
        ("r.json", b'[{"a": 1}] x', r"not valid JSON \('x' follows after the array\)"),
        ("r.json", b'{\n"a": [{"b": 1}]}', r"r\.json: is one JSON object over several lines; .*array of objects"),
        ("r.jsonl.gz", b"no gzip", r"r\.jsonl\.gz: cannot be read \(.*\); check that it exists, is complete"),
        ("r.jsonl.gz", TORN, r"r\.jsonl\.gz: cannot be read \(.*\); check that it"),
        ("r.unknown", b"{}", r"r\.unknown: its ending does not say what it is; set file_type"),
    ],
)
def test_files_that_cannot_be_used(
    write: Callable[..., Source], tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message) as raised:
        write(content, name)
    assert not isinstance(raised.value, RowError)
    assert list((tmp_path / "cache").rglob("*")) in ([], [tmp_path / "cache" / "files"])


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("r.csv", b"a;b\n1;2\n", "';' (the header is 'a;b'); a CSV file has commas: convert it"),
        ("r.csv", b"a|b\n1|2\n", "'|' (the header is 'a|b'); a CSV file has commas: convert it"),
        ("r.csv", b"a\tb\n1\t2\n", "tabs (the header is 'a\\tb'); a CSV file has commas: give it the ending .tsv"),
        ("r.tsv", b"a,b\n1,2\n", "',' (the header is 'a,b'); a .tsv file has tabs: convert it"),
    ],
)
def test_a_csv_file_with_another_delimiter(write: Callable[..., Source], name: str, content: bytes, rule: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"{name}: its columns seem to be separated by {rule}")):
        write(content, name)
    with pytest.raises(DataError, match="seem to be separated"):
        write(content, name)  # also when its rows were found before
    header = content.split(b"\n")[0].decode()
    assert write(content, name, format={"type": "completion", "text": header}).rows([0])  # a column of that name


def test_fingerprint_is_of_the_content(write: Callable[..., Source]) -> None:
    def fingerprint(*args: Any) -> list[str]:
        return list(write(*args).fingerprints.values())

    first = fingerprint(b'{"a": 1}\n')
    assert fingerprint(b'{"a": 1}\n', "other.jsonl") == first
    assert fingerprint(gzip.compress(b'{"a": 1}\n'), "packed.jsonl.gz") == first
    assert fingerprint(b'{"a": 2}\n') != first
    assert len(first[0]) == 32


def test_fingerprint_is_of_how_the_content_is_read(write: Callable[..., Source]) -> None:
    content = b"a,b\tc\n1,2\t3\n"

    def fingerprint(name: str, **fields: Any) -> str:
        (found,) = write(content, name, **fields).fingerprints.values()
        return found

    ways = [fingerprint(f"rows.{ending}") for ending in ("jsonl", "txt", "csv", "tsv")]
    assert len(set(ways)) == 4
    assert [
        fingerprint("rows.jsonl", file_type="text"),
        fingerprint("rows.txt", file_type="jsonl"),
        fingerprint("rows.json"),
        fingerprint("rows.txt", file_type="csv"),
    ] == [ways[1], ways[0], ways[0], ways[2]]


def test_a_file_that_changed_since_it_was_opened(write: Callable[..., Source], tmp_path: Path) -> None:
    source = write(b'{"a": 1}\n')
    copied = pickle.dumps(source)
    os.utime(tmp_path / "rows.jsonl", (1, 1))
    # A copy on another node: other time, same content.
    assert pickle.loads(copied).rows([0]) == [{"a": 1}]
    source = write(b'{"a": 2}\n')
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 3}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl: has other content than when it was opened; .*final file"):
        source.rows([0])
    source = write(b'{"a": 4}\n')
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"has 18 bytes, had 9 when it was opened"):
        source.rows([0])
    source = write(b'{"a": 5}\n')
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be read \(No such file.*all nodes must see it"):
        source.rows([0])


def test_a_copy_with_another_time_is_not_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "many").mkdir()
    for index in range(20):
        (tmp_path / f"many/{index:02}.jsonl").write_text(f'{{"id": {index}}}\n')
    source = opened(tmp_path / "many", tmp_path / "cache")
    for file in (tmp_path / "many").iterdir():
        os.utime(file, (1, 1))
    monkeypatch.setattr(handles, "content_hash", None)
    monkeypatch.setattr(handles.OPEN, "_limit", 2)
    for _ in range(3):
        assert source.rows(range(20)) == [{"id": index} for index in range(20)]
    # What was found in a copy says nothing about what is written there later.
    (tmp_path / "many/00.jsonl").write_text('{"id": 9}\n')
    with pytest.raises(DataError, match=r"00\.jsonl: has other content than when it was opened"):
        source.rows([0])


def _read_in_child(pickled: bytes, queue: Any) -> None:
    source = pickle.loads(pickled)
    queue.put((source.rows([99_999, 0]), source.where(7)))


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_pickled_it_is_small_and_opens_its_files_again(write: Callable[..., Source], start: str) -> None:
    source = write(b"".join(b'{"a": %d}\n' % index for index in range(100_000)))
    source.rows([5])
    pickled = pickle.dumps(source)
    assert len(pickled) < 1000
    context = multiprocessing.get_context(start)
    queue = context.Queue()
    process = context.Process(target=_read_in_child, args=(pickled, queue))
    process.start()
    rows, where = queue.get(timeout=60)
    process.join()
    assert rows == [{"a": 99_999}, {"a": 0}]
    assert where.endswith("rows.jsonl:8")
