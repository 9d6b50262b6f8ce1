"""Forged and damaged files of every kind that this package reads, by name; and what reading them may end in.

`FORGERIES[kind]` are changes to a good directory of that kind. Hashes are made to fit afterwards: whoever can write a
checkpoint can write its manifest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

Forge = Callable[[Path], None]

DEEP_LIST = b"[" * 100_000 + b"]" * 100_000
DEEP_MAP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
HUGE = 10**9
LONG_NUMBER = b"9" * 10_000


MERGE_BOMB = b"a: &a {k0: 1, k1: 1, k2: 1, k3: 1, k4: 1, k5: 1, k6: 1, k7: 1, k8: 1}\n" + b"".join(
    b"%c: &%c {<<: [%s]}\n" % (name, name, b", ".join([b"*%c" % (name - 1)] * 9)) for name in b"bcdefghij"
)
"""YAML of 600 bytes for a map of three billion entries, nine of which are left in the end."""
ALIAS_BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (name, name, b",".join([b"*%c" % (name - 1)] * 9)) for name in b"bcdefghi"
)


def text(file: str, content: bytes) -> Forge:
    """A file with another content."""
    return lambda place: _write(place / file, content)


def _write(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def sparse(file: str, size: int) -> Forge:
    """A file of zeros that takes no room."""
    return lambda place: os.truncate(place / file, size)


def hollow(file: str, size: int) -> Forge:
    """A checkpoint's file of zeros that takes no room, and a manifest that says so."""

    def forge(place: Path) -> None:
        (place / file).touch()
        os.truncate(place / file, size)
        put(_MANIFEST, "files", file, to={"bytes": size, "xxh3": "0" * 32})(place)

    return forge


