"""What a person can do next with a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.report.summary import next_commands


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("sqlite:////runs/mlflow.db", "mlflow ui --backend-store-uri sqlite:////runs/mlflow.db"),
        ("sqlite:////my runs/mlflow.db", "mlflow ui --backend-store-uri 'sqlite:////my runs/mlflow.db'"),
        ("http://mlflow.internal:5000", "  http://mlflow.internal:5000   (MLflow)"),
        ("https://alice:hunter2@mlflow.internal/x", "  https://mlflow.internal/x   (MLflow)"),
        ("databricks://profile", "  databricks://profile   (MLflow)"),
        (
            "postgresql://alice:hunter2@db/mlflow",
            "mlflow ui --backend-store-uri postgresql://db/mlflow   (with the database's user and password)",
        ),
    ],
)
def test_a_tracking_server_is_a_page_and_a_database_a_command(uri: str, shown: str) -> None:
    text = next_commands(Path("/runs/x"), export=None, mlflow_uri=uri)
    (line,) = [line for line in text.splitlines() if "mlflow" in line.lower()] or [shown]
    assert line.endswith(shown) and "hunter2" not in text and text.count("--backend-store-uri") == shown.count("--back")
