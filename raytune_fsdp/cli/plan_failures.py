"""`raytune-fsdp plan`: how often to save, for how often something fails."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from raytune_fsdp.cli.common import ConfigParser
from raytune_fsdp.plan.failures import GPU_HOURS, RECOVERY_SECONDS, STALL_SECONDS, WRITE_SECONDS, Failures

if TYPE_CHECKING:
    from raytune_fsdp.config import FinetuneConfig

_AUTO_SECONDS = 1800.0
"""The interval of `checkpoint.every: auto`, as long as saves hold up no more than 2 % of the time."""


def add_flags(parser: ConfigParser) -> None:
    parser.add_argument(
        "--gpu-hours-per-failure", type=float, metavar="N", default=GPU_HOURS,
        help=f"how often something fails (default: {GPU_HOURS:,.0f}, Llama 3's; spot machines fail more often)",
    )  # fmt: skip
    parser.add_argument(
        "--recovery-seconds",
        type=float,
        metavar="S",
        default=RECOVERY_SECONDS,
        help="from a failure to the next step, as the report of a run says it (default: %(default)g)",
    )
    parser.add_argument(
        "--stall-seconds", type=float, metavar="S", default=STALL_SECONDS,
        help="how long a save holds training up (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--save-seconds", type=float, metavar="S", default=WRITE_SECONDS,
        help="how long a save takes, as a run says it (default: %(default)g)",
    )  # fmt: skip


def check(parser: ConfigParser, found: Namespace) -> None:
    if not 1e-6 <= (hours := found.gpu_hours_per_failure) <= 1e12:
        parser.error(f"--gpu-hours-per-failure {hours:g} must be between 0.000001 and 1e12")
    for flag in ("recovery_seconds", "stall_seconds"):
        if not 0 <= (value := getattr(found, flag)) < math.inf:
            parser.error(f"--{flag.replace('_', '-')} {value:g} must be 0 or more")
    if not 1e-6 <= (seconds := found.save_seconds) < math.inf:
        parser.error(f"--save-seconds {seconds:g} must be 0.000001 or more")


def failures_of(found: Namespace, gpus: int) -> Failures:
    """Return what was asked about. `gpus`: one for each rank."""
    return Failures(
        gpus=gpus, gpu_hours=found.gpu_hours_per_failure, stall=found.stall_seconds, write=found.save_seconds,
        recovery=found.recovery_seconds,
    )  # fmt: skip


def in_words(config: FinetuneConfig, failures: Failures) -> str:
    """Return a row of the plan."""
    from raytune_fsdp.record.console import took

    best = _best(failures)
    chosen = _chosen_seconds(config)
    instead = "" if chosen is None else f" ({config.checkpoint.every}: {failures.share(chosen):.2%})"
    return (
        f"{'failures':10} one in {failures.gpu_hours:,.0f} GPU hours, here in {took(failures.apart)}: "
        f"checkpoint.every={{minutes: {best / 60:g}}} loses least, {failures.share(best):.2%} of the time trains steps "
        f"that stay{instead}"
    )


def as_data(config: FinetuneConfig, failures: Failures) -> dict[str, Any]:
    best, chosen = _best(failures), _chosen_seconds(config)
    return {
        "gpu_hours_per_failure": failures.gpu_hours,
        "seconds_between_failures": failures.apart,
        "recovery_seconds": failures.recovery,
        "best_save_every_seconds": best,
        "productive_share": failures.share(best),
        "productive_share_as_configured": None if chosen is None else failures.share(chosen),
    }


def _best(failures: Failures) -> float:
    """Return the best interval in whole minutes, if it has any: more digits than that would change nothing."""
    best = failures.best_interval()
    return 60.0 * round(best / 60) if best >= 90 else best


def _chosen_seconds(config: FinetuneConfig) -> float | None:
    """Return the interval that a config asks for; None if it counts steps."""
    every = config.checkpoint.every
    if every == "auto":
        return _AUTO_SECONDS
    minutes = getattr(every, "minutes", None)
    return None if minutes is None else 60.0 * minutes
