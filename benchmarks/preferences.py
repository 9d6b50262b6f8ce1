"""Pairs of answers: a step of ours, which packs them, beside TRL's DPO, which pads them; and the reference's pass.

    python -m benchmarks.preferences [--rounds 5] [--pairs 96] [--out benchmarks/results/preferences.json]

One process, one thread, fp32, processor time; a Llama of hidden size 256, four layers, 8,192 tokens, as in
benchmarks.attention. Prompts and answers have lognormal lengths (sigma 0.8), documents 300 tokens in the mean. Both
sides train all weights by DPO (beta 0.1, AdamW) on the same pairs, with log-probabilities of the reference that were
computed before. Ours packs pairs into samples of 2,048 tokens, one a micro-batch; TRL has batches of 2, 4, 8 and 16
pairs, one a step, and the fastest counts. Tokens are those of the rows, without padding, and as many on both sides.
A round is an epoch on each side, in turns; its first step does not count. Ratios are of the same round, and
their median counts.

Then the pass of the reference over the same samples, with its files, beside a bare loop that runs the same network over
them and keeps nothing; in turns, too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from benchmarks.attention import ARCHITECTURE, VOCABULARY
from benchmarks.ranks import one_step
from benchmarks.record import write_result
from raytune_fsdp.base.batch import Cursor
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.data.batches import to_batch
from raytune_fsdp.data.reference import ReferenceFiles
from raytune_fsdp.data.to_device import to_device
from raytune_fsdp.launch.worker import join
from raytune_fsdp.model.objective.groups import GroupObjective
from raytune_fsdp.model.objective.loss import micro_batch_loss
from raytune_fsdp.run.assemble import assemble
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.reference.passes import Task, compute, look, places_of_run

SEQ_LEN, LONGEST, SIGMA = 2048, 1000, 0.8
PROMPT, ANSWER = 100, 200
"""Tokens in the mean."""
BATCHES = (2, 4, 8, 16)
BETA, RATE = 0.1, 1e-5
FORMAT = {"type": "preference", "style": "plain"}
CPU = torch.device("cpu")

Row = dict[str, str]


def write_rows(path: Path, pairs: int) -> list[Row]:
    """Texts of words that are a token each."""
    rng = np.random.default_rng(0)

    def words(mean: int) -> str:
        many = int(np.clip(rng.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA), 4, LONGEST * mean / (PROMPT + ANSWER)))
        return " ".join(f"w{token}" for token in rng.integers(3, VOCABULARY, many))

    sides = ("chosen", "rejected")
    rows = [{"prompt": words(PROMPT), **{side: f" {words(ANSWER)}" for side in sides}} for _ in range(pairs)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_model(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2").save_pretrained(directory)
    torch.manual_seed(0)
    options = {name: value for name, value in ARCHITECTURE.items() if name != "model_type"}
    LlamaForCausalLM(LlamaConfig(**options, pad_token_id=1, eos_token_id=2)).save_pretrained(directory)


class Ours:
    """Our run, step after step."""

    def __init__(self, directory: Path, steps: int) -> None:
        config = FinetuneConfig.model_validate(
            {
                "run": {"name": "ours", "storage": str(directory)},
                "model": {"path": str(directory / "model")},
                "data": {"train": [{"path": str(directory / "rows.jsonl"), "format": FORMAT}], "seq_len": SEQ_LEN},
                "parallel": {"precision": "fp32"},
                "optim": {"lr": RATE, "warmup_steps": 0, "schedule": {"type": "constant"}, "weight_decay": 0.0},
                "train": {
                    "global_batch": 1, "micro_batch": 1, "max_steps": steps, "objective": {"type": "dpo", "beta": BETA},
                },
                "tracking": {"console": False, "mlflow": {"enabled": False}},
            }
        )  # fmt: skip
        prepared, standing = prepare(config, 1)
        self.windows, self.parts = prepared.train, assemble(config, prepared, standing, CPU)
        self._batches = iter(self.parts.batches)

    def per_second(self, steps: int) -> float:
        tokens, seconds = 0, 0.0
        for number, batches in enumerate(islice(self._batches, steps)):
            since = time.process_time()
            one_step(self.parts, batches)
            if number:
                seconds += time.process_time() - since
                tokens += sum(batch.tokens for batch in batches.micro_batches)
        return tokens / seconds


class _Clock(TrainerCallback):
    """Processor seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._since = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self._since)


