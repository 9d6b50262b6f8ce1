"""The files of a checkpoint: any damage is seen, any world size reads them, nothing in them is executed."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, newest
from raytune_fsdp.cli.main import main
from raytune_fsdp.tools.torch_metadata import write_torch_metadata
from tests.checkpoints import checkpoints, pieces_of, tensors_in
from tests.ranks import resident_ranks
from tests.runs import GPT2, LLAMA, make_config, trajectory

TRAIN = {"global_batch": 10, "micro_batch": 2, "max_steps": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with a checkpoint behind each of its two steps."""
    config = make_config(
        tmp_path_factory.mktemp("saved"), GPT2, train=TRAIN, parallel={"precision": "fp32"},
        checkpoint={"every": 1, "asynchronous": False},
    )  # fmt: skip
    trajectory(config, 2)
    run_dir = Path(config.run.storage) / config.run.name
    assert [found.step for found in checkpoints(run_dir)] == [1, 2]
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} of {path.name}"


def cut(path: Path, chance: random.Random) -> str:
    size = chance.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size}"


def delete(path: Path, chance: random.Random) -> str:
    path.unlink()
    return f"{path.name} deleted"


@pytest.mark.parametrize(
    ("harm", "times"), [(flip, 80), (cut, 40), (delete, 40), pytest.param(flip, 1000, marks=pytest.mark.slow)]
)
def test_damage_is_detected_or_harmless(
    run_dir: Path, harm: Any, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bits of all files by their size; truncations and deletions of all files alike."""
    old, new = checkpoints(run_dir)
    expected = {found.step: tensors_in(found) for found in (old, new)}
    states = {found.step: Path(found.path, "state.json").read_bytes() for found in (old, new)}
    directory = Path(new.path)
    files = sorted(directory.iterdir())
    sizes = [path.stat().st_size if harm is flip else 1 for path in files]
    chance = random.Random(7)
    detected = 0
    for _ in range(times):
        (path,) = chance.choices(files, sizes)
        content = path.read_bytes()
        what = harm(path, chance)
        found, damaged = newest(str(directory.parent), hashes=True)
        assert found is not None, what
        detected += found == old
        if found == old:
            assert path.name in str(damaged) or path.name == "manifest.json", what
        for name, tensor in tensors_in(found).items():
            assert torch.equal(tensor, expected[found.step][name]), what
        assert Path(found.path, "state.json").read_bytes() == states[found.step], what
        path.write_bytes(content)
    with capsys.disabled():
        print(f"\n{harm.__name__}: {detected} of {times} detected, the others harmless")
    assert detected >= 0.95 * times


def test_a_run_falls_back_and_says_so(saved: Path, tmp_path: Path) -> None:
    """Through training itself: sizes are right, so only reading all of it shows the damage, on the rank that reads."""
    from raytune_fsdp.record.jsonl import read_events

    config = make_config(
        tmp_path, GPT2, train={**TRAIN, "max_steps": 4}, parallel={"precision": "fp32"},
        checkpoint={"every": 1, "keep_last": None, "asynchronous": False},
    )  # fmt: skip
    whole = trajectory(config, 2)
    run_dir = Path(config.run.storage) / config.run.name
    newest_one, one_before = checkpoints(run_dir)[-1], checkpoints(run_dir)[-2]
    flip(pieces_of(newest_one)[0], random.Random(0))
    flip(pieces_of(one_before)[1], random.Random(1))
    assert trajectory(config, 2) == whole
    events = read_events(run_dir / "events.jsonl")
    assert [e["fields"]["resumed_from"] for e in events if e["event"] == "attempt_started"] == [0, 2]
    told = [e["fields"] for e in events if e["event"] == "checkpoint_damaged"]
    assert [each["path"] for each in told] == [one_before.path, newest_one.path]
    assert all("is not what was written" in each["problem"] and Path(each["now"]).is_dir() for each in told)
    assert [found.step for found in checkpoints(run_dir)] == [1, 2, 3, 4]


# ---- other world sizes ----


def states(values: Mapping[str, Any], root: str | None, step: int) -> dict[str, Any]:
    """Build a network whose numbers nobody else has, or load one; save it at `step`, and give all of it."""
    import torch.distributed as dist

    from raytune_fsdp.checkpoint.catalogue import Keep, committed
    from raytune_fsdp.checkpoint.contents import tensors_of
    from raytune_fsdp.checkpoint.reading import load_into
    from raytune_fsdp.checkpoint.saver import open_saver
    from raytune_fsdp.checkpoint.state import RunState
    from raytune_fsdp.config import OptimConfig, ParallelConfig
    from raytune_fsdp.step.optim.build import build_optimizer
    from tests.loading import draw, whole

    parallel = ParallelConfig.model_validate(values)
    model = draw(LLAMA_ODD, 5, parallel=parallel.model_dump())
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3))
    optimizer.init_state()
    assert root is not None
    there = committed(root)
    if there:
        load_into(model, optimizer, there[0])
    else:
        for tensor in tensors_of(model, optimizer).values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            with torch.no_grad():
                # By rank and order: a piece that lands elsewhere shows. Replicas must have the same.
                local.add_(torch.rand_like(local) if parallel.strategy == "full_shard" and tensor.ndim else 0.5)
    saver = open_saver(
        root, model, optimizer, attempt=dist.get_world_size(), keep=Keep(last=None), seconds=60, asynchronous=True,
        scores={},
    )  # fmt: skip
    saver.begin(RunState(step=step), before=lambda: None)
    outcome = saver.finish()
    assert outcome is not None and outcome.saved is not None, outcome
    return {name: whole(tensor).numpy().copy() for name, tensor in tensors_of(model, optimizer).items()}


LLAMA_ODD = {**LLAMA, "vocab_size": 61, "intermediate_size": 50, "num_hidden_layers": 1}
"""Rows that no world size divides evenly, and at eight ranks some without any."""


FULL, HYBRID, REPLICATE = (
    {"strategy": strategy, "precision": "fp32", **more}
    for strategy, more in (("full_shard", {}), ("hybrid_shard", {"shard_size": 2}), ("replicate", {}))
)
OTHERS = [(1, FULL), (3, FULL), (4, HYBRID), (2, REPLICATE)]


@pytest.mark.parametrize(
    "others",
    [OTHERS, pytest.param([(2, FULL), (8, FULL), (3, REPLICATE)], marks=pytest.mark.slow)],
    ids=["often", "rarely"],
)
def test_any_world_size_and_strategy_reads_any_other(tmp_path: Path, others: list[tuple[int, dict[str, Any]]]) -> None:
    root = str(tmp_path / "checkpoints")
    (expected, *_) = resident_ranks(states, 4, FULL, root, 1)
    for step, (world, parallel) in enumerate(others, start=2):
        for found in resident_ranks(states, world, parallel, root, step):
            assert found.keys() == expected.keys()
            assert all((found[name] == values).all() for name, values in expected.items()), (world, parallel)
        # What was saved by these ranks is the same again.
        again = tensors_in(checkpoints(tmp_path)[-1])
        assert all((again[name].numpy() == values).all() for name, values in expected.items()), (world, parallel)


def test_torch_reads_our_files(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are in the format of torch.distributed.checkpoint, once its index has been made."""
    from torch.distributed.checkpoint import load

    found = checkpoints(run_dir)[-1]
    expected = tensors_in(found)
    assert "__0_2.distcp" in os.listdir(found.path) and ".metadata" not in os.listdir(found.path)
    for _ in range(2):  # anew: one that is there may be anybody's
        assert main(["checkpoint", "metadata", str(run_dir), "--trust-places"]) == 0
        assert f".metadata written  {found.path}" in capsys.readouterr().out
    assert newest(found.root, hashes=True) == (found, {})
    theirs = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    load(theirs, checkpoint_id=found.path, no_dist=True)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in expected.items())


