"""What blocks compute again in backward, and what happens where nothing can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import ParallelConfig
from raytune_fsdp.model import compile_layers as compiler_module
from raytune_fsdp.model import offload_activations
from raytune_fsdp.model.compile_layers import (
    COMPILED,
    EAGER,
    Compiler,
    choose_compilation,
    settings_restored,
    why_not_compiled_here,
)
from raytune_fsdp.model.layers import layers_of, set_training_forward
from tests.gpu.test_memory import WHERE_KEPT

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
        set_training_forward(model, recompute=mode, every=every)
        tracker, operations = MemTracker(), FlopCounterMode(display=False)
        tracker.track_external(model)
        with tracker:
            ids, positions = torch.zeros(1, 2048, dtype=torch.long), torch.arange(2048)[None]
            loss = model(input_ids=ids, position_ids=positions, use_cache=False).logits.sum()
            kept = {str(kind): size for kind, size in tracker.get_tracker_snapshot("current")[CPU].items()}
            with operations:
                loss.backward()
    return next(size for kind, size in kept.items() if kind.endswith("ACT")), operations.get_total_flops()


@pytest.mark.slow
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
    set_training_forward(model, compiler=Counting())  # type: ignore[arg-type]
    model.eval()(torch.ones(4))
    assert not calls
    model.train()(torch.ones(4))
    assert calls == layers_of(model)  # type: ignore[arg-type]


@pytest.fixture
def broken_compiler() -> Iterator[None]:
    import torch._inductor.config as config

    torch._dynamo.reset()
    with config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        yield
    torch._dynamo.reset()


def test_without_a_compiler_blocks_run_eagerly(broken_compiler: None) -> None:
    reason = why_not_compiled_here(CPU)
    assert reason is not None and reason.startswith("torch.compile fails here: ")
    chosen = choose_compilation(True, kept=None, device=CPU, fails=lambda: reason)
    assert (chosen.name, chosen.why) == (EAGER, reason)


def test_a_compiler_that_fails_later_gives_way(broken_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler()
    model = Network()
    set_training_forward(model, compiler=compiler)  # type: ignore[arg-type]
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


def test_past_the_limit_of_graphs_blocks_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # the limit is that of any backend
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
    assert choose_compilation(asked, kept=kept, device=device, fails=lambda: None).name == name


def test_an_exact_run_that_began_without_the_compiler_goes_on_without_it() -> None:
    for asked in (True, "auto"):
        chosen = choose_compilation(asked, kept=EAGER, device=CUDA, fails=lambda: None, exact=True)
        assert (chosen.name, chosen.why) == (EAGER, "as the run began")
    assert choose_compilation(True, kept=None, device=CPU, fails=lambda: None, exact=True).name == COMPILED


def test_in_an_exact_run_a_break_is_an_error_since_other_ranks_may_go_on_compiled() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    with (
        settings_restored(),
        pytest.raises(ConfigError, match=r"torch\.compile fails here: .*parallel\.compile=false"),
    ):
        Compiler(exact=True).compiled(layer)(torch.ones(4))


def test_in_an_exact_run_a_short_micro_batch_is_not_compiled() -> None:
    """Whatever shape its layers get: here one more axis before the tokens."""
    embedding = nn.Embedding(9, 8)
    with settings_restored():
        compiler = Compiler(exact=True, tokens=12)
        layer = compiler.compiled(lambda x: x.sin())
        compiler.watch(SimpleNamespace(get_input_embeddings=lambda: embedding))  # type: ignore[arg-type]
        for tokens, graphs in ((8, 0), (12, 1), (4, 0), (12, 0)):
            states = embedding(input=torch.zeros(1, tokens, dtype=torch.int64))
            layer(x=states.expand(4, -1, -1, -1))
            assert compiler.news() == (graphs, None)


def test_every_n_needs_its_n() -> None:
    with pytest.raises(ValueError, match="every_n needs a recompute_every"):
        ParallelConfig(activation_checkpointing="every_n")
    with pytest.raises(ValueError, match="the other modes do not take one"):
        ParallelConfig(recompute_every=2)


@pytest.mark.parametrize("name", WHERE_KEPT)
def test_the_config_takes_what_is_tried_on_a_gpu(name: str) -> None:
    """Where nobody runs those tests, they are not to fail of a config that has changed."""
    ParallelConfig.model_validate(WHERE_KEPT[name])


class Looped(Network):
    """Runs its blocks twice in a pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("network", [Network, Looped])
