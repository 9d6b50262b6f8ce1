"""`raytune-fsdp audit`: train a segment of a run again, and compare."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from raytune_fsdp.base.errors import ConfigError, Interrupted
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.cli.common import RUNS_CODE, ConfigParser, add_trust, config_of_run, run_command
from raytune_fsdp.cli.progress import show_progress

DIFFERS = 4
"""The exit code if the segment is not what the record says; no other failure has this code."""


def main(argv: Sequence[str] | None = None, prog: str = "raytune-fsdp audit") -> int:
    """Audit a run; return the exit code."""
    return run_command(parser_of(prog), argv, _audit)


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
    if (run := parser.first_word(arguments, "RUN")) is not None:
        parser.default_config = config_of_run(Path(run))
    found, config = parser.parse_with_config(arguments)
    if found.workers is not None:
        cluster = config.cluster.model_dump() | {"workers": found.workers}
        config = config.model_copy(update={"cluster": type(config.cluster).model_validate(cluster)})
    from raytune_fsdp.run.places import check_beginning, check_places
    from raytune_fsdp.tools.audit.audit import audit
    from raytune_fsdp.tools.audit.page import check_record, put_on_record, report
    from raytune_fsdp.tools.audit.past import check_code, past_place, placed
    from raytune_fsdp.tools.audit.segment import choose_segment

    check_code(config, trusted=found.trust_remote_code, ranks=True)
    check_places(found.run, trusted=found.trust_places, config=config if found.config is None else None)
    if found.out is not None and not found.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {found.out}: its directory does not exist; create it, or name another file")
    place = past_place(found.run)
    if found.record:
        check_record(place)
    config = placed(config, place)
    check_beginning(config, trusted=found.trust_places)
    segment = choose_segment(place, found.first, found.last)
    scratch = place.path.parent if found.scratch is None else found.scratch
    try:
        directory = tempfile.TemporaryDirectory(prefix=f"audit-{place.path.name}-", dir=scratch)
    except OSError as error:
        raise ConfigError(f"--scratch {scratch}: {error.strerror}; name a directory that can be written") from None
    try:
        with directory as name, show_progress() as progress:
            outcome = audit(config, place, segment, Path(name), progress, use_cache=found.use_cache)
    except Interrupted:
        # Training's message says that what it has saved is there to go on from, which is not so here.
        raise Interrupted("the audit was stopped, and its work is removed; the same command starts over") from None
    lines = [printable(line) for line in report(outcome, place.path.name)]
    print("\n".join(lines))
    if found.out is not None:
        found.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if found.record:
        put_on_record(outcome, place)
    return 0 if outcome.difference is None else DIFFERS


if __name__ == "__main__":
    raise SystemExit(main())
