"""Checks on the facts that nodes report (`node.py`). Pure functions of these facts."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from raytune_fsdp.tools.doctor import node
from raytune_fsdp.tools.doctor.finding import Finding, many, ok, problem, warning

Facts = Mapping[str, Any]

DECIDING = ("torch", "transformers", "tokenizers", "ray")
"""Packages whose version must be the same on all nodes: they decide the numbers, or how nodes talk."""
_JUDGED_EXTRAS = ("peft", "mlflow", "accelerate", "flash-attn")
_GIB = 1 << 30
_NO_SHM, _LITTLE_SHM = 1 << 27, 2 << 30
"""Docker gives 64 MiB. NCCL takes about 10 MiB per GPU there, and Ray's object store wants 30 % of the memory."""
_NO_FILES, _FEW_FILES = 1024, 4096
"""Ray opens a connection for each worker; its own advice is 65,536."""
_CLOCK_WARNS, _CLOCK_FAILS = 2.0, 300.0
"""Seconds. S3 refuses requests that are 15 minutes off, and Kerberos tickets and tokens after 5."""
_BF16_FROM, _FP8_FROM = 8.0, 8.9
"""The least compute capability with units for bf16 (A100; before it torch emulates bf16), and for fp8."""


def own_requirements() -> list[str]:
    """Return the requirements of this package, from its source or from its installation."""
    source = Path(__file__).parents[3] / "pyproject.toml"
    if source.is_file():
        project = tomllib.loads(source.read_text(encoding="utf-8"))["project"]
        optional = [
            each for name in ("lora", "mlflow", "large", "flash") for each in project["optional-dependencies"][name]
        ]
        return [*project["dependencies"], *optional]
    try:
        return requires("raytune-fsdp") or []
    except PackageNotFoundError:
        return []


def check_versions(facts: Facts, required: Sequence[str]) -> list[Finding]:
    """Check the packages of a machine against what this package needs."""
    from packaging.requirements import Requirement

    found, have = [], facts["packages"]
    for text in required:
        each = Requirement(text)
        fix = f"pip install '{each.name}{each.specifier}'"
        if each.name not in have and each.name in DECIDING:
            found.append(problem("versions", f"{each.name} is not installed", fix))
        elif each.name in have and not each.specifier.contains(have[each.name], prereleases=True):
            make = warning if each.name in _JUDGED_EXTRAS else problem
            said = f"{each.name} {have[each.name]} is installed, and this version works with {each.specifier}"
            found.append(make("versions", said, fix))
    if not required:
        found.append(
            warning(
                "versions", "nothing here says which versions are needed: raytune-fsdp is not installed",
                "pip install raytune-fsdp in this environment",
            )
        )  # fmt: skip
    own = facts["own"] or ("not installed", "")
    shown = ", ".join(f"{name} {have[name]}" for name in (*DECIDING, "peft", "mlflow") if name in have)
    return found or [ok("versions", f"Python {facts['python']}, raytune_fsdp {own[0]}, {shown}")]


def check_same(nodes: Mapping[str, Facts], here: Facts) -> list[Finding]:
    """Check that nodes have the packages of this machine, on which the run is started."""
    found = []
    for name, facts in nodes.items():
        differing = list(_differing(facts, here))
        if not differing:
            continue
        hard = any(deciding for deciding, _ in differing)
        said = f"node {name}: {', '.join(text for _, text in differing)}"
        fix = f"{'; '.join(_ways(facts, here))}; then restart Ray on that node (better: one image for all nodes)"
        found.append((problem if hard else warning)("same", said, fix))
    return found or [ok("same", f"{many(len(nodes), 'node')} with the same Python, packages and code as here")]


def _differing(facts: Facts, here: Facts) -> Iterator[tuple[bool, str]]:
    """Yield what is not the same, each with whether it must be."""
    if facts["python"] != here["python"]:
        same_minor = facts["python"].rpartition(".")[0] == here["python"].rpartition(".")[0]
        yield not same_minor, f"Python {facts['python']} (here {here['python']})"
    own, ours = facts["own"], here["own"]
    if own is None:
        yield True, "raytune_fsdp is not there"
    elif ours is not None and own != ours:
        what = (
            f"{own[0]} (here {ours[0]})"
            if own[0] != ours[0]
            else f"{own[0]} with other code (hash {own[1]}, here {ours[1]})"
        )
        yield True, f"raytune_fsdp {what}"
    names = {**facts["packages"], **here["packages"]}
    for name in names:
        there, mine = facts["packages"].get(name), here["packages"].get(name)
        if there != mine:
            yield name in DECIDING, f"{name} {there or 'missing'} (here {mine or 'missing'})"


