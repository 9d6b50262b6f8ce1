"""What is predicted of the ranks of a run on Ray, for each number of them that an attempt has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.estimate.predicted import NotPredicted, Predicted
from raytune_fsdp.launch.preflight import preflight
from raytune_fsdp.launch.ray.resources import Node, Request, accelerators_of
from raytune_fsdp.plan import resolve
from raytune_fsdp.run.standing import Prepared


class Foresight:
    """Asks the planner once for each number of ranks."""

    def __init__(
        self, config: FinetuneConfig, prepared: Prepared, asked: Request, nodes: Sequence[Node], *, force: bool
    ) -> None:
        self._config, self._prepared, self._device = config, prepared, asked.device
        kinds = set(_kinds(asked, nodes))
        self._name = kinds.pop() if len(kinds) == 1 else None
        """Of the GPUs; None: there are several kinds, or Ray does not say."""
        self._per_node = max((int(node.total.get("GPU", 0)) for node in nodes), default=0) or 8
        self.force = force
        """Whether what does not fit is started all the same."""
        self._found: dict[int, Predicted | NotPredicted] = {}

    def of(self, ranks: int) -> Predicted | NotPredicted:
        """Refuses what cannot fit, where the kind of GPU says how much memory there is; else ranks do. Only at first:
        later there may just be too few nodes for a while."""
        if ranks not in self._found:
            plan = resolve(self._config, ranks, self._prepared.census)
            self._found[ranks] = preflight(
                self._config, self._prepared, plan, self._device, self._name,
                memory=None, per_node=self._per_node, forced=self.force or bool(self._found),
            )  # fmt: skip
        return self._found[ranks]


def _kinds(asked: Request, nodes: Sequence[Node]) -> Iterator[str]:
    if asked.device == "cuda":
        for node in nodes:
            yield from accelerators_of(node)
