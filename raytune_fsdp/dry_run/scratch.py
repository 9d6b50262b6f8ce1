"""A directory that is removed at the end of a block, whatever happens to this process.

A process of its own waits for that end: a rank that runs out of host memory is killed, torchrun kills rank 0 where it
hangs in a collective because another rank has failed, and a killed process removes nothing. That process runs this
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
"""For how long what other processes still write is removed again: ranks end some seconds after the command does."""
_LOOK_SECONDS = 0.5


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """An empty directory in `parent`, which is made, and removed again, if it is not there."""
    from raytune_fsdp.errors import ConfigError

    missing = [each for each in (parent, *parent.parents) if not each.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        directory = tempfile.mkdtemp(prefix=prefix, dir=parent)
    except OSError as error:
        remove([], missing)
        raise ConfigError(f"run.storage: {parent}: {error.strerror}; name a directory that can be written") from None
    command = [sys.executable, "-I", __file__, directory, *map(str, missing)]
    # In a session of its own, where neither Ctrl-C nor the end of a process group reaches it.
    remover = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield Path(directory)
    finally:
        remove([directory], missing)
        assert remover.stdin is not None
        remover.stdin.close()  # which also happens when this process ends
        remover.wait()


def remove(directories: Sequence[str], missing: Sequence[Path]) -> None:
    """Remove directories with all that is in them, and those that were `missing`, the innermost first, if empty."""
    deadline = time.monotonic() + _SECONDS
    for directory in directories:
        while os.path.lexists(directory):
            shutil.rmtree(directory, ignore_errors=True)  # NFS keeps a file that is open somewhere under another name
            if not os.path.lexists(directory) or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
    for path in missing:
        with suppress(OSError):
            path.rmdir()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove([sys.argv[1]], [Path(each) for each in sys.argv[2:]])
