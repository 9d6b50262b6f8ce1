"""What each method takes: bytes of a rank, and processor time per token on a CPU; LoRA beside PEFT alone and TRL.

    python -m benchmarks.methods [--size 1b] [--rounds 9] [--passes 2] [--out benchmarks/results/methods.json]

The shape is that of Llama 3.2 1B (16 layers of width 2048, tied embeddings).

Bytes: the networks as a run assembles them (adapters, quantized layers, units of sharding, AdamW's state) for one rank
and for eight, with `full_shard` and bf16, on tensors without memory: what of weights, gradients, optimizer state and a
checkpoint is rank 0's, whose pieces are the largest. Nothing is estimated; activations and gathered weights are not in
it.

Time: of all threads of the process, as benchmarks/step.py counts it; one computing thread, fp32, one sample of 128
tokens a step, attention `sdpa`, the plain loss, no recomputation. For it the vocabulary is cut from 128,256 tokens to
8,192, so that training every weight fits into 23 GiB.

- LoRA of rank 16 on all linear layers, in turns step by step in one process: the bare loop is PEFT's own network with
  transformers' loss, clipping and fused AdamW; `ours` is `assemble` and `loop.train`; TRL is its SFTTrainer. They begin
  with the same adapter and have the same losses, or the script fails. The two bare loops and TRL share one base; the
  difference between the two loops is the noise. A round is some steps of each.
- every method, ours, in a process of its own, one after another, and in the other order in the next pass
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ranks import IMPORTED
from benchmarks.record import installed, write_result
from benchmarks.step import Clock, Turns
from raytune_fsdp.checkpoint.contents import tensors_of
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.demo import TOKENIZER
from raytune_fsdp.launch.worker import join
from raytune_fsdp.model.pieces.pieces import local_piece
from raytune_fsdp.plan.plan import resolve
from raytune_fsdp.plan.run_dir import RunDir
from raytune_fsdp.predict.subject import ModelSpec
from raytune_fsdp.predict.trace.trace import as_rank_of, assume_kernels, first_rank
from raytune_fsdp.record.jsonl import read_trajectory
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.build import build, optimizer_of
from raytune_fsdp.run.loop import train
from raytune_fsdp.run.prepare import prepare

CPU = torch.device("cpu")
SIZES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "tiny": {
        "vocab_size": 8192, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip
VOCABULARY, SEQ_LEN, LR, RANK, WARMUP_STEPS, WORLDS = 8192, 128, 2e-4, 16, 2, (1, 8)
LORA = {"type": "lora", "rank": RANK, "alpha": 2 * RANK}
BARE, BARE_AGAIN, OURS, TRL = "PEFT, bare loop", "PEFT, bare loop, again", "ours", "TRL"
T = TypeVar("T")
PARTS = ("weights", "gradients", "optimizer", "checkpoint")


def methods_of(size: str) -> dict[str, dict[str, Any]]:
    layers = SIZES[size]["num_hidden_layers"]
    return {
        "full": {"type": "full"},
        "freeze": {"type": "freeze", "trained": [rf"layers\.({layers - 2}|{layers - 1})\."]},
        "lora": LORA,
        "qlora nf4": {**LORA, "type": "qlora"},
        "qlora int8": {**LORA, "type": "qlora", "quantization": "int8"},
        "ia3": {"type": "ia3"},
    }


def architecture_of(size: str, vocabulary: int | None = None) -> dict[str, Any]:
    sizes = {**SIZES[size], "max_position_embeddings": 4096, "tie_word_embeddings": True, "use_cache": False}
    return {**sizes, "vocab_size": vocabulary or sizes["vocab_size"]}


def config_of(model: dict[str, Any], method: dict[str, Any], precision: str, **sections: Any) -> FinetuneConfig:
    values: dict[str, Any] = {
        "run": {"name": "run"},
        "model": {"attention": "sdpa", "loss": "plain", **model},
        "data": {"train": [{"path": "none"}]},
        "method": method,
        "parallel": {"precision": precision},
        # Of the adapters' size for all, so that nothing is warned of; it changes no time.
        "optim": {"lr": LR, "weight_decay": 0.0, "warmup_steps": 0, "schedule": {"type": "constant"}},
        "train": {"global_batch": 1, "micro_batch": 1, "max_steps": 1},
        "tracking": {"console": False, "mlflow": {"enabled": False}},
        "export": {"at_end": False},
    }
    return FinetuneConfig.model_validate({**values, **sections})


# --- Bytes ------------------------------------------------------------------------------------------------------------


def bytes_of(size: str, method: dict[str, Any], world: int) -> dict[str, int]:
    """Of rank 0. Starts a process group of its own that talks to nobody."""
    model = {"init": "random", "architecture": {"model_type": "llama", **architecture_of(size)}}
    config = config_of(model, method, "bf16", train={"global_batch": world, "micro_batch": 1, "max_steps": 1})
    spec, plan = ModelSpec.of(config), resolve(config, world)
    with as_rank_of(world):
        site, kernels = first_rank(plan, "cpu", 0, None), partial(assume_kernels, config, spec.needs, "cpu")
        built = build(config, spec.hf_config, spec.needs, site, kernels)
        network, optimizer = built.model, optimizer_of(built, config)
        optimizer.init_state()
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        return {
            "trained": sum(parameter.numel() for parameter in trained),
            "weights": sum(_nbytes(parameter) for parameter in network.parameters()),
            "gradients": sum(_nbytes(parameter) for parameter in trained),
            "optimizer": sum(_nbytes(tensor) for tensor in optimizer.state_tensors().values()),
            "checkpoint": sum(_nbytes(tensor) for tensor in tensors_of(network, optimizer).values()),
        }


def _nbytes(tensor: torch.Tensor) -> int:
    return local_piece(tensor).nbytes


# --- Inputs of the timings --------------------------------------------------------------------------------------------


def make_inputs(directory: Path, size: str, steps: int) -> np.ndarray:
    """Write a model, an adapter beside it and rows of tokens; the rows also as an array."""
    torch.manual_seed(0)
    network = LlamaForCausalLM(LlamaConfig(**architecture_of(size, VOCABULARY)))
    network.save_pretrained(directory / "model")
    head = "lm_head"
    linear = sorted({
        name.rpartition(".")[2] for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and name != head
    })  # fmt: skip
    network.name_or_path = str(directory / "model")
    adapted = get_peft_model(
        network, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=linear, task_type="CAUSAL_LM")
    )
    adapted.save_pretrained(str(directory / "adapter"))
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (steps, SEQ_LEN))
    with (directory / "rows.jsonl").open("w") as file:
        file.writelines(f'{{"input_ids": {row.tolist()}}}\n' for row in ids)
    return ids


def our_config(directory: Path, storage: Path, method: dict[str, Any], steps: int) -> FinetuneConfig:
    rows = {"path": str(directory / "rows.jsonl"), "format": {"type": "tokens", "labels": None}}
    return config_of(
        {"path": str(directory / "model"), "tokenizer": str(TOKENIZER)}, method, "fp32",
        run={"name": "run", "storage": str(storage)},
        data={"train": [rows], "seq_len": SEQ_LEN, "packing": "none", "shuffle": "none", "window": 1},
        train={"global_batch": 1, "micro_batch": 1, "max_steps": steps},
    )  # fmt: skip


# --- LoRA beside others -----------------------------------------------------------------------------------------------

Variant = Callable[[Callable[[], None]], list[float]]
"""Trains, calls what it is given at the start of every step, and returns the loss of every step."""


def adapted_copy(base: LlamaForCausalLM, directory: Path) -> PeftModel:
    """PEFT's network over the very weights of `base`, with adapters of its own."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in base.parameters()}
    network = PeftModel.from_pretrained(copy.deepcopy(base, shared), str(directory / "adapter"), is_trainable=True)
    network.train()
    return network


