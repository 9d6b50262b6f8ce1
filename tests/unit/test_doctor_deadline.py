"""`raytune-fsdp doctor` on a busy machine: what it did not get to is no problem, what hangs is, and it ends in time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.launch.shared_storage import put_token
from raytune_fsdp.tools.doctor import checkup, cluster, deadline, machines, node, own_process, storage, writing
from raytune_fsdp.tools.doctor.deadline import Asked, Deadline
from raytune_fsdp.tools.doctor.finding import Finding, exit_code, ok
from tests.config_text import dump_config
from tests.runs import make_config

ROOT = Path(__file__).parents[2]
BOTH = {"one": "look at one", "two": "look at two"}


@pytest.mark.slow
def test_slow_imports_are_no_problem_and_the_command_ends_within_20_seconds(tmp_path: Path) -> None:
    """As on a network file system that is busy: the start of the command counts, too, and nobody is left behind."""
    for name in ("torch", "ray", "mlflow"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("import time; time.sleep(100)")
    (tmp_path / "site" / "sitecustomize.py").write_text("import time; time.sleep(2)")
    tracking = {"console": False, "mlflow": {"enabled": True, "uri": "http://127.0.0.1:9"}}
    config = make_config(tmp_path, tracking=tracking, cluster={"launch": "ray"})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "raytune_fsdp.cli.main", "doctor", "--json", "--config", str(tmp_path / "config.yaml")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:9", "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"},
    ) as command:  # fmt: skip
        out, err = command.communicate(timeout=60)
    seconds = time.monotonic() - began
    assert out, err
    late = {each["check"]: each for each in json.loads(out)["findings"] if "not checked within" in each["found"]}
    assert command.returncode == 0, out
    assert {"attention", "model", "Ray", "MLflow", "room"} <= set(late), out
    assert all(each["status"] == "warning" and "umount" not in each["fix"] for each in late.values())
    assert seconds < 20, (seconds, json.loads(out)["seconds"])
    assert not Path(config.run.storage).exists(), list(Path(config.run.storage).rglob("*"))
    until = time.monotonic() + 10
    while (left := living(command.pid)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, left


def living(group: int) -> list[list[str]]:
    """The command lines of a process group; those of processes that nobody has waited for are empty."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(each.pid) == group and each.cmdline():
                found.append(each.cmdline())
    return found


def is_stopped(send: own_process.Send) -> None:
    """As where its imports take for ever."""
    os.kill(os.getpid(), signal.SIGSTOP)


def asks_and_waits(send: own_process.Send) -> None:
    send(ok("two", "fine"))
    send(own_process.Question("one", "the server", "start it"))
    time.sleep(100)


def is_answered_and_slow(send: own_process.Send) -> None:
    send(own_process.Question("one", "the server", "start it"))
    send(own_process.Question("one"))
    time.sleep(100)


def dies(send: own_process.Send) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_is_slow_is_told_from_what_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is waited for longer than it has to be."""
    monkeypatch.setattr(deadline, "HANGS_SECONDS", 0.5)
    before, began = multiprocessing.active_children(), time.monotonic()  # such as ranks of other tests
    cases: dict[Callable[..., None], tuple[float, list[tuple[str, str, str]]]] = {
        is_stopped: (5, [("warning", "one", "look at one"), ("warning", "two", "look at two")]),
        asks_and_waits: (60, [("ok", "two", ""), ("problem", "one", "start it")]),
        is_answered_and_slow: (5, [("warning", "one", "look at one"), ("warning", "two", "look at two")]),
        dies: (60, [("problem", "one", "look at one")]),
    }
    asked = {
        work: in_thread(
            partial(own_process.run_apart, work, checks=BOTH, deadline=Deadline(began, began + seconds)), "test"
        )
        for work, (seconds, _) in cases.items()
    }
    for work, (seconds, expected) in cases.items():
        found = asked[work].result()
        assert [(each.status, each.check, each.fix) for each in found] == expected, (work, found)
        late = [each.found for each in found if each.status == "warning" and seconds == 5]
        assert all(each.startswith("not checked within 5 s") for each in late), (work, found)
    assert time.monotonic() - began < 40, "what hangs was waited for"
    until = time.monotonic() + 10
    while (left := {*multiprocessing.active_children()} - {*before}) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def test_only_time_in_which_this_process_ran_counts_against_what_it_asks() -> None:
    asked = Asked()
    asked.tick(5)
    assert not asked.hangs(), "nothing is asked"
    asked.begin("storage")
    asked.tick(600)  # the process was stopped
    assert not asked.hangs() and asked.seconds == deadline.TICK
    for _ in range(int(deadline.HANGS_SECONDS / deadline.TICK)):
        asked.tick(deadline.TICK)
    assert asked.hangs()
    asked.answered()
    assert not asked.hangs()


def test_the_start_of_the_command_is_part_of_its_time() -> None:
    now = time.monotonic()
    assert Deadline.of(now - 10).left() <= deadline.SECONDS - 10
    assert 0 < Deadline.of(now - 100).left() <= 3, "something can be looked at nevertheless"


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only storage and what this machine says: nothing else has to be waited for."""
    nothing: Future[list[Finding]] = Future()
    nothing.set_result([])
    monkeypatch.setattr(
        checkup.Checkup, "_with_torch", lambda self, _: checkup._Check("none", nothing, self._deadline, "")
    )
    monkeypatch.setattr(deadline, "HANGS_SECONDS", 1.0)
    monkeypatch.setattr(checkup, "_TOKEN_SECONDS", 0.5)
    monkeypatch.setattr(checkup, "_ALONE_SECONDS", 0.1)
    monkeypatch.setattr(checkup.storage, "check_lock", lambda _: [])


