"""Joining a Ray, and starting one. No Ray is started."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

import ray
from ray.exceptions import AuthenticationError

from raytune_fsdp.base.errors import ConfigError, TrainingError
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.ray import private, session


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address where something listens, as that of a cluster."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(private, "canonicalize_bootstrap_address", lambda _: address)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        yield address


@pytest.mark.parametrize(("mode", "words"), [("token", "missing, or not the cluster's"), (None, "not used here")])
def test_a_token_that_the_cluster_does_not_take_is_one_line_at_once(
    head: str, mode: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(address: str) -> None:
        os.write(2, b"gcs_client.cc:210: Failed to get cluster ID\n")  # as C++ does
        raise AuthenticationError("InvalidAuthToken")

    def never(**_: object) -> None:
        raise AssertionError("it would try for a minute, with warnings")

    monkeypatch.setattr(private, "GcsClient", refuse)
    monkeypatch.setattr(private, "ensure_token_if_auth_enabled", lambda *_, **__: None)
    monkeypatch.setattr(ray, "init", never)
    monkeypatch.setenv("RAY_AUTH_MODE", mode) if mode else monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError) as refused:
        session.find_cluster()
    message = str(refused.value)
    start = f"the Ray cluster at {head} asks for a token, and the one of this process is {words}: set "
    assert message.startswith(start)
    assert "RAY_AUTH_TOKEN" in message and "\n" not in message
    assert capfd.readouterr().err == ""


def test_no_token_where_one_is_to_be_used_is_found_before_ray_ends_the_process(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exits(address: str) -> None:
        raise AssertionError("C++ would end the process here")

    def lacking(_: object, *, create_token_if_missing: bool) -> None:
        assert not create_token_if_missing, "nothing is written into the home directory"
        raise AuthenticationError("Token authentication is enabled but no authentication token was found")

    monkeypatch.setattr(private, "GcsClient", exits)
    monkeypatch.setattr(private, "ensure_token_if_auth_enabled", lacking)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ConfigError, match="the one of this process is missing"):
        session.find_cluster()


def test_a_busy_machine_gets_the_time_that_the_config_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []

    def start(cpus: int, seconds: float, templates: object) -> SimpleNamespace:
        tries.append(seconds)
        if len(tries) < 3:
            raise Exception("The current node timed out during startup. This could happen because")
        return SimpleNamespace(cpus=cpus)

    monkeypatch.setattr(session, "_try_to_start", start)
    assert session._start(4, 200.0).cpus == 4  # type: ignore[attr-defined]
    assert tries == [200.0] * 3
    tries.clear()
    with pytest.raises(TrainingError, match=r"in 0 s \(Exception: The current node.*cluster.start_seconds=1e-09"):
        session._start(4, 1e-9)
    assert len(tries) == 1


def test_another_failure_to_start_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def start(cpus: int, seconds: float, templates: object) -> None:
        tries.append(cpus)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session, "_try_to_start", start)
    with pytest.raises(TrainingError, match="No space left on device"):
        session._start(4, 200.0)
    assert tries == [4]


def test_directories_of_dead_starts_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(session, "_LONGEST_PARENT", 10_000)
    names = ("dead", "living", "being-made", "never-made")
    dead, living, making, never = (tmp_path / f"{session._PREFIX}{name}" for name in names)
    for each in (dead, living, making, never):
        each.mkdir()
    (dead / "lock").touch()
    hours_ago = time.time() - 7200
    os.utime(never, (hours_ago, hours_ago))
    with open(living / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        directory, lock = session._own_directory()
    assert sorted(tmp_path.iterdir()) == sorted([living, making, directory])
    assert not os.get_inheritable(lock), "Ray's processes outlive a driver that is killed, and must not keep it"
    os.close(lock)


def test_what_another_user_may_have_put_there_by_such_a_name_is_left_alone(tmp_path: Path) -> None:
    """A link would lead to files of whoever starts Ray."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    for each in (mine / "work", shared):
        each.mkdir(parents=True)
    hours_ago = time.time() - 7200
    os.utime(mine, (hours_ago, hours_ago))
    (shared / f"{session._PREFIX}link").symlink_to(mine)
    os.mkfifo(shared / f"{session._PREFIX}pipe")
    session._sweep(shared)
    assert (mine / "work").is_dir() and len([*shared.iterdir()]) == 2


