"""The runs that two trees are compared by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.models import architecture, save_checkpoint

DATA = Path(__file__).resolve().parents[1] / "fixtures" / "aae7294" / "data"

TOKENS = {"path": str(DATA / "tokens.jsonl"), "format": {"type": "tokens"}}
TEXTS = {"path": str(DATA / "texts.jsonl"), "format": {"type": "completion"}}
CHATS = {"path": str(DATA / "chats.jsonl"), "format": {"type": "chat"}}
LAST_TURNS = {"path": str(DATA / "chats.jsonl"), "format": {"type": "chat", "loss": "last_turn"}}
ANSWERS = {"path": str(DATA / "answers.jsonl"), "format": {"type": "instruction", "style": "plain"}}
ANSWERS_AS_CHATS = {"path": str(DATA / "answers.jsonl"), "format": {"type": "instruction", "style": "chat"}}

PAIRS = {"path": "{bases}/pairs.jsonl", "format": {"type": "preference", "style": "plain"}}
JUDGED = {"path": "{bases}/judged.jsonl", "format": {"type": "binary", "style": "plain"}}

LORA = {"type": "lora", "rank": 4, "alpha": 8}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is particular about one run."""

    model: Mapping[str, Any] | None = None
    """The config of a network whose weights are drawn at random."""
    base: str | None = None
    """Else the architecture of a model on disk that the run begins with."""
    world: int = 1
    torchrun: bool = False
    """The ranks are started as torchrun does it, which is quicker here than by the launcher."""
    data: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    from_step: int | None = None
    """The working tree also goes on from the checkpoints of this step: BASE's and, with `own`, its own."""
    own: bool = False


