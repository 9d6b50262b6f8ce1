"""Hybrids train packed: their state mixers begin anew with each document."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next

from raytune_fsdp.base import collectives
from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.model.attention.choose import KernelChoice, KernelNeeds, logits_of, set_attention
from raytune_fsdp.model.attention.mixers import BY_DOCUMENT, WITH_BORDERS, Documents, split_mixers
from raytune_fsdp.model.layers import set_training_forward
from raytune_fsdp.model.network import build_network, load_architecture
from raytune_fsdp.model.objective.loss import plain_losses
from raytune_fsdp.model.proof import LENGTHS, documents, leak_between_documents
from raytune_fsdp.model.split.cuts import check_cut
from raytune_fsdp.model.split.sequence import check_sequence
from raytune_fsdp.record.console import ConsoleTracker
from raytune_fsdp.run.open_record import _report_kernels
from raytune_fsdp.run.trials import mixers as trials
from raytune_fsdp.run.trials.mixers import KNOWN, check_bits, choose_mixers, find_mixers, why_borders_fail
from raytune_fsdp.run.trials.needs import network_needs
from raytune_fsdp.run.trials.probe import fill_small
from tests.models import ARCHITECTURES, EXPERTS, SCALED, SEEING, architecture, build
from tests.unit.test_probe import check, wanted

CPU = torch.device("cpu")
MIXERS = {
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "jamba": "JambaMambaMixer",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "bamba": "BambaMixer",
    "mamba2": "Mamba2Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "zamba": "ZambaMambaMixer",
    "zamba2": "Zamba2MambaMixer",
}
TRIED = ("qwen3_next", "falcon_h1", "jamba", "lfm2")
"""One of each kind: a delta rule, both Mambas, and a convolution."""


def some_of(*names: str) -> list[Any]:
    """Each of `MIXERS`; all but these are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]


def values_of(name: str) -> dict[str, Any]:
    return {"model_type": name, **SEEING[name]} if name in SEEING else architecture(name)


def on_meta(name: str, precision: str = "fp32", **options: Any) -> tuple[PreTrainedModel, KernelNeeds]:
    config = wanted(values_of(name), packing="best_fit", precision=precision, **options)
    hf_config = load_architecture(config.model, None)
    network = build_network(copy.deepcopy(hf_config), config)
    return network, network_needs(config, hf_config, network)


def filled(network: PreTrainedModel) -> PreTrainedModel:
    """No gradient is near zero, so that differences can be relative."""
    fill_small(network)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.1)
    return network


@pytest.mark.parametrize("name", some_of(*TRIED, "qwen3_5", "granitemoehybrid"))
def test_its_mixers_are_found_and_it_may_pack(name: str) -> None:
    if name in SEEING:
        network, needs = on_meta(name)
    else:
        needs = check(values_of(name), packing="best_fit", precision="fp32")  # the whole check of a start
    assert needs.mixers == (MIXERS[name],)
    assert needs.refused is None


def test_all_of_them_are_known() -> None:
    """Which counts where nothing can be tried."""
    assert {*MIXERS.values()} <= {*KNOWN}


@pytest.mark.parametrize("name", [*ARCHITECTURES, *EXPERTS, *SCALED])
def test_networks_without_mixers_have_none(name: str) -> None:
    assert on_meta(name)[1].mixers == ()
    model = build(name)
    assert find_mixers(model) == (), "attention, experts and norms are none"


def test_nothing_is_split_where_nothing_is_packed() -> None:
    needs = check(values_of("falcon_h1"), packing="none", precision="fp32")
    assert needs.mixers == () and needs.refused == "it needs more than borders to compute the same"


