"""LLaMA-Factory's datasets: names that a file `dataset_info.json` explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.rules import Crossing, flag, in_words, number, text, whole, words
from raytune_fsdp.untrusted import UnsoundError, read_json, reason

_INFO = "dataset_info.json"
_MAX_BYTES = 4_000_000
# What no row of ours has, by the name of the column or of the setting.
_UNKNOWN = ("history", "images", "videos", "audios", "chosen", "rejected", "kto_tag")
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "assistant"),
    "system_tag": ("system", "system"),
}


class _NotHereError(ValueError):
    """Why a dataset cannot be carried."""


def prepare_data(c: Crossing, *, pretraining: bool) -> None:
    """`data.train` and `data.eval`."""
    train = _datasets(c, "dataset", pretraining)
    if "dataset" not in c.given:
        c.problems.append("no dataset is named: set dataset in the file")
    if train:
        c.put("data.train", train, "dataset")
    evaluation = _datasets(c, "eval_dataset", pretraining)
    if evaluation:
        c.put("data.eval", evaluation, "eval_dataset")
    size = c.get("val_size", number, 0)
    if size > 0:
        c.carry("val_size", "data.eval", {"fraction": size} if size < 1 else {"rows": int(size)})
    c.say("val_size", "same", "nothing is held out")


def _datasets(c: Crossing, key: str, pretraining: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    names = c.get(key, words, [])
    if not names:
        return found
    try:
        info, folder = _info(c)
        for name in names:
            if info is None:
                found.append(_read({"hf_hub_url": name}, folder, c, pretraining))
            elif isinstance(info.get(name), dict):
                found.append(_read(info[name], folder, c, pretraining))
            else:
                raise _NotHereError(f"{folder / _INFO} has no map {name}")
    except _NotHereError as error:
        c.say(key, "refused", f"{error}", None)
        return []
    note = "; between a question and its input is an empty line here, there a line break"
    joined = any(each["format"].get("input") is not None for each in found)
    c.say(key, "carried", in_words("data.train" if key == "dataset" else "data.eval", found) + (note if joined else ""))
    return found


def _info(c: Crossing) -> tuple[dict[str, Any] | None, Path]:
    """What explains the names, and where it is: in `dataset_dir`, seen from here or from the file. None: hub names."""
    place = c.get("dataset_dir", text, "data")
    c.say("dataset_dir", "carried", "data.train: where the datasets are")
    if place == "ONLINE":
        return None, Path()
    for folder in (Path(place), c.directory / place):
        try:
            info = read_json(folder / _INFO, limit=_MAX_BYTES, links=True)
        except FileNotFoundError:
            continue
        except (OSError, UnsoundError, ValueError) as error:
            raise _NotHereError(f"{folder / _INFO}: {reason(error)}") from None
        if not isinstance(info, dict):
            raise _NotHereError(f"{folder / _INFO}: must be a map of datasets")
        return info, folder
    raise _NotHereError(
        f"{Path(place) / _INFO}, which explains its names, is not here: run the command where {place} is"
    )


def _read(entry: dict[str, Any], folder: Path, c: Crossing, pretraining: bool) -> dict[str, Any]:
    found = _place(entry, folder)
    for theirs, ours in (("subset", "subset"), ("split", "split")):
        if entry.get(theirs) and not (theirs == "split" and entry[theirs] == "train") and "hub" in found:
            found[ours] = str(entry[theirs])
    if entry.get("folder") or entry.get("ranking"):
        raise _NotHereError("a dataset with `folder` or `ranking` is not read here")
    found["format"] = _format(entry, c, pretraining)
    first, many = c.get("max_samples", whole, 0), entry.get("num_samples")
    if first > 0:
        found["rows"] = {"first": first}
    elif isinstance(many, int):
        found["rows"] = {"limit": many}
    return found


def _place(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    if "hf_hub_url" in entry:
        return {"hub": str(entry["hf_hub_url"])}
    if "cloud_file_name" in entry:
        return {"path": str(entry["cloud_file_name"])}
    if "file_name" in entry:
        return {"path": str(folder / str(entry["file_name"]))}
    raise _NotHereError("a dataset is a file or one of the Hugging Face hub; this one is neither")


def _format(entry: dict[str, Any], c: Crossing, pretraining: bool) -> dict[str, Any]:
    columns, tags = _maps(entry, "columns"), _maps(entry, "tags")
    # With `columns`, those that it leaves out are not read; without, they have their usual names.
    usual = {} if columns else {"prompt": "instruction", "query": "input", "response": "output"}
    columns = {**usual, **columns}
    unknown = [name for name in _UNKNOWN if columns.get(name)]
    if unknown:
        raise _NotHereError(f"a dataset with {', '.join(unknown)} is not read here")
    formatting = entry.get("formatting", "alpaca")
    if pretraining:
        return {"type": "completion", "text": columns.get("prompt", "text")}
    loss = "all" if c.get("train_on_prompt", flag, False) else ""
    if formatting == "alpaca":
        if columns.get("tools"):
            raise _NotHereError("tools are read in conversations only")
        made: dict[str, Any] = {"type": "instruction", "style": "chat", "prompt": columns.get("prompt", "instruction")}
        made |= {"input": columns.get("query"), "completion": columns.get("response", "output")}
        if columns.get("system"):
            made["system"] = columns["system"]
        return {**made, **({"loss": loss} if loss else {})}
    if columns.get("system"):
        raise _NotHereError("a system message of a conversation is its first message here, not a column")
    return _chat(columns, tags, loss or ("last_turn" if c.get("mask_history", flag, False) else ""))


def _chat(columns: dict[str, str], tags: dict[str, str], loss: str) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "chat", "messages": columns.get("messages", "conversations")}
    for tag, field in (("role_tag", "role"), ("content_tag", "content")):
        if tag in tags:
            made[field] = tags[tag]
    roles = {tags[tag]: role for tag, (usual, role) in _ROLES.items() if tags.get(tag, usual) not in (usual, role)}
    if roles:
        made["roles"] = roles
    if columns.get("tools", "tools") != "tools":
        made["tools"] = columns["tools"]
    return {**made, **({"loss": loss} if loss else {})}


def _maps(entry: dict[str, Any], name: str) -> dict[str, str]:
    value = spelled(entry.get(name)) or {}
    if not isinstance(value, dict) or not all(isinstance(each, str | None) for each in value.values()):
        raise _NotHereError(f"{name} must be a map of texts")
    return {key: each for key, each in value.items() if each is not None}
