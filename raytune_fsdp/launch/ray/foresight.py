"""What is predicted of the ranks of a run on Ray, for each number of them that an attempt has."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from raytune_fsdp.base.predicted import NotPredicted, Predicted
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.ray.resources import Node, Request, accelerators_of
from raytune_fsdp.plan.plan import Plan, resolve
from raytune_fsdp.predict.preflight import check_memory, check_room, device_named, is_too_much, predict
from raytune_fsdp.run.standing import Prepared

logger = logging.getLogger(__name__)


class Foresight:
    """Asks the planner once for each number of ranks."""

    def __init__(
        self, config: FinetuneConfig, prepared: Prepared, asked: Request, nodes: Sequence[Node], *, force: bool
    ) -> None:
        self._config, self._prepared, self._kind = config, prepared, asked.device
        kinds = set(_kinds(asked, nodes))
        self._device = device_named(kinds.pop() if len(kinds) == 1 else None)
        """The kind of GPU; None: there are several, or Ray does not say."""
        self._memory = None if self._device is None else int(self._device.memory)
        self._per_node = max((int(node.total.get("GPU", 0)) for node in nodes), default=0) or 8
        self.force = force
        """Whether what does not fit is started all the same."""
        self._found: dict[int, Predicted | NotPredicted] = {}
        self._checked = set[int]()

    def that_fit(self, sizes: Sequence[int], room: int | None, say: Callable[[str], None]) -> list[int]:
        """Of the numbers of ranks that the run may have, those that an attempt can have. Refuses the run, unless it is
        forced, if not even the largest fits that the cluster has `room` for (None: nodes may come).

        Only where the kind of GPU says how much memory there is; else ranks find it out.
        """
        possible = [size for size in sorted(sizes) if room is None or size <= room] or [min(sizes)]
        most = possible[-1]
        self._check(most, forced=self.force)
        check_room(self._config, self._prepared, self._plan(most), self._predicted(most), forced=self.force, say=say)
        if self.force or self.fits(possible[0]):
            return list(sizes)
        fewest = possible[bisect_left(possible, True, key=self.fits)]  # more ranks keep less each
        logger.warning(
            "cluster.workers.min=%d: the run does not fit on fewer than %d ranks, so it waits for these; set "
            "cluster.workers.min=%d", possible[0], fewest, fewest,
        )  # fmt: skip
        return [size for size in sizes if size >= fewest]

    def of(self, ranks: int) -> Predicted | NotPredicted:
        """What is predicted of an attempt with so many ranks. Refuses nothing."""
        if ranks not in self._checked:
            self._check(ranks, forced=True)
        return self._predicted(ranks)

    def _check(self, ranks: int, *, forced: bool) -> None:
        self._checked.add(ranks)
        check_memory(
            self._config, self._prepared, self._plan(ranks), self._predicted(ranks),
            kind=self._kind, memory=self._memory, forced=forced,
        )  # fmt: skip

    def fits(self, ranks: int) -> bool:
        found = self._predicted(ranks)
        return self._memory is None or isinstance(found, NotPredicted) or not is_too_much(found, self._memory)

    def _predicted(self, ranks: int) -> Predicted | NotPredicted:
        if ranks not in self._found:
            self._found[ranks] = predict(
                self._config, self._prepared, self._plan(ranks), self._kind, self._device, self._per_node
            )
        return self._found[ranks]

    def _plan(self, ranks: int) -> Plan:
        return resolve(self._config, ranks, self._prepared.census)


def _kinds(asked: Request, nodes: Sequence[Node]) -> Iterator[str]:
    if asked.device == "cuda":
        for node in nodes:
            yield from accelerators_of(node)
