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
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.lease import TakenOverError, lease_of
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch import run_lock
from raytune_fsdp.launch.run_lock import Signs, locked
from raytune_fsdp.plan.run_dir import RunDir

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

HOLD_AND_ASK = """
import sys
from raytune_fsdp.launch import run_lock
from raytune_fsdp.base.lease import TakenOverError, lease_of
from raytune_fsdp.plan.run_dir import RunDir
from tests.unit.test_run_lock import config_of
from pathlib import Path
run_lock.BEAT_SECONDS = 0.1
config = config_of(Path(sys.argv[1]))
with run_lock.locked(config):
    print("held", flush=True)
    sys.stdin.readline()
    try:
        lease_of(RunDir.of(config).lock).check()
        print("still ours", flush=True)
    except TakenOverError as error:
        print(error, flush=True)
"""
ONE_OF_MANY = """
import sys
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.launch import run_lock
from raytune_fsdp.base.lease import TakenOverError, lease_of
from raytune_fsdp.plan.run_dir import RunDir
from tests.unit.test_run_lock import config_of
from pathlib import Path
run_lock.BEAT_SECONDS = 0.3
config = config_of(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    with run_lock.locked(config):
        print("in", flush=True)
        sys.stdin.readline()  # until all have heard whether they are
        lease_of(RunDir.of(config).lock).check()
        print("won")
except (ConfigError, TakenOverError):
    print("refused", flush=True)
"""

HOLD_AS_BEFORE = """
import fcntl, json, os, sys, time
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.write(handle, json.dumps({"host": "here", "pid": os.getpid(), "since": "2026-01-01T00:00:00+00:00"}).encode())
print("held", flush=True)
time.sleep(60)
"""
"""As a command of a version without beats holds it."""


def config_of(directory: Path) -> FinetuneConfig:
    return FinetuneConfig.model_validate(
        {
            "run": {"name": "mine", "storage": str(directory / "runs")},
            "model": {"path": "x"},
            "data": {"train": [{"path": "x.jsonl"}], "seq_len": 8},
            "train": {"global_batch": 1, "max_steps": 1},
        }
    )


