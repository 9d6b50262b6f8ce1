"""What the planner says of a choice, computed when it is asked for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from raytune_fsdp.base.errors import RaytuneError, in_one_line
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.plan.counts import Census
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.predict.advise.advice import advice
from raytune_fsdp.predict.devices import DEVICES
from raytune_fsdp.predict.host import beside
from raytune_fsdp.predict.page.choices import Chosen, changed
from raytune_fsdp.predict.page.text import point_as_data
from raytune_fsdp.predict.planned import as_long
from raytune_fsdp.predict.prediction import Cluster, judge, traced
from raytune_fsdp.predict.subject import Subject
from raytune_fsdp.predict.trace.trace import Trace

logger = logging.getLogger(__name__)

_ANSWERS, _TRACES = 4096, 32


class Points:
    """Answers by choice. They are kept, and so are the last traces: of several GPUs one serves every device."""

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
        self._answers: OrderedDict[Chosen, dict[str, Any]] = OrderedDict()
        self._traces: OrderedDict[tuple[object, ...], Trace] = OrderedDict()
        self._subjects: dict[str, Subject] = {}
        self._one_at_a_time = Lock()  # a trace has a process group, and a process has one of those
        self._ended = False

    def of(self, choice: Chosen) -> dict[str, Any]:
        """`point`, as `plan --json` has it; or `problem`, in words."""
        with self._one_at_a_time:
            if self._ended:
                return {"problem": "the command has ended: start it again"}
            if choice not in self._answers:
                self._answers[choice] = self._answer(choice)
                if len(self._answers) > _ANSWERS:
                    self._answers.popitem(last=False)
            return self._answers[choice]

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
            self._subjects[choice.method] = Subject.of(config, self._architecture)
        subject = self._subjects[choice.method]
        cluster = Cluster(device=DEVICES[choice.device], per_node=self._per_node, between=self._between)
        memory = int(cluster.device.memory)
        key = (config.model_dump_json(), choice.gpus, memory if choice.gpus == 1 else None)
        if key not in self._traces:
            self._traces[key] = traced(subject, config, plan, cluster)
            if len(self._traces) > _TRACES:
                self._traces.popitem(last=False)
        found = judge(self._traces[key], config, plan, cluster)
        return point_as_data(found, beside(config, found), advice(asked, found), None)
