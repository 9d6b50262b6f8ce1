"""Rows that a program has in memory, as `path` of a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.launch.own_rows import load_with_rows

ROWS = [{"text": "Ada keeps the keys.", "n": 1}, {"text": "Größe \N{SNOWMAN}", "n": 2}]


def sections(tmp_path: Path, train: Any, evals: Any = ()) -> dict[str, Any]:
    return {
        "run": {"name": "x", "storage": tmp_path},
        "model": {"path": "m"},
        "data": {"train": train, "eval": evals, "seq_len": 8},
        "train": {"global_batch": 4, "max_steps": 5},
    }


def given(tmp_path: Path, rows: Any, **more: Any) -> DatasetConfig:
    theirs = sections(tmp_path, [{"path": rows, **more}])
    found = load_with_rows(theirs)
    assert theirs["data"]["train"][0]["path"] is rows, "the caller's own map is as it was"
    assert found.data.seq_len == 8
    return found.data.train[0]


def read(source: DatasetConfig) -> list[Any]:
    return [json.loads(line) for line in Path(str(source.path)).read_text().splitlines()]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS, tuple(ROWS), iter(ROWS), pd.DataFrame(ROWS), pa.Table.from_pylist(ROWS), datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    ],
    ids=["list", "tuple", "iterator", "pandas", "arrow", "dataset", "stream"],
)  # fmt: skip
def test_rows_of_every_kind_are_the_same_file(tmp_path: Path, rows: Any) -> None:
    source = given(tmp_path, rows, format={"type": "completion"})
    assert read(source) == ROWS and source.name == "rows" and source.format.type == "completion"
    assert source.path == given(tmp_path, ROWS).path and Path(str(source.path)).parent == tmp_path / "own-rows"
    assert [*(tmp_path / "own-rows").iterdir()] == [Path(str(source.path))], "nothing else is left"


def test_paths_stay_and_several_datasets_have_names_of_their_own(tmp_path: Path) -> None:
    train = [{"path": "rows.jsonl"}, {"Path": ROWS}, {"path": ROWS[:1], "name": "mine"}]
    data = load_with_rows(sections(tmp_path, train, [{"path": Path("b.jsonl")}, {"hub": "x/y"}, {"path": ROWS}])).data
    assert [each.name for each in data.train] == [None, "rows-1", "mine"] and data.train[0].path == "rows.jsonl"
    assert isinstance(data.eval, list) and [each.name for each in data.eval] == [None, None, "rows-2"]
    assert data.eval[2].path == data.train[1].path != data.train[2].path
    made = sections(tmp_path, [{"path": "a.jsonl"}], {"fraction": 0.1})
    lower = load_with_rows(made)
    assert load_with_rows({"Data": made.pop("data"), **made}) == lower
    assert len([*(tmp_path / "own-rows").iterdir()]) == 2


def test_nothing_is_written_for_a_config_that_is_wrong(tmp_path: Path) -> None:
    for wrong in ({"optim": {"lr": -1}}, {"run": {"name": "x", "storage": 5}}, {"train": None}):
        with pytest.raises(ConfigError):
            load_with_rows({**sections(tmp_path, [{"path": ROWS}]), **wrong})
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ConfigError, match="own-rows"):
        load_with_rows({**sections(tmp_path, [{"path": "a.jsonl"}]), "run": {"name": "own-rows"}})


def test_what_an_iterator_raises_is_its_own(tmp_path: Path) -> None:
    def broken() -> Iterator[Any]:
        yield ROWS[0]
        (tmp_path / "nowhere").read_text()

    with pytest.raises(FileNotFoundError, match="nowhere"):
        given(tmp_path, broken())
    assert not [*(tmp_path / "own-rows").iterdir()]


def test_values_of_tables_become_those_of_json(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.5, None], "b": [np.array([1, 2]), [3]], "c": [date(2026, 1, 2), pd.NaT]})
    frame["d"] = pd.array([1, pd.NA], dtype="Int64")
    row = {"ids": np.int64(7), "deep": {"x": (np.float32(0.5), float("nan"))}, 3: True}
    assert read(given(tmp_path, frame)) == [
        {"a": 1.5, "b": [1, 2], "c": "2026-01-02", "d": 1}, {"a": None, "b": [3], "c": None, "d": None},
    ]  # fmt: skip
    assert read(given(tmp_path, [row])) == [{"ids": 7, "deep": {"x": [0.5, None]}, "3": True}]


def test_a_file_that_somebody_has_changed_is_written_again(tmp_path: Path) -> None:
    path = Path(str(given(tmp_path, ROWS).path))
    before = path.stat().st_mtime_ns
    assert Path(str(given(tmp_path, ROWS).path)).stat().st_mtime_ns == before
    path.write_text("other")
    assert read(given(tmp_path, ROWS)) == ROWS


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (7, "data.train.0.path: a value of type int is neither a path nor rows: give a path, a Dataset"),
        (b"a.jsonl", "data.train.0.path: a value of type bytes is neither a path nor rows"),
        ({"train": ROWS}, "data.train.0.path: is a map of train, not rows: give one of its values"),
        ([], "data.train.0.path: has no rows; an iterator has them once only"),
        ([*ROWS, 7], "data.train.0.path: row 2: is of type int, must be a map of columns"),
        (["a.jsonl", "b.jsonl"], r"row 0: is the text 'a.jsonl', must be a map of columns; of several files give a p"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "data.train.0.path: has two columns called a: rename one"),
        ([{3: 1, "3": 2}], "row 0: column .* holds what JSON cannot .*two keys are the same text"),
        ([{"a": 1, "picture": object()}], r"row 0: column picture holds what JSON cannot \(TypeError: of type object"),
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
