"""Whether the rest of a config suits `run.exact`, and layers that several ranks share, `parallel.mesh.tensor`."""

from __future__ import annotations

from raytune_fsdp.config.schema import sections_of
from raytune_fsdp.config.sections.method import Method
from raytune_fsdp.config.sections.optimizers import OptimizerChoice
from raytune_fsdp.config.sections.parallel import ParallelConfig
from raytune_fsdp.config.sections.run import RunConfig


def check_exact(run: RunConfig, parallel: ParallelConfig) -> None:
    """Refuse what makes the order of sums depend on the number of ranks."""
    if not run.exact:
        if run.threads is not None:
            raise ValueError(
                f"run.threads={run.threads} without run.exact: only exact runs keep their threads; set run.exact=true, or "
                "set OMP_NUM_THREADS instead"
            )
        return
    mesh = parallel.mesh
    for field, value, right in (
        ("parallel.strategy", parallel.strategy, ("full_shard", "shard_grad_op")),
        ("parallel.mesh.replicate", mesh.replicate, (None, 1)),
        ("parallel.mesh.sequence", mesh.sequence, (1,)),
        ("parallel.mesh.tensor", mesh.tensor, (1,)),
        ("parallel.precision", parallel.precision, ("fp64", "fp32", "bf16", "fp16")),
        ("parallel.reduce_dtype", parallel.reduce_dtype, ("auto", "fp32")),
        ("parallel.defer_gradient_sync", parallel.defer_gradient_sync, (False,)),
    ):
        if value not in right:
            known = " or ".join(str(each).lower() for each in right if each is not None)
            raise ValueError(
                f"{field}={str(value).lower()} with run.exact=true: the order of its sums depends on the number of ranks: "
                f"set it to {known}, or set run.exact=false"
            )


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
