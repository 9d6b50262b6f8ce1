"""Write the model card of an export: what the model is, how good it is, the data and the recipe it was made with."""

from __future__ import annotations

import html
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash
import yaml

from raytune_fsdp.base.errors import RaytuneError, in_one_line
from raytune_fsdp.base.measured import ParameterCount
from raytune_fsdp.base.redaction import redact, redact_shapes, redact_text
from raytune_fsdp.base.untrusted import MIB, UnsoundError, printable, read_json, reason
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
from raytune_fsdp.checkpoint.location import storage_at
from raytune_fsdp.checkpoint.manifest import read_manifest
from raytune_fsdp.checkpoint.state import RunState, read_state
from raytune_fsdp.config.sections.reference import ReferenceConfig
from raytune_fsdp.model.directory.bounds import read_config
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.directory.known_files import CARD_FILE
from raytune_fsdp.plan.run_dir import EVENTS_FILE, METRICS_FILE, RECIPE_FILE, checkpoints_of, names_checkpoints
from raytune_fsdp.record.jsonl import each_event, each_line_of
from raytune_fsdp.record.lineage import Lineage
from raytune_fsdp.record.lines import step_of
from raytune_fsdp.record.names import TEACHER, of_calibration, with_perplexity
from raytune_fsdp.record.report.ancestors import of_lineage
from raytune_fsdp.record.report.card_scores import of_scores, scores

logger = logging.getLogger(__name__)

_LOCAL = ("/", "~", "./", "../", "file:")
"""Prefixes of paths that exist only on one machine."""
_FINGERPRINT = "- fingerprint of everything that decided the training"
_MOST_DATASETS = 100
_RECIPE_BYTES = 4 * MIB  # the whole config of a run: 5 kB
RECIPE = ("run", "model", "data", "method", "parallel", "optim", "train", "reference", "teacher")
"""The sections of a config that decide what is learned. Of `run`, only the name and the seed are shown; `reference` is
shown where it says something."""


def recipe_of(
    config: Mapping[str, Any],
    versions: Mapping[str, str | None],
    run_dir: Path,
    parameters: ParameterCount,
    commit: str | None = None,
    lineage: Lineage | None = None,
) -> str:
    """Return what a card will say about the run, as JSON to store next to its config and tokenizer.

    `config` must have no secrets. `commit`: the hub's commit of the model that the run began with. `lineage`: of a
    fork.
    """
    chosen = {section: config[section] for section in RECIPE if config.get(section) is not None}
    if chosen.get("reference") == ReferenceConfig().model_dump(mode="json"):
        del chosen["reference"]
    chosen["run"] = {key: config["run"][key] for key in ("name", "seed")}
    path = config["model"]["path"]
    # Decided here, where the run reads the model: where a card is written, a directory may have the same name.
    on_hub = path is not None and not is_url(path) and not Path(path).expanduser().exists()
    recipe = {
        "version": versions["raytune-fsdp"],
        "versions": versions,
        "run_dir": str(run_dir),
        "model_on_hub": on_hub,
        # An absolute path, valid in any directory: the export of a multimodal model reads it again.
        "model_at": None if path is None or on_hub or is_url(path) else str(Path(path).expanduser().absolute()),
        # Later, the hub may have another model under this name and branch.
        "model_commit": commit if on_hub else None,
        "parameters": asdict(parameters),
        "config": chosen,
        **({} if lineage is None else {"lineage": list(map(asdict, lineage.forks))}),
    }
    return json.dumps(recipe, indent=1)


