"""axolotl's datasets: where their rows are, and their types as formats of ours."""

from __future__ import annotations

import re
from typing import Any

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.rules import (
    Crossing,
    TheirOption,
    a_map,
    flag,
    in_words,
    leave,
    number,
    refuse,
    same,
    text,
    told,
    words,
)
from raytune_fsdp.convert.runs import place

_LISTS = ("datasets", "test_datasets", "pretraining_dataset")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning that are found by themselves."""
_OWN_TYPES = ("field_instruction", "field_input", "field_output", "field_system", "format", "no_input_format")
_TEMPLATES = {"chatml": "chatml", "llama3": "llama-3"}


def prepare_data(c: Crossing) -> None:
    """All datasets, what becomes of long documents in them, and the evaluation."""
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
    c.say(
        "train_on_inputs", "carried" if everything else "same", f"format.loss={'all' if everything else 'the answers'}"
    )
    size = c.get("val_set_size", number, 0)
    if size and not eval_sets:
        c.carry("val_set_size", "data.eval", {"fraction": size} if size < 1 else {"rows": int(size)})
    c.say("val_set_size", "same", "nothing is held out")
    _long_documents(c, {each["format"]["type"] for each in train}, pretraining=bool(found["pretraining_dataset"]))
    _templates(c, [each for each in train if each["format"]["type"] == "chat"])
    _tokens(c, all(each["format"]["type"] == "chat" for each in train))


def _long_documents(c: Crossing, types: set[str], *, pretraining: bool) -> None:
    how = c.get("excess_length_strategy", text, "drop")
    ours = {"drop": "drop", "truncate": "truncate", "raise": "error"}.get(how)
    if ours is None:
        c.say("excess_length_strategy", "refused", "unknown to axolotl; it has drop, truncate and raise")
        return
    if types == {"completion"}:
        # These are cut up before the strategy sees them.
        ours = "truncate" if pretraining else "split"
        c.say("excess_length_strategy", "left", f"completion texts are not dropped there: data.long_documents={ours}")
    c.carry("excess_length_strategy", "data.long_documents", ours)
    c.default("data.long_documents", ours, "what axolotl does with more than sequence_len tokens")


def _list(c: Crossing, name: str) -> list[dict[str, Any]]:
    found_numbers = (re.match(rf"{name}\.(\d+)\.", key) for key in c.given)
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


def _dataset(c: Crossing, prefix: str, ours: str, kind: str) -> dict[str, Any]:
    name, files = c.get(f"{prefix}path", text, ""), c.get(f"{prefix}data_files", words, [])
    found: dict[str, Any] = dict(place(name))
    if not name:
        c.problems.append(f"{prefix}path is not set: name a file, a directory or a dataset of the hub")
    if len(files) == 1:
        folder = f"hf://datasets/{name}/" if "hub" in found else ""
        found = {"path": files[0] if name in ("json", "csv", "parquet", "text", "arrow") else f"{folder}{files[0]}"}
    elif files:
        c.say(
            f"{prefix}data_files",
            "refused",
            "a dataset has one place here: write one entry for each file, or a pattern",
        )
    if "hub" in found:
        for key, field in (("name", "subset"), ("revision", "revision")):
            if f"{prefix}{key}" in c.given:
                found[field] = c.get(f"{prefix}{key}", text, None)
    split = c.get(f"{prefix}split", text, "train")
    if split != "train" and "hub" in found:
        found["split"] = split
    elif first := re.fullmatch(r"train\[:(\d+)\]", split):
        found["rows"] = {"first": int(first[1])}
    elif split != "train":
        c.say(f"{prefix}split", "refused", "files have no such split: use `rows` for a part of them")
    where = in_words(ours, found)
    for key in ("path", "data_files", "name", "revision", "split"):
        c.say(f"{prefix}{key}", "carried", where)
    found["format"] = _format(c, prefix, kind)
    return found


def _format(c: Crossing, prefix: str, kind: str) -> dict[str, Any]:
    """The format of a dataset by its type. The rest of its keys are said on the way."""
    own = [key for key in _OWN_TYPES if f"{prefix}type.{key}" in c.given]
    if own:
        return _own_type(c, f"{prefix}type.")
    key = f"{prefix}type"
    kind = c.get(key, text, kind)
    everything = {"loss": "all"} if c.get("train_on_inputs", flag, False) else {}
    made: dict[str, Any]
    if kind in ("chat_template", "sharegpt"):
        made = _chat(c, prefix, kind)
    elif kind == "alpaca":
        made = {"type": "instruction", "style": "alpaca", **everything}
    elif kind in ("completion", "pretrain"):
        column = c.get(f"{prefix}field", text, c.get(f"{prefix}text_column", text, "text"))
        made = {"type": "completion", "text": column}
        for each in ("field", "text_column"):
            c.say(f"{prefix}{each}", "carried", in_words("format.text", column))
    elif not kind:
        made = {"type": "tokens"}
        c.tell_default(f"{prefix}type", None, "rows that are tokenized already: format.type=tokens")
    else:
        why = "no format of ours; see `format` of types template and python for rows of any kind"
        c.say(key, "refused", why, prefix.rstrip("."))
        return {"type": "chat"}
    c.say(key, "carried", in_words("format", made))
    return made


def _chat(c: Crossing, prefix: str, kind: str) -> dict[str, Any]:
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
    made["loss"] = _loss(c, prefix)
    for key in ("field_thinking", "template_thinking_key"):
        known = c.get(f"{prefix}{key}", text, "thinking") in _REASONING
        why = "found by itself" if known else f"reasoning has one of these names here: {', '.join(_REASONING)}"
        c.say(f"{prefix}{key}", "same" if known else "refused", why)
    if c.get(f"{prefix}message_field_training", text, "train") == "train":
        c.say(f"{prefix}message_field_training", "same", 'a message with "train": false is never trained on')
    c.say(
        f"{prefix}message_field_training", "refused", "a message says whether it is trained on under the name `train`"
    )
    if made["loss"] == "assistant":
        del made["loss"]
    return made


def _loss(c: Crossing, prefix: str) -> str:
    """Which turns are trained on. `human` and `gpt` are names for the user and the assistant."""
    names = {"human": "user", "gpt": "assistant"}
    trained = {names.get(role, role) for role in c.get(f"{prefix}roles_to_train", words, ["assistant"])}
    if c.get("train_on_inputs", flag, False) or trained >= {"assistant", "user"}:
        loss = "all"
    else:
        loss = "assistant"
        if trained != {"assistant"}:
            c.say(
                f"{prefix}roles_to_train",
                "refused",
                "trained on are the assistant's turns, its last one, or everything",
            )
    c.say(f"{prefix}roles_to_train", "carried", f"format.loss={loss}")
    return loss


def _own_type(c: Crossing, prefix: str) -> dict[str, Any]:
    """A type that the file defines: one text with the names of columns in it, if it has one for all rows."""
    columns = {part: c.get(f"{prefix}field_{part}", text, part) for part in ("instruction", "input", "output")}
    prompt = c.get(f"{prefix}format", text, "{instruction} {input} ")
    without = c.get(f"{prefix}no_input_format", text, prompt)
    keys = [f"{prefix}{key}" for key in _OWN_TYPES]
    if c.get(f"{prefix}system_prompt", text, ""):
        c.say(f"{prefix}system_prompt", "refused", "write it into the text: see `format.prompt` of type template")
    c.say(f"{prefix}system_prompt", "same", "none")
    c.say(f"{prefix}system_format", "left", "means nothing without a system message")
    if "{input}" in prompt or without != prompt or {"{", "}"} & set(re.sub(r"\{instruction\}", "", prompt)):
        for key in keys:
            why = "a text has the same columns in every row here; see `format` of types template and python"
            c.say(key, "refused", why, prefix.removesuffix(".type."))
        return {"type": "template", "prompt": "", "completion": "{output}"}
    made = {
        "type": "template",
        "prompt": prompt.replace("{instruction}", f"{{{columns['instruction']}}}"),
        "completion": f"{{{columns['output']}}}",
        **({"loss": "all"} if c.get("train_on_inputs", flag, False) else {}),
    }
    for key in keys:
        unused = key.rpartition(".")[2] in ("field_input", "field_system")
        c.say(key, "left" if unused else "carried", "not in its text" if unused else in_words("format", made))
    return made


def _templates(c: Crossing, chats: list[dict[str, Any]]) -> None:
    """One template serves all datasets."""
    keys = [key for key in c.given if key == "chat_template" or re.fullmatch(r"datasets\.\d+\.chat_template", key)]
    names = {c.get(key, text, "") for key in keys}
    for key in keys:
        name = c.get(key, text, "")
        if not chats:
            c.say(key, "left", "no dataset is a chat")
        elif len(names) > 1:
            c.say(key, "refused", "all datasets have the same template here")
        elif name == "tokenizer_default" or name.startswith("tokenizer_default_fallback_"):
            c.say(key, "same", "the tokenizer's own")
        elif name in _TEMPLATES:
            c.carry(key, "data.chat_template", _TEMPLATES[name])
        elif name == "jinja":
            c.say(key, "same", "chat_template_jinja decides")
        else:
            c.say(key, "refused", "not a template of this package; without it, the tokenizer's own is used")
    source = c.get("chat_template_jinja", text, "")
    if source.endswith((".jinja", ".j2")):
        c.carry("chat_template_jinja", "data.chat_template", source)
    c.say("chat_template_jinja", "refused", "save the template to a file, and name that")


def _tokens(c: Crossing, only_chats: bool) -> None:
    """New tokens, and the tokens that end a text, which a chat has from its template."""
    added = [{"text": each, "special": True} for each in c.get("special_tokens.additional_special_tokens", words, [])]
    added += [{"text": each} for each in c.get("tokens", words, [])]
    for key in ("special_tokens.additional_special_tokens", "tokens"):
        c.carry(key, "model.add_tokens", added)
    for key in ("bos_token", "eos_token", "unk_token"):
        why = "the chat template says where it stands" if only_chats else "the tokenizer's own is used"
        c.say(f"special_tokens.{key}", "left" if only_chats else "refused", why)


def data_options() -> tuple[TheirOption, ...]:
    def each(names: str, *lists: str) -> str:
        return " ".join(f"{name}.*.{word}" for name in lists or ("datasets", "test_datasets") for word in names.split())

    places = each("path data_files name split", *_LISTS)
    own = " ".join(f"type.{key}" for key in (*_OWN_TYPES, "system_prompt", "system_format"))
    return (
        told("datasets test_datasets pretraining_dataset", "`data.train`, `data.eval`"),
        told(f"{places} {each('revision')}", "`data.train.N.path` or `hub`, `subset`, `split`, `revision`, `rows`"),
        told(
            each("type", *_LISTS), "`format`: chat_template, sharegpt, alpaca, completion, pretrain; others are refused"
        ),
        told(each(own), "`format: {type: template, …}`, if its text is the same for all rows"),
        told(f"{each('field')} pretraining_dataset.*.text_column", "`format.text`"),
        told(each("field_messages field_tools roles"), "`format.messages`, `tools`, `roles`"),
        told(
            each(
                "message_property_mappings.role message_property_mappings.content message_field_role "
                "message_field_content"
            ),
            "`format.role`, `format.content`",
        ),
        told(each("roles_to_train"), "`format.loss`"),
        told(
            each("message_field_training field_thinking template_thinking_key"),
            "same under the usual names, else refused",
        ),
        told(each("chat_template"), "`data.chat_template` (chatml, llama3)"),
        told("chat_template chat_template_jinja", "`data.chat_template` (chatml, llama3, a file)"),
        told("train_on_inputs", "`format.loss: all`"),
        told("val_set_size", "`data.eval.fraction` or `rows`"),
        told("excess_length_strategy", "`data.long_documents`"),
        told("tokens special_tokens.additional_special_tokens", "`model.add_tokens`"),
        told(
            "special_tokens.bos_token special_tokens.eos_token special_tokens.unk_token", "left for chats, else refused"
        ),
        same("special_tokens special_tokens.pad_token", "padding changes nothing of what is learned"),
        same(each("ds_type"), "by the file's extension"),
        leave(each("trust_remote_code preprocess_shards", *_LISTS), "no code of a dataset is run"),
        leave("eot_tokens", "the chat template says where a turn ends"),
        refuse(
            each("train_on_eos train_on_eot"), "a turn's end is trained on as the turn", off=("turn",), alike="as here"
        ),
        refuse(
            each(
                "shards shards_idx input_transform input_format conversation chat_template_jinja split_thinking "
                "drop_system_message message_field_training_detail field_human field_model logprobs_field temperature"
            )
            + " pretraining_dataset.*.skip",
            "nothing of ours does this",
            off=(False,),
        ),
        refuse("default_system_message chat_template_kwargs", "put it into the rows, or into a template of your own"),
    )
