"""The config.yaml of a run: who may read it, what of it is compared, and what becomes of an old or broken one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from raytune_fsdp.base.durable import keep_private, replace_durably
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.redaction import REDACTED
from raytune_fsdp.checkpoint import state
from raytune_fsdp.checkpoint.model_files import put_model_files
from raytune_fsdp.checkpoint.state import RunState, check_size
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import recorded_text
from raytune_fsdp.config.text import dump
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.run import resume
from raytune_fsdp.run.open_record import _put_model, clean_config
from raytune_fsdp.run.resume import changed_settings
from tests.config_text import dump_config
from tests.runs import make_config

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(60))


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    found = RunDir.of(config(tmp_path))
    found.path.mkdir(parents=True)
    return found


def config(directory: Path, **sections: Any) -> FinetuneConfig:
    return make_config(directory, **sections)


def secret(value: str) -> dict[str, Any]:
    uri = f"http://alice:{value}@host"
    return {"cluster": {"env": {"DB_PASSWORD": value}}, "tracking": {"mlflow": {"enabled": False, "uri": uri}}}


def test_another_secret_is_no_change(tmp_path: Path, place: RunDir) -> None:
    """Whether a secret was written down, as by older versions, or a mark."""
    for text in (dump_config, recorded_text):
        place.config.write_text(text(config(tmp_path, **secret("hunter2"))))
        assert changed_settings(place, config(tmp_path, **secret("other"))) == {}
    changed = changed_settings(place, config(tmp_path, cluster={"env": {"PLAIN": "1"}}))
    assert changed["cluster.env.DB_PASSWORD"] == [REDACTED, None] and changed["cluster.env.PLAIN"] == [None, "1"]


def test_fields_that_an_older_version_did_not_have_are_no_change(tmp_path: Path, place: RunDir) -> None:
    tree = config(tmp_path).model_dump()
    del tree["parallel"]["tf32"], tree["parallel"]["cpu_offload"], tree["profile"]
    place.config.write_text(dump(tree))
    assert changed_settings(place, config(tmp_path)) == {}
    changed = changed_settings(place, config(tmp_path, parallel={"precision": "fp64", "cpu_offload": True}))
    assert changed == {"parallel.cpu_offload": [False, True]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"run: {name: \xff\xfe}\n", "can't decode"),
        (b"run: {name\n", "expected"),
        (BOMB.encode(), "more than 100,000 values"),
        (b"[" * 1000, "nested too deeply"),
        (b"a: " + b"x" * 5_000_000, "more than 4,000,000 characters"),
    ],
    ids=["not UTF-8", "broken", "a bomb", "deep", "long"],
)  # fmt: skip
def test_a_config_that_cannot_be_read_is_named_and_does_not_stop_the_run(
    tmp_path: Path, place: RunDir, caplog: pytest.LogCaptureFixture, content: bytes, why: str
) -> None:
    place.config.write_bytes(content)
    before = time.perf_counter()
    assert changed_settings(place, config(tmp_path)) == {}
    clean_config(place)
    assert time.perf_counter() - before < 10 and place.config.read_bytes() == content
    assert str(place.config) in caplog.messages[0] and why in caplog.messages[0]


def test_the_config_of_a_complete_run_is_cleaned_once(tmp_path: Path, place: RunDir) -> None:
    made = config(tmp_path, **secret("hunter2"))
    place.config.write_text(dump_config(made))
    clean_config(place)
    assert place.config.read_text() == recorded_text(made)
    before = place.config.stat()
    clean_config(place)
    assert place.config.stat() == before
    place.config.write_text("run: {name: run}\ntracking: {mlflow: {enabled: false}}\n")  # of a version without a field
    clean_config(place)
    assert "uri" not in place.config.read_text()
    place.config.unlink()
    clean_config(place)
    assert not place.config.exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o640), (0o002, 0o660), (0o077, 0o600), (0, 0o660)])
def test_private_files_are_for_their_owner_and_group(tmp_path: Path, umask: int, mode: int) -> None:
    file, database, old = (tmp_path / name for name in ("config.yaml", "mlflow.db", "old.db"))
    (tmp_path / "config.yaml.tmp").write_text("left by a crash")
    for path, before in ((old, 0o644), (tmp_path / "config.yaml.tmp", 0o644)):
        path.touch()
        path.chmod(before)
    previous = os.umask(umask)
    try:
        replace_durably(file, "run: {}\n", private=True)
        keep_private(database)
        keep_private(old)
    finally:
        os.umask(previous)
    assert [path.stat().st_mode & 0o777 for path in (file, database, old)] == [mode, mode, 0o640]
    assert yaml.safe_load(file.read_text()) == {"run": {}} and database.read_bytes() == b""


def test_files_that_no_checkpoint_could_list_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is too large to be read again would lose the run."""
    names = {"train.x.files": [f"{number}.jsonl" for number in range(500)]}
    monkeypatch.setattr(resume, "files_by_key", lambda _: names)
    train: Any = SimpleNamespace(sources=[])
    assert resume.files_of(train) == {f"data.{key}": files for key, files in names.items()}
    monkeypatch.setattr(resume, "_MOST_NAMED", 499)
    assert resume.files_of(train) == {}, "names are only for messages"
    monkeypatch.setattr(resume, "_MOST_NAMED", 500)
    monkeypatch.setattr(resume, "_NAMES_BYTES", 500 * len("0.jsonl"))
    assert resume.files_of(train) == {}, "some names are longer"
    some = RunState(identity={"data.train.x.files": ["0" * 32] * 500})
    check_size(some)
    for limit, value in (("MAX_VALUES", state._MARGIN_VALUES + 500), ("STATE_BYTES", state._MARGIN_BYTES + 500 * 32)):
        with monkeypatch.context() as small:
            small.setattr(state, limit, value)
            with pytest.raises(ConfigError, match="data.train has 500 files, and every checkpoint lists the hash"):
                check_size(some)


