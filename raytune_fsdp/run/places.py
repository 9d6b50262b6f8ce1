"""The places outside of a run's directory that its own files name, and whether this user has chosen them.

A run directory travels, and where it is unpacked its files would decide what is read, written and asked: a URL of data,
a cache, the directory of a base. So a run that is trained gets a mark: the places that its config names, and a hash of
that list under a key that only this user has. A run is not followed to places that are in no mark of this user, unless
the command says so (`--trust-places`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raytune_fsdp.base.errors import ConfigError, RaytuneError
from raytune_fsdp.base.mark import MOST_BYTES, chosen_by_this_user, chosen_in, made_with
from raytune_fsdp.base.redaction import redact
from raytune_fsdp.base.untrusted import printable, read_file
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import as_checkpoint, committed, looks_like_checkpoint
from raytune_fsdp.checkpoint.form import began_with, sees
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.checkpoint.state import read_state
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.load import load_config
from raytune_fsdp.config.recorded import setting
from raytune_fsdp.model.directory.known_files import ADAPTER_CONFIG_FILE, read_object
from raytune_fsdp.model.directory.known_files import CONFIG_FILE as MODEL_CONFIG_FILE
from raytune_fsdp.plan.run_dir import (
    CHECKPOINTS,
    CONFIG_FILE,
    EVENTS_FILE,
    MARK_FILE,
    MODEL_FILES,
    RECIPE_FILE,
    RunDir,
    checkpoints_below,
    checkpoints_of,
    forked_run,
    is_place_of_exports,
    is_run,
    names_checkpoints,
)

_MODELS = ("model.path", "model.tokenizer", "method.adapter", "reference.model", "teacher.model")
_LISTS = ("data.train", "data.eval", "eval.tasks")
_OTHERS = ("data.cache.path", "data.chat_template", "checkpoint.storage", "tracking.mlflow.uri")
_CHECKPOINTS, _BASE, _FORK = "checkpoints_at=", "base=", "fork="
_MOST_SHOWN, _MOST_RUNS = 10, 100


def places_in(tree: Any) -> set[str]:
    """Return the places that a config names, as `field=text`. The tree may be a stranger's, and so be anything.

    What is on the hub is no place.
    """
    named = [(field, setting(tree, field)) for field in (*_MODELS, *_OTHERS)]
    for listed in _LISTS:
        rows = setting(tree, listed)
        for row in rows if isinstance(rows, list) else []:
            named += [(f"{listed}.{key}", setting(row, key)) for key in ("path", "hub", "chat_template")]
    return {f"{field}={text}" for field, text in named if isinstance(text, str) and _is_place(field, text)}


def mark_of(config: FinetuneConfig, *, begins: bool = False) -> dict[str, Any] | None:
    """Return the mark of whoever trains this config; None where this user can have no key.

    `begins`: as in `check_beginning`, which has let the run read these models, and so what they lead to.
    """
    named, place = places_in(config.model_dump()), RunDir.of(config)
    if config.checkpoint.storage is not None:
        named.add(f"{_CHECKPOINTS}{place.checkpoints}")
    if config.model.path is not None and not is_url(config.model.path) and _is_directory(config.model.path):
        # Both as checkpoints of adapters name it, and as the recipe does.
        named |= {f"{_BASE}{Path(config.model.path).expanduser().absolute()}", f"{_BASE}{config.model.path}"}
    if (parent := forked_run(config)) is not None:
        named.add(f"{_FORK}{parent}")
    for model in _models_read(config, begins=begins):
        named |= {entry for _, _, led in _led_by(model) for entry in led}
    # Where the base was before it moved: older checkpoints name that place.
    before = chosen_by_this_user(place.model_files / MARK_FILE)
    return made_with({_marked(each) for each in named} | {each for each in before if each.startswith(_BASE)})


def check_places(
    source: Path | str,
    *,
    trusted: bool,
    config: FinetuneConfig | None = None,
    base: str | None = None,
    exports: bool = False,
) -> None:
    """Refuse to follow a run, one of its checkpoints or its export to places outside of it that this user has not
    chosen.

    None of these places is touched. `trusted`: the command says that they are trusted. `config`: what the command does,
    where that comes from the run's config. `base`: where the command says that the base of adapters is. `exports`: the
    command writes a model; if the model also sees, what was not trained is read from where the run began.
    """
    if trusted:
        return
    place = str(source) if is_url(str(source)) else str(Path(source).resolve())
    run = run_of(place) if config is None else place
    named: set[str] = set()
    if run is not None and not is_url(run):
        if config is not None:  # not what the command's own arguments have replaced
            named |= places_in(config.model_dump())
            # Invalid by itself, arguments may mend it, and then it names them all the same.
            with suppress(RaytuneError):
                named &= places_in(load_config(Path(run) / CONFIG_FILE).model_dump())
        if run == place and (elsewhere := checkpoints_of(Path(run))) != str(Path(run) / CHECKPOINTS):
            named.add(f"{_CHECKPOINTS}{elsewhere}")
    chosen = _chosen_in(run)
    strange, began = _strange(run, named, chosen), None
    if base is None and not any(entry.startswith(_CHECKPOINTS) for entry in strange):
        began = _began_with(run) if exports and run is not None else None
        strange |= _strange(run, _named_by_model(place) | ({f"{_BASE}{began}"} if began else set()), chosen)
    _refuse(str(source), strange)
    if began:
        _check_led(began, chosen)


def check_parent(run: Path, parent: Path, *, trusted: bool, base: str) -> None:
    """Refuse to follow a run to the one of which it is a fork, and that one to where its checkpoints are, unless this
    user has chosen these places. `base`: see `check_places`."""
    if not trusted and parent.parent != run.parent:
        _refuse(str(run), _strange(str(run), {f"{_FORK}{parent}"}, _chosen_in(str(run))))
    check_places(parent, trusted=trusted, base=base)


def check_beginning(config: FinetuneConfig, *, trusted: bool, begins: bool = True) -> None:
    """Refuse to read a checkpoint of another run whose files lead to places that this user has not chosen.

    These are its base and, for the export of a model that also sees, what its run began with. None of them is touched.
    `begins`: the run reads `model.path`; a run that has whole checkpoints of its own reads only its reference and its
    teacher.
    """
    if trusted:
        return
    chosen = chosen_by_this_user(RunDir.of(config).model_files / MARK_FILE)
    for model in _models_read(config, begins=begins):
        _check_led(model, chosen)


def _models_read(config: FinetuneConfig, *, begins: bool) -> list[str]:
    own = config.model.path if begins and config.model.init == "pretrained" else None
    teacher = None if config.teacher is None else config.teacher.model
    return [model for model in (own, config.reference.model, teacher) if model is not None]


def _check_led(checkpoint: str, chosen: set[str]) -> None:
    for place, run, led in _led_by(checkpoint):
        _refuse(place, _strange(run, led, chosen | _chosen_in(run)))


def _led_by(checkpoint: str) -> Iterator[tuple[str, str | None, set[str]]]:
    """Yield the checkpoint that a run begins with, then the one that the run of this checkpoint began with, and so on.

    Each comes with its run and the places to which it leads, which are touched only when the next is asked for.
    """
    for _ in range(_MOST_RUNS):  # a stranger's run may say that it began with itself
        if not looks_like_checkpoint(checkpoint):
            return
        place = checkpoint if is_url(checkpoint) else str(Path(checkpoint).expanduser().resolve())
        run = run_of(place)
        began = _began_with(run) if run is not None else None
        yield place, run, _named_by_model(place) | ({f"{_BASE}{began}"} if began else set())
        checkpoint = began or ""


def _refuse(source: str, strange: set[str]) -> None:
    if strange:
        shown = [printable(_marked(entry)[:300]) for entry in sorted(strange)]
        more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        raise ConfigError(
            f"{source} names places outside of it that you have not chosen: {', '.join(shown[:_MOST_SHOWN])}{more}; "
            "look at them, then add --trust-places (a run that you train has your mark, and no longer needs it)"
        )


def _marked(entry: str) -> str:
    """Return a place as a mark has it: without secrets, as the run's config is written."""
    return str(redact(entry))


