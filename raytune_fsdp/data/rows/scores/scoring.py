"""What of a head decides documents: its classes, and the token that those who use the model pad with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config.sections.model import HeadConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How documents are scored."""

    pad_token: int
    """What a document's only label is, one token behind its end."""
    pad_text: str
    labels: tuple[str, ...]
    """The names of the classes; empty: they have none."""
    outputs: int

    @classmethod
    def of(cls, head: HeadConfig, tokenizer: PreTrainedTokenizerBase) -> Scoring:
        """Return what a head makes of texts. Raises ConfigError."""
        pad = pad_token_of(head, tokenizer)
        text = str(tokenizer.convert_ids_to_tokens(pad))
        return cls(pad_token=pad, pad_text=text, labels=tuple(head.labels), outputs=head.size)

    def in_words(self, value: float) -> str:
        """Return what a row's class or score is, in words."""
        if self.outputs == 1:
            return f"score {value:g}"
        return f"class {self.labels[int(value)]!r}" if self.labels else f"class {value:g}"


def pad_token_of(head: HeadConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that texts are padded with, and that exports name as such. Raises ConfigError.

    The classes of transformers score a text at its last token that is not this one, so it must not end texts. It is the
    one that the config names; else the tokenizer's own, unless that ends texts; else a special token that does not, one
    whose name says that it pads before any other, and those that stand for unknown text and begin texts last.
    """
    if head.pad_token is not None:
        return _named(head.pad_token, tokenizer)
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    bos, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    others = sorted(special, key=lambda each: (each == bos, each == unknown, "pad" not in special[each].lower(), each))
    ending = _ending(tokenizer)
    found = next((each for each in (tokenizer.pad_token_id, *others) if each not in (None, *ending)), None)
    if found is None:
        raise ConfigError(
            f"model.head: the tokenizer {tokenizer.name_or_path!r} has no special token with which no text ends, and "
            "texts are scored at their last token that is not padding: set model.head.pad_token to one with which no "
            f"row ends ({shown(', '.join([*special.values()][:12]) or 'it has none')}), or model.tokenizer to a copy "
            "that has one more, with model.resize_embeddings=true"
        )
    return int(found)


def _named(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    index = tokenizer.get_vocab().get(text)
    if index is None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        # What a tokenizer does not know is one token, too.
        index = ids[0] if len(ids) == 1 and tokenizer.decode(ids).strip() == text.strip() else None
    if index is None:
        raise ConfigError(
            f"model.head.pad_token={shown(text)} is not one token of the tokenizer {tokenizer.name_or_path!r}: name "
            "one of its tokens, with which no text ends, or leave it out"
        )
    return int(index)


def _ending(tokenizer: PreTrainedTokenizerBase) -> set[int | None]:
    """Return the special tokens that may end a text: that of its end, one that the tokenizer puts there, and all that
    the chat template writes."""
    with_end, without = (tokenizer.encode("a", add_special_tokens=each) for each in (True, False))
    added = with_end[-1:] if with_end[-1:] != without[-1:] else []
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else str(template)
    written = [index for index, token in tokenizer.added_tokens_decoder.items() if token.content in text]
    return {tokenizer.eos_token_id, *added, *written}
