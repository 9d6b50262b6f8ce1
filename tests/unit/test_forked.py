"""Workers that are forked from a template: what they are, when one is refused, and how all of it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import raytune_fsdp
from raytune_fsdp.base.errors import JOB_CONFIG
from raytune_fsdp.config import ClusterConfig
from raytune_fsdp.launch.environment import SHARED, settings_of_nccl
from raytune_fsdp.launch.ray.forked import ask, template, templates
from raytune_fsdp.launch.ray.forked.messages import receive
from raytune_fsdp.launch.ray.forked.process import (
    ASK,
    DIRECTORIES,
    LAUNCHER,
    SOCKET,
    Wanted,
    difference,
    of_process,
    worker_of_ray,
)
from tests.records import make_config

PACKAGE = Path(raytune_fsdp.__file__).parent

TEMPLATE = """
import sys
from pathlib import Path
from raytune_fsdp.launch.ray.forked import template
directory, worker, package, linger, names, begun_as = sys.argv[1:]
template.worker_of_ray = lambda: Path(worker)
template.LINGER_SECONDS = float(linger)
template.IMPORTS = tuple(names.split())
template._TICK_SECONDS = 0.2
template.main(Path(directory), Path(package), "1", begun_as)
"""
IMPATIENT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import ask
ask.ANSWER_SECONDS = 0.5
ask.main(sys.argv[1], sys.argv[2:])
"""
WORKER = """
import gc, json, os, random, resource, signal, sys, threading, time
threads = len(os.listdir("/proc/self/task"))  # before numpy makes some
forked = bool({"torch", "a_module_of_code"} & sys.modules.keys())
if "plain" in sys.argv:  # to import torch takes seconds where nobody has
    print(json.dumps({"forked": forked, "env": dict(os.environ)}), flush=True)
    time.sleep(300 * ("wait" in sys.argv))
    sys.exit(3)
import numpy, torch
files = [int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
facts = {
    "argv": sys.argv, "path": sys.path, "flags": str(sys.flags), "env": dict(os.environ), "cwd": os.getcwd(),
    "umask": os.umask(0), "nice": os.getpriority(os.PRIO_PROCESS, 0), "cpus": sorted(os.sched_getaffinity(0)),
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "oom": open("/proc/self/oom_score_adj").read(), "files": sorted(files),
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "ray": "ray" in sys.modules, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(),
    "torch_threads": torch.get_num_threads(), "default": str(torch.get_default_dtype()),
    "gpu": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
}
facts["random"] = [random.random(), float(numpy.random.random()), torch.initial_seed()]
facts["forked"], facts["threads"] = forked, threads
print(json.dumps(facts), flush=True)
if len(sys.argv) > 1 and sys.argv[1] == "spoil":
    os.environ["SPOILED"] = "1"
    os.environ.pop("HOME", None)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0), torch.set_num_threads(2)
    open("spoiled", "w"), threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1 and sys.argv[1] == "wait":
    time.sleep(300)
sys.exit(3)
"""


class Node:
    """A template whose Ray is WORKER, in a directory of its own."""

    def __init__(
        self, directory: Path, *, linger: float = 60.0, names: str = "torch numpy", package: Path = PACKAGE
    ) -> None:
        self.directory, self.script = directory, directory.parent / "worker.py"
        directory.mkdir(0o700, exist_ok=True)
        self.script.write_text(WORKER)
        places = os.pathsep.join([str(PACKAGE.parent), str(directory.parent)])
        own = {"RAY_RAYLET_PID": str(os.getpid()), "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
        self.env = {**os.environ, **own}
        self.begun_as = templates._begun_as(self.env)
        given = (directory, self.script, package, linger, names, self.begun_as)
        command = [sys.executable, "-c", TEMPLATE, *map(str, given)]
        with open(directory.parent / "log", "ab") as log:
            subprocess.run(
                command, env=self.env, check=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=_allow_few_files,
            )  # fmt: skip

    def connected(self) -> socket.socket:
        found = templates._connected(self.directory, time.monotonic() + 60)
        assert found is not None, self.log()
        return found

    def log(self) -> str:
        return (self.directory.parent / "log").read_text()

    def start(self, *arguments: str, program: list[str] | None = None, **options: Any) -> subprocess.Popen[str]:
        command = [*(program or [str(self.directory / LAUNCHER)]), str(self.script), *arguments]
        options.setdefault("env", self.env)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def facts(self, *arguments: str, **options: Any) -> dict[str, Any]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=120)
        assert out, (err, self.log())
        found: dict[str, Any] = json.loads(out)
        return found

    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if str(self.directory) in " ".join(_command(each))]