@pytest.mark.parametrize("place", ["run.storage", "checkpoint.storage"])
def test_storage_that_hangs_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Also where it took the token and hangs then, and where only that of the checkpoints does."""
    alone(monkeypatch)
    elsewhere = {"storage": str(tmp_path / "elsewhere")} if place == "checkpoint.storage" else {}
    config = make_config(tmp_path, cluster={"launch": "local"}, checkpoint={"every": 5, **elsewhere})
    if elsewhere:
        speed = iter([1e9])
        monkeypatch.setattr(storage, "write_speed", lambda *asked: next(speed, None) or time.sleep(100))
    else:
        monkeypatch.setattr(checkup, "put_token", lambda *_: time.sleep(100))
    checks = checkup.Checkup(config)
    found = [each for each in checks.findings() if each.check == "storage"]
    (hung,) = [each for each in found if each.status == "problem"]
    assert hung.found.startswith(f"{place}=") and hung.found.endswith("has not answered for 1 s")
    assert "timeout 5 ls" in hung.fix and "umount" in hung.fix and exit_code(found) == 2
    assert checks.hangs() and not Path(config.run.storage).exists()


def test_storage_that_is_slow_is_no_mount_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    monkeypatch.setattr(deadline, "HANGS_SECONDS", 100.0)
    config = make_config(tmp_path, cluster={"launch": "local"})

    def slowly(*arguments: Any) -> Any:
        time.sleep(1.0)
        return put_token(*arguments)

    monkeypatch.setattr(checkup, "put_token", slowly)
    (found,) = [each for each in checkup.Checkup(config).findings() if each.check == "storage"]
    assert found.status == "warning" and "the first small file took more than 0.5 s" in found.found
    assert "umount" not in found.fix and not Path(config.run.storage).exists()


class Slowly(MetaPathFinder):
    """Imports of one module take long, until the test is over."""

    def __init__(self, name: str) -> None:
        self.name, self.over = name, threading.Event()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.name:
            self.over.wait(60)


def test_a_node_with_slow_imports_has_no_mount_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = put_token(tmp_path / "run", "a test")
    told, slow = writing.as_text(token), Slowly("raytune_fsdp.tools.doctor.writing")
    monkeypatch.delitem(sys.modules, slow.name)
    monkeypatch.setattr(sys, "meta_path", [slow, *sys.meta_path])
    monkeypatch.setattr(node, "_STORAGE_SECONDS", 0.2)
    try:
        facts = node.look(False, told, 0.6)
    finally:
        slow.over.set()
    assert facts["storage"] == ("not checked within 1 s (that node or its imports are slow)", 0.0)
    found: list[Any] = []
    cluster._storage(found.append, {"id": facts["storage"]}, {"id": "a"}, 30)
    (shared,) = found
    assert (shared.status, shared.check) == ("warning", "shared") and "umount" not in shared.fix
    token.remove(refused=True)


def test_a_node_that_starts_processes_slowly_is_not_lost() -> None:
    nodes_checked = pytest.importorskip("raytune_fsdp.launch.ray.nodes.checked")
    late = cluster._lost("a", nodes_checked.LateError("no answer within 9 s"), 9.0)
    assert late.status == "warning" and late.found.startswith("node a: not checked within 9 s (it takes connections")
    assert "ray stop" not in late.fix and "uptime" in late.fix
    gone = cluster._lost("a", ConnectionError("its raylet takes no connection"), 9.0)
    assert gone.status == "problem" and "restart Ray on it" in gone.fix


def test_a_gpu_is_there_also_where_its_driver_is_not(tmp_path: Path) -> None:
    buses, devices = tmp_path / "pci", tmp_path / "dev"
    card = buses / "0000:01:00.0"
    card.mkdir(parents=True)
    devices.mkdir()
    for vendor, there in (("0x8086", False), ("0x10de", True)):
        (card / "vendor").write_text(f"{vendor}\n")
        assert node._nvidia_is_there(str(devices), str(buses)) == there
    (devices / "nvidia0").touch()  # in a container that does not see the bus
    assert node._nvidia_is_there(str(devices), str(tmp_path / "nowhere"))


def test_an_nvidia_smi_that_is_slow_is_no_broken_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = node.look(seconds=0.6)
    (found,) = machines.check_gpus(facts, "here", device="cuda")
    assert found.status == "warning" and "here: not checked within 1 s" in found.found and "nvidia-smi" in found.fix
    gpu = {"name": "Tesla T4", "mib": "15360", "driver": "550.54.15", "capability": "7.5"}
    slow = {**facts, "gpus": [gpu], "smi": None, "torch": node._seen_by_torch(0.001)}
    (found,) = machines.check_gpus(slow, "here", device="cuda")
    assert found.status == "warning" and "whether torch can use them was not checked within" in found.found


def test_the_process_that_keeps_the_time_imports_nothing_heavy() -> None:
    """An import in C++ would stop all of its threads; and on nodes a clock runs."""
    heavy = ("torch", "ray", "transformers", "mlflow", "pyarrow", "numpy")
    for module, without in (("checkup", heavy), ("writing", (*heavy, "pydantic"))):
        code = f"import sys, raytune_fsdp.tools.doctor.{module} as _; "
        code += f"print([each for each in {without} if each in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.stdout.strip() == "[]", done.stdout + done.stderr
