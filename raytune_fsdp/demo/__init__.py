"""A small dataset and a tokenizer that come with the package, so that a first run needs no download.

`conversations.jsonl` holds short conversations about training large models, `heldout.jsonl` asks for some of the facts
in other words. `tokenizer/` is made from the former by `make_tokenizer.py`.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

CONVERSATIONS = _HERE / "conversations.jsonl"
HELDOUT = _HERE / "heldout.jsonl"
TOKENIZER = _HERE / "tokenizer"
