"""Make the demo's tokenizer: byte-level BPE of 1024 tokens, trained on the demo's conversations.

    python -m raytune_fsdp.demo.make_tokenizer [directory]

Writes tokenizer.json, tokenizer_config.json and chat_template.jinja; the same text gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from raytune_fsdp.demo import CONVERSATIONS, TOKENIZER

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|pad|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")

# Every digit is a token of its own, so that numbers of any length consist of the same ten tokens.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A role token, then the text. After the assistant's text comes the end token, which the model must learn to produce.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('the demo template knows the roles system, user and assistant, not ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] ~ eos_token -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<|pad|>",
    "eos_token": "<|endoftext|>",
    "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
}


def texts(path: Path) -> Iterator[str]:
    """The text of every message in the file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        for message in json.loads(line)["messages"]:
            yield message["content"]


def make_tokenizer(directory: Path) -> None:
    """Train the tokenizer and write its three files to `directory`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(CONVERSATIONS), trainer=trainer)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    make_tokenizer(Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER)
