"""What a teacher predicts: computed once, before training, whatever happens, and refused if it is another's."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raytune_fsdp.checkpoint.model_files import find_checkpoint
from raytune_fsdp.config import ExportConfig, FinetuneConfig
from raytune_fsdp.data.cache import TEACHER
from raytune_fsdp.data.teacher import Lessons, Predictions, TeacherFiles
from raytune_fsdp.record.jsonl import read_events, read_trajectory
from raytune_fsdp.run.publish import publish
from tests.checkpoints import checkpoints
from tests.distributed.test_reference import NO_DROPOUT, close, model_at, run_of
from tests.models import add_tokenizer, save_checkpoint
from tests.ranks import run_ranks
from tests.runs import LLAMA, make_config, train_rank, trajectory, write_tokens

SLOW = pytest.mark.slow
K = 5


def lessons(directory: Path, model: Path | str, /, **sections: Mapping[str, Any]) -> FinetuneConfig:
    """A run of six steps over four windows, one of whose documents is there twice."""
    directory.mkdir(exist_ok=True)
    tokens = directory / "lessons.jsonl"
    if not tokens.exists():
        write_tokens(tokens, rows=30)
        lines = tokens.read_text().splitlines()
        tokens.write_text("\n".join([*lines, lines[3], lines[20]]) + "\n")
    sections = {
        "train": {"global_batch": 6, "micro_batch": 2, "max_steps": 6, "objective": {"type": "distill"}},
        "teacher": {"model": str(model), "top_k": K},
        "data": {"window": 8, "train": [{"path": str(tokens), "format": {"type": "tokens"}}]},
        **sections,
    }
    return make_config(directory, **sections)


def store_of(config: FinetuneConfig) -> TeacherFiles:
    (directory,) = Path(config.run.storage, "cache", TEACHER).iterdir()
    found = TeacherFiles.kept(directory)
    assert found is not None and found.key == directory.name
    return found


def predicted(config: FinetuneConfig) -> dict[bytes, bytes]:
    """What is kept of each document, by its name; each is there once."""
    files = store_of(config)
    found: dict[bytes, bytes] = {}
    for part in map(files.open, files.parts()):
        assert part is not None
        own = Lessons(files)
        own.add([part])
        for name in part.table["name"]:
            assert name.tobytes() not in found
            found[name.tobytes()] = own.read(np.array([name])).to_bytes(files.form)
        own.close()
    return found


def windows_of(config: FinetuneConfig) -> dict[str, Any]:
    """What the windows' files say, but for the names of parts, which depend on how many ranks have written them."""
    found = {}
    for path in sorted((store_of(config).directory / "windows").rglob("*.json")):
        said = json.loads(json.loads(path.read_text())["said"])
        del said["parts"]
        found[f"{path.parent.name}/{path.name}"] = said
    return found


def event_of(config: FinetuneConfig) -> list[dict[str, Any]]:
    return [event["fields"] for event in read_events(run_of(config) / "events.jsonl") if event["event"] == "teacher"]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return Path(model_at(tmp_path / "teacher", seed=4)["path"])


@pytest.mark.parametrize("worlds", [(1, 3), pytest.param((1, 2), marks=SLOW)])
def test_predictions_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, teacher: Path, worlds: tuple[int, int]
) -> None:
    found = []
    for world in worlds:
        config = lessons(tmp_path / f"on-{world}", teacher)
        found.append((trajectory(config, world), predicted(config), windows_of(config)))
    assert found[0][1] == found[1][1] and len(found[0][1]) == 30
    assert found[0][2] == found[1][2] and len(found[0][2]) == 4
    assert close(found[0][0], found[1][0]) < 1e-10