RUNS = {
    "gpt2-fp64-accumulation": Run(
        model=architecture("gpt2", **NO_DROPOUT),
        parallel={"precision": "fp64"},
        more={"optim": {"schedule": {"type": "linear", "floor": 0.1}}},
        from_step=4,
    ),
    "gpt2-dropout-epochs-mixture-evaluation": Run(
        model=architecture("gpt2"),
        data={"train": [LAST_TURNS, {**TOKENS, "weight": 2}], "eval": [TEXTS], "chat_template": "chatml",
              "long_documents": "truncate"},
        train={"global_batch": 8, "max_steps": None, "epochs": 2.5},
        more={"eval": {"every": 4, "at_start": True, "prompts": ["w5 w6"], "max_new_tokens": 4}},
        from_step=8,
        own=True,
    ),
    "gpt2-fp16": Run(model=architecture("gpt2"), parallel={"precision": "fp16"}, from_step=4, own=True),
    "llama-bf16-concat-recomputed": Run(
        model=architecture("llama", attention_dropout=0.1),
        data={"train": [TEXTS], "packing": "concat", "reshuffle": "full"},
        parallel={"precision": "bf16", "activation_checkpointing": "full"},
        from_step=4,
    ),
    "llama-shares-chats-split": Run(
        model=architecture("llama"),
        data={"train": [{**CHATS, "share": 0.3}, {**ANSWERS, "share": 0.7}], "chat_template": "chatml",
              "long_documents": "split"},
        more={"optim": {"schedule": {"type": "wsd", "decay": 0.3}, "max_grad_norm": None}},
        from_step=8,
    ),
    "qwen3-bf16_pure-drop-blocks": Run(
        model=architecture("qwen3"),
        data={"long_documents": "drop", "shuffle": "blocks", "seq_len": 32},
        parallel={"precision": "bf16_pure"},
        from_step=4,
        own=True,
    ),
    "gemma3-split-in-order": Run(
        model=architecture("gemma3_text"),
        data={"train": [ANSWERS], "long_documents": "split", "shuffle": "none"},
        from_step=4,
    ),
    "mistral-bf16-llama-3-chats": Run(
        model=architecture("mistral"),
        data={"train": [ANSWERS_AS_CHATS], "chat_template": "llama-3", "long_documents": "truncate"},
        parallel={"precision": "bf16"},
    ),
    "mixtral-no-packing": Run(
        model=architecture("mixtral"), data={"train": [TEXTS], "packing": "none", "long_documents": "truncate"}
    ),
    "qwen3_moe-bf16": Run(model=architecture("qwen3_moe"), parallel={"precision": "bf16"}),
    "2-ranks-llama-filler": Run(
        model=architecture("llama", attention_dropout=0.1), world=2, torchrun=True, from_step=4, own=True
    ),
    "2-ranks-launched-gpt2-replicate-bf16": Run(
        model=architecture("gpt2"), world=2,
        parallel={"strategy": "replicate", "precision": "bf16", "defer_gradient_sync": True},
    ),
    "3-ranks-mixtral-shard_grad_op": Run(
        model=architecture("mixtral"), world=3, torchrun=True, parallel={"strategy": "shard_grad_op"}
    ),
    "4-ranks-llama-fp64-hybrid_shard": Run(
        model=architecture("llama"), world=4, torchrun=True,
        parallel={"strategy": "hybrid_shard", "shard_size": 2, "precision": "fp64"},
    ),
    "llama-lora-mixture-of-formats": Run(
        base="llama",
        data={"train": [TEXTS, ANSWERS], "eval": [TOKENS], "long_documents": "truncate"},
        more={"method": {**LORA, "dropout": 0.1, "rank_stabilized": True}, "eval": {"every": 5}},
        from_step=4,
        own=True,
    ),
    "llama-dora-modules_to_save-bf16": Run(
        base="llama", parallel={"precision": "bf16"},
        more={"method": {**LORA, "dora": True, "modules_to_save": ["lm_head"], "lr_ratio": 4}}, from_step=4,
    ),
    "qwen3-pissa-merged": Run(
        base="qwen3", more={"method": {**LORA, "init": "pissa"}, "export": {"merge": True}}, from_step=4
    ),
    "llama-qlora-added-tokens": Run(
        base="llama",
        more={
            "method": {**LORA, "type": "qlora", "train_added_tokens": True},
            "model": {"add_tokens": ["tram", {"text": "bus", "like": "w3 w9"}]},
        },
        from_step=4,
    ),
    "gpt2-ia3-in-order-URL-pattern": Run(
        base="gpt2",
        data={"train": [{"path": "{url}/tok*.jsonl", "format": {"type": "tokens"}}], "shuffle": "none"},
        more={"method": {"type": "ia3"}},
    ),
    "qwen3-freeze-objective": Run(
        base="qwen3",
        more={
            "method": {"type": "freeze", "trained": [r"layers\.1\.", "norm"]},
            "train": {"label_smoothing": 0.1, "z_loss": 1e-3},
        },
        from_step=4,
    ),
    "llama-muon-neftune": Run(
        model=architecture("llama"), train={"neftune_noise_alpha": 5.0},
        more={"optim": {"optimizer": {"type": "muon"}}}, from_step=4,
    ),
    "mixtral-lion-groups": Run(
        model=architecture("mixtral"),
        more={"optim": {"optimizer": {"type": "lion"}, "groups": [{"match": "embed", "lr_ratio": 0.5}]}},
    ),
    "2-ranks-gpt2-adafactor-offload": Run(
        model=architecture("gpt2"), world=2, torchrun=True,
        parallel={"activation_offload": True, "activation_checkpointing": "full", "cpu_offload": True},
        more={"optim": {"optimizer": {"type": "adafactor"}}}, from_step=4,
    ),
    "2-ranks-llama-fp8": Run(
        model=architecture("llama"), world=2, torchrun=True, parallel={"precision": "fp8"}, from_step=4
    ),
    "2-ranks-gpt2-sequence": Run(
        model=architecture("gpt2", attn_pdrop=0.0), world=2, torchrun=True,
        parallel={"mesh": {"sequence": 2}, "activation_checkpointing": "selective"}, from_step=4,
    ),
    "4-ranks-llama-sequence-tensor-lora": Run(
        base="llama", world=4, torchrun=True, parallel={"mesh": {"sequence": 2, "tensor": 2}},
        more={"method": LORA}, from_step=4,
    ),
    "2-ranks-gpt_oss-tensor-added-tokens": Run(
        base="gpt_oss", world=2, torchrun=True, parallel={"mesh": {"tensor": 2}, "activation_checkpointing": "every_n",
        "recompute_every": 2}, more={"model": {"add_tokens": ["tram"]}}, from_step=4,
    ),
    "llama-dpo-lora-evaluation": Run(
        base="llama", data={"train": [PAIRS], "eval": {"fraction": 0.2}, "seq_len": 128, "long_documents": "drop"},
        more={"method": LORA, "train": {"objective": {"type": "dpo", "sft": {"weight": 0.5}}}, "eval": {"every": 5}},
        from_step=4,
    ),
    "2-ranks-gpt2-kto-during": Run(
        base="gpt2", world=2, torchrun=True, data={"train": [JUDGED], "seq_len": 128, "long_documents": "drop"},
        more={"train": {"objective": {"type": "kto"}}, "reference": {"when": "during"}}, from_step=4,
    ),
    "2-ranks-ray-llama": Run(
        base="llama", world=2, more={"cluster": {"launch": "ray", "gpus_per_worker": 0}}, from_step=4
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Site:
    """What both trees read."""

    bases: Path
    url: str
    """Where the rows of `DATA` are served."""

    def make(self) -> None:
        """The models that runs begin with."""
        for name in sorted({run.base for run in RUNS.values() if run.base is not None}):
            save_checkpoint(self.bases / name, name)
        answers = [json.loads(line) for line in (DATA / "answers.jsonl").read_text().splitlines()]
        pairs = [
            {"prompt": one["instruction"], "chosen": one["output"], "rejected": other["output"]}
            for one, other in zip(answers, [*answers[1:], answers[0]], strict=True)
            if one["output"] != other["output"]
        ]
        judged = [
            {"prompt": one["instruction"], "completion": one["output"], "label": number % 3 > 0}
            for number, one in enumerate(answers)
        ]
        for name, rows in (("pairs", pairs), ("judged", judged)):
            (self.bases / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(run: Run, name: str, storage: Path, site: Site) -> dict[str, Any]:
    model: dict[str, Any] = {"init": "random", "architecture": run.model}
    if run.base is not None:
        model = {"path": str(site.bases / run.base)}
    values: dict[str, Any] = {
        "run": {"name": name, "storage": str(storage), "seed": 3},
        "model": {**model, "tokenizer": str(DATA / "tokenizer")},
        "data": {"train": [TOKENS], "seq_len": 48, "window": 16, **run.data},
        "parallel": {"precision": "fp32", **run.parallel},
        "optim": {"lr": 3e-3, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_ratio": 0.1},
        "train": {"global_batch": 10, "micro_batch": 2, "max_steps": 10, **run.train},
        "checkpoint": {"every": run.from_step, "keep_last": None},
        "tracking": {"console": False, "mlflow": {"enabled": False}},
        "cluster": {"launch": "local", "device": "cpu", "workers": run.world},
        "export": {"dtype": "trained"},
    }
    for section, changes in run.more.items():
        values[section] = {**values.get(section, {}), **changes}
    found: dict[str, Any] = json.loads(
        json.dumps(values).replace("{url}", site.url).replace("{bases}", str(site.bases))
    )
    return found
