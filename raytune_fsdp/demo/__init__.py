"""A small dataset and a tokenizer that come with the package, so that a first run needs no download.

`conversations.jsonl` has short conversations about training large models; `heldout.jsonl` asks about some of the same
facts in other words. `preferences.jsonl` has two answers to many of their questions, of which the short one is
preferred; `classes.jsonl` has answers with and without many words around them. `make_preferences.py`, `make_classes.py`
and `make_tokenizer.py` make these and `tokenizer/` from the conversations.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

CONVERSATIONS = _HERE / "conversations.jsonl"
HELDOUT = _HERE / "heldout.jsonl"
PREFERENCES = _HERE / "preferences.jsonl"
CLASSES = _HERE / "classes.jsonl"
TOKENIZER = _HERE / "tokenizer"
