"""`parallel`: how the model is spread over the ranks and in which precision it computes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from raytune_fsdp.config.rules import Section


class MeshConfig(Section):
    """The axes along which ranks are arranged. Their product is the number of ranks."""

    replicate: int | None = Field(default=None, ge=1)
    """Number of copies of the model, each over ranks of its own. Default: what `strategy` and `shard_size` make it."""

    shard: int | None = Field(default=None, ge=1)
    """Ranks with samples of their own that share one copy of the model. Default: what `strategy` and `shard_size` make it."""

    sequence: int = Field(default=1, ge=1)
    """Ranks that share each sample, each with an equal number of its tokens: for documents too long for one GPU. In
    attention each has all tokens and some of the heads, whose number this must divide."""

    tensor: int = Field(default=1, ge=1)
    """Ranks that compute each layer together: each has some of the heads, of an MLP's columns, of the experts, and of the
    vocabulary. For models whose layers are too large to be gathered; between GPUs of one node."""

    @property
    def together(self) -> int:
        """The number of ranks that compute the same samples."""
        return self.sequence * self.tensor


class ParallelConfig(Section):
    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "replicate"] = "full_shard"
    """`full_shard` shards weights, gradients and optimizer (ZeRO-3). `shard_grad_op` keeps weights gathered from
    forward to backward (ZeRO-2). `hybrid_shard` shards over groups of `shard_size` ranks, and each group has a copy.
    `replicate` keeps everything everywhere (DDP)."""

    shard_size: int | None = Field(default=None, ge=1)
    """Ranks that share one copy of the model with `hybrid_shard`, usually the GPUs of a node. Must divide the world size."""

    mesh: MeshConfig = Field(default_factory=MeshConfig)

    precision: Literal["bf16", "fp32", "fp64", "fp16", "bf16_pure", "fp8"] = "bf16"
    """`bf16`, `fp16`: compute in 16 bits, with fp32 master weights and reduction (fp16 with dynamic loss scaling).
    `bf16_pure`: weights and optimizer in bf16, too. `fp32`, `fp64`: this type throughout. `fp8`: like `bf16`, but the
    linear modules of the layers multiply in 8 bits in training, by torchao; on a CPU this is emulated, and slow."""

    fp8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Which numbers share a scale with `precision: fp8`; it is computed in every product. `tensorwise`: a whole weight, and
    all tokens of a micro-batch. `rowwise`: a row; more exact, and slower."""

    fp8_gather: bool | Literal["auto"] = "auto"
    """Gather weights in 8 bits with `precision: fp8`: half the bytes, the same results. Needs `fp8_scaling: tensorwise`;
    `auto` does it with that."""

    tf32: bool = False
    """On GPUs: compute products of fp32 numbers in TF32, with 10 bits of mantissa instead of 23. Not for networks that
    compute rotary positions as a product, as transformers 5.17 and some models' own code do: TF32 has no whole numbers
    above 2,048."""

    activation_checkpointing: Literal["none", "selective", "every_n", "full"] = "none"
    """What backward computes again instead of finding it in memory. `full`: everything in a layer but its input.
    `every_n`: the same, but only in one layer of every `recompute_every`. `selective`: in every layer what takes almost no
    time to compute, but not attention and large products."""

    recompute_every: int | None = Field(default=None, ge=2)
    """One layer in this many is computed again with `activation_checkpointing: every_n`."""

    activation_offload: bool = False
    """Move what a layer keeps for backward to the host's memory, and back in time. With `full` this is each layer's input;
    without `activation_checkpointing` it is everything."""

    cpu_offload: bool = False
    """Keep weights, gradients and moments in the host's memory, and update the weights there. This makes room on the GPU
    for a model that would not fit, and costs much time."""

    wrap: int = Field(default=1, ge=1)
    """How many layers are gathered and freed together. More than one: fewer and larger messages, more memory."""

    compile: bool | Literal["auto"] = "auto"
    """Compile each layer with torch.compile, and on GPUs updates that torch has no kernel for. `auto`: layers on GPUs,
    where it works; a run that continues keeps what it began with."""

    reduce_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """The type in which gradients are summed over the ranks. `auto`: fp32, or fp64 with `precision: fp64`. `bf16`: half
    the bytes, and sums of 8 significant bits, which differ with the number of ranks."""

    reduce: Literal["flat", "hierarchical"] = "flat"
    """How gradients are summed over ranks on several nodes. `hierarchical`: first inside each node, then between the
    nodes; only the second sum is in `reduce_dtype`. NCCL's ring by itself sends about as much between nodes. With `run.exact`
    the sum is passed from node to node instead, and the bits are the same either way."""

    defer_gradient_sync: bool = False
    """Reduce gradients only after the last micro-batch of a step: less traffic, but every rank holds full gradients
    until then."""

    @model_validator(mode="after")
    def _shard_size(self) -> Self:
        mesh = self.mesh
        given = self.shard_size is not None or mesh.shard is not None or mesh.replicate is not None
        if self.strategy == "hybrid_shard" and not given or self.strategy != "hybrid_shard" and self.shard_size:
            raise ValueError(
                f"parallel.shard_size={self.shard_size} with parallel.strategy={self.strategy}: "
                "hybrid_shard needs a shard_size, and the other strategies do not take one"
            )
        if self.shard_size is not None and self.shard_size % mesh.together:
            axes = " and ".join(
                f"parallel.mesh.{axis}={n}" for axis in ("sequence", "tensor") if (n := getattr(mesh, axis)) > 1
            )
            raise ValueError(
                f"parallel.shard_size={self.shard_size} with {axes}: the ranks that share a sample share a copy of the "
                f"model, too, so shard_size must be a multiple of {mesh.together}; set it to "
                f"{-(-self.shard_size // mesh.together) * mesh.together}"
            )
        return self

    @model_validator(mode="after")
    def _fp8(self) -> Self:
        if self.precision != "fp8":
            for field, given in (
                ("fp8_scaling", self.fp8_scaling != "tensorwise"),
                ("fp8_gather", self.fp8_gather is True),
            ):
                if given:
                    raise ValueError(
                        f"parallel.{field}={_written(getattr(self, field))} with parallel.precision={self.precision}: only "
                        f"fp8 has it; set parallel.precision=fp8, or leave {field} out"
                    )
        elif self.mesh.sequence > 1:
            raise ValueError(
                f"parallel.mesh.sequence={self.mesh.sequence} with parallel.precision=fp8: 8 bits are scaled by the largest "
                "number of the tokens that a rank has, so a run would depend on how many ranks share a sample; set "
                "parallel.precision=bf16, or leave sequence out"
            )
        elif self.mesh.tensor > 1:
            raise ValueError(
                f"parallel.mesh.tensor={self.mesh.tensor} with parallel.precision=fp8: a weight is scaled by its largest "
                "number, of which each rank would know its part; set parallel.precision=bf16, or leave tensor out"
            )
        elif self.fp8_gather is True and self.fp8_scaling != "tensorwise":
            raise ValueError(
                f"parallel.fp8_gather=true with parallel.fp8_scaling={self.fp8_scaling}: forward needs the scales of a "
                "weight's rows and backward those of its columns, so 8 bits of one are no use to the other; set "
                "parallel.fp8_scaling=tensorwise, or leave fp8_gather out"
            )
        return self

    @model_validator(mode="after")
    def _reduction(self) -> Self:
        if self.reduce_dtype == "bf16" and self.precision not in ("bf16", "bf16_pure", "fp8"):
            raise ValueError(
                f"parallel.reduce_dtype=bf16 with parallel.precision={self.precision}: gradients with more digits than "
                "bf16 has would lose them; set parallel.precision=bf16, or leave reduce_dtype out"
            )
        if self.reduce_dtype == "fp32" and self.precision == "fp64":
            raise ValueError(
                "parallel.reduce_dtype=fp32 with parallel.precision=fp64: half the digits would be lost; leave "
                "reduce_dtype out"
            )
        if self.reduce == "hierarchical" and self.mesh.tensor > 1:
            raise ValueError(
                f"parallel.reduce=hierarchical with parallel.mesh.tensor={self.mesh.tensor}: ranks with the same part of a "
                "layer are on different nodes mostly, so there are no two levels; leave reduce out"
            )
        if self.reduce == "hierarchical" and self.strategy == "replicate":
            raise ValueError(
                "parallel.reduce=hierarchical with parallel.strategy=replicate: it sums what is sharded, and nothing is; "
                "set parallel.strategy=full_shard, or leave reduce out"
            )
        return self

    @property
    def gathers_fp8(self) -> bool:
        """Whether weights are gathered in 8 bits."""
        return self.precision == "fp8" and self.fp8_scaling == "tensorwise" and self.fp8_gather is not False

    @model_validator(mode="after")
    def _recompute_every(self) -> Self:
        if (self.activation_checkpointing == "every_n") != (self.recompute_every is not None):
            raise ValueError(
                f"parallel.recompute_every={self.recompute_every} with "
                f"parallel.activation_checkpointing={self.activation_checkpointing}: every_n needs a recompute_every, "
                "and the other modes do not take one"
            )
        return self


def _written(value: object) -> str:
    """Return a value as it is written in a config file."""
    return str(value).lower() if isinstance(value, bool) else str(value)
