"""Kernels that take document borders compute attention by the book, and wrong ones are found at the start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from raytune_fsdp.base.batch import Borders
from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.model.attention import flash, kernels
from raytune_fsdp.model.attention.calls import Call, reference
from raytune_fsdp.model.attention.choose import KernelChoice, KernelNeeds, choose, set_attention
from raytune_fsdp.model.attention.kernels import KERNELS, sdpa_by_document
from raytune_fsdp.model.proof import WINDOW, documents, error_of_kernel
from tests.models import build

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LENGTHS = [5, 1, 33, 16, 9]


def call(window: int | None = None, softcap: float | None = None) -> Call:
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return Call(borders=Borders(starts=starts, longest=max(LENGTHS)), scale=0.3, window=window, softcap=softcap)


def heads(dtype: torch.dtype, many: int, keys: int, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), n, width) for n in (many, keys, keys)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 4, 16, 33, 100])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("keys", [4, 2, 1])
def test_values_and_gradients_on_a_cpu(dtype: torch.dtype, bound: float, window: int | None, keys: int) -> None:
    asked = call(window)
    found, right = heads(dtype, 4, keys), [each.detach().double().requires_grad_() for each in heads(dtype, 4, keys)]
    weights = torch.randn(sum(LENGTHS), 4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, book = sdpa_by_document(*found, asked), reference(*right, asked)
    (ours * weights.to(dtype)).sum().backward()
    (book * weights).sum().backward()
    for a, b in zip([ours, *(x.grad for x in found)], [book, *(x.grad for x in right)], strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= bound * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("window", [None, 4])
def test_one_operation_for_the_compiler(window: int | None) -> None:
    """Neither how many documents there are nor how long they are makes another graph, and there is no break in it."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(sdpa_by_document, backend=backend, fullgraph=True)
    asked = call(window)
    q, k, v = heads(torch.float32, 4, 2)
    for lengths in (LENGTHS, [64], [32, 31, 1], [60, 4], [1] * 64):
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        now = replace(asked, borders=Borders(starts=starts, longest=max(lengths)))
        assert torch.equal(compiled(q, k, v, now), sdpa_by_document(q, k, v, now))
    assert len(graphs) <= 2, "one for the first shape of the borders, one for all"


def test_it_is_sound_as_an_operation() -> None:
    q, k, v = heads(torch.float64, 2, 2, width=8)
    starts = call().borders.starts
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    for window, also in ((0, None), (4, None), (0, sinks), (4, sinks)):
        torch.library.opcheck(kernels._by_document, (q, k, v, starts, 0.3, window, also))