def model_card(
    checkpoint: CommittedCheckpoint,
    model_files: Path,
    *,
    dtype: str,
    adapter: bool = False,
    mean_of: Sequence[int] = (),
    sentence: str | None = None,
) -> str:
    """Return the README.md of an export of this checkpoint.

    `adapter`: the export holds only an adapter. `mean_of`: the steps whose mean it is; this one is the last of them.
    `sentence`: says as which class it was written, if not as the one that was trained.
    """
    state = read_state(checkpoint)
    recipe = _recipe(model_files)
    config = recipe["config"]
    hf_config = read_config(model_files)
    parts = [
        "---",
        yaml.safe_dump(_metadata(recipe, adapter, scores(hf_config)), sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
        f"# {_prose(config.get('run', {}).get('name', 'fine-tuned model'))}",
        "",
        *_summary(hf_config, recipe, state, dtype, adapter),
    ]
    if sentence is not None:
        parts += ["", sentence]
    if scores(hf_config):
        parts += of_scores(hf_config, recipe, adapter=adapter)
    if mean_of:
        parts += ["", f"The weights are the mean of those after steps {', '.join(map(str, mean_of))}."]
    run_dir = _run_dir(checkpoint, recipe)
    results: list[str] = []
    try:
        lines = each_line_of(run_dir) if run_dir is not None else ()
        results = list(_results([line for line in lines if line is not None and step_of(line) <= state.step]))
    except (RaytuneError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("the model card has no results: %s", in_one_line(error))
    if results:
        parts += ["", "## Results", "", "| | |", "|---|---|", *results]
    parts += [*of_lineage(recipe), *_teacher(recipe, run_dir)]
    parts += ["", "## Data", "", *_data(config, state)]
    if config:
        shown = yaml.safe_dump(_shortened(config), sort_keys=False, allow_unicode=True).rstrip()
        # A fence longer than any in the text, which could end the block of code otherwise.
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
        parts += ["", "## Recipe", "", f"{fence}yaml", shown, fence, "", "## Audit", "", *_audit(recipe)]
        parts += [] if mean_of else _digest(checkpoint)
    return "\n".join(parts) + "\n"


def with_digest(card: str, digest: str, *, mean: bool = False, merged: str | None = None) -> str:
    """Return the card of an export with the digest of the tensors that it has.

    `mean`: they are those of several checkpoints. `merged`: the digest of the adapters that were merged into them, as
    their checkpoint has them.
    """
    said = (
        f"The tensors of this directory have the digest `{digest}`, in whatever files they are: `raytune-fsdp digest` "
    )
    said += "computes it from them" + ("." if mean else ", and with `--as-export` from the checkpoint.")
    if merged is not None:
        said += f" The adapters that were merged have the digest `{merged}` in their checkpoint."
    return f"{card}\n{said}\n"


def is_of_same_run(export: Path, state: RunState) -> bool:
    """Return whether a model directory is a complete export of this state's run.

    Its card must have the run's fingerprint, and its weights must be the files that the index names. The fingerprint is
    a hash of all that decided the training: no other run has it, nor has a model from elsewhere.
    """
    try:
        there = (export / CARD_FILE).read_text(encoding="utf-8") if (export / CARD_FILE).is_file() else ""
        named = set(find_weights(export).file_of.values())
    except (RaytuneError, OSError, ValueError):
        return False
    line = f"{_FINGERPRINT}: `{_fingerprint(state.identity)}`"
    return line in there.splitlines() and named == {path.name for path in export.glob("*.safetensors")}


def _recipe(model_files: Path) -> Any:
    """Read the recipe. If it is missing (older versions wrote none) or broken, return an empty one."""
    try:
        recipe = read_json(model_files / RECIPE_FILE, limit=_RECIPE_BYTES)
        # Refuse what this version cannot read: a recipe comes with a checkpoint, perhaps from somebody else.
        config = recipe.get("config") if isinstance(recipe, dict) else None
        if not isinstance(config, dict) or not all(isinstance(config.get(section, {}), dict) for section in RECIPE):
            raise UnsoundError("has no config")
        texts = [recipe.get("version"), recipe.get("run_dir"), config.get("model", {}).get("path")]
        rows = config.get("data", {}).get("train", [])
        versions = recipe.get("versions", {})
        texts += versions.values() if isinstance(versions, dict) else [0]
        if not all(isinstance(text, str | None) for text in texts) or not isinstance(recipe.get("model_on_hub"), bool):
            raise UnsoundError("has numbers where names belong")
        if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows) or "model" not in config:
            raise UnsoundError("describes neither model nor data")
        # We write it without secrets, but an older version recognised fewer, and this file may be a stranger's.
        return {**redact_shapes(recipe), "config": redact(recipe["config"])}
    except (OSError, ValueError) as error:
        logger.warning("%s says nothing about the training: %s", model_files / RECIPE_FILE, reason(error))
    return {"version": None, "run_dir": None, "model_on_hub": False, "config": {}}


def _metadata(recipe: Mapping[str, Any], adapter: bool, scores: bool) -> dict[str, Any]:
    """Return the metadata for the hub, which names only models and datasets that the hub has."""
    config = recipe["config"]
    library, task = "peft" if adapter else "transformers", "text-classification" if scores else "text-generation"
    metadata: dict[str, Any] = {"library_name": library, "pipeline_tag": task}
    if recipe["model_on_hub"] and config["model"].get("init") == "pretrained":
        metadata["base_model"] = printable(config["model"]["path"])
    datasets = sorted(
        {printable(str(each["hub"])) for each in config.get("data", {}).get("train", []) if each.get("hub")}
    )
    if datasets:
        metadata["datasets"] = datasets
    return {**metadata, "tags": ["raytune_fsdp"]}


def _summary(
    hf_config: Mapping[str, Any], recipe: Mapping[str, Any], state: RunState, dtype: str, adapter: bool
) -> Iterator[str]:
    classes = hf_config.get("architectures") or [hf_config.get("model_type", "causal language model")]
    kind = ", ".join(map(str, classes)) if isinstance(classes, list) else str(classes)
    model, version = recipe["config"].get("model", {}), recipe["version"]
    path = model.get("path")
    origin = ""
    if model.get("init") == "random":
        origin = " from random weights"
    elif path:
        origin = f" from {_code(path if recipe['model_on_hub'] else _shown(path))}"
    what = f"An adapter of a {_code(kind)}, trained" if adapter else f"A {_code(kind)}, fine-tuned"
    yield f"{what}{origin} with raytune_fsdp{f' {_prose(version)}' if version else ''}."
    if adapter and not scores(hf_config):
        yield "Load it on top of that model: `PeftModel.from_pretrained(model, here)`."
    yield ""
    with suppress(KeyError, TypeError, ValueError, ArithmeticError):  # older versions wrote none
        yield f"- {ParameterCount(**recipe['parameters']).words}"
    yield f"- step {state.step}, after {state.samples:,} packed samples"
    yield f"- weights in {'the type they were trained in' if dtype == 'trained' else dtype}"
    yield f"{_FINGERPRINT}: `{_fingerprint(state.identity)}`"


def _results(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield rows of a table: training loss at the first and the last step, and the last evaluation."""
    losses = [line["trajectory"]["loss"] for line in lines if line["kind"] == "step"]
    if losses:
        yield f"| training loss, first and last step | {losses[0]:.4f}, {losses[-1]:.4f} |"
    last = max((step_of(line) for line in lines if line["kind"] == "eval"), default=None)
    evals = [line["values"] for line in lines if line["kind"] == "eval" and step_of(line) == last]
    for key, value in with_perplexity({key: value for values in evals for key, value in values.items()}).items():
        if of_calibration(key) is not None:  # points of a curve
            continue
        yield f"| {_prose(key)} (step {last}) | {value:.4f} |"


def _teacher(recipe: Mapping[str, Any], run_dir: Path | None) -> Iterator[str]:
    """Yield the lines about a model's teacher, if it had one. The recipe and the record may be a stranger's."""
    teacher = recipe["config"].get("teacher")
    if not isinstance(teacher, Mapping) or not isinstance(model := teacher.get("model"), str):
        return
    said = _said_of_teacher(run_dir)
    # Where only what it predicted was there, the record knows its name.
    name = said.get("model") if isinstance(said.get("model"), str) else model
    where = _shown(name)
    top_k, temperature = _plain(teacher.get("top_k", 64)), _plain(teacher.get("temperature", 1.0))
    yield from (
        "",
        "## Teacher",
        "",
        f"It has learned what {_cell(where)} predicts, at temperature {temperature}: of each token that it was trained "
        f"on, the probabilities of the {top_k} most likely ones, and of all others together.",
    )
    if kept := list(_not_kept(said)):
        yield from ("", "How much the others have together:", "", "| | |", "|---|---|", *kept[:_MOST_DATASETS])


def _said_of_teacher(run_dir: Path | None) -> Mapping[str, Any]:
    """Return the fields of the last event about the teacher."""
    if run_dir is None:
        return {}
    try:
        events = [event["fields"] for event in each_event(run_dir / EVENTS_FILE) if event["event"] == TEACHER]
    except (OSError, ValueError):
        return {}
    return events[-1] if events else {}


def _not_kept(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each dataset."""
    shares = said.get("not_kept")
    for name, share in shares.items() if isinstance(shares, Mapping) else ():
        values = (share.get("mean"), share.get("largest")) if isinstance(share, Mapping) else ()
        if all(isinstance(each, int | float) and math.isfinite(each) for each in values) and values:
            yield f"| {_cell(str(name))} | {values[0]:.2%} on average, at most {values[1]:.2%} of one token's |"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "another"


def _data(config: Mapping[str, Any], state: RunState) -> Iterator[str]:
    """Yield a table with a row for every dataset: a fingerprint of its content, format and share."""
    yield "| dataset | fingerprint of its content |"
    yield "|---|---|"
    listed = config.get("data", {}).get("train", [])
    # The numbers come from the identity, because the recipe may be missing.
    numbers = {key.split(".")[2] for key in state.identity if key.startswith(("data.train.", "data.datasets."))}
    for number in sorted(number for number in numbers if number.isascii() and number.isdecimal() and len(number) < 10):
        own = {
            key: value
            for key, value in state.identity.items()
            if key.startswith((f"data.train.{number}.", f"data.datasets.{number}."))
        }
        place = int(number)
        name = _shown(listed[place].get("path") or listed[place].get("hub")) if place < len(listed) else number
        yield f"| {_prose(name)} | `{_fingerprint(own)}` |"


def _audit(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Say what a third party needs to train some steps of the run again and compare."""
    versions = {name: version for name, version in recipe.get("versions", {}).items() if version}
    yield (
        "Any steps between two kept checkpoints can be trained again and compared, at any number of ranks: "
        "`raytune-fsdp audit RUN --from STEP --to STEP`. It needs the run's directory, the data of the fingerprints "
        "above and the model that the training began with, and refuses others."
    )
    if versions:
        with_versions = ", ".join(f"{_prose(name)} {_prose(version)}" for name, version in versions.items())
        yield ""
        yield f"Trained with {with_versions}: with the same versions, on the same kind of machine, the same bits."


def _digest(checkpoint: CommittedCheckpoint) -> Iterator[str]:
    """Name the numbers of the checkpoint, if the ranks that wrote it have hashed them."""
    found: Mapping[str, str] = {}
    with suppress(OSError, ValueError):  # a card can be without it
        found = read_manifest(storage_at(checkpoint.root), checkpoint.name).digest
    if found:
        yield from (
            "",
            f"The weights of the checkpoint that this was made of have the digest `{found['weights']}`, at any number "
            f"of ranks; with the optimizer's state and the place in the data it is `{found['everything']}`. "
            "`raytune-fsdp digest CHECKPOINT` computes both.",
        )


def _fingerprint(values: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True, default=str).encode()))


def _run_dir(checkpoint: CommittedCheckpoint, recipe: Mapping[str, Any]) -> Path | None:
    """Return the directory with the run's metrics; None if it cannot be seen from here."""
    # First the checkpoints' parent, in case the run was moved. Checkpoints may be elsewhere: then take the directory in
    # the recipe, but only if it names these checkpoints; a recipe may be a stranger's, and name somebody else's run.
    parent = None if is_url(checkpoint.root) else Path(checkpoint.root).parent
    if parent is not None and (parent / METRICS_FILE).is_file():
        return parent
    there = Path(recipe["run_dir"]) if recipe["run_dir"] else None
    with suppress(RaytuneError, OSError, ValueError):
        if there is not None and names_checkpoints(there) and (there / METRICS_FILE).is_file():
            place, root = checkpoints_of(there), checkpoint.root
            local = not is_url(place) and not is_url(root)
            if place == root or (local and os.path.realpath(place) == os.path.realpath(root)):
                return there
    return None


def _prose(text: object) -> str:
    """Return a text, which may be a stranger's, as one line of Markdown that shows it and does nothing else."""
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", html.escape(printable(redact_shapes(str(text))), quote=False))


def _code(text: object) -> str:
    """Return a text as one line of Markdown code, in which only a backtick has a meaning."""
    return f"`{printable(str(text)).replace('`', chr(39))}`"


def _cell(text: str) -> str:
    """Return a text, which may be a stranger's, as code in a cell of a table."""
    return _code(str(redact_shapes(text)).replace("|", "/"))


def _shown(path: object) -> str:
    """Reduce a local path to its name; leave a public one unchanged."""
    text = str(path)
    return Path(text).name if text.startswith(_LOCAL) else text


def _shortened(value: Any) -> Any:
    """Return a config without unset fields, and with local paths reduced to their names."""
    if isinstance(value, Mapping):
        short = {printable(redact_text(str(key))): _shortened(each) for key, each in value.items() if key != "cache"}
        return {key: each for key, each in short.items() if each is not None and each != {}}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return printable(_shown(value), keep="\n\t") if isinstance(value, str) else value
