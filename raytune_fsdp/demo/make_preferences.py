"""Make `preferences.jsonl` from `conversations.jsonl`: `python -m raytune_fsdp.demo.make_preferences`.

Each row has two answers to a question of the demo, of which the short one is preferred: the first part of an answer
that has two, over the whole of it; the whole of another one, over the same with many words around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from raytune_fsdp.demo import CONVERSATIONS, PREFERENCES

_SECOND = re.compile(r": |; |\. |, (?:and|but|so|which|because) ")
_SHORTEST = 3
"""The fewest words that are an answer."""
AROUND = (
    "That is a very good question, and one that is asked often. {}",
    "{} I hope that this helps, and please do ask again if anything is unclear.",
    "There is much to say about this, and opinions differ, but in short: {}",
    "{} But this is only a summary, and there would be a lot more to say about it.",
)


def first_part(answer: str) -> str | None:
    """Return the first part of an answer, if it says enough by itself."""
    found = _SECOND.search(answer)
    if found is None or (found.group().startswith(",") and re.search("[,:]", answer[: found.start()])):
        return None
    first = answer[: found.start()]
    return f"{first}." if len(first.split()) >= _SHORTEST else None


def pairs() -> Iterator[dict[str, Any]]:
    """Yield the rows, in the order of the conversations."""
    for number, line in enumerate(CONVERSATIONS.read_text(encoding="utf-8").splitlines()):
        *prompt, answer = json.loads(line)["messages"]
        whole = answer["content"]
        short = first_part(whole)
        chosen, rejected = (whole, AROUND[number % len(AROUND)].format(whole)) if short is None else (short, whole)
        yield {"prompt": prompt, "chosen": _said(chosen), "rejected": _said(rejected)}


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


if __name__ == "__main__":
    rows = [json.dumps(row, ensure_ascii=False) for row in pairs()]
    PREFERENCES.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"wrote {len(rows)} rows to {PREFERENCES}")
