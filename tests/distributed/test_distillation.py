"""Ranks that share layers or tokens learn from a teacher what one rank alone does, and predict what it does."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from raytune_fsdp.base.batch import Taught
from raytune_fsdp.data.shared_batches import part_of
from raytune_fsdp.model.objective import chunked_head
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.model.objective.distillation import Distillation, _most_likely, predictions
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.model.objective.objective import Objective
from raytune_fsdp.model.pieces.pieces import cut_piece
from raytune_fsdp.model.pieces.vocabulary import VocabularyPart
from raytune_fsdp.model.proof import documents
from raytune_fsdp.model.split.sequence import split_tokens
from raytune_fsdp.model.split.tensor import split_layers
from tests.models import VOCABULARY, build
from tests.ranks import resident_ranks

CPU = torch.device("cpu")
WEIGHTS = [
    Distillation(forward=0.7, reverse=0.2, cross_entropy=0.4, temperature=temperature) for temperature in (1.0, 2.5)
]


def apart(one: Taught, other: Taught) -> float:
    """By how much predictions differ; infinite if they are of other tokens."""
    if not torch.equal(one.ids, other.ids):
        return float("inf")
    pairs = ((one.log_probabilities, other.log_probabilities), (one.rest.exp(), other.rest.exp()))
    return max(float((a - b).abs().max()) for a, b in pairs)


def of_ties(part: VocabularyPart, k: int) -> float:
    """How predictions from whole numbers differ, of which many are equal."""
    logits = torch.randint(4, (9, VOCABULARY), generator=torch.Generator().manual_seed(0)).double()
    asked = partial(_most_likely, many=k, temperature=0.5, tokens=None)
    return apart(asked(logits[:, part.first : part.first + part.rows].clone(), part), asked(logits, None))


@mock.patch.dict(chunked_head._CHUNK, cpu=VOCABULARY * 5)
def differences(k: int) -> list[float]:
    """Of predictions, and for each objective of losses, figures, and gradients of all weights, whose layers are cut."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    whole = build("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=6).double().train()
    install_chunked_loss(whole)
    together, batch = copy.deepcopy(whole), documents(whole, CPU)
    split_layers(together, mesh)
    teacher = build("llama", hidden_size=64).double()
    found = [of_ties(together.get_output_embeddings().vocabulary, k)]
    for tokens in (None, 100):
        said = [predictions(each, batch, top_k=k, temperature=1.5, dtype=torch.float64, tokens=tokens)
                for each in (whole, together)]  # fmt: skip
        found.append(apart(*said))
    for what in WEIGHTS:
        taught = predictions(teacher, batch, top_k=k, temperature=what.temperature, dtype=torch.float64)
        told = replace(batch, targets=replace(batch.targets, teacher=taught))
        one, other = (micro_batch_loss(each, told, Objective(distillation=what)) for each in (whole, together))
        found += [float((one.each - other.each).abs().max()), float(not torch.equal(one.right, other.right))]
        found.append(float((one.groups.figures - other.groups.figures).abs().max()))
        for each, losses in ((whole, one), (together, other)):
            each.zero_grad()
            losses.total.backward()
        right = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in together.named_parameters():
            piece = cut_piece(right[name], parameter.grad, mesh)
            own = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            found.append(float((own - piece).abs().max()))
    return found


@pytest.mark.parametrize(("world", "k"), [(2, 7), (3, 64), (3, 1), (2, VOCABULARY)])
def test_a_vocabulary_that_is_cut(world: int, k: int) -> None:
    for found in resident_ranks(differences, world, k):
        assert len(found) > 20 and max(found) <= 1e-12


def of_parts(k: int) -> list[float]:
    """How predictions, and what is learned, differ for a part of the tokens."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build("llama", attn_implementation="documents_cpu").double().eval()
    batch = documents(model, CPU)
    install_chunked_loss(model)
    taught = predictions(model, batch, top_k=k, temperature=1.5, dtype=torch.float64)
    told = replace(batch, targets=replace(batch.targets, teacher=taught))
    what = Objective(distillation=Distillation(temperature=0.5))
    each = micro_batch_loss(model, told, what).each
    split_tokens(model, dist.group.WORLD)
    part = part_of(told, rank, world)
    mine = slice(part.targets.before, part.targets.before + len(part.targets.ids))
    kept = part.targets.teacher
    right = Taught(ids=taught.ids[mine], log_probabilities=taught.log_probabilities[mine], rest=taught.rest[mine])
    own = predictions(model, part, top_k=k, temperature=1.5, dtype=torch.float64)
    learned = micro_batch_loss(model, part, what).each
    return [apart(kept, right), apart(own, right), float((learned - each[mine]).abs().max()), float(each.min() <= 1e-6)]


def test_tokens_that_are_shared() -> None:
    for found in resident_ranks(of_parts, 2, 7):
        assert max(found) <= 1e-12