def run_of(place: str) -> str | None:
    """Return the directory or URL of the run that is at a place, or that a checkpoint or an export there belongs to."""
    if looks_like_checkpoint(place):
        return place.rstrip("/").rpartition("/")[0].rpartition("/")[0]
    path = Path(place)
    if is_url(place):
        return place
    if is_place_of_exports(path):
        return str(path.parent if path.name == "export" else path.parent.parent)
    mine = is_run(path) or names_checkpoints(path) or all((path / name).exists() for name in (CONFIG_FILE, EVENTS_FILE))
    return place if mine else None


def _is_place(field: str, text: str) -> bool:
    if not text or text.startswith("hf://"):
        return False
    if field.endswith("chat_template"):
        from raytune_fsdp.data.rows.templates import is_shipped  # imported here, as below: few configs need it

        return not is_shipped(text)
    # A directory may stand where the name of a hub repository is expected, and is used in its place.
    return not (field.endswith(".hub") or field in _MODELS) or _is_directory(text)


def _is_directory(text: str) -> bool:
    """Return whether the name of a model or dataset is that of a directory or a URL, and not one of the hub."""
    if is_url(text) or text.startswith(("/", "~", ".")):
        return True
    from raytune_fsdp.model.directory.files import is_local

    return is_local(text)


