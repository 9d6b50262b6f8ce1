"""`raytune-fsdp fork`: begin a run where another one was after a step, with changes; or remove the pin of a fork."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.cli.common import RUNS_CODE, ConfigParser, config_of_run, say
from raytune_fsdp.cli.train import add_training, exit_code_of_training, train

if TYPE_CHECKING:
    pass

_UNPIN = "--unpin"


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
        help="let the run that this fork comes from prune the checkpoint with which it began, for good; if the fork is "
        "gone, and not next to that run, name the run, too",
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
    parser.default_config = config_of_run(Path(run))
    path = Path(run).absolute()
    own, _ = parser.parse_known_args(arguments)
    if own.at is None:
        parser.error(f"missing: --at STEP; {_steps(path)}")
    found, config = parser.parse_with_config([*arguments, *_as_fork(path, own, arguments)])
    from raytune_fsdp.run.places import check_places
    from raytune_fsdp.tools.audit.past import check_code

    check_code(config, trusted=found.trust_remote_code, ranks=True)
    check_places(path, trusted=found.trust_places, config=config if found.config is None else None)
    if found.prints:
        from raytune_fsdp.config.load import recorded_text

        print(recorded_text(config), end="")
        return 0
    return train(parser, found, config)


def _as_fork(run: Path, own: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Return what makes a fork of a run's config, but for fields that the arguments set."""
    given = {word.partition("=")[0] for word in arguments}
    beside = not any(word.startswith("--run.storage") for word in given)
    values = {
        "--run.name": own.name or f"{run.name}-at-{own.at}",
        "--run.storage": str(run.parent),
        "--run.fork.run": run.name if beside else str(run),
        "--run.fork.step": str(own.at),
        "--run.resume": "auto",
        # What holds for the other run alone: where a sweep has stopped it, and the sweep's run in MLflow.
        "--run.stop_after": "null",
        "--tracking.mlflow.parent": "null",
        "--export.push": "null",  # it would replace what the other run has pushed there
    }
    return [f"{flag}={value}" for flag, value in values.items() if not any(word.startswith(flag) for word in given)]


def _steps(run: Path) -> str:
    from raytune_fsdp.base.urls import is_url
    from raytune_fsdp.plan.run_dir import RunDir, checkpoints_of
    from raytune_fsdp.run.forks.parent import steps_there

    place = RunDir(run, checkpoints_of(run))
    # Not asked without a look at who chose it.
    return "its checkpoints are elsewhere" if is_url(place.checkpoints) else steps_there(place)


def _unpin(parser: ConfigParser, arguments: list[str]) -> int:
    found, unknown = parser.parse_known_args(arguments)
    if unknown or found.at is not None or found.name is not None:
        parser.error(f"{_UNPIN} {found.unpin} removes a pin, and nothing else: leave the rest out")
    from raytune_fsdp.checkpoint.catalogue import committed
    from raytune_fsdp.plan.run_dir import checkpoints_of, is_run
    from raytune_fsdp.record.lineage import known_lineage
    from raytune_fsdp.run.forks.pins import pin_name, unpin

    fork = found.unpin.absolute()
    lineage = known_lineage(fork)
    if found.run is not None:
        places = [found.run.absolute()]
    else:
        beside = [each for each in fork.parent.iterdir() if each.is_dir()] if fork.parent.is_dir() else []
        places = [*([Path(lineage.parent.path)] if lineage is not None else []), *beside]
    for place in places:
        if (file := unpin(place, pin_name(fork))) is not None:
            say(f"removed {file}: {place.name} may prune the checkpoint with which {fork.name} began")
            if is_run(fork) and not committed(checkpoints_of(fork)):
                say(f"{fork.name} has no checkpoint of its own: without that one it cannot begin again")
            return 0
    where = f"{found.run} has no pin of it" if found.run is not None else f"no run in {fork.parent} has a pin of it"
    raise ConfigError(f"{_UNPIN} {found.unpin}: {where}; name the run that it forked: `fork RUN {_UNPIN} FORK`")


if __name__ == "__main__":
    raise SystemExit(main())
