"""Convert LLaMA-Factory's datasets: names that a file `dataset_info.json` explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytune_fsdp.base.untrusted import UnsoundError, read_json, reason
from raytune_fsdp.config.text import spelled
from raytune_fsdp.convert.llama_factory_preferences import format_of_stage, rows_of_stage
from raytune_fsdp.convert.preferences import PAIRS
from raytune_fsdp.convert.rules import MOST_BYTES, NotHereError, Translation, flag, in_words, number, text, whole, words
from raytune_fsdp.convert.runs import is_directory, rows_of

TEMPLATES = {"llama2": "llama-2", "llama3": "llama-3", "chatml": "chatml"}
"""Templates of theirs that come with this package, by their names there."""
_INFO = "dataset_info.json"
# Columns and settings that our rows do not have.
_UNKNOWN = ("history", "images", "videos", "audios")
_COMPARED = ("chosen", "rejected", "kto_tag")
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "assistant"),
    "system_tag": ("system", "system"),
}


_KNOWN = (
    *("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name", "file_sha1"),
    *("formatting", "ranking", "subset", "split", "folder", "num_samples", "revision", "columns", "tags"),
)
"""The keys of an entry in dataset_info.json."""
_FUNCTION = "raytune_fsdp.convert.llama_factory_rows:with_input"


def prepare_data(c: Translation, *, pretraining: bool) -> None:
    """Carry the datasets to `data.train` and `data.eval`."""
    train = _datasets(c, "dataset", pretraining)
    if "dataset" not in c.given:
        c.problems.append("no dataset is named: set dataset in the file")
    if train:
        c.put("data.train", train, "dataset")
    evaluation = _datasets(c, "eval_dataset", pretraining)
    if evaluation:
        c.put("data.eval", evaluation, "eval_dataset")
    size = c.get("val_size", number, 0)
    if size > 0 and evaluation:
        c.say("val_size", "refused", "eval_dataset says what is evaluated, and both do not go together, there either")
    elif size > 0:
        c.carry("val_size", "data.eval", {"fraction": size} if size < 1 else {"rows": int(size)})
    c.say("val_size", "same", "nothing is held out")


def _datasets(c: Translation, key: str, pretraining: bool) -> list[dict[str, Any]]:
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
                raise NotHereError(f"{folder / _INFO} has no map {name}")
    except NotHereError as error:
        c.say(key, "refused", f"{error}", None)
        return []
    c.say(key, "carried", in_words("data.train" if key == "dataset" else "data.eval", found))
    return found


def _info(c: Translation) -> tuple[dict[str, Any] | None, Path]:
    """Return dataset_info.json and its directory: `dataset_dir`, seen from here or from the file. None: hub names."""
    place = c.get("dataset_dir", text, "data")
    c.say("dataset_dir", "carried", "data.train: where the datasets are")
    if place == "ONLINE":
        return None, Path()
    for folder in (Path(place), c.directory / place):
        try:
            info = read_json(folder / _INFO, limit=MOST_BYTES, links=True)
        except FileNotFoundError:
            continue
        except (OSError, UnsoundError, ValueError) as error:
            raise NotHereError(f"{folder / _INFO}: {reason(error)}") from None
        if not isinstance(info, dict):
            raise NotHereError(f"{folder / _INFO}: must be a map of datasets")
        return info, folder
    raise NotHereError(
        f"{Path(place) / _INFO}, which explains its names, is not here: run the command where {place} is"
    )


def _read(entry: dict[str, Any], folder: Path, c: Translation, pretraining: bool) -> dict[str, Any]:
    found = _place(entry, folder)
    unknown = sorted(entry.keys() - set(_KNOWN))
    if unknown:
        raise NotHereError(f"of a dataset in {_INFO}, {', '.join(unknown)} is not known here: take it out")
    some = _part(entry, found)
    if entry.get("folder"):
        raise NotHereError("a dataset with `folder` is not read here")
    if bool(entry.get("ranking")) != (rows_of_stage(c) == PAIRS):
        raise NotHereError("a dataset with `ranking` is for stages dpo and rm, and these for such datasets")
    found["format"] = _format(entry, c, pretraining)
    first, many = c.get("max_samples", whole, 0), entry.get("num_samples")
    if some and (first > 0 or isinstance(many, int)):
        raise NotHereError(f"split {entry['split']!r} of files does not go with max_samples or num_samples here")
    if some:
        found["rows"] = some
    elif first > 0:
        found["rows"] = {"first": first}
    elif isinstance(many, int):
        found["rows"] = {"limit": many}
    return found


def _part(entry: dict[str, Any], found: dict[str, Any]) -> dict[str, int]:
    """Put configuration, revision and split of a hub dataset into `found`; return the `rows` for a file's split."""
    split = str(entry.get("split") or "train")
    if "hub" in found:
        found |= {field: str(entry[field]) for field in ("subset", "revision") if entry.get(field)}
        if split != "train":
            found["split"] = split
        return {}
    named = [field for field in ("subset", "revision") if entry.get(field)]
    if named:
        raise NotHereError(f"a file has no {' and no '.join(named)}: take it out, or name a dataset of the hub")
    if is_directory(str(found["path"])):
        found["split"] = "all"  # LLaMA-Factory reads every file of a directory
    some = rows_of(split)
    if some is None:
        raise NotHereError(f"a file has no split {split!r}: name a file with the rows of it")
    return some


