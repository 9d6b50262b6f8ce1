"""`method`: which weights are trained."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from raytune_fsdp.config.rules import Section, check_expression, model_place
from raytune_fsdp.config.text import Plain, listed

ALL_LINEAR = "all-linear"

Names = Annotated[list[str], AfterValidator(lambda names: sorted(set(names)))]
"""Names whose order means nothing: a run with another order is the same run."""


def _never_expression(value: Any) -> Any:
    """Read text of the form `[a, b]` as the list of these names: as an expression it would match one character."""
    items = listed(value.strip()) if isinstance(value, str) else None
    return value if items is None else [each.text if isinstance(each, Plain) else each for each in items]


_NAMES = ("trained", "target_modules", "target_parameters", "modules_to_save", "feedforward_modules")


def unordered(field: str, value: Any) -> Any:
    """Return a field's value as configs have it now: older identities have names in the order of the config."""
    names = field in _NAMES and isinstance(value, list) and all(isinstance(each, str) for each in value)
    return sorted(set(value)) if names else value


class MethodSection(Section):
    """What a method can be combined with. FinetuneConfig refuses the rest."""

    takes_fp8: ClassVar[bool] = True
    """Whether `parallel.precision: fp8` is for it: layers that are trained."""

    takes_cut_layers: ClassVar[bool] = False
    """Whether it knows layers of which each rank has a part (`parallel.mesh.tensor`)."""


class FullMethod(MethodSection):
    takes_cut_layers = True

    type: Literal["full"] = "full"
    """Every weight is trained."""

    routers: Literal["trained", "frozen"] | None = None
    """Of a mixture of experts: whether the modules that choose experts are trained. Null: as the other weights. With LoRA
    `trained` trains them whole, along with the adapters, and null gives those an adapter that `target_modules` means."""


class FreezeMethod(MethodSection):
    takes_cut_layers = True

    type: Literal["freeze"]
    """Some of the weights are trained; the others stay as they are."""

    trained: Names = Field(min_length=1)
    """Regular expressions. A weight is trained if one of them is found in its name: `layers\\.(30|31)\\.`, `lm_head`."""

    @model_validator(mode="after")
    def _expressions(self) -> Self:
        for each in self.trained:
            check_expression("method.trained", each)
        return self


class LoraMethod(MethodSection):
    takes_fp8, takes_cut_layers = False, True

    type: Literal["lora"]
    """Low-rank adapters on frozen weights, by PEFT: small checkpoints, little optimizer state."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""

    alpha: int = Field(default=32, ge=1)
    """An adapter's output is multiplied by `alpha / rank`, or with `rank_stabilized` by `alpha / sqrt(rank)`."""

    rank_stabilized: bool = False
    """Divide by the square root of the rank (rsLoRA), so that higher ranks do not learn more slowly."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of an adapter."""

    target_modules: Annotated[str | Names, BeforeValidator(_never_expression)] = ALL_LINEAR
    """Modules that get an adapter: `all-linear` (all linear layers but the head and those whose weight is read past them), a
    list of names (`q_proj` stands for all modules whose name ends in it), or one regular expression for whole names."""

    target_parameters: Names = Field(default_factory=list)
    """Weights that get an adapter although they are not modules of their own, by the end of their names: the experts of a
    mixture, for example `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`."""

    modules_to_save: Names = Field(default_factory=list)
    """Modules that are trained whole, along with the adapters, by the end of their names: `lm_head`, `embed_tokens`."""

    routers: Literal["trained", "frozen"] | None = None
    """Of a mixture of experts: whether the modules that choose experts are trained whole, along with the adapters. Null:
    they get an adapter if `target_modules` means them (most are no linear layers), and else are frozen."""

    train_added_tokens: bool = False
    """Along with the adapters, train the rows of `model.add_tokens` in embedding and head, and no other rows of these."""

    dora: bool = False
    """Train the length of every weight's rows separately from their direction (DoRA)."""

    lr_ratio: float | None = Field(default=None, ge=1)
    """LoRA+: the learning rate of an adapter's second matrix, as a multiple of `optim.lr`; 16 is usual. Null: 1."""

    init: Literal["zero", "pissa", "olora"] = "zero"
    """What a new adapter begins as. `zero`: it changes nothing. `pissa`, `olora`: the largest part of the weight, which is
    taken out of the weight and trained; by singular values, or by a QR decomposition."""

    adapter: Annotated[str, AfterValidator(model_place)] | None = None
    """Directory of an adapter in PEFT's format to begin with, with the same rank and targets. Null: a new adapter."""

    @model_validator(mode="after")
    def _targets(self) -> Self:
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            check_expression("method.target_modules", self.target_modules)
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                f"method.target_modules and method.target_parameters are empty, so nothing would be trained: "
                f"set method.target_modules={ALL_LINEAR}"
            )
        return self

    @model_validator(mode="after")
    def _beginning(self) -> Self:
        if self.init == "zero":
            return self
        for field, value in (
            ("dora", self.dora),
            ("target_parameters", self.target_parameters),
            ("adapter", self.adapter),
        ):
            if value:
                shown = "true" if value is True else value
                raise ValueError(
                    f"method.init={self.init} cannot be used with method.{field}={shown}: "
                    f"set method.init=zero, or leave method.{field} out"
                )
        return self

    @model_validator(mode="after")
    def _experts(self) -> Self:
        if self.target_parameters and (self.dropout or self.dora):
            field = f"method.dropout={self.dropout:g}" if self.dropout else "method.dora=true"
            raise ValueError(
                f"{field} cannot be used with method.target_parameters: an adapter of a weight has no input of its own; "
                f"{'set method.dropout=0' if self.dropout else 'set method.dora=false'}, or leave target_parameters out"
            )
        return self


class QloraMethod(LoraMethod):
    takes_cut_layers = False

    type: Literal["qlora"]  # type: ignore[assignment]
    """LoRA on weights that are quantized while they are loaded, in a quarter of the memory that LoRA needs for them. A
    merged export starts from the weights as they are stored, not from quantized ones."""

    quantization: Literal["nf4", "int8"] = "nf4"
    """Type of the frozen linear layers: `nf4` takes 0.52 bytes a number, `int8` takes 1.03."""


class Ia3Method(MethodSection):
    type: Literal["ia3"]
    """One factor for each channel of a few layers, by PEFT: less than a tenth of LoRA's parameters."""

    target_modules: Names | None = Field(default=None, min_length=1)
    """Names of the modules that get factors. Null: PEFT's choice for the architecture (keys, values, and the last layer of
    each feed-forward)."""

    feedforward_modules: Names | None = None
    """Which of `target_modules` have their input multiplied instead of their output. Null: PEFT's choice."""

    modules_to_save: Names = Field(default_factory=list)
    """Modules that are trained whole, along with the factors, by the end of their names."""

    adapter: Annotated[str, AfterValidator(model_place)] | None = None
    """Directory of an IA3 adapter in PEFT's format to begin with. Null: a new adapter."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.target_modules is None) != (self.feedforward_modules is None):
            raise ValueError(
                "method.target_modules and method.feedforward_modules belong together: set both, or neither"
            )
        strange = [name for name in self.feedforward_modules or () if name not in (self.target_modules or ())]
        if strange:
            raise ValueError(f"method.feedforward_modules: {strange[0]!r} is not among method.target_modules: add it")
        return self


AdapterMethod = LoraMethod | Ia3Method
"""Methods that train adapters on frozen weights."""

Method = Annotated[FullMethod | FreezeMethod | LoraMethod | QloraMethod | Ia3Method, Field(discriminator="type")]
