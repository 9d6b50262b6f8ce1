"""A kernel is tried, forward and backward, before a run relies on it; that its package is installed says little."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raytune_fsdp.base import collectives
from raytune_fsdp.base.batch import Borders
from raytune_fsdp.base.collectives import why_on_any_rank
from raytune_fsdp.config import FinetuneConfig, ParallelConfig
from raytune_fsdp.model.attention import flash
from raytune_fsdp.model.attention.calls import Call, Unfit, reference
from raytune_fsdp.model.attention.choose import Heads, KernelChoice, KernelNeeds, choose
from raytune_fsdp.model.attention.flash import is_installed, load
from raytune_fsdp.model.attention.kernel_trial import why_kernel_fails
from raytune_fsdp.model.attention.kernels import KERNELS
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.run.trials.needs import network_needs
from raytune_fsdp.step.precision import numerics
from tests.models import architecture
from tests.unit.test_probe import LARGE, wanted

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HALF = torch.bfloat16
PLAIN = Heads(many=4, keys=2, width=16)
SUNK = replace(PLAIN, sinks=True)
KINDS = (PLAIN, replace(PLAIN, window=128), replace(PLAIN, many=2, softcap=20.0))

BY_THE_BOOK = """
from raytune_fsdp.model.attention.calls import Call, reference
from raytune_fsdp.base.batch import Borders

def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap,
    deterministic=False,
):
    borders = Borders(starts=cu_seqlens_q, longest=max_seqlen_q)
    window = None if window_size[0] < 0 else window_size[0] + 1
    call = Call(borders=borders, scale=softmax_scale, window=window, softcap=softcap or None)
    return reference(q.float(), k.float(), v.float(), call).to(q.dtype)
"""

WITHOUT_BACKWARD = (
    BY_THE_BOOK.replace("def flash", "def _flash")
    + """
import torch

class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, given):
        return _flash_attn_varlen_func(q, k, v, **given)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no backward for heads of this width")

def flash_attn_varlen_func(q, k, v, **given):
    return _Function.apply(q, k, v, given)
"""
)


@pytest.fixture(autouse=True)
def device_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are tried on a CPU here, as if it were a Hopper; what was imported before is forgotten."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash, "_FUNCTIONS", {})
    yield
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Distributions with their modules on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(distribution: str, modules: dict[str, str]) -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        for path, code in modules.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(code)

    return write


VERSION_2 = {"flash_attn/__init__.py": BY_THE_BOOK, "flash_attn/cute/__init__.py": "import cutlass_that_is_not_here"}
"""As 2.8.3 is laid out: with the files of version 4, without what they import."""


def chosen(needs: KernelNeeds, asked: str = "auto", ranks: Callable[[str], str | None] | None = None) -> KernelChoice:
    fails = ranks or partial(why_kernel_fails, needs=needs, device=CPU, dtype=HALF)
    return choose(asked, needs, kept=None, device=GPU, dtype=HALF, fails=fails)


def test_files_of_another_version_are_not_that_version(install: Callable[..., None]) -> None:
    assert not is_installed("documents_fa2")
    install("flash-attn", VERSION_2)
    assert is_installed("documents_fa2") and not is_installed("documents_fa4") and not is_installed("documents_fa3")
    found = chosen(KernelNeeds(width=16, heads=KINDS))
    assert found.name == "documents_fa2" and "documents_fa4: flash-attn-4 is not installed" in found.why


def test_a_package_that_lacks_what_it_imports_is_passed_over(install: Callable[..., None]) -> None:
    install("flash-attn", VERSION_2)
    install("flash-attn-4", {})
    assert is_installed("documents_fa4")
    found = chosen(KernelNeeds(width=16, heads=KINDS))
    assert found.name == "documents_fa2"
    assert "documents_fa4: ModuleNotFoundError: No module named 'cutlass_that_is_not_here'" in found.why


def test_a_kernel_whose_backward_raises_is_passed_over(install: Callable[..., None]) -> None:
    install("flash-attn-3", {"flash_attn_interface.py": WITHOUT_BACKWARD})
    install("flash-attn", VERSION_2)
    found = chosen(KernelNeeds(width=16, heads=(PLAIN,)))
    assert found.name == "documents_fa2"
    assert "documents_fa3: NotImplementedError: no backward for heads of this width" in found.why


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (BY_THE_BOOK.replace("window=window", "window=None"), "result is off"),
        (BY_THE_BOOK.replace("k.float()", "k.float().detach()"), "appears to not have been used"),
        (BY_THE_BOOK + "    * q.new_tensor(float('nan'))", "result is off by nan"),
        (BY_THE_BOOK.replace("v.float()", "(2 * v - v.detach()).float()"), "gradient of values is off by 9"),
    ],
)
def test_a_kernel_that_computes_something_else_is_passed_over(
    install: Callable[..., None], wrong: str, what: str
) -> None:
    install("flash-attn", {"flash_attn/__init__.py": wrong.replace(".to(q.dtype)\n    *", ".to(q.dtype) *")})
    reason = why_kernel_fails("documents_fa2", KernelNeeds(width=16, heads=KINDS), CPU, HALF)
    assert reason is not None and what in reason


SUMS_IN_ANY_ORDER = (
    BY_THE_BOOK.replace("v.float()", "v.float() * (1 + 1e-3 * next(_calls))")
    + """
