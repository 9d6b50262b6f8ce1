"""Refuse scripts that ranks cannot import: on one machine, each is a new process that imports the script."""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from pathlib import Path

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.data.rows import elsewhere

STARTING = "RAYTUNE_FSDP_STARTING_RANKS"
"""The variable that tells ranks, while they import the script, which process starts them, and a directory."""
_MARK = "script-called-finetune"
_AGAIN = 'calls finetune() again: put the call below `if __name__ == "__main__":`'


def check_script() -> None:
    """Refuse a script that is no file."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is not None and getattr(main, "__spec__", None) is None and not os.path.exists(file):
        raise ConfigError(
            "a script from standard input cannot start several ranks on this machine, because each imports it: save it "
            "to a file and run that, or set cluster.workers=1 or cluster.launch=ray"
        )


def starting(place: str) -> dict[str, str]:
    """Return what ranks are told in their environment while this process starts them."""
    return {STARTING: f"{os.getpid()}:{place}"}


def leave_if_imported() -> None:
    """End this process if it is a rank to be that calls `finetune` while it imports the script.

    Refuse the call while the script is imported for a function of its own, which would call without end.
    """
    if elsewhere.importing.get() or elsewhere.IMPORTING in os.environ:
        raise ConfigError(f"a run imports this file for the function in it, and the file {_AGAIN}")
    starter, _, place = os.environ.get(STARTING, "").partition(":")
    # Not another thread of the process that starts ranks, nor a command that it runs: these have the variable, too.
    if starter == str(os.getppid()) and multiprocessing.current_process().name != "MainProcess":
        with suppress(OSError):
            Path(place, _MARK).touch()
        os._exit(2)  # quietly: whoever starts the ranks says why


def check_not_called(place: str) -> None:
    """Say why ranks did not start, if the script called `finetune` in each of them."""
    if Path(place, _MARK).exists():
        raise ConfigError(f"each rank is a new process that imports your script, which {_AGAIN}") from None