def test_they_are_what_transformers_computes_and_what_is_not_kept_is_said(tmp_path: Path, teacher: Path) -> None:
    config = lessons(tmp_path, teacher, teacher={"model": str(teacher), "top_k": K, "temperature": 2.0})
    trajectory(config, 2)
    network = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    files = store_of(config)
    known = {name: Predictions.from_bytes(data, files.form) for name, data in predicted(config).items()}
    rests, right = [], 0
    for line in (tmp_path / "lessons.jsonl").read_text().splitlines()[:30]:
        row = json.loads(line)
        with torch.no_grad():
            logits = network(torch.tensor([row["input_ids"]])).logits[0]
        targets = [place for place, label in enumerate(row["labels"]) if label != -100 and place]
        wanted = torch.log_softmax(logits[[place - 1 for place in targets]] / 2.0, -1)
        best = wanted.topk(K)
        for each in known.values():
            if each.ids.shape == best.indices.shape and np.array_equal(each.ids, best.indices.numpy()):
                right += 1
                np.testing.assert_allclose(each.log_probabilities, best.values.numpy(), rtol=0, atol=1e-12)
                rest = 1 - best.values.exp().sum(-1).numpy()
                np.testing.assert_allclose(np.exp(each.rest), rest, rtol=0, atol=1e-12)
                rests.append(rest)
    assert right == 30
    (event,) = event_of(config)
    assert event["documents"] == 30 and event["windows"] == event["computed"] == 4 and event["top_k"] == K
    ((dataset, left),) = event["not_kept"].items()
    assert dataset == "lessons" and left["largest"] == pytest.approx(max(map(np.max, rests)), abs=1e-12)
    twice = np.concatenate([*rests, rests[3], rests[20]])
    assert left["mean"] == pytest.approx(twice.mean(), abs=1e-12)


def test_students_and_mixes_share_what_is_known(tmp_path: Path, teacher: Path) -> None:
    whole = trajectory(lessons(tmp_path / "whole", teacher), 1)
    first = lessons(tmp_path, teacher)
    trajectory(first, 2, stop_after=3)
    before = {path.name: path.read_bytes() for path in (store_of(first).directory / "parts").iterdir()}
    second = lessons(
        tmp_path, teacher, run={"name": "second", "seed": 9}, model={"architecture": LLAMA},
        train={"global_batch": 3, "micro_batch": 1, "max_steps": 8, "objective": {"type": "distill", "reverse": 1.0}},
    )  # fmt: skip
    trajectory(second, 1)
    assert {path.name: path.read_bytes() for path in (store_of(first).directory / "parts").iterdir()} == before
    assert len({name.split("/")[0] for name in windows_of(second)}) == 2 and event_of(second)[0]["documents"] == 30
    shutil.rmtree(teacher)
    copy = shutil.copytree(store_of(first).directory, tmp_path / "copy")
    shutil.rmtree(store_of(first).directory.parent)
    third = lessons(tmp_path, copy, run={"name": "third", "seed": 5}, model={"architecture": LLAMA})
    assert len(trajectory(third, 1)) == 6, "without the model"
    assert close(whole, trajectory(lessons(tmp_path, copy), 3)) < 1e-10, "the same run goes on from the copy"


@SLOW
def test_a_checkpoint_of_another_run_teaches(tmp_path: Path) -> None:
    big = make_config(tmp_path, run={"name": "big"}, train={"max_steps": 2})
    trajectory(big, 1)
    path = checkpoints(run_of(big))[-1].path
    config = lessons(tmp_path, path)
    assert len(trajectory(config, 2)) == 6
    publish(find_checkpoint(run_of(big)), tmp_path / "export", ExportConfig(dtype="trained"))
    trajectory(lessons(tmp_path / "export", tmp_path / "export"), 2)
    assert predicted(config) == predicted(lessons(tmp_path / "export", tmp_path / "export"))


def meanwhile(values: Mapping[str, Any], theirs: str, ours: str) -> None:
    """One rank, whose pass another one overtakes: its files are there when this one's teacher has been built."""
    import torch.distributed as dist

    from raytune_fsdp.run.teacher import passes

    build = passes.build_other

    def build_slowly(*args: Any) -> Any:
        built = build(*args)
        if dist.get_rank() == 0:
            shutil.copytree(theirs, ours, dirs_exist_ok=True)
        dist.barrier()
        return built

    passes.build_other = build_slowly
    train_rank(values)


@SLOW
def test_what_another_pass_has_found_meanwhile_is_not_computed_again(tmp_path: Path, teacher: Path) -> None:
    other = lessons(tmp_path, teacher, run={"name": "other"})
    wanted = trajectory(other, 2)
    files = store_of(other)
    theirs = files.directory.rename(tmp_path / "theirs")
    config = lessons(tmp_path, teacher)
    run_ranks(meanwhile, 1, config.model_dump(), str(theirs), str(files.directory))
    assert close(wanted, read_trajectory(run_of(config) / "metrics.jsonl")) < 1e-10
    assert files.parts() == TeacherFiles.kept(theirs).parts(), "one rank would have written other parts"  # type: ignore[union-attr]
    assert len(windows_of(config)) == 4