def _strange(run: str | None, named: set[str], chosen: set[str]) -> set[str]:
    """Return the places that are outside of the run, and that this user has not chosen."""
    outside = {entry for entry in named if run is None or not _is_inside(run, entry.partition("=")[2])}
    return {entry for entry in outside if _marked(entry) not in chosen}


def _is_inside(run: str, place: str) -> bool:
    if is_url(place) or is_url(run):
        return place.startswith(f"{run}/") and "/../" not in f"{place}/"
    # Follow links: a stranger's run may have them among its own files.
    return os.path.realpath(os.path.expanduser(place)).startswith(f"{os.path.realpath(run)}/")


def _chosen_in(run: str | None) -> set[str]:
    """Return the places in this user's mark on a run."""
    with suppress(OSError, ValueError):
        return set() if run is None else chosen_in(_from_run(run, MARK_FILE))
    return set()


def _from_run(run: str, name: str) -> bytes:
    """Read one of the files of a run that travel with its checkpoints."""
    if is_url(run):
        return ObjectStorage(run).read(MODEL_FILES, name, MOST_BYTES)
    return read_file(Path(run) / MODEL_FILES / name, limit=MOST_BYTES)


def _began_with(run: str) -> str | None:
    """Return the directory of the model that a run began with, as an export reads it; None if that does not see."""
    try:
        with TemporaryDirectory(prefix="raytune-model-") as copy:
            files = Path(copy) if is_url(run) else Path(run) / MODEL_FILES
            for name in (MODEL_CONFIG_FILE, RECIPE_FILE) if is_url(run) else ():
                (files / name).write_bytes(_from_run(run, name))
            path = began_with(files)[0] if sees(files) else None
    except (RaytuneError, OSError, ValueError):  # an export cannot read it either
        return None
    return path if path is not None and _is_directory(path) else None


def _named_by_model(place: str) -> set[str]:
    """Return the directories of the bases that checkpoints, or an exported adapter, name."""
    paths = []
    with suppress(RaytuneError, OSError, ValueError):
        if not is_url(place) and (Path(place) / ADAPTER_CONFIG_FILE).is_file():
            # An adapter by itself is asked for by name: only inside of a run does a run choose it.
            named = read_object(Path(place) / ADAPTER_CONFIG_FILE) if is_place_of_exports(Path(place)) else {}
            paths = [named.get("base_model_name_or_path")]
        else:
            found = as_checkpoint(place)
            root = checkpoints_below(place) if is_url(place) else checkpoints_of(Path(place))
            for each in [found] if found else committed(root):
                with suppress(RaytuneError, OSError, ValueError):  # damaged: it is passed over, or refused by name
                    paths.append((read_state(each).base or {}).get("path"))
    return {f"{_BASE}{path}" for path in paths if isinstance(path, str) and path and _is_directory(path)}