def test_a_reader_written_from_the_documentation(saved: Path) -> None:
    """docs/checkpoint-format.md, followed to the letter, with nothing of this package and no unpickling."""
    found = checkpoints(saved)[-1]
    expected = tensors_in(found)
    files = json.loads(Path(found.path, "manifest.json").read_text())["files"]
    for name, told in files.items():
        content = Path(found.path, name).read_bytes()
        assert (len(content), xxhash.xxh3_128_hexdigest(content)) == (told["bytes"], told["xxh3"])
    index = json.loads(Path(found.path, "tensors.json").read_text())
    tables = {}
    for name, length, xxh3 in index["files"]:
        content = Path(found.path, name).read_bytes()
        table = content[len(content) - length :]
        assert xxhash.xxh3_128_hexdigest(table) == xxh3
        tables[name] = json.loads(table)
    assert index["tensors"].keys() == expected.keys()
    for name, tensor in index["tensors"].items():
        assert tensor["dtype"] == str(expected[name].dtype).removeprefix("torch.")
        whole = torch.zeros(tensor["shape"], dtype=expected[name].dtype)
        for run in tensor["pieces"]:
            for number in range(run["count"]):
                file, *_ = index["files"][run["file"] + number * run["step"]]
                start, _, _ = tables[file][name]
                content = Path(found.path, file).read_bytes()
                size = math.prod(run["shape"]) * whole.element_size()
                numbers = torch.frombuffer(bytearray(content[start : start + size]), dtype=whole.dtype)
                target = whole
                for axis, (offset, side) in enumerate(zip(run["offset"], run["shape"], strict=True)):
                    target = target.narrow(axis, offset + (0 if axis else number * side), side)
                target.copy_(numbers.view(run["shape"]))
        assert torch.equal(whole, expected[name])


