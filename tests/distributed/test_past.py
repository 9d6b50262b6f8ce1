"""`raytune-fsdp step`: what a step trained on, found again from the run directory and the data."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.batch import StepBatches, StopReason
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.tools.audit.past import past_place, past_step
from tests.ranks import resident_ranks
from tests.runs import make_config, write_tokens

STEPS, STOPPED = 22, 9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinetuneConfig, Path]:
    """A mixed, packed run, begun on two ranks and ended on three, and what its ranks were given in every step."""
    directory = tmp_path_factory.mktemp("past")
    few, many = write_tokens(directory / "few.jsonl", 40, seed=5), write_tokens(directory / "many.jsonl", 70, seed=6)
    long = write_tokens(directory / "long.jsonl", 12, longest=120, seed=7)
    rows = {"format": {"type": "tokens"}}
    config = make_config(
        directory,
        data={
            "train": [
                {"name": "few", "path": str(few), "weight": 1.5, **rows},
                {"name": "many", "path": str(many), "weight": 0.7, **rows},
                {"name": "long", "path": str(long), **rows},
            ],
            "long_documents": "split",
            "seq_len": 48,
            "window": 32,
        },
        train={"global_batch": 6, "micro_batch": 2, "max_steps": None, "epochs": 2.6},
        checkpoint={"every": 4, "keep_last": None, "asynchronous": False},
        tracking={"documents": True},
    )
    given = directory / "given"
    given.mkdir()
    resident_ranks(_train, 2, config.model_dump(), given, STOPPED)
    resident_ranks(_train, 3, config.model_dump(), given, None)
    return config, given


def _train(values: Mapping[str, Any], given: Path, stop_after: int | None) -> None:
    """A rank of the run, which writes down what it is given."""
    import torch
    import torch.distributed as dist

    from raytune_fsdp.base.errors import Interrupted
    from raytune_fsdp.data.batches import rank_batches
    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.launch.worker import work
    from raytune_fsdp.run.assemble import LauncherHooks
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    batches = rank_batches(
        Stream(prepared.train, seed=config.run.seed), standing.plan.division, standing.steps_left,
        cursor=standing.state.cursor, data_rank=dist.get_rank(),
    )  # fmt: skip

    def noted() -> Iterator[StepBatches]:
        for each in batches:
            blocks = [
                (block.index, block.input_ids.tolist(), block.labels.tolist())
                for block in each.micro_batches
                if not block.is_filler
            ]
            (given / f"{each.step}.{dist.get_rank()}.{stop_after}").write_text(json.dumps(blocks))
            yield each

    calls = iter(range(standing.state.step + 1, 10**9))
    try:
        stop = lambda: StopReason.SIGNAL if next(calls) == stop_after else None  # noqa: E731
        work(config, prepared, standing, torch.device("cpu"), stop, LauncherHooks(batches=noted()))
    except Interrupted:
        pass


def _given(given: Path, step: int) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of the samples that the ranks trained on in a step, in order."""
    blocks = [
        block
        for part in given.glob(f"{step}.*.{STOPPED if step <= STOPPED else None}")
        for block in json.loads(part.read_text())
    ]
    return [pair for _, ids, labels in sorted(blocks) for pair in zip(ids, labels, strict=True)]


