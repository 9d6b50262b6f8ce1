"""Which attention the run will try, and whether what it asks for is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytune_fsdp.tools.doctor.finding import Finding, ok, problem


def check_kernels(asked: str, *, device: str, elsewhere: bool = False) -> list[Finding]:
    """`asked` is model.attention. On GPUs a start tries each candidate before it takes one (model/attention/trial.py).
    `elsewhere`: this machine has no GPU, and Ray may know of some that have."""
    from raytune_fsdp.model.attention.calls import PREFIX
    from raytune_fsdp.model.attention.flash import FLASH, is_installed

    if elsewhere and asked.startswith("flash_attention_"):
        return [ok("attention", f"model.attention={asked}: this machine has no GPU, those with one are asked")]
    if asked.startswith("flash_attention_"):
        name = f"{PREFIX}fa{asked[-1]}"
        if not is_installed(name):
            return [
                problem(
                    "attention", f"model.attention={asked}, but {FLASH[name]} is not installed",
                    f"pip install {FLASH[name]} (on a machine with the CUDA toolkit of torch), or set "
                    "model.attention=auto",
                )
            ]  # fmt: skip
        if device == "cpu":
            return [
                problem(
                    "attention",
                    f"model.attention={asked} on a CPU: flash-attn runs on GPUs only",
                    "set model.attention=auto",
                )
            ]
    if asked in ("eager", "sdpa", "flex_attention"):
        return [ok("attention", f"{asked}, as model.attention says")]
    if device == "cpu":
        return [ok("attention", f"model.attention={asked}: on a CPU torch's flash attention, document by document")]
    return [_tried(asked, [package for name, package in FLASH.items() if is_installed(name)], "")]


def check_packages(asked: str, packages: Mapping[str, str], where: str) -> Finding:
    """The same for a node with GPUs, by the packages that it has."""
    from raytune_fsdp.model.attention.calls import PREFIX
    from raytune_fsdp.model.attention.flash import FLASH

    if asked in ("eager", "sdpa", "flex_attention"):
        return ok("attention", f"{where}: {asked}, as model.attention says")
    if not asked.startswith("flash_attention_"):
        return _tried(asked, [name for name in FLASH.values() if name in packages], f"{where}: ")
    package = FLASH[f"{PREFIX}fa{asked[-1]}"]
    if package in packages or asked[-1] == "3":  # which comes in several distributions
        return ok("attention", f"{where}: {package} {packages.get(package, '')}, as model.attention={asked} says")
    fix = f"pip install {package} there (on a machine with the CUDA toolkit of torch), or set model.attention=auto"
    return problem("attention", f"{where}: model.attention={asked}, but {package} is not installed", fix)


def _tried(asked: str, packages: Sequence[str], where: str) -> Finding:
    order = ", then ".join([*packages, "torch's varlen_attn"])
    return ok(
        "attention", f"{where}model.attention={asked}: {order}; the first that passes a trial on the GPU is taken"
    )
