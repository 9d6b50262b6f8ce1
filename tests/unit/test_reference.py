"""The files of what a reference says: what they take for a document, and what they refuse."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from raytune_fsdp.base.batch import IGNORE, Cursor, MicroBatch, PackedSample
from raytune_fsdp.base.errors import DataError, OtherRunError, ResumeError
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.data.cache import remove
from raytune_fsdp.data.reference import Given, Known, ReferenceFiles, digest_of_values, given_of, names_of
from raytune_fsdp.model.attention.choose import KernelNeeds
from raytune_fsdp.model.network import load_architecture
from raytune_fsdp.plan.identity import REFERENCE_ALSO, REFERENCE_OF, REFERENCE_VALUES
from raytune_fsdp.run.reference import passes, unchanged
from raytune_fsdp.run.reference.network import decided_by
from raytune_fsdp.run.starting_weights import ReferenceModel
from tests.runs import make_config

KEY = "0123456789abcdef0123456789abcdef"


def micro_batch(*documents: tuple[list[int], int, int], length: int = 12) -> MicroBatch:
    """A sample of documents: their tokens, how many of the last ones are targets, and how many of these are skipped."""
    arrays = np.zeros((4, length), dtype=np.int32)
    arrays[1], arrays[3], columns = IGNORE, -1, np.zeros((4, length))
    at = 0
    for tokens, targets, skipped in documents:
        here = slice(at, at + len(tokens))
        arrays[0, here], arrays[2, here], arrays[3, here] = tokens, range(len(tokens)), 0
        arrays[1, here.stop - targets : here.stop] = tokens[len(tokens) - targets :]
        columns[:, here] = np.array([[1.0], [1.0], [0.0], [skipped]])
        at = here.stop
    arrays[2, at:] = range(length - at)
    sample = PackedSample(
        input_ids=arrays[0], labels=arrays[1], position_ids=arrays[2], source_ids=arrays[3], id=7, columns=columns
    )
    return to_batch([sample], index=0, after=Cursor())


def test_a_document_is_its_tokens_and_which_of_them_count() -> None:
    first = names_of(micro_batch(([5, 6, 7], 2, 0), ([5, 6, 8], 1, 0)))
    moved = names_of(micro_batch(([9, 9], 1, 0), ([5, 6, 8], 1, 0), ([5, 6, 7], 2, 0), length=16))
    assert len(first) == 2 and moved[1] == first[1] and moved[2] == first[0], "wherever it is packed"
    others = [([5, 6, 7], 1, 0), ([5, 6, 7], 2, 1), ([5, 7, 6], 2, 0), ([4, 5, 6, 7], 2, 0)]
    assert len({bytes(names_of(micro_batch(each))[0]) for each in others} | {bytes(first[0])}) == 5
    without = micro_batch(([5, 6, 7], 2, 0), ([3, 3], 0, 0), ([5, 6, 8], 1, 0))
    assert (names_of(without) == first).all(), "a document without targets has no value"


def test_what_is_told_is_the_value_of_each_document_behind_the_columns_of_its_row() -> None:
    batch = micro_batch(([5, 6, 7], 2, 0), ([5, 6, 8], 1, 0))
    names = names_of(batch)
    known = Known.of([(names[1:], np.array([-2.5])), (names, np.array([-1.25, 0.0]))])
    told = Given(known).told(batch).targets.columns
    assert told == ((1.0, 1.0, 0.0, 0.0, -1.25), (1.0, 1.0, 0.0, 0.0, -2.5)), "the first value of a document counts"
    with pytest.raises(DataError, match="has no log-probability for a document"):
        Given(Known.of([])).told(batch)
    with pytest.raises(DataError, match="start the same command again"):
        Given(known).told(micro_batch(([250, 251, 252], 2, 0)))


def files(root: Path, key: str = KEY) -> ReferenceFiles:
    return ReferenceFiles(root=root, key=key, about={})


def test_a_file_is_read_as_it_was_written_and_no_other_way(tmp_path: Path) -> None:
    names = names_of(micro_batch(([5, 6, 7], 2, 0), ([5, 6, 8], 1, 0)))
    values = np.array([-1.1, -2.2e-300])
    own = files(tmp_path)
    own.write(0, 3, names, values)
    (path,) = own.directory.glob("*.values")
    found = own.read(0, 3)
    assert found is not None and (found[0] == names).all() and found[1].tobytes() == values.tobytes()
    assert own.read(0, 4) is None and own.read(1, 3) is None
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert own.read(0, 3) is None, f"a bit of byte {place} differs"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert own.read(0, 3) is None, f"half written: {length} bytes"
    path.write_bytes(content)
    path.with_name("e000-w00000004.values").write_bytes(content)
    assert own.read(0, 4) is None, "another window's, copied"
    other = files(tmp_path, KEY[::-1])
    other.directory.mkdir()
    (other.directory / path.name).write_bytes(content)
    assert other.read(0, 3) is None and own.read(0, 3) is not None, "another reference's, copied"


def test_a_window_that_has_nothing_new_has_a_file_too(tmp_path: Path) -> None:
    own = files(tmp_path)
    own.write(2, 0, names_of(micro_batch()), np.empty(0))
    found = own.read(2, 0)
    assert found is not None and not len(found[0])


def test_clean_up_removes_what_nobody_has_used_and_eviction_does_not(tmp_path: Path) -> None:
    own = replace(files(tmp_path), about={"reference": {}})
    own.write(0, 0, names_of(micro_batch()), np.empty(0))
    (path,) = own.directory.glob("*.values")
    long_ago = path.stat().st_mtime - 30 * 86400
    for each in own.directory.iterdir():
        os.utime(each, (long_ago, long_ago))
    assert remove(tmp_path, files=False) == []
    assert own.read(0, 0) is not None and remove(tmp_path, unused_for=86400) == [], "it was read just now"
    os.utime(path, (long_ago, long_ago))
    assert [each.path for each in remove(tmp_path, unused_for=86400)] == [own.directory] and not own.directory.exists()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    own = replace(files(tmp_path), root=tmp_path / "no")
    own.root.write_text("a file in the way")
    with pytest.raises(DataError, match="set data.cache.path to another directory") as refused:
        own.write(0, 0, names_of(micro_batch()), np.empty(0))
    assert "\n" not in str(refused.value)


def model_of(directory: Path, **sections: Any) -> ReferenceModel:
    """The start of a run, drawn at random."""
    config = make_config(directory, **sections)
    hf_config = load_architecture(config.model, None)
    return ReferenceModel(config=config, hf_config=hf_config, needs=KernelNeeds(), origin=None, is_start=True)


def decided(model: ReferenceModel) -> dict[str, Any]:
    return decided_by(model, {"model.hidden_size": 32, "run.seed": 3}, None, None, alone=True)


LORA = {"type": "lora", "target_modules": ["c_attn"]}


def test_a_new_adapter_decides_values_where_a_network_with_it_computes_otherwise(tmp_path: Path) -> None:
    plain = decided(model_of(tmp_path, method=LORA))
    assert plain.keys() == {"architecture", "method", "weights", "adapter", "added"}, "keys stay what they were"
    assert plain["method"] == {"type": "lora"}
    assert decided(model_of(tmp_path, method={**LORA, "rank": 4, "alpha": 1, "target_modules": ["c_fc"]})) == plain
    dora = decided(model_of(tmp_path, method={**LORA, "dora": True}))
    assert dora != plain and decided(model_of(tmp_path, method={**LORA, "dora": True, "rank": 4})) == dora
    assert decided(model_of(tmp_path, method={**LORA, "dora": True, "target_modules": ["c_fc"]})) != dora
    begun = [decided(model_of(tmp_path, method={**LORA, "init": init})) for init in ("pissa", "olora")]
    assert begun[0] != begun[1] != plain != begun[0]


def test_layers_that_qlora_trains_whole_are_not_quantized_in_the_reference_either(tmp_path: Path) -> None:
    precision = {"parallel": {"precision": "bf16"}}
    plain = decided(model_of(tmp_path, method={**LORA, "type": "qlora"}, **precision))
    assert plain["method"] == {"type": "qlora", "quantization": "nf4"} and "more" not in plain
    ends = {**LORA, "type": "qlora", "modules_to_save": ["embed_tokens", "lm_head"]}
    assert decided(model_of(tmp_path, method=ends, **precision)) == plain
    inside = {**LORA, "type": "qlora", "modules_to_save": ["c_proj", "lm_head"]}
    assert decided(model_of(tmp_path, method=inside, **precision)) != plain
    assert decided(model_of(tmp_path, method={**inside, "type": "lora"}))["method"] == {"type": "lora"}


def test_a_run_that_an_older_version_began_goes_on_with_the_same_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "on_rank0", lambda work, what: work())

    def now(**method: Any) -> unchanged.ModelDigest:
        return unchanged.digest_now(model_of(tmp_path, method={**LORA, **method}), {}, {"device": "cpu"}, print)

    dora, plain = now(dora=True), now()
    assert dora.of != dora.older == plain.of == plain.older
    unchanged.check_unchanged(dora.of, dora, "it")
    unchanged.check_unchanged(dora.older, dora, "it")
    with pytest.raises(OtherRunError, match="it: its files have changed"):
        unchanged.check_unchanged(dora.of, plain, "it")


OLD, NEW = (files(Path(), each * 32) for each in "ab")
NAMES, VALUES = names_of(micro_batch(([5, 6, 7], 2, 0), ([5, 6, 8], 1, 0))), np.array([-1.0, -2.0])


def task_of(root: Path, recorded: Mapping[str, str], places: Sequence[passes.Place]) -> passes.Task:
    """What a run asks that has gone on elsewhere."""
    found = [replace(each, root=root) for each in (OLD, NEW)]
    return passes.Task(name="it", windows=cast(Any, None), places=places, files=found, recorded=recorded)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray[Any, Any]]:
    """What the passes of one rank find, in place of a model."""
    values: list[np.ndarray[Any, Any]] = []
    monkeypatch.setattr(passes, "on_rank0", lambda work, what: work())
    monkeypatch.setattr(passes.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(passes, "_of_window", lambda *_: (NAMES, values.pop()))
    return values


def compute(task: passes.Task) -> None:
    network, nothing = cast(Any, torch.nn.Identity()), cast(Any, None)
    passes.compute(
        task, network, nothing, micro_batch=1, layout=nothing, device=torch.device("cpu"), say=lambda _: None
    )


def test_what_is_computed_elsewhere_is_kept_as_that(tmp_path: Path, computed: list[np.ndarray[Any, Any]]) -> None:
    """A longer run on another machine: a file there that another run has left decides nothing."""
    old, new = (replace(each, root=tmp_path) for each in (OLD, NEW))
    for window in (0, 1):
        old.write(0, window, NAMES, VALUES)
    recorded = {old.name(0, 0): digest_of_values(NAMES, VALUES)}
    task = task_of(tmp_path, recorded, [(0, 0), (0, 1)])
    passes.look(task)
    assert task.lacking == [(0, 1)] and not task.uses_now
    computed.append(VALUES + 1e-9)
    compute(task)
    assert [path.name for path in new.directory.glob("*.values")] == ["e000-w00000001.values"] and task.uses_now
    assert task.digests.keys() == {old.name(0, 0), new.name(0, 1)}
    back = replace(task_of(tmp_path, task.checked(task.digests), task.places), files=task.files[::-1])
    passes.look(back)  # where the run began
    assert not back.lacking and back.digests == task.digests


def test_lost_values_that_come_out_otherwise_are_kept_nowhere(
    tmp_path: Path, computed: list[np.ndarray[Any, Any]]
) -> None:
    """So the run goes on again where it began."""
    old = replace(OLD, root=tmp_path)
    task = task_of(tmp_path, {old.name(0, 0): digest_of_values(NAMES, VALUES)}, [(0, 0)])
    passes.look(task)
    computed += [VALUES, VALUES + 1e-9]
    with pytest.raises(ResumeError, match=rf"{old.name(0, 0)}: .* are not those that this run began with"):
        compute(task)
    assert not list(tmp_path.rglob("*.values"))
    compute(task)
    assert not task.lacking and task.digests == task.recorded and not old.directory.exists()
    again = task_of(tmp_path, task.recorded, [(0, 0)])
    passes.look(again)
    assert not again.lacking and again.digests == again.recorded and again.uses_now


def test_a_run_knows_by_which_digests_its_values_are_kept() -> None:
    begun = unchanged.KeptBy.of(None, None, "model-old")
    assert begun.every == ["model-old"] and begun.record("of", "also", used=True) == {"of": "model-old"}
    moved = unchanged.KeptBy.of("model-old", None, "new")
    assert moved.every == ["model-old", "model-new"]
    assert moved.record("of", "also", used=False) == {"of": "model-old"}, "what has computed nothing is not on record"
    assert moved.record("of", "also", used=True) == {"of": "model-old", "also": ["model-new"]}
    back = unchanged.KeptBy.of("model-old", ["model-new"], "other-old")
    assert back.every == ["model-new", "model-old"]
    assert back.record("of", "also", used=True) == {"of": "model-old", "also": ["model-new"]}


def test_an_evaluation_finds_what_any_attempt_has_kept(tmp_path: Path) -> None:
    place = {"fingerprint": "f", "names": ["it"], "cache": SimpleNamespace(root=tmp_path)}
    windows = cast(Any, SimpleNamespace(**place, kind="preference", count=lambda _: 2))
    old, new = (ReferenceFiles.of(windows, {"of": of}) for of in ("model-old", "model-new"))
    old.write(0, 0, NAMES, VALUES)
    new.write(0, 1, NAMES[:0], VALUES[:0])
    old.write(0, 1, NAMES, VALUES)  # another run's
    values = {
        old.name(0, 0): digest_of_values(NAMES, VALUES), new.name(0, 1): digest_of_values(NAMES[:0], VALUES[:0]),
    }  # fmt: skip
    identity = {REFERENCE_OF: "model-old", REFERENCE_ALSO: ["model-new"], REFERENCE_VALUES: values}
    found = given_of(identity, {"it": windows})
    assert found is not None and len(found.known.names) == 2
    (new.directory / "e000-w00000001.values").unlink()
    assert given_of(identity, {"it": windows}) is None
    assert given_of({REFERENCE_OF: "model-old"}, {"it": windows}) is not None, "as older checkpoints say it"