def test_ten_steps_are_what_the_ranks_trained_on(run: tuple[FinetuneConfig, Path], tmp_path: Path) -> None:
    config, given = run
    place = past_place(Path(config.run.storage) / config.run.name)
    steps = sorted(int(part.name.split(".")[0]) for part in given.glob("*.0.None"))
    last = steps[-1]
    # The cache is gone, as on another machine: everything is read and packed again.
    fresh = {"cache": config.data.cache.model_copy(update={"path": str(tmp_path)})}
    config = config.model_copy(update={"data": config.data.model_copy(update=fresh)})
    chosen = [*random.Random(0).sample(range(1, last), 9), last]  # the last one is short
    rows = {path: [json.loads(line) for line in Path(path).read_text().splitlines()] for path in _files(config)}
    pieces = 0
    for step in chosen:
        past = past_step(config, place, step)
        wanted = _given(given, step)
        assert [(e.sample.input_ids.tolist(), e.sample.labels.tolist()) for e in past.samples] == wanted and wanted
        for each in past.samples:
            start = 0
            for origin in each.origins:
                path, _, line = origin.where.rpartition(":")
                row = rows[path][int(line) - 1]["input_ids"]
                assert Path(path).stem == past.windows.names[origin.dataset]
                length = min(48, len(row) - origin.first_token)
                part = each.sample.input_ids[start : start + length].tolist()
                assert part == row[origin.first_token : origin.first_token + length]
                start += length
                pieces += origin.first_token > 0
            assert (each.sample.source_ids[start:] == -1).all()
    assert len(past.samples) < config.train.global_batch and pieces


def _files(config: FinetuneConfig) -> list[str]:
    return [str(dataset.path) for dataset in config.data.train]


def test_the_command_shows_rows_and_losses(
    run: tuple[FinetuneConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = run
    directory = str(Path(config.run.storage) / config.run.name)
    recorded = {step: _documents(directory, step, capsys) for step in (3, 9, 10, 11)}
    assert main(["step", directory, "11", "--loss"]) == 0
    assert "\nlosses by document, as recorded\n" in capsys.readouterr().out
    for step, each in recorded.items():
        total = sum(line["loss"] * line["trained"] for line in each if line["trained"])
        targets = _line(directory, step)["target_tokens"]
        assert sum(line["trained"] for line in each) == targets
        assert total / targets == pytest.approx(_line(directory, step)["loss"], rel=1e-7)
    (Path(directory) / "documents").rename(tmp_path / "documents")
    documents = _documents(directory, 10, capsys)
    assert {line.pop("loss_is") for line in recorded[10]} == {"as trained"}
    assert {line.pop("loss_is") for line in documents} == {"cross-entropy"}
    assert [line | {"loss": None} for line in documents] == [line | {"loss": None} for line in recorded[10]]
    for measured, known in zip(documents, recorded[10], strict=True):
        assert measured["loss"] == pytest.approx(known["loss"], rel=1e-6)
    assert sum(each["tokens"] for each in documents) == _line(directory, 10)["tokens"]
    losses = [each["loss"] * each["trained"] for each in documents if each["trained"]]
    total = sum(losses) / sum(each["trained"] for each in documents)
    # The weights are those of step 9, saved when the run was stopped: the very ones that step 10 began with.
    assert total == pytest.approx(_line(directory, 10)["loss"], rel=1e-9)
    assert main(["step", directory, "10", "--text"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("step 10: 6 packed samples, ") and "few.jsonl:" in shown and "«w" in shown


def _documents(directory: str, step: int, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["step", directory, str(step), "--loss", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _line(directory: str, step: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return next(line["trajectory"] for line in lines if line["kind"] == "step" and line["trajectory"]["step"] == step)


def test_other_data_is_refused_by_name(
    run: tuple[FinetuneConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = run
    directory = str(Path(config.run.storage) / config.run.name)
    changed = write_tokens(tmp_path / "few.jsonl", 40, seed=50)
    assert main(["step", directory, "3", "--data.train.0.path", str(changed)]) == 2
    error = capsys.readouterr().err
    assert "step 3 was trained on other samples than these" in error and "data.train.0.files" in error
    assert main(["step", directory, "4000"]) == 2
    assert " steps, so there is no step 4000" in capsys.readouterr().err
    assert main(["step", str(tmp_path), "3"]) == 2
    assert "is not a run directory: it has no config.yaml" in capsys.readouterr().err
    code = ["--data.train.0.format.type", "python", "--data.train.0.format.function", "antigravity:fly"]
    assert main(["step", directory, "3", *code]) == 2
    assert "antigravity:fly" in (error := capsys.readouterr().err) and "--trust-remote-code" in error
