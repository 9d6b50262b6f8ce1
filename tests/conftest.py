"""Settings for all tests: offline, quiet, one thread, no GPU unless a test asks for it; and marks by folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in what a shell script starts behind it: our children would inherit that, and no Ctrl-C would end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests in tests/distributed and tests/ray by the folder that they are in."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in ("distributed", "ray"):
            item.add_marker(folder)
    # The longest work of one process first, so that the others end with it.
    items.sort(key=lambda item: (not _has_default_ports(item.nodeid), item.get_closest_marker("ray") is None))


def _has_default_ports(nodeid: str) -> bool:
    """Whether a test starts a Ray as the pages say: it takes jobs at port 52365, as every other Ray does."""
    return nodeid.startswith("tests/cluster/test_newcomer.py")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is none
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What one process is to run, with `pytest -n 2`: tests of a file share what it has made, those in tests/ray a Ray.

    Not `--dist loadgroup`: pytest-xdist 3.8 writes groups where pytest 9.2 no longer reads them, and every file's
    fixtures, and Ray, were made in both processes.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::", 1)[0]
            return "tests/ray" if path.startswith("tests/ray/") or _has_default_ports(nodeid) else path

    config.option.loadscopereorder = False  # by the number of tests, which says nothing of their time
    return ByFile(config, log)
