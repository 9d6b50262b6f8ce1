"""Ten minutes of chaos, always the same: nobody does anything, and the run is the one of undisturbed ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.record.copies.mlflow import mlflow_installed
from tests.chaos import judge, wreak

pytestmark = pytest.mark.skipif(not mlflow_installed(), reason="MLflow is not installed")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ten_minutes_of_chaos(tmp_path: Path) -> None:
    found = wreak(tmp_path, 600, seed=10)
    assert judge(found) == []
    assert len(found["faults"]) >= 6
