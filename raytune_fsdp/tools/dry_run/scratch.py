"""Make a directory that is removed at the end of a `with` statement, whatever happens to this process.

Another process waits for that end: a rank that runs out of host memory is killed, torchrun kills rank 0 where it hangs
in a collective because another rank has failed, and a killed process removes nothing. That other process runs this
file, so only the standard library is imported at the top.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_SECONDS = 30.0
"""How long removing a directory is tried again, and how long a directory must stay away: ranks that are still running
when the command ends have threads that build the next window, and make its directory again."""
_MOST_SECONDS = 600.0
_LOOK_SECONDS = 0.5


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield an empty directory in `parent`, which is made, and removed again, if it does not exist."""
    from raytune_fsdp.base.errors import ConfigError

    missing = [each for each in (parent, *parent.parents) if not each.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        _remove_empty(missing)
        raise ConfigError(f"run.storage: {parent}: {error.strerror}; name a directory that can be written") from None
    command = [sys.executable, "-I", __file__, str(directory), *map(str, missing)]
    # In a new session, where neither Ctrl-C nor the end of a process group reaches it.
    remover = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    _removers.append(remover)
    try:
        yield directory
    finally:
        remove(directory, missing)
        assert remover.stdin is not None
        remover.stdin.close()  # as the end of this process would; nobody waits for the remover


_removers: list[subprocess.Popen[bytes]] = []
"""Kept so that Python does not warn of processes that are still running."""


def remove(directory: Path, missing: Sequence[Path], *, stay_seconds: float = 0.0) -> None:
    """Remove a directory with all that is in it, until it has stayed away for `stay_seconds`.

    Also remove those that were `missing` before, the innermost first, if they are empty.
    """
    began = seen = time.monotonic()
    while True:
        if os.path.lexists(directory):
            seen = time.monotonic()
            shutil.rmtree(directory, ignore_errors=True)  # NFS keeps a file that is open somewhere under another name
            _remove_empty(missing)  # not later: somebody else may be making them for files of their own
        limit = _MOST_SECONDS if stay_seconds else _SECONDS
        gone = not os.path.lexists(directory) and time.monotonic() >= seen + stay_seconds
        if gone or time.monotonic() > began + limit:
            return
        time.sleep(_LOOK_SECONDS)


def _remove_empty(directories: Sequence[Path]) -> None:
    for path in directories:
        with suppress(OSError):
            path.rmdir()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]], stay_seconds=_SECONDS)
