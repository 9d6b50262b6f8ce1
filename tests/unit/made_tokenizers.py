"""Small tokenizers of several kinds, trained on the demo's conversations, and documents as people read them."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.data.mixture import ORDER_VERSION
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.demo import CONVERSATIONS, TOKENIZER
from raytune_fsdp.demo.make_tokenizer import texts

MARKS = ("<|im_start|>", "<|im_end|>", "<|prompter|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

GLUED = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""A template with nothing between messages, so that byte-level BPE merges across them. As nothing ends a turn, only
runs of older versions of the order may have it."""


def without_tags(source: str) -> str:
    """The template, which does not say any more what is trained on."""
    return re.sub(r"\{%-? *(end)?generation *-?%\}", "", source)


@functools.cache
def demo() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TOKENIZER)


@functools.cache
def chat() -> PreTrainedTokenizerBase:
    """The demo's byte-level BPE with the special tokens of the shipped templates."""
    backend = copy.deepcopy(demo().backend_tokenizer)
    backend.add_special_tokens(["<s>", *MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>")


def adding(single: str) -> PreTrainedTokenizerBase:
    """`chat` without a first token of its own, adding around a text what `single` says."""
    backend = copy.deepcopy(chat().backend_tokenizer)
    special = [(text, backend.token_to_id(text)) for text in ("<s>", "<|endoftext|>")]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@functools.cache
def metaspace(scheme: str) -> PreTrainedTokenizerBase:
    """In the manner of SentencePiece: words start with ▁. `scheme`: always, first, prepend (by a normalizer)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    if scheme == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    bytes_ = [AddedToken(f"<0x{value:02X}>", special=False, normalized=False) for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*special, *bytes_], show_progress=False, max_token_length=12
    )
    corpus = list(texts(CONVERSATIONS))
    tokenizer.train_from_iterator((word for text in corpus for word in text.split(" ")), trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def convert(
    row: Any,
    format: Any,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    *,
    vocab_size: int = 5000,
    order: int = ORDER_VERSION,
) -> Document:
    """The document of a good row."""
    formatter = Formatter(format, tokenizer=tokenizer, vocab_size=vocab_size, template=template, order=order)
    (document,) = formatter.documents([row], ["f.jsonl:7"])
    assert isinstance(document, Document), document
    return document


def refusal(
    row: Any, format: Any, tokenizer: PreTrainedTokenizerBase, template: str | None = None, *, vocab_size: int = 5000
) -> RowError:
    """What is wrong with a bad row."""
    formatter = Formatter(format, tokenizer=tokenizer, vocab_size=vocab_size, template=template)
    (error,) = formatter.documents([row], ["f.jsonl:7"])
    assert isinstance(error, RowError), error
    return error


def pieces(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """The document as text: tokens with the same fate together, and whether they are trained on."""
    groups: list[tuple[list[int], bool]] = []
    for token, label in zip(document.input_ids.tolist(), document.labels.tolist(), strict=True):
        assert label in (IGNORE, token)
        if not groups or groups[-1][1] != (label != IGNORE):
            groups.append(([], label != IGNORE))
        groups[-1][0].append(token)
    return [(spelled(ids, tokenizer), trained) for ids, trained in groups]


def spelled(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens as text, with the space that SentencePiece's decoder leaves out at the start."""
    if isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        return str(tokenizer.decode(ids))
    text = "".join(tokenizer.convert_ids_to_tokens(ids)).replace("▁", " ")
    return re.sub("(<0x..>)+", lambda match: bytes.fromhex(re.sub("<0x|>", "", match.group())).decode(), text)
