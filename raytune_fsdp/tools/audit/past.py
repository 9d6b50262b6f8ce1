"""Find out afterwards which rows a step of a run trained on.

Nothing is recorded for this: the order is a pure function of data, tokenizer and seed, so it is computed again. The
hash of the samples in `metrics.jsonl` proves that these are the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from raytune_fsdp.base.batch import IGNORE, PADDING, Cursor, PackedSample, Progress
from raytune_fsdp.base.errors import ConfigError, RaytuneError, ResumeError
from raytune_fsdp.base.untrusted import reason
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, committed
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.config import FinetuneConfig, HeldOutConfig
from raytune_fsdp.config.sections.formats import PythonFormat
from raytune_fsdp.data.open import open_data
from raytune_fsdp.data.packing import RowOrigin
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.model.directory.known_files import CONFIG_FILE, travelling
from raytune_fsdp.model.network import load_architecture
from raytune_fsdp.plan.division import Division
from raytune_fsdp.plan.identity import check_identity
from raytune_fsdp.plan.run_dir import RunDir, checkpoints_of
from raytune_fsdp.plan.step_counts import digest_of
from raytune_fsdp.record.jsonl import read_step
from raytune_fsdp.record.report.data import documents_of
from raytune_fsdp.run.beginning import orders_of
from raytune_fsdp.run.length import plan_on_record
from raytune_fsdp.run.measure.documents import read_sums
from raytune_fsdp.run.prepare import load_tokenizer
from raytune_fsdp.run.resume import data_identity_of, files_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSample:
    """A packed sample of a step, with its place in the stream and the rows it comes from."""

    sample: PackedSample
    at: Cursor
    origins: Sequence[RowOrigin]
    """The row of each document, in the order of the documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastStep:
    """The samples that a step has trained on."""

    step: int
    line: Mapping[str, Any] | None
    """The step in `metrics.jsonl`; None if it was not trained yet: then nothing proves that these are its samples."""
    samples: Sequence[PastSample]
    windows: Windows
    """The windows of the run's data, which know its datasets and what its rows say besides tokens."""
    tokenizer: PreTrainedTokenizerBase


def past_place(run: Path) -> RunDir:
    """Return the places of an existing run, wherever its directory is now."""
    path = run.absolute()
    return RunDir(path, checkpoints_of(path))


def placed(config: FinetuneConfig, place: RunDir) -> FinetuneConfig:
    """Return a run's config with the run's place of now: its directory may have been moved, or be mounted elsewhere."""
    return config.with_sections(run={"storage": str(place.path.parent), "name": place.path.name})


def check_code(config: FinetuneConfig, *, trusted: bool, ranks: bool = False) -> None:
    """Refuse to run code that a run's config names, unless the user trusts it. `ranks`: ranks will be started, too."""
    datasets = [*config.data.train, *([] if isinstance(config.data.eval, HeldOutConfig) else config.data.eval)]
    named = [each.format.function for each in datasets if isinstance(each.format, PythonFormat)]
    named += [each for each in (config.train.loss, config.model.network) if each is not None]
    if config.model.trust_remote_code:
        named.append("model.trust_remote_code=true")
    if ranks:  # PYTHONPATH and LD_PRELOAD bring code, and others may
        named += [f"cluster.env.{name}" for name in sorted(config.cluster.env)]
    if named and not trusted:
        raise ConfigError(
            f"this run's config names code, or what may bring some ({', '.join(named)}): look at it, then add "
            "--trust-remote-code"
        )