def test_offload_gives_back_what_a_block_kept(network: type[Network], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "_SMALLEST", 1)
    gradients = []
    for away in (False, True):
        torch.manual_seed(0)
        model = network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_()
        set_training_forward(model, offload=offload_activations.Offload(CPU) if away else None)  # type: ignore[arg-type]
        wide = torch.rand(3, 8, requires_grad=True)
        model.train()(wide[:, ::2]).sum().backward()
        gradients.append([wide.grad, *(parameter.grad for parameter in model.parameters())])
    for kept, fetched in zip(*gradients, strict=True):
        assert torch.equal(kept, fetched)


def test_offload_leaves_weights_that_ranks_have_parts_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP frees their memory behind the block, with a copy of it still on its way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from raytune_fsdp.launch.worker import alone
    from raytune_fsdp.model.pieces.sums import local_weight

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (1,))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ local_weight(self.weight)

    def keep(tensor: torch.Tensor, host: torch.Tensor) -> offload_activations._Away:
        sent.append(tensor)
        return offload_activations._Away(host, CPU)

    monkeypatch.setattr(offload_activations, "_SMALLEST", 1)
    sent: list[torch.Tensor] = []
    with alone(CPU):
        away, layer, x = offload_activations.Offload(CPU), Layer(), torch.ones(2, 8, requires_grad=True)
        with patch.object(away, "_send", keep), away.of(0, layer):
            layer(x)
    assert [tensor.shape for tensor in sent] == [x.shape]


class Story(offload_activations.Copies):
    """What is copied, and what waits for which copies, in the order in which the host asks for it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.marks = 0

    def behind_compute(self) -> AbstractContextManager[None]:
        self.told.append("copy")
        return nullcontext()

    def mark(self) -> int:
        self.marks += 1
        self.told.append(f"mark {self.marks}")
        return self.marks

    def hold_compute(self, mark: int) -> None:
        self.told.append(f"wait {mark}")


def test_a_host_that_is_ahead_does_not_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block waits for the copies of the last but one; what comes back, for backward to be in the block behind it."""
    monkeypatch.setattr(offload_activations, "_SMALLEST", 1)
    story, model = Story(), Network()
    away = offload_activations.Offload(CPU, story)
    set_training_forward(model, offload=away)  # type: ignore[arg-type]
    for number, block in enumerate(model.blocks):
        block.register_full_backward_hook(lambda *_, number=number: story.told.append(f"done {number}"))
    out = model.train()(torch.ones(4, requires_grad=True))
    assert story.told == [
        "copy", "mark 1",
        "copy", "mark 2", "wait 1",
        "copy", "mark 3", "wait 2",
        "copy", "mark 4", "wait 3",
    ]  # fmt: skip
    story.told.clear()
    out.sum().backward()
    assert story.told == [
        "wait 4", "copy", "mark 5", "copy", "mark 6", "wait 5", "done 3",
        "copy", "mark 7", "wait 6", "done 2",
        "copy", "mark 8", "wait 7", "done 1",
        "wait 8", "done 0",
    ]  # fmt: skip
    assert not away._leaving and not away._coming


def test_a_backward_pass_that_was_left_holds_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "_SMALLEST", 1)
    story, model = Story(), Network()
    set_training_forward(model, offload=(away := offload_activations.Offload(CPU, story)))  # type: ignore[arg-type]
    model.train()

    class LeftError(Exception):
        pass

    def leave(*_: object) -> None:
        raise LeftError

    handle = model.blocks[3].register_full_backward_hook(leave)
    with pytest.raises(LeftError):
        model(torch.ones(4, requires_grad=True)).sum().backward()
    handle.remove()
    assert list(away._coming) == [2], "fetched for a block that backward did not come to"
    story.told.clear()
    model(torch.ones(4, requires_grad=True)).sum().backward()
    assert story.told[:3] == ["wait 6", "copy", "mark 7"], "its copy is over before its memory is something else's"
    assert not away._leaving and not away._coming


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
        set_training_forward(model, recompute=how)
        model(input_ids=torch.arange(16)[None], use_cache=False).logits.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None)


class Products(TorchDispatchMode):
    """Counts the products of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.name().startswith("aten::_grouped_mm")
        return function(*args, **(kwargs or {}))


def test_selective_keeps_the_products_of_experts() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    # As in Qwen3-30B-A3B, their first product narrows and their last one does not.
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, attn_implementation="eager",
        experts_implementation="grouped_mm",
    )  # fmt: skip
    gradients, counts = [], []
    for how in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        set_training_forward(model, recompute=how)
        loss = model(input_ids=torch.arange(16)[None], use_cache=False).logits.sum()
        with Products() as products:
            loss.backward()
        counts.append(products.count)
        gradients.append([parameter.grad for parameter in model.parameters()])
    none, selective, full = counts
    assert selective == none > 0, "in backward, those of gradients alone"
    assert full == none + 2 * 2, "two products in each of two blocks"
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True) if a is not None)
