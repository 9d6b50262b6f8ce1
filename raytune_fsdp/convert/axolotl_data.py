"""Convert axolotl's datasets: where their rows are, and their types to formats of ours."""

from __future__ import annotations

import re
from typing import Any

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.axolotl_kd import TYPES
from raytune_fsdp.convert.axolotl_preferences import FIELDS, TEMPLATES, format_of_rl, rows_of_rl, template_of_rl
from raytune_fsdp.convert.preferences import JUDGED, PAIRS, TOO_LONG
from raytune_fsdp.convert.rules import (
    Translation,
    a_map,
    flag,
    in_words,
    leave,
    number,
    refuse,
    same,
    settled,
    text,
    words,
)
from raytune_fsdp.convert.runs import BUILDERS, part_of_files, place

_LISTS = ("datasets", "test_datasets", "pretraining_dataset")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning that our chat format finds automatically."""
_TRAINED = ("train", "training", "weight")
"""Keys that say whether a message is trained on."""
_OWN_TYPES = (
    "field_instruction",
    "field_input",
    "field_output",
    "field_system",
    "format",
    "no_input_format",
    "system_prompt",
    "system_format",
)
_OF_HUB = "hf://datasets/"
_BRACES = {"{", "}"}


def prepare_data(c: Translation) -> None:
    """Carry all datasets, what becomes of long documents in them, and the evaluation."""
    found = {name: _list(c, name) for name in _LISTS}
    train, eval_sets = found["datasets"] + found["pretraining_dataset"], found["test_datasets"]
    if not train:
        c.problems.append("no dataset is named: set datasets in the file")
        return
    c.put("data.train", train, "datasets")
    if eval_sets:
        c.put("data.eval", eval_sets, "test_datasets")
        c.say("val_set_size", "left", "test_datasets decides, there too")
    everything = c.get("train_on_inputs", flag, False)
    if everything and any(each["format"]["type"] == "chat" for each in [*train, *eval_sets]):
        c.say(
            "train_on_inputs",
            "refused",
            "in a chat it trains on what every role says, and not on the template's text around it; format.loss is "
            "the assistant's turns, or all with that text",
        )
    c.say(
        "train_on_inputs", "carried" if everything else "same", f"format.loss={'all' if everything else 'the answers'}"
    )
    size = c.get("val_set_size", number, 0)
    if size and not eval_sets:
        c.carry("val_set_size", "data.eval", {"fraction": size} if size < 1 else {"rows": int(size)})
    c.say("val_set_size", "same", "nothing is held out")
    _long_documents(c, {each["format"]["type"] for each in train}, pretraining=bool(found["pretraining_dataset"]))
    chats = [each for each in train if each["format"]["type"] == "chat" or _messages_of_pairs(each["format"])]
    _templates(c, chats)
    _tokens(c, len(chats) == len(train))


def _messages_of_pairs(rows: dict[str, Any]) -> bool:
    """Return whether answers that are compared are a conversation's."""
    return rows["type"] in (PAIRS, JUDGED) and rows.get("style") != "plain"


_OVERLAP = 256
"""The most tokens that two windows of a text share in packed pretraining."""


