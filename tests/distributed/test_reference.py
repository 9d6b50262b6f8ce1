"""What a reference says: computed once, before training, whatever happens meanwhile, and refused if it is another's."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytune_fsdp.checkpoint.model_files import find_checkpoint
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.data.cache import REFERENCE
from raytune_fsdp.record.jsonl import read_evaluations, read_events, read_trajectory
from raytune_fsdp.run.publish import publish
from tests.checkpoints import checkpoints
from tests.models import add_tokenizer, save_checkpoint
from tests.ranks import run_ranks
from tests.runs import GPT2, LLAMA, make_config, train_rank, trajectory

LN2 = math.log(2)
SLOW = pytest.mark.slow
STEPS = 5


def write_pairs(path: Path, rows: int = 40, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)

    def words(most: int) -> str:
        return " ".join(f"w{number}" for number in rng.integers(3, 64, int(rng.integers(2, most))))

    with open(path, "w") as file:
        for _ in range(rows):
            file.write(json.dumps({"prompt": words(6), "chosen": f" {words(9)}", "rejected": f" {words(9)}"}) + "\n")
    return path


def pairs(directory: Path, objective: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]) -> FinetuneConfig:
    """A run of five steps over five windows of pairs."""
    path = directory / "pairs.jsonl"
    directory.mkdir(exist_ok=True)
    if not path.exists():
        write_pairs(path)
    format = {"type": "preference", "style": "plain"}
    train = {"global_batch": 6, "micro_batch": 2, "max_steps": STEPS, "objective": objective or {"type": "dpo"}}
    data = {"train": [{"path": str(path), "format": format}], "window": 8}
    sections = {
        "train": {**train, **sections.pop("train", {})},
        "data": {**data, **sections.pop("data", {})},
        **sections,
    }
    return make_config(directory, GPT2, **sections)


def files_of(config: FinetuneConfig) -> list[Path]:
    return sorted(Path(config.run.storage, "cache", REFERENCE).glob("*/*.values"))


def run_of(config: FinetuneConfig) -> Path:
    return Path(config.run.storage, config.run.name)


def values_of(config: FinetuneConfig) -> dict[str, bytes]:
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files_of(config)}


def close(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> float:
    assert [row["samples"] for row in left] == [row["samples"] for row in right]
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(left, right, strict=True))


def test_the_first_loss_is_the_logarithm_of_two_and_all_runs_share_the_files(tmp_path: Path) -> None:
    config = pairs(tmp_path)
    steps = trajectory(config, 2)
    assert abs(steps[0]["loss"] - LN2) < 1e-12 and len({row["loss"] for row in steps}) == STEPS
    before = values_of(config)
    assert len(before) == len({key.split("/")[0] for key in before}) * 5
    again = pairs(tmp_path, run={"name": "again"}, train={"global_batch": 12, "max_steps": 3})
    assert abs(trajectory(again, 3)[0]["loss"] - LN2) < 1e-12
    assert values_of(config) == before
    told = [event["fields"] for event in read_events(run_of(again) / "events.jsonl") if event["event"] == "reference"]
    assert [each["computed"] for each in told] == [0] and told[0]["documents"] == 80


@pytest.mark.parametrize("worlds", [(1, 3), pytest.param((1, 2), marks=SLOW)])
def test_values_do_not_depend_on_the_number_of_ranks(tmp_path: Path, worlds: tuple[int, int]) -> None:
    found = []
    for world in worlds:
        config = pairs(tmp_path / f"on-{world}")
        found.append((values_of_run(config, world), read_trajectory(run_of(config) / "metrics.jsonl")))
    assert found[0][0] == found[1][0]
    assert close(found[0][1], found[1][1]) < 1e-10


def values_of_run(config: FinetuneConfig, world: int) -> dict[str, bytes]:
    trajectory(config, world)
    return values_of(config)


def killed_rank(values: Mapping[str, Any], rank: int, writes: int, step: int) -> None:
    """One rank, of which one is killed: before a file of the reference is in its place, or where a step begins."""
    import torch.distributed as dist

    from raytune_fsdp.data import cache
    from raytune_fsdp.run import loop

    count = {"writes": 0}
    put, take = cache.replace_at_once, loop.train_step

    def writes_then_dies(path: Path, *parts: Any, **options: Any) -> None:
        count["writes"] += path.suffix == ".values"
        if count["writes"] > writes and dist.get_rank() == rank:
            path.with_name("half").write_bytes(b"".join(map(bytes, parts))[:40])
            os.kill(os.getpid(), signal.SIGKILL)
        put(path, *parts, **options)

    def trains_then_dies(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == rank and args[3].step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(*args, **options)

    cache.replace_at_once, loop.train_step = writes_then_dies, trains_then_dies
    train_rank(values)


@pytest.mark.parametrize("many", [1, pytest.param(5, marks=SLOW)])
def test_kills_in_the_pass_and_in_training_change_nothing(tmp_path: Path, many: int) -> None:
    """So many in each of the two."""
    whole = pairs(tmp_path / "whole", checkpoint={"every": 2})
    wanted = trajectory(whole, 2)
    config = pairs(tmp_path / "killed", checkpoint={"every": 2})
    chance = random.Random(21)
    in_the_pass = [(0, writes, 0) for writes in chance.sample([1, 0, 0, 0, 1][:many], many)]
    in_training = [(chance.randrange(2), 99, step) for step in sorted(chance.sample(range(1, STEPS + 1), many))]
    for rank, writes, step in (*in_the_pass, *in_training):
        with pytest.raises(AssertionError, match="died without a word|closed by peer|reset by peer"):
            run_ranks(killed_rank, chance.choice((2, 3)), config.model_dump(), rank, writes, step)
    found = trajectory(config, 2)
    kept = values_of(config)
    assert {key.split("/")[1]: value for key, value in kept.items()}.keys() == {
        key.split("/")[1] for key in values_of(whole)
    }
    assert kept == values_of(whole), "the same reference has the same place and the same values"
    assert close(wanted, found) < 1e-10


@pytest.mark.parametrize("harm", ["damaged", *(pytest.param(each, marks=SLOW) for each in ("lost", "swapped", "half"))])
def test_a_file_that_is_not_what_it_was_is_computed_anew_before_a_step_uses_it(tmp_path: Path, harm: str) -> None:
    whole = trajectory(pairs(tmp_path / "whole"), 1)
    config = pairs(tmp_path / "harmed")
    assert len(trajectory(config, 1, stop_after=3)) == 3
    first, second = files_of(config)[:2]
    content = second.read_bytes()
    if harm == "lost":
        shutil.rmtree(first.parent)
    elif harm == "damaged":
        second.write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])
    elif harm == "swapped":
        second.write_bytes(first.read_bytes())
    else:
        second.write_bytes(content[: len(content) // 2])
    assert close(whole, trajectory(config, 1)) == 0.0
    assert second.read_bytes() == content
    told = [event["fields"] for event in read_events(run_of(config) / "events.jsonl") if event["event"] == "reference"]
    assert [each["computed"] for each in told] == [4, 5 if harm == "lost" else 1] or told[0]["computed"] == 5


@SLOW
def test_a_longer_run_computes_what_it_reads_more(tmp_path: Path) -> None:
    long = trajectory(pairs(tmp_path / "long", train={"max_steps": 8}), 1)
    config = pairs(tmp_path / "short", train={"max_steps": 2}, optim={"schedule": {"type": "constant"}})
    trajectory(config, 1)
    few = len(files_of(config))
    assert few < 5
    longer = pairs(tmp_path / "short", train={"max_steps": 8}, optim={"schedule": {"type": "constant"}})
    assert len(trajectory(longer, 1)) == len(long)
    assert len(files_of(config)) > few


def test_other_values_are_refused_by_name(tmp_path: Path) -> None:
    """As another kind of device would compute them, once the files are lost."""
    from raytune_fsdp.data.reference import ReferenceFiles

    config = pairs(tmp_path)
    trajectory(config, 1, stop_after=3)
    directory = files_of(config)[0].parent
    for path in sorted(directory.glob("*.values"))[-1:]:  # whichever it is
        epoch, window = int(path.name[1:4]), int(path.name[6:14])
        own = ReferenceFiles(root=directory.parent.parent, key=directory.name, about={})
        found = own.read(epoch, window)
        assert found is not None
        own.write(epoch, window, found[0], found[1] + 1e-9)
    with pytest.raises(AssertionError, match="ResumeError: .*are not those that this run began with"):
        trajectory(config, 1)


def model_at(directory: Path, seed: int = 1) -> dict[str, Any]:
    """What `model` says of a stored network that has the tests' tokenizer."""
    make_config(directory.parent)  # writes it
    if not directory.exists():
        save_checkpoint(directory, "gpt2", seed=seed, vocab_size=64, **NO_DROPOUT)
        shutil.copytree(directory.parent / "tokenizer", directory, dirs_exist_ok=True)
    return {"path": str(directory), "tokenizer": None, "init": "pretrained", "architecture": None}


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LORA = {"type": "lora", "rank": 2, "alpha": 4}