def killed_rank(values: Mapping[str, Any], rank: int, writes: int, step: int) -> None:
    """One rank, of which one is killed: before a file of the teacher is in its place, or where a step begins."""
    import torch.distributed as dist

    from raytune_fsdp.data import cache
    from raytune_fsdp.run import loop

    count = {"writes": 0}
    put, take = cache.replace_at_once, loop.train_step

    def writes_then_dies(path: Path, *parts: Any, **options: Any) -> None:
        count["writes"] += TEACHER in path.parts
        if TEACHER in path.parts and count["writes"] > writes and dist.get_rank() == rank:
            path.with_name(f"{path.name}.half.tmp").write_bytes(b"".join(map(bytes, parts))[:40])
            os.kill(os.getpid(), signal.SIGKILL)
        put(path, *parts, **options)

    def trains_then_dies(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == rank and args[3].step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(*args, **options)

    cache.replace_at_once, loop.train_step = writes_then_dies, trains_then_dies
    train_rank(values)


@pytest.mark.slow
@pytest.mark.parametrize("many", [3, 8])
def test_kills_in_the_pass_and_in_training_change_nothing(tmp_path: Path, teacher: Path, many: int) -> None:
    whole = lessons(tmp_path / "whole", teacher, checkpoint={"every": 2})
    wanted = trajectory(whole, 2)
    config = lessons(tmp_path / "killed", teacher, checkpoint={"every": 2})
    chance = random.Random(22)
    kills = [(0, 1, 0), (1, 0, 0), (1, 99, 4), (0, 0, 0), (0, 2, 0), (1, 0, 0), (0, 99, 3), (1, 99, 5)]
    for rank, writes, step in sorted(kills[:many], key=lambda kill: kill[2]):
        with pytest.raises(AssertionError, match="died without a word|closed by peer|reset by peer"):
            run_ranks(killed_rank, chance.choice((2, 3)), config.model_dump(), rank, writes, step)
    assert close(wanted, trajectory(config, 2)) < 1e-10
    assert predicted(config) == predicted(whole) and windows_of(config) == windows_of(whole)


@pytest.mark.parametrize("harm", ["damaged", *(pytest.param(each, marks=SLOW) for each in ("lost", "swapped", "half"))])
def test_a_part_that_is_not_what_it_was_is_computed_anew_before_a_step_uses_it(
    tmp_path: Path, teacher: Path, harm: str
) -> None:
    whole = trajectory(lessons(tmp_path / "whole", teacher), 1)
    config = lessons(tmp_path / "harmed", teacher)
    assert len(trajectory(config, 1, stop_after=3)) == 3
    known, files = predicted(config), store_of(config)
    first, second = map(files.path, files.parts()[:2])
    content = second.read_bytes()
    if harm == "lost":
        shutil.rmtree(files.directory)
    elif harm == "damaged":
        second.write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])
    elif harm == "swapped":
        second.write_bytes(first.read_bytes())
    else:
        second.write_bytes(content[: len(content) // 2])
    if harm != "lost":
        copy = shutil.copytree(files.directory, tmp_path / "copy")
        named = lessons(tmp_path / "harmed", copy, run={"name": "named"})
        with pytest.raises(AssertionError, match=rf"DataError: teacher.model=.*{second.name} is missing or damaged"):
            trajectory(named, 1)
    assert close(whole, trajectory(config, 1)) == 0.0
    assert second.read_bytes() == content and predicted(config) == known
    assert [each["computed"] for each in event_of(config)] == [4, 4 if harm == "lost" else 1]


def test_another_teacher_and_another_tokenizer_are_refused_by_name(tmp_path: Path, teacher: Path) -> None:
    config = lessons(tmp_path, teacher)
    trajectory(config, 1, stop_after=3)
    copy = shutil.copytree(store_of(config).directory, tmp_path / "copy")
    other = model_at(tmp_path / "other", seed=5)["path"]
    with pytest.raises(AssertionError, match="OtherRunError: teacher.model=.*other is not the teacher that this run"):
        trajectory(lessons(tmp_path, other), 1)
    for field, value in (("top_k", 4), ("temperature", 1.5), ("dtype", "fp32")):
        with pytest.raises(AssertionError, match=rf"teacher.{field}: was .*, is '?{value}"):
            trajectory(lessons(tmp_path, teacher, teacher={"model": str(teacher), "top_k": K, field: value}), 1)
        asked = {"model": str(copy), "top_k": K, field: value}
        with pytest.raises(
            AssertionError, match=rf"ConfigError: teacher.{field}={value}: what teacher.model=.* set it"
        ):
            trajectory(lessons(tmp_path, copy, run={"name": "new"}, teacher=asked), 1)
    save_checkpoint(teacher, "gpt2", seed=6, vocab_size=64, **NO_DROPOUT)
    with pytest.raises(AssertionError, match="OtherRunError: teacher.model=.* its files have changed"):
        trajectory(config, 1)
    add_tokenizer(teacher)
    with pytest.raises(AssertionError, match="teacher.model=.* has another tokenizer than the run: "):
        trajectory(config, 1)
    about = copy / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "tokenizer": "another"}))
    with pytest.raises(AssertionError, match="teacher.model=.* made with another tokenizer than the run's"):
        trajectory(lessons(tmp_path, copy, run={"name": "new"}), 1)


