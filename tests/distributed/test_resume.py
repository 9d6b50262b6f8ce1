"""Stopping and starting again changes nothing: not the values at the same world size, not the samples at another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.cli.main import main
from raytune_fsdp.data.mixture import ORDER_VERSION
from raytune_fsdp.record.jsonl import read_evaluations, read_events, read_metrics, read_trajectory
from raytune_fsdp.run.prepare import open_as_run, prepare
from tests.checkpoints import checkpoints, pieces_of
from tests.forgeries import with_hashes
from tests.ranks import resident_ranks, run_ranks
from tests.runs import (
    GPT2,
    LLAMA,
    largest_difference,
    make_config,
    train_rank,
    trajectory,
    write_tokenizer,
    write_tokens,
)

TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 12}
DROPOUT = {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


SAVES = {"every": 4, "keep_last": 3, "asynchronous": False}


def run_dir(config: Any) -> Path:
    return Path(config.run.storage) / config.run.name


@pytest.mark.parametrize(
    ("world", "precision"),
    [(1, "fp32"), (2, "bf16"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "bf16"), (2, "fp32")))],
)
def test_bit_equal_at_the_same_world_size(tmp_path: Path, precision: str, world: int) -> None:
    """Stopped behind step 7 of 12 and started again; five blocks a step, so at two ranks one is a filler."""
    parallel = {"precision": precision}
    whole = trajectory(make_config(tmp_path, DROPOUT, train=TRAIN, parallel=parallel), world)
    config = make_config(tmp_path, DROPOUT, run={"name": "stopped"}, train=TRAIN, parallel=parallel)
    first = trajectory(config, world, stop_after=7)
    assert [row["step"] for row in first] == list(range(1, 8))
    assert checkpoints(run_dir(config))[-1].step == 7
    assert trajectory(config, world) == whole


def test_other_world_sizes_see_the_same_samples_and_losses(tmp_path: Path) -> None:
    """2 -> 4 -> 3 -> 1 ranks, each leaving at a step of its own, against one run at two ranks."""
    train, parallel = {**TRAIN, "max_steps": 8}, {"precision": "fp64"}
    whole = trajectory(make_config(tmp_path, DROPOUT, train=train, parallel=parallel), 2)
    config = make_config(tmp_path, DROPOUT, run={"name": "moved"}, train=train, parallel=parallel)
    for world, stop_after in ((2, 3), (4, 5), (3, 7), (1, None)):
        rows = trajectory(config, world, stop_after=stop_after)
    assert len(rows) == 8
    for key in ("loss", "grad_norm"):
        assert largest_difference(whole, rows, key) < 1e-10
    steps = [line for line in read_metrics(run_dir(config) / "metrics.jsonl") if line["kind"] == "step"]
    assert {line["trajectory"]["step"]: line["world_size"] for line in steps}[6] == 3
    attempts = [e for e in read_events(run_dir(config) / "events.jsonl") if e["event"] == "attempt_started"]
    assert [event["attempt"] for event in attempts] == [1, 2, 3, 4]


def test_a_run_begun_with_the_older_order_goes_on_with_it(tmp_path: Path) -> None:
    """With `shuffle: none` a new run packs in another order than trees before; theirs keep their own, to the bit."""
    sections: Any = {
        "train": {**TRAIN, "max_steps": 12},
        "data": {"shuffle": "none"},
        "parallel": {"precision": "fp32"},
    }
    new = trajectory(make_config(tmp_path, run={"name": "new"}, **sections), 1)
    whole = make_config(tmp_path, run={"name": "whole"}, **sections)
    run_ranks(train_in_the_older_order, 1, whole.model_dump())
    old = read_trajectory(run_dir(whole) / "metrics.jsonl")
    assert [row["samples"] for row in old] != [row["samples"] for row in new]
    stopped = make_config(tmp_path, run={"name": "stopped"}, **sections)
    run_ranks(train_in_the_older_order, 1, stopped.model_dump(), 5)
    assert open_as_run(stopped)[1].order_version == 2, "a preview shows what the run will take"
    kept = stopped.checkpoint.model_copy(update={"storage": "s3://nowhere/that-is-asked"})
    stored = stopped.model_copy(update={"checkpoint": kept})
    assert open_as_run(stored)[1].order_version == 2, "also if its checkpoints are in a store"
    assert trajectory(stopped, 1) == old
    orders = {name: order_version(tmp_path / "runs" / name) for name in ("new", "whole", "stopped")}
    assert orders == {"new": {3}, "whole": {2}, "stopped": {2}}


@pytest.mark.slow
def test_a_run_begun_before_directories_had_splits_goes_on_with_every_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By all commands that read its rows, to the bit; a new run of the same config reads one split."""
    for split, rows in (("train", 80), ("test", 30)):
        write_tokens(tmp_path / "data" / f"{split}.jsonl", rows=rows, seed=rows)
        write_tokens(tmp_path / "measured" / f"{split}.jsonl", rows=rows // 10, seed=rows + 1)
    tokens = {"format": {"type": "tokens"}, "split": "train"}
    sections: Any = {
        "train": {**TRAIN, "max_steps": 8},
        "data": {
            "train": [{**tokens, "path": f"{tmp_path}/data"}],
            "eval": [{**tokens, "path": f"{tmp_path}/measured"}],
            "seq_len": 48, "window": 32,
        },
        "parallel": {"precision": "fp32"},
        "checkpoint": {"every": 4, "keep_last": None},
    }  # fmt: skip
    new = trajectory(make_config(tmp_path, run={"name": "new"}, **sections), 1)
    whole, stopped = (make_config(tmp_path, run={"name": name}, **sections) for name in ("whole", "stopped"))
    run_ranks(train_without_splits, 1, whole.model_dump())
    old = read_trajectory(run_dir(whole) / "metrics.jsonl")
    assert [row["samples"] for row in old] != [row["samples"] for row in new]
    run_ranks(train_without_splits, 1, stopped.model_dump(), 5)
    # With the default, as a config that does not name it has now.
    now = stopped.model_dump()
    now["data"]["train"][0]["split"] = now["data"]["eval"][0]["split"] = None
    assert trajectory(stopped.model_validate(now), 1) == old
    versions = {name: order_version(tmp_path / "runs" / name) for name in ("new", "whole", "stopped")}
    assert versions == {"new": {4}, "whole": {2}, "stopped": {2}}
    for name, rows in (("new", 80), ("whole", 110), ("stopped", 110)):
        _, train, evals = open_as_run(make_config(tmp_path, run={"name": name}, **sections))
        assert train.rows(0) == rows and evals["measured"].rows(0) == rows // 10, "a preview shows what the run takes"
    losses = {}
    for name in ("new", "whole", "stopped"):
        run = str(tmp_path / "runs" / name)
        capsys.readouterr()
        assert main(["eval", run, "--json"]) == 0
        losses[name] = json.loads(capsys.readouterr().out)["eval/measured/loss"]
        (line,) = (each for each in read_metrics(Path(run) / "metrics.jsonl") if each["kind"] == "eval")
        assert losses[name] == pytest.approx(line["values"]["eval/measured/loss"], rel=1e-6)
        assert main(["step", run, "8"]) == 0, "whose samples have the hash that is on record"
    assert abs(losses["whole"] - losses["new"]) > 1e-3
    torch.set_num_threads(1)  # as the ranks of tests have
    for first in ("0", "4"):
        assert main(["audit", str(run_dir(whole)), "--from", first, "--to", "8"]) == 0, capsys.readouterr()


def test_what_a_run_gains_is_read_as_a_run_begun_with_it_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations and tasks, of a run whose own rows need no new version; a run of an older tree goes on as ever."""
    for split, rows in (("train", 30), ("test", 10)):
        write_tokens(tmp_path / "measured" / f"{split}.jsonl", rows=rows, seed=rows)
        questions = [{"question": "w3 w4", "choices": ["w5", "w6"], "answer": row % 2} for row in range(rows)]
        (tmp_path / "asked").mkdir(exist_ok=True)
        (tmp_path / "asked" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    sections: Any = {
        "train": {**TRAIN, "max_steps": 4},
        "parallel": {"precision": "fp32"},
        "checkpoint": {"every": 2, "keep_last": None},
    }
    gained = {
        "data": {"eval": [{"path": f"{tmp_path}/measured", "format": {"type": "tokens"}, "split": "test"}]},
        "eval": {"every": 4, "tasks": [{"type": "choices", "path": f"{tmp_path}/asked", "style": "plain"}]},
    }
    measured = {}
    for name in ("now", "older"):
        config = make_config(tmp_path, run={"name": name}, **sections)
        trajectory(config, 1, stop_after=2)
        if name == "older":
            for kept in checkpoints(run_dir(config)):
                state = Path(kept.path) / "state.json"
                values = json.loads(state.read_text())
                assert values.pop("newest_order") == ORDER_VERSION and values["identity"]["data.order_version"] == 2
                state.write_text(json.dumps(values))
                with_hashes(Path(kept.path))
        values = config.model_dump()
        for section, changes in gained.items():
            values[section] |= changes
        config = config.model_validate(values)
        caplog.clear()
        (windows,) = open_as_run(config)[2].values()
        prepared = prepare(config, 1)[0]
        assert caplog.text.count("goes on with all of its splits") == (0 if name == "now" else 3)
        trajectory(config, 1)
        capsys.readouterr()
        rows = 10 if name == "now" else 40
        assert windows.rows(0) == prepared.evals["measured"].rows(0) == len(prepared.tasks[0].subjects) == rows
        ((step, measured[name]),) = read_evaluations(run_dir(config) / "metrics.jsonl", 4).items()
        assert main(["eval", str(run_dir(config)), "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert step == 4 and again["eval/measured/loss"] == pytest.approx(measured[name]["eval/measured/loss"], 1e-6)
    assert abs(measured["now"]["eval/measured/loss"] - measured["older"]["eval/measured/loss"]) > 1e-3
    assert order_version(tmp_path / "runs" / "now") == {2}


@pytest.mark.slow
def test_a_run_in_steps_leaves_equal_rows_out_and_goes_on_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said in an event; in what is looked at and trained again afterwards, too."""
    tokens = {"format": {"type": "tokens"}}
    rows = write_tokens(tmp_path / "rows.jsonl", rows=90).read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join([*rows, *rows[:7], rows[40]]))
    (tmp_path / "measured.jsonl").write_text("".join(reversed(rows[:17])))
    sections: Any = {
        "train": {**TRAIN, "max_steps": 8},
        "data": {
            "train": [{**tokens, "path": f"{tmp_path}/rows.jsonl"}],
            "eval": [{**tokens, "path": f"{tmp_path}/measured.jsonl"}],
            "drop_eval_duplicates": True, "drop_duplicates": True, "seq_len": 48, "window": 32,
        },
        "parallel": {"precision": "fp32"},
        "checkpoint": {"every": 4, "keep_last": None},
    }  # fmt: skip
    whole, stopped = (make_config(tmp_path, run={"name": name}, **sections) for name in ("whole", "stopped"))
    first = trajectory(whole, 2)
    trajectory(stopped, 2, stop_after=5)
    assert trajectory(stopped, 2) == first
    (event,) = (e["fields"] for e in read_events(run_dir(stopped) / "events.jsonl") if e["event"] == "rows_left_out")
    assert event == {"before": {"rows": 98}, "after": {"rows": 73}}
    assert order_version(run_dir(whole)) == {2}
    torch.set_num_threads(1)  # as the ranks of tests have
    run = str(run_dir(whole))
    assert main(["step", run, "7"]) == 0 and main(["eval", run, "--json"]) == 0
    assert main(["audit", run, "--from", "4", "--to", "8", "--workers", "2"]) == 0, capsys.readouterr()
    capsys.readouterr()
    assert main(["data", "stats", "--config", f"{run}/config.yaml"]) == 0
    assert "left out of rows: 25 of 98 rows, as equal ones are measured or trained on" in capsys.readouterr().out
    # Another evaluation would be another run.
    (tmp_path / "measured.jsonl").write_text("".join(rows[3:17]))
    assert main(["train", "--config", f"{run}/config.yaml", "--train.max_steps", "9"]) == 2
    assert "data.train.0.without: was '25 equal rows, " in capsys.readouterr().err


