"""`split` of directories, files and patterns: no file of another split is ever read, and none is dropped in silence."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.utils import glob_translate

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config.sections.data import DatasetConfig, SourceConfig
from raytune_fsdp.config.sections.eval import ExactTask
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.sources.places import find_files
from raytune_fsdp.data.sources.source import Columns, matcher

HUB = ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl")


def write(directory: Path, names: Sequence[str], readme: str | None = None) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"file": name}) + "\n")
    if readme is not None:
        (directory / "README.md").write_text(f"---\nlicense: mit\n{readme}---\n# A dataset\n")
    return directory


def files(dataset: SourceConfig, **options: Any) -> tuple[set[str], int]:
    found = find_files(dataset, **options)
    top = str(dataset.path).rstrip("/")
    return {file.shown.removeprefix(f"{top}/") for file in found.files}, found.order_version


def chosen(place: Path | str, split: str | None = None, **options: Any) -> tuple[set[str], int]:
    return files(DatasetConfig(path=str(place), split=split), **options)


def test_a_split_of_a_downloaded_folder_is_read_alone(tmp_path: Path) -> None:
    names = [*HUB, "data/validation-00000-of-00001.jsonl"]
    write(tmp_path, [*names, ".git/x.jsonl"], readme="")
    assert chosen(tmp_path, "train") == ({*HUB[:2]}, 4)
    assert chosen(tmp_path, "test") == ({HUB[2]}, 4)
    assert chosen(tmp_path, "all") == ({*names}, 2)
    with pytest.raises(DataError, match=r"has several splits; set split to one of train, validation, test, or to all"):
        chosen(tmp_path)
    with pytest.raises(
        DataError, match=r"split='nonsense' does not exist; set split to one of train, validation, test"
    ):
        chosen(tmp_path, "nonsense")
    source = open_source(
        DatasetConfig(path=str(tmp_path), split="test"),
        cache=tmp_path / ".cache", in_place=False, columns=Columns((), (), every=True),
    )  # fmt: skip
    assert source.rows(range(len(source))) == [{"file": HUB[2]}] and source.order_version == 4


def test_a_run_that_was_begun_before_reads_every_file_as_it_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, HUB)
    for split in (None, "train", "test", "nonsense"):
        for order in (2, 3):
            assert chosen(tmp_path, split, order=order) == ({*HUB}, 2)
    assert "goes on with all of its splits (train, test); a new run reads one of them" in caplog.text
    caplog.clear()
    chosen(tmp_path, "all", order=2)
    assert not caplog.records, "a new run that reads every file has this version, too"
    assert chosen(tmp_path / HUB[0], "test", order=2)[1] == 2


def test_a_new_run_of_one_split_has_the_version_that_it_had(tmp_path: Path) -> None:
    write(tmp_path, ["a.jsonl", "sub/b.jsonl"])
    write(tmp_path / "named", ["train-a.jsonl", "train-b.jsonl"])
    for place, split in (
        (tmp_path / "a.jsonl", None), (tmp_path / "*.jsonl", "train"), (tmp_path / "sub", None),
        (tmp_path / "sub", "train"), (tmp_path / "named", None), (tmp_path / "named", "train"),
    ):  # fmt: skip
        assert chosen(place, split) == chosen(place, split, order=2)
    write(tmp_path / "evaluation", ["test-0.jsonl"])
    assert chosen(tmp_path / "evaluation") == ({"test-0.jsonl"}, 2), "with one split it is that one"


def test_a_file_or_a_pattern_names_its_files(tmp_path: Path) -> None:
    write(tmp_path, ["train.jsonl", "test.jsonl"])
    for name in ("test.jsonl", "*.jsonl", "**/*.jsonl"):
        assert chosen(tmp_path / name, "train") == chosen(tmp_path / name), "as in configs from before"
        for split in ("test", "nonsense", "all"):
            with pytest.raises(
                DataError, match=rf"split='{split}', but a file or a pattern .*; leave split out, or name"
            ):
                chosen(tmp_path / name, split)
    memory = fsspec.filesystem("memory")
    memory.pipe("/one/test.jsonl", b"{}\n")
    try:
        with pytest.raises(DataError, match=r"split='test', but a file or a pattern names its own files"):
            chosen("memory://one/test.jsonl", "test")
    finally:
        memory.rm("/one", recursive=True)


def test_no_file_is_dropped_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, ["train.jsonl", "more.jsonl", "other/chats.jsonl"])
    with pytest.raises(
        DataError,
        match=r"has the split train, and more\.jsonl, other/chats\.jsonl, which belong\(s\) to no split; set split to "
        r"train for its files alone, or to all for every file",
    ):
        chosen(tmp_path)
    assert not caplog.records
    assert chosen(tmp_path, "train")[0] == {"train.jsonl"}
    assert "split=train leaves more.jsonl, other/chats.jsonl out, which belong(s) to no split" in caplog.text
    assert len(chosen(tmp_path, "all")[0]) == 3
    with pytest.raises(DataError, match=r"split='test' does not exist, as the names of its files tell none apart"):
        chosen(tmp_path / "other", "test")


def test_of_a_prefix_in_a_store_a_split_is_read_alone() -> None:
    memory = fsspec.filesystem("memory")
    for name in HUB:
        memory.pipe(f"/stored/{name}", b"{}\n")
    try:
        found = find_files(DatasetConfig(path="memory://stored", split="test"))
        assert [file.shown for file in found.files] == [f"memory:///stored/{HUB[2]}"] and found.order_version == 4
        memory.pipe(
            "/stored/README.md",
            b"---\nconfigs:\n- data_files: {first: data/train-00000*, rest: [data/train-00001*, data/test*]}\n---\n",
        )
        found = find_files(DatasetConfig(path="memory://stored", split="rest"))
        assert len(found.files) == 2
    finally:
        memory.rm("/stored", recursive=True)


CONFIGS = """configs:
- config_name: small
  data_files:
  - split: train
    path: small/*.jsonl
- config_name: whole
  default: true
  data_files:
  - split: train
    path: ["a.jsonl", "sub/**"]
  - {split: held, path: b.jsonl}
  - split: gone
    path: not-downloaded/*
dataset_info:
- config_name: [not, read]
"""


def test_a_readme_says_which_files_a_split_has(tmp_path: Path) -> None:
    names = ["a.jsonl", "b.jsonl", "sub/deep/test.jsonl", "small/train.jsonl"]
    place = write(tmp_path / "whole", names, CONFIGS)
    assert chosen(place, "train") == ({"a.jsonl", "sub/deep/test.jsonl"}, 4)
    assert chosen(place, "held")[0] == {"b.jsonl"}
    with pytest.raises(DataError, match=r"set split to one of train, held, or to all"):
        chosen(place, "gone")
    folder = write(tmp_path / "folder", ["x/train.jsonl", "x/test.jsonl", "y.jsonl"], "configs:\n- data_dir: x\n")
    assert chosen(folder, "test")[0] == {"x/test.jsonl"}
    stars = "configs:\n- data_files:\n  - {split: train, path: 'x/**.jsonl'}\n  - {split: test, path: '*.jsonl'}\n"
    hub = write(tmp_path / "hub", ["x/a.jsonl", "x/y/b.jsonl", "c.jsonl"], stars)
    assert chosen(hub, "train")[0] == {"x/a.jsonl", "x/y/b.jsonl"} and len(chosen(hub, order=2)[0]) == 3
    (hub / "README.md").write_text((hub / "README.md").read_text().replace("x/**.jsonl", "x/a**b.jsonl"))
    with pytest.raises(DataError, match=r"a pattern in the `configs` of its README\.md: '\*\*' must stand alone"):
        chosen(hub, "train")
    assert len(chosen(hub, order=3)[0]) == 3
    other = write(tmp_path / "other", ["x/a.jsonl", "y.jsonl"], "configs:\n- data_dir: x\n")
    assert chosen(other, "train")[0] == {"x/a.jsonl"}
    several = write(tmp_path / "several", ["a.jsonl"], "configs:\n- config_name: en\n- config_name: fr\n")
    with pytest.raises(DataError, match=r"has the configurations en, fr, and none is the default; name the files with"):
        chosen(several)
    assert chosen(several, "all")[0] == {"a.jsonl"}
    broken = write(tmp_path / "broken", ["a.jsonl"], "configs:\n- {data_files: [\n")
    with pytest.raises(DataError, match=r"README\.md: cannot be read \(`configs` of its header: line 4.*split: all"):
        chosen(broken)
    assert chosen(broken, order=2)[0] == {"a.jsonl"}
    (broken / "README.md").unlink()
    os.mkfifo(broken / "README.md")
    with pytest.raises(DataError, match=r"README\.md: cannot be read \(is a pipe, not a regular file\)"):
        chosen(broken)


def test_names_tell_splits_apart_as_the_datasets_library_has_it(tmp_path: Path) -> None:
    data_files = pytest.importorskip("datasets.data_files")
    folders: list[tuple[str, ...]] = [
        HUB,
        (*HUB, "extra.jsonl", "data/dev-00000-of-00001-ab12.jsonl"),
        ("data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001.jsonl"),
        ("train.jsonl", "dev.jsonl", "testing_1.jsonl", "contest.jsonl"),
        ("en-train.jsonl", "fr/train.v2.jsonl", "fr/my valid 3.jsonl", "eval9.jsonl"),
        ("train/a.jsonl", "my-validation-set/test.jsonl", "deep/evaluation/x/y.jsonl", "other/z.jsonl"),
        ("trainer.jsonl", "retest.jsonl", "latest.jsonl"),
        ("a.jsonl", "deep/b.jsonl"),
        ("test/train.jsonl", "train/test.jsonl"),
    ]
    for number, names in enumerate(folders):
        place = write(tmp_path / str(number), names)
        patterns = data_files.get_data_patterns(str(place))
        theirs: dict[str, set[str]] = {str(split): set() for split in patterns}
        for split, some in patterns.items():
            for pattern in some:
                with suppress(FileNotFoundError):
                    matches = data_files.resolve_pattern(pattern, str(place))
                    theirs[str(split)] |= {str(Path(file).relative_to(place)) for file in matches}
        for split, expected in theirs.items():
            assert chosen(place, split)[0] == expected, (names, split)
        known = [split for split in ("train", "validation", "test", "dev", "train_sft") if split not in theirs]
        for split in known:
            with pytest.raises(DataError, match=f"split='{split}' does not exist"):
                chosen(place, split)


def test_questions_are_of_the_test_split_as_before(tmp_path: Path) -> None:
    def asked(place: Path, split: str | None = None) -> set[str]:
        return files(ExactTask(type="exact", path=str(place), split=split))[0]

    write(tmp_path, HUB)
    assert asked(tmp_path) == asked(tmp_path, "test") == {HUB[2]}
    assert asked(tmp_path, "train") == {*HUB[:2]}
    assert len(asked(tmp_path / HUB[2], "test")) == 1, "as configs from before say of a file"
    with pytest.raises(DataError, match=r"split='train', but a file"):
        asked(tmp_path / HUB[2], "train")


def test_no_pattern_of_a_readme_takes_long(tmp_path: Path) -> None:
    """Its stars are matched part by part; the expression of the whole took minutes for this one."""
    name = "a" * 60 + ".jsonl"
    stars = f"configs:\n- data_files: '{'*a' * 12}*b'\n"
    folder = write(tmp_path / "stars", [name], stars)
    began = time.process_time()
    assert chosen(folder)[0] == {name}, "as no file is of its split, names decide"
    assert time.process_time() - began < 1
    many = write(tmp_path / "many", [name], "configs:\n- data_files:\n" + "  - 'x*'\n" * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytune_fsdp.data.sources.splits._MOST_COMPARED", 2)
        with pytest.raises(DataError, match="have 3 patterns for 1 files, more than are compared"):
            chosen(many)


@pytest.mark.parametrize("seed", range(4))
def test_patterns_match_what_they_match_in_fsspec(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        pattern = "/".join(draw.choices(["*", "**", "a", "b*", "*a", "?", "[ab]", "a*b", "[!a]"], k=draw.randint(1, 4)))
        matches, whole = matcher(pattern), re.compile(glob_translate(pattern)).match
        for _ in range(5):
            path = "/".join(draw.choices(["a", "b", "ab", "ba", "aab"], k=draw.randint(1, 4)))
            assert matches(path) == (whole(path) is not None), (pattern, path)


@pytest.mark.parametrize("away", ["../mine.jsonl", "/etc/mine.jsonl", "sub/../../mine.jsonl", "..", ""])
def test_a_saved_folder_names_no_file_that_is_elsewhere(tmp_path: Path, away: str) -> None:
    """Someone else has written it: a file of this machine would be trained on, and its rows could be published."""
    write(tmp_path, ["mine.jsonl", "saved/rows.jsonl", "both/train/rows.jsonl", "both/state.json"])
    (tmp_path / "saved/dataset_info.json").write_text("{}")
    said = r"json: cannot be read \(it names '.*', which is not beside it\)"

    def save(name: Any) -> None:
        (tmp_path / "saved/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))

    save("rows.jsonl")
    assert chosen(tmp_path / "saved")[0] == {"rows.jsonl"}
    save(away)
    with pytest.raises(DataError, match=f"saved/state.{said}"):
        chosen(tmp_path / "saved")
    save(7)
    with pytest.raises(DataError, match=r"saved/state\.json: cannot be read \(it names no files\)"):
        chosen(tmp_path / "saved")
    (tmp_path / "both/dataset_dict.json").write_text(json.dumps({"splits": [away]}))
    with pytest.raises(DataError, match=f"both/dataset_dict.{said}"):
        chosen(tmp_path / "both", "all")