@pytest.mark.parametrize("method", [LORA, pytest.param({"type": "full"}, marks=SLOW)])
def test_a_reference_that_is_asked_in_every_step_says_the_same(tmp_path: Path, method: dict[str, Any]) -> None:
    """By the model without its adapters, or by a second copy; after a resume, too, when the model is another."""
    given = {"model": model_at(tmp_path / "base"), "method": method}
    before = trajectory(pairs(tmp_path, run={"name": "before"}, **given), 2)
    during = pairs(tmp_path, run={"name": "during"}, reference={"when": "during"}, **given)
    assert len(trajectory(during, 2, stop_after=3)) == 3
    rows = trajectory(during, 3)
    assert abs(before[0]["loss"] - LN2) < 1e-12 and abs(rows[0]["loss"] - LN2) < 1e-12
    assert close(before, rows) < 1e-10


def test_the_reference_of_a_run_from_an_adapter_is_the_adapted_model(tmp_path: Path) -> None:
    base = model_at(tmp_path / "base")
    first = pairs(tmp_path, run={"name": "first"}, model=base, method=LORA, train={"max_steps": 2})
    trajectory(first, 1)
    export = tmp_path / "adapter"
    publish(find_checkpoint(run_of(first)), export, ExportConfig())
    begun = {"model": base, "method": {**LORA, "adapter": str(export)}}
    config = pairs(tmp_path, run={"name": "second"}, **begun)
    steps = trajectory(config, 2, stop_after=3)
    assert abs(steps[0]["loss"] - LN2) < 1e-12
    whole = trajectory(pairs(tmp_path, run={"name": "whole"}, **begun), 1)
    shutil.rmtree(Path(config.run.storage, "cache", REFERENCE))
    assert close(whole, trajectory(config, 3)) < 1e-10, "a run that goes on asks what it began with, and not itself"
    once = {"train": {"max_steps": 1}, **begun}
    bare = trajectory(pairs(tmp_path, run={"name": "bare"}, reference={"model": "base"}, **once), 1)
    assert abs(bare[0]["loss"] - LN2) > 1e-6


