"""One command at a time works on a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.launch.run_lock import is_locked, locked
from raytune_fsdp.rundir import RunDir

ROOT = Path(__file__).parents[2]
HOLD = """
import os, sys, time
from raytune_fsdp.launch.run_lock import locked
from tests.unit.test_run_lock import config_of
from pathlib import Path
with locked(config_of(Path(sys.argv[1]))):
    if os.fork() == 0:  # a child that outlives its parent, as a daemon would
        print(os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    time.sleep(60)
"""


def config_of(directory: Path) -> FinetuneConfig:
    return FinetuneConfig.model_validate(
        {
            "run": {"name": "mine", "storage": str(directory / "runs")},
            "model": {"path": "x"},
            "data": {"train": [{"path": "x.jsonl"}], "seq_len": 8},
            "train": {"global_batch": 1, "max_steps": 1},
        }
    )


def test_a_second_start_is_refused_by_name_until_the_first_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    with locked(config):
        assert is_locked(place)
        assert json.loads(place.lock.read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError) as refused, locked(config):
            pass
        message = str(refused.value)
        assert message.startswith(f"run.name=mine: another command works on {place.path}: process {os.getpid()} on ")
        assert ", since 20" in message and "another run.name" in message and "\n" not in message
        assert message.endswith(f"if its machine is lost, remove {place.lock}")
        assert is_locked(place), "a refusal does not release it"
    assert not is_locked(place)
    assert not (tmp_path / "runs").exists(), "a refused run leaves nothing behind"
    with locked(config):
        place.lock.unlink()  # as the refusal advises for a lost machine; and another command has begun
        place.lock.touch()
    assert place.lock.exists(), "the other's"
    place.lock.unlink()
    with locked(config):
        (place.path / "events.jsonl").touch()
    assert [path.name for path in place.path.iterdir()] == ["events.jsonl"]


def test_a_crash_releases_it_also_where_a_fork_lives_on(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        config = config_of(tmp_path)
        with pytest.raises(ConfigError, match=f"process {holder.pid} on "), locked(config):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # it is there
        with locked(config):
            assert is_locked(RunDir.of(config))
    finally:
        for pid in (holder.pid, child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("answer", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_storage_without_locks_is_warned_of_once(
    tmp_path: Path, answer: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int, kind: int) -> None:
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(fcntl, "flock", refuse)
    config = config_of(tmp_path)
    with caplog.at_level(logging.WARNING), locked(config):
        assert not is_locked(RunDir.of(config)), "so nobody else's token is removed"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"run.storage={tmp_path / 'runs'}: this storage has no locks (")
    assert "second start of mine" in warning


def test_what_a_stranger_wrote_into_it_is_not_repeated(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    with locked(config):
        for content in (b"", b"[]", b'{"pid": "x"}', b"\xff" * 5000, b'{"pid": 1, "host": "\\u001b[2J", "since": 3}'):
            place.lock.write_bytes(content)
            with pytest.raises(ConfigError, match="another command works on") as refused, locked(config):
                pass
            assert str(refused.value).isprintable() and len(str(refused.value)) < 600
