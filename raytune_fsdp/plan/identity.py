"""How the identity of a run, or of windows in the cache, may gain fields without invalidating what exists.

An identity names every value that decides the trajectory; two runs are the same if their identities are equal. If a
section gains a field, new identities would name it and old ones would not, so every existing run would refuse to
continue and every cache would be built again. Therefore the meaning of a missing key is written down here once, when
the field is added, and a value equal to it is left out. That meaning never changes afterwards, even if the field's
default does.

A change of code that alters the order of samples or their packing is not a field: it raises ORDER_VERSION
(data/mixture.py) or DOCUMENT_VERSION (data/rows/formats.py), and a run begun under another version is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from raytune_fsdp.base.errors import OtherRunError, ResumeError
from raytune_fsdp.config.rules import Section
from raytune_fsdp.config.schema import sections_of
from raytune_fsdp.config.sections.formats import Format

ABSENT: dict[str, Any] = {
    # Sums by rank.
    "run.exact": False,
    # The run is no fork of another one.
    "run.fork": None,
    # All rows of the dataset are used.
    "datasets.rows": None,
    "datasets.held_out": None,
    "datasets.only": None,
    "datasets.without": None,
    # Read only under version 4 of the order, which a run has if there is such a column.
    "format.chat.system": "system",
    "format.python.then.chat.system": "system",
    # Never named: it decides what is warned of, not what is read.
    **{f"format.{kind}.ignore": [] for kind, each in sections_of(Format).items() if "ignore" in each.model_fields},
    # The template of the run, without variables, told this date.
    "datasets.chat_template": None,
    "datasets.chat_template_kwargs": None,
    "data.chat_template_kwargs": {},
    "data.chat_template_date": "2024-07-26",
    "format.chat.reasoning": "template",
    "format.python.then.chat.reasoning": "template",
    "format.chat.prompt": None,
    "format.python.then.chat.prompt": None,
    "data.special_tokens_in_text": "keep",
    "model.add_tokens": [],
    # The class of transformers, or of code that comes with the model.
    "model.network": None,
    # The base's own head, which predicts tokens.
    "model.head": None,
    **{f"method.{type_}.routers": None for type_ in ("full", "lora", "qlora")},
    "method.lora.init": "zero",
    "method.lora.train_added_tokens": False,
    "method.qlora.init": "zero",
    "method.qlora.train_added_tokens": False,
    # The cross-entropy.
    "train.objective": {"type": "sft"},
    "train.loss": None,
    "train.loss_columns": [],
    "train.neftune_noise_alpha": None,
    "train.label_smoothing": 0.0,
    "train.z_loss": 0.0,
    "train.router_aux_loss_coef": 0.0,
    "train.router_z_loss_coef": 0.0,
    # AdamW with moments in the type of the weights, all weights alike.
    "optim.optimizer": {"type": "adamw"},
    "optim.optimizer.adamw.moments": "as_weights",
    "optim.stochastic_rounding": False,
    "optim.groups": [],
    # The type that comes with the precision.
    "parallel.reduce_dtype": "auto",
}
"""The meaning of a key's absence, by its path: `<section>.<field>`, or `<section>.<type>.<field>` where a section has a
`type`, as in `optim.<field>`, `optim.schedule.<type>.<field>`, `optim.optimizer.<type>.<field>`,
`method.<type>.<field>`, `format.<type>.<field>`.
Fields that identities have named for as long as their section has existed are not here; `type` is always named."""

_GONE = re.compile(
    r"model\.quantization_config|data\.columns|"
    r".*_modules\.(raytune_fsdp|__mp_main__|_remote_module_non_scriptable)(\..*)?"
)
"""Keys that identities have had and that say nothing of a run: how a base was quantized whose weights are drawn at
random, the columns that `train.loss_columns` names already, and modules that are none of the user's."""

REFERENCE_OF, REFERENCE_ALSO, REFERENCE_VALUES = "reference.of", "reference.also", "reference.values"
"""Entries that ranks add: which model the reference is and how it computed when the run began; the same of later
attempts that computed otherwise, if some did; and digests of what it has said, by file. They are compared when the
ranks have them (run/reference/)."""
TEACHER_OF, TEACHER_ALSO, TEACHER_VALUES = "teacher.of", "teacher.also", "teacher.values"
"""The same of a teacher (run/teacher/)."""

_DECIDING = {
    "seq_len", "packing", "long_documents", "shuffle", "window", "special_tokens_in_text", "chat_template_kwargs",
    "chat_template_date",
}  # fmt: skip
_VERSIONS = {"data.order_version": "the order of samples", "data.document_version": "the tokens of documents"}
_ALWAYS_NAMED = object()
_UNSET = "not set"

