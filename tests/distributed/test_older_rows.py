"""A run that was begun before weights, system columns and the like were read goes on without them, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from raytune_fsdp.run.prepare import open_as_run
from tests.ranks import run_ranks
from tests.runs import make_config, train_rank, trajectory

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} w2 {% endgeneration %}"
    "{% else %}{{ m.content }} w3 {% endif %}{% endfor %}"
)


def test_a_run_begun_before_weights_were_read_goes_on_without_them(tmp_path: Path) -> None:
    with open(tmp_path / "chats.jsonl", "w") as file:
        for number in range(60):
            words = [f"w{30 + (7 * number + each) % 30}" for each in range(12)]
            turns = [("user", words[:3]), ("assistant", words[3:6]), ("user", words[6:9]), ("assistant", words[9:])]
            messages = [
                {"role": role, "content": " ".join(content), "weight": int(place == 3) if role == "assistant" else None}
                for place, (role, content) in enumerate(turns)
            ]
            history = [["w4", "w5"]] if number % 2 else []
            file.write(json.dumps({"messages": messages, "system": "w9 w9", "history": history}) + "\n")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    sections: Any = {
        "train": {"global_batch": 2, "micro_batch": 1, "max_steps": 6},
        "data": {
            "train": [{"path": str(tmp_path / "chats.jsonl")}],
            "chat_template": str(tmp_path / "template.jinja"),
            "seq_len": 48, "window": 32,
        },
        "parallel": {"precision": "fp32"},
    }  # fmt: skip
    names = ("whole", "stopped", "new")
    whole, stopped, new = (make_config(tmp_path, run={"name": name}, **sections) for name in names)
    run_ranks(train_as_before, 1, whole.model_dump())
    run_ranks(train_as_before, 1, stopped.model_dump(), 3)
    assert trajectory(stopped, 1) == read_trajectory(RunDir.of(whole).metrics)
    (_, old, _), (_, newest, _) = (open_as_run(each) for each in (stopped, new))
    assert (old.order_version, newest.order_version) == (2, 4)
    trained = [int(each.get(0, 0)[0].samples.trained.sum()) for each in (old, newest)]
    assert trained[0] == 2 * trained[1]
    # Said once: not again when it goes on.
    said = [each["fields"] for each in read_events(RunDir.of(stopped).events) if each["event"] == "column_not_read"]
    assert said == [
        {"dataset": "chats", "column": column, "share": share, "rows": 60, "read_by": by}
        for column, share, by in (
            ("system", 1.0, "a run that is begun now"),
            ("history", 0.5, "a function (format.type=python)"),
        )
    ]


def train_as_before(values: Any, stop_after: int | None = None) -> bool:
    """A rank of a tree that knows no order after version 3."""
    from raytune_fsdp.data import mixture as order

    order.ORDER_VERSION = order.THIRD_ORDER
    return train_rank(values, stop_after)
