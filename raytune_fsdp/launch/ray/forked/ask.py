"""Ask the template of this node for a fork that runs a command line of Python; run it here if there is none.

    python -IS ask.py SOCKET SCRIPT [ARGUMENT ...]

Ray takes this process for its worker until the fork has said which process that is. It ends with the fork. It imports
nothing of ours, as it is to start in milliseconds.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys

ANSWER_SECONDS = 10.0
"""A template may still be busy with its imports, which would take this process as long. Ray waits for a worker for a
minute, and on a machine that is so busy Python needs the rest of it."""


def main(template: str, argv: list[str]) -> None:
    pid = None
    try:
        asked = json.dumps(wanted(argv)).encode()  # first: a template that is connected to waits for it
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(template)
            socket.send_fds(connection, [len(asked).to_bytes(4, "big")], [0, 1, 2])
            connection.sendall(asked)
            pid = json.loads(connection.makefile("rb").readline() or b"{}").get("pid")
            if pid is not None:
                try:
                    connection.sendall(b"go")  # until then the fork waits: who gives up here will be the worker itself
                except OSError:  # it has ended, and so has the template
                    pid = None
                    raise
                # While the connection lives, so does the fork: Ray may end either of the two. The end of the
                # connection says nothing, since a template may end before its forks.
                select.select([os.pidfd_open(pid)], [], [])
    except ProcessLookupError:
        pass  # the fork has ended already
    except (OSError, ValueError):
        if pid is not None:
            raise  # never a second worker in the place of the first
    if pid is None:
        os.execv(sys.executable, [sys.executable, *argv])


def wanted(argv: list[str]) -> dict[str, object]:
    """Return everything that a process inherits, as this one has it from Ray."""
    os.umask(mask := os.umask(0o077))
    return {
        "argv": argv,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": mask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "limits": {name: list(resource.getrlimit(getattr(resource, name))) for name in LIMITS},
        "groups": groups(),
        "oom": content("/proc/self/oom_score_adj"),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "ignored": sorted(each for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN),
    }


LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def groups() -> str:
    """Return the control groups and namespaces of this process: a container may share the directory of a template."""
    names = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
    return content("/proc/self/cgroup") + " ".join(os.readlink(f"/proc/self/ns/{name}") for name in names)


def content(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
