"""The list of published throughputs is whole, and set aside by the rule that its page states."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.predict.devices import find_device

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (PUBLISHED / "throughput.jsonl").read_text(encoding="utf-8").splitlines()
]
COMPLETE = [row for row in ROWS if row["complete"]]


def test_rows_are_enough_and_each_has_a_name_of_its_own() -> None:
    ids = [row["id"] for row in ROWS]
    assert ids == sorted(set(ids))
    assert {frozenset(row) for row in ROWS} == {frozenset(ROWS[0])}
    scored = [row for row in ROWS if row["use"] == "score"]
    assert len(scored) >= 12 and all(row["complete"] for row in scored)
    assert len({row["id"].split("/")[0] for row in scored}) >= 6
    page = (PUBLISHED / "README.md").read_text(encoding="utf-8")
    assert f"{len(COMPLETE)} of {len(ROWS)} rows" in page and f"are scored ({len(scored)})" in page


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_a_row_has_what_a_prediction_needs(row: dict[str, Any]) -> None:
    assert row["source"]["url"].startswith("https://") and row["source"]["date"] and row["read"] == "at the source"
    assert find_device(row["device"]).name == row["device"] and f"{row['gpus']}x{row['device']}" in row["id"]
    assert row["gpus"] % row["gpus_per_node"] == 0
    sizes = ["gpus", "sequence_length", "micro_batch", "accumulation"]
    sizes += ["tensor_parallel", "context_parallel", "expert_parallel"]
    assert all(isinstance(row[size], int) and row[size] > 0 for size in sizes)
    assert row["gpus"] % (row["tensor_parallel"] * row["context_parallel"]) == 0
    assert row["strategy"] in {"full_shard", "shard_grad_op", "hybrid", "replicate"}
    assert row["measured"]["what"] in {"tokens/s/GPU", "tokens/s", "TFLOP/s/GPU"} and row["measured"]["value"] > 0
    assert (row["incomplete_because"] is None) == row["complete"]

    network = row["network"]["bytes_per_second_per_node"]
    if row["gpus"] == row["gpus_per_node"]:
        assert network is None and row["network"]["basis"] == "one machine"
    else:
        assert network >= 50e9 and row["network"]["basis"].startswith(("read: ", "assumed: "))
    # A network that nobody named is named among what is assumed.
    assert ("network" in row["assumed"]) == row["network"]["basis"].startswith("assumed")
    if row["complete"]:
        assert row["activation_checkpointing"] in {"none", "selective", "full"} and row["compile"] in {True, False}
        assert (row["activation_checkpointing"] == "selective") == bool(row["activation_checkpointing_detail"])
        assert row["context_parallel"] == row["expert_parallel"] == 1 and not row["cpu_offload"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_tokens_a_second_follow_from_what_was_measured_and_are_possible(row: dict[str, Any]) -> None:
    what, value, tokens = row["measured"]["what"], row["measured"]["value"], row["tokens_per_second_per_gpu"]
    model = row["model"]
    queries, keys = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]
    wide = model["experts"]["active"] * model["experts"]["intermediate"] if model["experts"] else model["intermediate"]
    of_layer = model["hidden"] * (2 * queries + 2 * keys + (3 if model["gated_mlp"] else 2) * wide)
    weights = model["layers"] * of_layer + model["vocabulary"] * model["hidden"]
    causal = 6 * row["sequence_length"] * queries * model["layers"]
    if what == "TFLOP/s/GPU":
        assert tokens == pytest.approx(value * 1e12 / (6 * weights + causal), rel=1e-4)
    else:
        assert tokens == pytest.approx(value / (row["gpus"] if what == "tokens/s" else 1), rel=1e-4)
    # A wrong unit, or a total taken for one GPU, would leave this range. (torchtune's LoRA on an A6000, at 93 % of its
    # peak, does: another reason not to count it as complete.)
    if row["complete"]:
        each = (6 if row["method"]["type"] == "full" else 4) * weights + causal
        assert 0.1 < tokens * each / find_device(row["device"]).peak < 0.75, row["id"]


def test_what_is_set_aside_follows_from_the_rule_and_not_from_a_prediction() -> None:
    of_device = defaultdict(list)
    for row in COMPLETE:
        of_device[row["device"]].append(row)
    expected = set()
    for rows in of_device.values():
        whole = [row for row in rows if row["method"]["type"] == "full" and row["model"]["experts"] is None]
        if len(rows) >= 3:
            expected.add(min(whole, key=lambda row: (row["gpus"], row["id"]))["id"])
    assert {row["id"] for row in ROWS if row["use"] == "set_aside"} == expected
    assert all(row["use"] == "score" for row in COMPLETE if row["id"] not in expected)
    assert all(row["use"] is None for row in ROWS if not row["complete"])