def test_another_model_is_compared_with_and_a_changed_one_refused(tmp_path: Path) -> None:
    """Its values are those of a run that starts from it."""
    start, other = model_at(tmp_path / "base"), model_at(tmp_path / "other", seed=2)
    wanted = pairs(tmp_path, run={"name": "from-other"}, model=other)
    trajectory(wanted, 1)
    theirs = {path.name: path.read_bytes().partition(b"\n")[2][:-16] for path in files_of(wanted)}
    config = pairs(tmp_path, run={"name": "run"}, model=start, reference={"model": other["path"]})
    steps = trajectory(config, 2, stop_after=3)
    assert abs(steps[0]["loss"] - LN2) > 1e-3
    own = [path for path in files_of(config) if path.parent != files_of(wanted)[0].parent]
    found = {path.parent.name: {} for path in files_of(config)}
    for path in files_of(config):
        found[path.parent.name][path.name] = path.read_bytes().partition(b"\n")[2][:-16]
    assert len(found) == 2 and all(values == theirs for values in found.values()) and own
    with pytest.raises(AssertionError, match="OtherRunError"):
        trajectory(pairs(tmp_path, run={"name": "run"}, model=start), 1)
    save_checkpoint(Path(other["path"]), "gpt2", seed=3, vocab_size=64, **NO_DROPOUT)
    with pytest.raises(AssertionError, match="reference.model=.* is not the model that this run compares with"):
        trajectory(config, 1)
    add_tokenizer(Path(other["path"]))
    with pytest.raises(AssertionError, match="has another tokenizer than the run: .*name a model with the same"):
        trajectory(config, 1)


