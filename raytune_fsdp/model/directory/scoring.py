"""What a model directory says of a head that scores (`model.head`), and the class of transformers that has such a head.

That class, `...ForSequenceClassification`, has the decoder of the run's network under the same names, and the head as
`score`. Some of a type have other layers there, or a bias, or a pooled text: they are no class for this head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from raytune_fsdp.base.errors import ConfigError, ModelError
from raytune_fsdp.base.untrusted import shown
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.model import HeadConfig
from raytune_fsdp.data.rows.scores.scoring import pad_token_of

SCORE = "score"
"""The name of the head in transformers' classes."""

_KIND = "ForSequenceClassification"


def scoring_class(values: Mapping[str, Any]) -> str | None:
    """Return the class that a config.json names if it scores texts; None if it predicts tokens."""
    names = values.get("architectures")
    found = names if isinstance(names, list) else []
    return next((name for name in found if isinstance(name, str) and name.endswith(_KIND)), None)


def kind_of(network: PreTrainedModel) -> type[PreTrainedModel] | None:
    """Return the class for scores whose decoder a run's network has; None if transformers has none."""
    return kind_for(network.config.model_type) if _is_known(network) else None


def kind_for(model_type: str) -> type[PreTrainedModel] | None:
    """Return the class that transformers loads for scores from a config of this type; None if it has none."""
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def set_padding(head: HeadConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have a tokenizer pad with the token of a head, as whoever uses the model does, or with none.

    A token that is not special would become so when transformers loads the exported tokenizer, which would then read
    texts otherwise. Such a token is in the model's config alone, and who pads without naming it gets an error.
    """
    pad = pad_token_of(head, tokenizer)
    tokenizer.pad_token = str(tokenizer.convert_ids_to_tokens(pad)) if pad in tokenizer.added_tokens_decoder else None


def describe_head(
    config: FinetuneConfig, hf_config: PretrainedConfig, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Say in a run's config what transformers needs to load its network with a head that scores, if it has one.

    Refuses a network for which transformers has no such class.
    """
    head = config.model.head
    if head is None:
        return
    kind = kind_of(network)
    if kind is None:
        raise no_class_for(network)
    own = hf_config.id2label if scoring_class({"architectures": hf_config.architectures}) is not None else None
    labels = head.labels or [f"LABEL_{number}" for number in range(head.size)]
    if not head.labels and own is not None and {*own} == {*range(head.size)}:  # those of the model that it begins with
        labels = [str(own[number]) for number in range(head.size)]
    for part in {id(each): each for each in (hf_config, hf_config.get_text_config())}.values():
        part.problem_type = None  # checked against the number of labels
        part.id2label, part.label2id = dict(enumerate(labels)), {name: number for number, name in enumerate(labels)}
        classes = config.train.objective.type == "classification"
        part.problem_type = "single_label_classification" if classes else "regression"
        part.pad_token_id = pad_token_of(head, tokenizer)
    hf_config.architectures = [kind.__name__]


def check_head(hf_config: PretrainedConfig, head: HeadConfig | None, path: str) -> None:
    """Refuse to begin with a model that scores without a head, or with one of another size. `path`: where it is."""
    kind = scoring_class({"architectures": hf_config.architectures})
    if kind is None:
        return
    if head is None:
        raise ModelError(
            f"model.path={path} is a {kind}: its head scores texts, and predicts no tokens; set model.head.type=score "
            f"and model.head.outputs={hf_config.num_labels} to train it on, or begin with the model that it was made of"
        )
    if head.size != hf_config.num_labels:
        raise ModelError(
            f"model.head.outputs={head.size}, and the head of model.path={path} (a {kind}) has {hf_config.num_labels}: "
            f"set model.head.outputs={hf_config.num_labels}, or begin with the model that it was made of"
        )


def other_classes(hf_config: PretrainedConfig, head: HeadConfig) -> list[str] | None:
    """Return the names of a stored head's classes, in order, if a config gives them other ones, or another order."""
    stored = [str(name) for _, name in sorted((hf_config.id2label or {}).items())]
    named = head.labels and not all(re.fullmatch(r"LABEL_\d+", name) for name in stored)
    return stored if named and stored != head.labels else None


def check_measured(hf_config: PretrainedConfig, head: HeadConfig, path: str) -> None:
    """Refuse to measure a stored model on rows of other classes than its head has."""
    if head.size != hf_config.num_labels:
        raise ModelError(
            f"{path} has a head of {hf_config.num_labels} output(s), and what is measured here is of {head.size}: name "
            "a model with such a head, or with --config a config for this one"
        )
    if (stored := other_classes(hf_config, head)) is not None:
        raise ModelError(
            f"the classes of {path} are {shown(stored)}, and those measured here are {shown(head.labels)}: set "
            "--model.head.labels to the names that are stored, in their order"
        )


def no_class_for(network: PreTrainedModel, why: str | None = None) -> ConfigError:
    kind, own = network.config.model_type, not _is_known(network)
    return ConfigError(
        f"model.head.type=score: transformers has no class that scores texts for a {kind}"
        f"{' with code of its own' if own else f' ({why})' if why else ''}, so nobody could load what it has learned: "
        "choose another model, such as Llama, Qwen or Gemma"
    )


def _is_known(network: PreTrainedModel) -> bool:
    return type(network).__module__.startswith("transformers.")