def train_without_splits(values: Any, stop_after: int | None = None) -> bool:
    """A rank of a tree that knows no order after version 3."""
    from raytune_fsdp.data import mixture as order

    order.ORDER_VERSION = order.THIRD_ORDER
    return train_rank(values, stop_after)


def test_held_out_rows_are_the_same_at_every_world_size(tmp_path: Path) -> None:
    sections: Any = {"train": {**TRAIN, "max_steps": 4}, "eval": {"every": 2}}
    found = {}
    for world in (1, 2):
        config = make_config(tmp_path, run={"name": f"on-{world}"}, **sections)
        values = config.model_dump()
        values["data"]["eval"] = {"rows": 12}
        rows = trajectory(config.model_validate(values), world)
        lines = read_metrics(run_dir(config) / "metrics.jsonl")
        losses = [line["values"]["eval/held_out/loss"] for line in lines if line["kind"] == "eval"]
        found[world] = ([row["samples"] for row in rows], pytest.approx(losses, rel=1e-10))
        events = read_events(run_dir(config) / "events.jsonl")
        assert [e["fields"]["rows"] for e in events if e["event"] == "rows_held_out"] == [{"tokens": 12}]
    assert len(losses) == 2 and found[1] == (found[2][0], losses)


def order_version(run: Path) -> set[int]:
    states = [json.loads(path.read_text()) for path in run.glob("checkpoints/step-*/state.json")]
    return {state["identity"]["data.order_version"] for state in states}