def test_an_attempt_that_dies_while_it_writes_the_model_s_files_leaves_those_of_the_last_one(place: RunDir) -> None:
    """A run that began with another run's checkpoint reads them at its next start."""
    written: dict[str, str] = {}

    def save(directory: Path) -> None:
        for name, content in written.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(content)
            if content == "ha":
                raise OSError(28, "No space left on device")

    config, saving = FinetuneConfig.model_construct(method=None), SimpleNamespace(save_pretrained=save)
    prepared: Any = SimpleNamespace(hf_config=saving, tokenizer=saving, place=place, generation_config=None, code={})
    written |= {"config.json": "whole", "additional_chat_templates/tool.jinja": "whole"}
    _put_model(config, prepared)
    files = [place.model_files / name for name in written]
    before = [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files]
    written["config.json"] = "ha"
    with pytest.raises(OSError, match="No space left"):
        _put_model(config, prepared)
    written["config.json"] = "whole"
    _put_model(config, prepared)
    there = [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files]
    assert there == before, "what is the same is not written again"
    with files[0].open() as reader:
        written["config.json"] = "other"
        _put_model(config, prepared)
        assert (reader.read(), files[0].read_text()) == ("whole", "other")
    assert sorted(each.name for each in place.model_files.iterdir()) == ["additional_chat_templates", "config.json"]


def test_the_files_beside_checkpoints_elsewhere_are_replaced_as_a_whole(tmp_path: Path) -> None:
    model, checkpoints = tmp_path / "run" / "model", tmp_path / "elsewhere" / "run" / "checkpoints"
    copies = checkpoints.parent / "model"
    model.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    put_model_files(model, str(checkpoints))
    before = (copies / "tokenizer.json").stat().st_ino
    (model / "config.json").write_text('{"a": 1}')
    with (copies / "config.json").open() as reader:
        put_model_files(model, str(checkpoints))
        assert (reader.read(), (copies / "config.json").read_text()) == ("{}", '{"a": 1}')
    assert (copies / "tokenizer.json").stat().st_ino == before
