"""Whether the rest of a config suits `run.exact`."""

from __future__ import annotations

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
