"""What a fork may change, what keeps its checkpoint, and what is on record of where it comes from."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed, remove_unpinned
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.checkpoint.storage import MANIFEST_FILE, PosixStorage, Storage
from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config
from raytune_fsdp.plan.identity import check_identity
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.lineage import ForkedFrom, Lineage, put_lineage, read_lineage
from raytune_fsdp.record.lines import step_lines, to_bytes
from raytune_fsdp.record.repair import is_whole, truncate
from raytune_fsdp.record.report.ancestors import of_lineage, relation
from raytune_fsdp.run.forks.changes import allowed_changes, with_allowed
from raytune_fsdp.run.forks.parent import Fork, Parent, parent_of
from raytune_fsdp.run.forks.pins import is_pinned, look_again, pin, pin_name, pins_of, unpin
from raytune_fsdp.run.length import check_extension
from tests.unit.fake_mlflow import step

IDENTITY: dict[str, Any] = {
    "optim.lr": 1e-3, "optim.schedule": {"type": "cosine", "floor": 0.0}, "optim.max_grad_norm": 1.0,
    "train.global_batch": 8, "train.objective": {"type": "dpo", "beta": 0.1, "sft": {"weight": 0.0, "over": "all"}},
    "run.seed": 0, "run.fork": {"step": 2, "digest": "0" * 64, "changed": []},
}  # fmt: skip
SGD = {"optim.optimizer": {"type": "sgd", "momentum": 0.9, "nesterov": False}}
SLOWER = {**SGD["optim.optimizer"], "momentum": 0.5}
MUON = {"optim.optimizer": {"type": "muon", "momentum": 0.95}}


def _orpo(weight: float) -> dict[str, Any]:
    return {"type": "orpo", "beta": 0.1, "sft": {"weight": weight, "over": "all"}}


ORPO = {"train.objective": _orpo(1.0)}
KTO = {"type": "kto", "desirable_weight": "auto", "beta": 0.1}


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ({}, {"optim.lr": 1e-4}, {"optim.lr": (1e-3, 1e-4)}),
        ({}, {"optim.max_grad_norm": None}, {"optim.max_grad_norm": (1.0, None)}),
        (
            {},
            {"optim.schedule": {"type": "constant"}},
            {"optim.schedule.type": ("cosine", "constant"), "optim.schedule.floor": (0.0, None)},
        ),
        ({}, {"train.z_loss": 1e-4}, {"train.z_loss": (None, 1e-4)}),
        (
            {"train.objective": {"type": "dpo", "beta": 0.1, "sft": {"weight": 0.0, "over": "answer"}}},
            {"train.objective": {"type": "dpo", "beta": 0.2, "sft": {"weight": 1.0, "over": "answer"}}},
            {"train.objective.beta": (0.1, 0.2), "train.objective.sft.weight": (0.0, 1.0)},
        ),
        (ORPO, {"train.objective": _orpo(0.5)}, {"train.objective.sft.weight": (1.0, 0.5)}),
        (SGD, {"optim.optimizer": SLOWER}, {"optim.optimizer.momentum": (0.9, 0.5)}),
        (
            MUON,
            {"optim.optimizer": {"type": "muon", "momentum": 0.0}},  # it keeps its mean all the same
            {"optim.optimizer.momentum": (0.95, 0.0)},
        ),
        (
            {"train.objective": KTO},
            {"train.objective": {**KTO, "desirable_weight": 2.0}},
            {"train.objective.desirable_weight": ("auto", 2.0)},
        ),
        ({"optim.groups": []}, {"optim.groups": []}, {}),
    ],
)  # fmt: skip
def test_what_may_change(before: dict[str, Any], now: dict[str, Any], changed: dict[str, Any]) -> None:
    old, new = {**IDENTITY, **before}, {**IDENTITY, **before, **now, "run.fork": {"step": 9}}
    assert allowed_changes(old, new) == changed
    assert with_allowed(old, new) == new
    check_identity(with_allowed(old, new), new, "base", files_before={}, files_now={})


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({}, {"train.global_batch": 16}, "train.global_batch"),
        ({}, {"run.seed": 1}, "run.seed"),
        ({}, {"train.objective": {**IDENTITY["train.objective"], "type": "ipo"}}, "train.objective.type"),
        ({}, {"train.objective": {"type": "dpo", "beta": 0.1, "sft": {"weight": 0.0, "over": "answer"}}}, "sft.over"),
        (ORPO, {"train.objective": _orpo(0.0)}, "train.objective.sft.weight"),
        ({"train.objective": _orpo(0.0)}, ORPO, "train.objective.sft.weight"),
        ({}, {"optim.groups": [{"match": "x"}]}, "optim.groups"),
        ({}, SGD, "optim.optimizer"),
        ({}, {"optim.optimizer": {"type": "adamw", "moments": "8bit"}}, "optim.optimizer"),
        (SGD, {"optim.optimizer": {**SGD["optim.optimizer"], "momentum": 0.0}}, "optim.optimizer.momentum"),
        ({"train.objective": KTO}, {"train.objective": {**KTO, "beta": "auto"}}, "train.objective.beta"),
        ({}, {"train.neftune_noise_alpha": 5.0}, "train.neftune_noise_alpha"),
    ],
)
def test_what_may_not(before: dict[str, Any], now: dict[str, Any], named: str) -> None:
    """It is the only thing that is named, although a rate has changed, too."""
    old, new = {**IDENTITY, **before}, {**IDENTITY, **before, **now, "optim.lr": 1e-5}
    with pytest.raises(ResumeError) as failure:
        check_identity(with_allowed(old, new), new, "base", files_before={}, files_now={}, rule="no:")
    assert len(failure.value.args) == 2 and named in failure.value.args[1]


# ---- pins ----


def _committed(root: Path, *steps: int) -> RunDir:
    for number in steps:
        directory = root / "base" / "checkpoints" / f"step-{number:08d}.a1"
        directory.mkdir(parents=True)
        for file in ("state.json", MANIFEST_FILE):
            (directory / file).write_text("{}")
    return RunDir(root / "base", str(root / "base" / "checkpoints"))


def _parent(place: RunDir, step: int) -> Parent:
    return Parent(place=place, checkpoint=CommittedCheckpoint(step, 1, place.checkpoints), digest="0" * 64)


def _child(root: Path) -> RunDir:
    return RunDir(root / "child", str(root / "child" / "checkpoints"))


def test_a_pin_that_comes_while_its_checkpoint_is_removed_brings_it_back(tmp_path: Path) -> None:
    """The fork looks a moment later, and finds it."""
    place = _committed(tmp_path, 2, 4)
    asked: list[str] = []

    def pinned(name: str) -> bool:
        asked.append(name)
        if len(asked) == 2:  # hidden by now
            assert committed(place.checkpoints) == [_parent(place, 4).checkpoint]
            (place.pins).mkdir()
            values = {"format": 1, "child": "x", "checkpoint": name}
            (place.pins / f"{pin_name(Path('/x'))}.json").write_text(json.dumps(values))
        return is_pinned(place, name)

    assert not remove_unpinned(PosixStorage(place.checkpoints), "step-00000002.a1", pinned)
    pin(_child(tmp_path), _parent(place, 2))
    assert [each.step for each in committed(place.checkpoints)] == [2, 4] and len(asked) == 2
    assert remove_unpinned(PosixStorage(place.checkpoints), "step-00000004.a1", lambda name: is_pinned(place, name))
    assert [each.step for each in committed(place.checkpoints)] == [2]


def test_a_pin_that_comes_too_late_is_taken_back_and_its_fork_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytune_fsdp.run.forks.pins._LOOK_SECONDS", 0.0)
    place = _committed(tmp_path, 2, 4)
    PosixStorage(place.checkpoints).remove("step-00000002.a1")
    with pytest.raises(ResumeError, match=r"step-00000002.a1 was pruned while .*base has those of steps 4 \(older"):
        pin(_child(tmp_path), _parent(place, 2))
    assert list(pins_of(place.path)) == []


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_a_pinned_checkpoint_that_a_killed_command_has_hidden_is_brought_back(tmp_path: Path, kind: str) -> None:
    """Its fork has found it after pruning asked for pins, and before pruning hid it; and pruning is killed then."""
    place = _committed(tmp_path, 2, 4, 6)
    storage: Storage = PosixStorage(place.checkpoints)
    if kind == "objects":
        storage = ObjectStorage(f"file://{place.checkpoints}")
    before = {str(file.relative_to(tmp_path)) for file in Path(place.checkpoints).rglob("*") if file.is_file()}
    for number in (2, 4):
        asked: list[str] = []

        def pinned(name: str, number: int = number, asked: list[str] = asked) -> bool:
            asked.append(name)
            if len(asked) == 2:
                raise KeyboardInterrupt
            if number == 2:
                pin(_child(tmp_path), _parent(place, number))
            return False

        with pytest.raises(KeyboardInterrupt):
            remove_unpinned(storage, f"step-{number:08d}.a1", pinned)
    assert [each.step for each in committed(place.checkpoints)] == [6]
    storage.clean(lambda name: is_pinned(place, name))
    assert [each.step for each in committed(place.checkpoints)] == [2, 6]
    after = {str(file.relative_to(tmp_path)) for file in Path(place.checkpoints).rglob("*") if file.is_file()}
    assert after == {file for file in before if "step-00000004" not in file}, "nothing is left of the other one"


def test_half_of_a_checkpoint_is_not_brought_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed while it was deleted, and that a fork has pinned since, and then not found."""
    place = _committed(tmp_path, 2)
    with monkeypatch.context() as killed:
        killed.setattr("raytune_fsdp.checkpoint.storage.shutil.rmtree", lambda *_, **__: None)
        assert PosixStorage(place.checkpoints).remove("step-00000002.a1")
    assert list(Path(place.checkpoints).rglob("state.json"))
    PosixStorage(place.checkpoints).clean(lambda _: True)
    assert not list(Path(place.checkpoints).iterdir())


