"""A small dataset and a tokenizer that come with the package, so that a first run needs no download.

`conversations.jsonl` has short conversations about training large models; `heldout.jsonl` asks about some of the same
facts in other words. `preferences.jsonl` has two answers to many of their questions, of which the short one is
preferred. `make_preferences.py` and `make_tokenizer.py` make these and `tokenizer/` from the conversations.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

CONVERSATIONS = _HERE / "conversations.jsonl"
HELDOUT = _HERE / "heldout.jsonl"
PREFERENCES = _HERE / "preferences.jsonl"
TOKENIZER = _HERE / "tokenizer"
