"""The cheap part of the checks, beside the start of every run: what is wrong with this machine is said, and no more."""

from __future__ import annotations

import logging

from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.tools.doctor import node
from raytune_fsdp.tools.doctor.finding import Finding
from raytune_fsdp.tools.doctor.machines import check_limits, check_versions, own_requirements

logger = logging.getLogger(__name__)


def look_around() -> None:
    """Begin to look, and warn of what is found. Waits for nothing: a run does not start later for it."""
    in_thread(_look, "look-around")


def _look() -> None:
    for finding in of_this_machine():
        if finding.status != "ok":
            logger.warning("%s; to mend it: %s", finding.found, finding.fix)


def of_this_machine() -> list[Finding]:
    """Versions, `/dev/shm` and open files: known without a cluster, torch or a driver."""
    facts = node.look(try_torch=False)
    return [*check_versions(facts, own_requirements()), *check_limits(facts, "this machine")]
