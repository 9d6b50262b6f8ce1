"""The same packed samples through Hugging Face's Trainer and through ours: are the losses the same at every step?

    python -m benchmarks.hf_trainer_curve [--steps 200] [--out benchmarks/results/hf_trainer_curve.json]
                                          [--plot docs/images/hf_trainer_curve.png]

A small random Llama in fp32 trains on the demo's conversations. Ours packs them and trains on one rank, and again on
two. Trainer gets the rows that our data code makes (input ids, labels, restarting positions), in our order and with the
same accumulation: global batch 8 in micro-batches of 2; its loss, its optimizer, its clipping and its schedule are its
own. Weights start from one checkpoint. Weight decay is 0 in all: Trainer decays the input embeddings, ours does not.
Exits with 1 when a loss of Trainer and of our one rank differ by more than 1e-3 of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import write_result
from raytune_fsdp import FinetuneConfig, finetune
from raytune_fsdp.data.batches import rank_batches
from raytune_fsdp.data.stream import Stream
from raytune_fsdp.demo import CONVERSATIONS, TOKENIZER
from raytune_fsdp.record.jsonl import read_trajectory
from raytune_fsdp.run.prepare import prepare

SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH = 256, 8, 2
# Chosen so that training is not chaotic: with 4 layers, beta2 0.999 and epsilon 1e-8 a difference of 1e-7 grows to 1e-2
# within 150 steps, between any two ways to add up the same numbers.
LAYERS, LR, BETA2, EPSILON = 2, 1e-3, 0.95, 1e-6
BOUND = 1e-3
QUANTITIES = ("loss", "grad_norm", "lr")

Curve = list[dict[str, float]]


def write_model(directory: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    ).save_pretrained(directory)


def our_config(directory: Path, steps: int, workers: int, launch: str) -> FinetuneConfig:
    return FinetuneConfig.model_validate(
        {
            "run": {"name": f"ranks-{workers}", "storage": str(directory)},
            "model": {"path": str(directory / "model"), "tokenizer": str(TOKENIZER)},
            "data": {"train": [{"path": str(CONVERSATIONS)}], "seq_len": SEQ_LEN},
            "parallel": {"precision": "fp32"},
            "optim": {"lr": LR, "beta2": BETA2, "eps": EPSILON, "weight_decay": 0.0, "warmup_steps": 0},
            "train": {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "max_steps": steps},
            "tracking": {"console": False, "mlflow": {"enabled": False}},
            "cluster": {"launch": launch, "workers": workers, "device": "cpu"},
            "export": {"at_end": False},
        }
    )


def ours(directory: Path, steps: int, workers: int, launch: str) -> Curve:
    result = finetune(our_config(directory, steps, workers, launch))
    lines = read_trajectory(result.run_dir / "metrics.jsonl")
    return [{key: line[key] for key in QUANTITIES} for line in lines]


def packed_rows(directory: Path, steps: int) -> list[dict[str, list[int]]]:
    """The rows of every micro-batch, one after the other, as one rank of ours gets them."""
    prepared, standing = prepare(our_config(directory, steps, workers=1, launch="local"), world=1)
    batches = rank_batches(
        Stream(prepared.train, seed=0), standing.plan.division, range(1, steps + 1),
        cursor=standing.state.cursor, data_rank=0,
    )  # fmt: skip
    return [
        {"input_ids": ids, "labels": labels, "position_ids": positions}
        for step in batches
        for block in step.micro_batches
        for ids, labels, positions in zip(
            block.input_ids.tolist(), block.labels.tolist(), block.position_ids.tolist(), strict=True
        )
    ]


def trainer(directory: Path, steps: int) -> Curve:
    from datasets import Dataset
    from transformers import PrinterCallback, Trainer, TrainingArguments, default_data_collator

    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=GLOBAL_BATCH // MICRO_BATCH,
        learning_rate=LR,
        adam_beta2=BETA2,
        adam_epsilon=EPSILON,
        lr_scheduler_type="cosine",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    run = Trainer(
        model=LlamaForCausalLM.from_pretrained(directory / "model", dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(packed_rows(directory, steps)),
        data_collator=default_data_collator,
    )
    run.remove_callback(PrinterCallback)
    run.train()
    lines = [line for line in run.state.log_history if "loss" in line]
    names = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
    return [{key: line[name] for key, name in names.items()} for line in lines]


def differences(left: Curve, right: Curve) -> dict[str, float]:
    """Largest relative difference over all steps, by quantity."""
    assert len(left) == len(right), (len(left), len(right))
    return {
        key: max(abs(a[key] - b[key]) / max(abs(a[key]), 1e-30) for a, b in zip(left, right, strict=True))
        for key in QUANTITIES
    }


def plot(path: Path, curves: dict[str, Curve]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, difference_axes = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    base = [row["loss"] for row in curves["HF Trainer"]]
    steps = range(1, len(base) + 1)
    for (name, curve), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        values = [row["loss"] for row in curve]
        loss_axes.plot(steps, values, style, label=name)
        if name != "HF Trainer":
            relative = [abs(value - reference) / reference for value, reference in zip(values, base, strict=True)]
            difference_axes.plot(steps, relative, style, color=loss_axes.lines[-1].get_color(), label=name)
    difference_axes.axhline(BOUND, color="0.6", linewidth=1)
    difference_axes.set_yscale("log")
    difference_axes.set(xlabel="step", ylabel="relative difference\nto HF Trainer")
    loss_axes.set_ylabel("loss")
    for axes in (loss_axes, difference_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    print(f"written: {path}")


def main() -> int:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--launch", choices=("auto", "ray", "local"), default="auto", help="who starts our ranks")
    parser.add_argument("--out", type=Path, default=here / "results" / "hf_trainer_curve.json")
    parser.add_argument("--plot", type=Path, default=here.parent / "docs" / "images" / "hf_trainer_curve.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, Curve] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory / "model")
        curves["HF Trainer"] = trainer(directory, arguments.steps)
        curves["ours, 1 rank"] = ours(directory, arguments.steps, 1, arguments.launch)
        curves["ours, 2 ranks"] = ours(directory, arguments.steps, 2, arguments.launch)
    found: dict[str, Any] = {
        name: differences(curves["HF Trainer"], curve) for name, curve in curves.items() if name != "HF Trainer"
    }
    found["ours, 2 ranks against 1"] = differences(curves["ours, 1 rank"], curves["ours, 2 ranks"])
    first, last = curves["HF Trainer"][0]["loss"], curves["HF Trainer"][-1]["loss"]
    print(f"{arguments.steps} steps, loss {first:.4f} to {last:.4f}; largest relative difference over all steps:")
    for name, values in found.items():
        print(f"  {name:24} " + "  ".join(f"{key} {value:.1e}" for key, value in values.items()))
    write_result(
        arguments.out,
        {"steps": arguments.steps, "first_loss": first, "last_loss": last, "largest_relative_difference": found,
         "bound": BOUND, "losses": {name: [row["loss"] for row in curve] for name, curve in curves.items()}},
    )  # fmt: skip
    plot(arguments.plot, curves)
    agree = found["ours, 1 rank"]["loss"] <= BOUND
    print("agree" if agree else f"do not agree within {BOUND}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