def _allow_few_files() -> None:
    """As shells do."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("node")
    (directory / "a_module_of_code.py").write_text("value = 1\n")
    found = Node(directory / "t", names="torch numpy a_module_of_code")
    connection = found.connected()
    yield found
    templates.release(connection)
    until(lambda: not found.directory.exists())
    until(lambda: not found.processes())


def test_a_fork_is_what_a_new_process_would_be(node: Node, tmp_path: Path) -> None:
    def lower() -> None:
        import resource

        os.umask(0o027)
        os.nice(3)
        os.sched_setaffinity(0, {0})
        resource.setrlimit(resource.RLIMIT_NOFILE, (777, 4096))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray does
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        Path("/proc/self/oom_score_adj").write_text("500")

    how: dict[str, Any] = {"cwd": tmp_path, "preexec_fn": lower}
    env = {**node.env, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "NCCL_DEBUG": "WARN"}
    assert node.facts("spoil", **how)["forked"]
    other = node.start("wait")
    assert other.stdout is not None and other.stdout.readline()  # whose files are not inherited
    forked = node.facts("a", "b c", env=env, **how)
    other.kill()
    new = node.facts("a", "b c", env=env, program=[sys.executable], **how)
    assert (forked.pop("forked"), new.pop("forked")) == (True, False)
    assert forked["random"] != new["random"] and len({*forked.pop("random"), *new.pop("random")}) == 6
    forked.pop("env"), new.pop("env")  # see below: imports set some
    assert forked == new
    assert (forked["threads"], forked["torch_threads"], forked["files"]) == (1, 1, [0, 1, 2])
    assert signal.SIGINT in forked["blocked"] and forked["signals"][str(int(signal.SIGHUP))] == str(signal.SIG_IGN)
    assert forked["umask"] == 0o027 and forked["cpus"] == [0] and forked["oom"].strip() == "500"


def test_a_template_may_have_all_the_files_that_forks_of_many_cores_take(node: Node) -> None:
    """Three each. Their own limit is the one that was asked for: see above."""
    (process,) = node.processes()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert process.rlimit(psutil.RLIMIT_NOFILE) == (most, most) and most > 256


def test_a_fork_has_the_environment_that_was_asked_for(node: Node) -> None:
    env = {**node.env, "RAY_TRAIN_X": "1", "NCCL_DEBUG": "INFO"}
    found = node.facts(env=env)["env"]
    assert {name: found.get(name) for name in env} == env
    assert not {name for name in found if name.startswith("RAY_")} - env.keys()


def test_workers_differ_in_their_random_numbers(node: Node) -> None:
    drawn = [tuple(node.facts()["random"]) for _ in range(2)]
    assert len({*drawn[0], *drawn[1]}) == 6


def test_ray_is_not_imported_before_a_fork(node: Node) -> None:
    """Its ids would be the same in all of them."""
    assert not node.facts()["ray"]


@pytest.mark.parametrize(
    "change",
    [{"HF_HOME": "/elsewhere"}, {"OMP_NUM_THREADS": "2"}, {"PYTHONHASHSEED": "1"}],
    ids=lambda change: next(iter(change)),
)
def test_another_environment_is_refused(node: Node, change: dict[str, str]) -> None:
    found = node.facts("plain", env={**node.env, **change})
    assert not found["forked"] and {name: found["env"][name] for name in change} == change
    assert f"the environment differs in {next(iter(change))}" in node.log()


def test_another_program_is_refused(node: Node, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(WORKER)
    done = subprocess.run([node.directory / LAUNCHER, other, "plain"], env=node.env, capture_output=True, text=True)
    assert not json.loads(done.stdout)["forked"] and f"{other} is not {node.script}" in node.log()


@pytest.mark.slow
def test_another_namespace_is_refused(node: Node) -> None:
    """Containers of one machine may share /tmp."""
    elsewhere = ["unshare", "--user", "--map-current-user"]
    if subprocess.run([*elsewhere, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespace can be made here")
    assert not node.facts(program=[*elsewhere, str(node.directory / LAUNCHER)])["forked"]
    assert "its control groups or namespaces differ" in node.log()


@pytest.mark.slow
def test_where_an_import_has_used_a_gpu_python_starts_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a_user_of_gpus.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n")
    node = Node(tmp_path / "t", names="torch numpy a_user_of_gpus")
    kept = node.connected()
    (tmp_path / "elsewhere").mkdir()
    how: dict[str, Any] = {"cwd": tmp_path / "elsewhere", "preexec_fn": lambda: os.nice(3)}
    found = node.facts(**how)
    new = node.facts(program=[sys.executable], **how)
    assert not found["forked"] and {**found, "env": 0, "random": 0} == {**new, "env": 0, "random": 0}
    assert (found["cwd"], found["gpu"]) == (str(tmp_path / "elsewhere"), [False, False])
    templates.release(kept)


def test_the_end_of_either_process_is_the_end_of_both(node: Node) -> None:
    for by_ray in (True, False):
        asked = node.start("wait")
        assert asked.stdout is not None and asked.stdout.readline()
        worker = _worker_of(asked)
        os.kill(asked.pid if by_ray else worker.pid, signal.SIGKILL)
        worker.wait(timeout=30)
        asked.wait(timeout=30)


def _worker_of(asked: subprocess.Popen[str]) -> psutil.Process:
    """Return the process that has the other's output."""
    out = os.readlink(f"/proc/{asked.pid}/fd/1")
    for each in psutil.process_iter():
        try:
            if each.pid != asked.pid and os.readlink(f"/proc/{each.pid}/fd/1") == out:
                return each
        except OSError:
            continue
    raise AssertionError("there is no worker")


