"""Whatever somebody puts into a file that this package reads: one line and exit code 2, at once, within its memory.

Or, where that is the contract: an older checkpoint, a record without that line, a card without a recipe. Never another
value, a traceback, or a wait for something that does not come.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import forgeries
from tests.forgeries import Forge
from tests.measured import Ending, measured
from tests.models import save_checkpoint
from tests.ranks import run_ranks

RUN = Path(__file__).parents[1] / "fixtures" / "aae7294" / "runs" / "steps"
CHECKPOINT = "checkpoints/step-00000006.a1"


def endings(kind: str, good: Path) -> dict[str, Ending]:
    """On a process of its own: forge copies of a good directory, one after the other, and read them. An exit code of
    None: it was read, and had the right values."""
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    table, reader = KINDS[kind]
    found = {}
    for name in ["", *table]:  # the first one is good, and imports everything
        with tempfile.TemporaryDirectory() as folder:
            place = Path(shutil.copytree(good, Path(folder) / "place"))
            if name:
                table[name](place)
            read: list[int] = []

            def work(place: Path = place, read: list[int] = read) -> int:
                reader(place, good)
                read.append(1)
                return 0

            ending = measured(work)
            found[name] = replace(ending, code=None) if read else ending
    genuine = found.pop("")
    assert genuine.code is None, f"every refusal would prove nothing: {genuine}"
    return found


def all_of(kind: str, good: Path, code: int | None, lines: tuple[int, ...]) -> None:
    """Every forgery of this kind ends so, within its time and memory."""
    (found,) = run_ranks(endings, 1, kind, good, seconds=500)
    wrong = {name: (each.problems((code,), lines), each) for name, each in found.items()}
    assert not any(problems for problems, _ in wrong.values()), "\n".join(
        f"{name}: {problems} {each}" for name, (problems, each) in wrong.items() if problems
    )


@functools.cache
def tensors_of(checkpoint: str) -> dict[str, Any]:
    from raytune_fsdp.checkpoint.catalogue import as_checkpoint
    from tests.checkpoints import tensors_in

    found = as_checkpoint(checkpoint)
    assert found is not None
    return tensors_in(found)


def read_checkpoint(place: Path, good: Path) -> None:
    """As a resume, an export or a branch does. What is accepted must be what it was."""
    import torch

    from raytune_fsdp.checkpoint.catalogue import as_checkpoint
    from raytune_fsdp.checkpoint.location import storage_at
    from raytune_fsdp.checkpoint.model_files import find_checkpoint
    from raytune_fsdp.checkpoint.reading import compare, read_index
    from raytune_fsdp.checkpoint.state import read_state
    from tests.checkpoints import tensors_in

    found, genuine = find_checkpoint(place / CHECKPOINT), as_checkpoint(str(good / CHECKPOINT))
    assert genuine is not None
    assert read_state(found) == read_state(genuine), "another state was read"
    right = tensors_of(genuine.path)
    compare(right, read_index(storage_at(found.root), found.name), found.path, whole=True)
    tensors = tensors_in(found)
    assert all(torch.equal(tensors[name], right[name]) for name in right), "other values were read"


def read_newest(place: Path, good: Path) -> None:
    """The forged checkpoint is newer than a good one, whose values are read."""
    import torch

    from raytune_fsdp.checkpoint.catalogue import newest
    from tests.checkpoints import tensors_in

    found, _ = newest(str(place / "checkpoints"), hashes=True)
    assert found is not None
    tensors, right = tensors_in(found), tensors_of(str(good / CHECKPOINT))
    assert all(torch.equal(tensors[name], right[name]) for name in right), "other values were read"


def read_model(place: Path, good: Path) -> None:
    """As the beginning of a run does, up to the values of all tensors."""
    import torch
    from safetensors.torch import load_file

    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.model.directory.tokenizer import vocabulary_of
    from raytune_fsdp.model.fill import fill
    from raytune_fsdp.model.network import build_network, fit_vocabulary, init_buffers, load_architecture
    from raytune_fsdp.model.weights.keys import owned_tensors
    from raytune_fsdp.run.prepare import load_tokenizer
    from raytune_fsdp.run.starting_weights import find_origin, model_directory

    config = FinetuneConfig.model_validate(
        {
            "model": {"path": str(place), "resize_embeddings": True},
            "data": {"train": [{"path": "rows.jsonl"}], "seq_len": 16},
            "train": {"global_batch": 1, "max_steps": 1},
            "parallel": {"precision": "fp32"},
            "run": {"name": "run"},
        }
    )
    directory = model_directory(config)
    hf_config = load_architecture(config.model, directory)
    tokenizer = load_tokenizer(config, directory)
    fit_vocabulary(hf_config, vocabulary_of(tokenizer), resize=True)
    network = build_network(hf_config, config)
    init_buffers(network, torch.device("cpu"))
    origin = find_origin(config, network, {})
    assert origin is not None
    network = build_network(hf_config, config)
    fill(network, origin.weights(network), "sharded", torch.device("cpu"))
    right = {name: tensor for file in good.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(tensor, right[name]) for name, tensor in owned_tensors(network).items()), "other values"


def ask_model(place: Path, good: Path) -> None:
    """As a person does who asks a model."""
    import torch

    from raytune_fsdp.checkpoint.model_files import load_for_inference

    load_for_inference(place, torch.device("cpu"))


def read_events(place: Path, good: Path) -> None:
    from raytune_fsdp.record.jsonl import read_events

    assert read_events(place / "events.jsonl") == read_events(good / "events.jsonl"), "other events were read"


def read_holes(place: Path, good: Path) -> None:
    """As whatever reads a record does: all of it, as it grows, and before an attempt adds to it."""
    from raytune_fsdp.record import repair
    from raytune_fsdp.record.copies.following import Position, RecordReader
    from raytune_fsdp.record.jsonl import each_line
    from raytune_fsdp.record.report.history import read_history
    from raytune_fsdp.record.report.overview import overview
    from raytune_fsdp.record.tail import EventFollower, RecordFollower

    def steps(run: Path) -> list[Any]:
        reader = RecordReader(run / "metrics.jsonl")
        reader.seek(Position(4))
        return [line["trajectory"]["step"] for _, line in reader.lines(99)]

    for read in (
        lambda run: [line for line in each_line(run / "metrics.jsonl") if line is not None],
        lambda run: list(RecordFollower(run / "metrics.jsonl").lines()),
        lambda run: list(EventFollower(run / "events.jsonl").events()),
        lambda run: overview(run).attempt,
        lambda run: list(read_history(run).steps),
        steps,
    ):
        assert read(place) == read(good), "another record was read"
    assert repair.truncate(place / "metrics.jsonl", 6, aside=place / "aside").problems in (
        (),
        ("1 line was neither a step nor an evaluation, and left out",),
    )
    assert (place / "metrics.jsonl").read_bytes() == (good / "metrics.jsonl").read_bytes()
    read_events(place, good)


def read_run_config(place: Path, good: Path) -> None:
    """As a command does that takes a run's own config."""
    from raytune_fsdp.config.load import load_config

    load_config(place / "config.yaml")


