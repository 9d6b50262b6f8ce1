"""`raytune-fsdp fork`: begin a run where another one was after a step, with changes; or remove the pin of a fork."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from raytune_fsdp.base.errors import ConfigError, ResumeError, in_one_line
from raytune_fsdp.cli.common import RUNS_CODE, ConfigParser, by_flag, config_of_run, say, value_in
from raytune_fsdp.cli.train import add_training, exit_code_of_training, train
from raytune_fsdp.plan.run_dir import (
    CHECKPOINTS,
    CONFIG_FILE,
    RunDir,
    check_links,
    checkpoints_of,
    is_run,
    names_checkpoints,
)

_UNPIN = "--unpin"
_MOST_NAMED = 12


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp fork") -> int:
    """Fork a run, or unpin a fork; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code_of_training(lambda: _fork(parser_of(prog), arguments))


def parser_of(prog: str) -> ConfigParser:
    parser = ConfigParser(
        prog,
        "Begin a run where another one was after a step: with its config but for what you change, its weights, "
        "optimizer state and place in the data. Nothing is copied. The same command continues it. It pushes no export "
        "unless --export.push says where.",
    )
    parser.add_argument("run", type=Path, nargs="?", help="directory of the run to fork")
    parser.add_argument("--at", type=int, metavar="STEP", help="the step of one of its checkpoints")
    parser.add_argument("--name", help="run.name of the fork (default: RUN-at-STEP), next to the run")
    parser.add_argument("--print", dest="prints", action="store_true", help="print the fork's config and train nothing")
    parser.add_argument(
        _UNPIN,
        type=Path,
        metavar="FORK",
        help="let the run that this fork comes from prune the checkpoint with which it began, for good; if that run is "
        "not next to the fork, name it, too",
    )
    add_training(parser, code=RUNS_CODE)
    return parser


def _fork(parser: ConfigParser, arguments: list[str]) -> int:
    if any(word.partition("=")[0] == _UNPIN for word in arguments):
        return _unpin(parser, arguments)
    run = parser.first_word(arguments, "RUN")
    if run is None:
        parser.parse_with_config(arguments)  # prints the help
        return 0
    path = Path(run).absolute()
    own, _ = parser.parse_known_args(arguments)
    if own.at is None:
        config_of_run(Path(run))
        parser.error(f"missing: --at STEP; {_steps(path)}")
    for flag, value, field in (("--at", str(own.at), "--run.fork.step"), ("--name", own.name, "--run.name")):
        other = value_in(arguments, field)
        if value is not None and other not in (None, value):
            parser.error(f"{flag} {value} and {field} {other} say two things: leave {field} out")
    name = own.name or value_in(arguments, "--run.name") or f"{path.name}-at-{own.at}"
    storage = value_in(arguments, "--run.storage")
    fork = (path.parent if storage is None else Path(storage).expanduser().absolute()) / name
    begun = _has_begun(fork, path, own.at)
    # As for any run that goes on. The parent's may have changed since, or be gone.
    parser.default_config = config_of_run(fork if begun else Path(run))
    found, config = parser.parse_with_config([*arguments, *_as_fork(path, name, own.at, arguments)])
    from raytune_fsdp.run.places import check_places
    from raytune_fsdp.tools.audit.past import check_code

    check_code(config, trusted=found.trust_remote_code, ranks=True)
    own_config = config if found.config is None else None
    check_places(fork if begun else path, trusted=found.trust_places, config=own_config)
    if found.prints:
        from raytune_fsdp.config.load import recorded_text

        print(recorded_text(config), end="")
        return 0
    if begun and found.config is None:
        say(f"{fork.name} has begun already: it goes on with its own {fork / CONFIG_FILE}, and what this line changes")
    return train(parser, found, config)


