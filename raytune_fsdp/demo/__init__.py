"""A small dataset and a tokenizer that come with the package, so that a first run needs no download.

`conversations.jsonl` has short conversations about training large models; `heldout.jsonl` asks about some of the same
facts in other words. `make_tokenizer.py` makes `tokenizer/` from the conversations.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

CONVERSATIONS = _HERE / "conversations.jsonl"
HELDOUT = _HERE / "heldout.jsonl"
TOKENIZER = _HERE / "tokenizer"
