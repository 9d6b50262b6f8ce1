"""Which version of each changed behaviour a run begins with, or began with, where no checkpoint says it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from raytune_fsdp.base.durable import replace_durably
from raytune_fsdp.base.errors import ResumeError
from raytune_fsdp.base.untrusted import UnsoundError, check_format, read_json, read_json_object, reason, shown
from raytune_fsdp.checkpoint.state import RunState
from raytune_fsdp.data.mixture import is_known, order_of
from raytune_fsdp.model.compile_layers import COMPILED, EAGER
from raytune_fsdp.model.objective.chunked_head import WIDE
from raytune_fsdp.model.objective.routers import GROUPED, ONE_BY_ONE
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.record import names
from raytune_fsdp.record.jsonl import each_event
from raytune_fsdp.step.accumulation import AS_WEIGHTS, FP32
from raytune_fsdp.step.optim.groups import STATES_APART

_BYTES, _PLAN_BYTES = 8 << 20, 1 << 20
_RULES: dict[str, Callable[[Any], bool]] = {
    "order_version": lambda value: value is None or is_known(value),
    "newest_order": lambda value: value is None or is_known(value),
    "gradients": lambda value: value in (AS_WEIGHTS, FP32),
    "adapters": lambda value: value is None or isinstance(value, list) and all(isinstance(each, str) for each in value),
    "threads": lambda value: value is None or isinstance(value, str),  # looked at where they are set
    "update": lambda value: value in (COMPILED, EAGER),
    "blocks": lambda value: value in (COMPILED, EAGER, None),
    "experts": lambda value: value in (GROUPED, ONE_BY_ONE, None),
    "scaling": lambda value: value in (WIDE, None),
    "decay": lambda value: value in (STATES_APART, None),
    "fixed": lambda value: value in (FP32, None),
}

_BEGAN = {
    "gradients": AS_WEIGHTS, "threads": None, "update": EAGER, "blocks": EAGER, "experts": GROUPED, "scaling": None,
    "decay": None, "fixed": None,
}  # fmt: skip
"""The kernels that a run keeps for good, with what runs had whose states name none."""


def put_beginning(place: RunDir, state: RunState, adapters: Sequence[str] | None = None) -> None:
    """Make a run that does not exist yet begin like the run that saved this state, with these `adapted_modules`."""
    kernels = {key: state.kernels.get(key, began) for key, began in _BEGAN.items()}
    values = {"format": 1, **orders_of(state), **kernels, "adapters": adapters}
    place.path.mkdir(parents=True, exist_ok=True)
    replace_durably(place.beginning, json.dumps(values))


def beginning_of(place: RunDir) -> tuple[RunState, list[str] | None]:
    """Return the state in which a run without a checkpoint begins, and its `adapted_modules` if they are known."""
    try:
        values = read_json_object(place.beginning, limit=_BYTES)
        check_format(values.pop("format", None))
        later = dict.fromkeys(("blocks", "experts", "scaling", "decay", "fixed"))
        values = {"update": EAGER, **later, **values}  # versions without these choices wrote none
        if values.keys() != _RULES.keys():
            raise UnsoundError(f"has the entries {shown(sorted(values))}")
        for key, value in values.items():
            if not _RULES[key](value):
                raise UnsoundError(f"has the {key} {shown(value)}")
    except FileNotFoundError:
        return RunState(newest_order=order_of(None)), None
    except (OSError, ValueError) as error:
        raise ResumeError(
            f"{place.beginning} does not say how this run begins ({reason(error)}): an audit wrote it of a run of "
            "another version; use that version, or remove the file"
        ) from error
    state = RunState(
        identity={"data.order_version": values["order_version"]},
        newest_order=values["newest_order"],
        kernels={key: values[key] for key in _BEGAN if values[key] is not None},
    )
    return state, values["adapters"]


def orders_of(state: RunState) -> dict[str, int | None]:
    """Return the versions of the order in which a run with this state reads its rows, as `open_data` takes them."""
    return {"order_version": state.identity.get("data.order_version"), "newest_order": state.newest_order}


def orders_on_record(place: RunDir) -> dict[str, int | None]:
    """Return the versions of the order that the run's record names.

    They are None if the run has saved nothing, and so begins again as a new one, or if only its checkpoints name them.
    """
    known: dict[str, int | None] = {"order_version": None, "newest_order": None}
    if not any(each["event"] == names.SAVED for each in each_event(place.events)):
        return known
    try:
        plan = read_json(place.plan, limit=_PLAN_BYTES)
        for key in known:
            known[key] = plan.get(key) if isinstance(plan, dict) else None
            if not (known[key] is None or is_known(known[key])):
                raise UnsoundError(f"has the {key} {shown(known[key])}, which this version does not know")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ResumeError(
            f"{place.plan} does not say how the run reads its rows ({reason(error)}); use the version that wrote it"
        ) from error
    return known
