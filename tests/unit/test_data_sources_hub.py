"""The Hugging Face hub as a source, over its own protocol: by name, and its Parquet files in place."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = [{"id": index, "text": "é" * index} for index in range(100)]
ROOT = Path(__file__).parents[2]


class Hub(BaseHTTPRequestHandler):
    """One dataset, org/chats, at one commit; as much of the hub's protocol as its client needs."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    commit: str
    seen: list[str]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.seen.append(f"{self.command} {path}")
        if path.startswith("/api/datasets/org/chats/tree/"):
            self._tree(path.removeprefix("/api/datasets/org/chats/tree/").partition("/")[2])
        elif "/resolve/" in path:
            self._file(path.split("/resolve/")[1].split("/", 1)[1])
        elif path in ("/api/datasets/org/chats", f"/api/datasets/org/chats/revision/{self.commit}"):
            siblings = [{"rfilename": name} for name in self.files]
            self._answer(200, json.dumps({"id": "org/chats", "sha": self.commit, "siblings": siblings, "tags": []}))
        else:
            code = "RevisionNotFound" if "/revision/" in path else "RepoNotFound"
            self._answer(404, "{}", {"X-Error-Code": code})

    do_HEAD = do_POST = do_GET

    def _tree(self, folder: str) -> None:
        found: dict[str, dict[str, Any]] = {}
        for name, content in self.files.items():
            if not name.startswith(f"{folder}/" if folder else ""):
                continue
            found[name] = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            if not folder:
                found["data"] = {"type": "directory", "path": "data", "size": 0, "oid": "0" * 40}
        if "recursive=true" not in self.path.lower():
            found = {name: entry for name, entry in found.items() if "/" not in name[len(folder) + bool(folder) :]}
        self._answer(200, json.dumps(list(found.values())))

    def _file(self, name: str) -> None:
        headers = {"X-Repo-Commit": self.commit}
        if name not in self.files:
            return self._answer(404, "", {**headers, "X-Error-Code": "EntryNotFound"})
        content = self.files[name]
        headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            piece = content[int(first) : int(last or len(content)) + 1]
            end = int(first) + len(piece) - 1
            return self._answer(206, piece, {**headers, "Content-Range": f"bytes {first}-{end}/{len(content)}"})
        return self._answer(200, content, headers)

    def _answer(self, code: int, body: str | bytes, headers: dict[str, str] | None = None) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=30)
    files = {"data/train-0.parquet": sink.getvalue().to_pybytes(), "README.md": b"# chats\n"}
    answers = type("Answers", (Hub,), {"files": files, "commit": "a" * 40, "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield answers, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# The hub's client reads where the hub is when it is imported, so this is a process of its own.
SCRIPT = """
import json, sys
from pathlib import Path
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.base.errors import DataError
for fields in json.loads(sys.argv[1]):
    try:
        source = open_source(DatasetConfig(**fields), cache=Path(sys.argv[2]), in_place=True)
        found = [source.rows(range(len(source))), list(source.blocks), dict(source.fingerprints)]
    except DataError as error:
        found = str(error)
    print("found:" + json.dumps(found))
"""


def ask(endpoint: str, place: Path, *datasets: dict[str, str]) -> list[Any]:
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(place / "hf")}
    command = [sys.executable, "-c", SCRIPT, json.dumps(datasets), str(place / "cache")]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("found:")) for line in done.stdout.splitlines() if line.startswith("found:")]


@pytest.mark.slow
def test_the_hub(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    server, endpoint = hub
    in_place, by_name, split, revision, name = ask(
        endpoint,
        tmp_path,
        {"path": "hf://datasets/org/chats/**.parquet"},
        {"hub": "org/chats"},
        {"hub": "org/chats", "split": "dev"},
        {"hub": "org/chats", "revision": "v9"},
        {"hub": "org/nope"},
    )
    assert in_place[:2] == [ROWS, [30, 30, 30, 10]]
    assert list(in_place[2]) == ["hf://datasets/org/chats/data/train-0.parquet"]
    assert by_name[0] == ROWS
    assert list(by_name[2]) == ["org/chats"]
    assert "split=dev: cannot be loaded (Unknown split" in split
    assert "Should be one of ['train']" in split
    assert "revision=v9: cannot be loaded (404 Client Error. Revision Not Found" in revision
    assert name.startswith("hub=org/nope, split=train: cannot be loaded (404 Client Error. Repository Not Found")
    # Another node, which has only our cache, asks the hub for the commit and downloads nothing.
    server.seen.clear()
    other = tmp_path / "other"
    other.mkdir()
    (other / "cache").symlink_to(tmp_path / "cache")
    assert ask(endpoint, other, {"hub": "org/chats"}) == [by_name]
    assert "GET /api/datasets/org/chats" in server.seen
    assert not [seen for seen in server.seen if "/resolve/" in seen or "/tree/" in seen]
    # A commit that changes nothing about the rows changes nothing about the data.
    server.commit = "b" * 40
    assert ask(endpoint, tmp_path, {"hub": "org/chats"}) == [by_name]
    # With no hub at all, what it said last counts.
    assert ask("http://127.0.0.1:9", other, {"hub": "org/chats"}) == [by_name]