def test_a_directory_in_which_dying_processes_still_write_is_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory without a lock would count as one that is just being made, for an hour."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(session, "_LONGEST_PARENT", 10_000)
    left = tmp_path / f"{session._PREFIX}left"
    left.mkdir()
    (left / "lock").touch()
    remove = shutil.rmtree
    (left / "session").mkdir()

    def written_to(path: Path, **options: bool) -> None:
        remove(path, **options)
        (left / "session").mkdir()

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(shutil, "rmtree", written_to)
        session._sweep(tmp_path)
    assert (left / "session").is_dir()
    session._sweep(tmp_path)
    assert not left.exists()


@pytest.fixture
def another() -> Iterator[Any]:
    """A Ray that this process has already, and that must have its worker in the end."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE) as raylet:
        assert raylet.stdout is not None
        worker = psutil.Process(int(raylet.stdout.readline()))
        try:
            yield SimpleNamespace(
                get_temp_dir_path=lambda: "/tmp/ray", dead_processes=lambda: [("raylet", raylet)],
                all_processes={"raylet": [SimpleNamespace(process=raylet)]},
                kill_all_processes=lambda **_: raylet.kill(),
            )  # fmt: skip
            assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and raylet.poll() is None
        finally:
            raylet.kill()
            worker.kill()


def test_a_start_that_fails_leaves_no_process_no_variable_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, another: Any
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def init(**options: object) -> None:
        code = "import time; time.sleep(60)"
        started.append(subprocess.Popen([sys.executable, "-S", "-c", code, f"--dir={options['_temp_dir']}/session"]))
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(session, "_LONGEST_PARENT", 10_000)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("it would end the other Ray's connection"))
    monkeypatch.setattr(session, "_WORKERS_SECONDS", 0.1)
    monkeypatch.setattr(ray._private.worker, "_global_node", another)
    before = dict(os.environ)
    with pytest.raises(Exception, match="timed out"):
        session._try_to_start(1, 5.0)
    assert started[0].wait(10) == -signal.SIGKILL
    assert dict(os.environ) == before
    assert not list(tmp_path.iterdir())


def test_a_stop_while_ray_starts_leaves_none_for_the_next_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command does not wait for it, but the next one of the same process does: Ray cannot be started twice."""
    story: list[str] = []
    may_start = threading.Event()

    def connect(*_: object) -> SimpleNamespace:
        story.append("starts")
        may_start.wait(10)
        story.append("has started")
        return SimpleNamespace(head=object(), close=lambda: story.append("closed"))

    monkeypatch.setattr(session, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(session, "find_cluster", lambda: story.append("looks for one"))
    monkeypatch.setattr(session, "connect", connect)
    config = ClusterConfig()
    with pytest.raises(KeyboardInterrupt), session.connecting(config, 1):
        raise KeyboardInterrupt
    monkeypatch.setattr(session, "_CLOSE_SECONDS", 10.0)
    threading.Timer(0.3, may_start.set).start()
    with session.connecting(config, 1) as second:
        second.result(10)
    one = ["looks for one", "starts", "has started", "closed"]
    assert story == one + one


def test_a_ray_of_our_own_that_lacks_a_process_is_asked_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call would wait for a minute, and then Ray ends this process; one that waits already is not without a word."""
    dead: list[str] = []
    monkeypatch.setattr(private, "dead_processes", lambda: dead)
    monkeypatch.setattr(private, "seconds_without_head", lambda: session.CLOSING_SECONDS + 0.05)
    monkeypatch.setattr(session, "_LOOK_SECONDS", 0.01)
    own = session.Session("", owned=True, directory=tmp_path)
    threading.Timer(0.2, dead.append, ["gcs_server"]).start()
    assert own.answers()
    session._watch(own, threading.Event())
    assert not own.answers()
    said = capsys.readouterr().err
    assert said.startswith("error: Ray's gcs_server process on this machine died") and "same command continues" in said
    ended = threading.Event()
    ended.set()
    session._watch(own, ended)
    assert not capsys.readouterr().err