def longer(file: str, by: int) -> Forge:
    """A checkpoint's file with more than it should have, some of it on the disk, and a manifest that says so."""

    def forge(place: Path) -> None:
        with (place / file).open("ab") as target:
            target.write(bytes(by // 500))
        hollow(file, by)(place)

    return forge


def changed(file: str, change: Callable[[Any], Any]) -> Forge:
    """A JSON file after a change of its values; where `change` returns something, that is the content."""

    def forge(place: Path) -> None:
        values = json.loads((place / file).read_text())
        made = change(values)
        _write(place / file, made if isinstance(made, bytes) else json.dumps(made or values).encode())

    return forge


def put(file: str, *path: Any, to: Any) -> Forge:
    """A JSON file with another value in this place."""

    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = to

    return changed(file, change)


def pipe(file: str) -> Forge:
    return lambda place: ((place / file).unlink(), os.mkfifo(place / file))[1]


def folder(file: str) -> Forge:
    return lambda place: ((place / file).unlink(), (place / file).mkdir())[1]


def link(file: str) -> Forge:
    """A link to the same content elsewhere: what is read is right today, and whatever somebody else wants tomorrow."""

    def forge(place: Path) -> None:
        elsewhere = place.parent / f"elsewhere-{file}"
        (place / file).rename(elsewhere)
        (place / file).symlink_to(elsewhere)

    return forge


def device(file: str) -> Forge:
    return lambda place: ((place / file).unlink(), (place / file).symlink_to("/dev/zero"))[1]


NOT_JSON = {
    "empty": b"", "a list": b"[]", "null": b"null", "a number": b"7", "torn": b'{"format": 1',
    "not text": b"\xff\xfe", "a pickle": b"cposix\nsystem\n(S'true'\ntR.",
    "deep lists": DEEP_LIST, "deep maps": DEEP_MAP,
    "a long number": b'{"format": ' + LONG_NUMBER + b"}", "many values": b"[" + b"[]," * 3_000_000 + b"[]]",
}  # fmt: skip
"""What JSON with an object in it may be instead."""


def not_json(file: str) -> dict[str, Forge]:
    """What a JSON file with an object in it may be instead."""
    return {f"{file} is {what}": text(file, content) for what, content in NOT_JSON.items()}


# ---- a checkpoint ----

_NAME = "model.model.embed_tokens.weight"  # two pieces, of rows 0 to 31 and 32 to 63
_OTHER = "model.lm_head.weight"  # the same shape
_INDEX, _STATE, _MANIFEST = "tensors.json", "state.json", "manifest.json"


def piece(number: int, key: str, to: Any) -> Forge:
    return put(_INDEX, "tensors", _NAME, "pieces", number, key, to=to)


def _entry(change: Callable[[Any], Any]) -> Forge:
    return changed(_INDEX, lambda values: change(values["tensors"][_NAME]) and None)


def _same_bytes(values: Any) -> None:
    mine, others = values["tensors"][_NAME]["pieces"], values["tensors"][_OTHER]["pieces"]
    mine[0]["start"] = others[0]["start"]


def _twice(old: bytes, new: bytes) -> Callable[[Any], bytes]:
    return lambda values: json.dumps(values).encode().replace(old, new, 1)


_EMPTY = {"dtype": "int8", "shape": [0], "pieces": []}
INDEX: dict[str, Forge] = {
    **not_json(_INDEX),
    "two pieces of the same rows": piece(1, "offset", [0, 0]),
    "pieces that overlap": piece(1, "offset", [31, 0]),
    "pieces with a hole": _entry(lambda e: e["pieces"].pop()),
    "no pieces": _entry(lambda e: e["pieces"].clear() or True),
    "a piece twice": _entry(lambda e: e["pieces"].append(e["pieces"][0]) or True),
    "pieces in another place": _entry(lambda e: e.update(pieces=e["pieces"][1:] * 2) or True),
    "a negative offset": piece(0, "offset", [-1, 0]),
    "offsets true and false": piece(1, "offset", [True, False]),
    "fractions as offsets": piece(1, "offset", [32.0, 0]),
    "a list as offset": piece(1, "offset", [[32], 0]),
    "offset of one dimension": piece(1, "offset", [32]),
    "offset of three dimensions": piece(1, "offset", [32, 0, 0]),
    "offset outside": piece(1, "offset", [64, 0]),
    "no offset": piece(1, "offset", None),
    "negative sides": piece(1, "shape", [-32, -16]),
    "sides beyond 63 bits": piece(1, "shape", [1 << 63, 1 << 63]),
    "sides whose product wraps": piece(1, "shape", [1 << 62, 1 << 5]),
    "a side in words": piece(1, "shape", ["32", 16]),
    "a negative start": piece(0, "start", -8),
    "a start past the end": piece(0, "start", 10**6),
    "a start beyond 63 bits": piece(0, "start", 1 << 63),
    "a start that wraps": piece(0, "start", (1 << 63) - 8),
    "start true": piece(0, "start", True),
    "start null": piece(0, "start", None),
    "start in words": piece(0, "start", "704"),
    "a fraction as start": piece(0, "start", 704.5),
    "start not a number": changed(_INDEX, _twice(b'"start": 704', b'"start": NaN')),
    "start infinite": changed(_INDEX, _twice(b'"start": 704', b'"start": 1e999')),
    "fewer bytes": piece(0, "bytes", 4088),
    "negative bytes": piece(0, "bytes", -4096),
    "a fraction as bytes": piece(0, "bytes", 4096.0),
    "two tensors of the same bytes": changed(_INDEX, _same_bytes),
    "bytes shared in part": piece(0, "start", 712 + 4096),
    "a file elsewhere": piece(0, "file", "../../../../etc/passwd"),
    "a file by its whole path": piece(0, "file", "/etc/passwd"),
    "a file without tensors": piece(0, "file", _STATE),
    "a file of another checkpoint": piece(0, "file", "__7_1.distcp"),
    "a file without a name": piece(0, "file", ""),
    "a list as file": piece(0, "file", ["__0_1.distcp"]),
    "a piece without a file": _entry(lambda e: e["pieces"][0].pop("file")),
    "a piece with more": piece(0, "pickle", "x"),
    "a piece that is a list": put(_INDEX, "tensors", _NAME, "pieces", 0, to=[]),
    "pieces in a map": put(_INDEX, "tensors", _NAME, "pieces", to={}),
    "a tensor that is a list": put(_INDEX, "tensors", _NAME, to=[]),
    "a tensor without a type": _entry(lambda e: e.pop("dtype")),
    "a type that is a function": put(_INDEX, "tensors", _NAME, "dtype", to="load"),
    "a type that is hidden": put(_INDEX, "tensors", _NAME, "dtype", to="__class__"),
    "a list of types": put(_INDEX, "tensors", _NAME, "dtype", to=["float64"]),
    "a larger shape": put(_INDEX, "tensors", _NAME, "shape", to=[HUGE]),
    "a negative shape": put(_INDEX, "tensors", _NAME, "shape", to=[-64, -16]),
    "a shape of many dimensions": put(_INDEX, "tensors", _NAME, "shape", to=[1] * 10_000),
    "an empty shape beyond bounds": put(_INDEX, "tensors", "x", to={**_EMPTY, "shape": [0, 1 << 62]}),
    "a name of two lines": put(_INDEX, "tensors", "x\nerror: y", to=_EMPTY),
    "no name": put(_INDEX, "tensors", "", to=_EMPTY),
    "another format": put(_INDEX, "format", to=2),
    "a format of tomorrow": put(_INDEX, "format", to=3),
    "format true": put(_INDEX, "format", to=True),
    "tensors in a list": put(_INDEX, "tensors", to=[]),
    "tensors are gone": changed(_INDEX, lambda values: {"format": 1}),
    "start twice": changed(_INDEX, _twice(b'"start": 704', b'"start": 704, "start": 712')),
    "tensors twice": changed(_INDEX, _twice(b'{"format"', b'{"tensors": {}, "format"')),
    "an index larger than its files": changed(_INDEX, lambda values: b" " * (2 << 20) + json.dumps(values).encode()),
    "an index of 100 MB": sparse(_INDEX, 100 << 20),
}  # fmt: skip


def _run(key: str, to: Any) -> Forge:
    return put(_INDEX, "tensors", _NAME, "pieces", 0, key, to=to)


def _file(number: int, to: Any) -> Forge:
    return put(_INDEX, "files", number, to=to)


def _table(change: Callable[[Any], Any]) -> Forge:
    """The table at the end of the first file, after a change; with its length in the index."""

    def forge(place: Path) -> None:
        index = json.loads((place / _INDEX).read_text())
        (name, length, _), content = index["files"][0], (place / index["files"][0][0]).read_bytes()
        values = json.loads(content[-length:])
        made = change(values)
        table = made if isinstance(made, bytes) else json.dumps(made or values).encode()
        _write(place / name, content[:-length] + table)
        put(_INDEX, "files", 0, to=[name, len(table), xxhash.xxh3_128_hexdigest(table)])(place)

    return forge


def _place(*, of: str = _NAME, to: Any) -> Forge:
    return _table(lambda values: values.__setitem__(of, to))


def _moved(start: int, first: int, length: int) -> Forge:
    """The place of a piece, moved by so many bytes."""

    def change(values: Any) -> None:
        values[_NAME] = [each + by for each, by in zip(values[_NAME], (start, first, length), strict=True)]

    return _table(change)


_XXH3 = "0" * 32

# Of format 2, of two ranks.
RUNS: dict[str, Forge] = {
    **not_json(_INDEX),
    "pieces twice": _entry(lambda e: e["pieces"].append(e["pieces"][0]) or True),
    "no pieces": _entry(lambda e: e["pieces"].clear() or True),
    "a piece too few": _run("count", 1),
    "a piece too many": _run("count", 3),
    "no piece": _run("count", 0),
    "more pieces than anybody has": _run("count", 1 << 62),
    "a negative count": _run("count", -2),
    "a count true": _run("count", True),
    "a fraction as count": _run("count", 2.0),
    "pieces in a file that is not there": _run("file", 1),
    "a negative file": _run("file", -1),
    "a file by its name": _run("file", "__0_1.distcp"),
    "a step of nothing": _run("step", 0),
    "a negative step": _run("step", -1),
    "a step far away": _run("step", 1 << 62),
    "both pieces in one file": put(_INDEX, "tensors", _NAME, "pieces", to=[
        {"offset": [row, 0], "shape": [32, 16], "count": 1, "file": 0, "step": 1} for row in (0, 32)
    ]),
    "one piece instead of two": put(_INDEX, "tensors", _NAME, "pieces", to=[
        {"offset": [0, 0], "shape": [64, 16], "count": 1, "file": 0, "step": 1}
    ]),
    "overlapping pieces": _run("shape", [48, 16]),
    "pieces without numbers": _run("shape", [0, 16]),
    "a negative offset": _run("offset", [-32, 0]),
    "an offset outside": _run("offset", [32, 0]),
    "an offset true": _run("offset", [False, 0]),
    "sides beyond 63 bits": _run("shape", [1 << 63, 1 << 63]),
    "a run with more": _run("pickle", "x"),
    "a run without a count": _entry(lambda e: e["pieces"][0].pop("count")),
    "a run that is a list": put(_INDEX, "tensors", _NAME, "pieces", 0, to=[]),
    "a larger shape": put(_INDEX, "tensors", _NAME, "shape", to=[HUGE, 16]),
    "a tensor of terabytes in one file": put(_INDEX, "tensors", "x", to={
        "dtype": "int8", "shape": [1 << 40], "pieces": [
            {"offset": [0], "shape": [1 << 40], "count": 1, "file": 0, "step": 1}
        ],
    }),
    "a tensor that is in no table": put(_INDEX, "tensors", "x", to={
        "dtype": "int8", "shape": [1], "pieces": [{"offset": [0], "shape": [1], "count": 1, "file": 0, "step": 1}],
    }),
    "a tensor too few": changed(_INDEX, lambda values: values["tensors"].pop(_NAME) and None),
    "another type": put(_INDEX, "tensors", _NAME, "dtype", to="complex128"),
    "files in a map": put(_INDEX, "files", to={}),
    "no files": changed(_INDEX, lambda values: values.pop("files") and None),
    "a file less": changed(_INDEX, lambda values: values["files"].pop() and None),
    "a file twice": changed(_INDEX, lambda values: values["files"].append(values["files"][0])),
    "a file elsewhere": _file(0, ["../../../../etc/passwd", 10, _XXH3]),
    "a file without tensors": _file(0, [_STATE, 10, _XXH3]),
    "a file of another checkpoint": _file(0, ["__7_1.distcp", 10, _XXH3]),
    "a file alone": _file(0, "__0_1.distcp"),
    "a file with a table of nothing": _file(0, ["__0_1.distcp", 0, _XXH3]),
    "a file with a negative table": _file(0, ["__0_1.distcp", -1, _XXH3]),
    "a file with a table true": _file(0, ["__0_1.distcp", True, _XXH3]),
    "a file with a table larger than it": _file(0, ["__0_1.distcp", 10**9, _XXH3]),
    "a file with half a table": _file(0, ["__0_1.distcp", 100, _XXH3]),
    "a file without a hash of its table": _file(0, ["__0_1.distcp", 100]),
    "another table": put(_INDEX, "files", 0, 2, to="0" * 32),
    "a hash of a table that is none": put(_INDEX, "files", 0, 2, to="x"),
    "a table of white space": _table(lambda values: json.dumps(values).encode() + b" " * 100_000),
    "files changed": changed(_INDEX, lambda values: values["files"].reverse()),
    "a format of tomorrow": put(_INDEX, "format", to=3),
    "the older format": put(_INDEX, "format", to=1),
    "format true": put(_INDEX, "format", to=True),
    "format twice": changed(_INDEX, _twice(b'"format": 2', b'"format": 2, "format": 2')),
    **{f"a table that is {what}": _table(lambda _, made=made: made) for what, made in NOT_JSON.items() if made},
    "a table without a tensor": _table(lambda values: values.pop(_NAME) and None),
    "a table with a tensor more": _place(of="x", to=[0, 0, 0]),
    "a table with a tensor twice": _table(_twice(b'{"', b'{"' + _NAME.encode() + b'": [0, 0, 9], "')),
    "a place of two numbers": _place(to=[704, 0]),
    "a place in a map": _place(to={}),
    "a place true": _place(to=[True, 0, 5000]),
    "a place in fractions": _place(to=[704.0, 0, 5000]),
    "a place beyond 63 bits": _place(to=[1 << 63, 0, 1 << 64]),
    "a place not a number": _table(_twice(b"[", b"[NaN, ")),
    "a negative place": _place(to=[-8, -8, 5000]),
    "numbers before their piece": _moved(-10_000, 0, 0),
    "numbers behind their piece": _moved(2_000, 0, 0),
    "a piece of fewer bytes": _moved(0, 0, -2_000),
    "a piece of more bytes, with those of another": _moved(0, 0, 64),
    "a piece past the end": _moved(10**6, 10**6, 0),
    "a piece in the table": _place(to=[0, 0, 10**7]),
    "two tensors of the same bytes": _table(lambda values: values.update({_OTHER: values[_NAME]})),
}  # fmt: skip

STATE: dict[str, Forge] = {
    **not_json(_STATE),
    "another format of the state": put(_STATE, "format", to="1"),
    "no format of the state": changed(_STATE, lambda values: values.pop("format") and None),
    "step true": put(_STATE, "step", to=True),
    "step in words": put(_STATE, "step", to="6"),
    "a negative step": put(_STATE, "step", to=-6),
    "another step than its name": put(_STATE, "step", to=5),
    "another attempt than its name": put(_STATE, "attempt", to=9),
    "a step beyond 63 bits": put(_STATE, "step", to=10**30),
    "a fraction of samples": put(_STATE, "samples", to=60.5),
    "no samples": changed(_STATE, lambda values: values.pop("samples") and None),
    "a cursor in a list": put(_STATE, "cursor", to=[0, 0, 0]),
    "half a cursor": put(_STATE, "cursor", to={"epoch": 0}),
    "a cursor with more": put(_STATE, "cursor", "x", to=0),
    "a negative cursor": put(_STATE, "cursor", "epoch", to=-1),
    "a cursor true": put(_STATE, "cursor", "index", to=True),
    "no cursor": changed(_STATE, lambda values: values.pop("cursor") and None),
    "a schedule of no steps": put(_STATE, "schedule_steps", to=0),
    "skipped in words": put(_STATE, "skipped_in_row", to="none"),
    "a negative scale": put(_STATE, "loss_scale", to=-1.0),
    "an infinite scale": put(_STATE, "loss_scale", to=float("inf")),
    "a scale that is no number": put(_STATE, "loss_scale", to=float("nan")),
    "an identity in a list": put(_STATE, "identity", to=[]),
    "a name of two lines in the identity": put(_STATE, "identity", "a\nb", to=1),
    "files in numbers": put(_STATE, "files", to={"data.train.0.files": [1]}),
    "files whose hashes are a number": put(_STATE, "identity", "data.train.0.files", to=5),
    "tracking in numbers": put(_STATE, "tracking", to={"mlflow": 7}),
    "a newest order in words": put(_STATE, "newest_order", to="4"),
    "a newest order true": put(_STATE, "newest_order", to=True),
    "a newest order that nobody knows": put(_STATE, "newest_order", to=99),
    "a newest order from before the oldest": put(_STATE, "newest_order", to=1),
    "an entry that nobody knows": put(_STATE, "run", to="rm -rf /"),
    "an entry twice": changed(_STATE, _twice(b'{"', b'{"step": 6, "')),
    "a deep identity": put(_STATE, "identity", "a", to=json.loads("[" * 500 + "]" * 500)),
    "a state of 100 MB": sparse(_STATE, 100 << 20),
}  # fmt: skip

FILES: dict[str, Forge] = {
    f"{file} is {what}": make(file)
    for file in ("__0_1.distcp", _STATE, _INDEX)
    for what, make in (("a pipe", pipe), ("a directory", folder), ("a link", link), ("a device", device))
} | {
    "a file of tensors is cut": lambda place: os.truncate(place / "__1_1.distcp", 50_000),
    "a file of tensors is gone": lambda place: (place / "__1_1.distcp").unlink(),
}


def _listed(change: Callable[[Any], Any]) -> Forge:
    return changed(_MANIFEST, lambda values: change(values["files"]) and None)


def _of_state(key: str, to: Any) -> Forge:
    return put(_MANIFEST, "files", _STATE, key, to=to)


# These are not made to fit.
MANIFEST: dict[str, Forge] = {
    **not_json(_MANIFEST),
    "another format of the manifest": put(_MANIFEST, "format", to=3),
    "files in a list": put(_MANIFEST, "files", to=["state.json"]),
    "no index in the manifest": _listed(lambda files: files.pop(_INDEX)),
    "a negative size": _of_state("bytes", -1),
    "a size true": _of_state("bytes", True),
    "a size in words": _of_state("bytes", "5"),
    "a short hash": _of_state("xxh3", "00"),
    "a hash in numbers": _of_state("xxh3", 0),
    "a file above": put(_MANIFEST, "files", "../x", to={"bytes": 1, "xxh3": "0" * 32}),
    "a file at the top": put(_MANIFEST, "files", "/etc/passwd", to={"bytes": 1, "xxh3": "0" * 32}),
    "a file that is not there": put(_MANIFEST, "files", "__9_1.distcp", to={"bytes": 1, "xxh3": "0" * 32}),
    "a file twice": changed(_MANIFEST, _twice(b'"state.json"', b'"state.json": 1, "state.json"')),
    "a manifest of 100 MB": sparse(_MANIFEST, 100 << 20),
    "a file of tensors of 8 TB": hollow("__0_1.distcp", 8 << 40),
    "an index of 8 TB": hollow(_INDEX, 8 << 40),
    "a state of 8 TB": hollow(_STATE, 8 << 40),
    "a file for other tools of 8 TB": hollow(".metadata", 8 << 40),
    "a file that nobody knows of 8 TB": hollow("x", 8 << 40),
    "a file of tensors with more than the index says": longer("__0_1.distcp", 2 << 30),
    "the manifest is a pipe": pipe(_MANIFEST),
    "the manifest is a directory": folder(_MANIFEST),
    "the manifest is a link": link(_MANIFEST),
}  # fmt: skip


def with_hashes(checkpoint: Path) -> None:
    """Make the manifest fit the regular files that are there."""
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3": xxhash.xxh3_128_hexdigest(path.read_bytes())}
        for path in checkpoint.iterdir()
        if path.is_file() and not path.is_symlink() and path.name != _MANIFEST
    }
    before = json.loads((checkpoint / _MANIFEST).read_text())
    manifest = {"format": before["format"], "files": {**before["files"], **files}}
    (checkpoint / _MANIFEST).write_text(json.dumps(manifest))


GOOD_CHECKPOINT = "checkpoints/step-00000006.a1"


def inside(folder: str, table: Mapping[str, Forge], *, fit: bool) -> dict[str, Forge]:
    """The same forgeries of a checkpoint in a run; `fit`: with a manifest that fits them."""

    def forged(forge: Forge) -> Forge:
        def work(place: Path) -> None:
            if not (place / folder).exists():
                shutil.copytree(place / GOOD_CHECKPOINT, place / folder)
            forge(place / folder)
            if fit:
                with_hashes(place / folder)

        return work

    return {name: forged(forge) for name, forge in table.items()}


# ---- a Hugging Face model of two files ----

_CONFIG, _WEIGHTS = "config.json", "model.safetensors.index.json"
_FIRST = "model-00001-of-00002.safetensors"
_TOKENS, _TOKENS_CONFIG = "tokenizer.json", "tokenizer_config.json"


def setting(key: str, to: Any) -> Forge:
    return put(_CONFIG, key, to=to)


def header(change: Callable[[Any], Any]) -> Forge:
    """A safetensors file with another header."""

    def forge(place: Path) -> None:
        content = (place / _FIRST).read_bytes()
        size = int.from_bytes(content[:8], "little")
        values = json.loads(content[8 : 8 + size])
        made = change(values)
        head = made if isinstance(made, bytes) else json.dumps(made or values).encode()
        (place / _FIRST).write_bytes(len(head).to_bytes(8, "little") + head + content[8 + size :])

    return forge


def _tensor(key: str, to: Any) -> Forge:
    def change(values: Any) -> None:
        next(entry for name, entry in values.items() if name != "__metadata__")[key] = to

    return header(change)


def _swap(values: Any) -> None:
    """Two tensors of one size that change places would not be seen by anybody; these overlap."""
    entries = [entry for name, entry in values.items() if name != "__metadata__"]
    entries[1]["data_offsets"] = entries[0]["data_offsets"]


def _with_many_tensors(values: Any) -> bytes:
    # As text: to make as many values takes longer than all else here.
    many = ",".join(f'"t{number}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(900_000))
    return f"{json.dumps(values)[:-1]},{many}}}".encode()


CONFIG: dict[str, Forge] = {
    **not_json(_CONFIG),
    "ten million layers": setting("num_hidden_layers", 10_000_000),
    "a trillion layers": setting("num_hidden_layers", 10**12),
    "layers as a fraction": setting("num_hidden_layers", 1e12),
    "negative layers": setting("num_hidden_layers", -1),
    "layers in words": setting("num_hidden_layers", "two"),
    "a width of a billion": setting("hidden_size", HUGE),
    "a negative width": setting("hidden_size", -32),
    "inner width of a billion": setting("intermediate_size", HUGE),
    "a billion heads": setting("num_attention_heads", HUGE),
    "no heads": setting("num_attention_heads", 0),
    "heads of a billion": setting("head_dim", HUGE),
    "a vocabulary of a trillion": setting("vocab_size", 10**12),
    "a billion labels": setting("num_labels", HUGE),
    "positions in words": setting("max_position_embeddings", "many"),
    "an activation that is a list": setting("hidden_act", ["silu"]),
    "an activation that nobody knows": setting("hidden_act", "evil"),
    "a rope that nobody knows": setting("rope_parameters", {"rope_type": "evil"}),
    "a rope in words": setting("rope_parameters", {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}),
    "a rope that is a list": setting("rope_parameters", []),
    "types of layers that are numbers": setting("layer_types", [1, 2]),
    "a model type that is a list": setting("model_type", ["llama"]),
    "a model type that nobody knows": setting("model_type", "evil"),
    "a type that torch lacks": setting("dtype", "evil"),
    "a deep setting": setting("x", json.loads("[" * 500 + "]" * 500)),
    "a config of 100 MB": sparse(_CONFIG, 100 << 20),
    "the config is a pipe": pipe(_CONFIG),
    "the config is a directory": folder(_CONFIG),
}  # fmt: skip

WEIGHTS: dict[str, Forge] = {
    **not_json(_WEIGHTS),
    "weights in a list": put(_WEIGHTS, "weight_map", to=[]),
    "files that are numbers": put(_WEIGHTS, "weight_map", "lm_head.weight", to=1),
    "files that are lists": put(_WEIGHTS, "weight_map", "lm_head.weight", to=["a"]),
    "a file of weights that is not there": put(_WEIGHTS, "weight_map", "lm_head.weight", to="x.safetensors"),
    "a file of weights that has other tensors": changed(
        _WEIGHTS, lambda values: values["weight_map"].update(dict.fromkeys(values["weight_map"], _FIRST))
    ),
    "a file of weights that is the config": put(_WEIGHTS, "weight_map", "lm_head.weight", to=_CONFIG),
    "an index of weights of 100 MB": sparse(_WEIGHTS, 100 << 20),
    "the index of weights is a pipe": pipe(_WEIGHTS),
    "a tensor too many": put(_WEIGHTS, "weight_map", "evil.weight", to=_FIRST),
    "weights that are empty": text(_FIRST, b""),
    "weights that are cut": lambda place: os.truncate(place / _FIRST, 2000),
    "weights with a header of exabytes": text(_FIRST, b"\xff" * 8 + b"{}"),
    "weights with a header that is not there": text(_FIRST, (10**8).to_bytes(8, "little")),
    "weights with a list as header": header(lambda values: b"[]"),
    "weights with a deep header": header(lambda values: DEEP_MAP),
    "weights of a type that nobody knows": _tensor("dtype", "X9"),
    "weights of another type": _tensor("dtype", "I32"),
    "weights of a larger shape": _tensor("shape", [1 << 40, 1 << 40]),
    "weights of a negative shape": _tensor("shape", [-1, -1]),
    "weights outside of the file": _tensor("data_offsets", [0, 1 << 50]),
    "weights backwards": _tensor("data_offsets", [4096, 0]),
    "weights that overlap": header(_swap),
    "weights of 900,000 tensors": header(_with_many_tensors),
    "the weights are a pipe": pipe(_FIRST),
}  # fmt: skip


def _empty_vocabulary(place: Path) -> None:
    changed(_TOKENS, lambda values: values["model"].update(vocab={}, merges=[]))(place)
    put(_TOKENS, "added_tokens", to=[])(place)
    put(_TOKENS, "post_processor", to=None)(place)
    _write(place / _TOKENS_CONFIG, b'{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _replacing(text: str, times: int) -> Forge:
    """A normalizer that writes ten characters for one, so many times."""
    step = {"type": "Replace", "pattern": {"String": text}, "content": text * 10}
    return put(_TOKENS, "normalizer", to={"type": "Sequence", "normalizers": [step] * times})


def _adding(times: int, each: int) -> Forge:
    """A post-processor that adds so many tokens, so many times."""
    added = {"id": "x", "ids": [0] * each, "tokens": ["x"] * each}
    whole = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}] * times + whole
    pair = [*whole, {"Sequence": {"id": "B", "type_id": 1}}]
    made = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"x": added}}
    return put(_TOKENS, "post_processor", to=made)