def train_in_the_older_order(values: Any, stop_after: int | None = None) -> bool:
    """A rank of a tree that knows no order after version 2."""
    from raytune_fsdp.data import windows
    from raytune_fsdp.data.mixture import OLDEST_ORDER

    windows.THIRD_ORDER = OLDEST_ORDER
    return train_rank(values, stop_after)


def test_resume_tokenizes_at_most_one_window_again(tmp_path: Path) -> None:
    """Stopped in the middle of an epoch, the cache lost, continued on another world size: the same samples."""
    write_tokens(tmp_path / "tokens.jsonl", rows=350)
    write_tokenizer(tmp_path / "tokenizer")
    data = {"window": 16}
    whole = trajectory(make_config(tmp_path, train=TRAIN, data=data), 1)
    (once,) = windows_built(make_config(tmp_path, train=TRAIN, data=data))
    assert once > 10 and whole[-1]["epoch"] < 1
    kept = make_config(tmp_path, run={"name": "kept"}, train=TRAIN, data=data)
    elsewhere = {**data, "cache": {"path": str(tmp_path / "lost")}}
    lost = make_config(tmp_path, run={"name": "lost"}, train=TRAIN, data=elsewhere)
    for config, worlds, again in ((kept, (1, 2), [0, 0]), (lost, (2, 3), None)):
        trajectory(config, worlds[0], stop_after=5)
        shutil.rmtree(tmp_path / "lost", ignore_errors=True)
        assert [row["samples"] for row in trajectory(config, worlds[1])] == [row["samples"] for row in whole]
        built = windows_built(config)
        assert built == again if again is not None else sum(built) - once in (0, 1)


