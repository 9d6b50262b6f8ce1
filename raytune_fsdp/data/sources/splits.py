"""Choose the files of a directory: those of one split, which its README.md or else the files' own names tell.

The rules are those of the `datasets` library, except that it silently drops a file that belongs to no split. Here no
file is dropped silently.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config.sections.data import EVERY_SPLIT, SourceConfig
from raytune_fsdp.config.text import parse, problem_line, spelled
from raytune_fsdp.data.mixture import FOURTH_ORDER, OLDEST_ORDER
from raytune_fsdp.data.sources.source import (
    data_files,
    data_left_out,
    expand_stars,
    has_wildcard,
    matcher,
    reading,
    shorten,
)

logger = logging.getLogger(__name__)

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_BETWEEN = "[-._ 0-9]"
_NAMED = {split: f"(?:.*{_BETWEEN})?(?:{'|'.join(words)})" for split, words in _WORDS.items()}
_IN_FOLDER = {split: re.compile(f"{named}(?:{_BETWEEN}.*)?", re.DOTALL) for split, named in _NAMED.items()}
_IN_FILE = {split: re.compile(f"{named}{_BETWEEN}.*", re.DOTALL) for split, named in _NAMED.items()}
# Names of files as the hub writes them.
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_README = "README.md"
_HEADER = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)
# Only the part `configs` of a header, which may be megabytes long, as it describes the columns of all configurations.
_CONFIGS = re.compile(r"^configs:.*\n?(?:(?:[ \t#-].*|[ \t]*)(?:\n|\Z))*", re.MULTILINE)
_WAYS_OUT = "name the files with a pattern, or set split: all for every file"
_SHOWN = 8
_MOST_COMPARED = 10_000_000
"""Names with patterns, at two microseconds each."""

Splits = Mapping[str, Sequence[str]]
"""The names of the files of each split."""


class SplitFiles:
    """Chooses the files of a directory that are read, when called with their names relative to it."""

    def __init__(self, dataset: SourceConfig, shown: str, order: int) -> None:
        self._dataset = dataset
        self._shown = shown
        self._as_before = order < FOURTH_ORDER
        self._asked = False
        self.order_version = OLDEST_ORDER
        """The lowest version of the order that chooses these files; known after the call."""

    def __call__(self, names: list[str], read: Callable[[str], bytes]) -> list[str]:
        self._asked = True
        if "dataset_dict.json" in names:
            return self._of_saved(read)
        if {"state.json", "dataset_info.json"} <= set(names):
            self._check_saved(read)
            return self._saved_files("", read)
        dataset, split = self._dataset, self._dataset.split
        files = data_files(names, dataset.file_type)
        if not files:
            kind = "" if dataset.file_type == "auto" else f" of file_type={dataset.file_type}"
            raise DataError(
                f"{self._shown}: is a directory without data files{kind} ({len(names)} other files); name the files "
                "with a pattern, and their kind in file_type"
            )
        if others := data_left_out(names, files, dataset.file_type):
            logger.warning(
                "%s: not read: %s; what of it is data belongs into a dataset of its own, in a format that is read",
                self._shown, _some(others),
            )  # fmt: skip
        if split == EVERY_SPLIT:
            return files
        if self._as_before:
            self._warn(files, names, read)
            return files
        splits = splits_of(files, names, read, shown=self._shown)
        if not splits:
            if split not in (None, dataset.usual_split):
                raise DataError(
                    f"{self._shown}: split={split!r} does not exist, as the names of its files tell none apart; leave "
                    "split out, or name the files with a pattern"
                )
            return files
        known = {name for found in splits.values() for name in found}
        wanted = self._chosen(splits, [name for name in files if name not in known])
        among = {name for each in wanted for name in splits[each]}
        found = [name for name in files if name in among]
        if found != files:
            self.order_version = FOURTH_ORDER
        return found

    def check(self) -> None:
        """Refuse `split` for anything but a directory: a file or a pattern names its own files."""
        split = self._dataset.split
        if not (self._asked or self._as_before or split in (None, self._dataset.usual_split)):
            raise DataError(
                f"{self._shown}: split={split!r}, but a file or a pattern names its own files; leave split out, or "
                "name the directory"
            )

    def _of_saved(self, read: Callable[[str], bytes]) -> list[str]:
        """Choose the files of a folder with several datasets that Dataset.save_to_disk wrote."""
        splits = self._saved("dataset_dict.json", "splits", read)
        before = [self._dataset.split or self._dataset.usual_split]
        chosen = before if self._as_before else self._chosen(splits, ())
        for name in chosen:
            self._check_known(name, splits)
        if chosen != before:
            self.order_version = FOURTH_ORDER
        return [file for name in chosen for file in self._saved_files(f"{name}/", read)]

    def _check_saved(self, read: Callable[[str], bytes]) -> None:
        own = self._saved("state.json", "_split", read)
        split = self._dataset.split
        if not (self._as_before or split in (None, self._dataset.usual_split, EVERY_SPLIT, own)):
            raise DataError(f"{self._shown}: is one dataset, without split={split!r}; leave split out")

    def _chosen(self, splits: Sequence[str] | Splits, others: Sequence[str]) -> list[str]:
        """Return the splits to read. `others`: files that belong to none."""
        split, usual = self._dataset.split, self._dataset.usual_split
        if split == EVERY_SPLIT:
            return list(splits)
        if split is not None:
            self._check_known(split, splits)
            if others:
                logger.warning(
                    "%s: split=%s leaves %s out, which belong(s) to no split; with split=all every file is read",
                    self._shown, split, _some(others),
                )  # fmt: skip
            return [split]
        if len(splits) > 1:
            if usual in splits and self._dataset.takes_usual_split:
                return [usual]
            raise DataError(
                f"{self._shown}: has several splits; set split to one of {_some(list(splits))}, or to all for every "
                "file"
            )
        (one,) = splits
        if others:
            raise DataError(
                f"{self._shown}: has the split {one}, and {_some(others)}, which belong(s) to no split; set split to "
                f"{one} for its files alone, or to all for every file"
            )
        return [one]

    def _check_known(self, split: str, splits: Sequence[str] | Splits) -> None:
        if split not in splits:
            raise DataError(
                f"{self._shown}: split={split!r} does not exist; set split to one of {_some(list(splits))}, or to all "
                "for every file"
            )

    def _warn(self, files: list[str], names: list[str], read: Callable[[str], bytes]) -> None:
        with suppress(DataError):
            splits = splits_of(files, names, read, shown=self._shown)
            if len(splits) > 1:
                logger.warning(
                    "%s: this run was begun when every file of a directory was read, so it goes on with all of its "
                    "splits (%s); a new run reads one of them", self._shown, _some(list(splits)),
                )  # fmt: skip

    def _saved_files(self, folder: str, read: Callable[[str], bytes]) -> list[str]:
        return [folder + name for name in self._saved(f"{folder}state.json", "_data_files", read)]

    def _saved(self, name: str, key: str, read: Callable[[str], bytes]) -> Any:
        """Return a value from a file of Dataset.save_to_disk, which writes only selected rows, in their order."""
        way_out = "write the folder again with Dataset.save_to_disk of a newer version of the datasets library"
        with reading(f"{self._shown.rstrip('/')}/{name}", way_out):
            content = json.loads(read(name))
            if content.get("_indices_data_files"):
                raise ValueError("its rows are selected by a file of indices, from before version 2 of the library")
            if key == "_split":
                return content.get(key)
            found = content[key] if key == "splits" else [entry["filename"] for entry in content[key]]
            if not (isinstance(found, list) and found and all(isinstance(each, str) for each in found)):
                raise ValueError("it names no splits" if key == "splits" else "it names no files")
            for each in found:  # of a stranger: what is elsewhere on this machine is none of its rows
                if "/" in each or each in ("", ".", ".."):
                    raise ValueError(f"it names '{shorten(each)}', which is not beside it")
            return found


def splits_of(files: Sequence[str], names: Sequence[str], read: Callable[[str], bytes], *, shown: str) -> Splits:
    """Return the splits of a directory; none if nothing tells splits apart. `files`: those of `names` with rows."""
    configs = _configs(read, shown=shown) if _README in names else []
    config = _default(configs, shown=shown) if configs else {}
    folder = posixpath.normpath(str(config.get("data_dir") or ".")) + "/"
    below = {name: name.removeprefix(folder) for name in files if folder == "./" or name.startswith(folder)}
    if (patterns := config.get("data_files")) is not None:
        found = {split: _matching(some, below, shown=shown) for split, some in _by_split(patterns).items()}
        # In a directory that was downloaded in part, some files are missing. If all are missing, its README.md is about
        # another directory.
        if any(found.values()):
            return {split: some for split, some in found.items() if some}
    return _by_names(below) or ({"train": list(below)} if below and folder != "./" else {})


def _by_names(below: Mapping[str, str]) -> Splits:
    found: dict[str, list[str]] = {}
    for name, relative in below.items():
        if shard := _SHARD.fullmatch(relative):
            found.setdefault(shard[1], []).append(name)
    if found:
        return {**{split: found[split] for split in _WORDS if split in found}, **dict(sorted(found.items()))}
    for split, pattern in _IN_FOLDER.items():
        some = [name for name, relative in below.items() if any(map(pattern.fullmatch, relative.split("/")[:-1]))]
        found |= {split: some} if some else {}
    if found:
        return found
    for split, pattern in _IN_FILE.items():
        some = [name for name, relative in below.items() if pattern.fullmatch(relative.rpartition("/")[2])]
        found |= {split: some} if some else {}
    return found


def _configs(read: Callable[[str], bytes], *, shown: str) -> list[dict[str, Any]]:
    """Return what the header of the README.md says about the directory's configurations."""
    place = f"{shown.rstrip('/')}/{_README}"
    with reading(place, _WAYS_OUT):
        text = read(_README).decode("utf-8", "replace").replace("\r\n", "\n").removeprefix("\ufeff")
        header = _HEADER.match(text)
        part = _CONFIGS.search(text, header.start(1), header.end(1)) if header else None
        try:
            # Kept at its place, for the line number in an error.
            configs = (
                [] if part is None else spelled(parse("\n" * text[: part.start()].count("\n") + part[0])[0])["configs"]
            )
        except yaml.YAMLError as error:
            raise ValueError(f"`configs` of its header: {problem_line(error)}") from error
        if not (isinstance(configs, list) and all(isinstance(each, dict) for each in configs)):
            raise ValueError("`configs` of its header must be a list of maps")
        return configs