class Theirs:
    """TRL's trainer with batches of so many pairs."""

    def __init__(self, directory: Path, rows: list[Row], batch: int) -> None:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl.trainer.dpo_config import DPOConfig
        from trl.trainer.dpo_trainer import DPOTrainer

        self._clock, self._batch = _Clock(), batch
        options = DPOConfig(
            output_dir=str(directory / "theirs"), use_cpu=True, bf16=False, gradient_checkpointing=False, beta=BETA,
            per_device_train_batch_size=batch, num_train_epochs=1, max_length=SEQ_LEN, learning_rate=RATE,
            lr_scheduler_type="constant", save_strategy="no", report_to="none", logging_steps=1000, disable_tqdm=True,
            precompute_ref_log_probs=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        self.trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory / "model"),
            args=options,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(directory / "model"),
            callbacks=[self._clock],
        )
        data = self.trainer.train_dataset
        sides = zip(data["prompt_ids"], data["chosen_ids"], data["rejected_ids"], strict=True)
        self.tokens = [2 * len(prompt) + len(chosen) + len(rejected) for prompt, chosen, rejected in sides]

    def per_second(self) -> float:
        self._clock.seconds.clear()
        self.trainer.train()
        seen = self.tokens[self._batch : self._batch * len(self._clock.seconds)]
        return sum(seen) / sum(self._clock.seconds[1:])


def steps_beside_trl(ours: Ours, theirs: dict[str, Theirs], rounds: int, steps: int) -> dict[str, Any]:
    """Tokens a second of both sides, in turns."""
    turns: list[tuple[str, Callable[[], float]]] = [("ours", partial(ours.per_second, steps))]
    turns += [(name, each.per_second) for name, each in theirs.items()]
    found: dict[str, list[float]] = {name: [] for name, _ in turns}
    for number in range(rounds):
        for name, measure in reversed(turns) if number % 2 else turns:
            found[name].append(measure())
    fastest = max(theirs, key=lambda name: median(found[name]))
    ratios = [own / other for own, other in zip(found["ours"], found[fastest], strict=True)]
    row = {
        "tokens_per_second": {name: round(median(values), 1) for name, values in found.items()},
        "fastest_of_trl": fastest, "ratio": round(median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios],
    }  # fmt: skip
    print(f"steps: {row}, load {os.getloadavg()[0]:.1f}", flush=True)
    return row


def reference_beside_a_loop(ours: Ours, rounds: int) -> dict[str, Any]:
    """Processor seconds of the pass, and of a loop that runs the same network over the same samples."""
    windows, parts = ours.windows, ours.parts
    groups, layout = parts.objective.groups, parts.plan.layout
    assert isinstance(groups, GroupObjective)
    places = places_of_run(windows, parts.plan, parts.config.run.seed)
    samples = [sample for place in places for sample in windows.get(*place)[0].samples]
    batches = list(to_device((to_batch([each], index=0, after=Cursor()) for each in samples), CPU))
    passes, loops = [], []
    for number in range(rounds):
        files = ReferenceFiles.of(windows, {"of": f"round {number}"})
        task = Task(name="the rows", windows=windows, places=places, files=(files,))
        look(task)
        since = time.process_time()
        compute(task, parts.model, groups, micro_batch=1, layout=layout, device=CPU, say=print)
        passes.append(time.process_time() - since)
        parts.model.eval()
        since = time.process_time()
        with torch.no_grad():
            for batch in batches:
                micro_batch_loss(parts.model, batch)
        loops.append(time.process_time() - since)
        parts.model.train()
    ratios = [loop / each for each, loop in zip(passes, loops, strict=True)]
    row = {
        "samples": len(batches), "pass_seconds": round(median(passes), 3), "loop_seconds": round(median(loops), 3),
        "ratio": round(median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios],
    }  # fmt: skip
    print(f"reference: {row}, load {os.getloadavg()[0]:.1f}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=96)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="of TRL (default: 2 4 8 16)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = write_rows(directory / "rows.jsonl", options.pairs)
        write_model(directory / "model")
        # Before there is a process group: accelerate would take one for a run on several ranks.
        theirs = {f"trl_{batch}": Theirs(directory, rows, batch) for batch in options.batches}
        join(CPU, alone=True)
        tokens = sum(next(iter(theirs.values())).tokens)
        steps = max(3, tokens // SEQ_LEN)
        ours = Ours(directory, steps * options.rounds)
        counted = sum(int((sample.source_ids >= 0).sum()) for sample in ours.windows.get(0, 0)[0].samples)
        assert counted == tokens, f"{counted} tokens here, {tokens} there"
        found = {
            "pairs": len(rows), "tokens_of_a_document": round(tokens / (2 * len(rows)), 1),
            "steps": steps_beside_trl(ours, theirs, options.rounds, steps),
            "reference": reference_beside_a_loop(ours, options.rounds),
        }  # fmt: skip
        dist.destroy_process_group()
    if options.out:
        what = "processor time, one thread, fp32; llama h256 l4 v8192, DPO of all weights; above 1: ours is faster"
        write_result(options.out, {"what": what, "rounds": options.rounds, **found})


if __name__ == "__main__":
    main()
