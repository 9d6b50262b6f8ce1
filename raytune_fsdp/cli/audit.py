"""`raytune-fsdp audit`: train a segment of a run again, and compare."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from raytune_fsdp.base.errors import ConfigError, Interrupted
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.common import RUNS_CODE, ConfigParser, add_trust, by_flag, config_of_run, main_of
from raytune_fsdp.cli.progress import show_progress

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.plan.run_dir import RunDir
    from raytune_fsdp.tools.audit.chain import AuditedPart

DIFFERS = 4
"""The exit code if the segment is not what the record says; no other failure has this code."""


def parser_of(prog: str) -> ConfigParser:
    parser = ConfigParser(
        prog,
        "Train the steps between two checkpoints of a run again, at any number of ranks, and compare samples, losses "
        "and weights. The run is only read, but for --record. Exit code 4: something differs.",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--from", dest="first", type=int, metavar="STEP", help="a kept checkpoint, or 0 (default: the last but one)"
    )
    parser.add_argument(
        "--to", dest="last", type=int, metavar="STEP", help="the segment's last step (default: the newest checkpoint)"
    )
    parser.add_argument(
        "--chain",
        action="store_true",
        help="of a fork: train all its steps again, and before them those of each run from which it comes, from the "
        "first step of the first one",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="ranks (default: as many as the run's config says)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument(
        "--record",
        action="store_true",
        help="add the outcome to the run's events.jsonl, for its report; otherwise the run is only read",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="where the segment is trained, which needs room for a checkpoint (default: next to the run)",
    )
    parser.add_argument(
        "--use-cache",
        action="store_true",
        help="take tokenized rows from the run's cache, which is faster and proves less: not that they are its data's",
    )
    add_trust(parser, code=RUNS_CODE)
    return parser


def _audit(parser: ConfigParser, arguments: list[str]) -> int:
    run = parser.first_word(arguments, "RUN")
    found, config = _parsed(parser, run, arguments)
    from raytune_fsdp.tools.audit.chain import chain_of, part_of
    from raytune_fsdp.tools.audit.page import check_record

    if found.chain and (found.first is not None or found.config is not None):
        parser.error("--chain takes each run's own config, from its first step on: leave --from and --config out")
    if found.out is not None and not found.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {found.out}: its directory does not exist; create it, or name another file")
    config, place = _opened(found, config, found.run)
    if found.record:
        check_record(place)
    trusted = found.trust_places
    if not found.chain:
        parts = [part_of(config, place, found.first, found.last, trusted=trusted)]
    else:
        # Where its parent is now holds for the run alone: those of the chain have parents of their own.
        rest = [word for flag, words in by_flag(arguments[1:]) if not flag.startswith("--run.fork") for word in words]

        def open_run(path: Path) -> tuple[FinetuneConfig, RunDir]:
            return _opened(found, _parsed(parser, str(path), [str(path), *rest])[1], path)

        parts = chain_of(config, place, found.last, open_run, trusted=trusted)
        for part in parts if found.record else ():
            check_record(part.place)
    lines: list[str] = []
    same = True
    for part in parts:
        outcome = _audited(found, part)
        lines += [*([""] if lines else []), *outcome[1]]
        print("\n".join(outcome[1]), flush=True)
        same = same and outcome[0]
    if found.out is not None:
        found.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if same else DIFFERS


def _parsed(parser: ConfigParser, run: str | None, arguments: list[str]) -> tuple[argparse.Namespace, FinetuneConfig]:
    """Return the arguments, and the config of a run with all that they change."""
    if run is not None:
        parser.default_config = config_of_run(Path(run))
    found, config = parser.parse_with_config(arguments)
    parser.check_least(found, "--workers")
    if found.workers is not None:
        cluster = config.cluster.model_dump() | {"workers": found.workers}
        config = config.model_copy(update={"cluster": type(config.cluster).model_validate(cluster)})
    return found, config


def _opened(found: argparse.Namespace, config: FinetuneConfig, run: Path) -> tuple[FinetuneConfig, RunDir]:
    """Check to what a run leads; return its config and its places, wherever it is now."""
    from raytune_fsdp.run.places import check_beginning, check_places
    from raytune_fsdp.tools.audit.past import check_code, past_place, placed

    check_code(config, trusted=found.trust_remote_code, ranks=True)
    check_places(run, trusted=found.trust_places, config=config if found.config is None else None)
    place = past_place(run)
    config = placed(config, place)
    check_beginning(config, trusted=found.trust_places)
    return config, place


def _audited(found: argparse.Namespace, part: AuditedPart) -> tuple[bool, list[str]]:
    """Audit a segment; return whether it is the same, and the lines of its page."""
    from raytune_fsdp.tools.audit.audit import audit
    from raytune_fsdp.tools.audit.page import put_on_record, report

    place = part.place
    scratch = place.path.parent if found.scratch is None else found.scratch
    try:
        directory = tempfile.TemporaryDirectory(prefix=f"audit-{place.path.name}-", dir=scratch)
    except OSError as error:
        raise ConfigError(f"--scratch {scratch}: {error.strerror}; name a directory that can be written") from None
    try:
        with directory as name, show_progress() as progress:
            outcome = audit(part.config, place, part.segment, Path(name), progress, use_cache=found.use_cache)
    except Interrupted:
        # Training's message says that what it has saved is there to go on from, which is not so here.
        raise Interrupted("the audit was stopped, and its work is removed; the same command starts over") from None
    if found.record:
        put_on_record(outcome, place)
    return outcome.difference is None, [printable(line) for line in report(outcome, place.path.name)]


main = main_of("audit", parser_of, _audit)

if __name__ == "__main__":
    raise SystemExit(main())