class Fake(ModuleType):
    """A flash-attn that remembers what it is given, and computes it by the book."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.given: list[dict[str, Any]] = []

    def flash_attn_varlen_func(self, q: Any, k: Any, v: Any, **given: Any) -> torch.Tensor:
        self.given.append(given)
        before, after = given["window_size"]
        assert given["causal"] is True and after == 0
        assert given["cu_seqlens_q"].dtype == torch.int32 and given["cu_seqlens_q"] is given["cu_seqlens_k"]
        asked = Call(
            borders=Borders(starts=given["cu_seqlens_q"], longest=given["max_seqlen_q"]),
            scale=given["softmax_scale"],
            window=None if before < 0 else before + 1,
            softcap=given["softcap"] or None,
        )
        return reference(q, k, v, asked)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    module = Fake()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(flash, "_FUNCTIONS", {})
    return module


def test_what_flash_attention_is_given(fake: Fake) -> None:
    q, k, v = heads(torch.float32, 4, 2)
    for asked in (call(), call(window=4), call(softcap=20.0)):
        assert torch.equal(KERNELS["documents_fa2"](q, k, v, asked), reference(q, k, v, asked))
    assert [each["window_size"] for each in fake.given] == [(-1, 0), (3, 0), (-1, 0)]
    assert [each["softcap"] for each in fake.given] == [0.0, 0.0, 20.0]
    assert all((each["max_seqlen_q"], each["max_seqlen_k"]) == (33, 33) for each in fake.given)


def test_what_torch_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    given: dict[str, Any] = {}

    def varlen_attn(q: Any, k: Any, v: Any, *borders: Any, **options: Any) -> torch.Tensor:
        given.update(options, borders=borders)
        return q

    def of_2_12(q: Any, k: Any, v: Any, *borders: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
        return varlen_attn(q, k, v, *borders, enable_gqa=enable_gqa, **options)

    q, k, v = heads(torch.float32, 4, 2)
    for function, grouped in ((varlen_attn, None), (of_2_12, True)):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        monkeypatch.setattr(flash, "_FUNCTIONS", {})
        given.clear()
        KERNELS["documents_varlen"](q, k, v, call(window=4))
        assert given["window_size"] == (3, 0) and given["scale"] == 0.3 and given.get("enable_gqa") == grouped
        starts, again, longest, same = given["borders"]
        assert starts is again and (longest, same) == (33, 33)


def leaking(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Call) -> torch.Tensor:
    """Takes each row for a document, as a kernel does that looks for borders in a batch of one row only."""
    starts = torch.tensor([0, len(q) // 2, len(q)], dtype=torch.int32)
    return reference(q, k, v, replace(asked, borders=Borders(starts=starts, longest=len(q) // 2)))


def in_wide(kernel: Any) -> Any:
    """Computes as kernels do, in fp32 at least, and rounds at the end."""

    def computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Call) -> torch.Tensor:
        return kernel(q.float(), k.float(), v.float(), asked).to(q.dtype)

    return computed


def without_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Call) -> torch.Tensor:
    return reference(q, k, v, replace(asked, window=None))


def without_softcap(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asked: Call) -> torch.Tensor:
    return reference(q, k, v, replace(asked, softcap=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("architecture", "wrong"),
    [
        ("llama", leaking),
        ("mixtral", leaking),
        ("mistral", without_window),
        ("gemma3_text", without_window),
        ("gemma2", without_softcap),
    ],
)
def test_wrong_kernels_are_found_at_the_start(
    architecture: str, wrong: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytune_fsdp.run.trials import computation

    monkeypatch.setattr(computation, "on_all_ranks", lambda work: [work()])
    for kernel in (reference, wrong):
        monkeypatch.setitem(KERNELS, "documents_cpu", in_wide(kernel))
        model = build(architecture).to(dtype)
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "k_proj")):
                module.weight.data *= 30  # or the scores of small random weights would not reach a cap
        model.set_attn_implementation("documents_cpu")
        if kernel is reference:
            computation.check_computation(model, "none", CPU, dtype)
        else:
            with pytest.raises(ModelError, match=r"documents_cpu is wrong here.*set model\.attention=eager"):
                computation.check_computation(model, "none", CPU, dtype)
        assert model.config._attn_implementation == "documents_cpu"


def test_the_check_has_documents_longer_than_its_window() -> None:
    model = build("mistral")
    model.set_attn_implementation("documents_cpu")
    block = documents(model, torch.device("cpu"))
    assert block.borders.longest > WINDOW and block.input_ids.shape[0] == 2
    with torch.no_grad():
        assert 0 < error_of_kernel(model, CPU) < 1e-5


NONE, ALL, CAPPED = KernelNeeds(refused="it runs on"), KernelNeeds(width=128), KernelNeeds(width=128, softcap=True)
SUNK = KernelNeeds(width=128, sinks=True)


@pytest.mark.parametrize(
    ("asked", "needs", "kept", "device", "dtype", "working", "chosen"),
    [
        ("auto", ALL, None, CPU, torch.float32, (), "documents_cpu"),
        ("auto", ALL, None, GPU, torch.bfloat16, ("varlen",), "documents_varlen"),
        ("auto", ALL, None, GPU, torch.bfloat16, ("fa2", "varlen"), "documents_fa2"),
        ("auto", ALL, None, GPU, torch.float16, ("fa4", "fa2", "varlen"), "documents_fa4"),
        ("auto", ALL, None, GPU, torch.float32, ("fa2", "varlen"), ""),
        ("auto", NONE, None, CPU, torch.float32, (), ""),
        ("auto", CAPPED, None, CPU, torch.float32, (), ""),
        ("auto", CAPPED, None, GPU, torch.bfloat16, ("varlen",), ""),
        ("auto", ALL, None, GPU, torch.bfloat16, (), ""),
        ("auto", SUNK, None, CPU, torch.float32, (), "documents_cpu"),
        ("auto", SUNK, None, GPU, torch.bfloat16, ("fa4", "fa2", "varlen"), "documents_varlen"),
        ("auto", replace(SUNK, softcap=True), None, GPU, torch.bfloat16, ("fa4", "varlen"), ""),
        ("auto", CAPPED, None, GPU, torch.bfloat16, ("fa2", "varlen"), "documents_fa2"),
        ("auto", KernelNeeds(width=512), None, GPU, torch.bfloat16, ("fa2", "varlen"), ""),
        # A run that goes on keeps what it began with, if that is here.
        ("auto", ALL, "sdpa", CPU, torch.float32, (), "sdpa"),
        ("auto", ALL, "documents_varlen", GPU, torch.bfloat16, ("fa2", "varlen"), "documents_varlen"),
        ("auto", ALL, "documents_fa3", GPU, torch.bfloat16, ("varlen",), "documents_varlen"),
        ("auto", ALL, "documents_cpu", GPU, torch.bfloat16, ("varlen",), "documents_varlen"),
        ("auto", ALL, "flash_attention_2", GPU, torch.bfloat16, ("fa2", "varlen"), "flash_attention_2"),
        ("auto", ALL, "flash_attention_2", CPU, torch.float32, (), "documents_cpu"),
        # What the config says comes first.
        ("documents", ALL, "sdpa", CPU, torch.float32, (), "documents_cpu"),
        ("sdpa", ALL, "documents_cpu", CPU, torch.float32, (), "sdpa"),
        ("flash_attention_2", ALL, None, GPU, torch.bfloat16, ("fa2", "varlen"), "documents_fa2"),
        ("flash_attention_2", NONE, None, GPU, torch.bfloat16, ("fa2", "varlen"), "flash_attention_2"),
    ],
)  # fmt: skip
def test_which_attention_a_run_gets(
    asked: str, needs: KernelNeeds, kept: str | None, device: torch.device, dtype: torch.dtype,
    working: tuple[str, ...], chosen: str,
) -> None:  # fmt: skip
    def fails(name: str) -> str | None:
        return None if name.removeprefix("documents_") in working else "it is not here"

    found = choose(asked, needs, kept=kept, device=device, dtype=dtype, fails=fails)
    assert found.name == chosen and found.why


def works(name: str) -> None:
    return None


def test_documents_that_cannot_be_had_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"^model\.attention=documents: it runs on; set model\.attention=auto$"):
        choose("documents", NONE, kept=None, device=CPU, dtype=torch.float32, fails=works)
    with pytest.raises(ConfigError, match=r"compute in 16 bits, not in float32"):
        choose("documents", ALL, kept=None, device=GPU, dtype=torch.float32, fails=works)
    with pytest.raises(ConfigError, match=r"documents_fa4: no; documents_fa3: no; documents_fa2: no; documents_varlen"):
        choose("documents", ALL, kept=None, device=GPU, dtype=torch.bfloat16, fails=lambda name: "no")


def test_a_network_that_cannot_get_the_attention_of_its_run_is_refused() -> None:
    for name, way_out in (
        ("sdpa", r"set model\.attention=sdpa; "),
        ("flash_attention_2", "with flash-attn on all nodes; "),
    ):
        with pytest.raises(ConfigError, match=rf"a gptj keeps .* built with, here eager, .* has {name}: .*{way_out}"):
            set_attention(build("gptj"), KernelChoice(name=name, why="as the run began"))
    assert set_attention(build("gptj"), KernelChoice(name="eager", why="as the run began")).name == "eager"


def test_why_a_kernel_was_passed_over_is_in_the_choice() -> None:
    tried: list[str] = []

    def fails(name: str) -> str | None:
        tried.append(name)
        return None if name == "documents_fa2" else "no backward"

    found = choose("auto", ALL, kept="documents_varlen", device=GPU, dtype=torch.float16, fails=fails)
    assert tried == ["documents_varlen", "documents_fa4", "documents_fa3", "documents_fa2"]
    assert found.name == "documents_fa2"
    assert "documents_varlen: no backward; documents_fa4: no backward" in found.why
    found = choose("auto", ALL, kept=None, device=GPU, dtype=torch.float16, fails=lambda name: "not Ampere")
    assert found.name == "" and "documents_varlen: not Ampere" in found.why
