"""Register the export of a run as a version of a model in MLflow's registry."""

from __future__ import annotations

from pathlib import Path

from raytune_fsdp.record.copies.following import muted
from raytune_fsdp.record.copies.mlflow_run import NOISY_LOGGERS, connect, get_run

_STEP = "raytune_fsdp.step"
"""Tag of a version: the step whose export it is."""
_PLACE = "export"


def register(uri: str, run_id: str, export: Path, name: str, step: int) -> str:
    """Return the version of model `name` that is this run's export after `step`; create it if there is none.

    May raise anything. A server may not see the export's directory, and refuses paths of other machines: it gets a copy
    of the files among the run's artifacts. With a database, the directory itself is the source.
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
        source = run.add_directory(export, _PLACE) if is_server else str(export)
        tags = {_STEP: str(step)}
        return str(client.create_model_version(name, source, run_id, tags=tags, await_creation_for=0).version)
