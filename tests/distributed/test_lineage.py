"""A fork goes on where its parent was after a step: with nothing changed it is its parent, to the bit."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.base.errors import ResumeError, TrainingError, UserError
from raytune_fsdp.checkpoint.state import digest_of_state, read_state
from raytune_fsdp.cli.main import main
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.worker import alone
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.jsonl import read_events, read_metrics, read_trajectory
from raytune_fsdp.record.lineage import read_lineage
from raytune_fsdp.record.report.page import page
from raytune_fsdp.run import resume_point
from raytune_fsdp.run.forks.parent import Parent
from raytune_fsdp.run.forks.pins import pin, pins_of
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume_point import agree
from tests.checkpoints import checkpoints, pieces_of, tensors_in
from tests.distributed.test_exact import BOUNDS, check_against_plain, plain_loop
from tests.preferences import KTO, PAIRS, preference_config
from tests.ranks import resident_ranks, run_ranks
from tests.runs import GPT2, LLAMA, make_config, trajectory

SLOW = pytest.mark.slow
AT, LAST = 4, 24
TRAIN = {"global_batch": 6, "micro_batch": 2, "max_steps": LAST}
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "train": TRAIN,
    "checkpoint": {"every": 4, "keep_last": None, "asynchronous": False},
    "parallel": {"precision": "fp32"},
}


def _config(
    directory: Path,
    name: str = "base",
    fork: tuple[str, int] | None = None,
    architecture: Mapping[str, Any] = GPT2,
    **sections: Mapping[str, Any],
) -> FinetuneConfig:
    run = {"name": name, **sections.pop("run", {})}
    if fork is not None:
        run["fork"] = {"run": fork[0], "step": fork[1]}
    for section, values in DEFAULTS.items():
        sections[section] = {**values, **sections.get(section, {})}
    return make_config(directory, architecture, run=run, **sections)


def _run(directory: Path, name: str) -> Path:
    return directory / "runs" / name


def _end(directory: Path, name: str) -> tuple[dict[str, torch.Tensor], str]:
    """The numbers of a run's last checkpoint, and a hash of how it would go on."""
    found = checkpoints(_run(directory, name))[-1]
    return tensors_in(found), digest_of_state(read_state(found))


def check_same_end(directory: Path, one: str, other: str) -> None:
    (left, state), (right, state_too) = _end(directory, one), _end(directory, other)
    assert state == state_too and left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_with_nothing_changed_it_is_its_parent(tmp_path: Path, world: int) -> None:
    """Over 20 steps. By reference: the parent has a pin more, and nothing else."""
    whole = trajectory(_config(tmp_path), world)
    base = _run(tmp_path, "base")
    before = {path: path.stat().st_mtime_ns for path in base.rglob("*") if path.is_file()}
    assert trajectory(_config(tmp_path, "fork", ("base", AT)), world) == whole[AT:]
    check_same_end(tmp_path, "base", "fork")
    after = {path: path.stat().st_mtime_ns for path in base.rglob("*") if path.is_file()}
    (pin,) = after.keys() - before.keys()
    assert pin.parent == base / "pins" and {path: after[path] for path in before} == before
    assert [(each.child, each.checkpoint) for each in pins_of(base)] == [
        (str(_run(tmp_path, "fork")), f"step-{AT:08d}.a1")
    ]
    lineage = read_lineage(_run(tmp_path, "fork"))
    assert lineage is not None and (link := lineage.parent).changed == {}
    assert (link.run, link.path, link.step, link.mlflow_run_id) == ("base", str(base), AT, None)
    states = [read_state(checkpoints(_run(tmp_path, name))[-1]) for name in ("base", "fork")]
    entry = {"run.fork": {"step": AT, "digest": link.digest, "changed": []}}
    assert states[1].identity == {**states[0].identity, **entry} and "run.fork" not in states[0].identity
    assert main(["diff", str(base), str(_run(tmp_path, "fork"))]) == 0


