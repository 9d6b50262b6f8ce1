"""Rules of a run that cost nothing to check.

`check_first` runs before torch is imported, Ray started or a file read; the others once the data and the length of the
run are known.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from raytune_fsdp.base.errors import ConfigError, ResumeError, pip_install
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.config import ClusterConfig, FinetuneConfig
from raytune_fsdp.config.recorded import shown_uri
from raytune_fsdp.config.sections.method import AdapterMethod
from raytune_fsdp.model.export.mark import check_replaceable
from raytune_fsdp.plan.cadence import cadence_in_words, is_multiple
from raytune_fsdp.plan.plan import Plan, layout_of, least_ranks, resolve
from raytune_fsdp.plan.run_dir import RunDir, check_checkpoint_links, check_links, is_place_of_exports
from raytune_fsdp.record.copies.mlflow import mlflow_installed

logger = logging.getLogger(__name__)

_LR_OF_ALL = 5e-5


def check_first(config: FinetuneConfig, world: int | None) -> RunDir:
    """Check what needs only the config, and that the run's storage can be written. Return the run's places.

    `world` is None where only torch can tell how many ranks there will be.
    """
    check_config(config, world)
    place = RunDir.of(config)
    check_links(place.path)
    _check_storage("run.storage", place.path)
    if config.export.at_end:
        export = Path(os.path.realpath(place.export))
        check_replaceable(export, adopt=is_place_of_exports(export))  # here, not after hours of training
    if not is_url(place.checkpoints):
        if config.checkpoint.storage is not None:
            check_checkpoint_links(place.checkpoints)
        _check_storage("checkpoint.storage" if config.checkpoint.storage else "run.storage", Path(place.checkpoints))
    for file in (place.metrics, place.events):
        if file.exists() and not file.is_file():  # a pipe would keep its reader waiting
            raise ResumeError(f"{file} is not a regular file, so it cannot be the record of the run: move it away")
    return place


def _check_own_code(config: FinetuneConfig) -> None:
    """Refuse what does not go with a loss or a network of the user's own."""
    sequence, method = config.parallel.mesh.sequence, config.method.type
    if config.train.loss is not None and sequence > 1:
        raise ConfigError(
            f"train.loss={config.train.loss} with parallel.mesh.sequence={sequence}: your loss is a function of whole "
            "documents, of which each rank has a part; leave sequence out (with tensor, ranks share layers instead)"
        )
    if config.model.network is not None and method not in ("full", "freeze"):
        raise ConfigError(
            f"method.type={method} with model.network={config.model.network}: adapters are written for classes that "
            "PEFT can build from a config.json alone; set method.type=full or freeze, or leave network out"
        )


def check_config(config: FinetuneConfig, world: int | None) -> None:
    """Check what has the same outcome in every process of a run: the part of `check_first` without its places."""
    check_device(config, config.cluster.device)
    check_trackers(config)
    check_early_stop(config)
    check_where(config)
    _check_own_code(config)
    # Refuse samples that ranks cannot share evenly, and an attention that cannot be shared.
    sequence, length, attention = config.parallel.mesh.sequence, config.data.seq_len, config.model.attention
    if length % sequence:
        raise ConfigError(
            f"parallel.mesh.sequence={sequence} does not divide data.seq_len={length}: every rank gets equally "
            f"many tokens of a sample; set data.seq_len={-(-length // sequence) * sequence}, or another sequence"
        )
    if sequence > 1 and attention in ("eager", "sdpa", "flex_attention"):
        raise ConfigError(
            f"model.attention={attention} with parallel.mesh.sequence={sequence}: only attention that is given the "
            "borders of documents can be shared by ranks; set model.attention=auto"
        )
    if config.train.max_steps is None:
        if world is not None:
            layout_of(config, world)
    else:
        plan = resolve(config, world or least_ranks(config))  # the fewest ranks have the fewest demands
        check_best(config, plan)
        check_export(config, plan)