def windows_built(config: Any) -> list[int]:
    """Windows that each attempt has tokenized."""
    events = read_events(run_dir(config) / "events.jsonl")
    attempts = {event["attempt"] for event in events}
    return [
        sum(e["fields"]["windows"] for e in events if (e["event"], e["attempt"]) == ("windows_built", attempt))
        for attempt in sorted(attempts)
    ]


@pytest.mark.slow
def test_other_strategies_continue_the_same_run(tmp_path: Path) -> None:
    train = {**TRAIN, "max_steps": 6}
    whole = trajectory(make_config(tmp_path, LLAMA, train=train), 1)
    segments = (
        (2, {"strategy": "full_shard"}, 2),
        (4, {"strategy": "hybrid_shard", "shard_size": 2}, 4),
        (3, {"strategy": "replicate"}, None),
    )
    for world, parallel, stop_after in segments:
        config = make_config(
            tmp_path, LLAMA, run={"name": "moved"}, train=train, parallel={"precision": "fp64", **parallel}
        )
        rows = trajectory(config, world, stop_after=stop_after)
    assert largest_difference(whole, rows, "loss") < 1e-8
    assert largest_difference(whole, rows, "grad_norm") < 1e-6


def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Lines past the checkpoint are cut, what was being written is gone, and every step is there once, bit-equal."""
    parallel = {"precision": "fp32"}
    whole = trajectory(make_config(tmp_path, DROPOUT, train=TRAIN, parallel=parallel), 2)
    config = make_config(
        tmp_path,
        DROPOUT,
        run={"name": "killed"},
        train=TRAIN,
        parallel=parallel,
        checkpoint={"every": 4, "asynchronous": False},
    )
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(train_and_die, 2, config.model_dump(), 7)
    torn = run_dir(config) / "metrics.jsonl"
    assert read_trajectory(torn)[-1]["step"] >= 6, "the run must have been past its checkpoint of step 4"
    (run_dir(config) / "checkpoints" / "step-00000008.a1.tmp").mkdir()
    assert trajectory(config, 2) == whole
    assert [found.step for found in checkpoints(run_dir(config))] == [8, 12]
    assert not list((run_dir(config) / "checkpoints").glob("*.tmp"))


def train_and_die(values: dict[str, Any], at: int) -> bool:
    """Rank 1 is killed where step `at` asks whether to stop: in the middle of training, without a word."""
    import os
    import signal

    import torch
    import torch.distributed as dist

    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.launch.worker import work
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    calls = iter(range(1, 10**9))

    def stop() -> None:
        if next(calls) == at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    work(config, *prepare_on_rank0(config), torch.device("cpu"), stop)
    return True


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    config = make_config(tmp_path, GPT2, train={**TRAIN, "max_steps": 12}, checkpoint=SAVES)
    whole = trajectory(config, 1)
    newest = checkpoints(run_dir(config))[-1]
    (shard,) = pieces_of(newest)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert trajectory(config, 1) == whole
    started = [e["fields"] for e in read_events(run_dir(config) / "events.jsonl") if e["event"] == "attempt_started"]
    assert [fields["resumed_from"] for fields in started] == [0, 8]


def test_pruning_keeps_what_is_good(tmp_path: Path) -> None:
    """A damaged checkpoint behind the one that was continued from must not push new ones out."""
    config = make_config(tmp_path, GPT2, train={**TRAIN, "max_steps": 12}, checkpoint=SAVES)
    whole = trajectory(config, 1)
    for found in checkpoints(run_dir(config))[1:]:
        pieces_of(found)[0].write_bytes(b"")
    assert trajectory(config, 1, stop_after=6)[-1]["step"] == 6
    assert [found.step for found in checkpoints(run_dir(config))] == [4, 6]
    assert trajectory(config, 1) == whole
    for found in checkpoints(run_dir(config)):
        pieces_of(found)[0].write_bytes(b"")
    with pytest.raises(AssertionError, match="every checkpoint is damaged"):
        trajectory(config, 1)
    assert read_trajectory(run_dir(config) / "metrics.jsonl") == whole, "a refused start must leave the record alone"


def test_a_stop_is_heard_between_two_looks_at_the_device(tmp_path: Path) -> None:
    config = make_config(tmp_path, GPT2, train={**TRAIN, "log_every": 30})
    rows = trajectory(config, 2, stop_after=7)
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert checkpoints(run_dir(config))[-1].step == 7


def test_a_run_that_ended_with_a_short_step_is_not_extended(tmp_path: Path) -> None:
    once = {"global_batch": 10, "micro_batch": 2, "max_steps": None}
    first = make_config(tmp_path, GPT2, train={**once, "epochs": 1})
    assert trajectory(first, 1)[-1]["tokens"] < trajectory(first, 1)[0]["tokens"]
    for longer in ({**once, "epochs": 2}, {**once, "epochs": None, "max_steps": 30}):
        with pytest.raises(AssertionError, match="the run ended with a short step"):
            trajectory(make_config(tmp_path, GPT2, train=longer), 1)


@pytest.mark.slow
def test_looking_does_not_change_the_run(tmp_path: Path) -> None:
    """Evaluations, questions, checkpoints and rare logging leave the trajectory alone, bit by bit."""
    plain = trajectory(make_config(tmp_path, DROPOUT, train={**TRAIN, "max_steps": 12}), 2)
    config = make_config(
        tmp_path,
        DROPOUT,
        run={"name": "watched"},
        data={
            "eval": [{"path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}],
            "train": [{"path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}],
            "seq_len": 48,
            "window": 32,
        },
        train={**TRAIN, "max_steps": 12, "log_every": 5},
        eval={"every": 3, "at_start": True, "prompts": ["w5 w6"], "max_new_tokens": 4},
        checkpoint={"every": 2},
        parallel={"precision": "fp64", "strategy": "shard_grad_op"},
    )
    rows = trajectory(config, 2)
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    assert [row["grad_norm"] for row in rows] == [row["grad_norm"] for row in plain]
    evals = [line for line in read_metrics(run_dir(config) / "metrics.jsonl") if line["kind"] == "eval"]
    assert [line["step"] for line in evals] == [0, 3, 6, 9, 12]
    losses = [line["values"]["eval/tokens/loss"] for line in evals]
    assert losses[-1] < losses[0], "the loss on the data it was trained on must have fallen"
    stopped = config.model_copy(update={"run": config.run.model_copy(update={"name": "stopped"})})
    trajectory(stopped, 2, stop_after=6)
    record = run_dir(stopped) / "metrics.jsonl"
    assert sorted(read_evaluations(record, 12)) == [0, 3], "a stop does not wait for an evaluation"
    trajectory(stopped, 2)
    assert read_evaluations(record, 12) == {line["step"]: line["values"] for line in evals}, "which is made up for"


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    """The schedule keeps the length it was planned over, unless it is asked to be planned anew."""
    schedule = {"schedule": {"type": "linear", "floor": 0.1}, "warmup_steps": 0, "lr": 1e-3}

    def config(steps: int, **optim: Any) -> Any:
        return make_config(tmp_path, GPT2, train={**TRAIN, "max_steps": steps}, optim={**schedule, **optim})

    first = trajectory(config(8), 1)
    again = trajectory(config(8), 1)
    assert again == first, "a finished run has nothing left to do"
    longer = trajectory(config(12), 1)
    assert longer[:8] == first
    assert [row["lr"] for row in longer[8:]] == [pytest.approx(1e-4)] * 4
    replanned = trajectory(config(16, schedule_steps=16), 1)
    assert replanned[:12] == longer
    assert replanned[12]["lr"] == pytest.approx(1e-3 * (0.1 + 0.9 * (1 - 12 / 16)))


def test_interrupting_at_the_last_step_finishes(tmp_path: Path) -> None:
    config = make_config(tmp_path, GPT2, train={**TRAIN, "max_steps": 3})
    assert resident_ranks(train_rank, 2, config.model_dump(), 3) == [False, False]


def test_small_weights_leave_epochs_without_a_window(tmp_path: Path) -> None:
    """Three rows of weight 0.1: most epochs have no row at all."""
    path = write_tokens(tmp_path / "few.jsonl", rows=3)
    data = {"train": [{"path": str(path), "format": {"type": "tokens"}, "weight": 0.1}], "seq_len": 48, "window": 2}
    train = {"global_batch": 2, "micro_batch": 1, "max_steps": 5}
    whole = trajectory(make_config(tmp_path, train=train, data=data), 1)
    config = make_config(tmp_path, run={"name": "stopped"}, train=train, data=data)
    trajectory(config, 2, stop_after=2)
    rows = trajectory(config, 1)
    assert [row["samples"] for row in rows] == [row["samples"] for row in whole]
    assert whole[-1]["epoch"] > 20