def _splitting(pattern: str) -> Forge:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return put(_TOKENS, "pre_tokenizer", to=split)


def _own_template(to: Any) -> Forge:
    """A chat template in the config, where it is read if there is none beside it."""

    def forge(place: Path) -> None:
        (place / "chat_template.jinja").unlink(missing_ok=True)
        put(_TOKENS_CONFIG, "chat_template", to=to)(place)

    return forge


def _template(make: Forge) -> Forge:
    """A file among the chat templates with names."""
    return lambda place: ((place / "additional_chat_templates").mkdir(), make(place / "additional_chat_templates"))[1]


TOO_MUCH: dict[str, Forge] = {
    "normalizers that write ten for one": _replacing(" ", 9),
    "normalizers that write ten for one, of letters": _replacing("a", 9),
    "a post-processor of 200,000 tokens": _adding(200_000, 1),
    "a post-processor of 3,000 times 3,000 tokens": _adding(3000, 3000),
    "a pattern that goes back over letters": _splitting("(a+)+$"),
    "a pattern that goes back over spaces": _splitting("( +)+y"),
    "a pattern that goes back over digits": _splitting("(1+)+y"),
    "a pattern that is none": _splitting("("),
}
"""Tokenizers of a few kilobytes that take all time or memory, or fail, when they are loaded or used."""
TOKENIZER: dict[str, Forge] = {
    **TOO_MUCH,
    "no chat template in a map": _own_template({}),
    "a chat template that is a number": _own_template(7),
    "a chat template of numbers": _own_template({"default": 7}),
    "an added token of a huge id": put(_TOKENS_CONFIG, "added_tokens_decoder", to={"2000000000": {"content": "x"}}),
    "tokens of huge ids by name": lambda place: _write(place / "added_tokens.json", b'{"x": 2000000000}'),
    "a table of huge ids": put(_TOKENS_CONFIG, "vocab", to={"x": 1 << 40}),
    "a class that reads weights": put(_TOKENS_CONFIG, "tokenizer_class", to="AutoModelForCausalLM"),
    "a class that calls itself": put(_TOKENS_CONFIG, "tokenizer_class", to="AutoTokenizer"),
    "a vocabulary that is a link": lambda place: (place / "vocab.txt").symlink_to("/etc/passwd"),
    "a template that is a link": _template(lambda place: (place / "x.jinja").symlink_to("/etc/passwd")),
    "a template that is a pipe": _template(lambda place: os.mkfifo(place / "x.jinja")),
    "a vocabulary of another name that is a pipe": lambda place: os.mkfifo(place / "spiece.model"),
    "a hundred thousand strings to stop at": lambda place: _write(
        place / "generation_config.json", json.dumps({"stop_strings": ["x"] * 100_000}).encode()
    ),
    **not_json(_TOKENS),
    **not_json(_TOKENS_CONFIG),
    "an empty vocabulary": _empty_vocabulary,
    "a token of a huge id": put(_TOKENS, "model", "vocab", "evil", to=1 << 31),
    "a token of a negative id": changed(_TOKENS, lambda v: v["model"]["vocab"].update(evil=-5)),
    "a model that is no tokenizer": put(_TOKENS, "model", to={"type": "Evil"}),
    "merges of no tokens": put(_TOKENS, "model", "merges", to=[["evil", "eviler"]]),
    "a tokenizer class that is a number": put(_TOKENS_CONFIG, "tokenizer_class", to=7),
    "a tokenizer of 1 GB": sparse(_TOKENS, 1 << 30),
    "the tokenizer is a pipe": pipe(_TOKENS),
}  # fmt: skip