def test_a_second_start_is_refused_by_name_until_the_first_ends(tmp_path: Path, quick: None) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    with locked(config):
        assert lease_of(place.lock) is not None
        assert json.loads(place.lock.read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError) as refused, locked(config):
            pass
        message = str(refused.value)
        assert message.startswith(f"run.name=mine: another command works on {place.path}: process {os.getpid()} on ")
        assert ", since 20" in message and "another run.name" in message and "\n" not in message
        assert message.endswith("choose another run.name")
        assert lease_of(place.lock) is not None, "a refusal does not release it"
    assert lease_of(place.lock) is None
    assert not (tmp_path / "runs").exists(), "a refused run leaves nothing behind"
    with locked(config):
        place.lock.unlink()  # a person may; and another command has begun
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
            assert lease_of(RunDir.of(config).lock) is not None
    finally:
        for pid in (holder.pid, child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat every tenth of a second."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(run_lock, "_SETTLED_SECONDS", 0.1)


@pytest.mark.parametrize(
    "answer",
    [errno.ENOLCK, *(pytest.param(each, marks=pytest.mark.slow) for each in (errno.ENOSYS, errno.EOPNOTSUPP))],
)
def test_storage_without_locks_has_beats(
    tmp_path: Path, answer: int, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    def refuse(handle: int, kind: int) -> None:
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr(fcntl, "flock", refuse)
    config = config_of(tmp_path)
    place = RunDir.of(config)
    with locked(config):
        assert lease_of(place.lock) is not None
        with pytest.raises(ConfigError, match="another command works on"), locked(config):
            pass
    place.path.mkdir(parents=True)
    place.lock.write_text('{"host": "gone", "pid": 7, "since": "2026", "token": "1"}')  # of a machine that is lost
    began = time.monotonic()
    with locked(config):
        assert time.monotonic() - began >= 5 * run_lock.BEAT_SECONDS
        assert json.loads(place.lock.read_text())["pid"] == os.getpid()


def test_who_gives_no_sign_of_life_loses_the_run_and_finds_out(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that is stopped, and goes on when another command works on its run."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_ASK, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdin is not None
    holder.stdout.readline()
    config = config_of(tmp_path)
    place = RunDir.of(config)
    try:
        os.kill(holder.pid, signal.SIGSTOP)
        os.utime(place.lock, (4e9, 4e9))  # no time of a file is looked at
        os.utime(place.beat, (4e9, 4e9))
        with caplog.at_level(logging.WARNING), locked(config):
            os.kill(holder.pid, signal.SIGCONT)
            beats = place.beat.read_bytes()
            print("now", file=holder.stdin, flush=True)
            assert "another one has taken the run over" in holder.stdout.readline()
            assert holder.wait(20) == 0
            lease = lease_of(place.lock)
            assert lease is not None
            lease.check()
            assert json.loads(place.lock.read_text())["token"] == lease.token, "its end has left ours alone"
            deadline = time.monotonic() + 5
            while place.beat.read_bytes() == beats:
                assert time.monotonic() < deadline, "no more beats of ours"
            assert place.beat.read_text().startswith(lease.token)
    finally:
        holder.kill()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"process {holder.pid} on " in warning and "has not been heard of" in warning


def test_one_of_several_newcomers_gets_it(tmp_path: Path, quick: None) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    place.lock.write_text('{"host": "gone", "pid": 7, "since": "2026", "token": "1"}')
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_MANY, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(4)
    ]  # fmt: skip
    for process in processes:  # at once: who comes when the first one is done with the run gets it, too
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    first = [process.stdout.readline() for process in processes if process.stdout is not None]
    assert len(first) == 4 and set(first) == {"in\n", "refused\n"}
    last = [process.communicate("\n", timeout=60)[0] for process in processes]
    assert sorted(each or word for each, word in zip(last, first, strict=True)) == ["refused\n"] * 3 + ["won\n"]
    assert not list(place.path.glob("lock.*"))


def test_a_command_of_a_version_without_beats_is_not_taken_for_silent(tmp_path: Path, quick: None) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    command = [sys.executable, "-c", HOLD_AS_BEFORE, str(place.lock)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        said = f"process {holder.pid} on here.*; if its machine is lost, remove /"
        with pytest.raises(ConfigError, match=said), locked(config):
            pass
    finally:
        holder.kill()
        holder.wait()
    with locked(config):
        assert lease_of(place.lock) is not None


def put(kind: str, path: Path) -> None:
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a symbolic link"])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path, quick: None, kind: str) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    put(kind, place.lock)
    with pytest.raises(ConfigError, match=f"{place.lock} .*: it is {kind}, .*remove it$"), locked(config):
        pass
    place.lock.rmdir() if kind == "a directory" else place.lock.unlink()
    put(kind, place.beat)
    if kind == "a directory":
        with pytest.raises(ConfigError, match=f"{place.beat} .*[Dd]irectory.*remove it$"), locked(config):
            pass
        assert not place.lock.exists() and lease_of(place.lock) is None
        return
    with locked(config):
        assert place.beat.read_text().endswith(f"{0:012d}\n") and not place.beat.is_symlink(), "replaced by ours"
        put(kind, tmp_path / "other")
        (tmp_path / "other").rename(place.beat)
        deadline = time.monotonic() + 10
        while not place.beat.is_file():
            assert time.monotonic() < deadline, "no more beats"
            time.sleep(0.02)
        while not place.beat.is_dir():  # from then on the holder cannot show that it is alive
            with contextlib.suppress(OSError):
                place.beat.unlink()
                place.beat.mkdir()
        content = json.loads(place.lock.read_text())
        place.lock.write_text(json.dumps({**content, "boot": "another machine's"}))
        with pytest.raises(ConfigError, match=f"{place.beat} .* it is a directory"), locked(config):
            pass
        assert lease_of(place.lock) is not None
        place.beat.rmdir()


@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_full_disk_is_named_and_nothing_is_trained_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It may be full for a moment only: then the run would go on, and another command could work on it, too."""
    config = config_of(tmp_path)
    place = RunDir.of(config)
    real = getattr(os, call)

    def full(file: Any, *more: Any) -> Any:
        if call == "open" and not str(file).startswith(str(place.lock)):
            return real(file, *more)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(ConfigError, match=f"{place.lock} .*Disk quota exceeded; make room if"), locked(config):
            pass
    assert not place.lock.exists() and lease_of(place.lock) is None
    with locked(config):
        assert lease_of(place.lock) is not None


def test_a_lock_that_a_mount_of_its_own_shows_free_is_not_taken_from_who_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """A container of the same machine, with a mount that does not know the locks of others."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.5)  # who asks waits for one and a half
    config = config_of(tmp_path)
    place = RunDir.of(config)
    with locked(config), monkeypatch.context() as elsewhere:
        elsewhere.setattr(fcntl, "flock", lambda *_: None)
        began = time.monotonic()
        with pytest.raises(ConfigError, match="another command works on"), locked(config):
            pass
        assert time.monotonic() - began < 5 * run_lock.BEAT_SECONDS
        assert lease_of(place.lock) is not None


@pytest.mark.parametrize("known", [True, False])
def test_after_a_crash_nobody_is_listened_for_where_the_process_is_known_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool, quick: None
) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with locked(config):
        content = json.loads(place.lock.read_text())
    place.path.mkdir(parents=True)
    place.lock.write_text(json.dumps({**content, "pid": gone.pid, **({} if known else {"namespace": "pid:[1]"})}))
    listened: list[float] = []
    monkeypatch.setattr(run_lock, "_listen", lambda *given: listened.append(given[-1]))
    with locked(config):
        assert listened == [] if known else listened == [1.5 * run_lock.BEAT_SECONDS]


def test_a_run_on_another_machine_lives_though_its_process_is_not_seen_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of containers the number of the PID namespace is the same on all machines."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    place = RunDir.of(config_of(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    content = {"pid": gone.pid, "namespace": run_lock._namespace(), "boot": "elsewhere", "token": "t"}
    place.path.mkdir(parents=True)
    place.lock.write_text(json.dumps(content))
    signs = Signs(place)
    place.beat.write_text("t 1")
    assert signs.look() is None
    place.beat.write_text("t 2")
    assert signs.look() == "running"
    place.lock.write_text(json.dumps({**content, "boot": run_lock._boot()}))
    assert signs.look() == "silent"


def test_the_thread_that_beats_finds_out_for_those_who_cannot_wait(tmp_path: Path, quick: None) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    with locked(config):
        lease = lease_of(place.lock)
        assert lease is not None
        place.lock.write_text('{"token": "theirs"}')
        deadline = time.monotonic() + 10
        with pytest.raises(TakenOverError, match="another one has taken the run over"):
            while time.monotonic() < deadline:
                lease.check_known()
                time.sleep(0.02)


def test_storage_that_does_not_answer_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    with locked(config):
        lease = lease_of(place.lock)
        assert lease is not None
        lease.check()
        content = place.lock.read_bytes()
        place.lock.write_bytes(b"\xff")  # half a file, as a network file system may show it
        lease.check()
        place.lock.write_bytes(content)
        place.lock.rename(tmp_path / "aside")  # as under an automounter
        threading.Timer(0.3, (tmp_path / "aside").rename, [place.lock]).start()
        lease.check()
        monkeypatch.setattr("raytune_fsdp.base.lease._LOOKS", 2)
        place.lock.unlink()
        with pytest.raises(TakenOverError, match="has gone.* writes nothing more; the same command continues"):
            lease.check()
    with locked(config):  # and does
        pass


def test_what_a_stranger_wrote_into_it_is_not_repeated(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    place = RunDir.of(config)
    place.path.mkdir(parents=True)
    for content in (b"", b"[]", b'{"pid": "x"}', b"\xff" * 5000, b'{"pid": 1, "host": "\\u001b[2J", "since": 3}'):
        place.lock.write_bytes(content)
        message = str(run_lock._refusal(config, place))
        assert message.isprintable() and len(message) < 600 and "another command works on" in message