from itertools import count
_calls = count()
"""
)
WITHOUT_THE_ARGUMENT = BY_THE_BOOK.replace("    deterministic=False,\n", "")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (SUMS_IN_ANY_ORDER, "its result has other bits the second time, and run.deterministic or run.exact is set"),
        (WITHOUT_THE_ARGUMENT, "Unfit: this version of it has no argument for a backward that repeats its bits"),
    ],
    ids=["in any order", "no argument"],
)
def test_a_kernel_whose_bits_are_others_each_time_is_passed_over_where_they_matter(
    install: Callable[..., None], code: str, why: str
) -> None:
    install("flash-attn", {"flash_attn/__init__.py": code})
    found = partial(why_kernel_fails, "documents_fa2", KernelNeeds(width=16, heads=(PLAIN,)), CPU, HALF)
    assert found() is None
    with numerics(ParallelConfig(), CPU, deterministic=True):
        assert found() == why


def test_a_kernel_that_would_end_the_process_is_not_called(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("flash-attn-3", {"flash_attn_interface.py": BY_THE_BOOK})
    needs = KernelNeeds(width=16, heads=(PLAIN,))
    assert why_kernel_fails("documents_fa3", needs, CPU, HALF) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert why_kernel_fails("documents_fa3", needs, CPU, HALF) == "it is not for devices of capability 10.0"


def test_all_ranks_get_the_same_kernel(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank could use the first one, the other cannot."""
    install("flash-attn-3", {"flash_attn_interface.py": BY_THE_BOOK})
    install("flash-attn", VERSION_2)
    needs = KernelNeeds(width=16, heads=(PLAIN,))
    others = {"documents_fa4": "flash-attn-4 is not installed", "documents_fa3": "RuntimeError: of another device"}
    asked: list[str] = []

    def gathered(everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine, (others.get(asked[-1]), None)]

    def fails(name: str) -> str | None:
        asked.append(name)
        return why_on_any_rank(lambda: why_kernel_fails(name, needs, CPU, HALF))

    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collectives.dist, "all_gather_object", gathered)
    found = chosen(needs, ranks=fails)
    assert found.name == "documents_fa2"
    assert "(documents_fa4: flash-attn-4 is not installed; " in found.why
    assert "documents_fa3: on rank 1: RuntimeError: of another device" in found.why


def in_full(values: dict[str, Any]) -> KernelNeeds:
    config: FinetuneConfig = wanted(values)
    hf_config = load_architecture(config.model, None)
    return network_needs(config, hf_config, build_network(hf_config, config))


@pytest.mark.parametrize(
    ("values", "heads"),
    [
        ({"model_type": "llama", **LARGE, "num_hidden_layers": 3}, {(32, 8, 128, None, None, False)}),
        (architecture("gemma3_text"), {(4, 2, 8, None, None, False), (4, 2, 8, 16, None, False)}),
        (architecture("gemma2"), {(4, 2, 8, None, 5.0, False), (4, 2, 8, 16, 5.0, False)}),
        (architecture("gpt_oss"), {(4, 2, 8, None, None, True), (4, 2, 8, 16, None, True)}),
        (architecture("deepseek_v3"), {(4, 4, 16, None, None, False)}),
    ],
    ids=["llama", "gemma3", "gemma2", "gpt_oss", "deepseek_v3"],
)  # fmt: skip
def test_the_heads_tried_are_those_of_the_run(values: dict[str, Any], heads: set[tuple[Any, ...]]) -> None:
    """The small network has narrower heads and shorter windows than these."""
    needs = in_full(values)
    assert needs.refused is None
    assert {(h.many, h.keys, h.width, h.window, h.softcap, h.sinks) for h in needs.heads} == heads
    assert needs.width == max(width for _, _, width, *_ in heads)
    assert needs.sinks == any(sinks for *_, sinks in heads)


# --- In a compiled graph, and with sinks ------------------------------------------------------------------------------