# ---- malice ----


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def with_hashes(found: CommittedCheckpoint) -> None:
    """Make the manifest say that the files are as they should be: who can write there can do that, too."""
    manifest = Path(found.path, "manifest.json")
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3": xxhash.xxh3_128_hexdigest(path.read_bytes())}
        for path in Path(found.path).iterdir()
        if path != manifest
    }
    manifest.write_text(json.dumps({"format": 2, "files": files}))


def test_a_malicious_checkpoint_is_refused_and_nothing_is_run(run_dir: Path, tmp_path: Path) -> None:
    old, new = checkpoints(run_dir)
    ran = tmp_path / "ran"
    assert write_torch_metadata(new)
    metadata = Path(new.path, ".metadata")
    genuine = metadata.read_bytes()
    os.system(f"touch {tmp_path / 'works'}")
    assert (tmp_path / "works").exists(), "the payload would work"

    # The index of torch, a pickle, is never read here.
    hidden = pickle.loads(genuine)
    hidden.planner_data = Payload(ran)
    for content in (pickle.dumps(Payload(ran)), pickle.dumps(hidden)):
        metadata.write_bytes(content)
        with_hashes(new)
        assert newest(new.root, hashes=True) == (new, {})
        assert tensors_in(new).keys() == tensors_in(old).keys()
        assert not ran.exists()
    metadata.write_bytes(genuine)

    # Ours is JSON: as a pickle, or with other things in it, it is refused.
    index = Path(new.path, "tensors.json")
    plain = json.loads(index.read_text())
    (name, entry), *_ = plain["tensors"].items()
    changes: list[dict[str, Any]] = [
        {"dtype": "load"},
        {"shape": [10**9]},
        {"pieces": [{**entry["pieces"][0], "count": 1}]},
        {"pieces": [{**entry["pieces"][0], "file": "../../../../etc/passwd"}]},
        {"pieces": []},
    ]
    contents = [json.dumps({**plain, "tensors": {**plain["tensors"], name: {**entry, **change}}}) for change in changes]
    for content in (pickle.dumps(Payload(ran)), b"", b"[]", b'{"format": 3}', *(text.encode() for text in contents)):
        index.write_bytes(content)
        with_hashes(new)
        with pytest.raises(ResumeError, match="is not an index of a checkpoint"):
            tensors_in(new)
        assert not ran.exists()
    index.write_text(json.dumps(plain))

    # A piece whose pickle does harm: it is never unpickled, only the numbers beside it are read.
    (file, *_) = pieces_of(new)
    content = bytearray(file.read_bytes())
    place = next(p for p in pickle.loads(genuine).storage_data.values() if p.relative_path == file.name)
    piece = bytes(content[place.offset : place.offset + place.length])
    evil = make_evil_piece(piece, ran)
    assert len(evil) == len(piece)
    content[place.offset : place.offset + place.length] = evil
    file.write_bytes(content)
    with_hashes(new)
    tensors_in(new)
    assert not ran.exists()


def make_evil_piece(piece: bytes, ran: Path) -> bytes:
    """The same zip, with the beginning of its pickle replaced by one that runs a command."""
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(piece)) as archive:
        (entry,) = [e for e in archive.infolist() if e.filename.endswith("data.pkl")]
        genuine = archive.read(entry)
    evil = f"cposix\nsystem\n(S'touch {ran}'\ntR.".encode()
    start = piece.index(genuine)
    return piece[:start] + (evil + b"." * len(genuine))[: len(genuine)] + piece[start + len(genuine) :]
