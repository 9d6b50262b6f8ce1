"""A loss of the user's own: ours where it says the same, the book where it does not, and refused where it is none."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from raytune_fsdp import finetune
from raytune_fsdp.base.batch import Cursor, MicroBatch, Targets
from raytune_fsdp.base.errors import ConfigError, DataError, ResumeError
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.cli.step import _kind_of
from raytune_fsdp.config import DatasetConfig, TrainConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.data.batches import filler, stream_batch, to_batch
from raytune_fsdp.data.rows.numbers import read_number
from raytune_fsdp.data.rows.own_code import OwnCode
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.launch.own_functions import with_names
from raytune_fsdp.model.attention.choose import logits_of
from raytune_fsdp.model.objective import chunked_head
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import CROSS_ENTROPY, Objective
from raytune_fsdp.model.objective.own_loss import KEY, Bent, OwnLoss, bent_sum, find_loss
from raytune_fsdp.model.proof import LENGTHS, documents
from raytune_fsdp.plan.identity import check_identity
from raytune_fsdp.run.checks import check_config
from raytune_fsdp.run.resume import identity_of
from tests.models import build
from tests.rows import make_windows
from tests.runs import make_config

CPU = torch.device("cpu")

CODE = """
import itertools, torch
import weights_of_mine

def plain(log_probabilities, document):
    return -log_probabilities

def focal(log_probabilities, document):
    return -((1 - log_probabilities.exp()) ** 2) * log_probabilities

def by_length(log_probabilities, document):
    assert document.targets.dtype == torch.int64
    return -log_probabilities * weights_of_mine.of(document.targets) / len(log_probabilities)

def total(log_probabilities, document):
    return -log_probabilities.sum()

def half(log_probabilities, document):
    return -log_probabilities.half()

def detached(log_probabilities, document):
    return -log_probabilities.detach()

def constant(log_probabilities, document):
    return torch.ones_like(log_probabilities)

def numbers(log_probabilities, document):
    return [-each for each in log_probabilities.tolist()]

def infinite(log_probabilities, document):
    return (1 - log_probabilities.exp()).log() - log_probabilities

def steep(log_probabilities, document):
    return log_probabilities.abs().sqrt()

def raising(log_probabilities):
    return -log_probabilities

def columns(log_probabilities, document):
    return -log_probabilities * document.columns["reward"]

def centred(log_probabilities, document):
    return -log_probabilities * (document.columns["reward"] - 1)

def margin(log_probabilities, document):
    return -log_probabilities * (document.columns["reward"] - document.columns["other"])

def spoiling(log_probabilities, document):
    document.targets.zero_()
    return -log_probabilities

def picky(log_probabilities, document):
    return -log_probabilities * ([1.0] * 65)[len(log_probabilities)]

def broken_behind(log_probabilities, document):
    made = log_probabilities.exp()
    value = made * made
    made.zero_()
    return value

calls = itertools.count()

def changing(log_probabilities, document):
    return -log_probabilities * next(calls)

def unordered(log_probabilities, document):
    return -log_probabilities * float(str({str(i) for i in range(12)})[2:].split("'")[0])

