"""Group the weights that are updated alike: with decay or without, adapters' second matrices, the user's own groups."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import OptimConfig
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.model.added_rows import ROWS
from raytune_fsdp.model.weights.keys import all_names

STATES_APART = "states_apart"
"""The name, in records and checkpoints, of decay that leaves out matrices that are rates of states."""

_RATES = "A_log"
"""What all state spaces call the logs of the rates at which their states decay. Mamba 1 has a matrix of them, for which
its makers want no decay; where they are a vector, it has none anyway."""

_SECOND = re.compile(r"\.lora_(B|embedding_B)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trained weights that are updated alike, by name."""

    names: tuple[str, ...]
    weight_decay: float
    lr_ratio: float = 1.0
    """Their learning rate, as a multiple of the run's."""

    def only(self, names: Iterable[str], lr_ratio: float = 1.0) -> Group:
        """Return a group of those of its weights that are among `names`, at a multiple of its rate."""
        kept = set(names)
        return Group(
            names=tuple(name for name in self.names if name in kept),
            weight_decay=self.weight_decay,
            lr_ratio=self.lr_ratio * lr_ratio,
        )


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer updates, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def groups_of(
    model: nn.Module, config: OptimConfig, method: Method | None = None, *, states_apart: bool = False
) -> tuple[Group, ...]:
    """Group all trained weights. A pattern's rate and LoRA+'s multiply; a pattern's decay replaces any other decay.

    `states_apart`: matrices that are rates of states do not decay by themselves.
    """
    plain = undecayed_names(model) | (rates_of_states(model) if states_apart else set())
    ratio, names = getattr(method, "lr_ratio", None), all_names(model)
    found: dict[tuple[float, float], list[str]] = {}
    for name in trained(model):
        lr_ratio = ratio if ratio is not None and _SECOND.search(name) else 1.0
        decay = 0.0 if name in plain else config.weight_decay
        mine = next((g for g in config.groups if any(re.search(g.match, each) for each in names[name])), None)
        if mine is not None:
            lr_ratio *= mine.lr_ratio
            decay = decay if mine.weight_decay is None else mine.weight_decay
        found.setdefault((lr_ratio, decay), []).append(name)
    ordered = sorted(found.items(), key=lambda each: (each[0][0], -each[0][1]))
    return tuple(Group(names=tuple(each), weight_decay=decay, lr_ratio=rate) for (rate, decay), each in ordered)


def check_groups(network: nn.Module, config: OptimConfig) -> None:
    """Refuse a pattern that applies to no trained weight. The network may be on the meta device."""
    if not config.groups:
        return
    names, own = all_names(network), trained(network)
    left = {name: names[name] for name in own}
    for index, group in enumerate(config.groups):
        hit = {name for name, each in left.items() if any(re.search(group.match, one) for one in each)}
        if hit:
            left = {name: each for name, each in left.items() if name not in hit}
            continue
        where = f"optim.groups.{index}.match: {group.match!r}"
        if any(re.search(group.match, one) for name in own for one in names[name]):
            raise ConfigError(f"{where} finds only weights that a group before it has; move it before that one")
        # One name of each kind: a network has hundreds that differ in a number.
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in own)
        raise ConfigError(
            f"{where} is found in the name of no weight that is trained; in this {type(network).__name__} they are "
            f"called {', '.join(list(kinds)[:12])}"
        )


def undecayed_names(model: nn.Module) -> set[str]:
    """Return the parameters without decay: those with fewer than two dimensions, IA3's factors, and embeddings.

    An output embedding that is tied to the input embedding is the same parameter; an untied one is a matrix like any
    other and decays. Rows of new tokens do not decay, not even in the head: they are few, and start as means of other
    rows.
    """
    embeddings = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for name, _ in module.named_parameters(recurse=False)
    }
    embeddings |= {name for name, _ in model.named_parameters() if name.endswith(f".{ROWS}")}
    # IA3's factors are vectors in the form of a matrix, and around 1.
    return embeddings | {name for name, p in model.named_parameters() if p.ndim < 2 or ".ia3_l." in name}


def rates_of_states(model: nn.Module) -> set[str]:
    """Return the trained matrices that are logs of the rates of states, which decay would pull towards one rate."""
    return {name for name, each in trained(model).items() if each.ndim > 1 and name.rpartition(".")[2] == _RATES}
