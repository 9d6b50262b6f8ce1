"""Convert other projects' options of LoRA and of a quantized base."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from raytune_fsdp.base.untrusted import UnsoundError, read_json
from raytune_fsdp.config.sections.method import ALL_LINEAR
from raytune_fsdp.convert.rules import MOST_BYTES, Translation, WrongValueError, flag, number, text, whole, words

PEFT_CHOOSES = {
    **dict.fromkeys(
        (
            "llama", "llama4", "mistral", "mixtral", "stablelm", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3",
            "opt", "gptj", "gpt_neo",
        ),
        ["q_proj", "v_proj"],
    ),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon"), ["query_key_value"]),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ["c_attn"]),
    "mpt": ["Wqkv"],
    "phi": ["q_proj", "v_proj", "fc1", "fc2"],
    "codegen": ["qkv_proj"],
    "nemotron_h": ["q_proj", "k_proj", "v_proj", "o_proj"],
}  # fmt: skip
"""What PEFT adapts of a type of model where no modules are named. A test compares it with the installed PEFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The names of a project's options for adapters, and its defaults. The name of an option that it lacks is empty."""

    owner: str
    """The option that asks for adapters."""
    rank: str
    alpha: str
    dropout: str
    targets: str
    saved: str
    parameters: str = ""
    stabilized: str = ""
    dora: str = ""
    ratio: str = ""
    adapter: str = ""
    defaults: tuple[int, int | None, float]
    """Rank, alpha (None: twice the rank) and dropout."""
    all_words: tuple[str, ...] = (ALL_LINEAR,)
    """The words with which it names all linear layers."""
    all_by_default: bool = False


@dataclass(frozen=True, slots=True)
class Quantized:
    """The option that asks for a quantized base, and the type that it gets here."""

    key: str
    kind: Literal["nf4", "int8"]


NOT_BIT_EQUAL = {
    "nf4": "there the scales of scales span rows, here each row has its own: numbers differ slightly",
    "int8": "only weights are rounded, with a scale for 64 numbers; there (LLM.int8) the input of a layer is rounded, "
    "too, except its outliers",
}
"""Both types are close to those of bitsandbytes. Its 8 bits also round the inputs of a layer, which we never do."""
_NESTED = "scales are one byte each"
_NOT_NESTED = f"there scales are fp32, here {_NESTED}"


def base_of_flags(c: Translation, *, beside_adapters: bool, way_out: str) -> Quantized | None:
    """Return the quantized base that load_in_4bit or load_in_8bit asks for; None if neither does."""
    asked = [key for key in ("load_in_4bit", "load_in_8bit") if c.get(key, flag, False)]
    for key in asked:
        if not beside_adapters:
            c.say(key, "refused", f"weights are quantized only under adapters: {way_out}")
        elif len(asked) > 1:
            c.say(key, "refused", "4 bits and 8 bits are asked for: drop one of the two")
    c.say_all({"load_in_4bit", "load_in_8bit"}.difference(asked), "same", "off")
    if not asked or not beside_adapters:
        return None
    return Quantized(asked[0], "nf4" if asked[0] == "load_in_4bit" else "int8")


def details_of_nf4(c: Translation, *, type_: str, nested: str, nested_by_default: bool) -> None:
    """Convert the details of a base of 4 bits: its type, and whether the scales are quantized, too."""
    kind, doubled = c.get(type_, text, "nf4"), c.get(nested, flag, nested_by_default)
    if kind == "nf4":
        c.carry(type_, "method.quantization", kind)
    else:
        c.say(type_, "refused", "weights of 4 bits are nf4 here, as they are there without this option")
    c.say(nested, "same" if doubled else "carried", _NESTED if doubled else _NOT_NESTED)
    if not doubled and nested not in c.given:
        c.tell_default("method.quantization", "nf4", f"without {nested}, the default, {_NOT_NESTED}")


def carry_lora(c: Translation, lora: Lora, quantized: Quantized | None = None) -> None:
    """Turn a project's adapters into ours."""
    kind = "lora" if quantized is None else "qlora"
    c.put("method.type", kind, lora.owner)
    c.say(lora.owner, "carried", f"method.type={kind}")
    if quantized is not None:
        c.carry(quantized.key, "method.quantization", quantized.kind, NOT_BIT_EQUAL[quantized.kind])
    rank, alpha, dropout = lora.defaults
    _value(c, lora.rank, "method.rank", c.get(lora.rank, whole, rank))
    found = c.get(lora.rank, whole, rank)
    _value(c, lora.alpha, "method.alpha", c.get(lora.alpha, whole, 2 * found if alpha is None else alpha))
    _value(c, lora.dropout, "method.dropout", c.get(lora.dropout, number, dropout))
    asked = c.get(lora.targets, _names, None)
    if asked is not None:
        every = asked in lora.all_words or (isinstance(asked, list) and len(asked) == 1 and asked[0] in lora.all_words)
        c.carry(lora.targets, "method.target_modules", ALL_LINEAR if every else asked)
    elif lora.all_by_default:
        c.default("method.target_modules", ALL_LINEAR, f"{lora.targets} by default")
    elif "method.target_modules" not in c.fields:
        _as_peft_chooses(c, lora.targets)
    for key, field, read in (
        (lora.saved, "method.modules_to_save", words),
        (lora.parameters, "method.target_parameters", words),
        (lora.stabilized, "method.rank_stabilized", flag),
        (lora.dora, "method.dora", flag),
        (lora.ratio, "method.lr_ratio", number),
        (lora.adapter, "method.adapter", text),
    ):
        value: Any = c.get(key, read, None) if key else None  # type: ignore[operator]
        if value not in (None, False, []):
            c.carry(key, field, value)
        c.say(key, "same", "off")


def _as_peft_chooses(c: Translation, key: str) -> None:
    """Name the modules that PEFT adapts where none are named, which it chooses by the type of the model."""
    kind = _type_of_model(c.get(c.first("model_name_or_path", "base_model"), text, ""))
    if kind is None:
        why = "PEFT chooses modules by the type of the model, which is not known here: q_proj and v_proj in most"
        c.refuse_unsaid(key, f"{why}. Name them, or all-linear, in the file")
    elif kind in PEFT_CHOOSES:
        c.default("method.target_modules", PEFT_CHOOSES[kind], f"what PEFT takes of a {kind} without {key}")
    else:
        why = f"PEFT knows none for a {kind}, and would refuse it"
        c.refuse_unsaid(key, f"{why}: name them, or all-linear, in the file")


def _type_of_model(name: str) -> str | None:
    """Return the type in a model's config.json, if it is here, or one of the public models that are known offline."""
    with suppress(OSError, UnsoundError):
        content = read_json(Path(name, "config.json"), limit=MOST_BYTES, links=True)
        kind = content.get("model_type") if isinstance(content, dict) else None
        return kind if isinstance(kind, str) else None
    public = json.loads(files("raytune_fsdp.predict").joinpath("architectures.json").read_text(encoding="utf-8"))
    known: dict[str, str] = {each.lower(): found["config"]["model_type"] for each, found in public.items()}
    return known.get(name.lower())


def _value(c: Translation, key: str, field: str, value: Any) -> None:
    c.carry(key, field, value)
    if key not in c.given:
        c.default(field, value, f"{key} by default")


def _names(value: Any) -> str | list[str]:
    """Read a word that means all layers, an expression, or a list of names."""
    if isinstance(value, list):
        return [text(each) for each in value]
    found = text(value)
    if not found.strip():
        raise WrongValueError("must name modules")
    return words(found) if "," in found else found
