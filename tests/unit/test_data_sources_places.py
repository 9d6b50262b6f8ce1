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

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.base.urls import without_secrets
from raytune_fsdp.config.rules import safe_name
from raytune_fsdp.config.sections.data import DatasetConfig
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.source import Source, dataset_name


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


def test_no_file_of_a_dataset_is_left_out_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A link to nothing, a pointer among many small files, and files that only look like data."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(40):
        (data / f"{number:02}.jsonl").write_text('{"a": 1}\n')
    (data / "x.jsonl").symlink_to("gone")
    for path in (data, data / "*.jsonl"):
        with pytest.raises(DataError, match=r"data/x\.jsonl: cannot be read \(No such file or directory\)"):
            opened(path, tmp_path / "cache")
    (data / "x.jsonl").unlink()
    (data / "x.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(DataError, match=r"data/x\.jsonl: is a pointer of Git LFS, not the file itself: run `git lfs"):
        opened(data, tmp_path / "cache")
    (data / "x.jsonl").unlink()
    assert len(opened(data, tmp_path / "cache")) == 40 and not caplog.records
    for name in ("old.jsonl.bz2", "more.jsonlines", "LICENSE", ".gitattributes", "part-0"):
        (data / name).write_text("")
    assert len(opened(data, tmp_path / "cache")) == 40
    assert caplog.messages.pop().startswith(f"{data}: not read: more.jsonlines, old.jsonl.bz2; what of it is data")
    (data / "rows.csv").write_text("a\n1\n")
    assert len(opened(data, tmp_path / "cache", file_type="jsonl")) == 40
    assert "not read: more.jsonlines, old.jsonl.bz2, part-0, rows.csv; what" in caplog.messages[-1]
    with pytest.raises(
        DataError, match=r"old\.jsonl\.bz2: is compressed in a way, or of a kind, that is not read; write"
    ):
        opened(data / "old.jsonl.bz2", tmp_path / "cache")


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
        ("data/sub/**/*.gz", ["sub/deep/d.jsonl.gz"]),
    ]:
        source = opened(path, tmp_path / "cache")
        assert source.label == path
        shown = [name.removeprefix("data/") for name in source.fingerprints]
        assert shown == expected
        assert source.rows([0]) == [{"file": shown[0]}]
        assert source.where(0) == f"data/{shown[0]}:1"
    # A run begun before links were followed once goes on with the names that it began with.
    old = open_source(DatasetConfig(path="data/sub/**/*.gz"), cache=tmp_path / "cache", in_place=False, order=2)
    assert len(old.fingerprints) == 41 and old.order_version == 2  # the kernel follows no more links in a path
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


def test_links_are_followed_and_no_directory_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/a/x/1.jsonl", "data/b/2.jsonl", "far/3.jsonl", "far/deep/4.jsonl", "plain/a/5.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"file": name}))
    links = {
        "data/loop": ".", "data/a/up": "../..", "data/0": "b", "data/far": "../far", "data/a/z": "../../far/deep",
        "far/back": "../data", "data/file.jsonl": "b/2.jsonl", "data/self": "self", "data/gone": "no-such",
    }  # fmt: skip
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    expected = ["data/a/x/1.jsonl", "data/a/z/4.jsonl", "data/b/2.jsonl", "data/far/3.jsonl", "data/file.jsonl"]
    for pattern in ("data/**/*.jsonl", "data/**.jsonl", "dat[a]/**/*.jsonl", f"{tmp_path}/data/**/*.jsonl"):
        source = opened(pattern, tmp_path / "cache")
        assert [name.removeprefix(f"{tmp_path}/") for name in source.fingerprints] == expected
        assert source.order_version == 3, "version 2 found other files"
    assert len(opened("**/*.jsonl", tmp_path / "cache").fingerprints) == 6
    # Without links, or with links that lead nowhere again, nothing is different from before.
    (tmp_path / "plain/link").symlink_to("../far/deep")
    for path in ("plain/**/*.jsonl", "plain", "plain/*/*.jsonl"):
        source = opened(path, tmp_path / "cache")
        assert list(source.fingerprints) == ["plain/a/5.jsonl", "plain/link/4.jsonl"] and source.order_version == 2
        old = open_source(DatasetConfig(path=path), cache=tmp_path / "cache", in_place=False, order=2)
        assert old.fingerprints == source.fingerprints
    (tmp_path / "data/self").unlink()
    (tmp_path / "data/gone").unlink()
    assert list(opened("data", tmp_path / "cache").fingerprints) == expected


def test_two_stars_twice_read_a_file_once_and_older_runs_as_often_as_they_did(tmp_path: Path) -> None:
    (tmp_path / "data/a").mkdir(parents=True)
    (tmp_path / "data/a/1.jsonl").write_text('{"file": "1"}\n')
    config = DatasetConfig(path=f"{tmp_path}/data/**/**.jsonl")
    new, old = (open_source(config, cache=tmp_path / "cache", in_place=False, order=order) for order in (4, 2))
    assert (len(new), new.order_version) == (1, 3)
    assert len(old) > 1 and old.fingerprints == new.fingerprints, "only the version tells the two apart"


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
