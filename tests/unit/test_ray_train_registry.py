"""Whatever has become of Ray's own list of checkpoints, Ray can load what `repair_registry` leaves of it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager, _CheckpointManagerState
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2.api.report_config import CheckpointConsistencyMode
from ray.train.v2.api.validation_config import ValidationTaskConfig

from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.checkpoint.catalogue import committed, directory_name
from raytune_fsdp.checkpoint.storage import MANIFEST_FILE, PosixStorage
from raytune_fsdp.launch.ray import train_registry
from raytune_fsdp.launch.ray.train_registry import SNAPSHOT_FILE, repair_registry


class Run:
    """A run directory with checkpoints that Ray's own code has registered."""

    def __init__(self, storage: Path, steps: range, **reports: Any) -> None:
        self.directory = storage / "mine"
        self.context = StorageContext(storage_path=str(storage), experiment_dir_name="mine")
        self.checkpoints = self.directory / "checkpoints"
        self.snapshot = self.directory / SNAPSHOT_FILE
        asyncio.run(self._register(steps, **reports))

    async def _register(self, steps: range, validations: dict[int, Any] | None = None) -> None:
        ray = self.manager()
        for step in steps:
            path = self.path(step)
            path.mkdir(parents=True)
            (path / MANIFEST_FILE).write_text("{}")
            validation = (validations or {}).get(step, False)
            checkpoint = Checkpoint(str(path), filesystem=self.context.storage_filesystem)
            ray.register_checkpoint(_TrainingReport(checkpoint, {"step": step, "löss": 0.5}, validation))
            await asyncio.sleep(0)

    def prune(self, keep: int) -> None:
        for found in committed(str(self.checkpoints))[:-keep]:
            PosixStorage(found.root).remove(found.name)

    def path(self, step: int) -> Path:
        return self.checkpoints / directory_name(step, 1)

    def manager(self) -> CheckpointManager:
        return CheckpointManager(CheckpointConfig(), self.context)

    def latest(self) -> Path | None:
        """What Ray would hand to the workers: one that exists, or none. Fails where Ray does, also when it saves."""
        ray = self.manager()
        assert json.loads(ray._save_state())["current_report_index"] == ray._current_report_index
        result = ray.latest_checkpoint_result
        if result is None:
            return None
        path = Path(result.checkpoint.path)
        assert str(path) in [found.path for found in committed(str(self.checkpoints))]
        return path

    def listed(self) -> list[str]:
        results = asyncio.run(self.manager().get_all_reported_checkpoints(0, CheckpointConsistencyMode.COMMITTED, 0.0))
        return [Path(each.checkpoint.path).name for each in results]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.snapshot.read_text())
        return state

    def aside(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob(f"{SNAPSHOT_FILE}?*"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, range(2, 10, 2))


def test_the_form_is_the_installed_rays() -> None:
    """Fails when Ray changes it: then this module must follow."""
    theirs, ours = _CheckpointManagerState.model_fields, train_registry._Snapshot.model_fields
    assert list(theirs) == list(ours)
    assert [name for name in theirs if theirs[name].is_required()] == [
        name for name in ours if ours[name].is_required()
    ]


def test_where_ray_has_no_list_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert repair_registry(tmp_path / "not" / "there") is None
    assert repair_registry(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_list_that_is_right_is_not_touched(run: Run) -> None:
    before, written = run.snapshot.read_bytes(), run.snapshot.stat().st_mtime_ns
    assert repair_registry(run.directory) is None
    assert (run.snapshot.read_bytes(), run.snapshot.stat().st_mtime_ns) == (before, written)
    assert run.latest() == run.path(8)
    assert run.aside() == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_pruned_checkpoints_leave_the_list_without_a_word(run: Run, keep: int) -> None:
    run.prune(keep)
    with pytest.raises(Exception, match="does not exist anymore"):
        run.manager()
    assert repair_registry(run.directory) is None
    assert run.latest() == run.path(8)
    assert run.listed() == [directory_name(step, 1) for step in (2, 4, 6, 8)[-keep:]]
    assert run.state()["checkpoint_report_indices"] == [0, 1, 2, 3][-keep:]
    assert run.state()["current_report_index"] == 4
    assert run.aside() == []


def test_after_the_latest_comes_the_one_reported_last(run: Run) -> None:
    """Which need not be the last of the list: Ray sorts it by score, if asked to."""
    state = run.state()
    state["checkpoint_results"].reverse()
    state["checkpoint_report_indices"].reverse()
    run.snapshot.write_text(json.dumps(state))
    shutil.rmtree(run.path(8))
    assert repair_registry(run.directory) is None
    assert run.latest() == run.path(6)
    assert run.listed() == [directory_name(step, 1) for step in (6, 4, 2)]


def test_a_checkpoint_without_a_manifest_is_none(run: Run) -> None:
    """Ray only asks whether there is a directory."""
    (run.path(8) / MANIFEST_FILE).unlink()
    run.path(6).rename(run.path(6).with_name(run.path(6).name + ".damaged"))
    assert repair_registry(run.directory) is None
    assert run.latest() == run.path(4)


def test_when_all_are_gone_ray_starts_with_none(run: Run) -> None:
    shutil.rmtree(run.checkpoints)
    assert repair_registry(run.directory) is None
    assert run.latest() is None
    assert run.listed() == []


def test_validations_go_with_their_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path, range(1, 5), validations={1: True, 2: ValidationTaskConfig({"n": 3}, 9.0), 3: True})
    state = run.state()
    state["validated_checkpoint_dir_names"] = [f"checkpoints/{directory_name(step, 1)}" for step in (1, 4)]
    run.snapshot.write_text(json.dumps(state))
    shutil.rmtree(run.path(1))
    assert repair_registry(run.directory) is None
    pending = run.manager().get_pending_training_results()
    assert {Path(each.path).name: spec for each, (_, spec) in pending.items()} == {
        directory_name(2, 1): ValidationTaskConfig({"n": 3}, 9.0),
        directory_name(3, 1): True,
    }
    assert run.state()["validated_checkpoint_dir_names"] == [f"checkpoints/{directory_name(4, 1)}"]


def test_what_is_kept_is_kept_as_it_was(run: Run) -> None:
    state = run.state()
    state["ray_version"], state["new_in_ray"] = "2.99.0", {"a": [1, None]}
    run.snapshot.write_text(json.dumps(state))
    shutil.rmtree(run.path(2))
    assert repair_registry(run.directory) is None
    del state["checkpoint_results"][0], state["checkpoint_report_indices"][0]
    assert run.state() == state
    assert run.latest() == run.path(8)


def _check_any(run: Run, content: bytes) -> bool:
    """Whatever is in the file, Ray loads what is left after the repair. Says whether that is the list."""
    run.snapshot.write_bytes(content)
    done = repair_registry(run.directory)
    if done is not None:
        assert not run.snapshot.exists()
        aside = run.snapshot.with_name(SNAPSHOT_FILE + ".damaged")
        assert aside.read_bytes() == content
        aside.unlink()
        assert run.latest() is None
        return False
    run.latest()
    return True


def test_truncated_at_any_byte(tmp_path: Path) -> None:
    run = Run(tmp_path, range(2, 6, 2))
    whole = run.snapshot.read_bytes()
    assert [size for size in range(len(whole) + 1) if _check_any(run, whole[:size])] == [len(whole)]


@pytest.mark.parametrize("bit", [0, 3, 5, 7])
def test_any_byte_flipped(tmp_path: Path, bit: int) -> None:
    run = Run(tmp_path, range(2, 6, 2))
    whole = run.snapshot.read_bytes()
    taken = [place for place in range(len(whole)) if _check_any(run, _flipped(whole, place, bit))]
    assert len(taken) < len(whole)


def _flipped(content: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -1,
        1e400,
        10**30,
        "",
        "x",
        "1",
        "\0",
        "\ud800",
        "/",
        "..",
        "x" * 5000,
        [],
        [None],
        [[]],
        {},
        {"x": 1},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_any_value_replaced(tmp_path: Path, value: Any) -> None:
    run = Run(tmp_path, range(2, 6, 2), validations={2: True, 4: ValidationTaskConfig({"n": 3}, 9.0)})
    whole = run.snapshot.read_text()
    for place in _places(json.loads(whole)):
        state = within = {"": json.loads(whole)}
        for key in place[:-1]:
            within = within[key]
        within[place[-1]] = value
        _check_any(run, json.dumps(state[""]).encode())


def _places(value: Any, place: tuple[Any, ...] = ("",)) -> Iterator[tuple[Any, ...]]:
    """The way to every value in it, itself included."""
    yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*place, key))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value: line 1 column 1"),
        (b"\0" * 512, "Expecting value: line 1 column 1"),
        (b"\xff\xfe{}", "utf-8"),
        (b"[]", "valid dictionary"),
        (b"null", "valid dictionary"),
        (b"{}", "checkpoint_results: Field required"),
        (b'{"ray_version": "1.0", "checkpoints": []}', "checkpoint_results: Field required"),
        (b"[" * 100_000, "recursion"),
        (b"1" * 10_000, "digits"),
    ],
    ids=["empty", "zeros", "not text", "list", "null", "no fields", "older form", "deep", "number"],
)
def test_what_is_no_list_is_moved_aside_and_told(run: Run, content: bytes, why: str) -> None:
    run.snapshot.write_bytes(content)
    with pytest.raises(Exception):  # noqa: B017
        run.manager()
    done = repair_registry(run.directory)
    assert done is not None
    assert why in done
    assert f"{SNAPSHOT_FILE} was moved to {SNAPSHOT_FILE}.damaged; the run's own manifests decide" in done
    assert "\n" not in done
    assert run.latest() is None
    assert (run.directory / f"{SNAPSHOT_FILE}.damaged").read_bytes() == content


