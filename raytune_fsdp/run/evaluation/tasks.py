"""Put questions with known answers to a model, and count how many it gets right.

All ranks call these together. Which rank does what changes nothing: micro-batches and batches are formed before they
are given to ranks, and each is computed whole by one of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.base.answers_alike import TooSlowError, find, same
from raytune_fsdp.base.batch import PADDING, Cursor, MicroBatch
from raytune_fsdp.base.collectives import on_all_ranks, on_rank0
from raytune_fsdp.data.batches import filler, to_batch
from raytune_fsdp.data.questions import NEXT_QUESTION, Choices, Questions, Written
from raytune_fsdp.data.shared_batches import own_part
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.model.attention.choose import takes_position_ids, without_borders
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.plan.plan import Layout
from raytune_fsdp.record.names import ACCURACY_OF_CHOICES, EXACT_MATCH, evaluation_of
from raytune_fsdp.run.evaluation.answers import beating, ends, errors_of_generate
from raytune_fsdp.step.parallel import evaluating

logger = logging.getLogger(__name__)


def measure_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Questions],
    *,
    micro_batch: int,
    layout: Layout,
    device: torch.device,
    attention: str,
) -> dict[str, float]:
    """Return the shares of right answers, by the names of metrics. Answers are written with transformers' `attention`.
    Collective."""
    values: dict[str, float] = {}
    for task in tasks:
        with evaluating(model):
            if isinstance(task, Choices):
                values |= _choose(model, task, micro_batch, layout, device)
            else:
                with without_borders(model, attention), beating(model):
                    values |= _write(model, tokenizer, task, layout, device)
    return values


def metrics_of(task: Questions) -> list[str]:
    """Return the names of a task's metrics."""
    kinds = ACCURACY_OF_CHOICES if isinstance(task, Choices) else (EXACT_MATCH,)
    subjects = [None, *sorted({subject for subject in task.subjects if subject is not None})]
    return [evaluation_of(task.name, kind, subject) for subject in subjects for kind in kinds]


def _shares(name: str, kind: str, right: np.ndarray[Any, Any], subjects: Sequence[str | None]) -> dict[str, float]:
    """Return the share of right answers over all questions, and over those of each subject."""
    found = {evaluation_of(name, kind, None): float(right.mean())}
    for subject in sorted({each for each in subjects if each is not None}):
        of_it = np.array([each == subject for each in subjects])
        found[evaluation_of(name, kind, subject)] = float(right[of_it].mean())
    return found


def _choose(
    model: PreTrainedModel, task: Choices, micro_batch: int, layout: Layout, device: torch.device
) -> dict[str, float]:
    """Measure whether the right choice is the most likely one after its question: as it is, and for its length."""
    log_probabilities = np.zeros(len(task.characters))
    for batch, numbers in to_device(_blocks(task, micro_batch, layout), device):
        # Added on the host, in order: a GPU adds to the same place in any order, and a tie must be one every time.
        each = micro_batch_loss(model, batch).each.double().cpu().numpy()
        np.subtract.at(log_probabilities, numbers[batch.targets.datasets.cpu().numpy()], each)
    sums = torch.from_numpy(log_probabilities)
    # Each sum was computed by one rank, so this adds zeros to it, or its tokens by several ranks that share a
    # micro-batch.
    dist.all_reduce(sums)
    by_character = log_probabilities / task.characters
    found: dict[str, float] = {}
    for kind, scores in zip(ACCURACY_OF_CHOICES, (log_probabilities, by_character), strict=True):
        right = np.array([
            # A value that is not finite says nothing, and must not be right by chance.
            np.isfinite(scores[first:end]).all() and int(scores[first:end].argmax()) == answer
            for first, end, answer in zip(task.first, task.first[1:], task.right, strict=False)
        ])  # fmt: skip
        found |= _shares(task.name, kind, right, task.subjects)
    return found