def compare_run_config(place: Path, good: Path) -> None:
    """As one does that only compares with it, and goes on without."""
    from raytune_fsdp.plan.run_dir import RunDir
    from raytune_fsdp.record.report.history import read_history
    from raytune_fsdp.run.resume import last_config

    last_config(RunDir(place, str(place / "checkpoints")))
    assert list(read_history(place).steps) == list(read_history(good).steps)


def read_run(place: Path, good: Path) -> None:
    """As an export does, and a person who asks the model."""
    import torch

    from raytune_fsdp.checkpoint.model_files import find_checkpoint, load_for_inference
    from raytune_fsdp.config import ExportConfig
    from raytune_fsdp.record.jsonl import read_events, read_metrics
    from raytune_fsdp.run.publish import export_checkpoint

    read_events(place / "events.jsonl")
    read_metrics(place / "metrics.jsonl")
    export_checkpoint(find_checkpoint(place), place.parent / "export", ExportConfig(), verified=True)
    load_for_inference(place, torch.device("cpu"))


def read_card(place: Path, good: Path) -> None:
    from raytune_fsdp.checkpoint.catalogue import as_checkpoint
    from raytune_fsdp.record.report.card import model_card

    found = as_checkpoint(str(place / CHECKPOINT))
    assert found is not None
    assert "fine-tuned" in model_card(found, place / "model", dtype="bf16")


TO_ASK = [
    "ten million layers",
    "a width of a billion",
    "heads of a billion",
    "a billion labels",
    "config.json is deep maps",
]
SECONDS_EACH = ["normalizers that write ten for one", "a config of one long word", "a deep config.yaml"]
"""Others of their kind end as these do, or another reader has the same file."""
NEWER = "checkpoints/step-00000007.a1"
Reader = Callable[[Path, Path], None]


