"""What a process inherits from the one that starts it, and how a fork becomes what was asked for."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

SOCKET, LAUNCHER, ASK, LOG = "socket", "python", "ask.py", "log"
"""Files in the directory of a template."""
DIRECTORIES = "raytune-forks-"
"""How the names of these directories begin."""
OF_SHELLS = {"PS1", "PWD", "OLDPWD", "SHLVL", "_", "SPT_NOENV"}
"""Variables that differ between processes, and that nothing reads. SPT_NOENV is set by setproctitle in Ray's own."""
_LATE = ("RAY_", "NCCL_", "FLASH_ATTENTION_DETERMINISTIC")
"""How variables begin that are read after the fork: Ray is imported there, NCCL reads its own when ranks join, and
transformers that one in each pass."""
OMP = "OMP_NUM_THREADS"
"""torch and OpenBLAS read this when they are imported; Ray sets it afterwards, in the worker, unless a user has."""


@dataclass(slots=True, kw_only=True)
class Wanted:
    """What a new process is to be."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    umask: int
    nice: int
    cpus: list[int]
    limits: dict[str, tuple[int, int]]
    groups: str
    """Its control groups, as in /proc/self/cgroup, and its namespaces."""
    oom: str
    """How readily the kernel ends it when memory runs out."""
    blocked: list[int]
    ignored: list[int]
    """Signals. Ray blocks SIGINT for all that it starts."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Variables that imports have set."""


def worker_of_ray() -> Path:
    """Return the program that Ray runs in its workers. Does not import Ray."""
    found = find_spec("ray")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "_private" / "workers" / "default_worker.py"


def of_process(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a module may have read when it was imported."""
    return {name: value for name, value in env.items() if not name.startswith(_LATE) and name not in OF_SHELLS}


def is_relative(env: Mapping[str, str]) -> bool:
    """Return whether what Python imports depends on the directory that it is started in."""
    return any(not os.path.isabs(place) for place in (env.get("PYTHONPATH") or "/").split(os.pathsep))


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Name the variables that are not the same in both."""
    return ", ".join(sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)))


def run(wanted: Wanted, files: Sequence[int]) -> None:
    """Be the process that is wanted: the caller is a fork without anything open, and ends when this returns.

    Where that cannot be, start Python in its place.
    """
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    try:
        _take_on(wanted)
    except (OSError, ValueError):
        os.execve(sys.executable, [sys.executable, *wanted.argv], wanted.env)
    sys.argv = list(wanted.argv)
    runpy.run_path(wanted.argv[0], run_name="__main__")


def _take_on(wanted: Wanted) -> None:
    import torch

    os.setpgid(0, 0)  # Ray ends the process group of a worker that has ended: the templates must not be in it
    for name, (soft, hard) in wanted.limits.items():  # first: Python that starts in its place has them, too
        if resource.getrlimit(getattr(resource, name)) != (soft, hard):
            resource.setrlimit(getattr(resource, name), (soft, hard))
    os.environ.clear()
    os.environ.update({**wanted.added, **wanted.env})
    os.chdir(wanted.cwd)
    os.umask(wanted.umask)
    os.setpriority(os.PRIO_PROCESS, 0, wanted.nice)
    os.sched_setaffinity(0, wanted.cpus)
    with suppress(OSError):  # lowering it takes a right that not everybody has
        Path("/proc/self/oom_score_adj").write_text(wanted.oom)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if (signal.getsignal(number) == signal.SIG_IGN) != (number in wanted.ignored):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in wanted.ignored else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted.blocked)
    if torch.cuda._is_in_bad_fork():  # last: what Python then is started with is as it was asked for, too
        raise OSError("something that was imported has used a GPU, which a fork then cannot")
    torch.default_generator.seed()  # as for every process; Python itself does that in a fork
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