def _default(configs: Sequence[dict[str, Any]], *, shown: str) -> dict[str, Any]:
    if len(configs) == 1:
        return configs[0]
    for chosen in (
        [each for each in configs if each.get("default") is True],
        [each for each in configs if each.get("config_name") == "default"],
    ):
        if len(chosen) == 1:
            return chosen[0]
    names = [str(each.get("config_name")) for each in configs]
    raise DataError(
        f"{shown}: its {_README} has the configurations {_some(names)}, and none is the default; {_WAYS_OUT}"
    )


def _by_split(patterns: Any) -> dict[str, list[str]]:
    """Return the patterns of each split from a configuration's `data_files`, which may name one split or several."""
    if isinstance(patterns, dict):
        return {str(split): _texts(some) for split, some in patterns.items()}
    if isinstance(patterns, list) and any(isinstance(each, dict) for each in patterns):
        named = [each for each in patterns if isinstance(each, dict)]
        return {str(each.get("split", "train")): _texts(each.get("path")) for each in named}
    return {"train": _texts(patterns)}


def _texts(patterns: Any) -> list[str]:
    return [str(each) for each in (patterns if isinstance(patterns, list) else [patterns]) if each is not None]


def _matching(patterns: Sequence[str], below: Mapping[str, str], *, shown: str) -> list[str]:
    """Return the files that patterns of a README match. There may be as many patterns without a wildcard as files."""
    try:
        expanded = [expand_stars(posixpath.normpath(pattern)) for pattern in patterns if pattern]
    except ValueError as error:
        raise DataError(f"{shown}: a pattern in the `configs` of its {_README}: {error}; {_WAYS_OUT}") from error
    named = {pattern for pattern in expanded if not has_wildcard(pattern)}
    wild = [matcher(pattern) for pattern in expanded if has_wildcard(pattern)]
    if len(wild) * len(below) > _MOST_COMPARED:
        raise DataError(
            f"{shown}: the `configs` of its {_README} have {len(wild):,} patterns for {len(below):,} files, more than "
            f"are compared; {_WAYS_OUT}"
        )
    return [name for name, relative in below.items() if relative in named or any(each(relative) for each in wild)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shorten(name) for name in names[:_SHOWN]) + more
