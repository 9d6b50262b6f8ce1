"""JSON Lines files: rows by number, and messages that name the line."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from raytune_fsdp.data import sources
from raytune_fsdp.data.sources import JsonLines
from raytune_fsdp.errors import DataError


def write(tmp_path: Path, content: bytes) -> JsonLines:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return JsonLines(str(path))


def test_rows_and_their_lines(tmp_path: Path) -> None:
    source = write(tmp_path, '\ufeff{"a": 1}\n\n  \n{"a": "é"}\r\n{"a": 3}'.encode())
    assert [source.row(i) for i in (2, 0, 1)] == [{"a": 3}, {"a": 1}, {"a": "é"}]
    assert len(source) == 3
    assert [source.where(i).rsplit(":", 1)[1] for i in range(3)] == ["1", "4", "5"]


def test_lines_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PIECE_BYTES", 4)
    source = write(tmp_path, b'        {"a": 12345678}\n         \n\n{"a": 2}\n')
    assert [source.row(i)["a"] for i in range(len(source))] == [12345678, 2]
    assert source.where(1).endswith(":4")


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first = write(tmp_path, b'{"a": 1}\n').fingerprint
    assert write(tmp_path, b'{"a": 1}\n').fingerprint == first
    assert write(tmp_path, b'{"a": 2}\n').fingerprint != first
    assert len(first) == 32


def test_pickled_source_opens_the_file_again(tmp_path: Path) -> None:
    source = write(tmp_path, b'{"a": 1}\n{"a": 2}\n')
    source.row(0)
    assert pickle.loads(pickle.dumps(source)).row(1) == {"a": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"rows\.jsonl:2: not valid JSON .* in '\{\"a\":'.*one JSON object a line"),
        (b'{"a": 1}\n\n[1, 2]\n', r"rows\.jsonl:3: '\[1, 2\]' is a list, not a JSON object"),
        (b'{"a": "\xff"}\n', r"rows\.jsonl:1: not UTF-8 at byte 7 of the line, b'\\xff\"\}'; .*iconv"),
        (b"[" * 100_000 + b"\n", r"rows\.jsonl:1: not valid JSON .* in '\[{80}…'"),
    ],
)
def test_bad_lines(tmp_path: Path, content: bytes, message: str) -> None:
    source = write(tmp_path, content)
    with pytest.raises(DataError, match=message) as raised:
        for index in range(len(source)):
            source.row(index)
    assert raised.value.exit_code == 2


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.jsonl: no such file; correct the dataset's path"):
        JsonLines(str(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match=r"is a directory; .* name the file in it"):
        JsonLines(str(tmp_path))
    with pytest.raises(DataError, match=r"has no rows \(3 bytes\)"):
        write(tmp_path, b"\n \n")


def test_file_that_changed_since_it_was_opened(tmp_path: Path) -> None:
    source = write(tmp_path, b'{"a": 1}\n')
    write(tmp_path, b'{"a": 1}\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"has 18 bytes, had 9 when it was opened"):
        source.row(0)
