"""Compiled forward passes that fall back to plain ones: a compiler may be missing, or fail, and the run goes on.

One graph serves all layers of a kind. Every micro-batch has borders of another length, and the graph is made for any
length from the first one on. What is compiled later is counted and reported.

In a run with `run.exact` no bit may depend on what a process has met before, or on which rank fails: there the short
last micro-batch of a run, for which another graph may be made or none, is not compiled, and a failure ends the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.compiler.config
import torch.distributed as dist
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from raytune_fsdp.base.beat import pulse
from raytune_fsdp.base.errors import ConfigError, in_one_line
from raytune_fsdp.model.attention.choose import KernelChoice

logger = logging.getLogger(__name__)

Forward = Callable[..., Any]
"""A layer's forward pass, called with the layer."""

COMPILED, EAGER = "compiled", "eager"

_BORDERS = r".*\['(cu_seq_lens|max_length)_[qk]'\]"
"""Where documents begin and the longest one, by the names under which transformers passes them to layers."""

_MOST_GRAPHS = 16
"""Most graphs of one function. Layers with two kinds of attention, with and without experts, frozen and trained, use up
torch's 8."""


def choose_compilation(
    asked: bool | str,
    *,
    kept: str | None,
    device: torch.device,
    fails: Callable[[], str | None],
    exact: bool = False,
) -> KernelChoice:
    """Choose whether the layers of a run are compiled.

    `kept` says how the run's checkpoint was trained; None: there is no checkpoint yet. `fails` returns why nothing can
    be compiled here, or None. `exact`: compiled layers round otherwise, so a run that began without goes on without.
    """
    if asked is False:
        return KernelChoice(name=EAGER, why="as parallel.compile says")
    if kept == EAGER and (exact or asked == "auto"):
        return KernelChoice(name=EAGER, why="as the run began")
    if asked == "auto" and device.type != "cuda":
        return KernelChoice(name=EAGER, why="parallel.compile=auto compiles on GPUs")
    failure = fails()
    if failure is not None:
        return KernelChoice(name=EAGER, why=failure)
    why = "as parallel.compile says" if asked is True else "as the run began" if kept else "faster on GPUs"
    return KernelChoice(name=COMPILED, why=why)


def compilers_of(
    kernels: Mapping[str, KernelChoice], *, exact: bool, tokens: int
) -> tuple[Compiler | None, Compiler | None]:
    """Return what compiles the layers and the updates, where they are to be compiled. `tokens`: of a micro-batch."""
    layers, updates = (key in kernels and kernels[key].name == COMPILED for key in ("blocks", "update"))
    return (
        Compiler(exact=exact, tokens=tokens if exact else None) if layers else None,
        Compiler("the update of a weight") if updates else None,  # whose bits are those of its operations
    )


def why_not_compiled_here(device: torch.device) -> str | None:
    """Return why this machine cannot compile for this device, or None."""
    compiler = Compiler()
    try:
        weight = torch.ones(8, device=device, requires_grad=True)
        compiler.compiled(lambda weight: (weight * 2).relu())(weight).sum().backward()
    except Exception as error:  # a rank that ends here would leave the others waiting for its answer
        compiler.give_up(error)
    return compiler.failure


_SETTINGS = (
    (torch._dynamo.config, "recompile_limit"),
    (torch._dynamo.config, "fail_on_recompile_limit_hit"),
    (torch._functorch.config, "force_non_lazy_backward_lowering"),
    (torch._inductor.config, "fallback_random"),
    (torch._inductor.config.cpp, "threads"),
    (torch.compiler.config, "dynamic_sources"),
)
"""The settings that a `Compiler` changes for its process."""


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restore the compiler's settings afterwards, so that the caller's own compilations are as if no run had been."""
    before = [getattr(config, name) for config, name in _SETTINGS]
    try:
        yield
    finally:
        for (config, name), value in zip(_SETTINGS, before, strict=True):
            setattr(config, name, value)
        callback_handler.start_callbacks = [each for each in callback_handler.start_callbacks if each != _begins]
        callback_handler.end_callbacks = [each for each in callback_handler.end_callbacks if each != _ends]


def _begins(_: object) -> None:
    """Note that torch compiles, which may take half an hour in a single call."""
    pulse().computing += 1


def _ends(_: object) -> None:
    pulse().computing -= 1


def _random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the CPU's random state, and that of this rank's GPU if it has one. Neither waits for the device."""
    on_a_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), torch.cuda.get_rng_state() if on_a_gpu else None


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


