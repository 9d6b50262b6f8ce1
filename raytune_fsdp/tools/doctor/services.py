"""Check what a run asks over the network: MLflow, and the hub (or its cache) for the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raytune_fsdp.base.errors import ModelError, RaytuneError, in_one_line, pip_install
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.recorded import shown_uri
from raytune_fsdp.plan.run_dir import mlflow_database, storage_of
from raytune_fsdp.record.copies.mlflow import mlflow_installed
from raytune_fsdp.tools.doctor.finding import Finding, many, ok, problem, refused, warning

_SQLITE = b"SQLite format 3\0"


def is_server_asked(config: FinetuneConfig) -> bool:
    """Return whether `check_mlflow` imports MLflow, which takes seconds, and asks a server."""
    chosen = config.tracking.mlflow
    uri = chosen.uri or mlflow_database(storage_of(config))[0]
    return chosen.enabled and mlflow_installed() and not uri.startswith("sqlite:///")


def check_mlflow(config: FinetuneConfig, asking: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Ask the tracking server one question, or look at the database file, as opening a database would create it.

    `asking` is called once imports are done.
    """
    chosen = config.tracking.mlflow
    if not chosen.enabled:
        return [ok("MLflow", "tracking.mlflow.enabled=false")]
    if not mlflow_installed():
        return [
            warning(
                "MLflow", "it is not installed: the run goes on without it",
                f"{pip_install('mlflow')}, or set tracking.mlflow.enabled=false",
            )
        ]  # fmt: skip
    uri = chosen.uri or mlflow_database(storage_of(config))[0]
    if uri.startswith("sqlite:///"):
        return [_database(Path(uri.removeprefix("sqlite:///").partition("?")[0]))]
    return [_server(uri, asking)]


def _database(file: Path) -> Finding:
    if not file.exists():
        return ok("MLflow", f"the run makes the database {file}")
    try:
        with file.open("rb+") as database:  # fails if this user may not write
            begin = database.read(len(_SQLITE))
    except OSError as error:
        return problem(
            "MLflow",
            f"{file} cannot be used ({in_one_line(error)})",
            "change its permissions, or set tracking.mlflow.uri",
        )
    if begin not in (_SQLITE, b""):
        return problem(
            "MLflow", f"{file} is not an SQLite database", "move it away, or set tracking.mlflow.uri to another one"
        )
    return ok("MLflow", f"the database {file} is there")


def _server(uri: str, asking: Callable[[str], None]) -> Finding:
    from raytune_fsdp.record.copies.mlflow_run import connect

    shown = shown_uri(uri)
    try:
        client = connect(uri)
        asking(shown)
        found = client.search_experiments(max_results=1)
        return ok("MLflow", f"{shown} answers" if found else f"{shown} answers; it has no experiment yet")
    except Exception as error:  # requests, urllib3 and MLflow each have their own
        said = in_one_line(error)
    if "Max retries" in said or "Connection" in said:
        said = "no connection"
        fix = "start it (mlflow server --host 0.0.0.0 --port ...) so that `curl "
        fix += f"{shown}/health` says OK, or set tracking.mlflow.uri to another"
    elif any(code in said for code in ("401", "403", "Unauthorized", "Forbidden")):
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN)"
    else:
        fix = f"set tracking.mlflow.uri to an MLflow server: one for which `curl {shown}/health` says OK"
    # A run trains even so: what could not be sent is sent later.
    return problem("MLflow", f"{shown} does not answer as an MLflow server does ({said[:200]})", fix)


def model_here(config: FinetuneConfig) -> Path | None:
    """Return the directory of the model, if its files are on this machine already. Downloads nothing."""
    from raytune_fsdp.model.directory.files import cached, is_local, locate

    path = config.model.path
    if path is None:
        return None
    if is_local(path):
        return locate(path, None, field="model.path", weights=True)
    return cached(path, config.model.revision)


def check_model(config: FinetuneConfig) -> list[Finding]:
    """Check that the model's files are all here, or that the hub would give them."""
    from raytune_fsdp.base.urls import is_url
    from raytune_fsdp.model.directory.files import find_weights, is_local

    path, needs_weights = config.model.path, config.model.init == "pretrained"
    if path is None:
        return [ok("model", "no files are needed: model.architecture, with random weights")]
    if is_url(path) or (Path(path).expanduser() / "manifest.json").is_file():
        return [ok("model", f"model.path={path} is a checkpoint, which every start verifies")]
    lacking: RaytuneError | None = None
    directory = None
    try:
        directory = model_here(config)
        if directory is not None and not (directory / "config.json").is_file():
            from raytune_fsdp.model.adapters.config_file import adapter_instead

            lacking = adapter_instead(path, directory) or ModelError(
                f"{directory} has no config.json: download the model again"
            )
        elif directory is not None and needs_weights:
            files = set(find_weights(directory).file_of.values())
            size = sum((directory / name).stat().st_size for name in files) / 1e9
            return [ok("model", f"{directory}: {many(len(files), 'file')} of weights, {size:,.2f} GB, complete")]
    except RaytuneError as error:
        lacking = error
    if lacking is None and (directory is not None or is_local(path)):
        return [ok("model", f"{directory} is there")]
    return [refused("model", lacking) if lacking is not None and is_local(path) else _from_hub(config, lacking)]


def _from_hub(config: FinetuneConfig, lacking: RaytuneError | None) -> Finding:
    """Check a hub model that is not complete in the cache."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    from raytune_fsdp.model.directory.files import ask_hub

    path, revision = config.model.path or "", config.model.revision
    cache = f"not complete in the local cache ({in_one_line(lacking)})" if lacking else "not in the local cache"
    download = f"hf download {path}" + (f" --revision {revision}" if revision else "")
    if HF_HUB_OFFLINE:
        return problem(
            "model",
            f"model.path={path} is {cache}, and HF_HUB_OFFLINE is set",
            f"unset HF_HUB_OFFLINE, or where the hub can be reached: {download}",
        )
    answer = ask_hub(path, revision)
    if answer.silence:
        return problem(
            "model", f"model.path={path} is {cache}, and the hub cannot be reached ({answer.silence})",
            "let this machine reach https://huggingface.co (HTTPS_PROXY, or HF_ENDPOINT for a mirror), or download it "
            f"where it can be reached ({download}) and set model.path to that directory",
        )  # fmt: skip
    if answer.refusal:
        return problem(
            "model",
            f"model.path={path} is {cache}, and the hub refuses it ({answer.refusal})",
            "check the name and the revision; accept the terms of a gated model on its page, and set HF_TOKEN",
        )
    return ok("model", f"model.path={path} is {cache}; the hub gives it, and the machines of the ranks fetch it")


def checkpoint_bytes(config: FinetuneConfig) -> int | None:
    """Return the bytes of a checkpoint: trained weights and optimizer state; None if the architecture is not here."""
    from raytune_fsdp.config.sections.optimizers import state_bytes
    from raytune_fsdp.model.network import MASTER_DTYPE, build_network, count_parameters, load_architecture

    directory = model_here(config)
    if directory is None and config.model.architecture is None:
        return None
    # With any attention: the one that is asked for may not be installed.
    config = config.with_sections(model={"attention": "auto"})
    network = build_network(load_architecture(config.model, directory), config)
    weight = MASTER_DTYPE[config.parallel.precision].itemsize
    return int(count_parameters(network).trainable * (weight + state_bytes(config.optim.optimizer, weight)))