def check_trackers(config: FinetuneConfig) -> None:
    """Refuse trackers whose libraries are missing. Without MLflow a run goes on: it is on by default."""
    mlflow = config.tracking.mlflow
    if mlflow.register is not None and not mlflow_installed():
        raise ConfigError(
            f"tracking.mlflow.register={mlflow.register}, but MLflow is not installed: {pip_install('mlflow')}, or "
            "leave register out"
        )
    alone = isinstance(config.method, AdapterMethod) and not config.export.merge
    if mlflow.register is not None and config.model.head is not None and alone:
        raise ConfigError(
            f"tracking.mlflow.register={mlflow.register} with model.head and method.type={config.method.type}: "
            "mlflow.transformers loads no adapter with a head of its own: set export.merge=true, or leave register out"
        )
    if config.tracking.wandb.enabled and find_spec("wandb") is None:
        raise ConfigError(
            "tracking.wandb.enabled=true, but wandb is not installed: pip install wandb, or set it to false"
        )
    # tensorboardX writes the files, and Ray Train brings it. TensorBoard itself is only needed to look at them.
    if config.tracking.tensorboard.enabled and find_spec("tensorboardX") is None:
        raise ConfigError(
            "tracking.tensorboard.enabled=true, but nothing here writes its files: pip install tensorboardX, or set it "
            "to false"
        )


def warn_of_method(config: FinetuneConfig) -> None:
    """Warn of settings that can be meant, and mostly are not."""
    if isinstance(config.method, AdapterMethod) and config.optim.lr <= _LR_OF_ALL:
        logger.warning(
            "optim.lr=%g is a rate for training every weight: adapters mostly want about ten times that (2e-4)",
            config.optim.lr,
        )


def warn_of_place(config: FinetuneConfig) -> None:
    """Warn of where a new run does not go: to no checkpoint before its end, to no server that only the shell names."""
    server, mlflow = os.environ.get("MLFLOW_TRACKING_URI"), config.tracking.mlflow
    if server and mlflow.enabled and mlflow.uri is None and mlflow_installed():
        logger.warning(
            "MLFLOW_TRACKING_URI=%s is set, and not used, since the shell that goes on with a run may lack it: set "
            "tracking.mlflow.uri to it",
            shown_uri(server),
        )
    if config.checkpoint.every is None:
        logger.warning(
            "checkpoint.every=null: the run saves nothing before its end, so a crash loses all that it has trained; "
            "leave checkpoint.every out to save by the clock"
        )


def check_device(config: FinetuneConfig, device: str) -> None:
    """Refuse what cannot be trained on this kind of device."""
    attention = config.model.attention
    if device == "cpu" and attention == "flex_attention":
        raise ConfigError(
            "model.attention=flex_attention on a CPU: torch computes no gradients there; set model.attention=sdpa "
            "(or cluster.device=cuda on machines with GPUs)"
        )
    if device == "cpu" and attention.startswith("flash_attention_"):
        raise ConfigError(
            f"model.attention={attention} on a CPU: flash-attn runs on GPUs only; set model.attention=auto (or "
            "cluster.device=cuda on machines with GPUs)"
        )


def idle_gpus(cluster: ClusterConfig, device: str, workers: int, gpus: int) -> tuple[str, str] | None:
    """Return what to say and what to do where `cluster.device: auto` takes CPUs because there are too few GPUs."""
    if device != "cpu" or cluster.device != "auto" or cluster.gpus_per_worker == 0 or not 0 < gpus < workers:
        return None
    s = "s" * (gpus != 1)
    return (
        f"cluster.device=auto: {gpus} GPU{s} for {workers} workers, so the run is on CPUs",
        f"set cluster.workers={gpus} to train on the GPU{s}",
    )


def _check_storage(field: str, wanted: Path) -> None:
    """Refuse storage that cannot be written, before the ranks find out."""
    from raytune_fsdp.base.machine import nearest_existing  # imported here, as it needs psutil

    there = nearest_existing(wanted)
    if not there.is_dir():
        raise ConfigError(f"{field}: {there} is a file, so {wanted} cannot be a directory; choose another path")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{field}: {there} is not writable by this user; choose another path")
    try:
        TemporaryFile(dir=there).close()  # root may write everywhere, but not in /proc
    except OSError as error:
        raise ConfigError(
            f"{field}: nothing can be written in {there} ({error.strerror}); choose another path"
        ) from None


