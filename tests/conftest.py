"""Settings for all tests: offline, quiet, one thread, no GPU unless a test asks for it; and marks by folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests in tests/distributed and tests/ray by the folder that they are in, and what one process is to run."""
    for item in items:
        place = item.path.relative_to(Path(__file__).parent)
        folder = place.parts[0]
        if folder in ("distributed", "ray"):
            item.add_marker(folder)
        # With `pytest -n 2`: tests of a file share what it has made, and those in tests/ray share a Ray.
        item.add_marker(pytest.mark.xdist_group("ray" if folder == "ray" else str(place)))
