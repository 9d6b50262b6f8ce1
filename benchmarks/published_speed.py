"""What the planner says of published training runs, beside what was published.

    python -m benchmarks.published_speed [--out benchmarks/results/published_speed.json] [--only PART]

The rows are those of benchmarks/published/throughput.jsonl, which were fixed before there was a planner. Rows that are
set aside say what real steps reach of the planner's roofline (`raytune_fsdp/predict/speed.py`, `REACHED`); all others
are scored. Rows with tensor parallelism are left out: the planner had none when they were scored.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import write_result
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.predict.devices import find_device
from raytune_fsdp.predict.prediction import Cluster, predict
from raytune_fsdp.predict.subject import ModelSpec

ROWS = Path(__file__).parent / "published" / "throughput.jsonl"


def architecture_of(model: dict[str, Any], length: int) -> dict[str, Any]:
    """A network of these sizes: those that are not gated have GPT-NeoX's blocks, with biases."""
    same = {
        "hidden_size": model["hidden"], "num_hidden_layers": model["layers"], "num_attention_heads": model["heads"],
        "vocab_size": model["vocabulary"], "tie_word_embeddings": model["tied_embeddings"],
        "max_position_embeddings": length, "intermediate_size": model["intermediate"],
    }  # fmt: skip
    if not model["gated_mlp"]:
        return {"model_type": "gpt_neox", **same}
    heads = {"num_key_value_heads": model["kv_heads"], "head_dim": model["head_dim"]}
    if model["experts"] is None:
        return {"model_type": "llama", **same, **heads}
    experts = model["experts"]
    sizes = {"num_experts": experts["number"], "num_experts_per_tok": experts["active"]}
    return {"model_type": "qwen3_moe", **same, **heads, **sizes, "moe_intermediate_size": experts["intermediate"]}


def config_of(row: dict[str, Any]) -> FinetuneConfig:
    method: dict[str, Any] = {"type": row["method"]["type"]}
    if method["type"] == "lora":
        method |= {"rank": row["method"]["rank"], "alpha": 2 * row["method"]["rank"]}
    parallel: dict[str, Any] = {
        "strategy": "hybrid_shard" if row["strategy"] == "hybrid" else row["strategy"],
        "activation_checkpointing": row["activation_checkpointing"],
        "compile": bool(row["compile"]),
    }
    if row["strategy"] == "hybrid":
        parallel["shard_size"] = row["gpus_per_node"]
    batch = row["micro_batch"] * row["accumulation"] * row["gpus"]
    return FinetuneConfig.model_validate({
        "run": {"name": "published"},
        "model": {
            "init": "random", "tokenizer": "none", "architecture": architecture_of(row["model"], row["sequence_length"])
        },
        "data": {"train": [{"path": "rows.jsonl"}], "seq_len": row["sequence_length"]},
        "train": {"max_steps": 1, "global_batch": batch, "micro_batch": row["micro_batch"]},
        "parallel": parallel,
        "method": method,
    })  # fmt: skip


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second and device, with what a roofline alone would say."""
    config, between = config_of(row), row["network"]["bytes_per_second_per_node"]
    cluster = Cluster(device=find_device(row["device"]), per_node=row["gpus_per_node"], between=between)
    found = predict(ModelSpec.of(config), config, row["gpus"], cluster)
    seconds = found.seconds
    assert seconds is not None
    tokens = config.train.global_batch * config.data.seq_len / row["gpus"]
    return {
        "predicted": tokens / seconds.step, "roofline": tokens / seconds.at(1.0), "bound": seconds.bound,
        "memory_gib": found.needed / 2**30, "fits": found.fits,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="rows whose id has this in it")
    parser.add_argument("--use", choices=("score", "set_aside"), help="only these")
    arguments = parser.parse_args()
    found = []
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        if not row["use"] or row["tensor_parallel"] > 1 or arguments.only not in row["id"]:
            continue
        if arguments.use and row["use"] != arguments.use:
            continue
        measured = row["tokens_per_second_per_gpu"]
        values = {"id": row["id"], "use": row["use"], "measured": measured, **predicted(row)}
        values["error"] = values["predicted"] / measured - 1
        values["reached"] = measured / values["roofline"]
        found.append(values)
        print(
            f"{row['id']:55} {row['use'][:5]:5} {measured:8.0f} {values['predicted']:8.0f} {values['error']:+6.0%}  "
            f"{values['reached']:.2f} of the roofline, {values['bound']}, {values['memory_gib']:.0f} GiB",
            flush=True,
        )
    scored = [each for each in found if each["use"] == "score"]
    by_source = defaultdict(list)
    for each in scored:
        by_source[each["id"].partition("/")[0]].append(abs(each["error"]))
    aside = [each["reached"] for each in found if each["use"] == "set_aside"]
    if aside:
        print(f"set aside: {median(aside):.3f} of the roofline, the median of {len(aside)}")
    summary: dict[str, Any] = {}
    if scored:
        errors = [abs(each["error"]) for each in scored]
        summary = {
            "rows": len(errors), "within_30_percent": sum(error <= 0.3 for error in errors), "median": median(errors),
            "by_source": {name: {"rows": len(each), "median": median(each)} for name, each in by_source.items()},
        }  # fmt: skip
        print(json.dumps(summary, indent=1))
    if arguments.out:
        write_result(arguments.out, {"what": "published tokens/s/GPU and what is planned", **summary, "each": found})


if __name__ == "__main__":
    main()