def _long_documents(c: Translation, types: set[str], *, pretraining: bool) -> None:
    """Carry the strategy for long rows. axolotl cuts up texts before it applies; here one rule is for all rows."""
    key, field = "excess_length_strategy", "data.long_documents"
    how = c.get(key, text, "drop")
    ours = {"drop": "drop", "truncate": "truncate", "raise": "error"}.get(how)
    if ours is None:
        c.say(key, "refused", "unknown to axolotl; it has drop, truncate and raise")
        return
    cut = "truncate" if pretraining and not c.get("sample_packing", flag, False) else "split"
    others = types - {"completion"}
    if (pretraining or "completion" in types) and others:
        if key in c.dropping:
            c.tell_default(field, "error", f"ours: {key} is dropped, and a long document stops the run")
            return
        why = (
            f"there {how} is for {', '.join(sorted(others))} only, and long texts of type completion are cut up; here "
            "one rule is for all: set data.long_documents in the result, or make two runs of it"
        )
        c.say(key, "refused", why)
        c.refuse_unsaid(key, f"not in the file, and {how} by default: {why}")
        return
    if others:
        c.carry(key, field, ours, TOO_LONG if ours == "truncate" and others & {PAIRS, JUDGED} else "")
        c.default(field, ours, "what axolotl does with more than sequence_len tokens")
        return
    why = "what axolotl does with texts of more than sequence_len tokens"
    if pretraining and cut == "split":
        why += f"; there each window repeats the last {_OVERLAP} tokens of the one before it, here none is repeated"
    c.say(key, "left", f"texts are cut up before it, there too: {in_words(field, cut)}")
    c.default(field, cut, why)


def _list(c: Translation, name: str) -> list[dict[str, Any]]:
    found_numbers = (re.match(rf"{name}\.([0-9]{{1,9}})\.", key) for key in c.given)
    prefixes = [f"{name}.{number}." for number in sorted({int(each[1]) for each in found_numbers if each})]
    if name in c.given and not prefixes:
        if name == "pretraining_dataset" and isinstance(spelled(c.given[name]), str):
            found = {**place(c.get(name, text, "")), "format": {"type": "completion"}}
            c.say(name, "carried", in_words("data.train", [found]))
            return [found]
        c.say(name, "refused", "must be a list of maps, each with a path")
    ours = "data.eval" if name == "test_datasets" else "data.train"
    kind = "pretrain" if name == "pretraining_dataset" else ""
    return [_dataset(c, prefix, f"{ours}.{index}", kind) for index, prefix in enumerate(prefixes)]


def _dataset(c: Translation, prefix: str, ours: str, kind: str) -> dict[str, Any]:
    name, files = c.get(f"{prefix}path", text, ""), c.get(f"{prefix}data_files", words, [])
    found: dict[str, Any] = dict(place(name))
    if not name:
        c.problems.append(f"{prefix}path is not set: name a file, a directory or a dataset of the hub")
    if files:
        found = _file(c, prefix, name if "hub" in found and name not in BUILDERS else "", files)
    for key, field in (("name", "subset"), ("revision", "revision")):
        if "hub" in found and f"{prefix}{key}" in c.given:
            found[field] = c.get(f"{prefix}{key}", text, None)
        elif not found.get("path", "").startswith(_OF_HUB) or key == "name":
            c.say(f"{prefix}{key}", "refused", "files have none: name those that it stands for in path or data_files")
    if "hub" in found:
        if (split := c.get(f"{prefix}split", text, "train")) != "train":
            found["split"] = split
    else:
        part_of_files(c, f"{prefix}split", found)
    where = in_words(ours, found)
    c.say_all((f"{prefix}{key}" for key in ("path", "data_files", "name", "revision", "split")), "carried", where)
    found["format"] = _format(c, prefix, kind)
    if template := template_of_rl(c, prefix):
        found["chat_template"] = template
    return found


def _file(c: Translation, prefix: str, hub: str, files: list[str]) -> dict[str, Any]:
    """Return the file in `data_files`; it may belong to a revision of a hub dataset."""
    if len(files) > 1:
        why = "a dataset has one place here: write one entry for each file, or a pattern"
        c.say(f"{prefix}data_files", "refused", why)
    revision = c.get(f"{prefix}revision", text, "")
    if not hub:
        return {"path": files[0]}
    if not re.fullmatch(r"[\w.-]*", revision):
        c.say(f"{prefix}revision", "refused", "must be a commit, or a tag or branch without a slash, in a file's URL")
    return {"path": f"{_OF_HUB}{hub}{revision and f'@{revision}'}/{files[0]}"}


