"""Files of a web server: what it says of their version is heard; where it says nothing, their content tells."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytune_fsdp.base.errors import DataError, RaytuneError
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Source
from tests.runs import make_config

pytest.importorskip("aiohttp")


class Site(ThreadingHTTPServer):
    """Serves what is in `files`, and says of their versions what `header` names."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.modified = "Thu, 26 Nov 2026 08:00:00 GMT"
        self.header: str | None = None
        self.asked: Counter[str] = Counter()
        """How often content was read. To see whether a file is there, pyarrow asks for all of it, and closes."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def about(self, content: bytes) -> dict[str, str]:
        values = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "Content-MD5": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "Last-Modified": self.modified,
        }
        return {} if self.header is None else {self.header: values[self.header]}


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_HEAD(self) -> None:
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        for name, value in self.server.about(content or b"").items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.server.asked[self.path] += "Range" in self.headers
        self.wfile.write(self.server.files.get(self.path, b""))

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever, args=(0.05,))
        thread.start()
        yield site
        site.shutdown()
        thread.join()


@pytest.fixture
def opened(site: Site, tmp_path: Path) -> Callable[..., Source]:
    """A file as a command opens it."""

    def opened(name: str, *, in_place: bool = False) -> Source:
        site.asked.clear()
        return open_source(DatasetConfig(path=site.url + name), cache=tmp_path / "cache", in_place=in_place)

    return opened


def rows(first: int) -> list[dict[str, int]]:
    return [{"id": first + index} for index in range(5)]


def jsonl(first: int) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows(first)).encode()


def table(first: int) -> Any:
    return pa.Table.from_pylist(rows(first))


def parquet(first: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table(first), sink, row_group_size=2, use_dictionary=False, compression="none")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def arrow(first: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table(first).schema) as writer:
        writer.write_table(table(first))
    content: bytes = sink.getvalue().to_pybytes()
    return content


@pytest.mark.parametrize("header", ["ETag", "Content-MD5", "Last-Modified", None])
def test_other_content_of_the_same_size_is_other_data(site: Site, opened: Callable[..., Source], header: str) -> None:
    site.header = header
    site.files["/rows.jsonl"] = jsonl(10)
    before = opened("/rows.jsonl")
    assert before.rows(range(5)) == rows(10) and site.asked["/rows.jsonl"] == 1
    site.files["/rows.jsonl"], site.modified = jsonl(20), "Thu, 26 Nov 2026 09:00:00 GMT"
    after = opened("/rows.jsonl")
    assert after.rows(range(5)) == rows(20) and site.asked["/rows.jsonl"] == 1
    assert before.fingerprints.keys() == after.fingerprints.keys() and before.fingerprints != after.fingerprints
    assert before.rows(range(5)) == rows(10), "what was opened stays what it was"


@pytest.mark.parametrize(("header", "times"), [("ETag", 0), ("Content-MD5", 0), ("Last-Modified", 0), (None, 1)])
def test_a_file_of_no_version_is_read_again_once_a_command(
    site: Site, opened: Callable[..., Source], tmp_path: Path, header: str, times: int
) -> None:
    """The same content is the same data, and its rows are not looked for again."""
    site.header = header
    site.files["/rows.jsonl"] = jsonl(10)
    fingerprints = opened("/rows.jsonl").fingerprints
    kept = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("spans"))
    again = opened("/rows.jsonl")
    assert again.fingerprints == fingerprints and site.asked["/rows.jsonl"] == times
    # What a rank has got asks nobody, whatever the server has by now.
    site.files.clear()
    rank = pickle.loads(pickle.dumps(again))
    assert rank.rows([4, 0]) == [rows(10)[4], rows(10)[0]] and site.asked["/rows.jsonl"] == times
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").rglob("spans")) == kept
    assert not list((tmp_path / "cache" / "files").glob("*.tmp")), "what was fetched is not kept twice"


def test_the_same_content_of_another_time_is_the_same_data(site: Site, opened: Callable[..., Source]) -> None:
    site.header, site.files["/rows.jsonl"] = "Last-Modified", jsonl(10)
    before = opened("/rows.jsonl").fingerprints
    site.modified = "Thu, 26 Nov 2026 09:00:00 GMT"
    assert opened("/rows.jsonl").fingerprints == before and site.asked["/rows.jsonl"] == 1
    site.header = None
    assert opened("/rows.jsonl").fingerprints == before


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("/rows.parquet", parquet), ("/rows.arrow", arrow),
        ("/rows.jsonl.gz", lambda at: gzip.compress(jsonl(at), mtime=0)),
        ("/rows.parquet.gz", lambda at: gzip.compress(parquet(at), mtime=0)),
    ],
    ids=["parquet", "arrow", "jsonl.gz", "parquet.gz"],
)  # fmt: skip
def test_every_kind_of_file_is_known_by_its_content(
    site: Site, opened: Callable[..., Source], name: str, make: Callable[[int], bytes], in_place: bool
) -> None:
    """Also Parquet that would be read in place: it could change between two row groups, and nobody would know."""
    site.files[name] = make(10)
    before = opened(name, in_place=in_place)
    assert site.asked[name] == 1
    site.files[name] = make(20)
    assert len(make(10)) == len(make(20)) or name.endswith(".gz")
    assert pickle.loads(pickle.dumps(before)).rows(range(5)) == rows(10)
    after = opened(name, in_place=in_place)
    assert after.rows(range(5)) == rows(20) and site.asked[name] == 1
    assert before.fingerprints != after.fingerprints and list(before.blocks) == list(after.blocks)
    site.files[name] = make(10)
    assert opened(name, in_place=in_place).fingerprints == before.fingerprints


def test_a_server_that_fails_and_a_full_cache_are_named(
    site: Site, opened: Callable[..., Source], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"^{site.url}/none\.jsonl: (no such file|cannot be read)"):
        opened("/none.jsonl")
    site.files["/rows.jsonl"] = jsonl(10)
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(DataError, match=r"/rows\.jsonl: cannot be prepared in the cache .*change data.cache.path"):
        opened("/rows.jsonl")


def test_a_run_reads_such_a_file_once_a_command_and_ends_with_its_content(site: Site, tmp_path: Path) -> None:
    from raytune_fsdp import finetune

    def trained(steps: int) -> int:
        site.asked.clear()
        data = {
            "train": [{"path": f"{site.url}/rows.jsonl", "format": {"type": "tokens"}}],
            "seq_len": 48,
            "window": 32,
        }
        train = {"global_batch": 4, "micro_batch": 2, "max_steps": steps}
        optim = {"schedule": {"type": "constant"}, "warmup_steps": 0}
        result = finetune(make_config(tmp_path, data=data, train=train, optim=optim, checkpoint={"every": 2}))
        return result.steps

    make_config(tmp_path)
    content = site.files["/rows.jsonl"] = (tmp_path / "tokens.jsonl").read_bytes()
    assert trained(2) == 2 and site.asked["/rows.jsonl"] == 1
    assert trained(4) == 4 and site.asked["/rows.jsonl"] == 1
    site.files["/rows.jsonl"] = content.replace(b"[3,", b"[4,").replace(b"[5,", b"[6,")
    assert len(site.files["/rows.jsonl"]) == len(content) and site.files["/rows.jsonl"] != content
    with pytest.raises(RaytuneError, match=r"rows\.jsonl"):
        trained(6)
