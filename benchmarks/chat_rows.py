"""How fast conversations become token ids and masks; beside another tree of this package.

    python -m benchmarks.chat_rows --base DIR

By the clock, with one thread for the tokenizer, for conversations of one to five turns, with the demo's tokenizer:
`rows` is from a row to ids and labels, all in one call; `rendering` is from a row to text and spans, one by one;
`tokenizer` is what its library alone does with those texts, from text to ids: no rendering can make rows faster than
that. Not processor time: templates run in a process of their own, whose time would be missing. Each tree is measured in
processes of its own that take turns. The shipped templates say themselves what is trained on (`{% generation %}`);
without these tags, as most models' own templates are, each turn is found by where the template puts the messages. The
trees must make the same documents.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

WORDS = ("what", "is", "sharding", "the", "GPU", "memory", "of", "a", "parameter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="the root of another tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.rows)))
        return
    trees = {"ours": Path(__file__).resolve().parents[1], **({"base": options.base} if options.base else {})}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "RAYON_NUM_THREADS": "1"}
            command = [sys.executable, str(Path(__file__).resolve()), "--measure", "--rows", str(options.rows)]
            done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    table = {}
    for template in found["ours"][0]:
        assert len({each[template]["hash"] for rounds in found.values() for each in rounds}) == 1, template
        for name, rounds in found.items():
            table[f"{template} {name}"] = {
                key: round(median(each[template][key] for each in rounds)) for key in ("rendering", "rows", "tokenizer")
            }
            print(f"{template:24} {name:6} {table[f'{template} {name}']}")
    if options.out:
        from benchmarks.record import write_result

        write_result(options.out, {"rows_per_second": table})


def measure(many: int) -> dict[str, Any]:
    """Rows a second, and a hash of the documents, by template."""
    import xxhash
    from transformers import AutoTokenizer

    from raytune_fsdp.config import ChatFormat
    from raytune_fsdp.data.rows.formats import Document, Formatter
    from raytune_fsdp.data.rows.templates import load_template
    from raytune_fsdp.demo import TOKENIZER

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    rows, results = _rows(many), {}

    def rendered(formatter: Formatter) -> list[Any]:
        # `_begin` returns something else only for rows that are no conversations.
        return [formatter._finish(formatter._begin(row, "row")) for row in rows]  # type: ignore[arg-type]

    for name in ("chatml", "openassistant"):
        tagged = load_template(name)
        bare = re.sub(r"{%-? *(end)?generation *-?%}", "", tagged)
        for label, template in ((name, tagged), (f"{name} without tags", bare)):
            formatter = Formatter(ChatFormat(), tokenizer=tokenizer, vocab_size=len(tokenizer), template=template)
            digest = xxhash.xxh3_128()
            for document in formatter.documents(rows, ["row"] * many):
                assert isinstance(document, Document), document
                digest.update(document.input_ids.tobytes() + document.labels.tobytes())
            texts = [each.text for each in rendered(formatter)]
            encode = tokenizer.backend_tokenizer.encode_batch_fast
            results[label] = {
                "hash": digest.hexdigest(),
                "rendering": _rate(many, partial(rendered, formatter)),
                "rows": _rate(many, partial(formatter.documents, rows, ["row"] * many)),
                "tokenizer": _rate(many, partial(encode, texts, add_special_tokens=False)),
            }
    return results


def _rows(many: int) -> list[dict[str, Any]]:
    drawn = random.Random(1)

    def words(low: int, high: int) -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(low, high)))

    roles = (("user", 5, 60), ("assistant", 20, 150))
    return [
        {"messages": [{"role": role, "content": words(low, high)} for _ in range(turns) for role, low, high in roles]}
        for turns in drawn.choices((1, 2, 3, 5), k=many)
    ]


def _rate(rows: int, work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return rows / min(seconds)


if __name__ == "__main__":
    main()