def _ways(facts: Facts, here: Facts) -> Iterator[str]:
    """Yield commands that give a node what this machine has."""
    if facts["python"] != here["python"]:
        yield f"make the environment there again with Python {here['python']}"
    wanted = {name: version for name, version in here["packages"].items() if facts["packages"].get(name) != version}
    if wanted:
        # Builds for one CUDA, or for none, are not on PyPI.
        local = wanted.get("torch", "").partition("+")[2]
        index = f" --extra-index-url https://download.pytorch.org/whl/{local}" if local else ""
        pins = " ".join(f"{name}=={version}" for name, version in wanted.items())
        yield f"there: {facts['executable']} -m pip install {pins}{index}"
    if extra := [name for name in facts["packages"] if name not in here["packages"]]:
        yield f"there: {facts['executable']} -m pip uninstall {' '.join(extra)}"
    if facts["own"] != here["own"]:
        yield "install there the raytune_fsdp that is here: the same commit"


def check_limits(facts: Facts, where: str) -> list[Finding]:
    """Check /dev/shm and the limit of open files of a machine."""
    found = []
    shm, (soft, hard) = facts["shm"], facts["open_files"]
    if shm is not None and shm < _LITTLE_SHM:
        make = problem if shm < _NO_SHM else warning
        size = f"{shm / _GIB:.1f} GiB" if shm >= _GIB else f"{shm / (1 << 20):.0f} MiB"
        said = f"{where}: /dev/shm has {size}; NCCL and Ray's object store keep shared memory there"
        found.append(
            make(
                "limits",
                said,
                "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory at /dev/shm), or "
                "as root: mount -o remount,size=8G /dev/shm",
            )
        )
    # Ray raises the soft limit of its processes to the hard one.
    if hard < _FEW_FILES and hard >= 0:
        make = problem if hard < _NO_FILES else warning
        said = f"{where}: a process may open {hard:,} files (limit now {soft:,}); Ray and the data need more"
        found.append(
            make(
                "limits",
                said,
                "before `ray start`, as root: ulimit -Hn 65536 (a container: --ulimit nofile=65536; a systemd unit: "
                "LimitNOFILE=65536)",
            )
        )
    return found


def check_clocks(offsets: Mapping[str, float]) -> list[Finding]:
    """Check the nodes' clocks. `offsets`: by node, the seconds by which its clock is off at least."""
    found = []
    for name, seconds in offsets.items():
        if abs(seconds) > _CLOCK_WARNS:
            make = problem if abs(seconds) > _CLOCK_FAILS else warning
            said = (
                f"node {name}: its clock is {abs(seconds):,.0f} s {'ahead' if seconds > 0 else 'behind'}: times in "
                "logs do not match, and object stores refuse requests that are 15 minutes off"
            )
            found.append(
                make("clocks", said, "on that node: sudo chronyc makestep (or: sudo timedatectl set-ntp true)")
            )
    return found or [ok("clocks", f"{many(len(offsets), 'node')}, no clock more than {_CLOCK_WARNS:g} s off")]


def check_gpus(facts: Facts, where: str, *, device: str | None) -> list[Finding]:
    """Check the GPUs of a machine, and whether torch can use them. `device`: what the run asks for; None: no run."""
    gpus, seen = facts["gpus"], facts["torch"] or {}
    if (facts["smi"] or "").startswith(node.NOT_CHECKED):
        alone = "run nvidia-smi there: if it hangs, the driver does (reboot); if not, run doctor again"
        return [warning("GPUs", f"{where}: {facts['smi']}", alone)]
    if facts["smi"]:
        return [
            problem(
                "GPUs",
                f"{where}: {facts['smi']}",
                "run nvidia-smi there; usually driver and kernel do not match after an update: reboot, or install the "
                "driver again",
            )
        ]
    if not gpus:
        if device == "cuda":
            return [
                problem(
                    "GPUs",
                    f"{where}: no NVIDIA GPU, and cluster.device=cuda",
                    "set cluster.device=cpu, or start the run where GPUs are; in a container: --gpus all",
                )
            ]
        return [ok("GPUs", f"{where}: none, so it computes on the CPU")]
    kinds: dict[str, int] = defaultdict(int)
    for gpu in gpus:
        mib = _number(gpu["mib"])  # "[N/A]" where it is the host's, as on a DGX Spark
        kinds[f"{gpu['name']} ({'size not known' if mib is None else f'{mib / 1024:.0f} GiB'})"] += 1
    has = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if seen.get("error", "").startswith(node.NOT_CHECKED):
        said = f"{where}: {has}, driver {gpus[0]['driver']}; whether torch can use them was {seen['error']}"
        return [warning("GPUs", said, "run there: python -c 'import torch; print(torch.cuda.device_count())'")]
    if seen.get("count", 0) < len(gpus):
        why = seen.get("error") or f"it sees {seen.get('count', 0)}; built for CUDA {seen.get('cuda')}"
        return [
            problem(
                "GPUs", f"{where}: {has}, driver {gpus[0]['driver']}, but torch cannot use them ({why})",
                "install a torch that is built for a CUDA this driver has (pip install torch --index-url "
                "https://download.pytorch.org/whl/cu126), or a newer driver",
            )
        ]  # fmt: skip
    if len({gpu["name"] for gpu in gpus}) > 1:
        return [
            warning(
                "GPUs",
                f"{where}: GPUs of several kinds: {has}; every step waits for the slowest",
                "set cluster.accelerator_type, or CUDA_VISIBLE_DEVICES before `ray start`",
            )
        ]
    said = f"{where}: {has}, driver {gpus[0]['driver']}, torch for CUDA {seen.get('cuda')}, NCCL {seen.get('nccl')}"
    return [ok("GPUs", said)]


