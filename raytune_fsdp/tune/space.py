"""The trials of a sweep, their names and their configs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import ReadConfig, load_config
from raytune_fsdp.config.problems import shown
from raytune_fsdp.plan.identity import decided_by_data, named
from raytune_fsdp.tune.log import Entry, Trial, trials_in
from raytune_fsdp.tune.search import begun_with_optuna, drawn, grid, proposed
from raytune_fsdp.tune.spec import RECIPE, GridSearch, OptunaSearch, PbtScheduler, SweepSpec


def trials_of(spec: SweepSpec, log: Sequence[Entry] = ()) -> list[Trial]:
    """Return the trials that are known at this point of the log, in order: at first all of them, unless later ones
    follow from the values of earlier ones (Optuna)."""
    search, space = spec.search, spec.values
    if isinstance(search, OptunaSearch):
        known = trials_in(log)
        for number in range(len(known), begun_with_optuna(log, search.trials, spec.concurrent)):
            known.append(Trial(number, proposed(spec, search, log, number), number))
        return known
    if isinstance(search, GridSearch):
        variants = grid(space)
    else:
        variants = [drawn(space, search.seed, number) for number in range(search.trials)]
    seeds = range(spec.seeds) if spec.seeds > 1 else [None]
    each = [(changes, variant, seed) for variant, changes in enumerate(variants) for seed in seeds]
    return [Trial(number, changes, variant, seed) for number, (changes, variant, seed) in enumerate(each)]


def run_name_of(spec: SweepSpec, trial: Trial, generation: int = 0) -> str:
    """Return the name of a trial's run: `<sweep>-007`, of a seed `<sweep>-007-s1`, as a fork again `<sweep>-007-g2`."""
    return run_name_in(spec.name, trial.variant, trial.seed, generation)


def run_name_in(sweep: str, variant: int, seed: int | None = None, generation: int = 0) -> str:
    """Return the same by the name of the sweep. Without the seed it stands for all runs of a variant."""
    of_seed = "" if seed is None else f"-s{seed}"
    return f"{sweep}-{variant:03d}{of_seed}{f'-g{generation}' if generation else ''}"


def is_run_name(name: str, sweep: str) -> bool:
    """Return whether a trial's run of this sweep may have this name."""
    own = "-([0-9]{3}|[1-9][0-9]{3,})(-s[0-9]+)?(" + _FORK.pattern + ")?"
    return re.fullmatch(re.escape(sweep) + own, name) is not None


def config_of(
    spec: SweepSpec,
    trial: Trial,
    changes: Mapping[str, Any] | None = None,
    generation: int = 0,
    *,
    publishes: bool = False,
) -> FinetuneConfig:
    """Return the config of a trial's run, with its name, its storage and its seed. `changes`: those of a fork.
    `publishes`: with the names under which the base publishes a model, which trials would all replace.

    Raises ConfigError, naming the trial and the sweep's fields.
    """
    try:
        return _config(spec, trial, trial.changes if changes is None else changes, generation, publishes=publishes)
    except ConfigError as error:
        about = _about([trial], trial.changes if changes is None else changes)
        raise ConfigError(*(about + line for line in error.args)) from None


def check_trials(spec: SweepSpec, trials: Sequence[Trial]) -> list[FinetuneConfig]:
    """Return the configs of all these trials. Raises ConfigError with all that is wrong with any of them."""
    configs: list[FinetuneConfig] = []
    problems: dict[str, list[Trial]] = {}
    for trial in trials:
        try:
            configs.append(_config(spec, trial, trial.changes, 0))
        except ConfigError as error:
            for line in error.args:
                problems.setdefault(line, []).append(trial)
    if problems:
        lines = [
            line if len(wrong) == len(trials) > 1 else _about(wrong, wrong[0].changes) + line
            for line, wrong in problems.items()
        ]
        more = len(lines) - _MOST_PROBLEMS
        raise ConfigError(*lines[:_MOST_PROBLEMS], *([f"and {more} more problems like these"] if more > 0 else []))
    return configs


def check_skip(spec: SweepSpec) -> None:
    """Refuse to leave out what no trial is called: nothing would be left out, without a word. Raises ConfigError."""
    if isinstance(spec.search, OptunaSearch):
        known = [run_name_in(spec.name, number) for number in range(spec.search.trials)]
    else:
        known = [run_name_of(spec, trial) for trial in trials_of(spec)]
    for name in spec.skip:
        of = _FORK.sub("", name) if isinstance(spec.scheduler, PbtScheduler) else name
        if of not in known:
            raise ConfigError(
                f"skip=[{name}]: no trial of the sweep {spec.name} has this name: they are {known[0]} to {known[-1]}: "
                "name one of them, or leave it out of skip"
            )


