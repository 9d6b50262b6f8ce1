"""Some rows of a dataset, and rows that are held out of the training: always the same, and never in both places."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytune_fsdp.base.errors import ConfigError, DataError
from raytune_fsdp.base.random import mix64
from raytune_fsdp.config import DatasetConfig, FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.data.open import open_data
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.selection import hold_out
from raytune_fsdp.data.sources.source import Source, spread_keys
from raytune_fsdp.data.windows import Windows
from tests.rows import VOCABULARY, all_samples, demo_tokenizer, documents_in
from tests.runs import make_config

TOKENS = {"type": "tokens", "labels": None}


def write(path: Path, rows: range) -> dict[str, Any]:
    """Row i is the token i, twice."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"input_ids": [i, i]}) + "\n" for i in rows))
    return {"path": str(path), "format": TOKENS}


def opened(directory: Path, **data: Any) -> tuple[Windows, dict[str, Windows]]:
    return open_data(make_config(directory, data={"seq_len": 8, "window": 32, **data}), demo_tokenizer(), VOCABULARY)


def rows_of(windows: Windows) -> list[int]:
    return sorted(token for token, _ in documents_in(all_samples(windows)))


def source(dataset: dict[str, Any], cache: Path) -> Source:
    return open_source(DatasetConfig.model_validate(dataset), cache=cache, in_place=False)


@pytest.mark.parametrize("shuffle", ["rows", "blocks", "none"])
def test_rows_are_held_out_of_the_training_and_measured(tmp_path: Path, shuffle: str) -> None:
    a, b = write(tmp_path / "a.jsonl", range(100, 300)), write(tmp_path / "b.jsonl", range(300, 400))
    for wanted, many in (({"rows": 30}, 30), ({"fraction": 0.07}, 21), ({"fraction": 0.001}, 1)):
        train, evals = opened(tmp_path, train=[{**a, "weight": 3}, b], eval=wanted, shuffle=shuffle)
        (name, held_out) = next(iter(evals.items()))
        assert name == "held_out" and len(evals) == 1
        measured, trained = rows_of(held_out), Counter(rows_of(train))
        assert len(measured) == many and not set(measured) & trained.keys()
        assert sorted({*measured, *trained}) == list(range(100, 400))
        assert {trained[row] for row in range(100, 300)} <= {0, 3}, "measured once, however often they are trained on"
        # Another process, another seed, other names and another order of the files: the same rows.
        assert rows_of(pickle.loads(pickle.dumps(held_out))) == measured
        moved = [write(tmp_path / "0.jsonl", range(300, 400)), write(tmp_path / "1.jsonl", range(100, 300))]
        _, others = opened(tmp_path, train=moved, eval=wanted, shuffle=shuffle)
        assert rows_of(others["held_out"]) == measured


