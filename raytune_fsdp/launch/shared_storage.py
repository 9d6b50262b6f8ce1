"""Check that `run.storage` is the same storage for every rank, by writing there before anything else does."""

from __future__ import annotations

import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from raytune_fsdp.base.durable import write_durably
from raytune_fsdp.base.errors import ConfigError, in_one_line
from raytune_fsdp.base.lease import Lease

_POLL_SECONDS = 0.2  # NFS may show other nodes' files only seconds later
_PREFIX = ".shared-"
_SHOWN = 4
"""Groups of ranks that a message names before it says how many more there are."""

_RULE = (
    "All nodes must mount the same storage under the same path, writable: set run.storage to such a path, or keep all "
    "ranks on one node (cluster.placement=strict_pack)"
)
_RULE_ALONE = "Set run.storage to a path that can be written there"


def check_shared(run_dir: Path, *, patience_seconds: float = 10.0) -> None:
    """Refuse storage that is not the same, and writable, for all ranks. Collective.

    Every rank raises the same error, and none waits for one that failed. A refused run leaves nothing behind.
    """
    # Not at the top: a rank imports this file to unpickle its token, and must report to the driver before it imports
    # torch and transformers, which takes seconds. Nodes that only look for a token (`doctor`) never import them.
    import torch.distributed as dist

    from raytune_fsdp.base.collectives import on_rank0

    token = on_rank0(lambda: put_token(run_dir, "rank 0"), what="write to the run's storage")
    everyone: list[_Outcome | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _look(token, patience_seconds, dist.get_rank()))
    on_rank0(lambda: _judge(token, [each for each in everyone if each]), what="write to the run's storage")


def check_seen(token: Token, *, by: str = "rank 0", patience_seconds: float = 10.0) -> None:
    """Refuse storage if this process, called `by` in the message, does not see the token that another process left."""
    reason = _wait_for(token, patience_seconds)
    if reason is not None:
        raise ConfigError(
            f"run.storage={token.path.parent.parent}: a file written there by {token.who} on {token.node} is not "
            f"seen by {by} on {_node()} ({reason}). {_RULE}"
        )


@dataclass(frozen=True, slots=True)
class Token:
    """A small file that other processes look for."""

    path: Path
    text: str
    who: str
    node: str
    made: tuple[Path, ...]
    """Directories that were not there before, innermost first."""

    def remove(self, *, refused: bool) -> None:
        """Remove the file; if the run was refused, also the directories made for it, unless they hold other files."""
        with suppress(OSError):
            self.path.unlink()
        for directory in self.made if refused else ():
            with suppress(OSError):
                directory.rmdir()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank found: why it does not see the token, and why it cannot write; None if it does or can."""

    rank: int
    node: str
    not_seen: str | None = None
    not_written: str | None = None


def put_token(run_dir: Path, who: str) -> Token:
    """Make the run's directory and write a token there. `who` names the writer in messages."""
    missing: list[Path] = []
    with suppress(OSError):
        missing += [each for each in (run_dir, *run_dir.parents) if not each.exists()]
    token = Token(run_dir / f"{_PREFIX}{uuid.uuid4().hex}", uuid.uuid4().hex, who, _node(), tuple(missing))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_durably(token.path, token.text)
    except OSError as error:
        token.remove(refused=True)
        raise ConfigError(
            f"run.storage={run_dir.parent}: {who} on {_node()} cannot write to {run_dir} ({_why(error)}). {_rule()}"
        ) from error
    return token


def remove_tokens(run_dir: Path, lease: Lease | None) -> None:
    """Remove what a command or ranks that were killed have left. `lease`: of this command, if the run is its own."""
    for left in run_dir.glob(f"{_PREFIX}*") if lease is not None and not lease.lost() else ():
        with suppress(OSError):
            left.unlink()


def _look(token: Token, patience_seconds: float, rank: int) -> _Outcome:
    node = _node()
    reason = _wait_for(token, patience_seconds)
    if reason is not None:
        return _Outcome(rank, node, not_seen=reason)
    own = token.path.with_name(f"{token.path.name}-{rank}")
    try:
        try:
            write_durably(own, token.text)
        finally:
            own.unlink(missing_ok=True)
    except OSError as error:
        return _Outcome(rank, node, not_written=_why(error))
    return _Outcome(rank, node)


def _wait_for(token: Token, patience_seconds: float) -> str | None:
    """Wait for the token; return why this process does not see it, None if it does."""
    deadline = time.monotonic() + patience_seconds
    while (reason := _missing(token)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)  # a network file system shows other nodes' files late
    return reason


def _missing(token: Token) -> str | None:
    try:
        return None if token.path.read_bytes() == token.text.encode() else "the file has different content"
    except OSError as error:
        return _why(error)


def _judge(token: Token, everyone: Sequence[_Outcome]) -> None:
    """Remove the token, and refuse if any rank complained. For rank 0, after all have looked."""
    unseen = _by_node([(each.not_seen, each) for each in everyone])
    unwritten = _by_node([(each.not_written, each) for each in everyone])
    token.remove(refused=bool(unseen or unwritten))
    problems = [f"a file written there by rank 0 on {token.node} is not seen by {unseen}"] if unseen else []
    problems += [f"it cannot be written by {unwritten}"] if unwritten else []
    if problems:
        raise ConfigError(f"run.storage={token.path.parent.parent}: {'; '.join(problems)}. {_rule()}")


def _by_node(found: Sequence[tuple[str | None, _Outcome]]) -> str:
    """Group the ranks that have a reason: `ranks 2, 3 on node-b (why), rank 4 on node-c (why)`."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for reason, outcome in found:
        if reason is not None:
            ranks.setdefault((outcome.node, reason), []).append(str(outcome.rank))
    groups = [
        f"rank{'s' if len(each) > 1 else ''} {', '.join(each)} on {node} ({reason})"
        for (node, reason), each in ranks.items()
    ]
    more = [f"and {len(groups) - _SHOWN} more like these"] if len(groups) > _SHOWN else []
    return ", ".join([*groups[:_SHOWN], *more])


def _rule() -> str:
    dist = sys.modules.get("torch.distributed")  # not imported here only to say this
    return _RULE if dist is None or not dist.is_initialized() or dist.get_world_size() > 1 else _RULE_ALONE


def _node() -> str:
    """Return this node's host name, and the address by which Ray calls it."""
    name = socket.gethostname()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("192.0.2.1", 9))  # sends nothing: it only picks the address that leads out of here
        return f"{name} ({route.getsockname()[0]})"
    return name


def _why(error: OSError) -> str:
    # Without the path where possible: each rank writes a file of its own, and equal reasons are grouped.
    return error.strerror or in_one_line(error)