# ---- what a run directory holds besides its checkpoints ----

_EVENTS, _METRICS, _PLACE, _RECIPE = "events.jsonl", "metrics.jsonl", "checkpoints_at", "model/recipe.json"


def line(file: str, content: bytes) -> Forge:
    """A record with a line more, in front."""
    return lambda place: _write(place / file, content + b"\n" + (place / file).read_bytes())


def event(**changes: Any) -> Forge:
    whole = {"time": "", "attempt": 1, "event": "saved", "fields": {"step": 1, "path": "x"}, **changes}
    return line(_EVENTS, json.dumps(whole).encode())


EVENTS: dict[str, Forge] = {
    "an event in deep lists": line(_EVENTS, DEEP_LIST),
    "an event with a deep list": line(_EVENTS, b'{"event": "saved", "attempt": 1, "fields": ' + DEEP_LIST + b"}"),
    "an event that is not text": line(_EVENTS, b"\xff\xfe\x00"),
    "an event of 50 MB": line(_EVENTS, b'"' + b"x" * (50 << 20) + b'"'),
    "an event of many values": line(_EVENTS, b"[" + b"[]," * 3_000_000 + b"[]]"),
    "an event with a long number": line(_EVENTS, b'{"event": "saved", "fields": {}, "attempt": ' + LONG_NUMBER + b"}"),
    "an event of an attempt in words": event(attempt="7"),
    "an event of a huge attempt": event(attempt=10**30),
    "an event of an attempt true": event(attempt=True),
    "an event of a negative attempt": event(attempt=-7),
    "an event without fields": event(fields=None),
    "an event whose name is a list": event(event=["saved"]),
}  # fmt: skip
HOLES: dict[str, Forge] = {
    "events that are 20 GB long": sparse(_EVENTS, 20 << 30),
    "metrics that are 20 GB long": sparse(_METRICS, 20 << 30),
    "metrics of 20 GB with lines": lambda place: _with_lines(place / _METRICS, 20 << 30, 1 << 28),
    "events of 20 GB with lines": lambda place: _with_lines(place / _EVENTS, 20 << 30, 1 << 28),
}
"""Records that go on without content."""
CONFIGS: dict[str, Forge] = {
    "a config of merges": text("config.yaml", MERGE_BOMB),
    "a config of aliases": text("config.yaml", ALIAS_BOMB),
    "a config that contains itself": text("config.yaml", b"run: &a [*a]"),
    "a deep config.yaml": text("config.yaml", b"[" * 100_000),
    "a config of 20 GB": sparse("config.yaml", 20 << 30),
    "a config of one long word": text("config.yaml", b"!" * 3_000_000),
    "a config with a long number": text("config.yaml", b"run: {seed: 0x" + b"f" * 100_000 + b"}"),
    "a config that is not text": text("config.yaml", b"\xff\xfe\x00"),
    "a config that is a list": text("config.yaml", b"- a"),
    "a config that is a word": text("config.yaml", b"a"),
}


