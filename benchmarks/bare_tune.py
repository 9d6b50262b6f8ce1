"""What people write who use Ray Tune with a TorchTrainer: the other side of benchmarks/sweep.py.

    python -m benchmarks.bare_tune CONFIG MARKS CONCURRENT LR [LR ...]

CONFIG is a config of ours, as for benchmarks/bare_ray_train.py, whose model, stream, training and checkpoints these
are. It is as in Ray's guide to Tune with Train: each trial is a function that makes a TorchTrainer named after the
trial, with TuneReportCallback, and CONCURRENT is `max_concurrent_trials`. MARKS is a directory; each trial has a file
there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import ray.tune
import yaml
from ray.tune.integration.ray_train import TuneReportCallback
from transformers import AutoTokenizer

from benchmarks.bare_ray_train import mark, trainer_of


def texts_of(config: dict[str, Any]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(config["model"]["tokenizer"])
    (held_out,) = config["data"]["eval"]
    rows = [json.loads(line)["messages"] for line in Path(held_out["path"]).read_text().splitlines()]
    return [tokenizer.apply_chat_template(row, tokenize=True, return_dict=True)["input_ids"] for row in rows]


def trial(given: dict[str, Any]) -> None:
    config, name = given["config"], ray.tune.get_context().get_trial_id()
    marks = str(Path(given["marks"], f"{name}.jsonl"))
    mark(marks, "start")
    config = {
        **config,
        "run": {**config["run"], "name": f"train-trial_id={name}"},
        "optim": {**config["optim"], "lr": given["lr"]},
    }
    trainer = trainer_of(config, marks, [TuneReportCallback()], texts_of(config))
    mark(marks, "checks")
    trainer.fit()
    mark(marks, "end")


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    ray.init()
    tuner = ray.tune.Tuner(
        trial,
        param_space={
            "config": config,
            "marks": str(Path(sys.argv[2]).absolute()),
            "lr": ray.tune.grid_search([float(each) for each in sys.argv[4:]]),
        },
        tune_config=ray.tune.TuneConfig(max_concurrent_trials=int(sys.argv[3])),
        run_config=ray.tune.RunConfig(
            name="sweep", storage_path=str(Path(config["run"]["storage"], "tune").absolute())
        ),
    )
    best = tuner.fit().get_best_result(metric="loss", mode="min")
    print("best:", best.config["lr"], best.metrics["loss"])


if __name__ == "__main__":
    main()
