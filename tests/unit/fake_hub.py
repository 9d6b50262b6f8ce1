"""A hub to push models to and fetch them from, on this machine: accounts, repositories, large files and commits, over
its own protocol. Started as a program, it has the models of a directory, and logs what it sends."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

TOKEN = "hf_theTokenOfSomeone"
USER = "someone"


@dataclass
class Repository:
    """Its newest commit: the hub's own .gitattributes, then whatever was pushed."""

    visibility: str | None
    """As asked for when it was created."""
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    large: set[str] = field(default_factory=set)
    commits: list[dict[str, Any]] = field(default_factory=list)
    seconds_per_piece: float = 0.0
    """Of 64 KiB that are fetched."""
    sends_whole: bool = False
    """Whatever part of a file is asked for, as some proxies and mirrors do."""
    sends_more: bytes = b""
    """After each file."""
    lists: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of some files as they are listed, whatever is in them."""


class Sent(NamedTuple):
    """Of a file: by whom it was asked for, by the variable HF_HUB_USER_AGENT_ORIGIN or else the address, and what."""

    to: str
    file: str
    start: int
    stop: int
    size: int

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.size


class FakeHub(ThreadingHTTPServer):
    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((address, port), Answers)
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.down = 0
        """With another status than 0, it is all that is answered."""
        self.storage_refuses = False
        """As storage does with an address that is too old."""
        self.seen: list[str] = []
        self.sent: list[Sent] = []
        self.breaks_after: int | None = None
        """Bytes of a file after which the connection is closed."""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, directory: Path) -> Repository:
        """A model as it is in a directory, in one commit."""
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
        large = {each for each in files if each.endswith(".safetensors")}
        found = self.repositories[name] = Repository(visibility=None, files=files, large=large, commits=[{}])
        return found

    def log(self, sent: Sent) -> None:
        self.sent.append(sent)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True).start()
        yield hub
        hub.shutdown()


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.server.seen.append(f"{self.command} {path}")
        if self.server.down:
            self._answer(self.server.down, {"error": "down for repairs"})
        elif path.startswith("/large/"):  # a signed URL: no token goes there
            self._put_large(path.removeprefix("/large/"), body)
        elif path == "/api/agent-harnesses":
            self._answer(404, {})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif "/resolve/" in path:
            self._resolve(path)
        elif path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/")
            self._model(f"{owner}/{name}", rest, body)
        else:
            self._account(path, body)

    def _account(self, path: str, body: bytes) -> None:
        if path == "/api/whoami-v2":
            self._answer(200, {"type": "user", "name": USER, "orgs": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            wrong = [{"message": "license is not one"}] if b"license: mine" in body else []
            self._answer(400 if wrong else 200, {"errors": wrong, "warnings": []})
        else:
            assert path.endswith(".git/info/lfs/objects/batch")
            self._batch(json.loads(body)["objects"], mine=path.startswith(f"/{USER}/"))

    def _model(self, name: str, rest: list[str], body: bytes) -> None:
        repository = self.server.repositories.get(name)
        if repository is None:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if rest == ["preupload", "main"]:
            return self._preupload(repository, json.loads(body)["files"])
        if rest == ["commit", "main"]:
            return self._commit(name, repository, [json.loads(line) for line in body.splitlines()])
        if rest in (["tree", "main"], ["tree", commit_id(repository)]):
            return self._answer(200, [entry(path, repository) for path in repository.files])
        if rest == ["xet-write-token", "main"]:
            return self._answer(403, {"error": "Authorization error"})
        if rest and rest not in (["revision", "main"], ["revision", commit_id(repository)]):
            return self._answer(404, {"error": "No such revision"}, {"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {"rfilename": path, "size": each["size"], "blobId": each["oid"],
             "lfs": sha256(each.get("lfs"), repository.lists.get(path))}
            for path, each in ((path, entry(path, repository)) for path in repository.files)
        ]  # fmt: skip
        return self._answer(200, {"id": name, "sha": commit_id(repository), "siblings": siblings, "tags": []})

    def _resolve(self, path: str) -> None:
        owner, name, _, revision, file = path.removeprefix("/").split("/", 4)
        repository = self.server.repositories.get(f"{owner}/{name}")
        if repository is None or revision not in ("main", commit_id(repository)):
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if file not in repository.files:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        about, content = entry(file, repository), repository.files[file]
        if file in repository.large:
            content += repository.sends_more
        ranges = "" if repository.sends_whole else self.headers.get("Range", "")
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", ranges)
        start, stop = (int(wanted[1]), int(wanted[2] or -1) + 1) if wanted else (0, 0)
        stop = min(stop or len(content), len(content))
        tag = about.get("lfs", about)["oid"]
        self.send_response(206 if wanted else 200)
        for key, value in {
            "ETag": f'"{tag}"', "X-Linked-ETag": f'"{tag}"', "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": commit_id(repository), "Content-Length": str(stop - start),
            **({"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"} if wanted else {}),
        }.items():  # fmt: skip
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(f"{owner}/{name}/{file}", content, start, stop, repository.seconds_per_piece)

    def _send(self, file: str, content: bytes, start: int, stop: int, seconds: float) -> None:
        origin = re.search(r"origin/([\w-]+)", self.headers.get("User-Agent", ""))
        last = stop if self.server.breaks_after is None else min(stop, start + self.server.breaks_after)
        at = start
        try:
            while at < last:
                self.wfile.write(content[at : min(last, at + 65536)])
                at = min(last, at + 65536)
                time.sleep(seconds)
        except ConnectionError:  # who asked was killed
            pass
        finally:
            to = origin[1] if origin else self.client_address[0]
            self.server.log(Sent(to, file, start, at, len(content)))
        self.close_connection = last < stop

    do_POST = do_PUT = do_HEAD = do_GET

    def _create(self, asked: dict[str, Any]) -> None:
        owner, repositories = asked["organization"] or USER, self.server.repositories
        name = f"{owner}/{asked['name']}"
        if owner != USER:
            return self._answer(403, {"error": f'You cannot create a model under the namespace "{owner}"'})
        status = 409 if name in repositories else 200
        repositories.setdefault(name, Repository(visibility=asked.get("visibility")))
        return self._answer(status, {"name": name, "url": f"{self.server.url}/{name}", "error": "exists"})

    def _preupload(self, repository: Repository, asked: list[dict[str, Any]]) -> None:
        files = []
        for file in asked:
            path = file["path"]
            there = entry(path, repository) if path in repository.files else {}
            oid = there.get("lfs", there).get("oid")
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer(200, {"files": files})

    def _batch(self, asked: list[dict[str, Any]], *, mine: bool) -> None:
        if not mine:
            return self._answer(403, {"error": "Authorization error"})
        objects = []
        for each in asked:
            actions = {"upload": {"href": f"{self.server.url}/large/{each['oid']}?signed=by-the-hub"}}
            objects.append({**each, **({} if each["oid"] in self.server.stored else {"actions": actions})})
        return self._answer(200, {"transfer": "basic", "objects": objects})

    def _put_large(self, oid: str, content: bytes) -> None:
        assert hashlib.sha256(content).hexdigest() == oid
        if not self.server.storage_refuses:
            self.server.stored[oid] = content
        self._answer(403 if self.server.storage_refuses else 200, {})

    def _commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> None:
        header, *operations = [(line["key"], line["value"]) for line in lines]
        for key, value in operations:
            path = value["path"]
            repository.large.discard(path)
            if key == "deletedFile":
                del repository.files[path]
            elif key == "file":
                repository.files[path] = base64.b64decode(value["content"])
            else:
                assert key == "lfsFile" and len(self.server.stored[value["oid"]]) == value["size"]
                repository.files[path] = self.server.stored[value["oid"]]
                repository.large.add(path)
        done = {f"{key} {value['path']}" for key, value in operations}
        repository.commits.append({"message": header[1]["summary"], "done": done})
        commit = commit_id(repository)
        self._answer(200, {"commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def commit_id(repository: Repository) -> str:
    return f"{len(repository.commits):040x}"


def entry(path: str, repository: Repository) -> dict[str, Any]:
    """Of the listing of a repository: a large file has its SHA-256, a small one the id git gives it."""
    content = repository.files[path]
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found = {"type": "file", "path": path, "size": len(content), "oid": git}
    if path in repository.large:
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return found


def sha256(large: dict[str, Any] | None, listed: str | None) -> dict[str, Any] | None:
    """What the hub says of a large file where it lists a model's files."""
    return large and {"sha256": listed or large["oid"], "size": large["size"], "pointerSize": large["pointerSize"]}


class Logging(FakeHub):
    def log(self, sent: Sent) -> None:
        print(json.dumps(sent), flush=True)


def main(directory: Path, address: str, port: int) -> None:
    """A hub with the models of a directory, `owner/name` each, until it is killed."""
    with Logging(address, port) as hub:
        for model in directory.glob("*/*"):
            hub.add(f"{model.parent.name}/{model.name}", model)
        hub.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