def past_step(config: FinetuneConfig, place: RunDir, step: int, progress: Progress | None = None) -> PastStep:
    """Return the samples of a step. Raises ResumeError if the data is not what the run was trained on."""
    plan, train = plan_on_record(place), config.train
    # How the run is divided into steps; the number of ranks makes no difference.
    division = Division(
        global_batch=train.global_batch, micro_batch=train.micro_batch, total_samples=plan.total_samples, data_ranks=1
    )
    line = read_step(place.metrics, step)
    if step > plan.steps:
        raise ResumeError(f"{place.plan}: the run has {plan.steps} steps, so there is no step {step}")
    there, nearest = committed(place.checkpoints), checkpoint_before(place, step)
    newest = read_state(there[-1]) if there else None  # which identifies the run
    before = RunState() if nearest is None else read_state(nearest)
    tokenizer, windows = _own_data(config, place, newest, progress)
    stream = Stream(windows, seed=config.run.seed)
    first = stream.seek(before.cursor, division.samples_before(step) - before.samples)
    places = [stream.seek(first, number) for number in range(division.samples_of(step))]
    samples = [next(stream.section(at, 0)).sample for at in places]
    if line is not None and digest_of([sample.id for sample in samples]) != line["trajectory"]["samples"]:
        raise ResumeError(
            f"{place.metrics}: step {step} was trained on other samples than these; {_why(newest, windows)}"
        )
    origins: dict[tuple[int, int], list[list[RowOrigin]]] = {}
    windows_of_step = list(dict.fromkeys((at.epoch, at.window) for at in places))
    for epoch, window in windows_of_step:
        if progress is not None:
            progress("reading the rows again", len(origins), len(windows_of_step))
        origins[epoch, window] = stream.origins(epoch, window)
    return PastStep(
        step=step,
        line=line,
        samples=[
            PastSample(sample=sample, at=at, origins=origins[at.epoch, at.window][at.index])
            for sample, at in zip(samples, places, strict=True)
        ],
        windows=windows,
        tokenizer=tokenizer,
    )


def recorded_losses(place: RunDir, past: PastStep) -> list[list[tuple[float, int]]] | None:
    """Return for each document of each sample the sum of its targets' losses, and the number of targets.

    None if the run has not recorded them (`tracking.documents`).
    """
    try:
        sums = read_sums(place.documents, past.step)
    except (OSError, ValueError) as error:
        raise ResumeError(
            f"{place.documents} is damaged where step {past.step} is ({reason(error)}): move it away, and the "
            "losses are measured with the weights of a checkpoint"
        ) from error
    if sums is None:
        return None
    begins = [np.flatnonzero(each.sample.position_ids == 0) for each in past.samples]
    if len(sums) != sum(map(len, begins)):
        raise ResumeError(
            f"{place.documents} has {len(sums)} losses for step {past.step}, of another packing: move it away"
        )
    left, found = iter(sums), []
    for each, first in zip(past.samples, begins, strict=True):
        sample = each.sample
        real = sample.source_ids[first] != PADDING  # the last one may be the sample's padding
        totals = [total for total, is_real in zip(islice(left, len(first)), real, strict=True) if is_real]
        targets = [int((sample.labels[document] != IGNORE).sum()) for document in documents_of(sample)]
        found.append(list(zip(totals, targets, strict=True)))
    return found


def checkpoint_before(place: RunDir, step: int) -> CommittedCheckpoint | None:
    """Return the newest kept checkpoint from before this step; None if none is left."""
    return max((each for each in committed(place.checkpoints) if each.step < step), default=None)


def _own_data(
    config: FinetuneConfig, place: RunDir, newest: RunState | None, progress: Progress | None
) -> tuple[PreTrainedTokenizerBase, Windows]:
    """Return the tokenizer that the run has kept, and the data that its config names, in the run's order."""
    own = place.model_files
    if not (own / CONFIG_FILE).is_file():
        raise ResumeError(f"{own} has no {CONFIG_FILE}: it holds the run's tokenizer, so the data cannot be read again")
    travelling(own, code=True)  # refuses links
    model = config.model.model_copy(
        update={"path": str(own), "tokenizer": None, "architecture": None, "overrides": {}, "init": "random"}
    )
    tokenizer = load_tokenizer(config.model_copy(update={"model": model}), own)
    vocab_size = load_architecture(model, own).get_text_config().vocab_size
    if not config.data.eval_decides_training:  # the files of data.eval need not be there
        config = config.with_sections(data={"eval": []})
    windows, _ = open_data(config, tokenizer, vocab_size, progress, **orders_of(newest or RunState()))
    return tokenizer, windows


def _why(newest: RunState | None, windows: Windows) -> str:
    """Say what differs between the data as it was and as it is."""
    if newest is not None:
        before = {key: value for key, value in newest.identity.items() if key.startswith("data.")}
        try:
            check_identity(
                before, data_identity_of(windows), "its newest checkpoint",
                files_before=newest.files, files_now=files_of(windows),
            )  # fmt: skip
        except RaytuneError as error:
            return str(error)
    return "its data, tokenizer and seed are those of its newest checkpoint, so this step was not trained as recorded"