def _one_index_less(state: dict[str, Any]) -> None:
    state["checkpoint_report_indices"].pop()


def _one_validation_more(state: dict[str, Any]) -> None:
    state["pending_validation_specs"].append(True)


def _latest_not_listed(state: dict[str, Any]) -> None:
    state["checkpoint_results"].pop()
    state["checkpoint_report_indices"].pop()


def _pending_not_listed(state: dict[str, Any]) -> None:
    state["pending_training_results"].append(state["checkpoint_results"].pop(0))
    state["pending_validation_specs"].append(True)
    state["checkpoint_report_indices"].pop(0)


def _impossible_validation(state: dict[str, Any]) -> None:
    state["pending_training_results"].append(state["checkpoint_results"][0])
    state["pending_validation_specs"].append({"fn_kwargs": {}, "timeout_s": -1})


def _index_is_text(state: dict[str, Any]) -> None:
    state["checkpoint_report_indices"][0] = "first"


@pytest.mark.parametrize(
    "change",
    [
        _one_index_less,
        _one_validation_more,
        _latest_not_listed,
        _pending_not_listed,
        _impossible_validation,
        _index_is_text,
    ],
)
def test_a_list_that_contradicts_itself_is_moved_aside(run: Run, change: Callable[[dict[str, Any]], None]) -> None:
    state = run.state()
    change(state)
    run.snapshot.write_text(json.dumps(state))
    with pytest.raises(Exception):  # noqa: B017
        run.manager()
    assert "was moved to" in (repair_registry(run.directory) or "")
    assert run.latest() is None
    assert run.aside() == [f"{SNAPSHOT_FILE}.damaged"]


