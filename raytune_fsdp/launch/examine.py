"""Measure a model without a run: in this process, or by several ranks of this machine that have a whole copy each."""

from __future__ import annotations

import logging
import os
import pickle
import signal
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.checkpoint.model_files import describe_for_inference, load_for_inference
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.launch.environment import settings_of_nccl
from raytune_fsdp.launch.imported import check_script
from raytune_fsdp.launch.local import start_ranks
from raytune_fsdp.launch.quiet import quiet
from raytune_fsdp.launch.signals import listening
from raytune_fsdp.launch.torchrun import ranks_here
from raytune_fsdp.launch.worker import alone, choose_device, gpus_here, join
from raytune_fsdp.model.attention.choose import generating
from raytune_fsdp.model.directory.scoring import check_measured
from raytune_fsdp.model.objective.chunked_head import install_chunked_loss
from raytune_fsdp.plan.plan import ALONE, Layout
from raytune_fsdp.run.evaluation.evaluation import Evaluation
from raytune_fsdp.run.network_checks import check_packed, why_neighbours_matter
from raytune_fsdp.run.prepare import set_template
from raytune_fsdp.run.trials.computation import check_computation
from raytune_fsdp.run.trials.needs import use_attention_for_packed

logger = logging.getLogger(__name__)

Measured = tuple[dict[str, float], list[dict[str, Any]]]
"""The values of an evaluation by the names of metrics, and its questions with their answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model that is measured, where it is, and what its user trusts."""

    path: Path
    """Of a run, a checkpoint, an export or a Hugging Face model directory."""
    trust_remote_code: bool = False
    base: str | None = None
    """Where the base of the run's adapters is now."""

    def described(self, config: FinetuneConfig) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
        """Return its config, and its tokenizer with the chat template of `config`. No weights are read."""
        hf_config, tokenizer = describe_for_inference(
            self.path, trust_remote_code=self.trust_remote_code, base=self.base, scores=config.train.objective.scores
        )
        if config.model.head is not None:
            check_measured(hf_config, config.model.head, str(self.path))
        set_template(config, tokenizer)
        return hf_config, tokenizer

    def load(self, config: FinetuneConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        model, tokenizer = load_for_inference(
            self.path, device, trust_remote_code=self.trust_remote_code, base=self.base,
            scores=config.train.objective.scores,
        )  # fmt: skip
        set_template(config, tokenizer)
        return model, tokenizer


def examine(
    config: FinetuneConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    exam: Evaluation,
    device: torch.device,
) -> Measured:
    """Return what an evaluation measures, in this process. Refuses a network that computes wrongly."""
    with alone(device):
        return _measured(config, model, tokenizer, exam, device, ALONE)


def _measured(
    config: FinetuneConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    exam: Evaluation,
    device: torch.device,
    layout: Layout,
) -> Measured:
    """Return what an evaluation measures. Collective."""
    if getattr(model, "generation_config", None) is not None:
        # A run's ranks build their network, which does not read generation_config.json. The penalties and beams that a
        # directory has there would make its answers those of another measurement.
        model.generation_config = GenerationConfig.from_model_config(model.config)
    needs = use_attention_for_packed(config, model, device)
    check_packed(config, model, needs)
    if dist.get_rank() == 0 and (mixed := why_neighbours_matter(config, model, needs)) is not None:
        logger.warning("%s; it is measured as it is", mixed)
    # Of one that is spread over several devices, the head has hooks, which its replacement would not have.
    if needs.plain_loss is None and not getattr(model, "hf_device_map", None):
        install_chunked_loss(model)
    check_computation(model, config.data.packing, device, model.dtype)
    attention = generating(model, needs)
    values = exam.values(
        model, tokenizer, micro_batch=config.train.micro_batch, layout=layout, device=device, attention=attention
    )
    return values, exam.answers(model, tokenizer, device=device, attention=attention)


def check_workers(config: FinetuneConfig, workers: int) -> None:
    """Refuse more ranks than this machine has GPUs, where it has some: each rank takes one."""
    gpus = gpus_here()
    if config.cluster.device != "cpu" and 0 < gpus < workers:
        raise ConfigError(
            f"--workers {workers}: this machine has {gpus} GPU{'s' * (gpus != 1)}, and each rank takes one: lower "
            "--workers, or set cluster.device=cpu"
        )


def examine_on_ranks(config: FinetuneConfig, stored: StoredModel, exam: Evaluation, workers: int) -> Measured:
    """Return what an evaluation measures, by several ranks of this machine, which share its micro-batches."""
    check_script()
    with TemporaryDirectory(prefix="raytune-fsdp-") as directory:
        answer = Path(directory, "measured.pkl")
        start_ranks(_rank, (config, stored, exam, answer), workers, name="eval", then="start it again")
        found: Measured = pickle.loads(answer.read_bytes())
    return found


@record
def _rank(config: FinetuneConfig, stored: StoredModel, exam: Evaluation, answer: Path, inputs: Path) -> None:
    """Do the work of one rank. The first one writes into the file `answer`."""
    quiet()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save: end at once, without a traceback
    with listening():
        ranks = ranks_here()
        device = choose_device(config.cluster.device, ranks)
        os.environ.update(settings_of_nccl(config, os.environ))
        join(device, alone=False, minutes=config.cluster.collective_minutes)
        model, tokenizer = stored.load(config, device)
        if getattr(model, "hf_device_map", None):
            raise ModelError(
                f"{stored.path} is larger than one GPU, and with --workers each rank has a whole copy of it: leave "
                "--workers out, and it is spread over all GPUs of this machine"
            )
        layout = Layout(world=ranks, data_ranks=ranks, replicas=ranks, shard_size=1)
        found = _measured(config, model, tokenizer, exam, device, layout)
        if dist.get_rank() == 0:
            inputs.unlink(missing_ok=True)
            answer.write_bytes(pickle.dumps(found))
        dist.destroy_process_group()
