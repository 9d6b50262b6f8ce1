"""Object stores as sources: a real S3 protocol, and a file system of fsspec."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto")

import boto3
from moto.server import ThreadedMotoServer

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.data.sources import handles
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Source

ROWS = [{"id": index, "text": "é" * (index % 5)} for index in range(3000)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    yield client
    for found in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=found["Key"])


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Source]:
    def opened(path: str, *, in_place: bool = False, progress: Any = None, **fields: Any) -> Source:
        dataset = DatasetConfig(path=path, **fields)
        return open_source(dataset, cache=tmp_path / "cache", in_place=in_place, progress=progress)

    return opened


def parquet(rows: list[dict[str, Any]], row_group_size: int = 1000) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=row_group_size)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def test_text_on_s3_is_copied_once(store: Any, opened: Callable[..., Source], tmp_path: Path) -> None:
    put = store.put_object
    put(Bucket="bucket", Key="data/b c.jsonl", Body=LINES)
    put(Bucket="bucket", Key="data/a.jsonl.gz", Body=gzip.compress(b'{"id": -1}\n'))
    put(Bucket="bucket", Key="data/_SUCCESS", Body=b"")
    put(Bucket="bucket", Key="data/_temporary/x.jsonl", Body=b"{")
    put(Bucket="bucket", Key="data/sub/d.jsonl", Body=b'{"id": -2}\n')
    told: list[tuple[str, int, int]] = []
    source = opened("s3://bucket/data", progress=lambda *facts: told.append(facts))
    shown = ["s3://bucket/data/a.jsonl.gz", "s3://bucket/data/b c.jsonl", "s3://bucket/data/sub/d.jsonl"]
    assert list(source.fingerprints) == shown
    assert source.rows([0, 3001, 1, 3000]) == [{"id": -1}, {"id": -2}, ROWS[0], ROWS[-1]]
    assert source.where(2) == "s3://bucket/data/b c.jsonl:2"
    assert (shown[1], len(LINES), len(LINES)) in told
    assert [
        list(opened(f"s3://bucket/data/{pattern}").fingerprints) for pattern in ("*.jsonl", "**/*.jsonl", "a*")
    ] == [
        shown[1:2],
        shown[1:],
        shown[:1],
    ]
    copies = sorted((tmp_path / "cache").rglob("content"))
    times = [copy.stat().st_mtime_ns for copy in copies]
    again = opened("s3://bucket/data")
    assert again.fingerprints == source.fingerprints
    assert [copy.stat().st_mtime_ns for copy in sorted((tmp_path / "cache").rglob("content"))] == times
    # The same time and size, another content: the ETag tells.
    put(Bucket="bucket", Key="data/a.jsonl.gz", Body=gzip.compress(b'{"id": -3}\n'))
    assert opened("s3://bucket/data").rows([0]) == [{"id": -3}]
    assert source.rows([0]) == [{"id": -1}], "what was opened stays what it was"


def test_parquet_on_s3(store: Any, opened: Callable[..., Source], tmp_path: Path) -> None:
    store.put_object(Bucket="bucket", Key="rows/0.parquet", Body=parquet(ROWS))
    store.put_object(Bucket="bucket", Key="rows/1.parquet", Body=parquet(ROWS[:10]))
    source = pickle.loads(pickle.dumps(opened("s3://bucket/rows/*.parquet", in_place=True)))
    assert list(source.blocks) == [1000, 1000, 1000, 10]
    assert source.rows([3009, 2999, 0, 1500]) == [ROWS[9], ROWS[2999], ROWS[0], ROWS[1500]]
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()) < 3000
    copied = opened("s3://bucket/rows/*.parquet")
    assert copied.rows(range(3010)) == source.rows(range(3010)) == ROWS + ROWS[:10]
    assert list(copied.blocks) == list(source.blocks)
    fingerprint = list(source.fingerprints.values())
    store.put_object(Bucket="bucket", Key="rows/1.parquet", Body=parquet(ROWS[:9] + ROWS[10:11]))
    changed = list(opened("s3://bucket/rows/*.parquet", in_place=True).fingerprints.values())
    assert changed[0] == fingerprint[0] != fingerprint[1] != changed[1]
    handles.OPEN._fork()  # as another process, which has nothing open
    handles.DECODED._fork()
    with pytest.raises(DataError, match=r"rows/1\.parquet: has other content than when it was opened; .*final file"):
        source.rows([3009])


def test_an_object_that_changes_while_it_is_read(store: Any, opened: Callable[..., Source]) -> None:
    store.put_object(Bucket="bucket", Key="rows.parquet", Body=parquet(ROWS))
    source = opened("s3://bucket/rows.parquet", in_place=True)
    assert source.rows([0]) == [ROWS[0]]
    store.put_object(Bucket="bucket", Key="rows.parquet", Body=parquet([{"id": -row["id"]} for row in ROWS]))
    with pytest.raises(DataError, match=r"rows\.parquet: has other content than when it was opened"):
        source.rows([1500])


def test_what_cannot_be_read_from_s3(store: Any, opened: Callable[..., Source], server: str) -> None:
    store.put_object(Bucket="bucket", Key="a/notes.md", Body=b"x")
    for path, message in [
        ("s3://bucket/nope.jsonl", r"^s3://bucket/nope\.jsonl: no such file; correct the dataset's path, or its cred"),
        ("s3://bucket/nope/*.jsonl", r"^s3://bucket/nope/\*\.jsonl: no file matches this pattern; correct"),
        ("s3://bucket/a", r"^s3://bucket/a: is a directory without data files \(1 other files\)"),
        (
            "s3://no-such-bucket/*.jsonl",
            r"^s3://no-such-bucket/\*\.jsonl: cannot be read \(.*NO_SUCH_BUCKET.*credentials",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            opened(path)
    store.put_object(Bucket="bucket", Key="b/x.jsonl", Body=b'{"id": 1}\n')
    source = opened(f"s3://bucket/b/*.jsonl?endpoint_override={server}")
    assert source.rows([0]) == [{"id": 1}]
    assert source.where(0) == "s3://bucket/b/x.jsonl:1"
    assert source.label == "s3://bucket/b/*.jsonl"


def test_secrets_stay_out_of_the_cache_and_of_messages(store: Any, server: str, tmp_path: Path) -> None:
    def open_unchecked(path: str) -> Source:
        # The config refuses credentials where it sees them.
        dataset = DatasetConfig.model_construct(path=path)
        return open_source(dataset, cache=tmp_path / "cache", in_place=False)

    store.put_object(Bucket="bucket", Key="x.jsonl", Body=b'{"id": 1}\n')
    source = open_unchecked(f"s3://key:hidden@bucket/x.jsonl?endpoint_override={server}")
    assert (source.label, source.where(0)) == ("s3://bucket/x.jsonl", "s3://bucket/x.jsonl:1")
    # pyarrow says which URL it cannot take.
    with pytest.raises(DataError, match=r"^s3://bucket/x\.jsonl: cannot be read \(Cannot parse URI: 's3://bucket'"):
        open_unchecked("s3://key:hidden^@bucket/x.jsonl")
    metas = list((tmp_path / "cache").rglob("meta.json"))
    assert metas
    assert not [meta for meta in metas if "hidden" in meta.read_text()]


def test_any_file_system_of_fsspec(opened: Callable[..., Source]) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/place/rows-0.csv", b"a,b\n1,2\n")
    memory.pipe("/place/sub/rows-1.csv", b"a,b\n3,4\n")
    memory.pipe("/place/rows.parquet", parquet(ROWS, 700))
    try:
        source = opened("memory://place/**.csv")
        assert source.rows([1, 0]) == [{"a": "3", "b": "4"}, {"a": "1", "b": "2"}]
        assert source.where(1) == "memory:///place/sub/rows-1.csv:2"
        for in_place in (True, False):
            rows = opened("memory://place/rows.parquet", in_place=in_place)
            assert rows.rows(range(3000)) == ROWS
            assert list(rows.blocks) == [700, 700, 700, 700, 200]
    finally:
        memory.rm("/place", recursive=True)


def test_a_folder_of_the_datasets_library_on_a_store(opened: Callable[..., Source], tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "saved"
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS[:5])).save_to_disk(folder)
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/saved", recursive=True)
    try:
        assert opened("memory://saved").rows([4, 0]) == [ROWS[4], ROWS[0]]
        with pytest.raises(DataError, match=r"memory://saved: split='test' does not exist; set split to one of train"):
            opened("memory://saved", split="test")
    finally:
        memory.rm("/saved", recursive=True)