def base_of(config: FinetuneConfig) -> dict[str, Any]:
    """Return what the config of a trial says itself of what its run learns, and of when and on what that is measured,
    for the log.

    Of files only the names: where they are decides nothing. What is in those that it learns from, the identity of each
    run has.
    """
    sections = {"optim": config.optim, "method": config.method, "train": config.train}
    named_each = {name: named(name, each, exclude=_DECIDES_NOTHING) for name, each in sections.items()}
    entries = {
        "run.seed": config.run.seed,
        "run.exact": config.run.exact,
        "model.path": config.model.path and PurePath(config.model.path).name,
        "model.init": config.model.init,
        "parallel.precision": config.parallel.precision,
        "eval.every": config.eval.every,
        **dict(zip(ADDED_LATER, _measured_on(config), strict=True)),
        **{f"{name}.{key}": value for name, each in named_each.items() for key, value in each.items()},
        **{f"data.{key}": value for key, value in decided_by_data(config.data).items()},
        "data.train": [
            {
                "path": each.path and PurePath(each.path).name,
                "hub": each.hub,
                "weight": each.weight,
                "share": each.share,
            }
            for each in config.data.train
        ],
    }
    found: dict[str, Any] = json.loads(json.dumps(entries, default=str))
    return found


def _measured_on(config: FinetuneConfig) -> Iterator[Any]:
    """Yield what decides what an evaluation measures, and whether it ends the run (`ADDED_LATER`)."""
    data, early = config.data.eval, config.eval.early_stop
    for chosen in (data if isinstance(data, list) else [data], config.eval.tasks, [] if early is None else [early]):
        yield [_by_names(each.model_dump(mode="json", exclude_defaults=True)) for each in chosen]


def _by_names(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a section says, of files only their names."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            found[key] = _by_names(value)
        elif key in _NAME_FILES and isinstance(value, str) and "\n" not in value:
            found[key] = PurePath(value).name
        else:
            found[key] = value
    return found


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each field that differs, with its values then and now; `not set` stands for none."""
    for field in dict.fromkeys([*now, *was]):
        old, new = was.get(field, _UNSET), now.get(field, _UNSET)
        if old != new:
            yield field, old, new


def _about(trials: Sequence[Trial], changes: Mapping[str, Any]) -> str:
    if len(trials) > 1:
        numbers = ", ".join(str(trial.number) for trial in trials[:8])
        return f"trials {numbers}{f' and {len(trials) - 8} more' if len(trials) > 8 else ''}: "
    said = ", ".join(f"{field}={shown(value)}" for field, value in changes.items())
    return f"trial {trials[0].number}{f' ({said})' if said else ''}: "


def _config(
    spec: SweepSpec, trial: Trial, changes: Mapping[str, Any], generation: int, *, publishes: bool = False
) -> FinetuneConfig:
    base, flags = spec.base, dict(changes)
    if RECIPE in flags:
        base = str(flags.pop(RECIPE))
        # A flag for a field goes over one for its section: what the space gives as a whole stays whole.
        shared = {
            each: value
            for each, value in _leaves(spec.base, "")
            if not any(each.startswith(f"{field}.") for field in flags)
        }
        flags = {**shared, **flags}
    flags |= {"run.name": run_name_of(spec, trial, generation), "run.storage": spec.storage, "run.resume": "auto"}
    # Of a base that is the config of another sweep's run.
    flags = {field: value for field, value in flags.items() if not field.startswith("run.fork.")}
    flags |= {"run.stop_after": None, "run.fork": None}
    try:
        read = spec.read(base) if isinstance(base, str) else base
        config = _loaded(read, flags)
        if trial.seed:
            config = _loaded(read, {**flags, "run.seed": config.run.seed + trial.seed})
    except ConfigError as error:
        raise ConfigError(*(_in_our_words(str(line), changes) for line in error.args)) from None
    return config if publishes else _without_names(config, changes)


def _without_names(config: FinetuneConfig, changes: Mapping[str, Any]) -> FinetuneConfig:
    """Return a config that publishes nothing, unless the sweep changes where: then each trial has a name of its own."""
    export, tracking = config.export, config.tracking
    if not {"export", "export.push"} & changes.keys():
        export = export.model_copy(update={"push": None})
    if not {"tracking", "tracking.mlflow", "tracking.mlflow.register"} & changes.keys():
        mlflow = tracking.mlflow.model_copy(update={"register": None})
        tracking = tracking.model_copy(update={"mlflow": mlflow})
    return config.model_copy(update={"export": export, "tracking": tracking})


def _loaded(base: ReadConfig | Mapping[str, Any], flags: Mapping[str, Any]) -> FinetuneConfig:
    """Return a base with some fields changed, by the words that its user would give on a command line."""
    words = {field: json.dumps(value, default=str, ensure_ascii=False) for field, value in flags.items()}
    return load_config(base, [f"--{field}={word}" for field, word in words.items()])


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a base by their dotted names: what all trials share goes over their recipes."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for name, value in tree.items():
        yield from _leaves(value, f"{path}.{name}" if path else str(name))


def _in_our_words(line: str, changes: Mapping[str, Any]) -> str:
    """Return what is wrong with a config, with the sweep's fields in place of flags that nobody has written."""
    for field in changes:
        line = line.replace(f"flag --{field})", f"space.{field})").replace(f"flag --{field} and", f"space.{field} and")
    return line


_MOST_PROBLEMS = 20
_FORK = re.compile("-g[1-9][0-9]*$")
"""How the name of a trial's run ends that is a fork (`run_name_in`)."""
_UNSET = "not set"
ADDED_LATER = ("data.eval", "eval.tasks", "eval.early_stop")
"""Entries of `base_of` that logs of older versions lack, whatever their bases said."""
_NAME_FILES = ("path", "function", "chat_template")
_DECIDES_NOTHING = ("max_skipped", "log_every", "adapter", "loss")
"""Fields that the identity of a run does not have, and those that name files."""