class Compiler:
    """Compiles functions when they are first called, and gives up for all of them when that fails once."""

    def __init__(
        self, what: str = "the layers of this network", *, exact: bool = False, tokens: int | None = None
    ) -> None:
        """`exact`: all ranks must compute alike. Whatever is compiled must be one graph, as after a break nothing says
        what may vary, and failures are errors. `tokens`: those of a micro-batch; shorter ones are not compiled.
        """
        self.failure: str | None = None
        """Why it gave up."""
        self._what, self._exact, self._tokens = what, exact, tokens
        self._called = self._short = False
        torch._dynamo.reset()  # graphs of an earlier run in this process would not be counted
        # The reset has removed these callbacks if they were there.
        callback_handler.register_start_callback(_begins)
        callback_handler.register_end_callback(_ends)
        self._graphs = self._told = 0
        self._said = False
        # These settings hold for the process until `settings_restored` ends. Past the limit torch would only log a line
        # and run eagerly what does not fit its graphs. What fails in backward could not be repeated without the
        # compiler, so backward is compiled with forward.
        torch._dynamo.config.recompile_limit = _MOST_GRAPHS
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._functorch.config.force_non_lazy_backward_lowering = True
        # The compiler's own random numbers differ: with dropout, a compiled layer would compute something else.
        torch._inductor.config.fallback_random = True
        if exact:  # torch 2.11 takes a kernel for other threads out of its cache, unless they are in its settings
            torch._inductor.config.cpp.threads = torch.get_num_threads()
        marked = torch.compiler.config.dynamic_sources
        if _BORDERS not in marked:
            torch.compiler.config.dynamic_sources = f"{marked},{_BORDERS}" if marked else _BORDERS

    def compiled(
        self, forward: Forward, *, draws: bool = True, whole: bool = False, options: dict[str, Any] | None = None
    ) -> Forward:
        """Return `forward`, compiled as long as that works.

        `draws`: it may draw random numbers. `whole`: it must be one graph. `options`: inductor's.
        """
        fast = torch.compile(forward, fullgraph=whole or self._exact, options=options)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.failure is None and not self._short:
                before, graphs = _random_state() if draws else None, counters["stats"]["unique_graphs"]
                self._called = True
                try:
                    return fast(*args, **kwargs)
                except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                    self.give_up(error)
                finally:
                    self._graphs += counters["stats"]["unique_graphs"] - graphs
                # The error is raised while something compiles: the whole function, or what comes after a break in its
                # graph. In the second case the part before the break has run, and has drawn random numbers that the
                # whole function is to draw again.
                if before is not None:
                    _set_random_state(before)
            return forward(*args, **kwargs)

        return run

    def watch(self, model: PreTrainedModel) -> None:
        """See at the embedding how many tokens there are: layers of different networks are given different shapes."""

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
            self._short = ids.numel() < (self._tokens or 0)

        if self._tokens is not None:
            model.get_input_embeddings().register_forward_pre_hook(look, with_kwargs=True)

    def give_up(self, why: Exception | str) -> None:
        """Run everything without the compiler from here on. Raise ConfigError if ranks would differ by it."""
        self.failure = why if isinstance(why, str) else f"torch.compile fails here: {in_one_line(why)}"
        if self._exact:
            raise ConfigError(
                f"{self.failure}; with run.exact=true no rank may go on without it, as it rounds otherwise: correct "
                "that, and the same command goes on with the same bits; parallel.compile=false goes on with others"
            )
        logger.warning("%s; the run goes on without it", self.failure)

    def agree(self) -> None:
        """Give up on all ranks if one did, or if there was nothing to compile in the first steps. Collective."""
        if self._called and not self._graphs and self.failure is None:
            # A layer's code may keep torch from following it, which raises nothing.
            self.give_up(f"torch.compile finds nothing to compile in {self._what}")
        gave_up = torch.tensor(float(self.failure is not None))
        dist.all_reduce(gave_up)
        if gave_up and self.failure is None:
            self.give_up("torch.compile has failed on another rank")

    def news(self) -> tuple[int, str | None]:
        """Return how many graphs were compiled since the last call, and why this gave up if it did since then."""
        graphs, self._told = self._graphs - self._told, self._graphs
        failure, self._said = None if self._said else self.failure, self.failure is not None
        return graphs, failure
