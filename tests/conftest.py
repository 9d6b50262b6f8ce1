"""Settings for all tests: offline, quiet, one thread, no GPU unless a test asks for it; and marks by folder."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.launch.importing import importing

with suppress(ModuleNotFoundError):  # a machine that one has for minutes runs tests/gpu with what is there
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)  # of 200 ms: a busy machine stops for longer now and then
    settings.load_profile("any machine")

# The key of whoever runs the tests stays theirs.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="raytune-fsdp-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, by the first test that multiplies on a GPU

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in what a shell script starts behind it: our children would inherit that, and no Ctrl-C would end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_SECONDS = Path(__file__).with_name("seconds.json")
"""How long unit tests took, those that `--quick` leaves out: their slowest case."""
_QUICK = 0.2
_took: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help=f"leave out tests of {_QUICK} s, and all but two cases")
    parser.addoption(
        "--write-seconds", action="store_true", help=f"write down in {_SECONDS.name} how long unit tests take"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Look for no garbage while all tests and their libraries are imported, and in none of that later."""
    with importing(alone=True):
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests in tests/distributed and tests/ray by the folder that they are in; keep the quick ones (`--quick`)."""
    if config.getoption("--quick"):
        _keep_quick_ones(config, items)
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in ("distributed", "ray"):
            item.add_marker(folder)
    # The longest work of one process first, so that the others end with it. What starts a Ray of its own goes before
    # what shares one: each of them has the machine for itself.
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(_DEFAULT_PORTS),
            not item.nodeid.startswith(_CLUSTERS),
            "cluster" in getattr(item, "fixturenames", ()),
        )
    )


def _keep_quick_ones(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep two cases of each test that is not known to take longer."""
    known = json.loads(_SECONDS.read_text())
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        test = _test_of(item.nodeid)
        quick = test not in known and not item.get_closest_marker("slow") and seen[test] < 2
        seen[test] += quick
        (kept if quick else left_out).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def _test_of(nodeid: str) -> str:
    return nodeid.split("[", 1)[0].removeprefix("tests/")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how long a test took, its fixtures included: with pytest-xdist, in the process that starts others."""
    _took[report.nodeid] = _took.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down what `--quick` goes by, for the unit tests that have run (`--write-seconds`)."""
    if not session.config.getoption("--write-seconds") or hasattr(session.config, "workerinput"):
        return
    took: dict[str, float] = {}
    for nodeid, seconds in _took.items():
        if not nodeid.startswith("tests/unit/"):
            continue
        took[_test_of(nodeid)] = max(took.get(_test_of(nodeid), 0.0), seconds)
    known = {test: seconds for test, seconds in json.loads(_SECONDS.read_text()).items() if test not in took}
    known |= {test: round(seconds, 1) for test, seconds in took.items() if seconds >= _QUICK}
    _SECONDS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


_DEFAULT_PORTS = "tests/cluster/test_newcomer.py"
"""Starts a Ray as the pages say: it takes jobs at port 52365, as every other Ray does."""
_CLUSTERS = (
    "tests/ray/", _DEFAULT_PORTS,
    *(f"tests/cluster/test_{each}.py" for each in ("hub", "network", "skypilot", "slurm")),
)  # fmt: skip
"""Start whole clusters. Two of them beside each other on two cores: nodes that are alive do not answer in time."""


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is none
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What one process is to run, with `pytest -n 2`: tests of a file share what it has made, those in tests/ray a Ray,
    and clusters come one after the other.

    Not `--dist loadgroup`: pytest-xdist 3.8 writes groups where pytest 9.2 no longer reads them, and every file's
    fixtures, and Ray, were made in both processes.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if nodeid.startswith(_CLUSTERS) else nodeid.split("::", 1)[0]

    config.option.loadscopereorder = False  # by the number of tests, which says nothing of their time
    return ByFile(config, log)