def test_with_another_rate_it_equals_a_plain_loop(tmp_path: Path) -> None:
    sections = {"train": {"max_steps": 50}, "parallel": {"precision": "fp64"}}
    first = trajectory(_config(tmp_path, **sections), 2, stop_after=8)
    later = trajectory(_config(tmp_path, "fork", ("base", 8), **sections, optim={"lr": 1e-2}), 3, stop_after=20)
    plain = resident_ranks(plain_loop, 1, _config(tmp_path, "plain", **sections).model_dump(), 20, (8, 1e-2))[0]
    check_against_plain([*first, *later], plain, BOUNDS["gpt2 fp64"])
    found = read_lineage(_run(tmp_path, "fork"))
    assert found is not None and found.parent.changed == {"optim.lr": [3e-3, 1e-2]}
    (forked,) = [e["fields"] for e in read_events(_run(tmp_path, "fork") / "events.jsonl") if e["event"] == "forked"]
    assert (forked["run"], forked["step"], forked["changed"]) == ("base", 8, {"optim.lr": [3e-3, 1e-2]})


def test_an_exact_run_is_forked_at_another_number_of_ranks(tmp_path: Path) -> None:
    """To the bit; the parent's digest is that of the numbers, not of their files."""
    sections: Any = {"run": {"exact": True, "threads": 1}, "train": {"max_steps": 8}}
    whole = trajectory(_config(tmp_path, **sections), 2)
    assert trajectory(_config(tmp_path, "fork", ("base", AT), **sections), 1) == whole[AT:]
    saved = [e["fields"] for e in read_events(_run(tmp_path, "base") / "events.jsonl") if e["event"] == "saved"]
    found = read_lineage(_run(tmp_path, "fork"))
    assert found is not None and found.parent.digest == next(e["everything"] for e in saved if e["step"] == AT)


def crash_rank(values: Mapping[str, Any], step: int) -> None:
    """A rank whose attempt fails before this step, and saves nothing."""
    from raytune_fsdp.launch.worker import work
    from tests.runs import prepare_on_rank0

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare_on_rank0(config)
    steps = iter(standing.steps_left)

    def stop() -> None:
        if next(steps) == step:
            raise TrainingError("a crash")

    with pytest.raises(TrainingError, match="a crash"):
        work(config, prepared, standing, torch.device("cpu"), stop)


def test_it_begins_again_and_goes_on_without_its_parent(tmp_path: Path) -> None:
    """A first attempt that ends before its first checkpoint; then attempts of its own, its parent gone."""
    whole = trajectory(_config(tmp_path), 1)
    config = _config(tmp_path, "fork", ("base", AT), checkpoint={"every": 10}, eval={"at_start": True})
    run_ranks(crash_rank, 1, config.model_dump(), AT + 4)
    record = _run(tmp_path, "fork") / "metrics.jsonl"
    assert [row["step"] for row in read_trajectory(record)] and not checkpoints(_run(tmp_path, "fork"))
    trajectory(config, 1, stop_after=AT + 8)
    assert read_trajectory(record) == whole[AT : AT + 8]
    shutil.rmtree(_run(tmp_path, "base"))
    assert trajectory(config, 1) == whole[AT:]
    events = [e["event"] for e in read_events(_run(tmp_path, "fork") / "events.jsonl")]
    assert events.count("forked") == 2 and "record_repaired" not in events
    # A record with a hole is mended from the fork on, and no step before it is missed.
    record.write_text("".join(record.read_text().splitlines(keepends=True)[1:]))
    longer = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": LAST + 1})})
    longer = longer.model_copy(update={"optim": longer.optim.model_copy(update={"schedule_steps": LAST + 2})})
    trajectory(longer, 1)
    (fields,) = [
        e["fields"] for e in read_events(_run(tmp_path, "fork") / "events.jsonl") if e["event"] == "record_repaired"
    ]
    assert fields["problems"] == [f"the lines of step {AT + 1} are missing, and lost"]


def test_a_pinned_checkpoint_survives_and_an_unpinned_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = {"every": 2, "keep_last": 2}
    config = _config(tmp_path, checkpoint=keep)
    trajectory(config, 1, stop_after=6)
    trajectory(_config(tmp_path, "fork", ("base", 4), checkpoint=keep), 1, stop_after=10)
    base = _run(tmp_path, "base")
    trajectory(config, 1, stop_after=12)
    assert [each.step for each in checkpoints(base)] == [4, 10, 12]
    with pytest.raises(ResumeError, match=r"no checkpoint of step 6; .*/base has those of steps 4, 10, 12 \(older"):
        prepare(_config(tmp_path, "late", ("base", 6)), 1)
    assert main(["checkpoint", "list", str(base)]) == 0
    assert ["kept for fork" in line for line in capsys.readouterr().out.splitlines()] == [True, False, False]
    shutil.rmtree(_run(tmp_path, "fork"))
    assert main(["fork", "--unpin", str(_run(tmp_path, "fork"))]) == 0
    assert "base may prune the checkpoint with which fork began" in capsys.readouterr().out
    trajectory(config, 1, stop_after=16)
    assert [each.step for each in checkpoints(base)] == [14, 16]
    assert main(["fork", "--unpin", str(_run(tmp_path, "fork"))]) == 2
    assert "has a pin of it; name the run that it forked" in capsys.readouterr().err


