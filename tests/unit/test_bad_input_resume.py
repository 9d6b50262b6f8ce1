"""A run is continued only as itself: every other wish is refused, with all differences, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.finetune import finetune
from tests.runs import GPT2, LLAMA, make_config, write_tokens

BASE: dict[str, Mapping[str, Any]] = {
    "parallel": {"precision": "fp32"},
    "train": {"max_steps": 2, "global_batch": 4},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of two steps has been."""
    directory = tmp_path_factory.mktemp("run")
    finetune(make_config(directory, **BASE))
    return directory


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """All files below a directory, with sizes and times of change; what is prepared of the data aside."""
    files = (path for path in directory.rglob("*") if path.is_file() and "cache" not in path.parts)
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


Refused = Callable[..., list[str]]


@pytest.fixture
def refused(home: Path) -> Refused:
    def run(architecture: Mapping[str, Any] = GPT2, **sections: Mapping[str, Any]) -> list[str]:
        merged = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {*BASE, *sections}}
        before = contents(home)
        with pytest.raises(ResumeError) as failure:
            finetune(make_config(home, architecture, **merged))
        assert failure.value.exit_code == 2
        assert contents(home) == before
        return str(failure.value).splitlines()

    return run


def test_always_needs_something_and_never_needs_nothing(home: Path, refused: Refused) -> None:
    (line,) = refused(run={"resume": "never"})
    assert "run.resume=never" in line and str(home / "runs" / "run") in line and "step 2" in line
    assert "choose another run.name" in line and "run.resume=auto" in line
    (line,) = refused(run={"resume": "always", "name": "another"})
    assert "run.resume=always" in line and str(home / "runs" / "another") in line and "no complete checkpoint" in line
    assert not (home / "runs" / "another").exists()


def test_a_finished_run_is_left_as_it_is(home: Path) -> None:
    before = contents(home / "runs" / "run" / "checkpoints")
    for resume in ("auto", "always"):
        assert finetune(make_config(home, **BASE, run={"resume": resume})).steps == 2
    assert contents(home / "runs" / "run" / "checkpoints") == before


def test_every_difference_is_listed_with_both_values(home: Path, refused: Refused) -> None:
    other = write_tokens(home / "other.jsonl", seed=1)
    data = {"train": [{"path": str(other), "format": {"type": "tokens"}}]}
    lines = refused(optim={"lr": 1e-3}, run={"seed": 4}, data=data, train={"global_batch": 6})
    assert "was trained with other settings" in lines[0] and "choose another run.name" in lines[0]
    differences = {line.split(":")[0].strip(): line for line in lines[1:]}
    assert set(differences) == {"optim.lr", "run.seed", "data.train.0.files", "train.global_batch"}
    for name, was, now in (("optim.lr", 0.003, 0.001), ("run.seed", 3, 4), ("train.global_batch", 4, 6)):
        assert differences[name].endswith(f"was {was}, is {now}")
    assert differences["data.train.0.files"].endswith(f": removed {home / 'tokens.jsonl'}; added {other}")


def test_changed_files_are_named_and_not_their_neighbours(tmp_path: Path) -> None:
    files = [write_tokens(tmp_path / "rows" / f"{name}.jsonl", seed=i) for i, name in enumerate("bcdefghi")]
    data = {"train": [{"path": str(tmp_path / "rows" / "*.jsonl"), "format": {"type": "tokens"}}]}
    config = make_config(tmp_path, **BASE, data=data)
    finetune(config)

    def refusal() -> str:
        with pytest.raises(ResumeError) as failure:
            finetune(config)
        (line,) = str(failure.value).splitlines()[1:]
        return line.strip()

    write_tokens(files[2], seed=99)
    assert refusal() == f"data.train.0.files: changed {files[2]}"
    write_tokens(files[2], seed=2)
    files[7].unlink()
    first = write_tokens(tmp_path / "rows" / "a.jsonl", seed=77)
    assert refusal() == f"data.train.0.files: removed {files[7]}; added {first}"
    first.unlink()
    for number in range(7):
        files[number].unlink()
    write_tokens(files[7], seed=7)
    assert refusal() == f"data.train.0.files: removed {', '.join(map(str, files[:5]))} and 2 more"


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"optim": {"schedule": {"type": "linear"}}}, "optim.schedule.type"),
        ({"optim": {"weight_decay": 0.2}}, "optim.weight_decay"),
        ({"data": {"seq_len": 40}}, "data.seq_len"),
        ({"train": {"micro_batch": 1}}, "train.micro_batch"),
        ({"parallel": {"precision": "fp64"}}, "parallel.precision"),
        ({"model": {"overrides": {"attn_pdrop": 0.1}}}, "model.attn_pdrop"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_decides_the_trajectory_cannot_change(refused: Refused, sections: Any, name: str) -> None:
    _, line = refused(**sections)
    assert line.strip().startswith(f"{name}: was ") and ", is " in line


def test_another_architecture_cannot_go_on(refused: Refused) -> None:
    lines = refused(LLAMA)
    assert "  model.model_type: was 'gpt2', is 'llama'" in lines


def test_what_does_not_decide_it_can_change(home: Path) -> None:
    """A longer run, elsewhere saved, logged and counted otherwise, its rates planned over the new length, from a copy
    of the data under another name."""
    copy = home / "copy.jsonl"
    copy.write_bytes((home / "tokens.jsonl").read_bytes())
    changed: FinetuneConfig = make_config(
        home,
        **BASE | {"train": {**BASE["train"], "max_steps": 3, "log_every": 2}},
        data={"train": [{"path": str(copy), "format": {"type": "tokens"}}]},
        checkpoint={"every": 1, "keep_last": None},
        optim={"max_skipped": 3, "schedule_steps": 3},
    )
    assert finetune(changed).steps == 3