def check_bf16(facts: Facts, where: str, precision: str) -> list[Finding]:
    """Check that the GPUs have bf16 or fp8, if the run computes in it."""
    if precision == "fp8":
        without = _gpus_below(_FP8_FROM, facts)
        said = f"{where}: {without[0] if without else ''} has no fp8, and parallel.precision=fp8: a run is refused"
        return [problem("fp8", said, "set parallel.precision=bf16 (or fp16)")] if without else []
    old = _gpus_below(_BF16_FROM, facts)
    if not old or precision not in ("bf16", "bf16_pure"):
        return []
    said = f"{where}: {old[0]} has no bf16, and parallel.precision={precision}: torch would emulate it, slowly"
    return [problem("bf16", f"{said}, and no flash kernel runs", "set parallel.precision=fp16 (or fp32)")]


def _gpus_below(capability: float, facts: Facts) -> list[str]:
    """Return the names of the GPUs of which it is known that they have less."""
    known = [(gpu["name"], _number(gpu["capability"])) for gpu in facts["gpus"]]
    return [name for name, its in known if its is not None and its < capability]


def _number(text: str) -> float | None:
    """Return a number that nvidia-smi has printed; None for "[N/A]" and the like."""
    try:
        return float(text)
    except ValueError:
        return None


# Which attention the run will try, and whether its package is installed.


def check_kernels(asked: str, *, device: str, elsewhere: bool = False) -> list[Finding]:
    """Say which attention a run will try. `asked` is model.attention.

    On GPUs a start tries each candidate before it takes one (model/attention/kernel_trial.py).
    `elsewhere`: this machine has no GPU, but machines of the Ray cluster may have some.
    """
    from raytune_fsdp.model.attention.calls import PREFIX
    from raytune_fsdp.model.attention.flash import FLASH, is_installed

    if elsewhere and asked.startswith("flash_attention_"):
        return [ok("attention", f"model.attention={asked}: this machine has no GPU; nodes with GPUs are asked")]
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
    if _is_settled(asked):
        return [ok("attention", f"{asked}, as model.attention says")]
    if device == "cpu":
        return [ok("attention", f"model.attention={asked}: on a CPU torch's flash attention, document by document")]
    return [_tried(asked, [package for name, package in FLASH.items() if is_installed(name)], "")]


def _is_settled(asked: str) -> bool:
    return asked not in ("auto", "documents") and not asked.startswith("flash_attention_")


def check_packages(asked: str, packages: Mapping[str, str], where: str) -> Finding:
    """Say which attention a run will try on a node with GPUs, by the packages that it has."""
    from raytune_fsdp.model.attention.calls import PREFIX
    from raytune_fsdp.model.attention.flash import FLASH

    if _is_settled(asked):
        return ok("attention", f"{where}: {asked}, as model.attention says")
    if not asked.startswith("flash_attention_"):
        return _tried(asked, [name for name in FLASH.values() if name in packages], f"{where}: ")
    package = FLASH[f"{PREFIX}fa{asked[-1]}"]
    if package in packages or asked[-1] == "3":  # version 3 comes in several distributions
        return ok("attention", f"{where}: {package} {packages.get(package, '')}, as model.attention={asked} says")
    fix = f"pip install {package} there (on a machine with the CUDA toolkit of torch), or set model.attention=auto"
    return problem("attention", f"{where}: model.attention={asked}, but {package} is not installed", fix)


def _tried(asked: str, packages: Sequence[str], where: str) -> Finding:
    order = ", then ".join([*packages, "torch's varlen_attn"])
    return ok(
        "attention", f"{where}model.attention={asked}: {order}; the first that passes a trial on the GPU is taken"
    )