def test_what_ranks_find_wrong_with_a_parent_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning hides it for a moment before it finds the pin; what is damaged stays so, and is not pinned."""
    trajectory(_config(tmp_path), 1, stop_after=AT)
    base, config, device = _run(tmp_path, "base"), _config(tmp_path, "fork", ("base", AT)), torch.device("cpu")
    prepared, standing = prepare(config, 1)
    (found,) = checkpoints(base)

    def pin_and_hide(child: RunDir, parent: Parent) -> None:
        pin(child, parent)
        hidden = Path(found.path).rename(f"{found.path}.tmp")
        threading.Timer(0.3, lambda: hidden.rename(found.path)).start()

    with alone(device), monkeypatch.context() as hiding:
        hiding.setattr(resume_point, "pin", pin_and_hide)
        assert agree(config, prepared, lambda: standing).checkpoint == found
    assert len(list(pins_of(base))) == 1
    piece = pieces_of(found)[0]
    content = bytearray(piece.read_bytes())
    content[len(content) // 2] ^= 1
    piece.write_bytes(content)
    with alone(device), pytest.raises(ResumeError, match=f"run.fork.step={AT}: .* is damaged: the content of"):
        agree(config, prepared, lambda: standing)
    assert not list(pins_of(base)), "what is refused leaves the parent as it was"


def test_what_a_fork_may_not_change_is_refused_by_name(tmp_path: Path) -> None:
    trajectory(_config(tmp_path), 1, stop_after=AT)
    for sections, named in (
        ({"train": {"global_batch": 8}}, "train.global_batch: was 6, is 8"),
        ({"run": {"seed": 4}}, "run.seed: was 3, is 4"),
        ({"data": {"seq_len": 40}}, "data.seq_len: was 48, is 40"),
        ({"optim": {"optimizer": {"type": "adamw", "moments": "bf16"}}}, "optim.optimizer: was 'not set', is"),
        ({"optim": {"groups": [{"match": "wte", "lr_ratio": 2.0}]}}, "optim.groups: was 'not set', is"),
        ({"parallel": {"precision": "fp64"}}, "parallel.precision: was 'fp32', is 'fp64'"),
    ):
        with pytest.raises(ResumeError, match="a fork may change optim") as failure:
            prepare(_config(tmp_path, "other", ("base", AT), **sections), 1)
        assert named in str(failure.value) and "optim.lr" not in str(failure.value)
    for fork, sections, words in (
        (("base", AT), {"train": {"max_steps": AT}}, f"run.fork.step={AT}: this run ends after step {AT}"),
        (("other", AT), {}, "run.fork.run=other is this run itself"),
        (("nobody", AT), {}, "nobody is not a directory"),
        (("base", AT), {"train": {"max_steps": 60}}, "learning rate of 0"),
    ):
        Path(tmp_path, "runs", "other").mkdir(exist_ok=True)
        with pytest.raises(UserError) as problem:
            prepare(_config(tmp_path, "other", fork, **sections), 1)
        assert words in str(problem.value)
    assert not (_run(tmp_path, "base") / "pins").exists(), "what is refused leaves the parent as it was"
    config = _config(tmp_path, "fork", ("base", AT), optim={"lr": 1e-3, "schedule": {"type": "linear"}})
    trajectory(config, 1, stop_after=AT + 4)
    for changed in ({"step": AT + 1}, None):
        run = {"fork": changed and {"run": "base", **changed}}
        with pytest.raises(ResumeError, match="run.fork"):
            prepare(_config(tmp_path, "fork", optim={"lr": 1e-3, "schedule": {"type": "linear"}}, run=run), 1)


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    torch.set_num_threads(1)  # as the ranks of tests have

    def call(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main([*arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def test_a_dry_run_refuses_what_could_not_begin(tmp_path: Path, called: Callable[..., tuple[int, str]]) -> None:
    trajectory(_config(tmp_path), 1, stop_after=AT)
    base = _run(tmp_path, "base")
    for arguments, expected, words in (
        (("--at", "999"), 2, "there is no checkpoint of step 999; "),
        (("--at", str(AT), "--train.global_batch", "8"), 2, "train.global_batch: was 6, is 8"),
        (("--at", str(AT), "--optim.lr", "1e-4"), 0, ""),
    ):
        code, said = called("fork", str(base), *arguments, "--dry-run")
        assert code == expected and words in said, said
    assert not (base / "pins").exists() and [each.name for each in base.parent.iterdir()].count("base-at-4") == 0


@SLOW
def test_a_chain_of_three_forks_is_audited_to_its_root(tmp_path: Path, called: Callable[..., tuple[int, str]]) -> None:
    """By the command, each with another change; then with a number in the middle of the chain that was changed."""
    trajectory(_config(tmp_path, train={"max_steps": 16}), 1, stop_after=8)
    base = _run(tmp_path, "base")
    for name, parent, at, change in (
        ("rate", "base", 4, "--optim.lr=1e-2"),
        ("betas", "rate", 8, "--optim.beta2=0.9"),
        ("longer", "betas", 12, "--train.max_steps=20"),
    ):
        extra = ["--tracking.console=true", *(["--optim.schedule_steps=20"] if name == "longer" else [])]
        code, said = called("fork", str(_run(tmp_path, parent)), "--at", str(at), "--name", name, change, *extra)
        assert code == 0 and f"a fork of {parent} after step {at}, with" in said, said
    found = read_lineage(_run(tmp_path, "longer"))
    assert found is not None and [each.run for each in found.forks] == ["base", "rate", "betas"]
    assert [dict(each.changed) for each in found.forks] == [
        {"optim.lr": [3e-3, 1e-2]}, {"optim.beta2": [0.999, 0.9]}, {"optim.schedule_steps": [16, 20]},
    ]  # fmt: skip
    code, said = called("audit", str(_run(tmp_path, "longer")), "--chain")
    assert code == 0 and said.count("**Passed**: trained again, it is the same to the bit.") == 4, said
    for part in ("base, steps 1 to 4", "rate, steps 5 to 8", "betas, steps 9 to 12", "longer, steps 13 to 20"):
        assert f"# Audit of {part}" in said
    assert not list((tmp_path / "runs").glob("audit-*")) and len(list(pins_of(base))) == 1
    _, said = called("diff", str(base), str(_run(tmp_path, "longer")))
    assert "longer is a fork of betas after step 12, with optim.schedule_steps 16 -> 20; that one is a fork of" in said
    made = page([_run(tmp_path, "longer")])
    assert all(text in made for text in ('id="lineage"', "optim.beta2 0.999 -&gt; 0.9", found.parent.digest[:16]))
    record = _run(tmp_path, "rate") / "metrics.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    lines[2]["trajectory"]["loss"] += 1e-3
    record.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    # Its parent has been moved, which the first run of the chain has nothing to do with.
    moved = base.rename(tmp_path / "moved")
    code, said = called(
        "audit", str(_run(tmp_path, "rate")), "--chain", "--to", "8", "--run.fork.run", str(moved), "--trust-places"
    )
    assert code == 4 and said.count("**Passed**") == 1 and "First difference: step 7: loss is" in said, said
    moved.rename(base)
    (base / "checkpoints_at").write_text(f"file://{base}/checkpoints")
    code, said = called("audit", str(_run(tmp_path, "rate")), "--from", "4", "--to", "8", "--trust-places")
    assert code == 2 and "is in an object store, and an audit reads checkpoints from a file system" in said, said
    shutil.rmtree(base)
    code, said = called("audit", str(_run(tmp_path, "rate")), "--from", "4", "--to", "8")
    assert code == 2 and "is not a directory" in said and "--from" in said, said


@SLOW
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"precision": "fp16"}, "architecture": LLAMA},
        {"optim": {"optimizer": {"type": "muon"}}},
        {"optim": {"optimizer": {"type": "sgd", "momentum": 0.9}}},
        {"parallel": {"precision": "bf16_pure"}, "optim": {"stochastic_rounding": True}},
        {"train": {**TRAIN, "max_steps": None, "epochs": 2}},
    ],
    ids=["fp16", "muon", "sgd", "stochastic", "epochs"],
)
def test_every_state_is_taken_over(tmp_path: Path, sections: dict[str, Any]) -> None:
    whole = trajectory(_config(tmp_path, **sections), 2)
    assert trajectory(_config(tmp_path, "fork", ("base", AT), **sections), 2) == whole[AT:]
    check_same_end(tmp_path, "base", "fork")


@SLOW
def test_its_checkpoints_and_its_parents_may_be_elsewhere(tmp_path: Path) -> None:
    """And a fork of a fork at the last step of its parent, made longer."""
    elsewhere = {"checkpoint": {"storage": str(tmp_path / "elsewhere")}}
    schedule = {"optim": {"schedule_steps": LAST}}
    whole = trajectory(_config(tmp_path, "whole", **schedule), 1)
    trajectory(_config(tmp_path, **elsewhere, **schedule, train={"max_steps": 12}), 1)
    trajectory(_config(tmp_path, "fork", ("base", 8), **elsewhere, **schedule, train={"max_steps": 16}), 1)
    last = _config(tmp_path, "last", (str(_run(tmp_path, "fork")), 16), **elsewhere, **schedule)
    assert trajectory(last, 1) == whole[16:]
    assert [line["kind"] for line in read_metrics(_run(tmp_path, "last") / "metrics.jsonl")] == ["step"] * 8


@SLOW
@pytest.mark.parametrize("objective", ["dpo and sft", "kto"])
def test_preferences_are_compared_with_the_same_reference(tmp_path: Path, objective: str) -> None:
    """The base is what the parent began with; another beta is another loss from the fork on."""
    chosen = {**PAIRS, **KTO}[objective]
    save = {"checkpoint": {"every": 2, "keep_last": None, "asynchronous": False}}
    whole = trajectory(preference_config(tmp_path, chosen, run={"name": "base"}, **save), 2)
    fork = {"fork": {"run": "base", "step": 2}}
    same = preference_config(tmp_path, chosen, run={"name": "same", **fork}, **save)
    assert trajectory(same, 2) == whole[2:]
    other = preference_config(tmp_path, {**chosen, "beta": 0.9}, run={"name": "other", **fork}, **save)
    found = trajectory(other, 2)
    assert found[0]["samples"] == whole[2]["samples"] and found[0]["loss"] != whole[2]["loss"]
    lineage = read_lineage(_run(tmp_path, "other"))
    assert lineage is not None and lineage.parent.changed == {"train.objective.beta": [chosen["beta"], 0.9]}


@SLOW
def test_a_run_that_its_evaluations_have_ended_is_forked_and_judged_anew(tmp_path: Path) -> None:
    """Coefficients of the loss may change, too."""
    rows = {"train": [{"path": str(tmp_path / "tokens.jsonl"), "format": {"type": "tokens"}}], "eval": {"rows": 20}}
    rule = {"every": 4, "early_stop": {"patience": 1, "min_delta": 100.0}}
    trajectory(_config(tmp_path, data=rows, eval=rule), 1)
    assert [each.step for each in checkpoints(_run(tmp_path, "base"))][-1] == 8
    config = _config(
        tmp_path, "fork", ("base", 8), data=rows, eval=rule, train={"z_loss": 1e-3, "label_smoothing": 0.1}
    )
    # What is left of an earlier beginning, at another step, is not its own.
    _run(tmp_path, "fork").mkdir()
    shutil.copy(_run(tmp_path, "base") / "metrics.jsonl", _run(tmp_path, "fork"))
    assert [row["step"] for row in trajectory(config, 1)] == [*range(9, 17)]
    found = read_lineage(_run(tmp_path, "fork"))
    assert found is not None and found.parent.changed.keys() == {"train.z_loss", "train.label_smoothing"}