ONE_BY_ONE = "one by one"
"""The value of `data.train.<number>.turns`: how the assistant's turns are found where a chat template is not the same
around all of them. Absent: by what is known of the template."""


def named(path: str, section: Section, *, exclude: Collection[str] = ()) -> dict[str, Any]:
    """Return the entries of an identity for a section of the config; `exclude` also holds for sections inside it."""
    values = section.model_dump()
    place = f"{path}.{values['type']}" if "type" in values else path
    entries: dict[str, Any] = {}
    for key, value in values.items():
        inner = getattr(section, key)
        entry = named(f"{place}.{key}", inner, exclude=exclude) if isinstance(inner, Section) else value
        # Never leave out the type: two formats would have the same identity, and so each other's cached windows.
        absent = ABSENT.get(f"{place}.{key}", _ALWAYS_NAMED) if key != "type" else _ALWAYS_NAMED
        if key not in exclude and entry != absent:
            entries[key] = entry
    return entries


def decided_by_data(data: Section) -> dict[str, Any]:
    """Return the entries for what the section `data` says itself, without its datasets and the texts of templates."""
    return named("data", data, exclude=data.__class__.model_fields.keys() - _DECIDING)


def check_identity(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    where: str,
    *,
    files_before: Mapping[str, Sequence[str]],
    files_now: Mapping[str, Sequence[str]],
    rule: str | None = None,
) -> None:
    """Refuse to continue a run as another one, naming every difference. `files_*`: names by key, for the message.

    `rule`: what is said before the differences, if not that none may be there.
    """
    known_later = (REFERENCE_OF, REFERENCE_ALSO, REFERENCE_VALUES, TEACHER_OF, TEACHER_ALSO, TEACHER_VALUES)
    before = {key: value for key, value in before.items() if not _GONE.fullmatch(key) and key not in known_later}
    for key, what in _VERSIONS.items():
        if before.get(key) != now.get(key):
            raise ResumeError(
                f"{where}: this run was begun with version {before.get(key, 1)} of {what}, and this raytune_fsdp makes "
                f"version {now.get(key)}: it would continue on other samples. Continue it with the version of "
                "raytune_fsdp that began it, or start from scratch under another run.name"
            )
    differing = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    turns = [key for key in differing if key.endswith(".turns")]
    differences = [
        f"{key}: {changed_files(before.get(key), now.get(key), files_before[key], files_now[key])}"
        if key in files_before and key in files_now
        else "; ".join(_changed(key, before.get(key, _UNSET), now.get(key, _UNSET)))
        for key in differing
        if key not in turns  # a trial of the template decides them, which other settings change
    ]
    if differences:
        raise OtherRunError(
            rule
            or f"{where} was trained with other settings: continuing it would be neither the old run nor a new one; "
            "set these back, or choose another run.name:",
            *(f"  {each}" for each in differences),
        )
    if turns:
        raise ResumeError(
            f"{where}: {turns[0].removesuffix('.turns')}: the turns of its chats were rendered "
            f"{before.get(turns[0], 'together')} when this run was begun, and would be "
            f"{now.get(turns[0], 'together')} now, as a trial of their template decides: its masks could be others. "
            "No setting differs: if raytune_fsdp or jinja2 does, continue it with the versions that began it; "
            "otherwise start from scratch under another run.name"
        )


def _changed(key: str, before: Any, now: Any) -> Iterator[str]:
    """Yield what has changed below a key: of a section, by field."""
    if isinstance(before, Mapping) and isinstance(now, Mapping) and before and now:
        for name in dict.fromkeys((*before, *now)):
            if before.get(name, _UNSET) != now.get(name, _UNSET):
                yield from _changed(f"{key}.{name}", before.get(name, _UNSET), now.get(name, _UNSET))
    else:
        yield f"{key}: was {_short(before)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 500 else f"{text[:250]} ... {text[-250:]}"


def changed_files(
    before: Sequence[str] | None, now: Sequence[str] | None, old_names: Sequence[str], new_names: Sequence[str]
) -> str:
    """Return in words which files were added, removed or changed, from their hashes and names."""
    old, new = dict(zip(old_names, before or (), strict=False)), dict(zip(new_names, now or (), strict=False))
    found = {
        "changed": [name for name in new if name in old and old[name] != new[name]],
        "removed": [name for name in old if name not in new and old[name] not in new.values()],
        "added": [name for name in new if name not in old and new[name] not in old.values()],
    }
    words = [f"{what} {_some(names)}" for what, names in found.items() if names]
    return "; ".join(words) or "the same files in another order"


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest
