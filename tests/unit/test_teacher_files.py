"""The files of what a teacher predicts: what is read of them as it was written, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import xxhash

from raytune_fsdp.base.batch import StepBatches
from raytune_fsdp.base.errors import (
    ConfigError,
    DamagedError,
    DataError,
    ModelError,
    ResumeError,
    RowError,
    TransientError,
)
from raytune_fsdp.data.batches import filler
from raytune_fsdp.data.cache import remove
from raytune_fsdp.data.reference import names_of
from raytune_fsdp.data.shared_batches import part_of
from raytune_fsdp.data.teacher import (
    Form,
    Lessons,
    Predictions,
    Rest,
    TeacherFiles,
    WindowSaid,
    digest_of_window,
    rest_of,
)
from raytune_fsdp.model.directory.tokenizer import digest_of, tokenizer_in
from raytune_fsdp.plan.identity import TEACHER_ALSO, TEACHER_OF, TEACHER_VALUES
from raytune_fsdp.plan.run_dir import cache_of
from raytune_fsdp.run.reference.unchanged import KeptBy
from raytune_fsdp.run.starting_weights import TeacherModel
from raytune_fsdp.run.teacher import attempt, passes
from raytune_fsdp.run.teacher.find import check_possible, find_teacher, form_of
from tests.runs import LLAMA, make_config
from tests.unit.test_reference import micro_batch

FORM = Form(top_k=3, temperature=1.5, dtype="fp32", vocabulary=64)
DOCUMENTS = (([5, 6, 7], 2, 0), ([5, 6, 8, 9], 3, 0))


def files(root: Path, **changes: object) -> TeacherFiles:
    form = replace(FORM, **changes) if changes else FORM  # type: ignore[arg-type]
    return TeacherFiles.within(root, of="1234-5678", form=form, tokenizer="abc", model="big")


def predictions(targets: int, seed: int = 0, form: Form = FORM) -> Predictions:
    rng = np.random.default_rng(seed)
    logs = np.log(rng.dirichlet(np.ones(form.top_k + 1), targets)).astype(form.number)
    ids = rng.integers(0, form.vocabulary, (targets, form.top_k), dtype=np.int32)
    return Predictions(ids=ids, log_probabilities=logs[:, :-1], rest=logs[:, -1])


def written(own: TeacherFiles, *documents: tuple[list[int], int, int], seed: int = 0) -> tuple[str, list[Predictions]]:
    batch = micro_batch(*documents)
    said = [predictions(targets, seed + number, own.form) for number, (_, targets, _) in enumerate(documents)]
    data = [each.to_bytes(own.form) for each in said]
    return own.write(names_of(batch, grouped=False), data, [rest_of(each.rest) for each in said]).name, said


def lessons(own: TeacherFiles, *parts: str) -> Lessons:
    found = [own.open(part) for part in parts]
    made = Lessons(own)
    made.add(part for part in found if part is not None)
    assert None not in found
    return made


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_predictions_are_read_as_they_were_written(tmp_path: Path, dtype: str) -> None:
    own = files(tmp_path, dtype=dtype)
    part, (first, second) = written(own, *DOCUMENTS)
    (path,) = (own.directory / "parts").iterdir()
    assert path.name == f"{part}.topk" and part == xxhash.xxh3_128_hexdigest(path.read_bytes())
    size = 4 if dtype == "fp32" else 8
    assert own.form.target_bytes == 3 * (4 + size) + size
    assert path.stat().st_size == path.read_bytes().index(b"\n") + 1 + 2 * 48 + 5 * own.form.target_bytes
    moved = micro_batch(([9, 9], 0, 0), DOCUMENTS[1], ([3], 0, 0), DOCUMENTS[0], length=16)
    taught = lessons(own, part).told(moved).targets.teacher
    assert taught is not None and taught.ids.dtype == torch.int32 and str(taught.rest.dtype).endswith(str(8 * size))
    for key, tensor in (("ids", taught.ids), ("log_probabilities", taught.log_probabilities), ("rest", taught.rest)):
        wanted = np.concatenate([getattr(second, key), getattr(first, key)])
        assert tensor.numpy().tobytes() == wanted.tobytes(), "in the order of the micro-batch, bit for bit"


def test_columns_of_a_users_loss_are_no_part_of_a_name() -> None:
    batch = micro_batch(*DOCUMENTS)
    other = replace(batch, targets=replace(batch.targets, columns=((7.0,), (8.0,))))
    assert (names_of(batch, grouped=False) == names_of(other, grouped=False)).all()


def test_parts_of_a_micro_batch_get_their_own_targets_and_fillers_none(tmp_path: Path) -> None:
    own = files(tmp_path)
    made = lessons(own, written(own, *DOCUMENTS)[0])
    whole = made.told(micro_batch(*DOCUMENTS))
    found = [part_of(whole, member, 3).targets for member in range(3)]
    assert whole.targets.teacher is not None
    for key in ("ids", "log_probabilities", "rest"):
        parts = [getattr(each.teacher, key) for each in found]
        assert [len(part) for part in parts] == [len(each.ids) for each in found] and min(map(len, parts)) < 3
        assert torch.equal(torch.cat(parts), getattr(whole.targets.teacher, key))
    empty = made.told(filler(2, seq_len=12, pad_id=0)).targets.teacher
    assert empty is not None and empty.ids.shape == (0, 3) and empty.rest.shape == (0,)


def test_every_bit_of_a_part_counts(tmp_path: Path) -> None:
    own = files(tmp_path)
    part, _ = written(own, *DOCUMENTS)
    path = own.path(part)
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert own.open(part) is None, f"a bit of byte {place} differs"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert own.open(part) is None, f"half written: {length} bytes"
    path.write_bytes(content + b"\0")
    assert own.open(part) is None
    path.unlink()
    assert own.open(part) is None
    path.symlink_to(tmp_path / "elsewhere")
    assert own.open(part) is None
    (tmp_path / "elsewhere").write_bytes(content)
    assert own.open(part) is None
    path.unlink()
    path.write_bytes(content)
    assert own.open(part) is not None and own.parts() == [part]


def test_a_part_that_is_renamed_or_another_teachers_is_none(tmp_path: Path) -> None:
    own, other = files(tmp_path), files(tmp_path, temperature=2.0)
    assert own.directory != other.directory and own.key != other.key
    part, _ = written(own, *DOCUMENTS)
    renamed = own.path("0" * 32)
    renamed.write_bytes(own.path(part).read_bytes())
    assert own.open("0" * 32) is None
    other.path(part).parent.mkdir(parents=True)
    other.path(part).write_bytes(own.path(part).read_bytes())
    assert other.open(part) is None and own.open(part) is not None
    (own.directory / "parts" / "..topk").write_bytes(b"")
    (own.directory / "parts" / "half.topk.1234.tmp").write_bytes(b"")
    assert own.parts() == sorted([part, "0" * 32])


def test_headers_that_lie_are_refused_though_the_name_is_their_digest(tmp_path: Path) -> None:
    own = files(tmp_path)
    part, _ = written(own, *DOCUMENTS)
    content = own.path(part).read_bytes()
    end = content.index(b"\n") + 1
    row = np.dtype([("name", "V16"), ("targets", "<u8"), ("digest", "<u8"), ("mass", "<f8"), ("largest", "<f8")])

    def with_table(**changes: float) -> bytes:
        table = np.frombuffer(content[end : end + 96], dtype=row).copy()
        for key, value in changes.items():
            table[key][0] = value
        return content[:end] + table.tobytes() + content[end + 96 :]

    def headed(documents: object) -> bytes:
        return content[:end].replace(b'"documents": 2', f'"documents": {documents}'.encode()) + content[end:]

    hostile = [
        *(headed(each) for each in (0, -1, 3, 1, 10**15, 2.0, "true", "NaN", "[2]", '"2"')), b"", b"{}\n", b"{" * 3000,
        b'{"documents": ' + b"[" * 4000 + b"\n",
        with_table(targets=0), with_table(targets=2**63 + 1), with_table(targets=1), with_table(targets=2**62),
        with_table(mass=float("nan")), with_table(mass=-1.0), with_table(largest=2.0), with_table(mass=float("inf")),
    ]  # fmt: skip
    for each in hostile:
        name = xxhash.xxh3_128_hexdigest(each)
        own.path(name).write_bytes(each)
        assert own.open(name) is None, each[:120]
    assert own.open(xxhash.xxh3_128_hexdigest(with_table())) is not None


def test_a_document_that_is_damaged_after_it_was_verified_ends_the_run_before_it_is_used(tmp_path: Path) -> None:
    own = files(tmp_path)
    part, _ = written(own, *DOCUMENTS)
    made = lessons(own, part)
    content = own.path(part).read_bytes()
    own.path(part).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    made.told(micro_batch(DOCUMENTS[0]))
    with pytest.raises(DataError, match=f"{part}.topk has been damaged since the run started") as refused:
        made.told(micro_batch(DOCUMENTS[1]))
    assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match="start the same command again"):
        made.told(micro_batch(([40, 41], 1, 0)))
    made.close()
    own.path(part).unlink()
    with pytest.raises(TransientError, match="cannot be read"):
        made.told(micro_batch(DOCUMENTS[0]))


@pytest.mark.parametrize("wrong", [64, -1])
def test_tokens_that_do_not_exist_are_refused(tmp_path: Path, wrong: int) -> None:
    """A digest is no signature: whoever has a file can make another one that has its own."""
    own, batch = files(tmp_path), micro_batch(DOCUMENTS[0])
    said = predictions(2)
    said.ids[1, 2] = wrong
    part = own.write(names_of(batch), [said.to_bytes(FORM)], [rest_of(said.rest)]).name
    with pytest.raises(DamagedError, match="tokens that do not exist"):
        lessons(own, part).told(batch)
    said.ids[1, 2] = 0
    for values, what in ((said.rest, np.nan), (said.log_probabilities, np.inf), (said.log_probabilities, -np.inf)):
        values.flat[0], before = what, values.flat[0]
        part = own.write(names_of(batch), [said.to_bytes(FORM)], [Rest(targets=2)]).name
        with pytest.raises(DamagedError, match="or that are no probabilities"):
            lessons(own, part).told(batch)
        values.flat[0] = before
    said.rest[0] = -np.inf
    part = own.write(names_of(batch), [said.to_bytes(FORM)], [Rest(targets=2)]).name
    assert lessons(own, part).told(batch).targets.teacher is not None, "all tokens may be kept"


def test_of_two_predictions_in_a_document_the_first_counts(tmp_path: Path) -> None:
    own, batch = files(tmp_path), micro_batch(DOCUMENTS[0])
    one, (wanted, _) = written(own, *DOCUMENTS)
    other, _ = written(own, DOCUMENTS[0], ([3, 4], 1, 0), seed=9)
    both = lessons(own, one, other, one)
    taught = both.told(batch).targets.teacher
    assert taught is not None and taught.rest.numpy().tobytes() == wanted.rest.tobytes()
    assert len(both.parts) == 2 and both.known.has(names_of(micro_batch(([3, 4], 1, 0)))).all()
    names = names_of(micro_batch(*DOCUMENTS))
    digest = digest_of_window(both, names)
    assert digest == digest_of_window(both, names[::-1]) == digest_of_window(lessons(own, one), names)
    assert digest != digest_of_window(lessons(own, other, one), names)


def test_a_window_says_which_parts_it_needs_and_what_is_not_kept(tmp_path: Path) -> None:
    own = files(tmp_path)
    part, said = written(own, *DOCUMENTS)
    rest = rest_of(said[0].rest) + rest_of(said[1].rest)
    masses = np.exp(np.concatenate([each.rest for each in said]).astype(np.float64))
    assert rest.targets == 5 and rest.mean == pytest.approx(masses.mean()) and rest.largest == masses.max()
    window = WindowSaid(parts=(part,), documents=2, values="feed", rest={"train": rest})
    own.write_window("f" * 32, 0, 3, window)
    assert own.read_window("f" * 32, 0, 3) == window
    assert own.read_window("f" * 32, 0, 4) is None and own.read_window("e" * 32, 0, 3) is None
    path = own.directory / "windows" / ("f" * 32) / "e000-w00000003.json"
    content = path.read_bytes()
    path.with_name("e000-w00000004.json").write_bytes(content)
    assert own.read_window("f" * 32, 0, 4) is None, "another window's, copied"
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert own.read_window("f" * 32, 0, 3) in (None, window), f"a bit of byte {place} differs"
    for hostile in ({"parts": ["../../etc/passwd"]}, {"parts": 7}, {"rest": {"a": [1]}}, {"format": 2}, {"rest": None}):
        put(path, json.dumps({**json.loads(json.loads(content)["said"]), **hostile}))
        assert own.read_window("f" * 32, 0, 3) is None, hostile
    text = json.loads(content)["said"]
    for hostile_text in (
        text.replace('"documents": 2', '"documents": 1e400'),
        text.replace('"mass": ', f'"mass": {"9" * 400}, "mess": '),
        f'{text[:-1]}, "deep": {"[" * 100_000}{"]" * 100_000}}}',
    ):
        assert hostile_text != text
        put(path, hostile_text)
        assert own.read_window("f" * 32, 0, 3) is None, hostile_text[:200]
    put(path, text)
    assert own.read_window("f" * 32, 0, 3) is not None


def put(path: Path, text: str) -> None:
    path.write_text(json.dumps({"said": text, "digest": xxhash.xxh3_128_hexdigest(text.encode())}))


def test_what_a_pass_has_left_is_known_by_what_it_says(tmp_path: Path) -> None:
    own = files(tmp_path)
    part, _ = written(own, *DOCUMENTS)
    copied = own.directory.rename(tmp_path / "copied")
    found = TeacherFiles.kept(copied)
    assert found is not None and found == replace(own, directory=copied) and found.key == own.key
    assert found.open(part) is not None
    assert TeacherFiles.kept(tmp_path) is None and TeacherFiles.kept(Path("org/model")) is None
    about = copied / "about.json"
    said = json.loads(about.read_text())
    for wrong in (
        {"top_k": 0},
        {"top_k": "3"},
        {"dtype": "bf16"},
        {"format": 2},
        {"temperature": None},
        {"teacher": 1},
    ):
        about.write_text(json.dumps({**said, **wrong}))
        with pytest.raises(DataError, match="is not what this version writes there"):
            TeacherFiles.kept(copied)
    about.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        TeacherFiles.kept(copied)
    about.write_text('{"datasets": []}')
    assert TeacherFiles.kept(copied) is None


def test_clean_up_removes_what_nobody_has_used_and_eviction_does_not(tmp_path: Path) -> None:
    own = files(tmp_path)
    part, _ = written(own, *DOCUMENTS)
    every = [path for path in own.directory.rglob("*") if path.is_file()]
    long_ago = every[0].stat().st_mtime - 30 * 86400
    for each in every:
        os.utime(each, (long_ago, long_ago))
    assert remove(tmp_path, files=False) == []
    assert own.open(part) is not None and remove(tmp_path, unused_for=86400) == [], "it was read just now"
    os.utime(own.path(part), (long_ago, long_ago))
    reads = lessons(own, part)
    os.utime(own.path(part), (long_ago, long_ago))  # a run that has begun long ago
    reads.told(micro_batch(DOCUMENTS[0]))
    assert remove(tmp_path, unused_for=86400) == [], "a run reads it"
    os.utime(own.path(part), (long_ago, long_ago))
    assert [each.path for each in remove(tmp_path, unused_for=86400)] == [own.directory] and not own.directory.exists()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "no").write_text("a file in the way")
    with pytest.raises(DataError, match="lower teacher.top_k, or set data.cache.path") as refused:
        written(files(tmp_path / "no"), *DOCUMENTS)
    assert "\n" not in str(refused.value)


def test_many_parts_are_read_with_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytune_fsdp.data.teacher._OPEN_FILES", 4)
    own = files(tmp_path)
    documents = [([3 + number, 4], 1, 0) for number in range(10)]
    made = lessons(own, *(written(own, each)[0] for each in documents))
    before = len(os.listdir("/proc/self/fd"))
    for each in documents:
        made.told(micro_batch(each))
    assert len(os.listdir("/proc/self/fd")) - before == 4
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_steps_are_told_ahead_and_fail_where_they_fail(tmp_path: Path) -> None:
    """What is wrong with a step's own rows is raised when training comes to it, as without a teacher."""
    own = files(tmp_path)
    made = lessons(own, written(own, *DOCUMENTS)[0])

    def steps() -> Iterator[StepBatches]:
        for number, document in enumerate((*DOCUMENTS, DOCUMENTS[0])):
            yield StepBatches(step=number + 1, micro_batches=(micro_batch(document),), counts=torch.zeros(1))
        raise RowError("row 4 is bad", "bad")

    told = made.steps(steps())
    first = next(told)
    taught = first.micro_batches[0].targets.teacher
    assert first.step == 1 and taught is not None and len(taught.ids) == 2
    assert [step.step for step in islice(told, 2)] == [2, 3]
    with pytest.raises(RowError, match="row 4"):
        next(told)
    path = own.path(made.parts[0].name)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    made.close()
    assert next(made.steps(steps())).step == 1
    with pytest.raises(DamagedError, match="start the same command again"):
        list(made.steps(steps()))


def test_what_killed_passes_have_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    own = files(tmp_path)
    part, _ = written(own, *DOCUMENTS)
    left = [own.path(name).with_name(f"{name}.topk.12345678.tmp") for name in ("old", "new")]
    for path in left:
        path.write_bytes(b"half")
    os.utime(left[0], (0, 0))
    own.tidy()
    assert [path.exists() for path in left] == [False, True] and own.open(part) is not None


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}"])
def test_what_a_crash_has_done_to_whose_files_they_are_is_said_again(tmp_path: Path, content: bytes | None) -> None:
    own = files(tmp_path)
    part, _ = written(own, *DOCUMENTS)
    about = own.directory / "about.json"
    before = about.read_bytes()
    about.unlink() if content is None else about.write_bytes(content)
    own.tidy()
    assert about.read_bytes() == before and TeacherFiles.kept(own.directory) == own
    replace(own, directory=tmp_path / "none").tidy()
    assert not (tmp_path / "none").exists()


def test_ids_beyond_the_tokenizer_and_what_would_be_infinite_are_refused_before_a_run(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, train={"max_steps": 1, "objective": {"type": "distill", "reverse": 0.5}},
        teacher={"model": str(tmp_path / "said"), "top_k": 100},
    )  # fmt: skip
    teacher, tokenizer = config.teacher, tokenizer_in(tmp_path / "tokenizer", trust_remote_code=False)
    assert teacher is not None
    form = form_of(config, teacher, 64)
    assert form.top_k == 64
    check_possible(config, form, rows=64)
    check_possible(config, replace(form, top_k=63), rows=72)
    with pytest.raises(ConfigError, match=r"teacher.top_k=64 keeps .* has 72 rows, .* set teacher.top_k to 63 or less"):
        check_possible(config, form, rows=72)
    own = replace(files(tmp_path), form=form, tokenizer=digest_of(tokenizer), directory=tmp_path / "said")
    written(own, *DOCUMENTS)
    assert find_teacher(config, teacher, tokenizer).kept == own
    about = own.directory / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "vocabulary": 128}))
    with pytest.raises(ConfigError, match="made with another tokenizer than the run's"):
        find_teacher(config, teacher, tokenizer)


def test_a_teacher_that_is_not_there_is_called_what_the_config_calls_it(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, model={"path": "org/own", "init": "pretrained", "architecture": None}, teacher={"model": "./gone"},
        train={"max_steps": 1, "objective": {"type": "distill"}},
    )  # fmt: skip
    assert config.teacher is not None
    tokenizer = tokenizer_in(tmp_path / "tokenizer", trust_remote_code=False)
    with pytest.raises(ModelError, match=r"^teacher.model=./gone: there is no such directory; give [^;]*$"):
        find_teacher(config, config.teacher, tokenizer)
    own = TeacherFiles.within(
        cache_of(config), of="1-2", form=form_of(config, config.teacher, 64), tokenizer=digest_of(tokenizer),
        model="./gone",
    )  # fmt: skip
    written(own, *DOCUMENTS)
    with pytest.raises(ModelError, match=rf"; what it has predicted is in {own.directory}, which may be teacher.model"):
        find_teacher(config, config.teacher, tokenizer)


@pytest.mark.parametrize(
    ("changes", "mesh", "said"),
    [
        ({"vocab_size": 63}, {}, "has rows for 63 tokens, and the run's tokenizer has ids up to 63: .* name a model"),
        ({"network_function": "mine:build"}, {}, "needs a network of its maker's own, .*only model.path may have one"),
        ({}, {"tensor": 4}, r": parallel.mesh.tensor=4: it must divide the 2 .* of a Llama"),
        ({}, {"sequence": 3}, r": parallel.mesh.sequence=3: each rank computes"),
    ],
)
def test_what_another_model_cannot_is_said_of_it_with_a_way_out_that_it_has(
    tmp_path: Path, changes: dict[str, object], mesh: dict[str, int], said: str
) -> None:
    config = make_config(
        tmp_path, train={"max_steps": 1, "objective": {"type": "distill"}}, teacher={"model": str(tmp_path / "big")},
        parallel={"precision": "fp64", "mesh": mesh},
    )  # fmt: skip
    assert config.teacher is not None
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "big")
    (tmp_path / "big" / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    tokenizer = tokenizer_in(tmp_path / "tokenizer", trust_remote_code=False)
    with pytest.raises((ConfigError, ModelError), match=rf"^teacher.model={tmp_path / 'big'}:? ?{said}") as refused:
        find_teacher(config, config.teacher, tokenizer)
    assert "resize_embeddings" not in str(refused.value) and "set model.network" not in str(refused.value)


class Elsewhere:
    """A run over two windows, of which documents 0 and 1, and 1 and 2, are, on one rank without a model."""

    DOCUMENTS = (([5, 6, 7], 2, 0), ([5, 6, 8, 9], 3, 0), ([7, 8, 9], 1, 0))
    WINDOWS = {(0, 0): DOCUMENTS[:2], (0, 1): DOCUMENTS[1:]}

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.asked, self.seed = root, [], 0
        for module in (attempt, passes):
            monkeypatch.setattr(module, "on_rank0", lambda work, what: work())
            monkeypatch.setattr(module, "places_of_run", lambda *_: [*self.WINDOWS], raising=False)
        monkeypatch.setattr(passes, "on_all_ranks", lambda work: [work()])
        monkeypatch.setattr(passes, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
        monkeypatch.setattr(passes, "_contents", lambda windows, place, _: self.contents(place))
        monkeypatch.setattr(attempt, "complete", self.complete)
        monkeypatch.setattr(attempt, "_kept", lambda *_: self.kept)

    def contents(self, place: passes.Place) -> passes.Contents:
        names, none = names_of(micro_batch(*self.WINDOWS[place]), grouped=False), np.zeros(2, dtype=np.int64)
        return passes.Contents(names=names, targets=none, datasets=none, batches=none)

    def complete(self, task: passes.TeacherTask, *_: object) -> None:
        """Ask about whole windows. What is predicted depends on the seed."""
        for place in task.lacking:
            self.asked.append(place)
            part = task.files.open(written(task.files, *self.WINDOWS[place], seed=self.seed)[0])
            assert part is not None
            task.parts[part.name] = part
            task.lessons.add([part])
            passes._settle(task, place, self.contents(place), must=True)
        task.learn()

    def open(self, now: str, identity: dict[str, Any] | None = None) -> attempt.Teacher:
        record = identity or {}
        self.asked, self.kept = [], KeptBy.of(record.get(TEACHER_OF), record.get(TEACHER_ALSO), now)
        teacher = TeacherModel(model=None, kept=None, form=FORM, tokenizer="abc")
        train = SimpleNamespace(fingerprint="f" * 32, names=["it"], cache=SimpleNamespace(root=self.root))
        plan = SimpleNamespace(division=SimpleNamespace(micro_batch=1))
        found = attempt.open_teacher(
            make_config(self.root / "config"), cast(Any, SimpleNamespace(teacher=teacher, train=train)),
            cast(Any, SimpleNamespace(plan=plan, state=SimpleNamespace(identity=record))), torch.device("cpu"), print,
        )  # fmt: skip
        assert found is not None
        return found

    def learned(self, found: attempt.Teacher) -> list[bytes]:
        names = names_of(micro_batch(*self.DOCUMENTS), grouped=False)
        return [found.lessons.read(names[number : number + 1]).to_bytes(FORM) for number in range(3)]

    def stored(self, of: str) -> TeacherFiles:
        return TeacherFiles.within(self.root, of=of, form=FORM, tokenizer="abc", model="")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    return Elsewhere(tmp_path, monkeypatch)


def test_what_is_asked_elsewhere_is_kept_as_that(run: Elsewhere) -> None:
    """A longer run on another machine: what another run has left of the first one decides nothing."""
    begun = run.open("model-old")
    plain = [f"{'f' * 32}/e000-w0000000{window}" for window in (0, 1)]
    assert run.asked == [(0, 0), (0, 1)] and begun.record[TEACHER_VALUES].keys() == {*plain}
    first = run.learned(begun)
    old = begun.record | {TEACHER_VALUES: {plain[0]: begun.record[TEACHER_VALUES][plain[0]]}}
    run.seed = 7
    longer = run.open("other-new", old)
    assert run.asked == [(0, 1)] and longer.computed == 1
    assert longer.record[TEACHER_OF] == "model-old" and longer.record[TEACHER_ALSO] == ["model-new"]
    assert longer.record[TEACHER_VALUES].keys() == {plain[0], f"model-new/{plain[1]}"}
    found = run.learned(longer)
    assert found[:2] == first[:2] and found[2] != first[2], "of a document the first window counts"
    for now in ("model-old", "model-new", "model-third"):
        again = run.open(now, dict(longer.record))
        assert run.learned(again) == found and not run.asked and again.record == longer.record
    assert run.stored("model-old").read_window("f" * 32, 0, 1).values == begun.record[TEACHER_VALUES][plain[1]]


def test_lost_predictions_that_come_out_otherwise_are_in_no_file_of_the_first_machine(run: Elsewhere) -> None:
    """So the run goes on again where it began, and elsewhere if they come out as they were."""
    begun = run.open("model-old")
    first = run.learned(begun)
    shutil.rmtree(run.stored("model-old").directory)
    run.seed = 7
    with pytest.raises(ResumeError, match="these predictions of the teacher are not those that this run began with"):
        run.open("model-new", dict(begun.record))
    assert run.asked == [(0, 0)] and not run.stored("model-old").directory.exists()
    assert run.stored("model-new").read_window("f" * 32, 0, 0) is None
    run.seed = 0
    back = run.open("model-old", dict(begun.record))
    assert run.learned(back) == first and back.record == begun.record
    shutil.rmtree(run.stored("model-old").directory)
    shutil.rmtree(run.stored("model-new").directory)
    same = run.open("model-new", dict(begun.record))
    assert run.learned(same) == first and same.record[TEACHER_VALUES] == begun.record[TEACHER_VALUES]
    assert not run.stored("model-old").directory.exists()
