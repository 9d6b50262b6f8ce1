"""What the card of a model that scores says: what its numbers mean, and how it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.model.directory.scoring import scoring_class

_MEANING = {
    "reward": "Its one number for a text is a reward: of two answers to a prompt the better one is to have the higher, "
    "and the sigmoid of their difference is the probability that people prefer it. Only differences mean something.",
    "regression": "Its one number for a text is the score that such a text was given in its data.",
    "classification": "Its numbers for a text are logits, one for each class: their softmax is the probability of the "
    "text being of that class.",
}
_MOST_LABELS, _LONGEST = 100, 80
_END = "end_token"


def scores(hf_config: Mapping[str, Any]) -> bool:
    """Return whether a run's config.json is of a model that scores texts."""
    return scoring_class(hf_config) is not None


def of_scores(hf_config: Mapping[str, Any], recipe: Mapping[str, Any], *, adapter: bool) -> Iterator[str]:
    """Yield the lines about the scores of a model. Its config and its recipe may be a stranger's."""
    labels, pad = _labels(hf_config), hf_config.get("pad_token_id")
    pad = pad if isinstance(pad, int) else 0
    objective = recipe["config"].get("train", {}).get("objective")
    kind = objective.get("type") if isinstance(objective, Mapping) else None
    yield from ("", "## Scores", "", _MEANING.get(str(kind), "It gives a text numbers, and predicts no tokens."))
    if kind == "classification":
        yield from ("", "| | class |", "|---|---|")
        yield from (f"| {number} | {_shown(label)} |" for number, label in list(enumerate(labels))[:_MOST_LABELS])
        if len(labels) > _MOST_LABELS:
            yield f"| … | {len(labels) - _MOST_LABELS} more |"
    yield from (
        "",
        f"A text is scored at its last token that is not the padding token (number {pad}): pad with no other one, and "
        "score no text that ends with it. Padded on the left, a model with learned positions (GPT-2 and "
        "its like) also needs `position_ids` that count a text's own tokens from 0.",
        "",
        "```python",
    )
    yield from _adapter(len(labels), pad) if adapter else _whole(pad)
    texts, how = next(map(_texts, _formats(recipe)), _texts({}))
    if _END in texts:  # once, also if the tokenizer adds it
        yield f'{_END} = "" if tokenizer("a").input_ids[-1] == tokenizer.eos_token_id else tokenizer.eos_token'
    yield from (
        f"texts = {texts}",
        f'how = dict({how}padding=True, padding_side="right", return_token_type_ids=False, return_tensors="pt")',
        f"scores = model(**tokenizer(texts, **how)).logits  # (texts, {len(labels)})",
        "```",
    )


def _whole(pad: int) -> Iterator[str]:
    yield from (
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
        "",
        "tokenizer = AutoTokenizer.from_pretrained(here)  # this directory, or its name on the hub",
        f"tokenizer.pad_token_id = {pad}",
        "model = AutoModelForSequenceClassification.from_pretrained(here).eval()",
    )


def _adapter(outputs: int, pad: int) -> Iterator[str]:
    yield from (
        "from peft import PeftConfig, PeftModel",
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
        "",
        "tokenizer = AutoTokenizer.from_pretrained(here)  # this directory, or its name on the hub",
        "base = PeftConfig.from_pretrained(here).base_model_name_or_path",
        f"model = AutoModelForSequenceClassification.from_pretrained(base, num_labels={outputs})",
        f"tokenizer.pad_token_id = model.config.get_text_config().pad_token_id = {pad}",
        "model = PeftModel.from_pretrained(model, here).eval()  # with the head that was trained",
    )


def _labels(hf_config: Mapping[str, Any]) -> list[str]:
    found = hf_config.get("id2label")
    if (
        not isinstance(found, Mapping) or not found
    ):  # transformers does not write the names that it gives to two classes
        return ["LABEL_0", "LABEL_1"]
    # In the file 10 comes before 2.
    return [str(found[key]) for key in sorted(found, key=lambda key: (len(str(key)), str(key)))]


def _formats(recipe: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    listed = recipe["config"].get("data", {}).get("train", [])
    for each in listed if isinstance(listed, list) else []:
        found = each.get("format") if isinstance(each, Mapping) else None
        then = found.get("then") if isinstance(found, Mapping) else None
        if isinstance(then, Mapping) or isinstance(found, Mapping):
            yield then if isinstance(then, Mapping) else found or {}


def _texts(format: Mapping[str, Any]) -> tuple[str, str]:
    """Return code that makes texts as they were in training, and the first arguments with which they are tokenized."""
    pairs = format.get("type") == "preference"
    if format.get("style", "chat") == "chat" if pairs else format.get("messages"):
        return "tokenizer.apply_chat_template(conversations, tokenize=False)", "add_special_tokens=False, "
    return (f"[prompt + answer + {_END}]" if pairs else '["one text", "another"]'), ""


def _shown(label: str) -> str:
    """Return a label, which may be a stranger's, as code in a cell of a table."""
    short = label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
    return f"`{printable(json.dumps(short, ensure_ascii=False)).replace('`', chr(39)).replace('|', '/')}`"