def _place(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    if "hf_hub_url" in entry:
        return {"hub": str(entry["hf_hub_url"])}
    if "cloud_file_name" in entry:
        return {"path": str(entry["cloud_file_name"])}
    if "file_name" in entry:
        return {"path": str(folder / str(entry["file_name"]))}
    raise NotHereError("a dataset is a file or one of the Hugging Face hub; this one is neither")


def _format(entry: dict[str, Any], c: Translation, pretraining: bool) -> dict[str, Any]:
    columns, tags = _maps(entry, "columns"), _maps(entry, "tags")
    # With `columns`, columns that it leaves out are not read; without it, columns have their usual names.
    usual = {} if columns else {"prompt": "instruction", "query": "input", "response": "output"}
    columns = {**usual, **columns}
    rows = rows_of_stage(c)
    unknown = [name for name in (*_UNKNOWN, *(() if rows else _COMPARED)) if columns.get(name)]
    if unknown:
        raise NotHereError(f"a dataset with {', '.join(unknown)} is not read here")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise NotHereError(f"formatting must be alpaca, sharegpt or openai; {formatting!r} is not known here")
    if pretraining:
        # Stage pt trains on the column of the question alone.
        if formatting != "alpaca":
            raise NotHereError("stage pt trains on the first message of a conversation only; see format of type python")
        if "prompt" not in columns:
            raise NotHereError("stage pt reads the column that `columns` names as prompt: name it")
        return _joined(columns, {"type": "completion", "text": columns["prompt"]})
    if formatting == "alpaca" and columns.get("tools"):
        raise NotHereError("tools are read in conversations only")
    if rows:
        pairs = format_of_stage(columns, tags, rows, conversations=formatting != "alpaca")
        return _joined(columns, pairs) if formatting == "alpaca" else pairs
    loss = "all" if c.get("train_on_prompt", flag, False) else ""
    if formatting == "alpaca":
        made: dict[str, Any] = {"type": "instruction", "style": "chat", "prompt": columns.get("prompt", "instruction")}
        made |= {"input": None, "completion": columns.get("response", "output")}
        if columns.get("system"):
            made["system"] = columns["system"]
        return _joined(columns, {**made, **({"loss": loss} if loss else {})})
    made = _chat(columns, tags, loss or ("last_turn" if c.get("mask_history", flag, False) else ""))
    return {**made, "reasoning": "drop"} if without_thoughts(c) else made


def _joined(columns: dict[str, str], made: dict[str, Any]) -> dict[str, Any]:
    """Add the query to the prompt, on the next line, by a python format: our formats put an empty line between them."""
    if not columns.get("query"):
        return made
    if (columns.get("prompt", "instruction"), columns["query"]) != ("instruction", "input"):
        raise NotHereError(
            "a question is joined to its input by a line break there, by an empty line here: join "
            f"{columns.get('prompt', 'instruction')} and {columns['query']} by a function, with format.type=python"
        )
    return {"type": "python", "function": _FUNCTION, "then": made}


def without_thoughts(c: Translation) -> bool:
    """Return whether reasoning is taken out of answers. Their templates of plain chats know none."""
    return not c.get("enable_thinking", flag, True) and c.get("template", text, "") not in TEMPLATES


def _chat(columns: dict[str, str], tags: dict[str, str], loss: str) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "chat", "messages": columns.get("messages", "conversations")}
    made |= {field: tags[f"{field}_tag"] for field in ("role", "content") if f"{field}_tag" in tags}
    roles = {tags[tag]: role for tag, (usual, role) in _ROLES.items() if tags.get(tag, usual) not in (usual, role)}
    if roles:
        made["roles"] = roles
    if columns.get("system") != "system":
        made["system"] = columns.get("system")  # null if `columns` leaves it out: then the column is not read
    if columns.get("tools", "tools") != "tools":
        made["tools"] = columns["tools"]
    return {**made, **({"loss": loss} if loss else {})}


def _maps(entry: dict[str, Any], name: str) -> dict[str, str]:
    value = spelled(entry.get(name)) or {}
    if not isinstance(value, dict) or not all(isinstance(each, str | None) for each in value.values()):
        raise NotHereError(f"{name} must be a map of texts")
    return {key: each for key, each in value.items() if each is not None}
