"""Paths, patterns and directories: which files they mean, in which order, and what they are called."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.config.data import DatasetConfig
from raytune_fsdp.config.rules import safe_name
from raytune_fsdp.data.sources import Source, dataset_name, open_source
from raytune_fsdp.errors import DataError
from raytune_fsdp.urls import without_secrets


def opened(path: Path | str, cache: Path, **fields: Any) -> Source:
    return open_source(DatasetConfig(path=str(path), **fields), cache=cache, in_place=False)


def test_places_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "mixed/b.csv").write_text("a\n1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/README.md").write_text("no data")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path, message in [
        ("missing.jsonl", rf"^missing\.jsonl: no such file \(relative to {tmp_path}\); correct the dataset's path$"),
        (f"{tmp_path}/a/b.jsonl", r"a/b\.jsonl: no such file; correct"),
        ("missing/*.jsonl", r"^missing/\*\.jsonl: no file matches this pattern \(relative to .*\); correct"),
        ("mixed", r"^mixed: has files of several kinds \(jsonl: mixed/a\.jsonl, csv: mixed/b\.csv\); make a dataset"),
        ("mixed/*", r"^mixed/\*: has files of several kinds"),
        ("mixed/a**b.jsonl", r"'\*\*' must stand alone between two slashes"),
        ("empty", r"^empty: is a directory without data files \(1 other files\); name the files with a pattern"),
        ("pipe.jsonl", r"^pipe\.jsonl: is not a regular file"),
        ("nope://x/y.jsonl", r"^nope://x/y\.jsonl: cannot be read \(Protocol not known: nope\); .*install"),
        ("", r"path='' is not a path"),
    ]:
        with pytest.raises(DataError, match=message):
            opened(path, tmp_path / "cache")
    (tmp_path / "cache.txt").write_text("a file")
    with pytest.raises(
        DataError, match=r"cannot be prepared in the cache .*cache\.txt \(Not a directory\); .*data\.cache"
    ):
        opened("mixed/a.jsonl", tmp_path / "cache.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    path.chmod(0)
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be read \(Permission denied\)"):
        opened(path, tmp_path / "cache")


def test_directories_and_patterns_have_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["b.jsonl", "a.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl.gz", "_temporary/x.jsonl", ".hidden/y.jsonl"]
    for name in [*names, "_SUCCESS", "README.txt", "notes.md", "dataset_info.json"]:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"file": name}).encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "data/sub/loop").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for path, expected in [
        ("data", ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl.gz"]),
        ("data/", ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl.gz"]),
        ("data/*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("data/[b]*.jsonl", ["b.jsonl"]),
        ("data/sub/**/*.gz", ["sub/deep/d.jsonl.gz", "sub/loop/sub/deep/d.jsonl.gz"]),
    ]:
        source = opened(path, tmp_path / "cache")
        assert source.label == path
        shown = [name.removeprefix("data/") for name in source.fingerprints]
        assert shown == expected if "**" not in path else shown[0] == expected[0]
        assert source.rows([0]) == [{"file": shown[0]}]
        assert source.where(0) == f"data/{shown[0]}:1"
    source = opened("data/*.jsonl", tmp_path / "cache")
    assert source.rows([1, 0]) == [{"file": "b.jsonl"}, {"file": "a.jsonl"}]
    assert list(source.blocks) == [1, 1]
    monkeypatch.setenv("HOME", str(tmp_path))
    home = opened("~/data/a.jsonl", tmp_path / "cache")
    assert home.where(0) == "~/data/a.jsonl:1"
    assert opened("data/README.txt", tmp_path / "cache", file_type="jsonl").rows([0]) == [{"file": "README.txt"}]
    source = pickle.loads(pickle.dumps(source))
    monkeypatch.chdir("/")
    assert source.rows([0]) == [{"file": "a.jsonl"}]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"path": "data/train.jsonl.gz"}, "train"),
        ({"path": "train.v1.jsonl"}, "train.v1"),
        ({"path": "/x/Some file (2).CSV"}, "Some-file-2-"),
        ({"path": "x/data/"}, "data"),
        ({"path": "data/*.jsonl"}, "data"),
        ({"path": "./data/**/x-*.jsonl"}, "data"),
        ({"path": "train-*.jsonl"}, "train"),
        ({"path": "*.jsonl"}, "dataset"),
        ({"path": "s3://bucket/a/b.parquet?region=x"}, "b"),
        ({"path": "s3://bucket/*.parquet"}, "bucket"),
        ({"path": "hf://datasets/org/chats/**.parquet"}, "chats"),
        ({"hub": "org/Some_Name"}, "Some_Name"),
        ({"path": "é…..x.txt"}, "x"),
        ({"path": "a.txt", "name": "given"}, "given"),
    ],
)
def test_names(fields: dict[str, Any], name: str) -> None:
    assert dataset_name(DatasetConfig(**fields)) == safe_name(name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://AKIA:ab/c+/d@bucket/x/y@z/*.parquet", "s3://bucket/x/y@z/*.parquet"),
        ("s3://AKIA:/abc@bucket/x", "s3://bucket/x"),
        ("s3://AKIA:12/abc@bucket/x", "s3://bucket/x"),
        ("s3://AKIA:abc@bucket/x/y@z?secret=1&region=x", "s3://bucket/x/y@z"),
        ("sftp://me:a:b/c@host:22/x@y", "sftp://host:22/x@y"),
        ("https://host:8080/x@y/z", "https://host:8080/x@y/z"),
        ("s3://bucket/x@y/part-?.jsonl", "s3://bucket/x@y/part-?.jsonl"),
        ("hf://datasets/org/name@main/x.parquet", "hf://datasets/org/name@main/x.parquet"),
        ("/a:b/c@d", "/a:b/c@d"),
    ],
)
def test_secrets_are_cut_off_urls(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_a_hub_that_may_not_be_asked_is_named(tmp_path: Path) -> None:
    """And not taken for a pattern that no file matches."""
    for path in ("hf://datasets/org/chats/**.parquet", "hf://datasets/org/chats/x.parquet"):
        with pytest.raises(DataError, match=rf"^{re.escape(path)}: cannot be read \(.*offline mode is enabled"):
            open_source(DatasetConfig(path=path), cache=tmp_path, in_place=True)