def drawn(log_probabilities, document):
    return -log_probabilities * torch.rand(len(log_probabilities))
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "losses_of_mine.py").write_text(CODE)
    (tmp_path / "weights_of_mine.py").write_text("def of(ids): return 1 + (ids % 3 == 0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name in ("losses_of_mine", "weights_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def own(function: str) -> OwnLoss:
    return OwnLoss(OwnCode(KEY, f"losses_of_mine:{function}"))


def by_the_book(function: str, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The value of each target, document after document, by a loop over the tokens of the batch."""
    values, place = [], 0
    for length in (n for row in LENGTHS for n in row):
        targets = batch.input_ids.flatten()[place + 1 : place + length]
        logs = nn.functional.log_softmax(logits[place : place + length - 1], -1)
        for row, target in zip(logs, targets, strict=True):
            p = row[target]
            if function == "focal":
                values.append(-((1 - p.exp()) ** 2) * p)
            elif function == "by_length":
                values.append(-p * (2 if target % 3 == 0 else 1) / (length - 1))
            else:
                values.append(-p)
        place += length
    return torch.stack(values)


@pytest.mark.parametrize("function", ["plain", "focal", "by_length", "spoiling"])
@pytest.mark.parametrize("head", ["plain", "chunked"])
def test_values_and_gradients_are_those_of_the_book(
    code: Path, function: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked_head._CHUNK, "cpu", 131 * 5)  # in chunks that end inside of documents
    model = build("llama", attn_implementation="eager").double()
    batch = documents(model, CPU)
    logits = logits_of(model, batch.input_ids, batch.position_ids, batch.borders).flatten(0, 1)
    each = by_the_book(function, logits, batch)
    (0.125 * each.sum()).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if head == "chunked":
        install_chunked_loss(model)
    found = micro_batch_loss(model, batch, Objective(own=own(function)))
    (0.125 * found.total).backward()
    assert torch.allclose(found.each, each, rtol=1e-12, atol=0) and not found.each.requires_grad
    assert found.total.item() == pytest.approx(each.sum().item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], rtol=1e-9, atol=1e-14), name
    ours = micro_batch_loss(model, batch)
    assert torch.equal(found.right, ours.right)
    assert (function in ("plain", "spoiling")) == torch.allclose(found.each, ours.each, rtol=1e-6), "or it does nothing"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_minus_the_log_probability_is_our_loss_to_the_bit(code: Path, dtype: torch.dtype) -> None:
    """In the head that most runs have."""
    model = build("llama", attn_implementation="eager").to(dtype)
    install_chunked_loss(model)
    batch, found = documents(model, CPU), []
    for objective in (CROSS_ENTROPY, Objective(own=own("plain"))):
        model.zero_grad()
        losses = micro_batch_loss(model, batch, objective)
        losses.total.backward()
        found.append([losses.total.detach(), losses.each, *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_filler_has_no_document(code: Path) -> None:
    model = build("llama")
    for chunked in (False, True):
        if chunked:
            install_chunked_loss(model)
        losses = micro_batch_loss(model, filler(2, seq_len=16, pad_id=0), Objective(own=own("by_length")))
        losses.total.backward()
        assert losses.total.item() == 0.0 and not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("total", r"for a document of 1 target\(s\) it returned a tensor of float32 of shape \[\]; it must return a "),
        ("half", r"returned a tensor of float16 of shape \[1\]; it must return a tensor of float32 of shape \[1\]: a "),
        ("numbers", r"it returned \[-0\.0\]; it must return a tensor of float32 of shape \[1\]: a value for each "),
        ("detached", r"none of its values depends on log_probabilities for torch.*without \.item\(\), \.detach\(\)"),
        ("constant", "none of its values depends on log_probabilities"),
        ("infinite", r"for a target with the log-probability 0 its value is -inf; keep it finite, such as by"),
        ("steep", r"with the log-probability 0 its gradient is (nan|inf); keep it finite"),
        (
            "raising",
            r"it raised TypeError: .*positional argument.*; it is called with a tensor of log-probabilities and",
        ),
        ("broken_behind", r"it raised RuntimeError: .*modified by an inplace operation.*; it is called with"),
        ("columns", r"raised KeyError: 'reward'; it is called .* whose columns are those of train\.loss_columns"),
        ("missing", r"losses_of_mine\.py has no function missing; correct the name"),
        pytest.param(
            "changing",
            "called twice for one document, it returned two different losses.*no state between calls",
            marks=pytest.mark.slow,
        ),
        ("drawn", "called twice for one document, it returned two different losses.*no random numbers"),
    ],
)
def test_what_is_no_loss_is_refused_at_the_start(code: Path, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.loss=losses_of_mine:{function}: .*{message}") as caught:
        find_loss(f"losses_of_mine:{function}")
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("function", ["columns", "centred", "margin"])
def test_a_loss_of_its_columns_is_one_if_some_make_it_one(code: Path, function: str) -> None:
    loss = OwnLoss(OwnCode(KEY, f"losses_of_mine:{function}"), ["reward", "other"])
    assert any(map(any, loss.prove(CPU, torch.float32)))


def targets_of(count: int) -> Targets:
    """Those of one document."""
    places = torch.arange(count)
    return Targets(places=places, ids=places, datasets=0 * places, by_dataset=(count,), by_document=(count,))


def test_what_it_raises_in_a_step_names_it(code: Path) -> None:
    loss = own("picky")
    assert loss.prove(CPU, torch.float32)
    with pytest.raises(
        ConfigError, match=r"losses_of_mine:picky: for a document of 80 target\(s\) it raised IndexError"
    ):
        loss.bend(torch.zeros(80), targets_of(80))


def test_an_impossible_target_leaves_the_sum_a_number() -> None:
    """Of masked logits, where the user's value is finite."""

    class Clamped:
        def bend(self, log_probabilities: torch.Tensor, targets: Targets) -> Bent:
            return Bent(-log_probabilities.clamp(min=-5), -(log_probabilities > -5).float())

    given = torch.tensor([-1.0, -torch.inf, -2.0], requires_grad=True)
    total, bent = bent_sum(Clamped(), given, targets_of(3))
    total.backward()
    assert total.item() == 8.0 and bent.values.tolist() == [1.0, 5.0, 2.0]
    assert given.grad is not None and given.grad.tolist() == [-1.0, 0.0, -1.0]


CALLS = 'imports this file for the function in it, and the file calls finetune.* `if __name__ == "__main__":`'


def script_of_its_own(code: Path) -> OwnCode:
    """A loss in a file that calls finetune where it is started with `again`; it was loaded without."""
    with open(code / "losses_of_mine.py", "a") as file:
        file.write(
            "import sys\nif 'again' in sys.argv:\n    from raytune_fsdp import finetune\n    finetune('no.yaml')\n"
        )
    name = OwnCode(KEY, "losses_of_mine:plain")
    name.load()
    return name


def test_a_script_that_calls_finetune_for_its_own_function_is_refused(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of the config is looked at."""
    name = script_of_its_own(code)
    monkeypatch.setattr(sys, "argv", ["again"])
    del sys.modules["losses_of_mine"]
    with pytest.raises(ConfigError, match=rf"^train\.loss=losses_of_mine:plain: .*{CALLS}$"):
        name.load()
    with pytest.raises(ConfigError, match="no.yaml"):
        finetune("no.yaml")


@pytest.mark.slow
def test_such_a_script_is_refused_in_a_fresh_process(code: Path) -> None:
    name = script_of_its_own(code)
    text = (code / "losses_of_mine.py").read_text()
    (code / "losses_of_mine.py").write_text(text.replace("'again' in sys.argv", "True"))
    with pytest.raises(ConfigError, match=rf"does not work in a fresh Python process.*{CALLS}\)"):
        name.call_elsewhere([])


def test_its_source_and_its_modules_make_the_run(code: Path) -> None:
    """As with functions that make rows. A changed file is refused where the old one is imported, as in a notebook: its
    cell was edited and run again. A reload imports what is there."""

    def identity(loss: OwnCode) -> dict[str, Any]:
        config = make_config(code, train={"loss": "losses_of_mine:by_length"})
        windows: Any = SimpleNamespace(identity={})
        from transformers import GPT2Config

        return identity_of(config, GPT2Config(), windows, [loss])

    loss = find_loss("losses_of_mine:by_length")
    before = identity(loss)
    assert before["train.loss"] == "losses_of_mine:by_length"
    assert {key for key in before if "loss_" in key} == {"train.loss_file", "train.loss_modules.weights_of_mine"}
    for name in ("weights_of_mine", "losses_of_mine"):
        with open(code / f"{name}.py", "a") as file:
            file.write("# another comment\n")
        if name == "weights_of_mine":
            started = r"weights_of_mine\.py on .* is not the file that the run was started with"
            with pytest.raises(ConfigError, match=started):
                pickle.loads(pickle.dumps(loss)).load()
        with pytest.raises(
            ConfigError,
            match=rf"^train\.loss=.*: .*{name}\.py has changed since this process imported it.*restart Python",
        ):
            find_loss("losses_of_mine:by_length")
        importlib.reload(sys.modules[name])
    now = identity(find_loss("losses_of_mine:by_length"))
    changed = r"(?s)train\.loss_file: was '\w+', is .*train\.loss_modules\.weights_of_mine: was '\w+', is '\w+'"
    with pytest.raises(ResumeError, match=changed):
        check_identity(before, now, "x", files_before={}, files_now={})
    (code / "losses_of_mine.py").unlink()
    del sys.modules["losses_of_mine"]
    with pytest.raises(ConfigError, match=r"^train\.loss=losses_of_mine:by_length: losses_of_mine cannot be imported"):
        find_loss("losses_of_mine:by_length")


def test_one_without_source_is_refused(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def local(log_probabilities: torch.Tensor, document: Any) -> torch.Tensor:
        return -log_probabilities

    for function, message in (
        (lambda p, _: -p, r"train\.loss: .*<lambda> cannot be imported by ranks.*at the top of its module"),
        (local, r"local cannot be imported by ranks"),
        (nn.Identity(), r"train\.loss: Identity\(\) is no function with a name"),
        (len, r"train\.loss: the code of len is in no file.*%%writefile my_code\.py"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_names({"train": {"loss": function}})
    from losses_of_mine import focal  # type: ignore[import-not-found]

    given = {"Train": {"Loss": focal, "max_steps": 3}, "data": {"train": []}}
    assert with_names(given)["Train"] == {"Loss": "losses_of_mine:focal", "max_steps": 3}
    assert given["Train"]["Loss"] is focal, "the caller's own map is as it was"  # type: ignore[index]
    rows = {"data": {"train": ({"path": "a"}, {"Format": {"type": "python", "function": focal}}), "eval": {"rows": 2}}}
    assert with_names(rows)["data"]["train"][1] == {"Format": {"type": "python", "function": "losses_of_mine:focal"}}
    with pytest.raises(ConfigError, match=r"data\.eval\.1\.format\.function: .*<lambda> cannot be imported"):
        with_names({"data": {"eval": [{}, {"format": {"function": lambda row: row}}]}})
    for given in ({"train": {"loss": focal}}, rows):
        with pytest.raises(
            ConfigError, match=r"(loss|function): focal is a function, must be its name, module:function; `f"
        ):
            load_config(given)
    main = SimpleNamespace(__file__=str(code / "script.py"), __spec__=None, focal=focal)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(focal, "__module__", "__main__")
    assert with_names({"train": {"loss": focal}}) == {"train": {"loss": "script:focal"}}
    main.__file__ = str(code / "my-script.py")
    with pytest.raises(ConfigError, match=r"focal is in .*my-script\.py, which cannot be imported"):
        with_names({"train": {"loss": focal}})
    del main.__file__
    with pytest.raises(ConfigError, match=r"the code of focal is in no file.*in a notebook"):
        with_names({"train": {"loss": focal}})


def test_what_does_not_go_with_it(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"train\.z_loss=0\.1 with train\.loss=a:b: it changes the cross-entropy"):
        TrainConfig(global_batch=1, max_steps=1, loss="a:b", z_loss=0.1)
    with pytest.raises(ValidationError, match="is not module:function"):
        TrainConfig(global_batch=1, max_steps=1, loss="focal")
    config = make_config(tmp_path, train={"loss": "a:b"}, parallel={"mesh": {"sequence": 2}})
    with pytest.raises(ConfigError, match=r"mesh\.sequence=2: your loss is a function of whole documents"):
        check_config(config, 2)


def test_its_values_are_told_from_cross_entropies() -> None:
    """By `raytune-fsdp step --loss`."""
    kept = CommittedCheckpoint(step=3, attempt=1, root="runs/checkpoints")
    assert _kind_of(None, None) == ("losses by document, as recorded", "as trained")
    assert _kind_of("a:b", None) == ("values of train.loss=a:b by document, as recorded", "as trained")
    under = f"by document under the weights of step 3 ({kept.path})"
    assert _kind_of("a:b", kept) == (f"cross-entropies {under}", "cross-entropy")
    assert _kind_of(None, kept) == (f"losses {under}", "cross-entropy")


REWARDS = [0.5, -2.0, 3.0, 0.0, 7.25, 1.0, -1.0]


def rewarded(directory: Path, kind: str) -> DatasetConfig:
    """Rows of two to eight tokens, the first of them not trained on, each with a reward."""
    rows = [
        {"input_ids": [10 + i] * (2 + i), "labels": [-100, *[10 + i] * (1 + i)], "reward": reward, "other": "x"}
        for i, reward in enumerate(REWARDS)
    ]
    file = directory / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    return DatasetConfig(path=str(file), format={"type": "tokens"})


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_columns_of_rows_stay_with_their_documents(tmp_path: Path, kind: str, packing: str) -> None:
    """Packed, cut, written to the cache, and read from it."""

    def windows(**more: Any) -> Windows:
        return make_windows([rewarded(tmp_path, kind)], cache=tmp_path / "cache", seq_len=9, packing=packing, **more)

    plain, told = windows(), windows(columns=["reward"])
    assert {key for key in told.identity.keys() | plain.identity if key not in plain.identity} == {"columns"}
    built, again = told.get(0, 0)[0].samples, windows(columns=["reward"]).get(0, 0)
    assert not again[1], "from the cache"
    for samples in (built, again[0].samples):
        batch = to_batch(list(samples), index=0, after=Cursor())
        assert sum(batch.targets.by_document) == len(batch.targets.ids)
        ends = np.cumsum(batch.targets.by_document)
        for document, (end, count) in enumerate(zip(ends, batch.targets.by_document, strict=True)):
            (token,) = set(batch.targets.ids[end - count : end].tolist())
            assert batch.targets.columns[document] == (REWARDS[token - 10],)
    theirs = to_batch(list(plain.get(0, 0)[0].samples), index=0, after=Cursor())
    assert theirs.targets.columns == () and [each.id for each in built] == [
        each.id for each in plain.get(0, 0)[0].samples
    ]
    assert torch.equal(theirs.input_ids, batch.input_ids) and theirs.targets.by_document == batch.targets.by_document


@pytest.mark.parametrize("columns", [None, [[0.5]], [[np.nan]], [[0.5, 0.5]]])
def test_a_window_with_other_columns_is_not_that_window(tmp_path: Path, columns: Any) -> None:
    """It is built again where that can be seen; else a look at where its rows come from shows it."""

    def windows() -> Windows:
        return make_windows([rewarded(tmp_path, "jsonl")], cache=tmp_path / "cache", seq_len=9, columns=["reward"])

    true, told = windows(), windows()
    assert true.origins(0, 0)
    window = told.get(0, 0)[0]
    made = None if columns is None else np.tile(columns, (len(window.samples.lengths), 1)).astype(float)
    told.cache.write(0, 0, replace(window, samples=replace(window.samples, columns=made)))
    if columns != [[0.5]]:
        again, built = windows().get(0, 0)
        assert built and np.array_equal(again.samples.columns, window.samples.columns)
    else:
        with pytest.raises(DataError, match="window 0 of the cache is not what its rows make"):
            windows().origins(0, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"^\S*rows\.jsonl: has no column 'reward', it has 'input_ids'; name the right one in train\.loss_columns"),
        (
            {"reward": None},
            "rows.jsonl:1: column 'reward' is null; train.loss_columns tells it to the loss: correct or",
        ),
        ({"reward": "0.5"}, "reward='0.5' is text, not a number; train.loss_columns tells it to the loss"),
        ({"reward": [1]}, r"reward=\[1\] is of type list, not a number"),
        ({"reward": 10**400}, "is no finite number of float32"),
        ({"reward": 3.5e38}, "is no finite number of float32"),
        ({"reward": 2**53 + 1}, "reward=9007199254740993 is a whole number that no float64 is equal to"),
    ],
)
def test_a_row_without_its_columns_is_a_bad_one(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"input_ids": [3, 4, 5], **row}) + "\n")
    dataset = DatasetConfig(path=str(file), format={"type": "tokens", "labels": None})
    with pytest.raises(DataError, match=message):
        make_windows([dataset], cache=tmp_path / "cache", columns=["reward"]).get(0, 0)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(True, 1), (False, 0), (2**53, 2**53), (-3.4e38, -3.4e38), (Decimal("0.1"), 0.1), (Decimal("2e30"), None)]
    + [(Decimal(2**53 + 1), None), (Decimal("NaN"), None), (float("inf"), None)],
)
def test_numbers_are_those_of_the_row(value: Any, wanted: float | None) -> None:
    if wanted is not None:
        assert read_number({"n": value}, "n", "f:1") == wanted
    else:
        with pytest.raises(
            DataError, match="f:1: n=.* is (a whole number that no float64 is|no finite number of float32)"
        ):
            read_number({"n": value}, "n", "f:1")


def test_columns_travel_through_ray_data_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from raytune_fsdp.launch.ray.tasks.batches import ToBlock
    from raytune_fsdp.launch.ray.tasks.stream import _sample_bytes, _to_table, to_blocks
    from raytune_fsdp.plan.division import Division

    windows = make_windows([rewarded(tmp_path, "jsonl")], cache=tmp_path / "cache", seq_len=9, columns=["reward"])
    samples = list(Stream(windows, seed=0).section(Cursor(), 0))
    table = _to_table(samples, windows)
    division = Division(global_batch=2, micro_batch=2, total_samples=len(samples), data_ranks=1)
    (first, *_) = to_blocks(iter([table]), 2, len(samples), 0)
    assert 0.75 * 2 * _sample_bytes(windows) < first.nbytes < 1.1 * 2 * _sample_bytes(windows), (
        "or Ray Data merges blocks"
    )
    found = ToBlock(division)(first).batch
    assert found.targets.columns == stream_batch(samples[:2], index=0).targets.columns != ()


def test_a_loss_is_told_the_columns_of_its_document(code: Path) -> None:
    """As by a loop over documents."""
    model = build("llama", attn_implementation="eager").double()
    batch = documents(model, CPU)
    rewards = [float(number + 1) for number in range(len(batch.targets.by_document))]
    batch = replace(batch, targets=replace(batch.targets, columns=tuple((each,) for each in rewards)))
    objective = Objective(own=OwnLoss(OwnCode(KEY, "losses_of_mine:columns"), ["reward"]))
    found = micro_batch_loss(model, batch, objective)
    ours = micro_batch_loss(model, batch).each.split(list(batch.targets.by_document))
    wanted = torch.cat([each * reward for each, reward in zip(ours, rewards, strict=True)])
    assert torch.allclose(found.each, wanted, rtol=1e-12)
    install_chunked_loss(model)
    assert torch.allclose(micro_batch_loss(model, batch, objective).each, wanted, rtol=1e-12)


@pytest.mark.slow
def test_a_loss_of_columns_is_found(code: Path) -> None:
    assert find_loss("losses_of_mine:columns", ["reward"]).code
