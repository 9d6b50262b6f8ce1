"""What can be chosen on the page beside a config, and the config that a choice makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.predict.advise.alternatives import METHODS
from raytune_fsdp.predict.advise.changes import with_changes
from raytune_fsdp.predict.devices import DEVICES

Value = int | str

_MOST_GPUS = 256
_LENGTHS = tuple(2**power for power in range(9, 18))
_SAMPLES = tuple(2**power for power in range(7))
_BATCHES = tuple(2**power for power in range(13))
_MOST_SHOWN = 60
"""Characters of what somebody has asked for, in the answer that refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    device: str
    gpus: int
    method: str
    seq_len: int
    micro_batch: int
    global_batch: int
    recompute: str
    strategy: str


Offered = Mapping[str, Sequence[Value]]
"""By the name of a choice's field: everything that it may be."""


def start_of(config: FinetuneConfig, device: str, gpus: int) -> Chosen:
    """The config as it is written."""
    return Chosen(
        device=device,
        gpus=gpus,
        method=config.method.type,
        seq_len=config.data.seq_len,
        micro_batch=config.train.micro_batch,
        global_batch=config.train.global_batch,
        recompute=config.parallel.activation_checkpointing,
        strategy=config.parallel.strategy,
    )


def offered(start: Chosen, per_node: int) -> Offered:
    """What the page has controls for; what the config says is always among it."""
    return {
        "device": tuple(DEVICES),
        "gpus": _with(sizes(per_node), start.gpus),
        "method": _with(("full", "lora", "qlora"), start.method),
        "seq_len": _with(_LENGTHS, start.seq_len),
        "micro_batch": _with(_SAMPLES, start.micro_batch),
        "global_batch": _with(_BATCHES, start.global_batch),
        "recompute": _with(("none", "selective", "full"), start.recompute),
        "strategy": ("full_shard", "shard_grad_op", "hybrid_shard", "replicate"),
    }


def sizes(per_node: int) -> list[int]:
    """1, 2, 4 … GPUs of a machine, then 1, 2, 4 … machines."""
    found = [2**power for power in range(9) if 2**power < per_node]
    nodes = 1
    while nodes * per_node <= _MOST_GPUS:
        found.append(nodes * per_node)
        nodes *= 2
    return found


def _with(values: Sequence[Value], one: Value) -> tuple[Value, ...]:
    if one in values:
        return tuple(values)
    return tuple(sorted([*values, one])) if isinstance(one, int) else (one, *values)  # type: ignore[type-var]


def read_choice(asked: Sequence[tuple[str, str]], start: Chosen, among: Offered) -> Chosen:
    """What a request asks for; what it does not name stays as in the config. ConfigError for anything else."""
    found: dict[str, Value] = {}
    known = [field.name for field in fields(Chosen)]
    for name, text in asked:
        if name not in known or name in found:
            why = "given twice" if name in found else f"unknown; known are {', '.join(known)}"
            raise ConfigError(f"{_shown(name)}: {why}")
        values = {str(value): value for value in among[name]}
        if text not in values:
            raise ConfigError(f"{name}={_shown(text)} is not offered; choose one of {', '.join(values)}")
        found[name] = values[text]
    return replace(start, **found)  # type: ignore[arg-type]


def _shown(text: str) -> str:
    return printable(text[:_MOST_SHOWN])


def changed(config: FinetuneConfig, choice: Chosen, per_node: int) -> FinetuneConfig:
    """The config with what was chosen."""
    start, changes = start_of(config, choice.device, choice.gpus), dict[str, Any]()
    written = {
        "data.seq_len": "seq_len", "train.micro_batch": "micro_batch", "train.global_batch": "global_batch",
        "parallel.activation_checkpointing": "recompute", "parallel.strategy": "strategy",
    }  # fmt: skip
    for path, name in written.items():
        if getattr(choice, name) != getattr(start, name):
            changes[path] = getattr(choice, name)
    if changes.get("parallel.strategy") == "hybrid_shard":
        changes["parallel.shard_size"] = per_node
    if choice.method != start.method:
        changes["method"] = _method(config, choice.method)
    try:
        return with_changes(config, changes)
    except ValidationError as error:
        raise ConfigError("; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())) from None


def _method(config: FinetuneConfig, wanted: str) -> Mapping[str, Any]:
    """With the adapters that the config describes, if it has some."""
    if wanted not in METHODS:
        return {"type": wanted}
    if config.method.type not in METHODS:
        return METHODS[wanted]
    values = config.method.model_dump(exclude_unset=True)
    values.pop("quantization", None)
    return {**values, "type": wanted}
