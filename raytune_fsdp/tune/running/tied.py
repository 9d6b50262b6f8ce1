"""Run a command that the kernel asks to stop (SIGTERM) when the process that has started it is gone.

    python -I -S tied.py PARENT COMMAND [ARGUMENT ...]

A sweep's command that was killed says nothing to its trials any more, and they must not go on beside the next one's.
This file is run by its path and imports nothing of the package: what it runs takes its place.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
INTERRUPTED = 130


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":  # elsewhere a trial trains to the end of its stretch, and the next command waits for it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # stays when another program is executed
    if os.getppid() != int(parent):  # it has gone before the kernel was told
        sys.exit(INTERRUPTED)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