def packed_and_alone(
    name: str, precision: str, recompute: str
) -> tuple[float, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The leak of the start's own check; losses and all gradients of packed documents, and of each document alone."""
    network, needs = on_meta(name, precision)
    alone = filled(network).train()
    packed = copy.deepcopy(alone)
    set_training_forward(packed, recompute=recompute)
    set_attention(packed, KernelChoice(name="documents_cpu", why=""))
    split_mixers(packed, needs.mixers)
    with torch.no_grad():
        leak = leak_between_documents(packed.eval(), CPU)
    batch = documents(packed.train(), CPU)
    losses = plain_losses(logits_of(packed, batch.input_ids, batch.position_ids, batch.borders), batch)
    losses.total.backward()
    alone.set_attn_implementation("eager")
    right = []
    for ids in batch.input_ids.flatten().split([length for row in LENGTHS for length in row]):
        logits = alone(input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False).logits[0]
        right.append(F.cross_entropy(logits[:-1], ids[1:], reduction="none"))
    torch.cat(right).sum().backward()
    gradients = [
        torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        for model in (packed, alone)
    ]
    return leak, (losses.each, gradients[0]), (torch.cat(right).detach(), gradients[1])


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", some_of(*TRIED))
def test_losses_and_gradients_are_those_of_documents_alone(name: str, precision: str) -> None:
    """In fp64 what is left is what transformers computes in fp32: norms, and states of most mixers."""
    recompute = {"qwen3_next": "full", "falcon_h1": "selective"}.get(name, "none")
    leak, found, right = packed_and_alone(name, precision, recompute)
    assert leak == 0.0
    for what, ours, theirs in zip(("losses", "gradients"), found, right, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < {"fp32": 1e-6, "fp64": 2e-7}[precision], what


def test_a_convolution_in_fp64_is_that_of_documents_alone() -> None:
    """LFM2's mixer has nothing in fp32."""
    mixer = next(each for each in build("lfm2").modules() if type(each).__name__ == "Lfm2ShortConv")
    mixer.double().requires_grad_(False)
    states = torch.randn(1, 40, 32, dtype=torch.float64)
    lengths = (7, 1, 20, 12)
    right = torch.cat([mixer(each) for each in states.split(lengths, dim=1)], dim=1)
    packed = Documents(BY_DOCUMENT)
    trials.split_mixer(mixer, packed)
    assert float((mixer(states) - right).abs().max()) > 1e-3, "without borders it runs on"
    packed.begin(lengths, CPU)
    assert float((mixer(states) - right).abs().max() / right.abs().max()) < 1e-12
    packed.end()
    assert float((mixer(states) - right).abs().max()) > 1e-3


@pytest.mark.parametrize("lengths", [(1,), (5, 5, 5), (2000, 3, 2, 1), (40, 39, 38, 37, 1, 1, 80), tuple(range(1, 90))])
def test_every_token_is_computed_once_and_few_are_computed_in_vain(lengths: tuple[int, ...]) -> None:
    documents_ = Documents(BY_DOCUMENT)
    documents_.begin(lengths, CPU)
    row, computed = torch.arange(sum(lengths)), torch.cat([batch.flatten() for batch in documents_.batches])
    assert documents_.back is not None and torch.equal(computed[documents_.back], row)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for batch in documents_.batches:
        assert (number[batch] == number[batch[:, :1]]).all(), "documents side by side do not mix"
    assert len(computed) * 7 <= sum(lengths) * 8
    assert len(documents_.batches) <= len(lengths)


def test_two_networks_of_a_process_have_borders_of_their_own() -> None:
    first, second = (filled(on_meta("lfm2")[0]).eval() for _ in range(2))
    for each in (first, second):
        set_attention(each, KernelChoice(name="documents_cpu", why=""))
        split_mixers(each, ["Lfm2ShortConv"])
    batch = documents(first, CPU)
    with torch.no_grad():
        one = logits_of(first, batch.input_ids, batch.position_ids, batch.borders)
        other = logits_of(second, batch.input_ids[:1, :7], batch.position_ids[:1, :7])
        assert torch.equal(logits_of(first, batch.input_ids, batch.position_ids, batch.borders), one)
        assert other.shape[1] == 7


def test_a_text_is_generated_as_without_borders() -> None:
    network, needs = on_meta("qwen3_next")
    model = filled(network).eval()
    model.set_attn_implementation("eager")
    asked = {"input_ids": torch.arange(3, 9)[None], "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    right = model.generate(**asked)
    split_mixers(model, needs.mixers)
    batch = documents(model, CPU)
    with torch.no_grad():
        logits_of(model, batch.input_ids, batch.position_ids, batch.borders)  # of which nothing is left behind
    assert torch.equal(model.generate(**asked), right)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_samples_in_rows_are_kept_apart_too(attention: str) -> None:
    """transformers' own attention gets a sample in each row, and finds borders where positions restart."""
    network, needs = on_meta("qwen3_next", attention=attention)
    assert needs.mixers == ("Qwen3NextGatedDeltaNet",) and needs.refused == "model.attention says otherwise"
    model = filled(network).eval()
    model.set_attn_implementation(attention)
    with torch.no_grad():
        assert leak_between_documents(model, CPU) > 1e-3
        split_mixers(model, needs.mixers)
        assert leak_between_documents(model, CPU) == 0.0
    check(values_of("qwen3_next"), packing="best_fit", precision="fp32", attention=attention)


def test_attention_that_no_kernel_computes_is_no_reason_to_let_mixers_run_on() -> None:
    needs = check({**values_of("qwen3_next"), "attention_dropout": 0.1}, packing="best_fit", precision="fp32")
    assert needs.mixers == ("Qwen3NextGatedDeltaNet",) and needs.refused == "it has attention dropout"


def test_ranks_that_share_samples_or_layers_are_refused_by_name() -> None:
    network, needs = on_meta("qwen3_next")
    reason = r"state mixers \(Qwen3NextGatedDeltaNet\).*; set parallel\.mesh\.sequence=1$"
    with pytest.raises(ConfigError, match=rf"^parallel\.mesh\.sequence=2: .*{reason}"):
        check_sequence(2, needs)
    reason = reason.replace("sequence", "tensor")
    with pytest.raises(ConfigError, match=rf"^parallel\.mesh\.tensor=2: a Qwen3NextForCausalLM .*{reason}"):
        check_cut(2, network, needs)


def test_known_mixers_are_split_untried_where_a_package_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def for_gpus(*_: object, **__: object) -> None:
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", for_gpus)
    needs = on_meta("qwen3_next")[1]
    assert needs.mixers == ("Qwen3NextGatedDeltaNet",) and needs.refused == "it could not be tried"


# --- With borders -----------------------------------------------------------------------------------------------------

Function = Callable[..., Any]


def convolution(right: Function, *, leaks: bool) -> Function:
    """A stand-in for causal-conv1d's, which takes numbers of documents, or takes them and runs on."""

    def computed(states: torch.Tensor, *args: Any, seq_idx: torch.Tensor | None = None, **more: Any) -> Any:
        more.pop("cu_seq_lens_q", None)
        if seq_idx is None or leaks:
            return right(states, *args, **more)
        lengths = torch.bincount(seq_idx[0]).tolist()
        return torch.cat([right(each, *args, **more) for each in states.split(lengths, dim=-1)], dim=-1)

    return computed


def delta_rule(right: Function, *, leaks: bool = False) -> Function:
    """A stand-in for that of flash-linear-attention, which takes borders."""

    def computed(*qkv: torch.Tensor, g: Any, beta: Any, cu_seqlens: Any = None, **more: Any) -> Any:
        more.pop("seq_idx", None)
        if cu_seqlens is None or leaks:
            return right(*qkv, g=g, beta=beta, **more)
        lengths = cu_seqlens.diff().tolist()
        each = zip(*(tensor.split(lengths, dim=1) for tensor in (*qkv, g, beta)), strict=True)
        found = [right(q, k, v, g=g, beta=b, **more)[0] for q, k, v, g, b in each]
        return torch.cat(found, dim=1), None

    return computed


def tried(monkeypatch: pytest.MonkeyPatch, *, conv: bool, delta: bool, **method: Any) -> KernelChoice:
    """What is chosen on a device whose packages have these faults."""
    with monkeypatch.context() as patched:
        for name, stand_in in (
            ("causal_conv1d_fn", convolution(modeling_qwen3_next.causal_conv1d_fn, leaks=conv)),
            ("torch_chunk_gated_delta_rule", delta_rule(modeling_qwen3_next.torch_chunk_gated_delta_rule, leaks=delta)),
        ):
            patched.setattr(modeling_qwen3_next, name, stand_in)
        config = wanted(values_of("qwen3_next"), precision="fp32")
        config = FinetuneConfig.model_validate({**config.model_dump(), **({"method": method} if method else {})})
        network = build_network(load_architecture(config.model, None), config)
        names = ("Qwen3NextGatedDeltaNet",)
        return choose_mixers(
            network, names, kept=None, device=torch.device("cuda"),
            fails=lambda way: why_borders_fail(way, network, names, CPU, torch.float32),
        )  # fmt: skip


def test_kernels_whose_bits_are_others_each_time_are_refused_where_they_matter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a backward adds in any order."""
    network, names, calls = on_meta("qwen3_next")[0], ("Qwen3NextGatedDeltaNet",), count()
    right = modeling_qwen3_next.torch_chunk_gated_delta_rule
    monkeypatch.setattr(collectives, "on_all_ranks", lambda found: [found()])

    def in_any_order(*args: Any, **given: Any) -> Any:
        result, state = right(*args, **given)
        return result * (1 + 1e-6 * next(calls)), state

    check_bits(BY_DOCUMENT, network, names, CPU, torch.float32, begins=True)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", in_any_order)
    with pytest.raises(ConfigError, match="the result of Qwen3NextGatedDeltaNet has other bits the second time"):
        check_bits(BY_DOCUMENT, network, names, CPU, torch.float32, begins=True)
    assert not caplog.text

    def refused(*args: Any, **given: Any) -> Any:
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set ...")

    with monkeypatch.context() as on_gpus:
        on_gpus.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", refused)
        with pytest.raises(ConfigError, match="cumsum_cuda_kernel does not have .*; set both to false$"):
            check_bits(BY_DOCUMENT, network, names, CPU, torch.float32, begins=True)
    check_bits(BY_DOCUMENT, network, names, CPU, torch.float32, begins=False)
    assert "has other bits the second time" in caplog.text and "goes on as it began" in caplog.text


def test_kernels_that_take_borders_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tried(monkeypatch, conv=False, delta=False)
    assert chosen == KernelChoice(name="borders_cu_seq_lens_q", why="its kernels take borders")


def test_adapters_that_drop_are_no_reason_to_refuse_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    method = {"type": "lora", "rank": 4, "dropout": 0.5}
    assert tried(monkeypatch, conv=False, delta=False, **method).name == "borders_cu_seq_lens_q"


@pytest.mark.parametrize("what", ["conv", "delta"])
def test_kernels_of_which_one_runs_on_are_refused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    chosen = tried(monkeypatch, conv=what == "conv", delta=what == "delta")
    assert chosen.name == BY_DOCUMENT
    found = re.search(r"borders_cu_seq_lens_q: the result of Qwen3NextGatedDeltaNet is off by ([^ ]+)", chosen.why)
    assert found and float(found[1]) > 0.1, "in 16 bits 0.04 may be rounding"


def test_kernels_that_are_not_there_are_refused() -> None:
    network, needs = on_meta("qwen3_next")
    for way in WITH_BORDERS:
        assert why_borders_fail(way, network, needs.mixers, CPU, torch.float32) is not None


@pytest.mark.parametrize(
    "name",
    [
        "falcon_h1",
        "jamba",
        "lfm2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("granitemoehybrid", "nemotron_h")),
    ],
)
def test_mixers_that_do_not_take_borders_are_refused(name: str) -> None:
    """Jamba's takes none at all; without packages the others take them and raise."""
    network, needs = on_meta(name)
    for way in WITH_BORDERS:
        assert why_borders_fail(way, network, needs.mixers, CPU, torch.float32) is not None


def test_a_gradient_that_runs_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result may be right and its backward not."""
    right = convolution(modeling_qwen3_next.causal_conv1d_fn, leaks=False)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
            return states.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient + 0.1 * gradient.roll(1, dims=-1)

    monkeypatch.setattr(
        modeling_qwen3_next,
        "causal_conv1d_fn",
        lambda states, *args, **more: right(Backward.apply(states), *args, **more),
    )
    monkeypatch.setattr(
        modeling_qwen3_next,
        "torch_chunk_gated_delta_rule",
        delta_rule(modeling_qwen3_next.torch_chunk_gated_delta_rule),
    )
    network = on_meta("qwen3_next")[0]
    reason = why_borders_fail("borders_cu_seq_lens_q", network, ("Qwen3NextGatedDeltaNet",), CPU, torch.float32)
    assert reason is not None and reason.startswith("the gradient of ")


def test_a_run_goes_on_as_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    network = on_meta("lfm2")[0]
    asked: list[str] = []
    gpu = torch.device("cuda")
    names = ("Lfm2ShortConv",)
    by_document = choose_mixers(network, names, kept=BY_DOCUMENT, device=gpu, fails=lambda way: asked.append(way))
    assert by_document == KernelChoice(name=BY_DOCUMENT, why="as the run began") and not asked
    last = [*WITH_BORDERS][-1]
    chosen = choose_mixers(network, names, kept=last, device=gpu, fails=lambda way: asked.append(way))
    assert chosen == KernelChoice(name=last, why="as the run began") and asked == [last]


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cuda", "borders_cu_seqlens, as the run began: off by 0.3"),
        ("cpu", "borders_cu_seqlens, as the run began: needs"),
    ],
)
def test_a_way_that_the_run_began_with_and_that_fails_now_is_said_once(device: str, reason: str) -> None:
    chosen = choose_mixers(
        on_meta("lfm2")[0], ("Lfm2ShortConv",), kept="borders_cu_seqlens", device=torch.device(device),
        fails=lambda way: "off by 0.3",
    )  # fmt: skip
    assert chosen.name == BY_DOCUMENT and reason in chosen.why
    said = io.StringIO()
    _report_kernels(ConsoleTracker(said), {"mixers": chosen}, {"mixers": "borders_cu_seqlens"})
    (changed,) = said.getvalue().splitlines()
    assert changed.strip() == f"mixers is by_document ({chosen.why}), and was borders_cu_seqlens until here"


def test_another_way_says_why_it_is_not_that_of_before() -> None:
    chosen = choose_mixers(
        on_meta("lfm2")[0], ("Lfm2ShortConv",), kept="borders_cu_seqlens", device=torch.device("cuda"),
        fails=lambda way: "off by 0.3" if way == "borders_cu_seqlens" else None,
    )  # fmt: skip
    assert chosen.name == "borders_cu_seq_lens_q"
    assert chosen.why == "its kernels take borders (borders_cu_seqlens, as the run began: off by 0.3)"


def test_a_mixer_of_each_shape_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    network, needs = on_meta("mamba2")
    of_class = [each for each in network.modules() if type(each).__name__ in needs.mixers]
    found: list[nn.Module] = []

    def errors(way: str, model: PreTrainedModel, mixer: nn.Module, *_: Any) -> list[tuple[str, float]]:
        found.append(mixer)
        return [("the result", 1.0 if mixer is of_class[-1] else 0.0)]

    monkeypatch.setattr(trials, "_errors", errors)
    assert len(of_class) > 1 and why_borders_fail("any", network, needs.mixers, CPU, torch.float32) is None
    assert found == of_class[:1]
    of_class[-1].adapter = nn.Parameter(torch.empty(3, device="meta"))
    assert why_borders_fail("any", network, needs.mixers, CPU, torch.float32) is not None
