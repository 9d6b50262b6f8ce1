"""Tokens that a run adds to a tokenizer, and the rows of the embeddings that they start from."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config.sections.model import NewToken

logger = logging.getLogger(__name__)


def add_tokens(tokenizer: PreTrainedTokenizerBase, wanted: Sequence[NewToken]) -> dict[int, tuple[int, ...]]:
    """Add tokens. Return, by the id of each new one, the ids of the rows that it starts as the mean of; none means all.

    What is a token already stays as it is, with the row it has, for example where a run branches from one that added
    it.
    """
    known = tokenizer.get_vocab()
    likes = [_ids(tokenizer, each) for each in wanted]  # before any is added: a description is of what was there
    rows: dict[int, tuple[int, ...]] = {}
    for each, like in zip(wanted, likes, strict=True):
        if each.text in known:
            logger.warning("model.add_tokens: %r is a token of this tokenizer already, and stays as it is", each.text)
            continue
        token = AddedToken(each.text, special=each.special, normalized=False)
        if each.special:
            tokenizer.add_special_tokens({"extra_special_tokens": [token]}, replace_extra_special_tokens=False)
        else:
            tokenizer.add_tokens([token])
        row = int(tokenizer.convert_tokens_to_ids(each.text))
        # The decoder of a byte-level tokenizer takes letters such as ß, also of an added token, for single bytes.
        if tokenizer.decode([row]).strip() != each.text.strip():
            raise ConfigError(
                f"model.add_tokens: {each.text!r} would be {tokenizer.decode([row])!r} in answers, as this tokenizer "
                "decodes bytes: write it with ASCII characters"
            )
        rows[row] = like
    return rows


def _ids(tokenizer: PreTrainedTokenizerBase, token: NewToken) -> tuple[int, ...]:
    if token.like is None:
        return ()
    ids = tuple(tokenizer(token.like, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ConfigError(
            f"model.add_tokens: like={token.like!r} of {token.text!r} has no tokens: describe it in words, or leave "
            "`like` out"
        )
    return ids
