"""Storage that is not the same for all ranks is refused by all of them, and nothing is left there."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.lease import Lease
from raytune_fsdp.launch.shared_storage import _by_node, _Outcome, check_shared, put_token, remove_tokens
from tests.ranks import run_ranks

OWN = Path("/proc/self/cwd")
"""A path that every process sees another directory under: its own working directory."""

RULE = "All nodes must mount the same storage under the same path, writable: set run.storage to such a path"


def _refusal(run_dir: Path, patience: float = 0.3) -> str | None:
    try:
        check_shared(run_dir, patience_seconds=patience)
    except ConfigError as error:
        return str(error)
    return None


def _from_own_directories(directories: list[Path], name: str, patience: float = 0.3) -> str | None:
    import torch.distributed as dist

    node = directories[dist.get_rank()]
    os.chdir(node)
    socket.gethostname = lambda: node.name
    return _refusal(OWN / name, patience)


def _directories(root: Path, count: int) -> list[Path]:
    directories = [root / f"node-{i}" for i in range(count)]
    for directory in directories:
        directory.mkdir()
    return directories


def _everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def _the_one(messages: list[str | None]) -> str:
    assert len(set(messages)) == 1, messages
    assert messages[0] is not None
    assert "\n" not in messages[0]
    return messages[0]


@pytest.mark.parametrize("world", [1, 3])
def test_shared_storage_is_taken_and_left_clean(tmp_path: Path, world: int) -> None:
    run_dir = tmp_path / "not" / "there" / "yet"
    assert run_ranks(_refusal, world, run_dir) == [None] * world
    assert run_dir.is_dir()
    assert not list(run_dir.iterdir())


def test_storage_that_only_some_ranks_share_is_refused_by_all(tmp_path: Path) -> None:
    first, second = _directories(tmp_path, 2)
    message = _the_one(run_ranks(_from_own_directories, 4, [first, second, first, second], "runs/mine"))
    address = r"( \([\d.]+\))?"
    expected = (
        rf"run\.storage={OWN}/runs: a file written there by rank 0 on node-0{address} is not seen by ranks 1, 3 on "
        rf"node-1{address} \(No such file or directory\)\. {RULE}.+"
    )
    assert re.fullmatch(expected, message)
    assert _everything(tmp_path) == ["node-0", "node-1"]


def test_what_was_there_before_a_refusal_stays(tmp_path: Path) -> None:
    """A directory of the same name on every node is not the same directory."""
    directories = _directories(tmp_path, 2)
    for directory in directories:
        (directory / "runs" / "mine").mkdir(parents=True)
    (directories[1] / "runs" / "mine" / "metrics.jsonl").write_text("kept")
    before = _everything(tmp_path)
    assert "not seen by rank 1 on" in _the_one(run_ranks(_from_own_directories, 2, directories, "runs/mine"))
    assert _everything(tmp_path) == before


def _with_a_late_mount(directories: list[Path], after: float, patience: float) -> str | None:
    """Rank 1's storage appears under its path after some seconds."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        threading.Timer(after, os.symlink, (directories[0] / "runs", directories[1] / "runs")).start()
    return _from_own_directories(directories, "runs/mine", patience)


def test_a_file_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    directories = _directories(tmp_path, 2)
    started = time.monotonic()
    assert run_ranks(_with_a_late_mount, 2, directories, 1.0, 60.0) == [None, None]
    assert time.monotonic() - started < 50
    assert _everything(directories[0]) == ["runs", "runs/mine"]


def test_a_file_that_shows_too_late_is_not(tmp_path: Path) -> None:
    directories = _directories(tmp_path, 2)
    assert "not seen by rank 1" in _the_one(run_ranks(_with_a_late_mount, 2, directories, 30.0, 0.3))
    assert _everything(directories[0]) == []


def _with_other_content(directories: list[Path]) -> str | None:
    """Rank 1 has files of the same names as rank 0, which are not the same files."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        threading.Thread(target=_imitate, args=directories, daemon=True).start()
    return _from_own_directories(directories, "runs/mine", 2.0)


def _imitate(original: Path, copy: Path) -> None:
    deadline = time.monotonic() + 30
    # The first by name: the file that rank 0 tries to write itself is called the same and -0.
    while not (found := sorted(original.glob("runs/mine/.shared-*"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    (copy / "runs" / "mine").mkdir(parents=True)
    (copy / "runs" / "mine" / found[0].name).write_text("another run's")


def test_the_same_names_with_other_content_are_not_the_same_storage(tmp_path: Path) -> None:
    directories = _directories(tmp_path, 2)
    message = _the_one(run_ranks(_with_other_content, 2, directories))
    assert "not seen by rank 1" in message
    assert "(the file has different content)" in message


@pytest.mark.parametrize("world", [1, 3])
def test_storage_that_rank_0_cannot_write_is_refused_by_all(tmp_path: Path, world: int) -> None:
    """Below a regular file nobody can write, root neither."""
    (tmp_path / "file").write_text("")
    message = _the_one(run_ranks(_refusal, world, tmp_path / "file" / "runs" / "mine"))
    assert message.startswith(f"run.storage={tmp_path}/file/runs: rank 0 on {socket.gethostname()}")
    assert f"cannot write to {tmp_path}/file/runs/mine (Not a directory). " in message
    assert (RULE in message) == (world > 1)
    assert "run.storage to" in message
    assert _everything(tmp_path) == ["file"]


def test_a_path_that_cannot_be_made_leaves_no_half_of_it(tmp_path: Path) -> None:
    too_long = "x" * 300
    assert "(File name too long)" in _the_one(run_ranks(_refusal, 2, tmp_path / "made" / "first" / too_long))
    assert _everything(tmp_path) == []


def _where_one_cannot_write(directories: list[Path]) -> str | None:
    """Rank 1 sees rank 0's directory and may write no file there that is larger than nothing."""
    import resource
    import signal

    import torch.distributed as dist

    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    return _from_own_directories(directories, "runs/mine")


def test_storage_that_one_rank_cannot_write_is_refused_by_all(tmp_path: Path) -> None:
    directory = _directories(tmp_path, 1)[0]
    message = _the_one(run_ranks(_where_one_cannot_write, 3, [directory] * 3))
    assert f"{OWN}/runs: it cannot be written by rank 1 on node-0" in message
    assert "(File too large). " in message
    assert RULE in message
    assert _everything(tmp_path) == ["node-0"]


def test_a_message_does_not_name_a_hundred_nodes() -> None:
    found = [_Outcome(rank, f"node-{rank // 2}", not_seen="No such file or directory") for rank in range(2, 200)]
    text = _by_node([(each.not_seen, each) for each in found])
    assert text.startswith("ranks 2, 3 on node-1 (No such file or directory), ranks 4, 5 on node-2 (")
    assert text.endswith(", ranks 8, 9 on node-4 (No such file or directory), and 95 more like these")


def test_what_killed_ranks_have_left_is_removed_by_the_command_that_has_the_run(tmp_path: Path) -> None:
    """And by no other: the files may be those of ranks that are looking."""
    left = put_token(tmp_path / "run", "rank 0").path
    lock = left.with_name("lock")
    lock.write_text('{"token": "theirs"}')
    remove_tokens(left.parent, None)
    remove_tokens(left.parent, Lease(lock, "ours"))
    assert left.exists()
    remove_tokens(left.parent, Lease(lock, "theirs"))
    assert [*left.parent.iterdir()] == [lock]
