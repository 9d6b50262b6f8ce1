"""Rows that cannot be used, by class and policy: refused by name, or left out, counted and listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config import DatasetConfig
from raytune_fsdp.data.census import SkippedRows, census
from raytune_fsdp.data.stream import Stream
from tests.rows import make_windows

TEXT = {"type": "completion"}
CHAT = {"type": "chat"}
TOKENS = {"type": "tokens", "labels": None}
USER, ASSISTANT = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}

# By reason: format, two bad rows as they stand in the file, and what the error says of the first.
CLASSES: dict[str, tuple[dict[str, Any], list[bytes | Any], str]] = {
    "invalid_utf8": (TEXT, [b'{"text": "a\xff"}', b"\xfe\xfe"], r"not UTF-8 at byte 11"),
    "broken_row": (TEXT, [b'{"text": "a"', b"[1, 2]"], r"not valid JSON .*text"),
    "missing_column": (TEXT, [{"body": "a"}, {}], r"no column 'text', it has 'body'"),
    "wrong_type": (TEXT, [{"text": 5}, {"text": ["a"]}], r"text=5 is not text but int"),
    "empty": (TEXT, [{"text": ""}, {"text": " \n "}], r"text='' is empty"),
    "null": (TEXT, [{"text": None}, {"text": None}], r"column 'text' is null"),
    "no_targets": (CHAT, [{"messages": [USER]}, {"messages": [USER, USER]}], r"no token of the row can be trained on"),
    "unknown_role": (
        CHAT,
        [{"messages": [USER, {"role": "robot", "content": "x"}]}, {"messages": [USER, {"content": "x"}, ASSISTANT]}],
        r"messages\[1\]\.role=.*robot.* unknown",
    ),
    "too_long": (
        TOKENS,
        [{"input_ids": [5] * 65}, {"input_ids": [5] * 99}],
        r"65 tokens, more than data\.seq_len=64; raise",
    ),
    "outside_vocabulary": (
        TOKENS,
        [{"input_ids": [5, 10_000, 6]}, {"input_ids": [5, -1]}],
        r"token 1 has id 10000, the model's vocabulary ends at 9999",
    ),
}
GOOD: dict[str, Any] = {
    "completion": {"text": "What is learned stays the same."},
    "chat": {"messages": [USER, ASSISTANT]},
    "tokens": {"input_ids": [5, 6, 7]},
}


def write(path: Path, format: dict[str, Any], bad: list[bytes | Any]) -> DatasetConfig:
    """Five good rows, the bad ones on lines 3 and 6."""
    lines = [json.dumps(GOOD[format["type"]]).encode()] * 5
    for place, row in zip((2, 5), bad, strict=True):
        lines.insert(place, row if isinstance(row, bytes) else json.dumps(row).encode())
    path.write_bytes(b"\n".join(lines) + b"\n")
    return DatasetConfig.model_validate({"path": str(path), "format": format})


@pytest.mark.parametrize("reason", CLASSES)
def test_refused_by_name(tmp_path: Path, reason: str) -> None:
    format, bad, complaint = CLASSES[reason]
    rows = write(tmp_path / "rows.jsonl", format, bad)
    with pytest.raises(RowError, match=complaint) as caught:
        census(make_windows([rows], cache=tmp_path / "cache", seq_len=64, shuffle="none"))
    assert caught.value.reason == reason
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'rows.jsonl'}:3: ")
    assert "data.bad_rows=skip" in message
    assert "\n" not in message and len(message) < 600
    assert not list((tmp_path / "cache").rglob("*.arrow"))


@pytest.mark.parametrize("reason", CLASSES)
def test_left_out_counted_and_listed(tmp_path: Path, reason: str) -> None:
    format, bad, complaint = CLASSES[reason]
    rows = write(tmp_path / "rows.jsonl", format, bad)
    windows = make_windows([rows], cache=tmp_path / "cache", seq_len=64, bad_rows="skip")
    counted = census(windows)
    assert (counted.total.rows, counted.total.documents, counted.total.dropped) == (7, 5, {reason: 2})
    assert sorted(row.where for row in counted.skipped) == [f"{tmp_path / 'rows.jsonl'}:{line}" for line in (3, 6)]
    assert {row.reason for row in counted.skipped} == {reason}
    # Without a census they are told of as their window is reached, once.
    stream = Stream(make_windows([rows], cache=tmp_path / "cache", seq_len=64, bad_rows="skip"), seed=5)
    told = SkippedRows(stream, Cursor(), counted=False)
    assert list(told.up_to(Cursor())) == []
    (fields,) = told.up_to(Cursor(index=1))
    assert fields["reasons"] == {reason: 2} and len(fields["rows"]) == 2
    assert list(told.up_to(Cursor(epoch=3))) == []