def _format(c: Translation, prefix: str, kind: str) -> dict[str, Any]:
    """Return the format of a dataset by its type, and say what becomes of its other keys."""
    if rows := rows_of_rl(c):
        return format_of_rl(c, prefix, rows)
    own = [key for key in _OWN_TYPES if f"{prefix}type.{key}" in c.given]
    if own:
        return _own_type(c, f"{prefix}type.")
    key = f"{prefix}type"
    kind = c.get(key, text, kind).removeprefix(TYPES)
    everything = {"loss": "all"} if c.get("train_on_inputs", flag, False) else {}
    made: dict[str, Any]
    if kind in ("chat_template", "sharegpt"):
        made = _chat(c, prefix, kind)
    elif kind == "alpaca":
        made = {"type": "instruction", "style": "alpaca", **everything}
    elif kind in ("completion", "pretrain"):
        column = c.get(f"{prefix}field", text, c.get(f"{prefix}text_column", text, "text"))
        made = {"type": "completion", "text": column}
        c.say_all((f"{prefix}field", f"{prefix}text_column"), "carried", in_words("format.text", column))
    elif not kind:
        made = {"type": "tokens"}
        c.tell_default(f"{prefix}type", None, "rows that are tokenized already: format.type=tokens")
    else:
        why = "no format of ours; see `format` of types template and python for rows of any kind"
        c.say(key, "refused", why, prefix.rstrip("."))
        return {"type": "chat"}
    c.say(key, "carried", in_words("format", made))
    return made


def _chat(c: Translation, prefix: str, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "chat"}

    def name(key: str, field: str, usual: str | None, standing_for: str | None = None) -> None:
        found = c.get(f"{prefix}{key}", text, usual)
        if found is not None and found != standing_for:
            made[field] = found
        c.say(f"{prefix}{key}", "carried", in_words(f"format.{field}", found))

    name("field_messages", "messages", "conversations" if kind == "sharegpt" else None, "messages")
    for key in ("role", "content"):
        old = f"message_field_{key}"
        name(old if f"{prefix}{old}" in c.given else f"message_property_mappings.{key}", key, None)
    name("field_tools", "tools", None, "tools")
    if f"{prefix}roles" in c.given:
        sources = c.get(f"{prefix}roles", a_map, {})
        made["roles"] = {
            str(each): target
            for target, names in sources.items()
            for each in (names if isinstance(names, list) else [names])
        }
        c.say(f"{prefix}roles", "carried", in_words("format.roles", made["roles"]))
    # `human` and `gpt` are names for the user and the assistant.
    names = {"human": "user", "gpt": "assistant"}
    trained = {names.get(role, role) for role in c.get(f"{prefix}roles_to_train", words, ["assistant"])}
    if trained != {"assistant"}:
        c.say(
            f"{prefix}roles_to_train",
            "refused",
            "format.loss is the assistant's turns, its last one, or all, with system messages and the template's text: "
            "other roles alone cannot be trained on",
        )
    c.say(f"{prefix}roles_to_train", "same", "format.loss=assistant")
    for key in ("field_thinking", "template_thinking_key"):
        known = c.get(f"{prefix}{key}", text, "thinking") in _REASONING
        why = "found automatically" if known else f"reasoning has one of these names here: {', '.join(_REASONING)}"
        c.say(f"{prefix}{key}", "same" if known else "refused", why)
    key = f"{prefix}message_field_training"
    if c.get(key, text, "train") in _TRAINED:
        c.say(key, "same", 'a message with "train": false is never trained on')
    c.say(key, "refused", f"a message says whether it is trained on under one of these names: {', '.join(_TRAINED)}")
    return made


