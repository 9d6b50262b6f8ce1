"""Copies of a model's files on machines that look alike: whose they are shows in the machine's name alone."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.model.directory.files import WeightFiles
from raytune_fsdp.run.same_files import _marks_of_all, digests
from tests.ranks import run_ranks

_NEWNS, _NEWUTS, _PRIVATE = 0x20000, 0x4000000, 0x4000 | 0x40000
FILES = {"a": "1.safetensors", "b": "2.safetensors"}


def _machine(directory: str, name: str, content: str) -> WeightFiles:
    """Make this rank a machine of its own: a name, and a disk at `directory` whose files differ in their bytes only."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_NEWNS | _NEWUTS) == 0
    assert libc.mount(None, b"/", None, _PRIVATE, None) == 0, "or the other rank would see the disk"
    assert libc.mount(b"disk", directory.encode(), b"tmpfs", 0, None) == 0
    socket.sethostname(name)
    files = WeightFiles(directory=Path(directory), file_of=dict(FILES))
    for each in FILES.values():
        (files.directory / each).write_text(content)
        os.utime(files.directory / each, ns=(0, 10**18))
    return files


def _look(directory: str, names: list[str], contents: list[str]) -> tuple[int, dict[str, str] | str]:
    """How many copies there are, and their digests or what is wrong with them."""
    files = _machine(directory, names[dist.get_rank()], contents[dist.get_rank()])
    marks = _marks_of_all(files)
    assert len({tuple(each[:-1] for each in mark) for mark in marks}) == 1, "but for the machine they look alike"
    try:
        return len(set(marks)), digests(files, alone=False)
    except ModelError as error:
        return len(set(marks)), str(error)


def _may_be_machines() -> bool:
    """Whether processes of this user may have names and disks of their own."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ctypes.CDLL(None).unshare(_NEWNS | _NEWUTS) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_the_same_path_on_two_machines_is_two_copies(tmp_path: Path) -> None:
    if not _may_be_machines():
        pytest.skip("only root may give a process another machine's name and disks")
    for copies, said in run_ranks(_look, 2, str(tmp_path), ["one", "other"], ["same", "not!"]):
        assert copies == 2
        assert "1.safetensors is not the same file for rank 1 as for rank 0" in said
    (one, first), (_, second) = run_ranks(_look, 2, str(tmp_path), ["one", "other"], ["same", "same"])
    assert one == 2 and first == second and set(first) == set(FILES.values())
    (alone, whole), _ = run_ranks(_look, 2, str(tmp_path), ["one", "one"], ["same", "same"])
    assert alone == 1 and whole == first, "of one machine each rank hashes a part"
