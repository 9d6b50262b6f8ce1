"""Which attention the run will try, and whether what it asks for is installed."""

from __future__ import annotations

from raytune_fsdp.doctor.finding import Finding, ok, problem


def check_kernels(asked: str, *, device: str) -> list[Finding]:
    """`asked` is model.attention. On GPUs a start tries each candidate before it takes one (model/trial.py)."""
    from raytune_fsdp.model.calls import PREFIX
    from raytune_fsdp.model.flash import FLASH, is_installed

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
        return [ok("attention", f"model.attention={asked}: torch's flash attention for CPUs, document by document")]
    there = [package for name, package in FLASH.items() if is_installed(name)]
    order = ", then ".join([*there, "torch's varlen_attn"])
    return [
        ok("attention", f"model.attention={asked}: the first of {order} that passes a trial on the GPU at the start")
    ]