def test_a_checkpoint_that_is_hidden_while_ranks_read_it_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: what they then still find wrong is damage, and is not pinned."""
    monkeypatch.setattr("raytune_fsdp.run.forks.pins._LOOK_SECONDS", 0.02)
    place, child = _committed(tmp_path, 2, 4), _child(tmp_path)
    parent = _parent(place, 2)
    path = Path(parent.checkpoint.path)
    pin(child, parent)
    hidden = path.rename(path.with_name(f"{path.name}.tmp"))
    back = threading.Timer(0.05, lambda: hidden.rename(path))
    back.start()
    look_again(child, parent, "manifest.json is gone", again=False)
    back.join()
    assert len(list(pins_of(place.path))) == 1
    with pytest.raises(
        ResumeError, match="step-00000002.a1 is damaged: the content of x is not what was written; .* 4"
    ):
        look_again(child, parent, "the content of x is not what was written", again=True)
    assert not list(pins_of(place.path))
    pin(child, parent)
    shutil.rmtree(path)
    with pytest.raises(ResumeError, match="is damaged: manifest.json is gone"):
        look_again(child, parent, "manifest.json is gone", again=False)
    assert not list(pins_of(place.path))


def test_a_parent_that_keeps_its_pins_elsewhere_is_refused(tmp_path: Path) -> None:
    place, elsewhere = _committed(tmp_path, 2), tmp_path / "elsewhere"
    elsewhere.mkdir()
    place.pins.symlink_to(elsewhere)
    with pytest.raises(ResumeError, match="pins is a link to .*elsewhere"):
        parent_of(_child(tmp_path), Fork(path=place.path, step=2, named="base", base=""), trusted=True)
    assert not list(elsewhere.iterdir())


def test_of_a_pin_and_a_removal_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the fork has its checkpoint for good, or it is refused and leaves no pin."""
    monkeypatch.setattr("raytune_fsdp.run.forks.pins._LOOK_SECONDS", 0.002)
    place, chance, kept = _committed(tmp_path), random.Random(5), 0
    for number in range(1, 151):
        _committed(tmp_path, number)
        parent, child, together = _parent(place, number), RunDir(tmp_path / f"c{number}", ""), threading.Barrier(2)
        late = chance.uniform(-1e-3, 1e-3)

        def remove(
            name: str = parent.checkpoint.name, together: threading.Barrier = together, late: float = late
        ) -> None:
            together.wait()
            time.sleep(max(0.0, late))
            remove_unpinned(PosixStorage(place.checkpoints), name, lambda name: is_pinned(place, name))

        remover = threading.Thread(target=remove)
        remover.start()
        together.wait()
        time.sleep(max(0.0, -late))
        try:
            pin(child, parent)
            pinned = True
        except ResumeError:
            pinned = False
        remover.join()
        assert (parent.checkpoint in committed(place.checkpoints)) == pinned
        assert (unpin(place.path, pin_name(child.path)) is not None) == pinned
        kept += pinned
    assert 0 < kept < 150, "both may win"


