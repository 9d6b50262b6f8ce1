"""Register the export of a run as a version of a model in MLflow's registry, as `mlflow.transformers` loads it.

An MLflow model is a directory with a file `MLmodel`, which says where the weights are, and the tokenizer in a directory
of its own. The weights are not copied for it: a server gets the export's files below that directory, and with a
database it lies beside the export and names that.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raytune_fsdp.base.durable import replace_at_once
from raytune_fsdp.plan.run_dir import MLFLOW_MODEL
from raytune_fsdp.record.copies.following import muted
from raytune_fsdp.record.copies.mlflow_run import ENVIRONMENT, NOISY_LOGGERS, MlflowRun, connect, get_run

logger = logging.getLogger(__name__)

_STEP = "raytune_fsdp.step"
"""Tag of a version: the step whose export it is."""
_PLACE, _WEIGHTS = "export", "model"
_ADAPTER_CONFIG = "adapter_config.json"
_TIMEOUT, _SEND_SECONDS = "MLFLOW_HTTP_REQUEST_TIMEOUT", "3600"
"""A server may answer only when it has sent a file of some GB on to its own storage."""


def register(uri: str, run_id: str, export: Path, name: str, step: int) -> str:
    """Return the version of model `name` that is this run's export after `step`; create it if there is none.

    May raise anything. A server may not see the export's directory, and refuses paths of other machines: it gets a copy
    of the files among the run's artifacts. With a database, the directory beside the export is the source.
    """
    is_server = uri.startswith(("http://", "https://", "databricks"))
    with muted(*NOISY_LOGGERS):
        client = connect(uri)
        run = get_run(client, run_id)
        for version in client.search_model_versions(f"name='{name}'"):
            if version.run_id == run_id and version.tags.get(_STEP) == str(step):
                return str(version.version)
        try:
            client.create_registered_model(name)
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                raise
        source = _send(run, export) if is_server else str(_describe(export, export.with_name(MLFLOW_MODEL), run_id))
        tags = {_STEP: str(step)}
        return str(client.create_model_version(name, source, run_id, tags=tags, await_creation_for=0).version)


def _send(run: MlflowRun, export: Path) -> str:
    with _patient():
        run.add_directory(export, f"{_PLACE}/{_WEIGHTS}")
    with TemporaryDirectory() as folder:
        return run.add_directory(_describe(export, Path(folder), run.id, weights=_WEIGHTS), _PLACE)


@contextmanager
def _patient() -> Iterator[None]:
    """Let requests take long while the context lasts, unless a user has set how long: ours is for points."""
    before = os.environ.get(_TIMEOUT)
    if before not in (None, ENVIRONMENT[_TIMEOUT]):
        yield
        return
    os.environ[_TIMEOUT] = _SEND_SECONDS
    try:
        yield
    finally:
        os.environ.pop(_TIMEOUT) if before is None else os.environ.update({_TIMEOUT: before})


def _describe(export: Path, place: Path, run_id: str, *, weights: str | None = None) -> Path:
    """Write what makes an MLflow model of an export into a directory, and return that.

    `weights`: where the export's files are, seen from there; None: where they are now.
    """
    shutil.rmtree(place / "components", ignore_errors=True)
    tokenizer = place / "components" / "tokenizer"
    tokenizer.mkdir(parents=True)
    for file in sorted(export.iterdir()):
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copyfile(file, tokenizer / file.name)
    where = os.path.relpath(export, place) if weights is None else weights
    said = {
        "run_id": run_id,
        "model_uuid": uuid.uuid4().hex,
        "utc_time_created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
        "mlflow_version": metadata.version("mlflow"),
        "flavors": {"transformers": {**flavor_of(export, where), "code": None}},
    }
    replace_at_once(place / "MLmodel", json.dumps(said, indent=2).encode())  # JSON is YAML
    return place


def flavor_of(export: Path, where: str) -> dict[str, Any]:
    """Return what `mlflow.transformers` reads of a model: its class, and where its weights are, or its base's."""
    is_adapter = (export / _ADAPTER_CONFIG).is_file()
    config = {} if is_adapter else json.loads((export / "config.json").read_text(encoding="utf-8"))
    (architecture, *_) = config.get("architectures") or ["AutoModelForCausalLM"]
    scores = architecture.endswith("ForSequenceClassification")
    found: dict[str, Any] = {
        "transformers_version": metadata.version("transformers"),
        "task": "text-classification" if scores else "text-generation",
        "instance_type": "TextClassificationPipeline" if scores else "TextGenerationPipeline",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "source_model_name": export.parent.name,
    }
    if is_adapter:
        adapter = json.loads((export / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
        found |= {"pipeline_model_type": "AutoModelForCausalLM", "peft_adaptor": where}
        # A directory, or a name on the hub, which goes to transformers as it is: MLflow has no revision beside it.
        if adapter.get("revision"):
            logger.warning(
                "mlflow.transformers loads the newest revision of the base %s below the registered adapter, and it was "
                "trained on %s; load it with PEFT, or merge it (export.merge=true)",
                adapter["base_model_name_or_path"], adapter["revision"],
            )  # fmt: skip
        return {**found, "local_base_model_path": adapter["base_model_name_or_path"]}
    return {**found, "pipeline_model_type": architecture, "model_binary": where}
