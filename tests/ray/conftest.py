"""One Ray for all tests in this directory: it takes many seconds to start."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress

import pytest

CPUS = 4


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """A Ray of this machine with `CPUS` logical CPUs; its processes and files are gone afterwards.

    Not of the session: it would take its share of two cores until the last test of all.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home directory
    import ray

    directory = tempfile.mkdtemp(prefix="ray-")  # short: the names of sockets have a limit
    for last in (False, False, True):
        try:
            ray.init(
                num_cpus=CPUS,
                include_dashboard=False,
                object_store_memory=256 << 20,
                _temp_dir=directory,
                logging_level="ERROR",
                log_to_driver=False,
            )
            break
        except Exception as error:
            if last or "timed out" not in str(error):  # Ray gives itself 30 seconds, on a busy machine too
                raise
            ray.shutdown()
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A test that fails must not leave a run of 100,000 steps behind."""
    from tests.ray.jobs import STARTED

    yield
    while STARTED:
        command = STARTED.pop()
        if command.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                command.end(0.1)