@SLOW
@pytest.mark.parametrize("mesh", [{"sequence": 2}, {"tensor": 2}])
def test_ranks_that_share_samples_or_layers_find_the_same_values(tmp_path: Path, mesh: dict[str, int]) -> None:
    """To rounding: they add in another order."""
    model = {"architecture": LLAMA}
    steps = trajectory(pairs(tmp_path / "alone", model=model), 1)
    sections: dict[str, Any] = {"model": model, "parallel": {"precision": "fp64", "mesh": mesh}}
    assert close(steps, trajectory(pairs(tmp_path / "shared", **sections), 2)) < 1e-8
    during = pairs(tmp_path / "during", reference={"when": "during"}, **sections)
    assert close(steps, trajectory(during, 2)) < 1e-8


def test_evaluations_compare_too(tmp_path: Path) -> None:
    """Before the first step a model is its own reference."""
    measured = write_pairs(tmp_path / "measured.jsonl", rows=9, seed=5)
    (tmp_path / "runs").mkdir()
    format = {"type": "preference", "style": "plain"}
    data = {"eval": [{"name": "measured", "path": str(measured), "format": format}]}
    config = pairs(tmp_path, data=data, train={"max_steps": 4}, eval={"at_start": True, "every": 2})
    trajectory(config, 2)
    found = read_evaluations(run_of(config) / "metrics.jsonl", 4)
    assert abs(found[0]["eval/measured/loss"] - LN2) < 1e-12
    assert found[0]["eval/measured/margins"] == pytest.approx(0, abs=1e-12)
    assert found[4]["eval/measured/loss"] != found[2]["eval/measured/loss"] != found[0]["eval/measured/loss"]


@SLOW
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_run_from_a_checkpoint_asks_that_checkpoint_whenever_it_goes_on(tmp_path: Path, when: str) -> None:
    """Also once it has checkpoints, a config and a tokenizer of its own."""
    first = pairs(tmp_path, run={"name": "first"})
    trajectory(first, 1)
    path = checkpoints(run_of(first))[-1].path
    given = {"model": {"path": path, "tokenizer": None, "init": "pretrained", "architecture": None}}
    wanted = trajectory(pairs(tmp_path, run={"name": "whole"}, reference={"when": when}, **given), 1)
    assert abs(wanted[0]["loss"] - LN2) < 1e-12
    config = pairs(tmp_path, run={"name": "run"}, reference={"when": when}, **given)
    trajectory(config, 1, stop_after=3)
    shutil.rmtree(Path(config.run.storage, "cache", REFERENCE))
    assert close(wanted, trajectory(config, 2)) < 1e-10
    shutil.rmtree(Path(config.run.storage, "cache", REFERENCE), ignore_errors=True)
    config = pairs(tmp_path, run={"name": "other"}, reference={"when": when}, **given)
    trajectory(config, 1, stop_after=3)
    shutil.rmtree(Path(config.run.storage, "cache", REFERENCE), ignore_errors=True)
    shutil.rmtree(path)
    with pytest.raises(AssertionError, match="ResumeError: .* is not there any more"):
        trajectory(config, 1)