def test_held_out_rows_are_part_of_the_identity_and_nothing_else_is(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", range(100, 300))
    plain, none = opened(tmp_path, train=[a])
    assert not none and not [key for key in plain.identity if "held" in key or ".rows" in key]
    half, _ = opened(tmp_path, train=[a], eval={"fraction": 0.5})
    same, evals = opened(tmp_path, train=[a], eval={"rows": 100})
    assert half.identity["datasets.0.held_out"] == "100 rows" and half.fingerprint == same.fingerprint
    assert len({plain.fingerprint, half.fingerprint, evals["held_out"].fingerprint}) == 3
    all_of_them, _ = opened(tmp_path, train=[{**a, "rows": {"first": 200}}])
    assert all_of_them.fingerprint == plain.fingerprint, "all rows are the same data"


def test_only_some_rows_of_a_dataset(tmp_path: Path) -> None:
    one, two = write(tmp_path / "d/1.jsonl", range(100, 180)), write(tmp_path / "d/2.jsonl", range(180, 200))
    both = {"path": str(tmp_path / "d"), "format": TOKENS}
    for rows, wanted in (({"first": 90}, range(100, 190)), ({"last": 30}, range(170, 200))):
        some = source({**both, "rows": rows}, tmp_path / "cache")
        assert [row["input_ids"][0] for row in some.rows(range(len(some)))] == list(wanted)  # type: ignore[index,arg-type]
        assert sum(some.blocks) == len(some) == len(wanted)
        assert some.where(len(some) - 1) == f"{tmp_path}/d/{'2' if wanted[-1] >= 180 else '1'}.jsonl:{wanted[-1] - 179}"
    some = source({**both, "rows": {"limit": 25}}, tmp_path / "cache")
    chosen = [row["input_ids"][0] for row in some.rows(range(25))]  # type: ignore[index]
    assert len(some) == 25 and chosen == sorted(set(chosen)) and chosen[0] < 120 < 170 < chosen[-1]
    assert source({**both, "rows": {"limit": 25}, "name": "x"}, tmp_path / "other").rows([3]) == some.rows([3])
    assert source({**one, "rows": {"limit": 80}}, tmp_path / "cache").selection == {}
    train, evals = opened(tmp_path, train=[{**both, "rows": {"last": 50}}], eval={"rows": 10})
    assert sorted(rows_of(train) + rows_of(evals["held_out"])) == list(range(150, 200))
    _, evals = opened(tmp_path, train=[one], eval=[{**two, "rows": {"first": 5}}])
    assert rows_of(evals["2"]) == list(range(180, 185))


def test_any_row_of_what_was_divided_is_the_right_one(tmp_path: Path) -> None:
    whole = source(write(tmp_path / "a.jsonl", range(2000, 5000)), tmp_path / "cache")
    ((rest, out),) = hold_out([whole], 700)
    assert (len(rest), len(out), sum(rest.blocks), sum(out.blocks)) == (2300, 700, 2300, 700)
    both = [[row["input_ids"][0] for row in part.rows(range(len(part)))] for part in (rest, out)]  # type: ignore[index]
    assert all(part == sorted(part) for part in both) and sorted(both[0] + both[1]) == list(range(2000, 5000))
    # A choice within a choice: keys go with the rows.
    ((inner_rest, inner),) = hold_out([rest], 100)
    keys = np.concatenate(list(rest.keys("held out")))
    assert sorted(np.concatenate(list(inner.keys("held out")))) == sorted(keys)[:100]
    assert len(inner_rest) == 2200
    assert np.concatenate(list(spread_keys(7, 3))).tolist() == [mix64(7 + i * 0x9E3779B97F4A7C15) for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("rows", "wanted", "message"),
    [
        ([200, 0], {"rows": 200}, r"data\.eval\.rows=200 holds 200 of the 200 row\(s\).*none is left"),
        ([1, 0], {"fraction": 0.5}, r"data\.eval\.fraction=0\.5 holds 1 of the 1 row"),
        (
            [100, 1],
            {"rows": 100},
            r"data\.eval\.rows=100 holds all 1 row\(s\) of the dataset 'b' out.*train\.1\.weight=0",
        ),
    ],
)
def test_a_division_that_leaves_nothing_is_refused(
    tmp_path: Path, rows: list[int], wanted: dict[str, Any], message: str
) -> None:
    train = [write(tmp_path / f"{'ab'[i]}.jsonl", range(100, 100 + n)) for i, n in enumerate(rows) if n]
    with pytest.raises(DataError, match=message):
        opened(tmp_path, train=train, eval=wanted)


def test_mistakes_are_named(tmp_path: Path) -> None:
    base = tmp_path / "run.yaml"
    base.write_text(
        "run: {name: r, storage: s}\nmodel: {path: m}\ntrain: {global_batch: 1, max_steps: 1}\n"
        "data: {train: [{path: a.jsonl}]}\n"
    )

    def problem(*flags: str) -> str:
        with pytest.raises(ConfigError) as failure:
            load_config(base, list(flags))
        return str(failure.value)

    assert "data.eval: fraction=0.1 and rows=5: set exactly one of fraction, rows" in problem(
        "--data.eval", "{fraction: 0.1, rows: 5}"
    )
    assert "data.eval: nothing is set: set exactly one of" in problem("--data.eval", "{}")
    assert "data.eval.fraction=1.5: must be number > 0, < 1" in problem("--data.eval.fraction", "1.5")
    assert "data.eval.portion" in problem("--data.eval", "{portion: 1}")
    assert "data.train.0.rows: first=3 and limit=5: set exactly one of first, last, limit" in problem(
        "--data.train.0.rows", "{first: 3, limit: 5}"
    )
    lines = problem("--data.eval.0.path", "b.jsonl", "--data.eval.0.weigth", "3").splitlines()
    assert sum("data.eval" in line for line in lines) == 1, lines
    config = load_config(base, ["--data.eval.fraction", "0.01", "--data.train.0.rows.last", "7"])
    assert config.data.eval.fraction == 0.01 and config.data.train[0].rows.last == 7  # type: ignore[union-attr]
    assert FinetuneConfig.model_validate(config.model_dump()) == config
    config = load_config(base, ["--data.eval.0.path", "b.jsonl"])
    assert [dataset.path for dataset in config.data.eval] == ["b.jsonl"]  # type: ignore[union-attr]
