"""Whether the rest of a config suits layers that several ranks share, `parallel.mesh.tensor`."""

from __future__ import annotations

from raytune_fsdp.config.schema import sections_of
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.config.sections.optimizers import OptimizerChoice
from raytune_fsdp.config.sections.run import RunConfig


def check_tensor(size: int, run: RunConfig, method: Method, optimizer: OptimizerChoice) -> None:
    """Refuse what looks at whole weights, of which each rank has a part."""
    if size == 1:
        return
    combined = f"with parallel.mesh.tensor={size}"
    if run.digest_every is not None:
        raise ValueError(
            f"run.digest_every={run.digest_every} {combined}: digests are of whole rows, of which each rank has a part; "
            "leave it out, or leave tensor out"
        )
    if not method.takes_cut_layers:
        *kinds, last = (kind for kind, each in sections_of(Method).items() if each.takes_cut_layers)
        known = f"{', '.join(kinds)} and {last}"
        raise ValueError(
            f"method.type={method.type} {combined}: only {known} know layers that are cut; set method.type=lora, or leave "
            "tensor out"
        )
    if getattr(method, "dora", False) or getattr(method, "target_parameters", None):
        field = "dora=true" if method.dora else "target_parameters"  # type: ignore[union-attr]
        raise ValueError(
            f"method.{field} {combined}: it looks at whole weights, of which each rank has a part; leave it out, or leave "
            "tensor out"
        )
    if optimizer.type in ("muon", "adafactor") or getattr(optimizer, "moments", None) == "8bit":
        field = "moments=8bit" if optimizer.type == "adamw" else f"type={optimizer.type}"
        raise ValueError(
            f"optim.optimizer.{field} {combined}: it computes with whole rows of weights, some of which are cut; set "
            "optim.optimizer.type=adamw with moments=as_weights, fp32 or bf16, or leave tensor out"
        )
