"""Convert options that several projects share: a run's directory, length, batch, and what is done every N steps."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from raytune_fsdp.base.urls import is_url
from raytune_fsdp.convert.rules import Translation, in_words, number, text, whole

ATTENTION = ("eager", "sdpa", "flex_attention")
ATTENTION_HERE = "`model.attention`; flash attention is taken with `auto`, where it is installed"
FLASH = "model.attention=auto takes flash-attn where it is installed, else torch's own flash attention"
# Names of builders in `datasets`, which stand in place of a dataset's name.
BUILDERS = ("json", "csv", "parquet", "text", "arrow")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|tsv|txt|parquet|arrow)(\.(gz|zst))?$")


def attention(c: Translation, key: str) -> None:
    """Carry the attention's implementation, by transformers' name for it."""
    name = c.get(key, text, "")
    if name in ATTENTION:
        c.carry(key, "model.attention", name)
    elif name.startswith("flash_attention_"):
        c.say(key, "same", FLASH)
    else:
        c.say(key, "left", "not a name of ours; model.attention=auto takes the best that is correct")


def place(name: str) -> dict[str, str]:
    """Return where rows are: a name is a path, or that of a hub dataset."""
    local = is_url(name) or name[:1] in ("/", ".", "~") or _DATA_FILE.search(name) or "*" in name
    if local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or os.path.exists(name):
        return {"path": name}
    return {"hub": name}


def part_of_files(c: Translation, split_key: str, found: dict[str, Any]) -> None:
    """Carry the split of files: by its name in a directory; plain files have only `train`, which may become `rows`.

    Any other split is refused.
    """
    split = c.get(split_key, text, "train")
    name, bracket, rest = split.partition("[")
    is_name = is_directory(found["path"]) and re.fullmatch(r"\w+(\.\w+)*", name) is not None
    some = rows_of(f"train{bracket}{rest}" if is_name else split)
    if some:
        found["rows"] = some
    elif some is None:
        c.say(
            split_key, "refused", "files have no such split here: name its own files, or use `rows` for a part of them"
        )
    if is_name:
        found["split"] = name


def is_directory(path: str) -> bool:
    """Return whether a path, which may not be here, looks like a directory."""
    return not ("*" in path or _DATA_FILE.search(path))


def rows_of(split: str) -> dict[str, int] | None:
    """Return `rows` for a split of plain files: empty for all rows, None for a split that they do not have."""
    some = re.fullmatch(r"train(\[(:([1-9][0-9]{0,17})|-([1-9][0-9]{0,17}):)\])?", split)
    if some is None:
        return None
    return {"first": int(some[3])} if some[3] else {"last": int(some[4])} if some[4] else {}


def global_batch(
    c: Translation, micro: str, accumulation: str, *, default: int, passes: int | None = None, divided_by: int = 1
) -> None:
    """Carry the batch: theirs is that of one GPU, ours that of all. `divided_by`: GPUs that share samples."""
    samples = c.get(micro, whole, default)
    passes = c.get(accumulation, whole, 1) if passes is None else passes
    if samples < 1 or passes < 1:
        for key, value in ((micro, samples), (accumulation, passes)):
            if value < 1:
                c.say(key, "refused", "must be at least 1")
        return
    c.put("train.micro_batch", samples, micro)
    if c.gpus is None:
        c.problems.append(
            f"{micro}={samples} x {accumulation}={passes} is the batch of one GPU, and train.global_batch is that of "
            "all: give the number of GPUs that the file was meant for with --gpus N"
        )
        return
    ranks = max(1, c.gpus // divided_by)
    total = samples * passes * ranks
    c.put("train.global_batch", total, accumulation if accumulation in c.given else micro)
    sum_in_words = f"train.global_batch={total} = {samples} x {passes} x {ranks} GPU(s)"
    c.say(micro, "carried", f"train.micro_batch={samples}, {sum_in_words}")
    c.say(accumulation, "carried", sum_in_words)
    if micro not in c.given:
        c.tell_default("train.global_batch", total, f"{samples} x {passes} x {ranks} GPU(s), {micro} by default")


def run_directory(c: Translation, key: str, *, default: str) -> None:
    """Carry the directory: `saves/qwen/full` becomes the run `full` in the storage `saves/qwen`."""
    given = c.get(key, text, default)
    if is_url(given):
        c.say(
            key,
            "refused",
            "a run is in a directory that all machines mount, not in an object store: name a directory in the file "
            "(export.push takes the model elsewhere)",
        )
        given = default
    directory = Path(given)
    name = re.sub(r"[^A-Za-z0-9._-]+|\.\.+", "-", directory.name)[:128].lstrip("._-")
    c.put("run.name", name if name and name != "cache" else "converted", key if key in c.given else "")
    c.put("run.storage", str(directory.parent), key if key in c.given else "")
    c.say(
        key,
        "carried",
        f"{in_words('run.storage', str(directory.parent))}, {in_words('run.name', c.fields['run.name'])}",
    )
    if key not in c.given:
        c.tell_default("run.name", c.fields["run.name"], f"{key} by default, in {directory.parent}")


def length(c: Translation, epochs: str, *, default: float) -> None:
    """Carry the length, in steps if the file gives any, else in epochs."""
    steps = c.get("max_steps", whole, -1)
    if steps > 0:
        c.carry("max_steps", "train.max_steps", steps)
        c.say(epochs, "left", "max_steps decides, there too")
        return
    c.say("max_steps", "same", "no limit in steps")
    c.carry_or_default(epochs, "train.epochs", c.get(epochs, number, default), f"{epochs} by default")


def cadence(c: Translation, field: str, strategy: str, steps: str, *, without: str, every: float | None) -> None:
    """Carry how often something is done: every N steps, every epoch, or never.

    `without`: the strategy if the file has none; `every`: the steps if it has none.
    """
    how = c.get(strategy, text, without).lower()
    if how in ("no", "false"):
        safe = "; besides, by the clock, in case of a crash" if field == "checkpoint.every" else ""
        c.say(strategy, "same", f"only at the end, if at all{safe}")
    elif how == "epoch":
        times_per_epoch(c, field, strategy, 1)
    elif how not in ("steps", "true"):
        c.say(strategy, "left", f"{how} is not a number of steps; without {field} it is at the end")
    if how not in ("steps", "true"):
        c.say(steps, "left", f"not used with {strategy}={how}")
        return
    found = c.get(steps, number, every)
    count = in_steps(c, found) if found is not None and found > 0 else None
    if count is None:
        why = f"at the end; set {field} for more"
        if found is not None and found > 0:
            why = f"a fraction of the run's steps, which are not known before its data is counted; set {field}"
        c.say_all((strategy, steps), "left", why)
        return
    c.put(field, count, steps if steps in c.given else strategy)
    c.say_all((strategy, steps), "carried", in_words(field, count))
    if steps not in c.given and strategy not in c.given:
        c.tell_default(field, count, f"{steps} by default")


def times_per_epoch(c: Translation, field: str, key: str, count: int) -> None:
    """Carry that something is done `count` times in every epoch, if epochs are counted."""
    if count < 1:
        c.say(key, "same", "only at the end")
    elif "train.epochs" in c.fields:
        c.carry(key, field, {"per_epoch": count})
    else:
        c.say(key, "left", f"with max_steps nobody counts how long an epoch is; set {field} to a number of steps")


def in_steps(c: Translation, count: float) -> int | None:
    """Return a number of steps; below 1 it is a fraction of the run's. None if the run's number is not known."""
    if count >= 1:
        return int(count)
    total = c.fields.get("train.max_steps")
    return None if total is None else max(1, int(count * total))
