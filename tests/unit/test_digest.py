"""The digest of a checkpoint or a model is that of its numbers, not of its files, and every bit counts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raytune_fsdp.base import row_hashes
from raytune_fsdp.base.row_hashes import root
from raytune_fsdp.cli.digest import main
from raytune_fsdp.model.weights import digests
from raytune_fsdp.tools.digest import digests_of_model

TENSORS = {
    "matrix": torch.arange(12.0).view(4, 3),
    "many rows": torch.arange(5000, dtype=torch.int64),
    "experts": torch.arange(24.0).view(2, 3, 4).bfloat16(),
    "number": torch.tensor(1.5),
    "nothing": torch.zeros(0, 3),
}


def model(directory: Path, tensors: dict[str, torch.Tensor], files: int = 1) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    where = {tensor: names[number % files] for number, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in where if where[tensor] == name}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def by_hand(name: str, tensor: torch.Tensor) -> str:
    content = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    row = max(1, len(content) // max(1, len(tensor) if tensor.ndim else 1))
    leaf = max(1, 1024 // row) * row
    level = [hashlib.sha256(content[start : start + leaf]).digest() for start in range(0, len(content), leaf)]
    left: list[bytes] = []
    while level:
        if len(level) % 2:
            left.insert(0, level.pop())
        level = [hashlib.sha256(level[i] + level[i + 1]).digest() for i in range(0, len(level), 2)]
    head = json.dumps([name, str(tensor.dtype)[6:], list(tensor.shape)]).encode()
    return hashlib.sha256(head + b"".join(left)).hexdigest()


@pytest.mark.parametrize("at_once", [1, 10_000, 64 << 20])
def test_it_is_the_tree_that_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(digests, "_AT_ONCE", at_once)
    monkeypatch.setattr(row_hashes, "_AT_ONCE", at_once)
    found = digests_of_model(model(tmp_path / "model", TENSORS))
    assert found == {name: by_hand(name, tensor) for name, tensor in TENSORS.items()}
    assert root(found) == hashlib.sha256(b"".join(bytes.fromhex(found[name]) for name in sorted(found))).hexdigest()


def test_files_do_not_count_and_every_bit_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, three = model(tmp_path / "one", TENSORS), model(tmp_path / "three", TENSORS, files=3)
    assert main([str(one), str(three)]) == 0
    assert "the same numbers" in capsys.readouterr().out
    tensors = load_file(one / "model.safetensors")
    tensors["experts"].view(torch.int16)[1, 2, 3] ^= 1
    tensors["matrix"] = tensors["matrix"].view(3, 4)
    del tensors["number"]
    other = model(tmp_path / "other", tensors)
    assert main([str(one), str(other)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("model       ") and said[2] == "3 of 5 differ: experts, matrix, number"
    assert main([str(one), "--tensors"]) == 0
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()[1:]] == sorted(TENSORS)


def test_what_cannot_be_compared_or_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = model(tmp_path / "one", TENSORS)
    other = model(tmp_path / "other", {"else": torch.zeros(2)})
    assert main([str(one), str(other)]) == 2
    assert "have no tensor in common" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) in (2, 3)
    assert "nowhere does not exist; name a run, " in capsys.readouterr().err
    file = one / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert main([str(one)]) in (2, 3)
    assert "is not a complete safetensors file" in capsys.readouterr().err
