"""What blocks compute again in backward, and what happens where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model import compiler as compiler_module
from raytune_fsdp.model import offload
from raytune_fsdp.model.blocks import blocks_of, run_blocks
from raytune_fsdp.model.compiler import COMPILED, EAGER, Compiler, choose_blocks, why_it_fails

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def saved_and_flops(mode: str, every: int | None = None) -> tuple[int, int]:
    """Bytes that four blocks of an 8B keep for backward, and the operations of backward, on tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM, LlamaConfig

    with FakeTensorMode():
        config = LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=100, attn_implementation="sdpa",
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        run_blocks(model, recompute=mode, every=every)
        tracker, operations = MemTracker(), FlopCounterMode(display=False)
        tracker.track_external(model)
        with tracker:
            ids, positions = torch.zeros(1, 2048, dtype=torch.long), torch.arange(2048)[None]
            loss = model(input_ids=ids, position_ids=positions, use_cache=False).logits.sum()
            kept = {str(kind): size for kind, size in tracker.get_tracker_snapshot("current")[CPU].items()}
            with operations:
                loss.backward()
    return next(size for kind, size in kept.items() if kind.endswith("ACT")), operations.get_total_flops()


@pytest.mark.thorough
def test_selective_saves_much_for_few_operations() -> None:
    (none, least), (full, most), (selective, some) = map(saved_and_flops, ("none", "full", "selective"))
    assert none - selective >= 0.4 * (none - full), "memory that full saves"
    assert some - least <= (most - least) / 3, "operations that full repeats"
    every, half = saved_and_flops("every_n", 2)
    assert full < every < none
    assert least < half < most


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Network(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_only_training_uses_the_compiler() -> None:
    calls: list[nn.Module] = []

    class Counting(Compiler):
        def compiled(self, forward: object) -> object:  # type: ignore[override]
            def run(block: nn.Module, *args: object) -> object:
                calls.append(block)
                return forward(block, *args)  # type: ignore[operator]

            return run

    model = Network()
    run_blocks(model, compiler=Counting())  # type: ignore[arg-type]
    model.eval()(torch.ones(4))
    assert not calls
    model.train()(torch.ones(4))
    assert calls == blocks_of(model)  # type: ignore[arg-type]


@pytest.fixture
def broken_compiler() -> Iterator[None]:
    import torch._inductor.config as config

    torch._dynamo.reset()
    with config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        yield
    torch._dynamo.reset()


def test_without_a_compiler_blocks_run_eagerly(broken_compiler: None) -> None:
    reason = why_it_fails(CPU)
    assert reason is not None and reason.startswith("torch.compile fails here: ")
    chosen = choose_blocks(True, kept=None, device=CPU, fails=lambda: reason)
    assert (chosen.name, chosen.why) == (EAGER, reason)


def test_a_compiler_that_fails_later_gives_way(broken_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler()
    model = Network()
    run_blocks(model, compiler=compiler)  # type: ignore[arg-type]
    model.train()
    for _ in range(2):
        model(torch.ones(4, requires_grad=True)).sum().backward()
    assert model.blocks[3].weight.grad is not None
    assert compiler.failure is not None
    assert len([record for record in caplog.records if record.name.startswith("raytune_fsdp")]) == 1, "said once"
    assert compiler.news()[1] == compiler.failure
    assert compiler.news()[1] is None


def test_what_ran_before_a_failure_does_not_move_the_random_numbers() -> None:
    """A graph may break in two, of which the first runs, with its dropout, before the second fails to compile."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(len(graphs))
        if len(graphs) == 2:
            raise RuntimeError("no code for this one")
        return graph.forward

    drawn: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x, 0.5)
        torch._dynamo.graph_break()
        drawn.append(x)
        return nn.functional.dropout(x * 2, 0.5)

    x = torch.ones(256)
    torch.manual_seed(0)
    right, after = block(x), torch.rand(4)
    drawn.clear()
    compiler = Compiler()
    with patch.object(compiler_module.torch, "compile", partial(torch.compile, backend=backend)):
        fast = compiler.compiled(block)
    torch.manual_seed(0)
    assert torch.equal(fast(x), right) and torch.equal(torch.rand(4), after)
    assert compiler.failure is not None and len(graphs) == 2, "it failed in the second graph"


def test_past_the_limit_of_graphs_blocks_run_eagerly() -> None:
    compiler = Compiler()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        function = compiler.compiled(lambda x: x * 2)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert function(torch.ones(1, dtype=dtype)).item() == 2.0
    assert compiler.failure is not None and "limit" in compiler.failure.lower()


@pytest.mark.parametrize(
    ("asked", "kept", "device", "name"),
    [
        ("auto", None, CUDA, COMPILED),
        ("auto", None, CPU, EAGER),
        ("auto", EAGER, CUDA, EAGER),
        ("auto", COMPILED, CUDA, COMPILED),
        ("auto", COMPILED, CPU, EAGER),
        (True, EAGER, CPU, COMPILED),
        (False, COMPILED, CUDA, EAGER),
    ],
)
def test_a_run_keeps_what_it_began_with(asked: bool | str, kept: str | None, device: torch.device, name: str) -> None:
    assert choose_blocks(asked, kept=kept, device=device, fails=lambda: None).name == name


def test_every_n_needs_its_n() -> None:
    with pytest.raises(ValueError, match="every_n needs a recompute_every"):
        ParallelConfig(activation_checkpointing="every_n")
    with pytest.raises(ValueError, match="the other modes do not take one"):
        ParallelConfig(recompute_every=2)


class Looped(Network):
    """Runs its blocks twice in a pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("network", [Network, Looped])
def test_offload_gives_back_what_a_block_kept(network: type[Network], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_SMALLEST", 1)
    gradients = []
    for away in (False, True):
        torch.manual_seed(0)
        model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_()
        run_blocks(model, offload=offload.Offload(CPU) if away else None)  # type: ignore[arg-type]
        wide = torch.rand(3, 8, requires_grad=True)
        model.train()(wide[:, ::2]).sum().backward()
        gradients.append([wide.grad, *(parameter.grad for parameter in model.parameters())])
    for kept, fetched in zip(*gradients, strict=True):
        assert torch.equal(kept, fetched)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_experts_that_add_their_bias_in_place(mode: str) -> None:
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
    )  # fmt: skip
    gradients = []
    for how in ("none", mode):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
        run_blocks(model, recompute=how)
        model(input_ids=torch.arange(16)[None], use_cache=False).logits.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None)
