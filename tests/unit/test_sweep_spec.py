"""sweep.yaml: what it means, what is refused, and which runs it makes."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune_fsdp.base.errors import ConfigError, UserError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.config.schema import sections_of
from raytune_fsdp.config.text import parse
from raytune_fsdp.tune.log import Trial, TrialEnded, Value
from raytune_fsdp.tune.schedulers.choose import scheduler_of
from raytune_fsdp.tune.schedulers.rungs import Rungs
from raytune_fsdp.tune.search import begun_with_optuna, drawn, grid, rounded
from raytune_fsdp.tune.space import check_skip, check_trials, config_of, run_name_of, trials_of
from raytune_fsdp.tune.spec import (
    KINDS,
    SchedulerChoice,
    SearchChoice,
    SweepSpec,
    Values,
    load_sweep,
    sweep_text,
)
from tests.sweeps import BASE, make_sweep

YAML = """
name: rates
base: base.yaml
space:
  optim.lr: {grid: [1e-4, 3e-4]}
  method: {grid: [{type: full}, {type: lora, rank: 8}]}
  data.train.0.name: {choice: [2024, no]}
scheduler: {type: rungs, eta: 3}
seeds: 2
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(YAML)
    Path("base.yaml").write_text(
        "run: {name: base, seed: 5}\nmodel: {path: m}\ndata: {train: [{path: a.jsonl}]}\n"
        "train: {global_batch: 8, max_steps: 80}\neval: {every: 10}\n"
    )
    return tmp_path