@pytest.mark.slow
def test_workers_live_on_without_their_templates_and_new_ones_start_as_usual(tmp_path: Path) -> None:
    node = Node(tmp_path / "t")
    kept = node.connected()
    asked = node.start("wait")
    assert asked.stdout is not None and json.loads(asked.stdout.readline())["forked"]
    worker = _worker_of(asked)
    (pid,) = {each.pid for each in node.processes()} - {worker.pid, asked.pid}
    os.kill(pid, signal.SIGKILL)
    assert not node.facts()["forked"]
    assert str(PACKAGE) not in (node.directory / LAUNCHER).read_text(), "a job's copy of it may be gone before this"
    assert worker.is_running() and asked.poll() is None
    worker.kill()
    asked.wait(timeout=30)
    kept.close()


def test_who_gives_up_becomes_the_worker_and_there_is_no_second_one(node: Node) -> None:
    """Ray would have two processes with the identity of one worker."""
    assert node.facts("plain")["forked"]
    stopped = node.processes()
    for each in stopped:
        each.suspend()
    program = [sys.executable, "-c", IMPATIENT, str(Path(ask.__file__).parent), str(node.directory / SOCKET)]
    asked = node.start("plain", "wait", program=program)
    assert asked.stdout is not None and not json.loads(asked.stdout.readline())["forked"]
    for each in stopped:
        each.resume()
    assert node.facts("plain")["forked"]  # it has looked at the one before, too
    until(lambda: {each.pid for each in node.processes()} - {asked.pid} == {each.pid for each in stopped}, 10.0)
    asked.kill()


@pytest.mark.slow
def test_it_ends_when_nobody_wants_it(tmp_path: Path) -> None:
    node = Node(tmp_path / "t", linger=1.0)
    kept = node.connected()
    asked = node.start("wait")
    assert asked.stdout is not None and asked.stdout.readline()
    kept.close()  # as when the driver is killed
    time.sleep(2)
    assert node.directory.exists(), "it has a worker"
    asked.kill()
    until(lambda: not node.directory.exists() and not node.processes())


def test_code_that_was_written_meanwhile_is_not_what_it_has_imported(node: Node) -> None:
    module = node.directory.parent / "a_module_of_code.py"
    before = module.stat()
    assert node.facts("plain")["forked"]
    module.write_text("value = 22\n")
    assert not node.facts("plain")["forked"]
    assert f"{module} has changed since it was imported" in node.log()
    module.write_text("value = 1\n")
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert node.facts("plain")["forked"]


def test_it_ends_with_its_last_driver(node: Node, tmp_path: Path) -> None:
    """A sweep that was killed may still wait for its trials when the next one has begun: they share a template."""
    templates.release(node.connected())
    assert node.facts("plain")["forked"]
    (tmp_path / "a_module_of_code.py").touch()
    other = Node(tmp_path / "t", names="a_module_of_code")
    first, second = other.connected(), other.connected()
    templates.release(first)
    third = templates._taken_over(other.directory, other.begun_as)
    assert third is not None, "it has ended before its last driver"
    for each in (second, third):
        templates.release(each)
    until(lambda: not other.directory.exists() and not other.processes(), 20.0)


