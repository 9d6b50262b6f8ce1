"""`raytune-fsdp audit`: an honest run passes at any world size, and every planted change is found and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import xxhash

from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from tests.checkpoints import checkpoints, place_of, types_in
from tests.forgeries import with_hashes
from tests.ranks import resident_ranks, run_ranks
from tests.runs import LLAMA, make_config, train_rank

FIRST, LAST = 8, 16


def _config(directory: Path, **sections: Any) -> FinetuneConfig:
    return make_config(
        directory, LLAMA,
        **{
            "train": {"global_batch": 6, "micro_batch": 2, "max_steps": 20},
            "checkpoint": {"every": 8, "keep_last": None, "asynchronous": False},
            "parallel": {"precision": "fp32"},
            **sections,
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, with two threads."""
    directory = tmp_path_factory.mktemp("audit")
    resident_ranks(train_rank, 1, _config(directory).model_dump())
    return directory


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three ranks with run.exact."""
    directory = tmp_path_factory.mktemp("exact")
    run = {"name": "run", "exact": True, "digest_every": 4}
    resident_ranks(train_rank, 3, _config(directory, run=run).model_dump())
    return directory


@pytest.fixture
def audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    torch.set_num_threads(1)  # as the ranks of tests have

    def call(directory: Path, *arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["audit", str(directory / "runs" / "run"), "--from", str(FIRST), "--to", str(LAST), *arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def test_the_same_world_is_the_same_to_the_bit(
    honest: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    code, said = audit(honest, "--record", "--out", str(tmp_path / "report.md"))
    assert code == 0 and "**Passed**: trained again, it is the same to the bit." in said, said
    event = read_events(honest / "runs" / "run" / "events.jsonl")[-1]
    assert event["event"] == "audited" and event["fields"]["exact"] is True and event["fields"]["difference"] is None
    assert (event["fields"]["first"], event["fields"]["step"]) == (FIRST + 1, LAST)
    assert "- 8 steps: " in said and "all of them the same bits" in said
    assert (tmp_path / "report.md").read_text().strip() in said
    assert not list((honest / "runs").glob("audit-*"))


def test_steps_after_the_end_of_the_schedule(audit: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """Their learning rate is 0, and the run was planned so: the repetition does not count as one that adds them."""
    resident_ranks(train_rank, 1, _config(tmp_path, optim={"schedule_steps": FIRST}).model_dump())
    code, said = audit(tmp_path)
    assert code == 0 and "the same to the bit" in said, said


@pytest.mark.slow
def test_a_run_that_added_gradients_in_16_bits_is_audited_as_it_was_trained(
    audit: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """From its beginning, too, where no checkpoint says so; to the bit."""
    run_ranks(_train_as_before, 1, _config(tmp_path, parallel={"precision": "bf16_pure"}).model_dump())
    code, said = audit(tmp_path, "--from", "0")
    assert code == 0 and "the same to the bit" in said, said


def _train_as_before(values: dict[str, Any]) -> bool:
    """A rank of a tree that knew no other type than that of the weights, and said nothing of it."""
    from raytune_fsdp.run import assemble

    kernels_of = assemble.kernels_of
    assemble.kernels_of = lambda *given: {k: v for k, v in kernels_of(*given).items() if k != "gradients"}
    return train_rank(values)


@pytest.mark.slow
def test_another_world_is_within_the_bounds(honest: Path, audit: Callable[..., tuple[int, str]]) -> None:
    code, said = audit(honest, "--workers", "2")
    assert code == 0 and "within the bounds" in said and "world size of attempt 1: 1; here: 2" in said, said


@pytest.mark.slow
def test_an_exact_run_of_three_ranks_is_audited_by_one_to_the_bit(
    exact: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """With the run's own threads, from its beginning, too; then with a weight whose lowest bit was changed, and with
    another digest of a step."""
    for beginning in ([], ["--from", "0"]):
        torch.set_num_threads(2)
        code, said = audit(exact, "--workers", "1", *beginning)
        assert code == 0 and "**Passed**: trained again, it is the same to the bit." in said, said
        assert "| the run, attempt 1 | 3 |" in said and "| the audit | 1 |" in said
    run = _copy(exact, tmp_path) / "runs" / "run"
    name = _flip(run, bit=1, byte=0)
    with_hashes(next(Path(each.path) for each in checkpoints(run) if each.step == LAST))
    code, said = audit(tmp_path, "--workers", "1")
    assert code == 4 and f"the checkpoint of step {LAST}: {name}[" in said and "1 of them differ" in said, said
    record = run / "metrics.jsonl"
    there = next(row["digest"] for row in read_trajectory(record) if row["step"] == FIRST + 4)
    record.write_text(record.read_text().replace(there, "0" * 64))
    code, said = audit(tmp_path, "--workers", "1")
    assert code == 4 and f"step {FIRST + 4}: digest is {'0' * 64} on record, and {there} when it" in said, said


def _copy(honest: Path, directory: Path) -> Path:
    """The run in another place, to be changed there."""
    shutil.copytree(honest / "runs" / "run", directory / "runs" / "run")
    return directory


@pytest.mark.slow
def test_a_weight_that_was_changed_a_lot_shows_at_another_world(
    honest: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    run = _copy(honest, tmp_path) / "runs" / "run"
    name = _flip(run, bit=0x40, byte=3)  # of the exponent
    with_hashes(next(Path(each.path) for each in checkpoints(run) if each.step == LAST))
    for arguments in ([], ["--from", "0"]):
        code, said = audit(tmp_path, "--workers", "2", *arguments)
        assert code == 4 and f"First difference: the checkpoint of step {LAST}: {name}[" in said, said


def _flip(run: Path, *, bit: int, byte: int) -> str:
    """Change a number in the second checkpoint; returns the name of its tensor."""
    (second,) = (each for each in checkpoints(run) if each.step == LAST)
    name = next(name for name in types_in(second) if name.startswith("model."))
    path, start = place_of(second, name)
    with open(path, "r+b") as file:
        file.seek(start + byte)
        (before,) = file.read(1)
        file.seek(start + byte)
        file.write(bytes([before ^ bit]))
    return name


def test_a_changed_row(honest: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    lines = (honest / "tokens.jsonl").read_text().splitlines()
    row = json.loads(lines[7])
    row["input_ids"][-1] = row["labels"][-1] = row["input_ids"][-1] ^ 1
    (tmp_path / "tokens.jsonl").write_text("\n".join([*lines[:7], json.dumps(row), *lines[8:], ""]))
    code, said = audit(honest, "--data.train.0.path", str(tmp_path / "tokens.jsonl"))
    assert code == 4 and "**Not the same.** First difference: " in said
    assert "data.train.0.files: " in said and "tokens.jsonl" in said, said


def test_another_seed(honest: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    config = _copy(honest, tmp_path) / "runs" / "run" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 3", "seed: 4"))
    code, said = audit(tmp_path)
    assert code == 4 and "run.seed: was 3, is 4" in said, said


def test_a_flipped_weight(honest: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """The lowest bit of one number in the second checkpoint, with hashes that fit."""
    run = _copy(honest, tmp_path) / "runs" / "run"
    name = _flip(run, bit=1, byte=0)
    (second,) = (each for each in checkpoints(run) if each.step == LAST)
    code, said = audit(tmp_path)
    assert code == 4 and f"{second.path} is damaged: " in said, said
    with_hashes(Path(second.path))
    code, said = audit(tmp_path)
    assert code == 4 and f"First difference: the checkpoint of step {LAST}: {name}[" in said, said
    assert "loss: largest relative difference 0.00e+00" in said and "1 of them differ" in said


def test_rows_that_were_changed_in_the_cache_alone(
    honest: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the run is said to have been trained on is its data; the cache that it brings may have something else."""
    directory = _copy(honest, tmp_path)
    shutil.copytree(honest / "runs" / "cache", directory / "runs" / "cache")
    for window in (directory / "runs" / "cache").rglob("*.arrow"):
        data = bytearray(window.read_bytes()[:-16])
        with pa.ipc.open_stream(pa.py_buffer(bytes(data))) as reader:
            ids = reader.read_next_batch()["input_ids"].flatten().buffers()[1].to_pybytes()
        place = data.index(ids[:64])
        data[place] ^= 1
        window.write_bytes(bytes(data) + xxhash.xxh3_128_digest(bytes(data)))
    run = directory / "runs" / "run"
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace(str(honest / "runs"), str(tmp_path / "runs"))
    )
    code, said = audit(directory)  # it does not look at it: the run is honest
    assert code == 0 and "**Passed**" in said, said
    code, said = audit(directory, "--use-cache")
    assert code == 4 and "rows as its cache has them (--use-cache)" in said, said
    changed = 0
    for step in range(1, 5):
        changed += main(["step", str(run), str(step)]) == 2
        said = capsys.readouterr().err
        assert not said or "of the cache is not what its rows make" in said, said
    assert changed