def _with_lines(file: Path, size: int, every: int) -> None:
    """A hole, and in it the end of a line now and then."""
    start = file.stat().st_size
    with file.open("rb+") as record:
        for place in range(start, size, every):
            record.seek(place + 5000)
            record.write(b"\n")


RECORD: dict[str, Forge] = {
    "the events are a pipe": pipe(_EVENTS),
    "the events are a directory": folder(_EVENTS),
    "the metrics are a pipe": pipe(_METRICS),
    "a place of two lines": text(_PLACE, b"/tmp\n/etc"),
    "a place that is not text": text(_PLACE, b"\xff\xfe"),
    "a place of 1 MB": text(_PLACE, b"/x" * 500_000),
    "the place is a pipe": lambda place: os.mkfifo(place / _PLACE),
    "the place is a link": lambda place: (place / _PLACE).symlink_to("/etc/hostname"),
}
RECIPE: dict[str, Forge] = {
    **not_json(_RECIPE),
    "a config in a list": put(_RECIPE, "config", to=[]),
    "a model in words": put(_RECIPE, "config", "model", to="gpt2"),
    "a run in a list": put(_RECIPE, "config", "run", to=[]),
    "data in numbers": put(_RECIPE, "config", "data", to={"train": [1, 2]}),
    "a path in numbers": put(_RECIPE, "config", "model", "path", to=5),
    "a run directory in numbers": put(_RECIPE, "run_dir", to=5),
    "the recipe is a pipe": pipe(_RECIPE),
}
MODEL_OF_RUN: dict[str, Forge] = {
    "layers of a run": put("model/config.json", "num_hidden_layers", to=10_000_000),
    "a width of a run": put("model/config.json", "hidden_size", to=1 << 19),
    "more layers than the checkpoint has": put("model/config.json", "num_hidden_layers", to=200),
    "labels of a run": put("model/config.json", "num_labels", to=HUGE),
    "a deep config of a run": text("model/config.json", DEEP_MAP),
    "the config of a run is a pipe": pipe("model/config.json"),
    "the tokenizer of a run is a pipe": pipe("model/tokenizer.json"),
    "the tokenizer of a run is deep": text("model/tokenizer.json", DEEP_LIST),
}