def fast(table: Mapping[str, Forge]) -> dict[str, Forge]:
    return {name: forge for name, forge in table.items() if name not in SECONDS_EACH}


def slow(table: Mapping[str, Forge]) -> dict[str, Forge]:
    return {name: forge for name, forge in table.items() if name in SECONDS_EACH}


KINDS: dict[str, tuple[Mapping[str, Forge], Reader]] = {
    "index": (forgeries.inside(CHECKPOINT, forgeries.INDEX, fit=True), read_checkpoint),
    "index of runs": (forgeries.inside(CHECKPOINT, forgeries.RUNS, fit=True), read_checkpoint),
    "state": (forgeries.inside(CHECKPOINT, forgeries.STATE, fit=True), read_checkpoint),
    "files": (forgeries.inside(CHECKPOINT, forgeries.FILES, fit=True), read_checkpoint),
    "manifest": (forgeries.inside(CHECKPOINT, forgeries.MANIFEST, fit=False), read_checkpoint),
    "newer files": (forgeries.inside(NEWER, forgeries.FILES, fit=False), read_newest),
    "newer manifest": (forgeries.inside(NEWER, forgeries.MANIFEST, fit=False), read_newest),
    "config": (forgeries.CONFIG, read_model),
    "config to ask": ({name: forgeries.CONFIG[name] for name in TO_ASK}, ask_model),
    "weights": (forgeries.WEIGHTS, read_model),
    "tokenizer": (fast(forgeries.TOKENIZER), read_model),
    "tokenizer that takes long": (slow(forgeries.TOKENIZER), read_model),
    "run": ({**forgeries.RECORD, **forgeries.MODEL_OF_RUN}, read_run),
    "events": (forgeries.EVENTS, read_events),
    "holes": (forgeries.HOLES, read_holes),
    "config.yaml": (forgeries.CONFIGS, read_run_config),
    "config.yaml to compare": (fast(forgeries.CONFIGS), compare_run_config),
    "config.yaml that takes long to compare": (slow(forgeries.CONFIGS), compare_run_config),
    "recipe": (forgeries.RECIPE, read_card),
}
"""Forgeries, and who reads them."""
SLOW_TO_COMPARE = pytest.param("config.yaml that takes long to compare", marks=pytest.mark.slow)
SLOW_TOKENIZER = pytest.param("tokenizer that takes long", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["index", "state", "files", "manifest", "run", "config.yaml"])
def test_what_is_forged_in_a_run_is_refused_in_one_line(kind: str) -> None:
    all_of(kind, RUN, code=2, lines=(1,))


@pytest.fixture(scope="module")
def run_of_today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with its checkpoint as two ranks write it today."""
    from raytune_fsdp.checkpoint.catalogue import as_checkpoint
    from tests.checkpoints import rows_of_ranks, tensors_in, write_as_ranks

    place = Path(shutil.copytree(RUN, tmp_path_factory.mktemp("good") / "run"))
    older = as_checkpoint(str(RUN / CHECKPOINT))
    assert older is not None
    tensors, state = tensors_in(older), (place / CHECKPOINT / "state.json").read_bytes()
    shutil.rmtree(place / CHECKPOINT)
    write_as_ranks((place / CHECKPOINT).parent, older.name, tensors, rows_of_ranks(tensors, 2), state)
    return place


@pytest.mark.parametrize("kind", ["index of runs", "files", "manifest"])
def test_what_is_forged_in_a_run_of_today_is_refused_in_one_line(kind: str, run_of_today: Path) -> None:
    all_of(kind, run_of_today, code=2, lines=(1,))


@pytest.mark.parametrize("kind", ["newer files", "newer manifest"])
def test_a_run_goes_back_to_the_checkpoint_before_a_forged_one(kind: str) -> None:
    all_of(kind, RUN, code=None, lines=(0, 1))


@pytest.mark.parametrize("kind", ["events", "recipe", "holes", "config.yaml to compare", SLOW_TO_COMPARE])
def test_what_a_run_can_do_without_is_passed_over(kind: str) -> None:
    all_of(kind, RUN, code=None, lines=(0, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good") / "model"
    save_checkpoint(directory, "llama", tokenizer=True, vocab_size=1024, max_shard_size="200KB")
    return directory


@pytest.mark.parametrize("kind", ["config", "config to ask", "weights", "tokenizer", SLOW_TOKENIZER])
def test_what_is_forged_in_a_model_is_refused_in_one_line(kind: str, model: Path) -> None:
    all_of(kind, model, code=2, lines=(1,))
