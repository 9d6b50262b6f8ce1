"""Decide which layers of a network stand for which: a few are traced, and say what all of them need."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn
from transformers import PreTrainedModel

from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model.layers import layers_of
from raytune_fsdp.step.parallel import reached_by_backward, sharding_units

_MARGIN = 2
"""Units that are kept at either end of a stretch of equal ones: what is fetched ahead, and what is still on its way,
belongs to a neighbour."""

_NUMBERED = ("idx", "index", "layer_id", "layer_number", "layer_num")
"""Parts of the names under which a module keeps its place, which says nothing about its size."""


def keep_layers(model: PreTrainedModel, parallel: ParallelConfig, *, ends: bool) -> list[int]:
    """Cut layers out of a network on the meta device that is not sharded yet; return which kept one stands for each."""
    layers = layers_of(model)
    units = sharding_units(model, parallel.model_copy(update={"wrap": 1}), ends=ends)
    reached = [
        flag for unit, flag in zip(units, reached_by_backward(model, units), strict=True) if unit.name == "block"
    ]
    every = parallel.recompute_every if parallel.activation_checkpointing == "every_n" else 1
    kinds = [
        (*_kind(layer), flag, number % (every or 1), number % parallel.wrap)
        for number, (layer, flag) in enumerate(zip(layers, reached, strict=True))
    ]
    stands_for = representatives(kinds, _MARGIN * parallel.wrap)
    kept = sorted(set(stands_for))
    # A network that also sees or hears has a list for each of its parts, and layers that are in none.
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and any(layer in layers for layer in m)]
    cut = {
        number: next((each for each in lists if any(layer is one for one in each)), None)
        for number, layer in enumerate(layers)
        if number not in kept
    }
    if None in cut.values():
        return list(range(len(layers)))
    for number, parent in cut.items():
        assert parent is not None
        del parent[[*parent].index(layers[number])]
    return [kept.index(number) for number in stands_for]


def _kind(layer: nn.Module) -> tuple[Hashable, ...]:
    """Return what makes two layers need the same: what they are made of, and their settings."""
    weights = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in layer.parameters())
    settings = tuple(
        (key, value)
        for module in layer.modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str) and not any(part in key for part in _NUMBERED)
    )
    return (type(layer).__qualname__, weights, settings)


def representatives(kinds: Sequence[Hashable], margin: int) -> list[int]:
    """Return, for each item of a sequence, the one that stands for it.

    Repetitions are taken out of the middle of what is periodic, except for `margin` items at either end.
    """
    stands_for = list(range(len(kinds)))
    kept = list(range(len(kinds)))
    while cut := _largest_cut([kinds[number] for number in kept], margin):
        start, stop, period = cut
        before = {kept[i]: kept[start - period + (i - start) % period] for i in range(start, stop)}
        stands_for = [before.get(number, number) for number in stands_for]
        del kept[start:stop]
    return stands_for


def _largest_cut(kinds: Sequence[Hashable], margin: int) -> tuple[int, int, int] | None:
    """Return [start, stop) of what can be left out, and the period that it repeats; None if nothing can."""
    best: tuple[int, int, int] | None = None
    for period in range(1, len(kinds) // 2 + 1):
        first = 0
        for place in range(len(kinds) - period + 1):
            if place < len(kinds) - period and kinds[place] == kinds[place + period]:
                continue
            # kinds[first : place + period] repeats. What stands for others has a whole period before it and behind it:
            # the rotations of full attention, which all such layers share, belong to the first of them.
            edge = max(margin, period)
            start = first + edge + period
            periods = (place + period - edge - start) // period
            if periods > 0 and (best is None or periods * period > best[1] - best[0]):
                best = start, start + periods * period, period
            first = place + 1
    return best