def test_nothing_is_taken_that_a_checkpoint_does_not_list(
    honest: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """A stranger's checkpoint with a link to everything: neither copied nor linked."""
    run = _copy(honest, tmp_path) / "runs" / "run"
    for each in checkpoints(run):
        os.symlink(tmp_path, Path(each.path) / "everything")
        os.mkfifo(Path(each.path) / "pipe")
    code, said = audit(tmp_path)
    assert code == 0 and "**Passed**" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        # The record says the right rate; what was learned from the wrong one shows in the next step.
        ("rate", "step 13: loss is "),
        ("dropped", "step 12: samples is "),
        # Equal samples, whose gradients are added in another order: only bits show it.
        ("exchanged", ""),
    ],
)
def test_a_step_that_was_trained_otherwise(
    honest: Path, exact: Path, audit: Callable[..., tuple[int, str]], tmp_path: Path, what: str, difference: str
) -> None:
    honest = exact if what == "exchanged" else honest
    run = _copy(honest, tmp_path) / "runs" / "run"
    for each in checkpoints(run):
        if each.step > FIRST:
            shutil.rmtree(each.path)
    record = run / "metrics.jsonl"
    before = record.read_text().splitlines()
    values = _config(honest, run={"name": "run", "exact": what == "exchanged"}).model_dump()
    values["run"]["storage"] = str(tmp_path / "runs")
    run_ranks(_train_otherwise, 1, values, what)
    if what == "rate":
        right = {
            line["trajectory"]["step"]: line["trajectory"]["lr"]
            for line in map(json.loads, before)
            if line["kind"] == "step"
        }
        lines = [json.loads(line) for line in record.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "step":
                line["trajectory"]["lr"] = right[line["trajectory"]["step"]]
        record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = audit(tmp_path, *(["--workers", "2"] if what == "exchanged" else []))
    assert code == 4 and f"First difference: {difference}" in said, said


def _train_otherwise(values: dict[str, Any], what: str) -> None:
    """A rank that trains step 12 at another rate, leaves out its samples, or exchanges its micro-batches."""
    from dataclasses import replace
    from unittest import mock

    import torch.distributed as dist

    from raytune_fsdp.data.batches import rank_batches
    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.launch.worker import work
    from raytune_fsdp.run import loop
    from raytune_fsdp.run.assemble import LauncherHooks
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    assert standing.state.step == FIRST
    steps, hooks = standing.steps_left, LauncherHooks()
    if what != "rate":
        stream = rank_batches(
            Stream(prepared.train, seed=config.run.seed), standing.plan.division, range(steps.start, steps.stop + 1),
            cursor=standing.state.cursor, data_rank=dist.get_rank(),
        )  # fmt: skip
        kept = (replace(each, step=each.step - (each.step > 12)) for each in stream if each.step != 12)
        if what == "exchanged":
            kept = (
                replace(each, micro_batches=each.micro_batches[::-1]) if each.step == 12 else each for each in stream
            )
        hooks = LauncherHooks(batches=kept)
    honest = loop.lr_factor
    wrong = lambda step, *rest: honest(step, *rest) * (1.01 if step == 12 and what == "rate" else 1)  # noqa: E731
    with mock.patch.object(loop, "lr_factor", wrong):
        work(config, prepared, standing, torch.device("cpu"), lambda: None, hooks)


def test_what_cannot_be_audited_is_said(honest: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(honest / "runs" / "run")
    for arguments, message in [
        (["--from", "9"], "has no checkpoint of that step; it has 8, 16, 20, or 0"),
        (["--from", "16", "--to", "16"], "a segment has at least one step"),
        (["--to", "21"], "--to 21: the run has come to step 20"),
        (["--out", str(tmp_path / "missing" / "report.md")], "its directory does not exist"),
        (["--cluster.env.PYTHONPATH", "/shared"], "(cluster.env.PYTHONPATH): look at it, then add --trust-remote-code"),
        (["--scratch", "/proc"], "--scratch /proc: "),
        (["--workers", "7"], "use at most 3 rank(s)"),
    ]:
        assert main(["audit", run, *arguments]) == 2
        assert message in capsys.readouterr().err
