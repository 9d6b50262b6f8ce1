"""Run the rule of an update operation by operation, or as one kernel for each weight.

Operation by operation a written-out update reads and writes every number dozens of times. As one kernel it reads and
writes each tensor once. The kernel is compiled to do what the operations do: each result is rounded once, products and
sums are not contracted, quotients are exact to the last bit, and the smallest numbers are kept. A run tries that before
it relies on it (run/trials/update.py).

A rule is a function `change(into, *args)` of tensors: it reads them all, and writes only those in `into`. It has the
signature that torch.compile follows best: module-level, no numbers that differ from weight to weight, and whatever it
computes at one place of a weight depends on that place alone, or on its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config
from torch.utils._pytree import tree_leaves

from raytune_fsdp.model.compile_layers import Compiler
from raytune_fsdp.step.optim import pieces

Change = Callable[..., None]
Scalars = Sequence[torch.Tensor]
"""Numbers of an update that are the same for a whole weight."""

_OPTIONS = {
    # As operations round.
    "emulate_precision_casts": True,  # which also keeps products and sums from being contracted
    "eager_numerics.division_rounding": True,
    "emulate_divison_rounding": True,  # the same in older versions, as they spell it
    "eager_numerics.disable_ftz": True,
    # Noise is 40 operations. From 30 on its steps would be kept in memory for kernels of their own.
    "realize_opcount_threshold": 1000,
}
"""inductor's, as far as this torch has them."""


class ByOperation:
    """Runs rules as they are written."""

    needs_trial = False

    @property
    def at_once(self) -> int:
        return pieces.NUMBERS_AT_ONCE

    def __call__(self, change: Change, into: Any, *args: Any) -> None:
        change(into, *args)

    def number(self, value: float, device: torch.device) -> float:
        return value

    def scalars(self, make: Callable[[torch.Tensor], Scalars], steps: Sequence[torch.Tensor]) -> list[Scalars]:
        # One by one: a CPU's vector units have another power function.
        return [make(step) for step in steps]

    def agree(self) -> None:
        pass


BY_OPERATION = ByOperation()


class AsKernel:
    """Runs each rule as one kernel, or as it is written once the compiler has given up."""

    at_once = 1 << 30
    """No intermediate result takes memory. More numbers would need wider indexes."""

    def __init__(self, compiler: Compiler, *, alone: bool = False) -> None:
        """`alone`: other ranks do not have to run rules alike."""
        self._compiler = compiler
        self.needs_trial = not alone
        self._fast: dict[Change, Change] = {}
        self._numbers: dict[tuple[float, torch.device], torch.Tensor] = {}

    def __call__(self, change: Change, into: Any, *args: Any) -> None:
        if change not in self._fast:
            self._fast[change] = self._compiler.compiled(change, draws=False, whole=True, options=_options())
        for tensor in tree_leaves((into, args)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                # One graph for any number of rows, which is what ranks divide. Widths are few, and fast if known.
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
                torch._dynamo.mark_static(tensor, list(range(1, tensor.ndim)))
        self._fast[change](into, *args)

    def number(self, value: float, device: torch.device) -> torch.Tensor:
        # As a tensor, since a graph is made for the numbers that it is given. Filled on the device: nothing waits.
        if len(self._numbers) > 64:
            self._numbers.clear()
        made = self._numbers.get((value, device))
        if made is None:
            made = self._numbers[value, device] = torch.full((), value, dtype=torch.float64, device=device)
        return made

    def scalars(self, make: Callable[[torch.Tensor], Scalars], steps: Sequence[torch.Tensor]) -> list[Scalars]:
        made = [each.unbind() for each in make(torch.stack(list(steps)))] if steps else []
        return list(zip(*made, strict=True)) if made else [() for _ in steps]

    def agree(self) -> None:
        self._compiler.agree()


Execution = ByOperation | AsKernel
"""How rules are run: called, it has a rule change the tensors in `into`. `at_once`: the most numbers of a weight that
are updated by one call. `needs_trial`: an optimizer has to try its first step without effect, and then have all ranks
run rules alike, by `agree`, which is collective. `number` returns a number that changes from step to step, as rules are
to be given it, and `scalars` what a function computes of the steps of several weights, for each of them."""


def _options() -> dict[str, Any]:
    known = torch._inductor.config.get_config_copy()  # type: ignore[attr-defined]
    return {name: value for name, value in _OPTIONS.items() if name in known}