def bare(directory: Path, base: LlamaForCausalLM, ids: np.ndarray, on_step: Callable[[], None]) -> list[float]:
    network = adapted_copy(base, directory)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
    losses = []
    for batch in torch.from_numpy(ids)[:, None]:
        on_step()
        loss = network(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def ours(directory: Path, ids: np.ndarray, on_step: Callable[[], None]) -> list[float]:
    storage = Path(tempfile.mkdtemp(dir=directory))
    config = our_config(directory, storage, {**LORA, "adapter": str(directory / "adapter")}, len(ids))
    parts = assemble(config, *prepare(config, 1), CPU)
    train(parts, stop=on_step)
    parts.tracker.finish("finished")
    return [line["loss"] for line in read_trajectory(RunDir.of(config).metrics)]


def trl(directory: Path, base: LlamaForCausalLM, ids: np.ndarray, on_step: Callable[[], None]) -> list[float]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            on_step()

    arguments = SFTConfig(
        output_dir=str(directory / "trl"), per_device_train_batch_size=1, max_steps=len(ids), max_length=SEQ_LEN,
        learning_rate=LR, weight_decay=0.0, optim="adamw_torch_fused", lr_scheduler_type="constant", warmup_steps=0,
        max_grad_norm=1.0, train_sampling_strategy="sequential", logging_steps=1, report_to="none", save_strategy="no",
        use_cpu=True, bf16=False, gradient_checkpointing=False, packing=False, disable_tqdm=True,
    )  # fmt: skip
    run = SFTTrainer(
        model=adapted_copy(base, directory), args=arguments, callbacks=[Steps()],
        train_dataset=Dataset.from_dict({"input_ids": ids}), processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
    )  # fmt: skip
    run.train()
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def variants(directory: Path, ids: np.ndarray) -> dict[str, Variant]:
    base = LlamaForCausalLM.from_pretrained(directory / "model", dtype=torch.float32, attn_implementation="sdpa")
    found: dict[str, Variant] = {
        BARE: partial(bare, directory, base, ids),
        OURS: partial(ours, directory, ids),
        BARE_AGAIN: partial(bare, directory, base, ids),
    }
    if installed("trl") and installed("accelerate") and installed("datasets"):
        found[TRL] = partial(trl, directory, base, ids)
    else:
        print("no row of TRL: it is not installed")
    return found


def side_by_side(directory: Path, ids: np.ndarray, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per token of every variant in every round, taking turns step by step."""
    torch.set_num_threads(1)
    join(CPU, alone=True)
    chosen = variants(directory, ids)
    turns = Turns([*chosen])
    clocks = {name: Clock(partial(turns.next, name)) for name in chosen}

    def run(name: str) -> list[float]:
        try:
            turns.begin(name)
            return chosen[name](clocks[name])
        finally:
            turns.leave(name)

    with (
        ThreadPoolExecutor(len(chosen)) as pool,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        losses = dict(zip(chosen, pool.map(run, chosen), strict=True))
    for name, values in losses.items():
        np.testing.assert_allclose(values, losses[BARE], rtol=1e-5, err_msg=f"{name} trains something else")
    found = {}
    for name, clock in clocks.items():
        taken = np.array(clock.seconds[WARMUP_STEPS : WARMUP_STEPS + rounds * steps])
        found[name] = (taken.reshape(rounds, steps).mean(1) / SEQ_LEN).tolist()
    return found


def summarize(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median time per token and median ratio to the mean of the round's two bare loops, with the ratios' range."""
    base = [(a + b) / 2 for a, b in zip(found[BARE], found[BARE_AGAIN], strict=True)]
    table = {}
    for variant, values in found.items():
        ratios = [value / reference for value, reference in zip(values, base, strict=True)]
        spread = {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        table[variant] = {"ms_per_token": 1e3 * median(values), **spread}
    return table


# --- Every method -----------------------------------------------------------------------------------------------------


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call it in a process of its own, whose memory is free again afterwards."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(function, arguments)


class _EnoughError(Exception):
    pass


def time_method(directory: Path, method: dict[str, Any], steps: int) -> list[float]:
    """Seconds per token of each step. It ends without a checkpoint, for which `full` would need another 12 GB."""
    torch.set_num_threads(1)
    join(CPU, alone=True)
    clock, config = Clock(), our_config(directory, Path(tempfile.mkdtemp(dir=directory)), method, WARMUP_STEPS + 99)

    def stop() -> None:
        clock()
        if len(clock.seconds) == WARMUP_STEPS + steps:
            raise _EnoughError

    parts = assemble(config, *prepare(config, 1), CPU)
    with contextlib.suppress(_EnoughError):
        train(parts, stop=stop)
    return [seconds / SEQ_LEN for seconds in clock.seconds[WARMUP_STEPS:]]


def each_method(directory: Path, size: str, passes: int, steps: int) -> dict[str, list[float]]:
    """Seconds per token of the steps of all passes."""
    methods, found = methods_of(size), dict[str, list[float]]()
    for number in range(passes):
        for name in methods if number % 2 == 0 else reversed(methods):
            taken = apart(time_method, directory, methods[name], steps)
            found.setdefault(name, []).extend(taken)
            print(f"pass {number + 1}, load {os.getloadavg()[0]:.1f}: {name} {1e3 * median(taken):.2f} ms", flush=True)
    return {name: found[name] for name in methods if name in found}


# --- The page ---------------------------------------------------------------------------------------------------------


def show_bytes(table: dict[str, dict[int, dict[str, int]]]) -> None:
    print(f"\n{'MiB of a rank':12} {'ranks':>6}", *(f"{part:>11}" for part in ("trained, M", *PARTS)))
    for name, worlds in table.items():
        for world, row in worlds.items():
            sizes = " ".join(f"{row[part] / 2**20:11.1f}" for part in PARTS)
            print(f"{name:13} {world:6} {row['trained'] / 1e6:11.3f} {sizes}")


def show_lora(table: dict[str, dict[str, float]], rounds: int) -> None:
    print(f"\n{'LoRA':22}  ms/token  median ratio  range of {rounds} rounds")
    for variant, row in table.items():
        numbers = f"{row['ms_per_token']:8.3f}  {row['ratio']:12.4f}  {row['ratio_min']:.4f} to {row['ratio_max']:.4f}"
        print(f"{variant:22}  {numbers}")


def show_methods(each: dict[str, list[float]]) -> None:
    print(f"\n{'ours':12}  ms/token  of lora")
    for name, values in each.items():
        print(f"{name:12}  {1e3 * median(values):8.3f}  {median(values) / median(each['lora']):7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--rounds", type=int, default=9, help="of LoRA beside others; 0: none")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a variant in a round")
    parser.add_argument("--passes", type=int, default=2, help="over all methods, twice as many steps each; 0: none")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    size, rounds, steps = arguments.size, arguments.rounds, arguments.steps
    torch.set_num_threads(1)
    methods = methods_of(size)
    table = {name: {world: bytes_of(size, methods[name], world) for world in WORLDS} for name in methods}
    show_bytes(table)
    result = {"what": "bytes of rank 0 by method and number of ranks, bf16, full_shard", "size": size, "bytes": table}
    if rounds or arguments.passes:
        result["time"] = f"processor time, one thread, fp32, a sample of {SEQ_LEN} tokens, vocabulary of {VOCABULARY}"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        steps_there = WARMUP_STEPS + max(rounds * steps, 2 * steps) + 1
        ids = apart(make_inputs, directory, size, steps_there) if rounds or arguments.passes else None
        if rounds:
            found = apart(side_by_side, directory, ids, rounds, steps)
            shown = summarize(found)
            show_lora(shown, rounds)
            result |= {"rounds": rounds, "steps": steps, "lora": shown, "seconds_per_token": found}
        if arguments.passes:
            each = each_method(directory, size, arguments.passes, 2 * steps)
            show_methods(each)
            result |= {
                "passes": arguments.passes,
                "methods_ms_per_token": {name: 1e3 * median(each[name]) for name in each},
                "methods_seconds_per_token": each,
            }
    if arguments.out is not None:
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
