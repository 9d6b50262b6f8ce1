"""Compute what the planner says about a choice, when it is asked for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import ValidationError

from raytune_fsdp.base.errors import ConfigError, RaytuneError, in_one_line
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.advise.advice import advice
from raytune_fsdp.predict.advise.alternatives import METHODS
from raytune_fsdp.predict.advise.changes import with_changes
from raytune_fsdp.predict.devices import DEVICES
from raytune_fsdp.predict.host import host_needs
from raytune_fsdp.predict.page.text import point_as_data
from raytune_fsdp.predict.planned import as_long
from raytune_fsdp.predict.prediction import Cluster, predict_from, traced
from raytune_fsdp.predict.search import sizes
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import Trace

# What can be chosen on the page besides a config, and the config that a choice makes of it.

Value = int | str

_MOST_GPUS = 256
_LENGTHS = tuple(2**power for power in range(9, 18))
_SAMPLES = tuple(2**power for power in range(7))
_BATCHES = tuple(2**power for power in range(13))
_MOST_SHOWN = 60
"""How many characters of what somebody has asked for are in the answer that refuses it."""


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
"""Everything that a field of a choice may be, by the field's name."""


def start_of(config: FinetuneConfig, device: str, gpus: int) -> Chosen:
    """Return the config as it is written, as a choice."""
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
    """Return what the page has controls for; what the config says is always among it."""
    return {
        "device": tuple(DEVICES),
        "gpus": _with(sizes(per_node, _MOST_GPUS), start.gpus),
        "method": _with(("full", "lora", "qlora"), start.method),
        "seq_len": _with(_LENGTHS, start.seq_len),
        "micro_batch": _with(_SAMPLES, start.micro_batch),
        "global_batch": _with(_BATCHES, start.global_batch),
        "recompute": _with(("none", "selective", "full"), start.recompute),
        "strategy": ("full_shard", "shard_grad_op", "hybrid_shard", "replicate"),
    }


def _with(values: Sequence[Value], one: Value) -> tuple[Value, ...]:
    if one in values:
        return tuple(values)
    return tuple(sorted([*values, one])) if isinstance(one, int) else (one, *values)  # type: ignore[type-var]


def read_choice(asked: Sequence[tuple[str, str]], start: Chosen, among: Offered) -> Chosen:
    """Return what a request asks for, and for the rest what the config says. Raise ConfigError for anything else."""
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
    """Return the config with what was chosen."""
    start = start_of(config, choice.device, choice.gpus)
    written = {
        "data.seq_len": "seq_len", "train.micro_batch": "micro_batch", "train.global_batch": "global_batch",
        "parallel.activation_checkpointing": "recompute", "parallel.strategy": "strategy",
    }  # fmt: skip
    changes: dict[str, Any] = {
        path: getattr(choice, name) for path, name in written.items() if getattr(choice, name) != getattr(start, name)
    }
    if changes.get("parallel.strategy") == "hybrid_shard":
        changes["parallel.shard_size"] = per_node
    if choice.method != start.method:
        # As the config writes it, with the adapters that the config describes, if it has some.
        if choice.method not in METHODS:
            changes["method"] = {"type": choice.method}
        elif config.method.type not in METHODS:
            changes["method"] = METHODS[choice.method]
        else:
            values = config.method.model_dump(exclude_unset=True)
            values.pop("quantization", None)
            changes["method"] = {**values, "type": choice.method}
    try:
        return with_changes(config, changes)
    except ValidationError as error:
        raise ConfigError("; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())) from None


logger = logging.getLogger(__name__)

_ANSWERS, _TRACES = 4096, 32


class Points:
    """Answers by choice. They are kept, and so are the last traces: with several GPUs, one serves every device."""

    def __init__(
        self,
        config: FinetuneConfig,
        *,
        census: Census | None = None,
        per_node: int = 8,
        between: float | None = None,
        architecture: Path | None = None,
    ) -> None:
        self._config, self._census = config, census
        self._per_node, self._between, self._architecture = per_node, between, architecture
        self._answered = lru_cache(_ANSWERS)(self._answer)
        self._traces: OrderedDict[tuple[object, ...], Trace] = OrderedDict()
        self._subjects: dict[str, ModelSpec] = {}
        self._one_at_a_time = Lock()  # a trace has a process group, and a process has one of those
        self._ended = False

    def of(self, choice: Chosen) -> dict[str, Any]:
        """Return `point`, as `plan --json` has it; or `problem`, in words."""
        with self._one_at_a_time:
            if self._ended:
                return {"problem": "the command has ended: start it again"}
            return self._answered(choice)

    def end(self) -> None:
        """Wait for what is being computed: a process that ends within an operation of torch's is aborted."""
        self._ended = True
        with self._one_at_a_time:
            pass

    def _answer(self, choice: Chosen) -> dict[str, Any]:
        try:
            return {"point": self._point(choice)}
        except RaytuneError as error:
            return {"problem": in_one_line(error)}
        except Exception as error:  # the code of any model, in a way that nobody has tried: the page goes on
            logger.warning("%s could not be planned: %s", choice, in_one_line(error))
            return {"problem": f"this could not be planned ({in_one_line(error)}): choose something else"}

    def _point(self, choice: Chosen) -> dict[str, Any]:
        asked = changed(self._config, choice, self._per_node)
        plan = resolve(asked, choice.gpus, self._census)
        config = as_long(asked, plan)
        if choice.method not in self._subjects:
            self._subjects[choice.method] = ModelSpec.of(config, self._architecture)
        subject = self._subjects[choice.method]
        cluster = Cluster(device=DEVICES[choice.device], per_node=self._per_node, between=self._between)
        memory = int(cluster.device.memory)
        key = (config.model_dump_json(), choice.gpus, memory if choice.gpus == 1 else None)
        if key not in self._traces:
            self._traces[key] = traced(subject, config, plan, cluster)
            if len(self._traces) > _TRACES:
                self._traces.popitem(last=False)
        found = predict_from(self._traces[key], config, plan, cluster)
        return point_as_data(found, host_needs(config, found), advice(asked, found), None)