def test_a_pin_is_taken_from_a_fork_by_its_path(tmp_path: Path) -> None:
    place = _committed(tmp_path, 2, 4)
    child = _child(tmp_path)
    pin(child, _parent(place, 2))
    pin(child, _parent(place, 4))  # begun anew elsewhere: a fork has one pin
    assert [(each.child, each.checkpoint) for each in pins_of(place.path)] == [(str(child.path), "step-00000004.a1")]
    assert unpin(place.path, pin_name(tmp_path / "other")) is None
    assert unpin(place.path, pin_name(child.path)) == place.pins / f"{pin_name(child.path)}.json"
    assert not is_pinned(place, "step-00000004.a1")


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 1, "child": "x", "checkpoint": "../y"}'])
def test_a_pin_that_cannot_be_read_keeps_everything(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = _committed(tmp_path, 2)
    place.pins.mkdir()
    (place.pins / "x.json").write_text(content)
    assert is_pinned(place, "step-00000002.a1") and "so none is pruned: remove it" in caplog.text
    assert list(pins_of(place.path)) == []


# ---- the record ----


LINK = ForkedFrom(
    run="base", path="/runs/base", mlflow_run_id="a1", step=400, digest="0" * 64, changed={"optim.lr": [1e-3, 1e-4]}
)


def test_a_lineage_is_read_as_it_was_written(tmp_path: Path) -> None:
    put_lineage(tmp_path, Lineage(forks=[LINK]))
    assert read_lineage(tmp_path) == Lineage(forks=[LINK]) and read_lineage(tmp_path / "nothing") is None
    assert LINK.words == "base after step 400, with optim.lr 0.001 -> 0.0001"


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": "../base"}, {"path": "a\nb"}, {"path": ""}, {"step": 0}, {"step": True}, {"digest": "x"},
        {"mlflow_run_id": 3}, {"changed": {"a": 1}}, {"changed": {"a": [1, 2, 3]}}, {"more": 1},
    ],
)  # fmt: skip
def test_a_lineage_of_a_stranger_is_refused(tmp_path: Path, wrong: Mapping[str, Any]) -> None:
    (tmp_path / "lineage.json").write_text(json.dumps({"format": 1, "forks": [{**asdict(LINK), **wrong}]}))
    with pytest.raises(ResumeError, match="does not say from which run this one comes .it has the fork"):
        read_lineage(tmp_path)