def test_a_directory_in_its_place_is_moved_aside(run: Run) -> None:
    run.snapshot.unlink()
    (run.snapshot / "inside").mkdir(parents=True)
    with pytest.raises(Exception):  # noqa: B017
        run.manager()
    assert "(not a file)" in (repair_registry(run.directory) or "")
    assert run.latest() is None
    assert (run.directory / f"{SNAPSHOT_FILE}.damaged" / "inside").is_dir()


def test_nothing_set_aside_is_overwritten(run: Run) -> None:
    for content in ("first", "second", "third"):
        run.snapshot.write_text(content)
        assert repair_registry(run.directory) is not None
    names = [f"{SNAPSHOT_FILE}.damaged{suffix}" for suffix in ("", ".2", ".3")]
    assert run.aside() == names
    assert [(run.directory / name).read_text() for name in names] == ["first", "second", "third"]


def test_a_repair_that_cannot_be_written_is_an_error_for_people(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_registry, "replace_durably", full)
    shutil.rmtree(run.path(2))
    before = run.snapshot.read_bytes()
    with pytest.raises(ResumeError, match=r"No space left on device.*or remove the file"):
        repair_registry(run.directory)
    assert run.snapshot.read_bytes() == before


def test_ray_goes_on_writing_where_the_repair_ended(run: Run) -> None:
    """A new attempt registers its checkpoints behind those that are left."""
    run.prune(1)
    repair_registry(run.directory)
    asyncio.run(run._register(range(10, 12, 2)))
    assert run.latest() == run.path(10)
    assert run.listed() == [directory_name(step, 1) for step in (8, 10)]
    assert run.state()["checkpoint_report_indices"] == [3, 4]