def _own_type(c: Translation, prefix: str) -> dict[str, Any]:
    """Convert a type that the file defines: a template with columns in it, if it is the same for all rows."""
    columns = {part: c.get(f"{prefix}field_{part}", text, part) for part in ("instruction", "output")}
    prompt = c.get(f"{prefix}format", text, "{instruction} {input} ")
    without = c.get(f"{prefix}no_input_format", text, prompt)
    system, around = c.get(f"{prefix}system_prompt", text, ""), c.get(f"{prefix}system_format", text, "{system}")
    keys = [f"{prefix}{key}" for key in _OWN_TYPES]
    why = ""
    if f"{prefix}field_system" in c.given:
        why = "a row without a system text has no system_format there, and a text has the same parts in every row here"
    elif without != prompt or _BRACES & set(prompt.replace("{instruction}", "")):
        why = "a text has the same columns in every row here"
    elif system and _BRACES & set(around.replace("{system}", "")):
        why = "system_format has more in braces than {system}"
    if why:
        why += "; see `format` of types template and python"
        c.say_all(keys, "refused", why, prefix.removesuffix(".type."))
        return {"type": "template", "prompt": "", "completion": "{output}"}
    before = around.replace("{system}", system) if system else ""
    made = {
        "type": "template",
        "prompt": before.replace("{", "{{").replace("}", "}}")
        + prompt.replace("{instruction}", f"{{{columns['instruction']}}}"),
        "completion": f"{{{columns['output']}}}",
        **({"loss": "all"} if c.get("train_on_inputs", flag, False) else {}),
    }
    c.say(f"{prefix}field_input", "left", "its text has no {input}, there too")
    if not system:
        c.say(f"{prefix}system_format", "left", "means nothing without a system text")
        c.say(f"{prefix}system_prompt", "same", "no system text")
    c.say_all(keys, "carried", in_words("format", made))
    return made


def _templates(c: Translation, chats: list[dict[str, Any]]) -> None:
    """Carry the chat template, if all datasets have the same, and its variables."""
    keys = [key for key in c.given if key == "chat_template" or re.fullmatch(r"datasets\.\d+\.chat_template", key)]
    names = {c.get(key, text, "") for key in keys}
    for key in keys:
        name = c.get(key, text, "")
        if not chats:
            c.say(key, "left", "no dataset is a chat")
        elif len(names) > 1:
            c.say(key, "refused", "datasets differ: drop these, and set chat_template of each dataset in the result")
        elif name == "tokenizer_default" or name.startswith("tokenizer_default_fallback_"):
            c.say(key, "same", "the tokenizer's own")
        elif name in TEMPLATES:
            c.carry(key, "data.chat_template", TEMPLATES[name])
        elif name == "jinja":
            c.say(key, "same", "chat_template_jinja decides")
        else:
            c.say(key, "refused", "not a template of this package; without it, the tokenizer's own is used")
    source = c.get("chat_template_jinja", text, "")
    if source.endswith((".jinja", ".j2")):
        c.carry("chat_template_jinja", "data.chat_template", source)
    c.say("chat_template_jinja", "refused", "save the template to a file, and name that")
    if not chats:
        c.say("chat_template_kwargs", "left", "no dataset is a chat")
    c.carry("chat_template_kwargs", "data.chat_template_kwargs", c.get("chat_template_kwargs", a_map, {}))


def _tokens(c: Translation, only_chats: bool) -> None:
    """Carry new tokens, and tokens that end a text; in a chat those come from its template."""
    special = "special_tokens.additional_special_tokens"
    named = ["special_tokens.pad_token"]
    ends = [f"special_tokens.{each}" for each in ("bos_token", "eos_token", "unk_token")]
    if only_chats:
        named += ends
    else:
        c.say_all(ends, "refused", "the tokenizer's own stands around a text")
    # A dict, because no token may be named twice.
    added: dict[str, dict[str, Any]] = {}
    for each in [*c.get(special, words, []), *(c.get(key, text, "") for key in named)]:
        if each:
            added.setdefault(each, {"text": each, "special": True})
    for each in c.get("tokens", words, []):
        added.setdefault(each, {"text": each})
    c.carry_all((special, "tokens"), "model.add_tokens", list(added.values()))
    for key in named:
        note = "what is a token already stays as it is" + (
            "" if key.endswith("pad_token") else "; the chat template says where it stands"
        )
        c.carry(key, "model.add_tokens", list(added.values()), note)


