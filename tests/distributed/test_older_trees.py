"""Runs that an older tree has begun go on, bit by bit, as that tree would have gone on itself.

Their files are in tests/fixtures, with what the older tree computed when nothing stopped it. Only what is stable is
used here: the config, `metrics.jsonl`, `events.jsonl`, and `train_rank`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.aae7294.make import machine
from tests.fixtures.c6723328.make import losses_of
from tests.ranks import run_ranks

OLDER = Path(__file__).parents[1] / "fixtures" / "aae7294"
LATER = OLDER.parent / "c6723328"
"""Of another tree: runs whose rows a new run would read in another way."""
WHOLE: dict[str, list[dict[str, Any]]] = {
    name: rows for tree in (OLDER, LATER) for name, rows in json.loads((tree / "trajectories.json").read_text()).items()
}
EVALUATIONS: dict[str, list[tuple[int, dict[str, float]]]] = json.loads((LATER / "evaluations.json").read_text())
ON_TWO_RANKS = {"steps", "objects", "pattern", "unset"}
COMPUTED_IN_FP32 = {"steps", "pattern", "rows", "adapter_gemma3", "adapter_qwen3_5"}
"""In part: norms of Llama and of those like it are, whatever the weights are in."""
ADDED = "added_later"
"""A field that no tree has."""


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A copy of what the older tree has left, to be gone on with."""
    shutil.copytree(OLDER, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An object store with the checkpoint of `objects`."""
    pytest.importorskip("boto3")
    pytest.importorskip("moto")
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    for file in (OLDER / "bucket").rglob("*"):
        if file.is_file():
            client.put_object(
                Bucket="bucket", Key=file.relative_to(OLDER / "bucket").as_posix(), Body=file.read_bytes()
            )
    yield client
    server.shutdown()


@pytest.mark.parametrize("name", ["epochs", "steps"])
def test_a_run_goes_on(older: Path, name: str) -> None:
    check_continuation(older, name)
    newest = sorted(each.name for each in (older / "runs" / name / "checkpoints").iterdir())[-1]
    assert newest == f"step-{len(WHOLE[name]):08d}.a2"


def test_a_run_with_checkpoints_on_an_object_store_goes_on(older: Path, bucket: Any) -> None:
    check_continuation(older, "objects")
    assert not (older / "runs" / "objects" / "checkpoints").exists()
    keys = {each["Key"] for each in bucket.list_objects_v2(Bucket="bucket")["Contents"]}
    assert "older/objects/checkpoints/step-00000009.a2/manifest.json" in keys


def test_windows_of_the_cache_are_used(older: Path) -> None:
    """A run that starts anew finds all its windows in the older tree's cache."""
    shutil.rmtree(older / "runs" / "epochs" / "checkpoints")
    for file in ("metrics.jsonl", "events.jsonl"):
        (older / "runs" / "epochs" / file).unlink()
    before = windows(older)
    run_ranks(go_on, 1, older, "epochs", {"model": {"attention": "sdpa", "loss": "plain"}})  # as that tree computed
    check_trajectory("epochs", steps(older, "epochs"))
    assert windows_built(older, "epochs") == 0
    assert windows(older) == before


@pytest.mark.parametrize("name", list(EVALUATIONS))
def test_a_run_whose_rows_are_read_in_another_way_today_goes_on(tmp_path: Path, name: str) -> None:
    shutil.copytree(LATER, tmp_path, dirs_exist_ok=True)
    check_continuation(tmp_path, name)
    found = losses_of(tmp_path / "runs" / name)
    assert [step for step, _ in found] == [step for step, _ in EVALUATIONS[name]]
    for (_, losses), (_, whole) in zip(found, EVALUATIONS[name], strict=True):
        assert losses == pytest.approx(whole, rel=0 if here_as_there(LATER) else tolerance(name))


@pytest.mark.parametrize("section", ["optim", "method", "format"])
def test_a_field_that_is_added_with_a_default_keeps_old_runs_going(older: Path, section: str) -> None:
    """What a new field means when it is not there is left out of what makes it the same run, and the same windows."""
    before = len((older / "runs" / "epochs" / "events.jsonl").read_text().splitlines())
    run_ranks(go_on_with_a_field, 1, older, "epochs", section, 1)
    check_trajectory("epochs", steps(older, "epochs"))
    assert windows_built(older, "epochs", after=before) == 0


@pytest.mark.parametrize(
    "section", ["optim", *(pytest.param(each, marks=pytest.mark.slow) for each in ("method", "format"))]
)
def test_another_value_of_that_field_is_another_run(older: Path, section: str) -> None:
    with pytest.raises(AssertionError, match="OtherRunError(.|\n)*added_later"):
        run_ranks(go_on_with_a_field, 1, older, "epochs", section, 2)


def check_continuation(older: Path, name: str) -> None:
    """Go on with a run; its record only grows, and says what the older tree would have said."""
    run_dir = older / "runs" / name
    record = {file: (run_dir / file).read_bytes() for file in ("metrics.jsonl", "events.jsonl")}
    stopped = len(steps(older, name))
    assert 0 < stopped < len(WHOLE[name])
    run_ranks(go_on, 2 if name in ON_TWO_RANKS else 1, older, name)
    check_trajectory(name, steps(older, name))
    for file, content in record.items():
        assert (run_dir / file).read_bytes().startswith(content)
    started = [each["fields"] for each in lines(run_dir / "events.jsonl") if each["event"] == "attempt_started"]
    assert [fields["resumed_from"] for fields in started] == [0, stopped]


def check_trajectory(name: str, rows: list[dict[str, Any]]) -> None:
    """The bits that the older tree has computed; on a machine with other kernels, their values to rounding.

    Keys that the older tree did not know are passed over.
    """
    found = [{key: row[key] for key in whole} for row, whole in zip(rows, WHOLE[name], strict=True)]
    if found == WHOLE[name]:
        return
    tree = LATER if name in EVALUATIONS else OLDER
    assert not here_as_there(tree), first_difference(found, WHOLE[name])
    for row, whole in zip(found, WHOLE[name], strict=True):
        for key, value in whole.items():
            if isinstance(value, float):
                assert math.isclose(row[key], value, rel_tol=tolerance(name)), first_difference([row], [whole])
            else:
                assert row[key] == value, first_difference([row], [whole])
    warnings.warn(
        f"{name}: equal within {tolerance(name):g}, not bit-equal, because this machine ({machine()}) is not the one "
        f"that {tree.name} has run on ({json.loads((tree / 'machine.json').read_text())})",
        stacklevel=2,
    )


def here_as_there(tree: Path) -> bool:
    """Whether this machine computes the bits of the one that the tree's runs were made on."""
    return machine() == json.loads((tree / "machine.json").read_text())


def tolerance(name: str) -> float:
    """Relative, where the machine is another one."""
    return 1e-6 if name in COMPUTED_IN_FP32 else 1e-9


def first_difference(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str:
    return next(
        f"step {whole['step']}: {key} is {row[key]!r}, was {value!r}"
        for row, whole in zip(found, wanted, strict=True)
        for key, value in whole.items()
        if row[key] != value
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(older: Path, name: str) -> list[dict[str, Any]]:
    """The trajectory on record."""
    found = lines(older / "runs" / name / "metrics.jsonl")
    return [line["trajectory"] for line in found if line["kind"] == "step"]


def windows(older: Path) -> dict[str, bytes]:
    """Every window in the cache."""
    cache = older / "runs" / "cache"
    return {str(file.relative_to(cache)): file.read_bytes() for file in cache.rglob("*.arrow")}


def windows_built(older: Path, name: str, after: int = 0) -> int:
    """Windows that had to be tokenized, by the events behind the first `after`."""
    events = lines(older / "runs" / name / "events.jsonl")[after:]
    assert any(each["event"] == "attempt_started" for each in events)
    return sum(each["fields"]["windows"] for each in events if each["event"] == "windows_built")


def go_on(older: Path, name: str, changes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """A rank that continues a run by the config in its directory."""
    from tests.runs import train_rank

    os.chdir(older)  # the paths in the config are relative
    sys.path.insert(0, str(older))  # where a user's function is
    values = yaml.safe_load(Path("runs", name, "config.yaml").read_text())
    for section, fields in (changes or {}).items():
        values[section] |= fields
    assert not train_rank(values)


def go_on_with_a_field(older: Path, name: str, section: str, value: int) -> None:
    """The same by a tree whose `section` has one field more, with default 1; the config says `value`."""
    from raytune_fsdp.config import FinetuneConfig
    from tests.runs import train_rank

    os.chdir(older)
    values = yaml.safe_load(Path("runs", name, "config.yaml").read_text())
    extended = section_of(FinetuneConfig.model_validate(values), section)
    add_field(type(extended))
    register_default(section, extended, ADDED, 1)
    before = section_of(FinetuneConfig.model_validate(values), section)
    assert type(before) is type(extended) and before.model_dump()[ADDED] == 1, "the field must be there"
    if value != 1:
        place = values["data"]["train"][0]["format"] if section == "format" else values[section]
        place[ADDED] = value
        assert section_of(FinetuneConfig.model_validate(values), section).model_dump()[ADDED] == value
    train_rank(values)


def register_default(section: str, extended: Any, field: str, value: Any) -> None:
    """Say what the absence of a field means: the one place where the test knows how the tree does that."""
    from raytune_fsdp.plan.identity import ABSENT

    ABSENT[".".join([section, *([extended.type] if hasattr(extended, "type") else []), field])] = value


def section_of(config: Any, section: str) -> Any:
    return config.data.train[0].format if section == "format" else getattr(config, section)


def add_field(section: type[Any]) -> None:
    """Give a section of the config a field with default 1, and let all that contain the section know."""
    from pydantic.fields import FieldInfo

    from raytune_fsdp.config import Section

    section.model_fields[ADDED] = FieldInfo.from_annotated_attribute(int, 1)
    for each in subclasses(Section):  # in the order of their definition, so what a section contains comes first
        each.model_rebuild(force=True)


def subclasses(base: type[Any]) -> list[type[Any]]:
    return [found for each in base.__subclasses__() for found in (each, *subclasses(each))]
