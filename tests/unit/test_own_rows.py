"""Rows that a program has in memory, as `path` of a dataset."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.launch.own_rows import with_files

ROWS = [{"text": "Ada keeps the keys.", "n": 1}, {"text": "Größe \N{SNOWMAN}", "n": 2}]


def given(tmp_path: Path, rows: Any, **more: Any) -> dict[str, Any]:
    sections = {"run": {"name": "x", "storage": tmp_path}, "data": {"train": [{"path": rows, **more}], "seq_len": 8}}
    found = with_files(sections)
    assert sections["data"]["train"][0]["path"] is rows, "the caller's own map is as it was"  # type: ignore[index]
    assert found["data"]["seq_len"] == 8 and found["run"] == sections["run"]
    source: dict[str, Any] = found["data"]["train"][0]
    return source


def read(source: dict[str, Any]) -> list[Any]:
    return [json.loads(line) for line in Path(source["path"]).read_text().splitlines()]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS, tuple(ROWS), iter(ROWS), pd.DataFrame(ROWS), pa.Table.from_pylist(ROWS), datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    ],
    ids=["list", "tuple", "iterator", "pandas", "arrow", "dataset", "stream"],
)  # fmt: skip
def test_rows_of_every_kind_are_the_same_file(tmp_path: Path, rows: Any) -> None:
    source = given(tmp_path, rows, format={"type": "text"})
    assert read(source) == ROWS and source["name"] == "train" and source["format"] == {"type": "text"}
    assert source["path"] == given(tmp_path, ROWS)["path"] and Path(source["path"]).parent == tmp_path / "own-rows"
    assert [*(tmp_path / "own-rows").iterdir()] == [Path(source["path"])], "nothing else is left"


def test_paths_stay_and_several_datasets_have_names_of_their_own(tmp_path: Path) -> None:
    sections = {
        "run": {"storage": str(tmp_path)},
        "data": {"train": [{"path": "a.jsonl"}, {"path": ROWS}, {"path": ROWS[:1], "name": "mine"}],
                 "eval": [{"path": Path("b.jsonl")}, {"hub": "x/y"}, {"path": ROWS}]},
    }  # fmt: skip
    data = with_files(sections)["data"]
    assert data["train"][0] == {"path": "a.jsonl"} and [each.get("name") for each in data["train"]] == [
        None, "train-1", "mine",
    ]  # fmt: skip
    assert data["eval"][:2] == sections["data"]["eval"][:2] and data["eval"][2]["name"] == "eval-2"
    assert data["eval"][2]["path"] == data["train"][1]["path"] != data["train"][2]["path"]
    for held_out in ({"fraction": 0.1}, None):
        assert with_files({"data": {"eval": held_out}}) == {"data": {"eval": held_out}}
    assert with_files({"optim": {"lr": 1}}) == {"optim": {"lr": 1}}


def test_values_of_tables_become_those_of_json(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.5, None], "b": [np.array([1, 2]), [3]], "c": [date(2026, 1, 2), None]})
    row = {"ids": np.int64(7), "deep": {"x": (np.float32(0.5), float("nan"))}, 3: True}
    assert read(given(tmp_path, frame)) == [
        {"a": 1.5, "b": [1, 2], "c": "2026-01-02"}, {"a": None, "b": [3], "c": None},
    ]  # fmt: skip
    assert read(given(tmp_path, [row])) == [{"ids": 7, "deep": {"x": [0.5, None]}, "3": True}]


def test_a_file_that_somebody_has_changed_is_written_again(tmp_path: Path) -> None:
    path = Path(given(tmp_path, ROWS)["path"])
    before = path.stat().st_mtime_ns
    assert Path(given(tmp_path, ROWS)["path"]).stat().st_mtime_ns == before
    path.write_text("other")
    assert read(given(tmp_path, ROWS)) == ROWS


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (7, "data.train.0.path: a int is neither a path nor rows: give a path, a Dataset"),
        (b"a.jsonl", "data.train.0.path: a bytes is neither a path nor rows"),
        ({"train": ROWS}, "data.train.0.path: is a map of train, not rows: give one of its values"),
        ([], "data.train.0.path: has no rows; an iterator has them once only"),
        ([*ROWS, "x"], "data.train.0.path: row 2: is a str, must be a map of columns"),
        ([{"a": 1, "picture": object()}], r"row 0: column picture holds what JSON cannot \(TypeError: a object\)"),
        ([{"a": float("inf")}], "row 0: column a holds what JSON cannot"),
        ([{"a": "\ud800"}], "row 0: column a holds what JSON cannot"),
    ],
)
def test_what_are_no_rows_is_refused_and_leaves_nothing(tmp_path: Path, rows: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        given(tmp_path, rows)
    assert "\n" not in str(refused.value) and not [*(tmp_path).rglob("*.*")]


def test_a_storage_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "own-rows").write_text("a file")
    with pytest.raises(ConfigError, match="its rows cannot be written to .*own-rows: .*; set run.storage"):
        given(tmp_path, ROWS)
