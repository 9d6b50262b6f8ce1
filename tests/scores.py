"""Scores by the book: each document alone in transformers' own class for scores, plain formulas in fp64."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from raytune_fsdp.base.batch import GROUP_COLUMNS, IGNORE, PADDING, Cursor, PackedSample, Role
from raytune_fsdp.config import FinetuneConfig

OBJECTIVES: dict[str, dict[str, Any]] = {
    "reward": {"type": "reward"},
    "reward centred": {"type": "reward", "center": 0.3},
    "classification": {"type": "classification"},
    "classification weighted": {"type": "classification", "class_weights": [0.5, 2.0, 1.25]},
    "regression": {"type": "regression"},
}
PAD = 0
"""The token behind each document."""


class Scored(NamedTuple):
    """A document to be scored."""

    ids: Sequence[int]
    role: Role = Role.SCORED
    weight: float = 1.0
    wanted: float = 0.0
    """The number of its class, its score, or the margin of its pair."""


def outputs_of(objective: Mapping[str, Any]) -> int:
    return 3 if objective["type"] == "classification" else 1


def documents_of(
    objective: Mapping[str, Any], count: int, *, vocabulary: int, seed: int = 0, longest: int = 12
) -> list[Scored]:
    """Groups of random documents."""
    rng, made = np.random.default_rng(seed), list[Scored]()
    for _ in range(count):
        weight, margin = float(rng.integers(1, 5)) / 2, float(rng.integers(3)) / 4
        wanted = {"reward": margin, "classification": float(rng.integers(3)), "regression": float(rng.normal())}
        pair = objective["type"] == "reward"
        for role in (Role.CHOSEN, Role.REJECTED) if pair else (Role.SCORED,):
            ids = rng.integers(3, vocabulary, int(rng.integers(1, longest))).tolist()
            made.append(Scored(ids, role, weight, wanted[objective["type"]]))
    return made


def packed(documents: Sequence[Scored], length: int, dataset: int = 0) -> PackedSample:
    """One sample of documents, each with one more token, which is its only target."""
    rest = length - sum(len(each.ids) + 1 for each in documents)
    assert rest >= 0
    ids, labels, positions = list[int](), list[int](), list[int]()
    told = np.zeros((len(GROUP_COLUMNS), length))
    for each in documents:
        told[:, len(ids) : len(ids) + len(each.ids) + 1] = np.array([each[1:] + (0,)], dtype=np.float64).T
        ids += [*each.ids, PAD]
        labels += [IGNORE] * len(each.ids) + [PAD]
        positions += range(len(each.ids) + 1)
    real = len(ids)
    return PackedSample(
        input_ids=np.array(ids + [PAD] * rest, np.int32),
        labels=np.array(labels + [IGNORE] * rest, np.int32),
        position_ids=np.array([*positions, *range(rest)], np.int32),
        source_ids=np.array([dataset] * real + [PADDING] * rest, np.int32),
        id=1,
        columns=told,
    )


def documents_in(sample: PackedSample) -> list[Scored]:
    """The documents of a packed sample, from its arrays, without the token behind each."""
    assert sample.columns is not None
    starts = [*np.flatnonzero(sample.position_ids == 0).tolist(), len(sample.input_ids)]
    found = []
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        if sample.source_ids[start] == PADDING:
            continue
        (last,) = np.flatnonzero(sample.labels[start:end] != IGNORE)
        assert start + last == end - 1, "the only target is behind the document"
        role, weight, wanted, _ = sample.columns[:, start].tolist()
        found.append(Scored(sample.input_ids[start : end - 1].tolist(), Role(int(role)), weight, wanted))
    return found


def twin_of(network: Any, head: torch.Tensor) -> Any:
    """transformers' class for scores with the weights of a network, in fp64."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(network.config)
    config.num_labels, config.pad_token_id = head.shape[0], PAD
    twin = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64, attn_implementation="eager")
    twin.base_model.load_state_dict(network.base_model.state_dict())
    with torch.no_grad():
        twin.score.weight.copy_(head)
    return twin.eval()


