"""Make `classes.jsonl` from `conversations.jsonl`: `python -m raytune_fsdp.demo.make_classes`.

Each answer of the demo is there twice: as it is, of the class `plain`, and with many words around it, `wordy`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from raytune_fsdp.demo import CLASSES, CONVERSATIONS
from raytune_fsdp.demo.make_preferences import AROUND


def classes() -> Iterator[dict[str, Any]]:
    """Yield the rows, in the order of the conversations."""
    for number, line in enumerate(CONVERSATIONS.read_text(encoding="utf-8").splitlines()):
        *prompt, answer = json.loads(line)["messages"]
        wordy = {**answer, "content": AROUND[number % len(AROUND)].format(answer["content"])}
        yield {"messages": [*prompt, answer], "label": "plain"}
        yield {"messages": [*prompt, wordy], "label": "wordy"}


if __name__ == "__main__":
    rows = [json.dumps(row, ensure_ascii=False) for row in classes()]
    CLASSES.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"wrote {len(rows)} rows to {CLASSES}")