def _blocks(task: Choices, micro_batch: int, layout: Layout) -> Iterator[tuple[MicroBatch, np.ndarray[Any, Any]]]:
    """Yield this rank's micro-batches of all choices, each with the numbers of its choices. Every rank has equally
    many, fillers included."""
    rank, ranks = dist.get_rank(), layout.data_ranks
    count = math.ceil(len(task.samples) / micro_batch)
    for index in range(layout.data_rank(rank), math.ceil(count / ranks) * ranks, ranks):
        if index >= count:
            empty = filler(micro_batch, seq_len=task.samples.input_ids.shape[1], pad_id=task.pad_id)
            yield own_part(empty, layout, rank), np.empty(0, int)
            continue
        samples = task.samples[index * micro_batch : (index + 1) * micro_batch]
        numbers = np.setdiff1d([sample.source_ids for sample in samples], [PADDING])
        # Counted from 0 in each micro-batch, as datasets are.
        samples = [
            replace(
                sample,
                source_ids=np.where(
                    sample.source_ids == PADDING, PADDING, np.searchsorted(numbers, sample.source_ids)
                ).astype(np.int32),
            )
            for sample in samples
        ]
        yield own_part(to_batch(samples, index=index, after=Cursor()), layout, rank), numbers


def _write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Written, layout: Layout, device: torch.device
) -> dict[str, float]:
    """Measure whether the model's answers end with the right one."""
    mine = dict(_answers(model, tokenizer, task, layout, device))
    answers = {number: text for some in on_all_ranks(lambda: mine) for number, text in some.items()}
    # One rank judges for all: an expression that takes too long must take that time only once.
    return on_rank0(lambda: _judged(task, answers), what="judge the answers")


def _answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Written, layout: Layout, device: torch.device
) -> Iterator[tuple[int, str]]:
    """Yield this rank's answers, with the numbers of their questions.

    Ranks answer different questions at the same time. A sharded model needs all of them in every pass, so a rank whose
    answers have ended continues with idle passes (`synced_gpus`), and one without a batch answers one again.
    """
    # Ranks that compute every layer together answer the same questions.
    groups, group = layout.world // layout.tensor, dist.get_rank() // layout.tensor
    # Prompts of similar length share a batch, because the shorter ones are padded. A network that takes no position ids
    # gets one prompt at a time.
    order = sorted(range(len(task.prompts)), key=lambda number: len(task.prompts[number]))
    size = task.task.batch if takes_position_ids(model) else 1
    batches = [order[first : first + size] for first in range(0, len(order), size)]
    stop = ends(tokenizer)
    for index in range(group, math.ceil(len(batches) / groups) * groups, groups):
        numbers = batches[index] if index < len(batches) else batches[0]
        longest = max(len(task.prompts[number]) for number in numbers)
        ids = torch.full((len(numbers), longest), stop["pad_token_id"] or 0)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(numbers):
            prompt = torch.from_numpy(task.prompts[number].astype(np.int64))
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        with nullcontext() if layout.world > 1 else errors_of_generate(model):
            output = model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=task.task.max_new_tokens,
                do_sample=False, use_cache=True, synced_gpus=layout.world > 1, tokenizer=tokenizer, **stop,
            )  # fmt: skip
        if index < len(batches):
            yield from zip(numbers, tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True), strict=True)


def _judged(task: Written, answers: Mapping[int, str]) -> dict[str, float]:
    chosen = task.task
    right = np.zeros(len(task.right))
    for number, expected in enumerate(task.right):
        text = answers[number].partition(NEXT_QUESTION)[0] if task.plain else answers[number]
        try:
            found = find(text, chosen.find, chosen.regex)
        except TooSlowError:
            logger.warning(
                "eval.tasks: the regex %r of %s takes more than a second for an answer, so this evaluation has no %s: "
                "write it without repetitions inside of repetitions, such as (a+)+", chosen.regex, task.name,
                evaluation_of(task.name, EXACT_MATCH, None),
            )  # fmt: skip
            return {}
        right[number] = found is not None and same(found, expected)
    return _shares(task.name, EXACT_MATCH, right, task.subjects)