def test_other_predictions_are_refused_by_name(tmp_path: Path, teacher: Path) -> None:
    """As another kind of device would compute them, once the files are lost."""
    config = lessons(tmp_path, teacher)
    trajectory(config, 1, stop_after=3)
    for path in (store_of(config).directory / "windows").rglob("*.json"):
        said = json.loads(json.loads(path.read_text())["said"])
        window = store_of(config).read_window(*said["place"])
        assert window is not None
        store_of(config).write_window(*said["place"], type(window)(**{**_fields(window), "values": "0" * 16}))
    with pytest.raises(AssertionError, match="ResumeError: .* predictions of the teacher are not those that this run"):
        trajectory(config, 1)


def _fields(window: Any) -> dict[str, Any]:
    return {name: getattr(window, name) for name in type(window).__slots__}


@SLOW
def test_a_longer_run_asks_more_and_a_continued_one_is_equal(tmp_path: Path, teacher: Path) -> None:
    constant = {"optim": {"schedule": {"type": "constant"}}}
    whole = trajectory(lessons(tmp_path / "whole", teacher, **constant), 2)
    short = {"global_batch": 6, "micro_batch": 2, "max_steps": 1, "objective": {"type": "distill"}}
    config = lessons(tmp_path / "short", teacher, train=short, **constant)
    trajectory(config, 2)
    few = len(windows_of(config))
    assert few < 4 and len(predicted(config)) < 30
    found = trajectory(lessons(tmp_path / "short", teacher, **constant), 2)
    assert close(whole, found) == 0.0 and len(windows_of(config)) == 4


def test_a_store_that_does_not_fit_is_refused_before_the_teacher_is_built(tmp_path: Path, teacher: Path) -> None:
    config = lessons(tmp_path, teacher)
    with pytest.raises(AssertionError, match=r"ConfigError: teacher.top_k=5: .* \(68 bytes for each\), and .* lower"):
        run_ranks(on_a_full_disk, 2, config.model_dump())


def on_a_full_disk(values: Mapping[str, Any]) -> None:
    from raytune_fsdp.run.teacher import passes

    usage = shutil.disk_usage("/")

    def none_free(path: Path) -> Any:
        return type(usage)(10**9, 10**9, 100)

    def never(*_: Any) -> Any:
        raise RuntimeError("the teacher is built")

    shutil.disk_usage, passes.build_other = none_free, never
    train_rank(values)


@SLOW
@pytest.mark.parametrize("mesh", [{"sequence": 2}, {"tensor": 2}])
def test_ranks_that_share_samples_or_layers_find_the_same(tmp_path: Path, mesh: dict[str, int]) -> None:
    """To rounding: they add in another order."""
    teacher = Path(model_at(tmp_path / "teacher")["path"])
    save_checkpoint(teacher, "llama", vocab_size=64, max_position_embeddings=48)
    model = {"model": {"architecture": LLAMA}}
    steps = trajectory(lessons(tmp_path / "alone", teacher, **model), 1)
    shared = lessons(tmp_path / "shared", teacher, parallel={"precision": "fp64", "mesh": mesh}, **model)
    assert close(steps, trajectory(shared, 2)) < 1e-8
    alone, found = predicted(lessons(tmp_path / "alone", teacher, **model)), predicted(shared)
    assert alone.keys() == found.keys()
    form = store_of(shared).form
    for name, data in found.items():
        ours, theirs = (Predictions.from_bytes(each, form) for each in (data, alone[name]))
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        np.testing.assert_allclose(ours.log_probabilities, theirs.log_probabilities, rtol=0, atol=1e-6)