def check_best(config: FinetuneConfig, plan: Plan, known: Sequence[str] | None = None) -> None:
    """Refuse to keep the best checkpoints unless every checkpoint is evaluated, by a metric that exists.

    `known`: the names of the metrics; None as long as they are not known.
    """
    keep, best = config.checkpoint.keep_best, config.checkpoint.best
    if keep and not (config.data.eval or config.eval.tasks):
        raise ConfigError(
            f"checkpoint.keep_best={keep}, but nothing is evaluated: set data.eval, or set checkpoint.keep_best to 0"
        )
    if keep and best is None and not config.data.eval:
        raise ConfigError(
            f"checkpoint.keep_best={keep} goes by the mean loss, and without data.eval there is none: set "
            f"checkpoint.best to {_one_of(known)}"
        )
    if keep and best is not None and known is not None and best not in known:
        raise ConfigError(f"checkpoint.best={best} is not a metric of an evaluation: choose one of {', '.join(known)}")
    if keep and not is_multiple(plan.save_every, of=plan.eval_every):
        raise ConfigError(
            f"checkpoint.keep_best={keep}, but only some of the checkpoints ({cadence_in_words(plan.save_every)}) "
            f"would be evaluated ({cadence_in_words(plan.eval_every)}): make checkpoint.every a multiple of "
            "eval.every, or leave checkpoint.every out"
        )


def _one_of(known: Sequence[str] | None) -> str:
    return f"one of {', '.join(known)}" if known else "a metric of eval.tasks"


def check_early_stop(config: FinetuneConfig, known: Sequence[str] | None = None) -> None:
    """Refuse `eval.early_stop` where nothing is evaluated, or by a metric that no evaluation has.

    `known`: the names of the metrics; None as long as they are not known.
    """
    rule = config.eval.early_stop
    if rule is None:
        return
    if not (config.data.eval or config.eval.tasks):
        raise ConfigError("eval.early_stop is set, but nothing is evaluated: set data.eval, or leave early_stop out")
    if rule.metric is None and not config.data.eval:
        raise ConfigError(
            "eval.early_stop goes by the mean loss, and without data.eval there is none: set eval.early_stop.metric to "
            f"{_one_of(known)}"
        )
    if config.eval.every is None:
        raise ConfigError(
            "eval.early_stop is set, but eval.every is not, so the only evaluation is at the end: set eval.every to a "
            "number of steps, or leave early_stop out"
        )
    if rule.metric is not None and known is not None and rule.metric not in known:
        raise ConfigError(
            f"eval.early_stop.metric={rule.metric} is not a metric of an evaluation: choose one of {', '.join(known)}"
        )


def check_where(config: FinetuneConfig) -> None:
    """Refuse what an evaluation in a task of its own cannot do: it comes later, and sees only committed checkpoints."""
    chosen = config.eval
    if chosen.where != "task":
        return
    if not (config.data.eval or chosen.tasks or chosen.prompts):
        raise ConfigError(
            "eval.where=task, but nothing is evaluated: set data.eval, eval.tasks or eval.prompts, or leave where out"
        )
    best = config.checkpoint.keep_best
    found = {
        "eval.at_start=true": chosen.at_start and "there is no checkpoint before the first step",
        "eval.early_stop": chosen.early_stop
        and "the run would be further by then, and how far depends on the machines",
        f"checkpoint.keep_best={best}": best and "a checkpoint may be removed before it is measured",
    }
    for field, why in found.items():
        if why:
            raise ConfigError(
                f"{field} and eval.where=task: {why}; set eval.where to ranks, or leave the other one out"
            )


def check_export(config: FinetuneConfig, plan: Plan) -> None:
    """Refuse exports during training at steps without a checkpoint."""
    if plan.export_every is not None and not is_multiple(plan.export_every, of=plan.save_every):
        raise ConfigError(
            f"export.every={config.export.every}, but there is a checkpoint to export only "
            f"{cadence_in_words(plan.save_every)}: make export.every a multiple of checkpoint.every, for example with "
            f"checkpoint.every={config.export.every}"
        )
