"""What a hub that refuses, or does not answer, is turned into: a line within ten seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.model.directory.hub_weights import HUB_SECONDS
from tests.unit.test_bad_input import flags, says

LIMIT_SECONDS = 10

NAMES = """
import json, os, sys, time
from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.model.directory.files import locate
assert "huggingface_hub" not in sys.modules

def work(environment, names, said):
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(os.open(f"{said}{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    import huggingface_hub
    for name, revision in names:
        started = time.monotonic()
        try:
            found = str(locate(name, revision, field="model.path", weights=True))
        except ModelError as error:
            found = "error: " + str(error)
        print(json.dumps([found, time.monotonic() - started]), flush=True)

for line in sys.stdin:
    if (pid := os.fork()) == 0:
        code = 1
        try:
            work(*json.loads(line))
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(os.waitpid(pid, 0)[1], flush=True)
"""
"""The hub's library reads its environment when it is imported: this process forks one for each."""


class Hub(BaseHTTPRequestHandler):
    """Says no in the hub's way: the name of a model is the status and the code of the answer."""

    def do_GET(self) -> None:
        words = self.path.split("/")
        status, code = (int(words[3][1:]), words[4]) if self.path.startswith("/api/models/s") else (404, "any")
        self.send_response(status)
        if code != "any":
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", f"the hub says {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """Takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def environment(endpoint: str, cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}


Locate = Callable[..., list[str]]


@pytest.fixture(scope="module")
def locate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locate]:
    said = tmp_path_factory.mktemp("said") / "by-"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with subprocess.Popen(
        [sys.executable, "-c", NAMES], env=kept, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def found(endpoint: str, cache: Path, *names: tuple[str, str | None], quiet: bool = True) -> list[str]:
            """Where those models are, or the error; each within the limit. `quiet`: the hub's library says nothing."""
            print(json.dumps([environment(endpoint, cache), names, str(said)]), file=stdin, flush=True)
            status, printed, error = stdout.readline(), Path(f"{said}1").read_text(), Path(f"{said}2").read_text()
            assert status == "0\n", error
            answers = [json.loads(line) for line in printed.splitlines()]
            assert quiet == (error == "") and len(answers) == len(names)
            for place, seconds in answers:
                assert seconds < LIMIT_SECONDS, f"{seconds:.1f} s for: {place}"
            return [place for place, _ in answers]

        yield found
        process.kill()


def test_a_hub_that_refuses(hub: str, locate: Locate, tmp_path: Path) -> None:
    names = ["s403/GatedRepo", "s401/GatedRepo", "s404/RepoNotFound", "s401/RepoNotFound", "s401/any", "s500/any"]
    asked = [*((name, None) for name in names), ("s404/RevisionNotFound", "v9")]
    gated, gated_too, missing, private, token, down, revision = locate(hub, tmp_path, *asked)
    for line, name in ((gated, "s403/GatedRepo"), (gated_too, "s401/GatedRepo")):
        says(line, f"error: model.path={name}: ", "restricted", "accept its terms", "HF_TOKEN")
    for line, name in ((missing, "s404/RepoNotFound"), (private, "s401/RepoNotFound")):
        says(line, f"error: model.path={name}: ", "neither a directory here nor a model on the hub", "HF_TOKEN")
    says(token, "the hub refuses", "401", "HF_TOKEN")
    says(down, "the hub cannot be reached", "500", "give the path of a downloaded model")
    says(revision, "error: model.path=s404/RevisionNotFound at revision v9: ", "no such revision")


def test_no_network(locate: Locate, tmp_path: Path) -> None:
    (line,) = locate("http://127.0.0.1:9", tmp_path, ("someone/some-model", None))
    says(line, "error: model.path=someone/some-model: ", "hub cannot be reached", "refused", "give the path")
    assert "\n" not in line


class Public(Hub):
    """Has a model of one small file."""

    def do_GET(self) -> None:
        commit, said = "0" * 40, b"{}"
        if "/tree/" in self.path:
            said = json.dumps([{"type": "file", "path": "config.json", "size": 2, "oid": "0123"}]).encode()
        elif self.path.startswith("/api/"):
            said = json.dumps({"id": "a/b", "sha": commit, "siblings": [{"rfilename": "config.json"}]}).encode()
        self.send_response(200)
        for name, value in (("X-Repo-Commit", commit), ("ETag", '"0123"'), ("Content-Length", str(len(said)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(said if self.command == "GET" else b"")

    do_HEAD = do_GET


def test_a_cache_that_cannot_be_written(locate: Locate) -> None:
    """The hub answers, and its files have no place here."""
    home = Path("/proc/nowhere")  # no directory can be made there, not even by root
    with ThreadingHTTPServer(("127.0.0.1", 0), Public) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        (line,) = locate(f"http://127.0.0.1:{server.server_address[1]}", home, ("a/b", None), quiet=False)
        server.shutdown()
    says(line, f"error: model.path=a/b: HF_HOME={home} cannot be written", "set HF_HOME to a place")
    assert "reached" not in line


@pytest.mark.slow
def test_a_hub_that_never_answers(silent_hub: str, locate: Locate, tmp_path: Path) -> None:
    (line,) = locate(silent_hub, tmp_path, ("someone/some-model", None))
    says(line, "hub cannot be reached", f"no answer within {HUB_SECONDS} s", "path of a downloaded model")


def test_a_model_in_the_cache_needs_no_network(locate: Locate, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--some-model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    asked = [("someone/some-model", None), ("someone/some-model", commit), ("someone/some-model", "other")]
    newest, pinned, other = locate("http://127.0.0.1:9", tmp_path, *asked)
    assert newest == pinned == str(snapshot)
    says(other, "at revision other", "not in the local cache")


@pytest.mark.slow
def test_the_command_without_a_network(tmp_path: Path) -> None:
    words = flags(tmp_path, model__path="someone/some-model")
    command = [sys.executable, "-m", "raytune_fsdp.cli.main", "train", *words]
    done = subprocess.run(command, env=environment("http://127.0.0.1:9", tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    says(done.stderr, "error: model.path=someone/some-model: ", "hub cannot be reached")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
