"""`documents/attempt-N.jsonl` of a run: the loss of every document in every step, if `tracking.documents` is on.

Each attempt has its own file, so that nothing is ever cut: of a step that was trained again, the last attempt's line
counts.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from raytune_fsdp.base.collectives import on_all_ranks
from raytune_fsdp.base.durable import make_private, open_private
from raytune_fsdp.base.errors import in_one_line
from raytune_fsdp.base.measured import StepMetrics
from raytune_fsdp.base.untrusted import lines_of, parse_json
from raytune_fsdp.model.objective.documents import DocumentLosses
from raytune_fsdp.record.lines import is_number

logger = logging.getLogger(__name__)

_NAME = re.compile(r"attempt-([0-9]{1,9})\.jsonl")


class DocumentRecord:
    """The file to which the ranks write their losses of documents."""

    def __init__(self, losses: DocumentLosses | None, directory: Path, attempt: int) -> None:
        self._losses = losses
        self._path = directory / f"attempt-{attempt}.jsonl"
        self._broken = False

    def write(self, rows: Sequence[StepMetrics]) -> None:
        """Write the lines of steps. Collective, unless nothing is recorded."""
        if self._losses is None:
            return
        mine = self._losses.take(row.step for row in rows)
        everyone = on_all_ranks(lambda: mine)
        if dist.get_rank() == 0 and not self._broken:
            try:
                make_private(self._path.parent)
                with open(self._path, "a", opener=open_private) as file:
                    file.write("".join(_line(row.step, [each[row.step] for each in everyone]) for row in rows))
            except OSError as error:  # the run can do without
                self._broken = True
                logger.warning("the losses of documents are no longer recorded: %s", in_one_line(error))


def _line(step: int, ranks: Sequence[Mapping[int, Sequence[float]]]) -> str:
    sums_of: dict[int, Sequence[float]] = {}
    for rank in ranks:
        for index, sums in rank.items():  # of ranks that share a micro-batch, each has the sums over its tokens
            sums_of[index] = [a + b for a, b in zip(sums_of[index], sums, strict=True)] if index in sums_of else sums
    every = ", ".join(_number(value) for index in sorted(sums_of) for value in sums_of[index])
    return f'{{"step": {step}, "sums": [{every}]}}\n'


def _number(value: float) -> str:
    # Eight digits, as losses in fp32 have: twice as many would double the file. JSON has no NaN.
    return f"{value:.8g}" if math.isfinite(value) else "null"


def read_sums(directory: Path, step: int) -> list[float] | None:
    """Return the sums of losses of the segments of a step, in the order of its samples; None if they are not on record.

    Raise ValueError where a line is not one of these.
    """
    there = {int(found[1]): path for path in directory.glob("attempt-*") if (found := _NAME.fullmatch(path.name))}
    begins = f'{{"step": {step}, '.encode()
    for attempt in sorted(there, reverse=True):
        for raw in lines_of(there[attempt]):
            if raw.startswith(begins) and raw.endswith(b"\n"):
                line = parse_json(raw)
                sums = line.get("sums") if isinstance(line, dict) else None
                if not isinstance(sums, list) or not all(each is None or is_number(each) for each in sums):
                    raise ValueError("it has no losses")
                return [math.nan if each is None else float(each) for each in sums]
    return None