def _has_begun(fork: Path, run: Path, step: int) -> bool:
    """Return whether there is a fork of this run after this step. Its parent may have been moved since."""
    from raytune_fsdp.config.load import read_file
    from raytune_fsdp.config.text import spelled

    if not (fork / CONFIG_FILE).is_file():
        return False
    check_links(fork)
    section = None
    with suppress(ConfigError):  # the run says so in its own words, if it goes on with it
        section = spelled(read_file(fork / CONFIG_FILE)[0]).get("run")
    named = section.get("fork") if isinstance(section, dict) else None
    return isinstance(named, dict) and named.get("step") == step and Path(str(named.get("run"))).name == run.name


def _as_fork(run: Path, name: str, step: int, arguments: Sequence[str]) -> list[str]:
    """Return what makes a fork of a run's config, but for fields that the arguments set."""
    given = {flag for flag, _ in by_flag(arguments)}
    values = {
        "--run.name": name,
        "--run.storage": str(run.parent),
        "--run.fork.run": run.name if "--run.storage" not in given else str(run),
        "--run.fork.step": str(step),
        "--run.resume": "auto",
        # What holds for the other run alone: where a sweep has stopped it, and the sweep's run in MLflow.
        "--run.stop_after": "null",
        "--tracking.mlflow.parent": "null",
        "--export.push": "null",  # it would replace what the other run has pushed there
    }
    return [f"{flag}={value}" for flag, value in values.items() if not any(word.startswith(flag) for word in given)]


def _steps(run: Path) -> str:
    from raytune_fsdp.base.urls import is_url
    from raytune_fsdp.run.forks.parent import steps_there

    place = RunDir(run, checkpoints_of(run))
    # Not asked without a look at who chose it.
    return "its checkpoints are elsewhere" if is_url(place.checkpoints) else steps_there(place)


def _unpin(parser: ConfigParser, arguments: list[str]) -> int:
    found, unknown = parser.parse_known_args(arguments)
    if unknown or found.at is not None or found.name is not None:
        parser.error(f"{_UNPIN} {found.unpin} removes a pin, and nothing else: leave the rest out")
    from raytune_fsdp.run.forks.pins import pin_name, pins_of, unpin

    fork, left = found.unpin.absolute(), list[str]()
    places = [] if found.run is None else [found.run.absolute()]
    try:
        places += sorted(fork.parent.iterdir()) if found.run is None and fork.parent.exists() else []
    except OSError as error:
        left.append(f"{fork.parent} could not be looked at: {in_one_line(error)}")
    removed = 0
    for place in places:
        try:
            check_links(place)
            file = unpin(place, pin_name(fork))
        except (OSError, ResumeError) as error:  # another user's, or a stranger's
            left.append(f"{place} could not be looked at: {in_one_line(error)}")
            continue
        if file is not None:
            removed += 1
            say(f"removed {file}: {place.name} may prune the checkpoint with which {fork.name} began")
    if removed:
        if _is_without_checkpoint(fork):
            say(f"{fork.name} has no checkpoint of its own: without that one it cannot begin again")
        return 0
    if found.run is None:
        problem = f"no run in {fork.parent} has a pin of it; {_named(fork)}"
    elif left:
        raise ConfigError(f"{_UNPIN} {found.unpin}: {left[0]}")
    else:
        forks = ", ".join(sorted(pin.child for pin in pins_of(places[0]))[:_MOST_NAMED]) or "no fork"
        problem = f"{found.run} has no pin of it, but of {forks}"
    raise ConfigError(
        f"{_UNPIN} {found.unpin}: {problem}; of a fork that was moved, give the path that it had when it began", *left
    )


def _named(fork: Path) -> str:
    """Say which run has to be named. What a lineage says may be a stranger's, so no command goes there by itself."""
    from raytune_fsdp.record.lineage import known_lineage

    lineage = known_lineage(fork)
    known = "" if lineage is None else f" (its lineage says {lineage.parent.path})"
    return f"name the run that it forked{known}: `fork RUN {_UNPIN} FORK`"


def _is_without_checkpoint(fork: Path) -> bool:
    from raytune_fsdp.checkpoint.catalogue import committed

    with suppress(OSError):
        return is_run(fork) and not names_checkpoints(fork) and not committed(str(fork / CHECKPOINTS))
    return False


if __name__ == "__main__":
    raise SystemExit(main())