def problem(sweep: Any, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        spec = load_sweep(sweep, flags)
        check_trials(spec, trials_of(spec))
    return str(caught.value)


@pytest.mark.usefixtures("here")
def test_the_trials_of_a_file() -> None:
    spec = load_sweep("sweep.yaml")
    trials = trials_of(spec)
    assert [trial.number for trial in trials] == list(range(16))
    assert [(trial.variant, trial.seed) for trial in trials[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # The last field changes first; a value is what it means in its field: `2024` and `no` are names.
    assert [trial.changes["data.train.0.name"] for trial in trials[:4]] == ["2024", "2024", "no", "no"]
    assert [trial.changes["optim.lr"] for trial in trials] == [1e-4] * 8 + [3e-4] * 8
    configs = check_trials(spec, trials)
    assert [config.run.name for config in configs[:3]] == ["rates-000-s0", "rates-000-s1", "rates-001-s0"]
    assert [config.run.seed for config in configs[:3]] == [5, 6, 5]
    last = configs[-1]
    assert (last.run.storage, last.optim.lr, last.method.type, last.data.train[0].name) == ("runs", 3e-4, "lora", "no")
    flags = ["--optim.lr=3e-4", "--method.type=lora", "--method.rank=8", "--data.train.0.name=no", "--run.seed=6"]
    assert last == load_config("base.yaml", [*flags, "--run.name=rates-007-s1"])


@pytest.mark.usefixtures("here")
def test_flags_go_over_the_file() -> None:
    flags = ["--search.type=random", "--search.trials", "4", "--space.optim.lr={loguniform: [1e-5, 1e-3]}", "--seeds=1"]
    spec = load_sweep("sweep.yaml", [*flags, "--space.train.z_loss={choice: [0, 1e-4]}"])
    assert spec.values["optim.lr"] == Values("loguniform", (1e-5, 1e-3))
    assert spec.values["train.z_loss"] == Values("choice", (0, 1e-4))
    assert len(trials_of(spec)) == 4
    assert run_name_of(spec, trials_of(spec)[3]) == "rates-003"
    assert run_name_of(spec, trials_of(spec)[3], generation=2) == "rates-003-g2"


def test_a_base_may_be_inline_or_each_trials_own_recipe() -> None:
    assert config_of(make_sweep(), Trial(7, {"optim.lr": 0.5}, 7)).optim.lr == 0.5
    space = {"recipe": {"grid": ["demo", "qwen3-8b-lora"]}, "optim.lr": {"grid": [1e-3]}}
    spec = load_sweep({"name": "s", "base": {"train": {"max_steps": 7, "epochs": None}}, "space": space})
    configs = check_trials(spec, trials_of(spec))
    assert [config.method.type for config in configs] == ["full", "lora"]
    assert {(config.optim.lr, config.train.max_steps, config.train.epochs) for config in configs} == {(1e-3, 7, None)}
    assert configs[0].data == load_config("demo").data


def test_a_section_of_the_space_goes_over_what_all_recipes_share() -> None:
    lora = [{"type": "lora", "rank": 4}, {"type": "lora", "rank": 16}]
    base = {"method": {"type": "lora", "rank": 8, "dropout": 0.1}, "train": {"max_steps": 7, "epochs": None}}
    space = {"recipe": {"grid": ["demo"]}, "method": {"grid": lora}}
    spec = load_sweep({"name": "s", "base": base, "space": space})
    configs = check_trials(spec, trials_of(spec))
    assert [config.method for config in configs] == [load_config("demo", [f"--method={each}"]).method for each in lora]
    assert {config.train.max_steps for config in configs} == {7}
    # A field of the space leaves the rest of its section as the base has it.
    of_rank = load_sweep({"name": "s", "base": base, "space": {**space, "method": {"rank": {"grid": [4]}}}})
    (config,) = check_trials(of_rank, trials_of(of_rank))
    assert config.method.model_dump(include={"rank", "dropout"}) == {"rank": 4, "dropout": 0.1}


@pytest.mark.usefixtures("here")
def test_files_are_read_once() -> None:
    """A sweep takes days: trials that begin later, and best.yaml, are of the base that the others were trained with."""
    of_a_base = load_sweep("sweep.yaml")
    of_recipes = load_sweep({"name": "s", "space": {"recipe": {"grid": ["base.yaml"]}}})
    specs = (of_a_base, of_recipes, of_a_base.model_copy(update={"concurrent": 2}))
    Path("base.yaml").write_text(Path("base.yaml").read_text().replace("seed: 5", "seed: 6"))
    assert [config_of(spec, trials_of(spec)[0]).run.seed for spec in specs] == [5, 5, 5]
    Path("base.yaml").unlink()
    assert [config_of(spec, trials_of(spec)[-1]).run.seed for spec in specs] == [6, 5, 6]  # the seeds of two
    assert "base: base.yaml\n" in sweep_text(of_a_base)
    assert "config file base.yaml: no such file" in problem("sweep.yaml")


def test_a_fork_has_other_changes_and_a_name_of_its_own() -> None:
    spec = make_sweep()
    config = config_of(spec, trials_of(spec)[1], {"optim.lr": 0.25}, generation=1)
    assert (config.run.name, config.optim.lr, config.train.z_loss) == ("s-001-g1", 0.25, 0.0)


def test_what_a_base_says_of_its_own_run_is_not_said_of_trials() -> None:
    """It may be the config of another sweep's run, and name a place of which there is one."""
    of_run = {"run": {"name": "rates-003-g2", "stop_after": 50, "fork": {"run": "rates-001", "step": 20}}}
    published = {"export": {"push": "me/model"}, "tracking": {"mlflow": {"register": "model"}}}

    def said(config: FinetuneConfig) -> list[Any]:
        return [config.run.stop_after, config.run.fork, config.export.push, config.tracking.mlflow.register]

    spec = make_sweep(2, base={**BASE, **of_run, **published})
    first = trials_of(spec)[0]
    assert said(check_trials(spec, [first])[0]) == [None] * 4
    assert said(config_of(spec, first, publishes=True)) == [None, None, "me/model", "model"]
    recipes = {"space": {"recipe": {"grid": ["demo"]}}, "search": {"type": "grid"}, "base": {**of_run, **published}}
    spec = make_sweep(1, **recipes)
    assert said(check_trials(spec, trials_of(spec))[0]) == [None] * 4
    with pytest.raises(ConfigError, match="export.push=me/model pushes the export at the end"):  # not when it is over
        check_trials(make_sweep(2, base={**BASE, "export": {"at_end": False, "push": "me/model"}}), [first])
    each = make_sweep(2, base=BASE, search={"type": "grid"}, space={"export.push": {"grid": ["me/a", "me/b"]}})
    assert [config.export.push for config in check_trials(each, trials_of(each))] == ["me/a", "me/b"]


@pytest.mark.usefixtures("here")
def test_what_a_sweep_writes_says_the_same() -> None:
    spec = load_sweep("sweep.yaml")
    Path("written.yaml").write_text(sweep_text(spec))
    assert load_sweep("written.yaml") == spec
    secret = make_sweep(base={**BASE, "cluster": {"env": {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz0123456789"}}})
    assert "hf_abc" not in sweep_text(secret)


GRID = {"optim.lr": {"grid": [1e-4, 1e-3]}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"space": {"optim.lr": 3}}, "space.optim.lr=3: must be a map with a list under one of grid, choice"),
        ({"space": {"optim.lr": {"gird": [3]}}}, "space.optim.lr.gird=.*must be a map with a list under one of grid"),
        ({"space": {"optim.lr": {"grid": [3], "choice": [3]}}}, "space.optim.lr=.*: must be a map with a list"),
        ({"space": {"optim.lr": {"grid": []}}}, "space.optim.lr=.*: names no value"),
        ({"space": {"optim.lr": {"uniform": [1, 2, 3]}}}, "uniform needs two numbers"),
        ({"space": {"optim.lr": {"uniform": [True, 2]}}}, "uniform needs two numbers"),
        ({"space": {"optim.lr": {"uniform": [0, math.inf]}}}, "uniform needs two finite numbers"),
        ({"space": {"optim.lr": {"uniform": [2, 1]}}}, "the lower one first"),
        ({"space": {"optim.lr": {"loguniform": [0, 1]}}}, "loguniform needs numbers above 0"),
        ({"space": {"method.rank": {"int": [1, 2.5]}}}, "int needs two integers"),
        ({"space": {"optim.lr": {"uniform": [0, 1]}}}, "search.type=grid: a grid needs the values themselves"),
        ({"space": {"run.name": {"grid": ["a"]}}}, "space.run.name: the sweep itself sets run.name"),
        ({"space": {"run": {"grid": [{"resume": "never"}]}}}, "space.run: the sweep itself sets run.name"),
        ({"space": {"run.fork.step": {"grid": [1]}}}, "space.run.fork.step: the sweep itself sets run.fork"),
        ({"space": {"method.rank": {"int": [0, 10**400]}}}, "int needs numbers of at most 9,007,199,254,740,992"),
        ({"space": {"run.seed": {"grid": [1]}}, "seeds": 2}, "space.run.seed with seeds=2"),
        ({"space": {"recipe": {"grid": ["demo"]}}, "base": "demo"}, "space.recipe with base=demo: .*leave base out"),
        ({"space": {"optim.lr": {"grid": list(range(1001))}}}, "makes 1,001 trials .*a sweep may have 1,000"),
        ({"search": {"type": "random", "trials": 2}, "space": {}}, "search.trials=2 without space"),
        ({"search": {"type": "optuna", "trials": 2}}, "scheduler.type=rungs with search.type=optuna"),
        ({"scheduler": {"type": "asha"}, "seeds": 3}, "seeds=3 with scheduler.type=asha: it compares single runs"),
        (
            {"scheduler": {"type": "pbt", "every": 10, "change": ["optim.beta1"]}},
            r"scheduler.change names optim.beta1, .*\(optim.lr\)",
        ),
        (
            {"scheduler": {"type": "pbt", "every": 10}, "space": {"recipe": {"grid": ["demo"]}}, "base": {}},
            "pbt: a fork",
        ),
        ({"scheduler": {"type": "ahsa"}}, "scheduler.type=ahsa: .*nearest: asha"),
        ({"scheduler": {"type": "median", "eta": 3}}, "scheduler.eta=3: unknown field"),
        ({"serach": {}}, "serach: unknown section; nearest: search"),
        ({"name": "a/b"}, "name=a/b: must be 1 to 128 letters"),
        ({"budget": {"until": "tomorrow"}}, "budget.until=tomorrow: is not a date and a time"),
        ({"metric": "eval/a/loss", "best_is": "best"}, "best_is=best: must be one of auto, lowest, highest"),
    ],
)
def test_what_is_wrong_with_a_sweep(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_sweep({"name": "s", "base": BASE, "space": GRID, **given})


@pytest.mark.parametrize("time", ["9999-12-31 23:59:59-12:00", "0001-01-01 00:00+12:00"])
def test_a_time_that_no_clock_here_shows_is_refused(time: str) -> None:
    """It is in the year 10000 or 0 here."""
    with pytest.raises(ConfigError, match=rf"budget.until='?{re.escape(time)}'?: is no time here: name one less far"):
        make_sweep(budget={"until": time})
    make_sweep(budget={"until": "2999-12-31 23:59-12:00"}).budget.check_until()


@pytest.mark.usefixtures("here")
def test_a_mistake_in_a_file_says_its_line() -> None:
    Path("sweep.yaml").write_text(YAML.replace("{grid: [1e-4, 3e-4]}", "{uniform: [3]}").replace("seeds", "seed"))
    lines = problem("sweep.yaml").split("\n")
    assert lines[0].startswith("seed=2: unknown section; nearest: seeds; ") and "(from sweep.yaml line 9)" in lines[0]
    wrong = "uniform needs two numbers, the lowest and the highest (from sweep.yaml line 5)"
    assert lines[1] == f'space.optim.lr={{"uniform": [3]}}: {wrong}'
    assert "no such file" in problem("swep.yaml") and "nearest: sweep.yaml" in problem("swep.yaml")
    Path("sweep.yaml").write_text("- name\n")
    assert "must be a map of sections (name, storage, base," in problem("sweep.yaml")


@pytest.mark.usefixtures("here")
def test_a_mistake_in_a_trial_names_the_sweeps_field() -> None:
    flags = ["--seeds=1", "--space={optim.lr: {grid: [1e-4, -1]}}"]
    assert problem("sweep.yaml", *flags) == (
        "trial 1 (optim.lr=-1): optim.lr=-1: must be number > 0 (from space.optim.lr)"
    )
    flags = ["--space={optim.lr: {grid: [1e-4, -1]}, optim.beta1: {grid: [0.9, 0.8]}}", "--seeds=1"]
    assert problem("sweep.yaml", *flags).startswith("trials 2, 3: optim.lr=-1: must be")
    # What is wrong with all of them is said once.
    assert problem("sweep.yaml", "--space={optim.rl: {grid: [1, 2]}}").startswith(
        "trials 0, 1: optim.rl=1: unknown field"
    )
    Path("base.yaml").write_text(Path("base.yaml").read_text().replace("global_batch: 8, ", ""))
    assert problem("sweep.yaml").count("train.global_batch: required") == 1
    assert problem("sweep.yaml", "--base=bas.yaml").count("no such file") == 1


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("s-8", {}),
        ("s-003-g1", {}),
        ("t-003", {"scheduler": {"type": "pbt", "every": 10}}),
        ("s-003", {"seeds": 2}),
        ("s-008", {"search": {"type": "optuna", "trials": 8}, "scheduler": {"type": "none"}}),
    ],
)
def test_only_trials_are_left_out(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=rf"skip=\[{name}\]: no trial of the sweep s has this name: .* s-000.* to s-007"
    ):
        check_skip(make_sweep(8, **{"skip": [name], **given}))
    check_skip(make_sweep(8, skip=["s-003-g1", "s-007"], scheduler={"type": "pbt", "every": 10}))
    check_skip(make_sweep(8, skip=["s-007-s1"], seeds=2))


@pytest.mark.usefixtures("here")
def test_the_sweep_of_the_docs() -> None:
    text = Path("base.yaml").read_text()
    Path("base.yaml").write_text(text.replace("max_steps: 80", "max_steps: 1000").replace("every: 10", "every: 100"))
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    example = page.partition("## A sweep\n")[2].partition("`raytune-fsdp sweep")[0]
    spec = load_sweep(parse(dedent(example))[0])
    trials = trials_of(spec)
    scheduler = scheduler_of(spec, check_trials(spec, trials))
    assert isinstance(scheduler, Rungs) and scheduler.steps == [100, 200, 400]
    assert run_name_of(spec, trials[-1]) == "rates-007"
    rows = re.findall(r"^\| `(\w+)`", page.partition("## Which values")[2], re.MULTILINE)
    assert set(rows) == {*sections_of(SearchChoice), *sections_of(SchedulerChoice)}
    assert set(KINDS) == set(re.findall(r"\{(\w+): \[", page.partition("## The space")[2].partition("`data.train")[0]))


# What is drawn.


def test_draws_are_those_of_every_machine() -> None:
    space = {
        "a": Values("uniform", (0.0, 1.0)),
        "b": Values("loguniform", (1e-5, 1e-2)),
        "c": Values("int", (1, 3)),
        "d": Values("choice", ("x", "y")),
    }
    assert drawn(space, 0, 3) == DRAWN
    assert drawn({"d": space["d"], "b": space["b"]}, 0, 3) == {"d": DRAWN["d"], "b": DRAWN["b"]}
    many = [drawn(space, 1, number) for number in range(1000)]
    assert Counter(each["c"] for each in many).keys() == {1, 2, 3} and {each["d"] for each in many} == {"x", "y"}
    assert 0.45 < sum(each["a"] for each in many) / 1000 < 0.55
    assert 0.45 < sum(each["b"] < math.sqrt(1e-7) for each in many) / 1000 < 0.55
    assert all(1e-5 <= each["b"] <= 1e-2 for each in many)


DRAWN: dict[str, Any] = {"a": 0.704759, "b": 0.00011055, "c": 2, "d": "y"}


@given(value=st.floats(1e-6, 1e6), low=st.floats(1e-6, 1e3))
def test_what_is_drawn_is_short_and_in_its_range(value: float, low: float) -> None:
    short = rounded(value, low, 1e6)
    assert low <= short <= 1e6
    assert short in (low, 1e6) or (len(f"{short:.6g}") <= 12 and float(f"{short:.6g}") == short)


def test_a_grid_is_in_the_order_that_is_written() -> None:
    space = {"a": Values("grid", (3, 1)), "b": Values("choice", ("x",)), "c": Values("grid", (True, False))}
    assert [tuple(each.values()) for each in grid(space)] == [
        (3, "x", True),
        (3, "x", False),
        (1, "x", True),
        (1, "x", False),
    ]
    assert grid({}) == [{}]


# Optuna.


def with_optuna(**more: Any) -> SweepSpec:
    return make_sweep(search={"type": "optuna", "trials": 12, "seed": 3}, scheduler={"type": "none"}, **more)


def test_optuna_is_asked_when_there_is_something_to_ask() -> None:
    log = [Trial(number, {}, number) for number in range(3)]
    assert begun_with_optuna([], 12, 2) == 2
    assert begun_with_optuna([*log, Value(0, 10, 1.0)], 12, 3) == 3
    assert begun_with_optuna([*log, TrialEnded(0, 10), TrialEnded(2, 10, "broken")], 12, 3) == 5
    assert begun_with_optuna([*log, TrialEnded(0, 10)], 3, 3) == 3


def test_without_optuna_another_search_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        UserError, match="search.type=optuna needs Optuna: run pip install .*, or set search.type=random"
    ):
        trials_of(with_optuna())


def test_optuna_proposes_from_the_log_alone() -> None:
    pytest.importorskip("optuna")
    spec = with_optuna(
        concurrent=2,
        space={"optim.lr": {"loguniform": [1e-5, 1e-2]}, "method": {"choice": [{"type": "full"}, {"type": "ia3"}]}},
    )
    log: list[Any] = []
    for number in range(12):
        trials = trials_of(spec, log)
        log.append(trials[number])
        # The nearer to 1e-3, the better; some fail.
        loss = abs(math.log10(trials[number].changes["optim.lr"]) + 3)
        ended = TrialEnded(number, 10, "broken" if number == 4 else None)
        log += [Value(number, 10, math.nan if number == 5 else loss), ended]
        assert trials_of(spec, log[:-2]) == trials
    rates = [entry.changes["optim.lr"] for entry in log if isinstance(entry, Trial)]
    assert len(set(rates)) == 12 and all(1e-5 <= rate <= 1e-2 for rate in rates)
    assert trials_of(spec, log) == [entry for entry in log if isinstance(entry, Trial)]
