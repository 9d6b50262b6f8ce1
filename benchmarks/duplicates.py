"""What it costs to find equal rows before a run, beside the census of the same rows.

    python -m benchmarks.duplicates [--out benchmarks/results/duplicates.json]

Processor time, of all threads, from files that are prepared to the groups of equal rows (`groups_of`: reading, keys,
writing them to the cache, sorting, and the tokens of rows whose keys do not tell), and of the census, which tokenizes,
packs and writes every window. Nothing of either is in a cache. One row in a hundred is there twice, half of these with
other white space, which only a template that trims makes equal. `cached` is the pass once more, as a run that continues
has it. The target is 15 % for texts and conversations. Rows that are tokens already are counted by reading them, too,
and cost about as much as that.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from benchmarks.record import write_result
from raytune_fsdp.config import DataConfig
from raytune_fsdp.data.census import census
from raytune_fsdp.data.duplicates import RowReader, groups_of
from raytune_fsdp.data.sources.opening import open_source
from raytune_fsdp.data.windows import Windows
from raytune_fsdp.demo import TOKENIZER

ROWS, ROUNDS = 8192, 3
TRIMMING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] | trim }}<|endoftext|>{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}"
)
FORMATS: dict[str, dict[str, Any]] = {
    "texts": {"type": "completion"},
    "conversations": {"type": "chat"},
    "tokens": {"type": "tokens", "labels": None},
}


def rows_of(kind: str, many: int) -> Iterator[dict[str, Any]]:
    drawn = random.Random(1)
    words = (Path(TOKENIZER).parent / "conversations.jsonl").read_text().replace('"', " ").split()

    def text(low: int, high: int) -> str:
        return " ".join(drawn.choices(words, k=drawn.randint(low, high)))

    for number in range(many):
        if kind == "texts":
            row: dict[str, Any] = {"text": text(20, 500)}
        elif kind == "tokens":
            row = {"input_ids": [drawn.randrange(3, 800) for _ in range(drawn.randint(30, 900))]}
        else:
            roles = (("user", 5, 60), ("assistant", 20, 150))
            turns = range(drawn.choice((1, 2, 3, 5)))
            row = {"messages": [{"role": role, "content": text(low, high)} for _ in turns for role, low, high in roles]}
        yield row
        if number % 100 == 0:
            again = json.loads(json.dumps(row))
            if number % 200 == 0 and kind == "conversations":
                again["messages"][0]["content"] += "\n"
            yield again


def processor_time(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def measure(kind: str, many: int, rounds: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    seconds: dict[str, list[float]] = {"pass": [], "cached": [], "census": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "trims.jinja").write_text(TRIMMING)
        (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind, many)))
        dataset = {"path": str(directory / "rows.jsonl"), "format": FORMATS[kind]}
        data = DataConfig.model_validate({
            "train": [dataset], "window": 1024, "long_documents": "truncate",
            "chat_template": str(directory / "trims.jinja"),
        })  # fmt: skip
        source = open_source(data.train[0], cache=directory / "files", in_place=False)
        for number in range(rounds):
            reader = RowReader.of(data.train[0], source, data, tokenizer, len(tokenizer))
            for what in ("pass", "cached"):
                taken, (own,) = processor_time(partial(groups_of, [reader], directory / f"keys-{number}"))
                seconds[what].append(taken)
            windows = Windows(
                data.train, data, seed=1, tokenizer=tokenizer, vocab_size=len(tokenizer),
                cache=directory / f"windows-{number}", sources=[source],
            )  # fmt: skip
            taken, counted = processor_time(partial(census, windows))
            seconds["census"].append(taken)
    found = {what: median(each) for what, each in seconds.items()}
    return {
        "rows": len(own),
        "tokens_a_row": round(counted.tokens / len(own)),
        "equal": int((own >= 0).sum()),
        **{f"{what}_us_a_row": round(each / len(own) * 1e6, 1) for what, each in found.items()},
        "percent": round(100 * found["pass"] / found["census"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = {}
    for kind in FORMATS:
        lines[kind] = measure(kind, options.rows, options.rounds)
        print(f"{kind:14} {lines[kind]}", flush=True)
    if options.out:
        write_result(options.out, {"lines": lines})


if __name__ == "__main__":
    main()