@SLOW
def test_a_changed_base_is_another_reference_in_every_step_too(tmp_path: Path) -> None:
    given = {"model": model_at(tmp_path / "base"), "reference": {"when": "during"}}
    config = pairs(tmp_path, **given)
    trajectory(config, 1, stop_after=3)
    save_checkpoint(tmp_path / "base", "gpt2", seed=3, vocab_size=64, **NO_DROPOUT)
    with pytest.raises(AssertionError, match="OtherRunError: model.path=.* is not the model that this"):
        trajectory(config, 1)


@SLOW
def test_values_of_another_arithmetic_are_other_files(tmp_path: Path) -> None:
    plain = trajectory(pairs(tmp_path / "own", parallel={"precision": "fp32"}), 1)
    trajectory(pairs(tmp_path, run={"name": "tf32"}, parallel={"precision": "fp32", "tf32": True}), 1)
    config = pairs(tmp_path, parallel={"precision": "fp32"})
    assert close(plain, trajectory(config, 1)) == 0.0 and len({path.parent for path in files_of(config)}) == 2


@SLOW
def test_a_new_adapter_of_another_rank_is_the_same_reference(tmp_path: Path) -> None:
    given = {"model": model_at(tmp_path / "base")}
    trajectory(pairs(tmp_path, run={"name": "small"}, method=LORA, **given), 1)
    other = pairs(tmp_path, run={"name": "large"}, method={**LORA, "rank": 4, "dropout": 0.1}, **given)
    trajectory(other, 1)
    assert len({path.parent for path in files_of(other)}) == 1


@SLOW
def test_epochs_that_differ_may_have_windows_without_a_sample(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl", rows=12)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[3:]:
        row["prompt"] = "w9 " * 60
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"window": 2, "reshuffle": "full", "long_documents": "drop"}
    config = pairs(tmp_path, data=data, train={"global_batch": 2, "micro_batch": 1, "max_steps": 8})
    assert abs(trajectory(config, 2)[0]["loss"] - LN2) < 1e-12


@SLOW
def test_a_reference_with_fewer_positions_is_refused_before_ranks_start(tmp_path: Path) -> None:
    base, small = model_at(tmp_path / "base"), model_at(tmp_path / "small")
    save_checkpoint(Path(small["path"]), "gpt2", vocab_size=64, n_positions=8, **NO_DROPOUT)
    with pytest.raises(AssertionError, match="reference.model=.* knows 8 positions, and data.seq_len is 48"):
        trajectory(pairs(tmp_path, model=base, reference={"model": small["path"]}), 1)


def blind_rank(values: Mapping[str, Any]) -> None:
    """The second rank sees neither model nor adapter: rank 0 reads for it."""
    import torch.distributed as dist

    from raytune_fsdp.run import starting_weights

    def nothing(*_: Any, **__: Any) -> Any:
        raise AssertionError("rank 1 looks for weights")

    if dist.get_rank() == 1:
        starting_weights.known_weights = nothing
    train_rank(values)


@SLOW
def test_only_one_rank_has_to_see_the_adapter(tmp_path: Path) -> None:
    base = {**model_at(tmp_path / "base"), "fill": "rank0"}
    first = pairs(tmp_path, run={"name": "first"}, model=base, method=LORA)
    trajectory(first, 1)
    publish(find_checkpoint(run_of(first)), tmp_path / "adapter", ExportConfig())
    method = {**LORA, "adapter": str(tmp_path / "adapter")}
    run_ranks(blind_rank, 2, pairs(tmp_path, run={"name": "second"}, model=base, method=method).model_dump())
