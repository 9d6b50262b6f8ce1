"""What the pass of a teacher needs before a run of distillation trains: memory of the ranks, time, and storage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raytune_fsdp.base.errors import RaytuneError, first_line
from raytune_fsdp.config import FinetuneConfig, FullMethod
from raytune_fsdp.config.sections.objectives import SftObjective
from raytune_fsdp.data.teacher import bytes_of_target
from raytune_fsdp.plan.plan import Plan
from raytune_fsdp.predict.prediction import CONTEXT, PROCESS, Cluster, predict
from raytune_fsdp.predict.subject import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPass:
    """What the pass needs. Without sizes of the teacher, only its storage is known."""

    model: str
    token_bytes: int
    """Bytes that are kept for a token that is trained on."""
    tokens: int
    """The most tokens that it is asked about: all of the run, each once."""
    memory: int | None = None
    """Bytes of a device at the most, about: its share of the weights, and what is gathered and computed at a time."""
    seconds: float | None = None
    fits: bool = True
    because: str = ""
    """Why sizes are not known."""

    @property
    def bytes(self) -> int:
        return self.token_bytes * self.tokens


def teacher_pass(config: FinetuneConfig, plan: Plan, cluster: Cluster) -> TeacherPass | None:
    """Return what the pass of a config's teacher needs; None: it has no teacher."""
    teacher = config.teacher
    if teacher is None:
        return None
    steps = plan.steps / max(1.0, config.train.epochs or 1.0)
    known = TeacherPass(
        model=teacher.model,
        token_bytes=bytes_of_target(teacher.top_k, teacher.kept_in(config.parallel.precision)),
        tokens=int(steps * plan.division.global_batch * config.data.seq_len),
    )
    asked = _as_trained(config)
    try:
        subject = ModelSpec.of(asked)
        found = predict(subject, asked, plan.layout.world, cluster)
    except RaytuneError as error:
        return replace(known, because=first_line(error))
    memory, layers = found.memory, getattr(subject.hf_config.get_text_config(), "num_hidden_layers", 1)
    beside = PROCESS if cluster.device.kind == "cpu" else CONTEXT
    # Nothing is kept for backward, so one layer's activations are there at a time.
    needed = memory.start.get("weights", 0) + memory.peak.get("gathered", 0)
    needed += memory.peak.get("activations", 0) // layers + beside
    # A forward pass is a third of what a step computes and, of two gathers and a reduction, the first gather.
    step = max(found.seconds.compute, found.seconds.moving) / 3
    return replace(known, memory=needed, seconds=step * steps, fits=needed <= cluster.device.memory)


def _as_trained(config: FinetuneConfig) -> FinetuneConfig:
    """Return the config of a run that trains the teacher on the same batches."""
    assert config.teacher is not None
    model = config.model.elsewhere(config.teacher.model)
    return config.with_sections(
        train={"objective": SftObjective()},
        parallel={"activation_checkpointing": "none", "activation_offload": False},
    ).model_copy(update={"model": model, "method": FullMethod(), "teacher": None})