def loss_of(twin: Any, documents: Sequence[Scored], objective: Mapping[str, Any]) -> torch.Tensor:
    """The loss of a global batch."""
    scores = [twin(input_ids=torch.tensor([list(each.ids)])).logits[0] for each in documents]
    losses = []
    if objective["type"] == "reward":
        for first, second, good, bad in zip(documents[::2], documents[1::2], scores[::2], scores[1::2], strict=True):
            assert (first.role, second.role) == (Role.CHOSEN, Role.REJECTED)
            apart = (good - bad).sum() - first.wanted
            centred = objective.get("center", 0.0) * (good + bad).sum() ** 2
            losses.append(first.weight * (torch.log(1 + torch.exp(-apart)) + centred))
    elif objective["type"] == "classification":
        weights = objective.get("class_weights") or [1.0, 1.0, 1.0]
        for each, own in zip(documents, scores, strict=True):
            place = int(each.wanted)
            probability = own.exp()[place] / own.exp().sum()
            losses.append(-torch.log(probability) * weights[place] * each.weight)
    else:
        losses = [each.weight * (own[0] - each.wanted) ** 2 for each, own in zip(documents, scores, strict=True)]
    return torch.stack(losses).mean()


def score_config(
    directory: Path,
    objective: Mapping[str, Any],
    *,
    names: Sequence[str] = ("rows",),
    architecture: Mapping[str, Any] | None = None,
    **sections: Any,
) -> FinetuneConfig:
    """A run of six steps on pairs, classes or numbers, in five micro-batches a step, with weights and margins.

    `names`: of its datasets.
    """
    from tests.runs import GPT2, make_config

    kind = objective["type"]
    directory.mkdir(exist_ok=True)
    column = {"classification": "label", "regression": "score"}.get(kind, "margin")
    format = {"weight": "weight", column: column}
    format |= {"type": "preference", "style": "plain"} if kind == "reward" else {"type": "score", "text": "text"}
    datasets = []
    for seed, name in enumerate(names):
        path = directory / f"{kind}-{name}.jsonl"
        datasets.append({"path": str(path), "name": name, "format": format})
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in _rows(kind, seed)))
    data = {"train": datasets, "seq_len": 48, "window": 16, **sections.pop("data", {})}
    train = {"global_batch": 10, "micro_batch": 2, "max_steps": 6, **sections.pop("train", {}), "objective": objective}
    head = {"type": "score", "pad_token": "w0", **({"labels": LABELS} if kind == "classification" else {})}
    made = make_config(directory, architecture or GPT2)
    model = {**made.model.model_dump(), "head": head, **sections.pop("model", {})}
    return make_config(directory, model=model, data=data, train=train, **sections)


LABELS = ["bad", "fair", "good"]


def _rows(kind: str, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5 + seed)

    def words(least: int, most: int) -> str:
        # None that begins with w2, a special token, which would be found in it.
        return " ".join(f"w{number}" for number in rng.integers(30, 64, int(rng.integers(least, most))))

    rows = []
    for _ in range(90):
        row: dict[str, Any] = {"weight": float(rng.integers(1, 5)) / 2}
        if kind == "reward":
            row |= {"prompt": words(2, 7), "chosen": f" {words(1, 9)}", "rejected": f" {words(1, 9)}"}
            row["margin"] = float(rng.integers(3)) / 4
        elif kind == "classification":
            row |= {"text": words(2, 14), "label": LABELS[int(rng.integers(3))]}
        else:
            row |= {"text": words(2, 14), "score": float(rng.normal())}
        rows.append(row)
    return rows


def plain_loop(values: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a loop in plain PyTorch: transformers' class for scores, one document at a
    time, in one process."""
    import torch.distributed as dist

    from raytune_fsdp.data.stream import Stream
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.run.prepare import prepare

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare(config, 1)
    begun = assemble(config, prepared, standing, torch.device("cpu")).model
    twin = twin_of(begun, begun.get_output_embeddings().weight.detach()).train()  # type: ignore[union-attr, operator]
    dist.destroy_process_group()
    optim, results = config.optim, []
    adamw = torch.optim.AdamW(
        twin.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0
    )
    samples = Stream(prepared.train, seed=config.run.seed).samples(Cursor())
    for _ in range(config.train.max_steps or 0):
        documents = [each for _ in range(config.train.global_batch) for each in documents_in(next(samples).sample)]
        loss = loss_of(twin, documents, config.train.objective.model_dump())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), optim.max_grad_norm or math.inf)
        adamw.step()
        adamw.zero_grad()
        results.append((loss.item(), norm.item()))
    return results
