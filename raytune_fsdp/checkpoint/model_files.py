"""Find the config and tokenizer that belong to a committed checkpoint, and load it as a model. Needs no ranks."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from raytune_fsdp.base.durable import replace_at_once, update_durably
from raytune_fsdp.base.errors import ModelError, ResumeError, first_line, is_panic, pip_install
from raytune_fsdp.base.threads import READERS
from raytune_fsdp.base.untrusted import UnsoundError
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint, as_checkpoint, newest, verify
from raytune_fsdp.checkpoint.merged import (
    WholeWeights,
    base_of,
    base_of_adapter,
    dtype_of,
    merged_weights,
    weights_of_adapter,
)
from raytune_fsdp.checkpoint.objects import ObjectStorage
from raytune_fsdp.data.rows.own_code import OwnCode
from raytune_fsdp.model.adapters.config_file import read_adapter_config
from raytune_fsdp.model.directory.bounds import NEEDS_CODE, check_header, read_config, wants_code
from raytune_fsdp.model.directory.files import find_weights
from raytune_fsdp.model.directory.known_files import ADAPTER_CONFIG_FILE, CONFIG_FILE, is_known, travelling
from raytune_fsdp.model.directory.needed_code import check_trusted
from raytune_fsdp.model.directory.quantization import make_plain
from raytune_fsdp.model.directory.scoring import scoring_class
from raytune_fsdp.model.directory.tokenizer import tokenizer_in
from raytune_fsdp.model.network import choose_experts, stored_network, with_stored_head
from raytune_fsdp.model.own_network import KEY, build_own, class_of
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.model.weights.dequantize import check_packed
from raytune_fsdp.model.weights.keys import check_report, check_shapes, match_keys, matched_weights, owned_tensors
from raytune_fsdp.model.weights.source import Weights, read_whole
from raytune_fsdp.plan.run_dir import MARK_FILE, MODEL_FILES, RECIPE_FILE, checkpoints_below, checkpoints_of

_OF_THE_RUN = (RECIPE_FILE, ADAPTER_CONFIG_FILE, MARK_FILE)
"""Files that a run keeps next to its config and tokenizer, and that are in no export as they are."""
_COPIED_BYTES = 128 << 20  # a tokenizer's largest file; weights are never there
_MOST_PER_BYTE = 64  # bytes that a network may take for each of its files: those of 4 bits, read as fp32, take eight
_SHARE = 0.8
"""The share of a GPU's free memory that weights may take. The rest is for what is computed with them, and for the cache
of a long conversation."""


def find_checkpoint(place: Path | str, *, hashes: bool = True) -> CommittedCheckpoint:
    """Return the verified checkpoint at a path or URL, or the newest intact one of a run directory.

    Without `hashes`, which read all of its files, it is compared with its manifest by sizes alone.
    """
    # Resolved, since the run directory is found from a checkpoint by its parents.
    path = str(place) if is_url(str(place)) else str(Path(place).resolve())
    found = as_checkpoint(path)
    if found is not None:
        problem = verify(found, hashes=hashes, threads=READERS)
        if problem:
            raise ResumeError(f"checkpoint {path} is damaged: {problem}; use another one of the run")
        return found
    found, _ = newest(
        checkpoints_below(path) if is_url(path) else checkpoints_of(Path(path)), hashes=hashes, threads=READERS
    )
    if found is None:
        there = is_url(path) or Path(path).exists()
        what = (
            "is neither a committed checkpoint nor the directory of a run that has one" if there else "does not exist"
        )
        raise ResumeError(f"{path} {what}; name a run, <run.storage>/<run.name>, or one of its checkpoints")
    return found


def model_files(checkpoint: CommittedCheckpoint) -> Path:
    """Return the directory with config and tokenizer of a checkpoint's run; for an object store, a local copy."""
    if is_url(checkpoint.root):
        store = ObjectStorage(checkpoint.root.rpartition("/")[0])
        copy = Path(tempfile.mkdtemp(prefix="raytune-model-"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        for name in store.sizes(MODEL_FILES):
            # Keys of an object store are any text, `../` included.
            if is_known(name) or name in _OF_THE_RUN or re.fullmatch(r"\w+\.py", name):
                (copy / name).parent.mkdir(exist_ok=True)
                try:
                    (copy / name).write_bytes(store.read(MODEL_FILES, name, _COPIED_BYTES))
                except UnsoundError as error:
                    raise ModelError(f"{store.where(MODEL_FILES)}/{name} {error}") from error
        files, where = copy, f"{checkpoint.root.rpartition('/')[0]}/{MODEL_FILES}"
    else:
        files = Path(checkpoint.root).parent / MODEL_FILES
        where = str(files)
    if files.is_symlink() or not (files / CONFIG_FILE).exists():
        raise ModelError(
            f"{checkpoint.path} is without its run: {where} should be a directory with the run's {CONFIG_FILE} and "
            f"tokenizer; copy {MODEL_FILES}/ of the run there"
        )
    travelling(files, code=True)  # none of them is a link
    return files


def put_model_files(model: Path, checkpoints: str) -> None:
    """Copy config and tokenizer to where `model_files` looks, if the checkpoints are not in the run's directory."""
    names = [*travelling(model, code=True), *(name for name in _OF_THE_RUN if (model / name).is_file())]
    if is_url(checkpoints):
        store = ObjectStorage(checkpoints.rpartition("/")[0])
        for name in names:
            store.put(MODEL_FILES, name, (model / name).read_bytes())
    elif Path(checkpoints).parent != model.parent:
        for name in names:
            target = Path(checkpoints).parent / MODEL_FILES / name
            if name in (RECIPE_FILE, MARK_FILE):
                target.parent.mkdir(parents=True, exist_ok=True)
                replace_at_once(target, (model / name).read_bytes(), private=True)
            else:
                update_durably(target, (model / name).read_bytes())


def describe_for_inference(
    path: Path, *, trust_remote_code: bool = False, base: str | None = None, scores: bool = False
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Return config and tokenizer of what `load_for_inference` loads. No weights are read."""
    _check_directory(path)
    if (path / CONFIG_FILE).is_file():
        own, files = path, path
    elif (path / ADAPTER_CONFIG_FILE).is_file():
        _check_adapter(path)
        own, files = path, base_of_adapter(path, base)
    else:
        own = files = model_files(find_checkpoint(path, hashes=False))
    _check_head(path, files, scores=scores)
    what = "does not describe a model that transformers can build"
    hf_config = _loaded(lambda: AutoConfig.from_pretrained(files, trust_remote_code=trust_remote_code), files, what)
    return hf_config, _tokenizer(own, trust_remote_code)


def load_for_inference(
    path: Path,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    base: str | None = None,
    scores: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer of a run, a checkpoint or a Hugging Face directory, in the stored type.

    A model that is too large for the device is spread over all devices. `base`: where the base of the run's adapters is
    now. `scores`: its head is to score texts, and otherwise to predict tokens.
    """
    _check_directory(path)
    trust = trust_remote_code  # said in every call: where it is not, transformers asks on standard input
    if (path / CONFIG_FILE).is_file():
        if base is not None:
            raise ModelError(f"--base {base}: {path} is a whole model, not an adapter; leave --base out")
        _check_head(path, path, scores=scores)
        tokenizer, model = _tokenizer(path, trust), _scoring_at(path) if scores else _model_at(path, trust)
    elif (path / ADAPTER_CONFIG_FILE).is_file():
        _check_adapter(path)
        weights, files = weights_of_adapter(path, base)
        tokenizer, model = _tokenizer(path, trust), _built(weights, files, trust, str(path))
        _follow_settings(model, files)
    else:
        checkpoint = find_checkpoint(path)
        files = model_files(checkpoint)
        _check_head(path, files, scores=scores)
        tokenizer = _tokenizer(files, trust)
        model = load_checkpoint(checkpoint, device, trust_remote_code=trust, base=base)
        _follow_settings(model, files)
        return model, tokenizer
    choose_experts(model)
    return place(model, device).eval(), tokenizer


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        what = "is a file" if path.exists() else "there is no such directory"
        raise ModelError(f"{path}: {what}; name a run, a checkpoint, or a Hugging Face model directory")


def _check_head(path: Path, files: Path, *, scores: bool) -> None:
    """Refuse a model that scores where tokens are to be predicted, and the other way round."""
    kind = scoring_class(read_config(files))
    if kind is not None and not scores:
        raise ModelError(
            f"{path} is a {kind}: it scores texts and predicts no tokens, so it neither answers nor goes on with one; "
            "load it with transformers' AutoModelForSequenceClassification (README.md of an export says how)"
        )
    if kind is None and scores:
        raise ModelError(f"{path} predicts tokens, and what is measured here is of scores: name a model that scores")


def _check_adapter(path: Path) -> None:
    """Refuse an adapter with a head that scores: its base has none to put it on."""
    if read_adapter_config(path).get("task_type") == "SEQ_CLS":
        raise ModelError(
            f"{path} is an adapter with a head that scores texts and predicts no tokens: load it with PEFT (README.md "
            "says how), or export its run merged (raytune-fsdp export --merge)"
        )


def load_checkpoint(
    checkpoint: CommittedCheckpoint, device: torch.device, *, trust_remote_code: bool = False, base: str | None = None
) -> PreTrainedModel:
    """Return the model of a checkpoint, which may be in an object store."""
    files = model_files(checkpoint)
    weights = merged_weights(checkpoint, files, base_of(checkpoint, base))
    model = _built(weights, files, trust_remote_code, checkpoint.path)
    choose_experts(model)
    return place(model, device).eval()


def _model_at(path: Path, trust: bool) -> PreTrainedModel:
    """Load the model of a Hugging Face directory: safetensors, under names that do not lead out of it."""
    own = _own_network(path, trust)
    network, files = stored_network(path), find_weights(path)
    sizes = files.sizes()
    for name in sizes:
        try:
            check_header(path / name)
        except UnsoundError as error:
            raise ModelError(f"{path / name} {error}: download the model again") from error
    stored = sum(sizes.values())
    wanted = sum(tensor.nbytes for tensor in network.parameters()) if network is not None else 0
    if wanted > _MOST_PER_BYTE * stored:
        raise ModelError(
            f"{path / CONFIG_FILE} describes a network of {wanted / 1e9:.1f} GB, but its weights have only "
            f"{stored / 1e9:.3f}: download the model again"
        )

    check_packed(files)  # transformers takes numbers without their scales for the weights

    def load() -> PreTrainedModel:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        make_plain(hf_config, quantized=True)
        try:
            kind: Any = AutoModelForCausalLM if own is None else class_of(own, hf_config)
            said = {"trust_remote_code": trust} if own is None else {}
            model, report = kind.from_pretrained(
                path, config=hf_config, dtype="auto", use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=True, **said,  # they are in the report
            )  # fmt: skip
        except RuntimeError:
            # What cannot be put together, such as a layer's experts of which some are missing, is in no report.
            if network is not None:
                check_shapes(network, matched_weights(files, match_keys(network, files), network))
            raise
        check_report(report, model, path)
        return model

    return _loaded(load, path, "is not a complete Hugging Face model directory")


def _scoring_at(path: Path) -> PreTrainedModel:
    """Load the model of a directory of one of transformers' classes for scores, as a run's network."""
    network, files = stored_network(path), find_weights(path)
    if network is None:
        raise ModelError(f"{path} is a network with Python code of its own, whose scores are not known here")
    weights = matched_weights(files, match_keys(network, files), network)
    check_shapes(network, weights)
    return _built(_AsWhole(weights), path, False, str(path))


class _AsWhole:
    """Weights that can also be read whole."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self.read, self.where = weights, weights.read, weights.where

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._weights.shapes())

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: self.read(name, 0, 0 if shape else 1).dtype for name, shape in self.shapes().items()}

    def read_all(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: read_whole(self._weights, name) for name in names}


def _built(weights: WholeWeights, files: Path, trust: bool, where: str) -> PreTrainedModel:
    """Build the model with these weights and the config in `files`."""
    own, network, shapes = _own_network(files, trust), stored_network(files), weights.shapes()
    if network is not None:  # compared before it takes any memory
        _compare(network, shapes, files, where)
    what = "does not describe a model that transformers can build"
    hf_config = _loaded(lambda: AutoConfig.from_pretrained(files, trust_remote_code=trust), files, what)
    make_plain(hf_config)  # the base of an adapter may be quantized
    dtype = dtype_of(weights)

    def build() -> PreTrainedModel:
        if own is not None:
            return build_own(own, hf_config, dtype or torch.float32)
        found: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=trust)
        if (head := head_of(with_stored_head(found, hf_config))) is not None:
            head.to_empty(device="cpu")
        return found

    model: PreTrainedModel = _loaded(build, files, what)
    if network is None:  # its class is other code than transformers', and known only now
        _compare(model, shapes, files, where)
    # Not strict: a tied weight is stored under one name only.
    model.load_state_dict(weights.read_all(list(shapes)), strict=False)
    return model


def _follow_settings(model: PreTrainedModel, files: Path) -> None:
    """Have the model write as generation_config.json says, as it does where transformers loads its export."""
    if getattr(model, "generation_config", None) is None:  # it writes nothing
        return

    def read() -> GenerationConfig:
        try:
            return GenerationConfig.from_pretrained(files)
        except OSError:  # there is none, or it is not JSON: transformers goes on without it, too
            return model.generation_config

    model.generation_config = _loaded(read, files, "has a generation_config.json that transformers cannot read")


def _own_network(directory: Path, trust: bool) -> str | None:
    """Return the function that builds the network of a config.json, imported; None: it needs none."""
    own = check_trusted(read_config(directory), directory / CONFIG_FILE, trusted=trust)
    if own is not None:
        OwnCode(KEY, own).load()  # its module tells transformers of its config
    return own


def _compare(network: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], files: Path, where: str) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in owned_tensors(network).items()}
    differ = sorted({name for name, _ in wanted.items() ^ shapes.items()})
    if differ:
        raise ModelError(
            f"{where} does not have the tensors of {files / CONFIG_FILE}: {differ[0]} differs"
            + (f" (and {len(differ) - 1} more)" if len(differ) > 1 else "")
        )


def _tokenizer(directory: Path, trust: bool) -> PreTrainedTokenizerBase:
    return _loaded(
        lambda: tokenizer_in(directory, trust_remote_code=trust),
        directory,
        "has no tokenizer that transformers can load",
    )


def _loaded(load: Callable[[], Any], place: Path, otherwise: str) -> Any:
    """Return what `load` returns, or say why it cannot, in one line."""
    try:
        return load()
    except ModelError:
        raise
    except BaseException as error:  # a stranger's files and code may raise anything
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if wants_code(error):
            raise ModelError(f"{place} {NEEDS_CODE}, then add --trust-remote-code") from error
        raise ModelError(f"{place} {otherwise}: {first_line(error)}") from error


def place(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Put the model on the device, or over all GPUs and the host if it is too large for one."""
    if device.type != "cuda":
        return model.to(device)
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    free = torch.cuda.mem_get_info(device)[0]
    if needed <= _SHARE * free:
        return model.to(device)
    # Whole layers on each GPU, and what is left in host memory. One layer after the other is computed.
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_max_memory
    except ImportError:
        raise ModelError(
            f"the model has {needed / 1e9:.1f} GB of weights, and the GPU has {free / 1e9:.1f} GB of free memory: "
            f"{pip_install('large')} spreads it over all GPUs and the host"
        ) from None
    room = {place: int(_SHARE * size) for place, size in get_max_memory().items() if place != "cpu"}
    # All of it is in host memory already, so whatever fits on no GPU can stay there.
    devices = infer_auto_device_map(
        model, max_memory={**room, "cpu": 2 * needed}, no_split_module_classes=sorted(model._no_split_modules or [])
    )
    return dispatch_model(model, device_map=devices, skip_keys=model._skip_keys_device_placement)