def test_cards_and_comparisons_say_where_a_run_comes_from(tmp_path: Path) -> None:
    evil = ForkedFrom(run="a|b<x>", path="/a", mlflow_run_id=None, step=2, digest="1" * 64)
    said = "\n".join(of_lineage({"lineage": [asdict(evil), asdict(LINK)]}))
    assert "| base | 400 | optim.lr 0.001 -&gt; 0.0001 | `0000" in said and "| a\\|b&lt;x&gt; | 2 | nothing |" in said
    assert list(of_lineage({})) == [] and list(of_lineage({"lineage": "x"})) == []
    root = ForkedFrom(run="root", path=str(tmp_path / "root"), mlflow_run_id=None, step=10, digest="2" * 64)
    for name in ("one", "two", "root"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        put_lineage(tmp_path / name, Lineage(forks=[root]))
    assert relation(tmp_path / "one", tmp_path / "two")[0] == (
        "one and two both come from root, of which they have the steps up to 10."
    )
    assert relation(tmp_path / "root", tmp_path / "one") == [
        "one is a fork of root after step 10, with nothing changed."
    ]


def _record(path: Path, *steps: int) -> None:
    path.write_bytes(b"".join(map(to_bytes, step_lines([step(number) for number in steps], 1, 1))))


def test_the_record_of_a_fork_begins_after_its_parent_s_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _record(path, 5, 6, 7, 8)
    assert is_whole(path, 7, 4) and not is_whole(path, 7) and not is_whole(path, 7, 5)
    assert truncate(path, 7, aside=tmp_path / "aside", begins_after=4).problems == ()
    assert is_whole(path, 7, 4)
    _record(path, 4, 6, 7)
    problems = truncate(path, 7, aside=tmp_path / "aside", begins_after=4).problems
    assert problems == ("the lines of step 5 are missing, and lost",)
    assert truncate(path, 4, aside=tmp_path / "aside", begins_after=4).problems == () and not path.read_text()


# ---- the command ----


def test_a_fork_s_config_is_its_parent_s_but_for_the_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _committed(tmp_path, 2, 4)
    base = tmp_path / "base"
    base.joinpath("config.yaml").write_text(
        "run: {name: old, storage: elsewhere, fork: {run: root, step: 1}, resume: always, stop_after: 4}\n"
        "model: {path: m}\ntracking: {mlflow: {parent: of-a-sweep}}\n"
        "data: {train: [{path: rows.jsonl}], seq_len: 8}\ntrain: {global_batch: 2, max_steps: 9}\n"
        "export: {push: a/b}\n"
    )
    trusted = "--trust-places"
    assert main(["fork", "base", "--at", "4", "--print", trusted, "--optim.lr", "1e-5"]) == 0
    (tmp_path / "fork.yaml").write_text(capsys.readouterr().out)
    config = load_config(tmp_path / "fork.yaml")
    assert config.run.fork is not None and (config.run.fork.run, config.run.fork.step) == ("base", 4)
    assert (config.run.name, config.run.storage, config.run.resume) == ("base-at-4", str(tmp_path), "auto")
    assert config.optim.lr == 1e-5 and config.train.max_steps == 9 and config.export.push is None
    assert (config.run.stop_after, config.tracking.mlflow.parent) == (None, None)
    assert main(["fork", "base", "--at=2", "--name=x", "--print", trusted, "--run.storage=other"]) == 0
    (tmp_path / "fork.yaml").write_text(capsys.readouterr().out)
    config = load_config(tmp_path / "fork.yaml")
    assert config.run.fork is not None and config.run.fork.run == str(base)
    assert (config.run.name, config.run.storage) == ("x", "other")
    for arguments, words in (
        (["base"], "missing: --at STEP; "),
        (["base", "--at", "4"], "names places outside of it that you have not chosen"),
        (["base", "--unpin", "x", "--at", "4"], "removes a pin, and nothing else"),
        (["base", "--at", "4", "--run.fork.step", "5"], "--at 4 and --run.fork.step 5 say two things: leave"),
        (["base", "--at", "4", "--name=x", "--run.name=y"], "--name x and --run.name y say two things"),
        (["base", "--at", "4", "--name", "x/y", trusted], "run.name"),
    ):
        assert main(["fork", *arguments]) == 2
        assert words in capsys.readouterr().err


CONFIG = (
    "run: {name: base}\nmodel: {path: m}\ndata: {train: [{path: rows.jsonl}], seq_len: 8}\n"
    "train: {global_batch: 2, max_steps: 9}\n"
)


def test_the_same_command_goes_on_with_the_fork_s_own_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has become of its parent's since, and if that is gone."""
    monkeypatch.chdir(tmp_path)
    base = _committed(tmp_path, 4, 6).path

    def printed(at: int) -> Any:
        command = ["fork", "base", "--at", str(at), "--name", "lower", "--print", "--optim.lr", "1e-5"]
        assert main([*command, "--trust-places"]) == 0
        return yaml.safe_load(capsys.readouterr().out)

    (base / "config.yaml").write_text(CONFIG)
    first = printed(4)
    (tmp_path / "lower").mkdir()
    (tmp_path / "lower" / "config.yaml").write_text(yaml.safe_dump(first))
    (base / "config.yaml").write_text(f"{CONFIG}optim: {{schedule_steps: 1000}}\n")
    assert printed(4) == first and first["optim"]["schedule_steps"] is None
    assert printed(6)["optim"]["schedule_steps"] == 1000, "another fork"
    shutil.rmtree(base)
    assert printed(4) == first
    assert main(["fork", "base", "--at", "6", "--name", "lower", "--print"]) == 2
    assert "base is not a run directory" in capsys.readouterr().err


def test_unpinning_removes_every_pin_of_a_fork(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that has begun anew from another run has two."""
    place, child = _committed(tmp_path, 2), _child(tmp_path)
    shutil.copytree(place.path, tmp_path / "other")
    other = RunDir(tmp_path / "other", str(tmp_path / "other" / "checkpoints"))
    for parent in (place, other):
        pin(child, _parent(parent, 2))
    (tmp_path / "another" / "pins" / f"{pin_name(child.path)}.json").mkdir(parents=True)  # it cannot be removed
    assert main(["fork", "--unpin", str(child.path)]) == 0
    said = capsys.readouterr().out
    assert "base may prune" in said and "other may prune" in said
    assert not [*pins_of(place.path), *pins_of(other.path)]
    assert main(["fork", "--unpin", str(child.path)]) == 2
    said = capsys.readouterr().err
    assert "no run in" in said and "another could not be looked at: " in said
    pin(child, _parent(place, 2))
    assert main(["fork", str(place.path), "--unpin", str(tmp_path / "moved")]) == 2
    assert f"has no pin of it, but of {child.path}; of a fork that was moved, give the" in capsys.readouterr().err


def test_unpinning_does_not_go_where_a_lineage_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be a stranger's; the command that goes there is named."""
    place, child = _committed(tmp_path / "far", 2), _child(tmp_path)
    pin(child, _parent(place, 2))
    child.path.mkdir()
    put_lineage(child.path, Lineage(forks=[ForkedFrom(**{**asdict(LINK), "path": str(place.path)})]))
    assert main(["fork", "--unpin", str(child.path)]) == 2
    said = capsys.readouterr().err
    assert f"name the run that it forked (its lineage says {place.path}): `fork RUN --unpin FORK`" in said
    assert len(list(pins_of(place.path))) == 1
    assert main(["fork", str(place.path), "--unpin", str(child.path)]) == 0 and not list(pins_of(place.path))


def test_a_fork_of_a_short_last_step_says_which_steps_there_are(tmp_path: Path) -> None:
    parent, plan = _parent(_committed(tmp_path, 2, 4), 4), SimpleNamespace(
        steps=9, division=SimpleNamespace(global_batch=8, total_samples=60)
    )  # fmt: skip
    state, anything = RunState(step=4, samples=30), cast(Any, plan)
    with pytest.raises(
        ResumeError, match=r"run.fork.step=4: .*base ended with a short step: 30 .* those of steps 2, 4"
    ):
        check_extension(anything, _child(tmp_path), anything, parent.checkpoint, state, parent)