def _each(names: str, *lists: str) -> str:
    return " ".join(f"{name}.*.{word}" for name in lists or ("datasets", "test_datasets") for word in names.split())


DATA_OPTIONS = (
    settled("datasets test_datasets pretraining_dataset", "`data.train`, `data.eval`"),
    settled(
        f"{_each('path data_files name split', *_LISTS)} {_each('revision')}",
        "`data.train.N.path` or `hub`, `subset`, `split`, `revision`, `rows`",
    ),
    settled(
        _each("type", *_LISTS),
        "`format`: chat_template, sharegpt, alpaca, completion, pretrain; with rl chatml.intel and kin; others refused",
    ),
    settled(
        _each(" ".join(f"type.{key}" for key in _OWN_TYPES)),
        "`format: {type: template, …}`, if its text is the same for all rows",
    ),
    settled(f"{_each('field')} pretraining_dataset.*.text_column", "`format.text`"),
    settled(_each("field_messages field_tools roles"), "`format.messages`, `tools`, `roles`; with rl `format.prompt`"),
    settled(_each(" ".join(FIELDS)), "with rl: `format.prompt`, `chosen`, `rejected`, `completion`, `label`"),
    settled(
        _each(
            "message_property_mappings.role message_property_mappings.content message_field_role message_field_content"
        ),
        "`format.role`, `format.content`",
    ),
    settled(_each("roles_to_train"), "same, if it is the assistant; else refused"),
    settled(
        _each("message_field_training field_thinking template_thinking_key"),
        "same under the usual names, else refused",
    ),
    settled(_each("chat_template"), "`data.chat_template` (chatml, llama3)"),
    settled("chat_template chat_template_jinja", "`data.chat_template` (chatml, llama3, a file)"),
    settled("chat_template_kwargs", "`data.chat_template_kwargs`"),
    settled("train_on_inputs", "`format.loss: all`; refused with chats"),
    settled("val_set_size", "`data.eval.fraction` or `rows`"),
    settled("excess_length_strategy", "`data.long_documents`; refused for texts together with other rows"),
    settled("tokens special_tokens.additional_special_tokens", "`model.add_tokens`"),
    settled("special_tokens.pad_token", "`model.add_tokens`, which leaves alone what is a token already"),
    settled(
        "special_tokens.bos_token special_tokens.eos_token special_tokens.unk_token",
        "`model.add_tokens` for chats, else refused",
    ),
    same("special_tokens", "the tokenizer's own"),
    same(_each("ds_type"), "by the file's extension"),
    leave(_each("trust_remote_code preprocess_shards", *_LISTS), "no code of a dataset is run"),
    leave("eot_tokens", "the chat template says where a turn ends"),
    refuse(
        _each("train_on_eos train_on_eot"), "a turn's end is trained on as the turn", off=("turn",), alike="as here"
    ),
    refuse(
        f"{_each('shards shards_idx')} pretraining_dataset.*.skip",
        "use `rows` of a dataset for a part of it",
        off=(False,),
    ),
    refuse(
        _each("input_transform input_format conversation field_human field_model drop_system_message"),
        "rows are read as `format` says; see type python there for rows that have to be changed first",
        off=(False,),
    ),
    refuse(_each("chat_template_jinja"), "save the template to a file, and name that as the dataset's chat_template"),
    refuse(
        _each("split_thinking"),
        "put it into a template, and name that as the dataset's chat_template",
        off=(False,),
    ),
    refuse(
        _each("message_field_training_detail"), "a whole message is trained on or not, by its `train`", off=(False,)
    ),
    refuse("default_system_message", "put it into the rows, or into a template of your own"),
)
