"""How long a conversation of many turns takes, beside a plain rendering of it; and beside another tree of this package.

    python -m benchmarks.long_conversations --base DIR

Milliseconds by the clock for one conversation of 20 to 800 messages, on one thread, the fastest of some rounds. `spans`
is from a row to its text and what is trained on in it, `row` is from a row to ids and mask. `plain` and `plain row` are
the same without a mask: every token is trained on (`loss=all`), so the conversation is rendered and nothing is looked
for. `transformers` is `apply_chat_template` to ids. The templates have no `{% generation %}` tags, so each turn must be
found: ChatML's, and one that keeps the reasoning of the last turns only, as Qwen3's does. `chat`: questions and
answers; `agent`: one question, then calls and their results, and an answer. Both trees must find the same spans.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TURNS = (20, 80, 200, 400, 800)
WORDS = ("what", "is", "sharding", "the", "GPU", "memory", "of", "a", "parameter")
BASE_UP_TO = 200
"""The other tree may take seconds for longer ones."""

CALLS = (
    "{%- for c in m.tool_calls or [] -%}{{ '\n<tool_call>\n' ~ ({'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson) ~ '\n</tool_call>' }}{%- endfor -%}"
)
TEMPLATES = {
    "ChatML": "{%- for m in messages -%}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{%- endfor -%}{{ '<|im_start|>assistant\n' if add_generation_prompt }}",
    "as Qwen3": "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}"
    "{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{%- endif -%}{{ m.content }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}{%- endfor -%}{{ '<|im_start|>assistant\n' if add_generation_prompt }}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="the root of another tree")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.turns, options.rounds)))
        return
    found = {"ours": _tree(Path(__file__).resolve().parents[1], options.turns, options.rounds)}
    if options.base:
        found["base"] = _tree(options.base, [each for each in options.turns if each <= BASE_UP_TO], 2)
    for name, values in found["ours"].items():
        other = found.get("base", {}).get(name, {})
        assert other.get("hash", values["hash"]) == values["hash"], f"{name}: the trees find other spans"
        shown = {key: value for key, value in values.items() if key != "hash"}
        shown |= {f"{key} (base)": other[key] for key in ("spans", "row") if key in other}
        print(f"{name:24} {shown} spans/plain {values['spans'] / values['plain']:.2f}")
    if options.out:
        from benchmarks.record import write_result

        write_result(options.out, {"milliseconds": found})


def _tree(tree: Path, turns: list[int], rounds: int) -> dict[str, dict[str, Any]]:
    environment = {
        **os.environ, "PYTHONPATH": str(tree.resolve()), "RAYON_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", "--rounds", str(rounds)]
    command += ["--turns", *map(str, turns)]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True)
    read: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return read


def measure(turns: list[int], rounds: int) -> dict[str, Any]:
    """Milliseconds for a conversation, by template, kind and number of messages; and a hash of its spans."""
    import xxhash
    from transformers import AutoTokenizer

    from raytune_fsdp.config import ChatFormat
    from raytune_fsdp.data.rows.formats import Document, Formatter
    from raytune_fsdp.demo import TOKENIZER

    tokenizer, results = AutoTokenizer.from_pretrained(TOKENIZER), {}

    def one(source: str, row: dict[str, Any]) -> dict[str, Any]:
        options: Any = {"tokenizer": tokenizer, "vocab_size": len(tokenizer), "template": source}
        mask, plain = (Formatter(ChatFormat(loss=loss), **options) for loss in ("assistant", "all"))
        (document,) = mask.documents([row], ["row"])
        assert isinstance(document, Document), document
        # `_begin` returns something else only for rows that are no conversations.
        works: dict[str, Callable[[], Any]] = {
            "plain": lambda: plain._finish(plain._begin(row, "row")),  # type: ignore[arg-type]
            "spans": lambda: mask._finish(mask._begin(row, "row")),  # type: ignore[arg-type]
            "plain row": lambda: plain.documents([row], ["row"]),
            "row": lambda: mask.documents([row], ["row"]),
            "transformers": lambda: tokenizer.apply_chat_template(row["messages"], chat_template=source, tokenize=True),
        }
        clocked = {name: round(1e3 * _seconds(work, rounds), 2) for name, work in works.items()}
        return {**clocked, "hash": xxhash.xxh3_128_hexdigest(document.input_ids.tobytes() + document.labels.tobytes())}

    for label, source in TEMPLATES.items():
        for kind in ("chat", "agent"):
            for many in turns:
                results[f"{label}, {kind}, {many}"] = one(source, {"messages": _messages(kind, many)})
    return results


def _messages(kind: str, many: int) -> list[dict[str, Any]]:
    drawn = random.Random(1)

    def words(low: int, high: int) -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(low, high)))

    if kind == "chat":
        pairs = (({"role": "user", "content": words(5, 60)}, words(20, 150)) for _ in range(many // 2))
        return [each for user, said in pairs for each in (user, {"role": "assistant", "content": said})]
    messages: list[dict[str, Any]] = [{"role": "user", "content": words(5, 60)}]
    while len(messages) < many - 1:
        function = {"name": drawn.choice(("read", "write", "run")), "arguments": {"of": words(1, 20)}}
        call = {"id": f"call{len(messages)}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": words(0, 10), "tool_calls": [call]})
        messages.append({"role": "tool", "content": words(5, 100), "tool_call_id": call["id"]})
    return [*messages, {"role": "assistant", "content": words(20, 150)}]


def _seconds(work: Callable[[], Any], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
