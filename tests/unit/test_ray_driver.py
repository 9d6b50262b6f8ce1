"""How a command ends where its Ray does not let it. No Ray is started."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("mlflow")

from raytune_fsdp.base.errors import TrainingError
from raytune_fsdp.launch.ray import driver
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record.tracker import RunStart
from tests.runs import make_config


def test_mlflow_does_not_hold_up_a_command_whose_head_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may have gone with the head, and Ray ends this process seconds later."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = make_config(tmp_path, tracking={"mlflow": {"enabled": True, "uri": uri}})
        prepared: Any = SimpleNamespace(place=RunDir.of(config))
        prepared.place.path.mkdir(parents=True)
        prepared.place.mlflow_id.write_text("a" * 32)
        monkeypatch.setattr(driver, "run_start", lambda *_: RunStart(name="demo", attempt=1, total_steps=2))
        attempts: Any = SimpleNamespace(number=1, last_step=lambda: 0)
        session: Any = SimpleNamespace(answers=lambda: False)
        said, nothing = list[str](), SimpleNamespace()
        began = time.monotonic()
        driver._close_mlflow(config, prepared, nothing, attempts, session, TrainingError("gone"), said.append)  # type: ignore[arg-type]
        assert time.monotonic() - began < 8
    assert len(said) == 1 and "the same command sends the rest" in said[0]