def test_the_template_of_a_killed_driver_serves_the_next_one_or_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all workers of a command that is started again from another login would start slowly."""
    monkeypatch.setattr(templates, "_BEGINS_SECONDS", 1.0)
    module = tmp_path / "a_module_of_code.py"
    module.write_text("value = 1\n")
    node = Node(tmp_path / "t", names="a_module_of_code")
    kept = node.connected()
    until(lambda: "ready" in node.log())
    (first,) = node.processes()
    elsewhere = templates._begun_as({**node.env, "HF_HOME": "/elsewhere"})
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it begins another"))
        assert templates.own(node.directory, "1", {**node.env, "HF_HOME": "/elsewhere"}) is None
        assert first.is_running(), "its driver lives"
        kept.close()
        monkeypatch.setattr(templates, "_BEGINS_SECONDS", 20.0)
        again = templates.own(node.directory, "1", {**node.env, "RAY_JOB_ID": "02", "SHLVL": "3"})
    assert again is not None and node.processes() == [first]
    again.close()
    assert templates._taken_over(node.directory, elsewhere) is None
    until(lambda: not node.processes())
    other = Node(node.directory, names="a_module_of_code")
    kept = other.connected()
    until(lambda: node.log().count("ready") == 2)
    assert other.processes() != [first]
    module.write_text("value = 22\n")
    kept.close()
    assert templates._taken_over(node.directory, other.begun_as) is None
    until(lambda: not node.processes())
    assert node.directory.exists(), "the next one may have begun in it"


def test_what_python_finds_from_where_it_is_started_is_not_forked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for places, refused in (("/a:/b", False), ("", False), ("/a:b", True), ("/a:", True)):
        monkeypatch.setenv("PYTHONPATH", places)
        wanted = Wanted(**ask.wanted([str(worker_of_ray())]))  # type: ignore[arg-type]
        with socket.socket(socket.AF_UNIX) as listener:
            found = template.NodeTemplate(-1, listener, wanted.env, "")
            assert found._why_not(wanted) is None
            before = templates._begun_as(wanted.env)
            wanted.cwd = "/"
            assert ("PYTHONPATH is relative" in str(found._why_not(wanted))) == refused
            with contextlib.chdir("/"):
                assert (templates._begun_as(wanted.env) != before) == refused


def test_what_killed_templates_have_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    """Not of one that lives, not of others, and not what is just being made."""
    old = time.time() - 2 * template._OLD_SECONDS
    (tmp_path / "theirs").mkdir()
    for name in ("gone", "lives", "begins", "new"):
        (place := tmp_path / f"{DIRECTORIES}{name}").mkdir()
        if name != "begins":
            (place / template._LOCK).touch()
        os.utime(place, None if name == "new" else (old, old))
    (tmp_path / f"{DIRECTORIES}link").symlink_to(tmp_path / "theirs")
    with open(tmp_path / f"{DIRECTORIES}lives" / template._LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        template.clear(tmp_path)
    left = sorted(each.name.removeprefix(DIRECTORIES) for each in tmp_path.iterdir())
    assert left == ["begins", "link", "lives", "new", "theirs"]


def test_a_directory_of_others_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    assert templates.own(tmp_path / "link", "1", os.environ) is None
    program = templates.Templates(ClusterConfig(), tmp_path).runtime_env()["py_executable"]
    assert "-O " in program


def test_nothing_is_imported_from_the_directory_that_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command may be given in a model's directory, and that may be a stranger's."""
    (tmp_path / "theirs").mkdir()
    for name in ("socket.py", "shutil.py", "torch.py", "raytune_fsdp.py"):
        (tmp_path / "theirs" / name).write_text("open('has_run', 'w')\n")
    monkeypatch.chdir(tmp_path / "theirs")
    monkeypatch.setattr(raytune_fsdp, "__file__", str(tmp_path / "__init__.py"))  # so that it ends at once
    monkeypatch.setattr(templates, "_BEGINS_SECONDS", 0.1)
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    assert templates.own(tmp_path / "t", "1", env) is None
    until(lambda: not any(str(tmp_path / "t") in _command(each) for each in psutil.process_iter()))
    assert (tmp_path / "t" / templates.LOG).read_text() == "" and not Path("has_run").exists()