def _forward(
    q: Any, k: Any, v: Any, starts: Any, _: Any, longest: int, __: int, dropout: float, causal: bool, ___: bool, *,
    scale: float, window_size_left: int, window_size_right: int, **more: Any,
) -> Any:  # fmt: skip
    """torch's flash attention over documents as its operation is called, by the book."""
    window = None if window_size_left < 0 else window_size_left + 1
    assert dropout == 0.0 and window_size_right == 0 and causal == (window is None)
    call = Call(borders=Borders(starts=starts, longest=longest), scale=scale, window=window)
    wide = [each.double() for each in (q, k, v)]
    # The score of a sink is known, so its weight in each sum tells the sum.
    none, one = reference(*wide, call), reference(*wide, replace(call, sinks=torch.zeros(q.shape[1])))
    share = (one * none).sum(-1) / (none * none).sum(-1)
    sums = torch.logit(share).transpose(0, 1).float().contiguous()
    return none.to(q.dtype), sums, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, starts: Any, _: Any, longest: int, __: int, dropout: float,
    causal: bool, rng: Any, unused: Any, *, scale: float, window_size_left: int, **more: Any,
) -> Any:  # fmt: skip
    """As a flash kernel does it: weights from scores and sums, and the rest from the results that it is given."""
    grad, wide_q, wide_k, wide_v, out = (each.double() for each in (grad, q, k, v, out))
    groups, tokens = q.shape[1] // k.shape[1], torch.arange(len(q))
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (wide_k, wide_v))
    document = torch.bucketize(tokens, starts[1:], right=True)
    seen = (document[:, None] == document) & (tokens[:, None] >= tokens)
    if window_size_left >= 0:
        seen &= tokens[:, None] - tokens <= window_size_left
    scores = torch.einsum("qhd,khd->hqk", wide_q, keys) * scale
    weights = (scores - sums.double()[..., None]).exp().masked_fill(~seen, 0)
    slopes = weights * (torch.einsum("qhd,khd->hqk", grad, values) - (grad * out).sum(-1).T[..., None]) * scale
    of_k, of_v = torch.einsum("hqk,qhd->khd", slopes, wide_q), torch.einsum("hqk,qhd->khd", weights, grad)
    grouped = [each.unflatten(1, (-1, groups)).sum(2).to(q.dtype) for each in (of_k, of_v)]
    return torch.einsum("hqk,khd->qhd", slopes, keys).to(q.dtype), *grouped


@pytest.fixture
def flash_of_torch() -> Iterator[None]:
    """torch's flash attention has no implementation for CPUs: while this lives, it has this one."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    yield
    library._destroy()


def test_torch_with_and_without_sinks(flash_of_torch: None) -> None:
    """Through torch's own varlen_attn; never run on a GPU here."""
    kinds = (PLAIN, replace(PLAIN, window=128), SUNK, replace(SUNK, window=128))
    for heads in kinds:
        for dtype in (HALF, torch.float32):
            assert why_kernel_fails("documents_varlen", KernelNeeds(width=16, heads=(heads,)), CPU, dtype) is None
    assert chosen(KernelNeeds(width=16, sinks=True, heads=kinds)).name == "documents_varlen"
    q, starts = torch.randn(6, 2, 16), torch.tensor([0, 6], dtype=torch.int32)
    _, sums = torch.ops.raytune_fsdp.varlen_attention_with_sinks(q, q, q, starts, 6, 0.3, 0, torch.zeros(2))
    assert sums.is_contiguous(), "as the fake says: a compiled step asserts it on a GPU"


@pytest.mark.parametrize("version", [2, 3, 4])
def test_kernels_without_a_gradient_of_their_sums_refuse_sinks(version: int) -> None:
    q = torch.zeros(4, 2, 8)
    borders = Borders(starts=torch.tensor([0, 4], dtype=torch.int32), longest=4)
    with pytest.raises(Unfit, match="attention sinks"):
        KERNELS[f"documents_fa{version}"](q, q, q, Call(borders=borders, scale=1.0, sinks=torch.zeros(2)))


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("documents_fa2", PLAIN),
        ("documents_fa2", replace(PLAIN, window=4)),
        ("documents_varlen", PLAIN),
        ("documents_varlen", replace(PLAIN, window=4)),
        ("documents_varlen", SUNK),
        ("documents_cpu", SUNK),
    ],
)
def test_no_kernel_breaks_a_graph(name: str, heads: Heads, install: Callable[..., None], flash_of_torch: None) -> None:
    install("flash-attn", VERSION_2)
    load(name)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(KERNELS[name], backend=backend, fullgraph=True)
    tensors = [torch.randn(64, many, 16, requires_grad=True) for many in (heads.many, heads.keys, heads.keys)]
    for lengths in ([30, 34], [1, 20, 43], [10, 20, 24, 10], [64]):
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        borders = Borders(starts=starts, longest=max(lengths))
        sinks = torch.randn(heads.many, requires_grad=True) if heads.sinks else None
        call = Call(borders=borders, scale=0.3, window=heads.window, sinks=sinks)
        out = compiled(*tensors, call)
        torch.testing.assert_close(out, KERNELS[name](*tensors, call))
        out.sum().backward()
    assert len(graphs) <= 2, "one for the first micro-batch, one for all"
    assert all(each.grad is not None for each in tensors)