def test_another_number_of_threads_and_another_tree_have_other_templates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the last command may live on, and torch counts its threads when it is imported."""
    one, two = (templates.Templates(ClusterConfig(cpus_per_worker=cpus), tmp_path).runtime_env() for cpus in (1, 2))
    monkeypatch.setattr(raytune_fsdp, "__path__", [str(tmp_path)])
    three = templates.Templates(ClusterConfig(), tmp_path).runtime_env()
    assert len({each["py_executable"] for each in (one, two, three)}) == 3


def test_trials_of_a_sweep_have_the_same_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def programs() -> list[str]:
        runs = [templates.Templates(ClusterConfig(), tmp_path / name) for name in ("rates-000", "rates-001")]
        return [each.runtime_env()["py_executable"] for each in runs]

    assert len(set(programs())) == 2
    monkeypatch.setenv(SHARED, str(tmp_path / "rates"))
    assert len(set(programs())) == 1


@pytest.mark.parametrize("lib", ["lib", "lib64"])
def test_without_a_template_a_worker_has_the_python_of_its_ray(tmp_path: Path, lib: str) -> None:
    worker = tmp_path / "a b" / lib / "python3.11" / "site-packages" / "ray" / "default_worker.py"
    python = tmp_path / "a b" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho here "$@"\n')
    python.chmod(0o700)
    program = templates.Templates(ClusterConfig(), tmp_path).runtime_env()["py_executable"]
    command = ["bash", "-c", f"exec {program} {shlex.quote(str(worker))} 'c d'"]  # as Ray starts it
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"here {worker} c d\n"


def test_a_launcher_is_used_only_with_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that ends removes both, and the next one writes both, while Ray starts workers."""
    monkeypatch.setattr(templates, "_PARENT", tmp_path)
    monkeypatch.setattr(templates, "worker_of_ray", lambda: "worker")
    monkeypatch.setattr(templates.sys, "executable", "/bin/echo")
    made = templates.Templates(ClusterConfig(), tmp_path)
    made._directory.mkdir()
    template._write_launcher(made._directory)
    (made._directory / LAUNCHER).write_text('#!/bin/sh\necho fork "$@"\n')
    command = ["bash", "-c", f"exec {made.runtime_env()['py_executable']} worker x"]
    program = made._directory / ASK
    whole = program.read_text()
    assert subprocess.run(command, capture_output=True, text=True).stdout == "fork worker x\n"
    for lose in (lambda: program.write_text(""), program.unlink):
        lose()
        assert subprocess.run(command, capture_output=True, text=True).stdout == "worker x\n"
    template._write_launcher(made._directory)
    with open(program) as being_read:
        template._write_launcher(made._directory)
        assert os.fstat(being_read.fileno()).st_nlink == 0 and being_read.read() == whole == program.read_text()


@pytest.mark.parametrize("content", [b"no JSON", b""])
def test_files_of_a_message_that_is_not_understood_are_closed(content: bytes) -> None:
    """Else the template keeps them, and each fork has them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.1)
        before = os.listdir("/proc/self/fd")
        socket.send_fds(theirs, [(7).to_bytes(4, "big")], [1, 2])
        theirs.sendall(content)
        with pytest.raises((ValueError, TimeoutError)):
            receive(ours)
        assert os.listdir("/proc/self/fd") == before


def test_variables_that_count() -> None:
    env = {"A": "1", "PS1": "$", "RAY_JOB_ID": "01", "RAY_TRAIN_X": "1", "NCCL_DEBUG": "x"}
    assert of_process(env) == {"A": "1"}
    assert difference({"A": "1", "B": "1"}, {"A": "1", "C": "1"}) == "B, C"
    given = settings_of_nccl(make_config(run={"deterministic": True}, cluster={"device": "cuda"}), {})
    assert given and of_process(given) == {}, "ranks on GPUs would never be forked"


@pytest.mark.parametrize(
    "env",
    [
        {JOB_CONFIG: json.dumps({"runtime_env": {"pip": ["x"]}})},
        {"RAY_RUNTIME_ENV_HOOK": "a.hook"},
        {"RAYTUNE_FSDP_VERBOSE": "1"},
    ],
    ids=["pip", "hook", "verbose"],
)
def test_where_ray_starts_its_workers_in_another_way_nothing_is_forked(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert templates.Templates(ClusterConfig(), tmp_path).runtime_env()
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert templates.Templates(ClusterConfig(), tmp_path).runtime_env() == {}


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    assert templates.Templates(ClusterConfig(fork_workers=False), tmp_path).runtime_env() == {}
