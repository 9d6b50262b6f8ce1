"""`model`: which network, which weights, which tokenizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from raytune_fsdp.config.rules import Section, function_name, model_place, without_secret_values


class NewToken(Section):
    """A token that the tokenizer does not have yet. It may be written as its text alone."""

    text: str = Field(min_length=1)
    """The token, as it stands in the data."""

    special: bool = False
    """Whether it is a control token: left out of answers, and never part of a word."""

    like: str | None = None
    """A text that describes it: the token's rows start as the mean of the rows of this text's tokens. Default: the mean of
    all rows."""

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value


class HeadConfig(Section):
    type: Literal["score"]
    """`score`: one linear layer without bias, at the last token of a document: a reward, a score, or a class."""

    outputs: int | None = Field(default=None, ge=1)
    """How many numbers it returns. Null: as many as there are labels; without labels, 1."""

    labels: list[str] = Field(default_factory=list)
    """The names of the classes, in the order of the outputs."""

    pad_token: str | None = None
    """The token that whoever uses the model pads with. Its class in transformers scores a text at its last token that is
    not this one, so no document may end with it. Null: the first of the tokenizer's special tokens that ends no text."""

    @property
    def size(self) -> int:
        """How many numbers it returns."""
        return self.outputs or len(self.labels) or 1

    @model_validator(mode="after")
    def _labels(self) -> Self:
        twice = next((label for label in self.labels if self.labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"model.head.labels names {twice!r} twice: leave one out")
        if self.labels and len(self.labels) != self.size:
            raise ValueError(
                f"model.head.outputs={self.outputs} with {len(self.labels)} labels: each output has one: leave outputs out"
            )
        return self


class ModelConfig(Section):
    path: Annotated[str, AfterValidator(model_place)] | None = None
    """Directory in Hugging Face format, the name of a model on the Hugging Face hub, or a committed checkpoint of another
    run (path or URL), whose weights this run starts from. With `init: random` only its architecture is used."""

    revision: str | None = None
    """Branch, tag or commit of a hub model. Of these, only a commit always names the same files."""

    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` fills the network from the weights at `model.path`; `random` draws them from `run.seed`."""

    architecture: Annotated[dict[str, Any] | None, AfterValidator(without_secret_values)] = None
    """The architecture for `init: random`, instead of `model.path`, as the content of a Hugging Face `config.json`
    (`model_type` and the rest)."""

    overrides: Annotated[dict[str, Any], AfterValidator(without_secret_values)] = Field(default_factory=dict)
    """Attributes of the Hugging Face config to change, for example `{attention_dropout: 0.1}`."""

    tokenizer: Annotated[str, AfterValidator(model_place)] | None = None
    """Directory or hub name of the tokenizer. Default: `model.path`."""

    network: Annotated[str, AfterValidator(function_name)] | None = None
    """`module:function`: a function of your own that is given the model's config and returns the network, a
    `transformers.PreTrainedModel`. A class will do. The module must be importable wherever ranks run. Its file, and the files
    of your own modules that it imports, belong to the run: a changed one is refused."""

    head: HeadConfig | None = None
    """A head that takes the place of the one that predicts tokens. Null: the model predicts tokens."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model, and with the models that `reference.model` and `teacher.model` name. Only for
    models whose code you have read."""

    resize_embeddings: bool = False
    """Grow the embeddings if the tokenizer has more tokens than the model; new rows start as the mean of the old rows."""

    add_tokens: list[NewToken] = Field(default_factory=list)
    """Tokens to add to the tokenizer and the embeddings: texts, or `{text, special, like}`. With `init: random` their rows
    are drawn like all others."""

    attention: Literal[
        "auto",
        "documents",
        "eager",
        "sdpa",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
        "flex_attention",
    ] = "auto"
    """Attention implementation. `documents`: kernels that get the starts of packed documents instead of a mask, from
    flash-attn if it is installed and works, else from torch. `auto`: `documents` if it is right for the network and the
    precision, else `sdpa`, else `eager`; a run that continues keeps what it began with. `flex_attention` trains on GPUs
    only."""

    loss: Literal["auto", "chunked", "plain"] = "auto"
    """`plain` makes the logits of a whole micro-batch. `chunked` goes from hidden states to losses and gradients a few
    hundred tokens at a time, and has no other logits. `auto`: `chunked` if it gives the losses of the network's own head;
    a run that continues keeps what it began with."""

    fill: Literal["auto", "sharded", "rank0"] = "auto"
    """How weights reach the ranks. `sharded`: every rank reads its own slices. `rank0`: only rank 0 opens the files,
    and sends each rank its slices. `auto`: `sharded` if every rank sees the files. The files of a hub model are fetched by
    every machine with `sharded`, and only by rank 0's machine with `rank0`."""

    @property
    def chooses_attention(self) -> bool:
        """Whether the run chooses its attention, by its devices. If not, transformers builds the network with it."""
        return self.attention == "auto" or self.attention.startswith("documents")

    def elsewhere(self, path: str) -> Self:
        """Return the section of another model, which is stored there and is asked about the same tokens."""
        return self.model_copy(
            update={
                "path": path, "revision": None, "init": "pretrained", "architecture": None, "overrides": {},
                "network": None, "tokenizer": self.tokenizer or self.path, "add_tokens": [], "head": None,
            }
        )  # fmt: skip

    @model_validator(mode="after")
    def _tokens_once(self) -> Self:
        texts = [token.text for token in self.add_tokens]
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ValueError(f"model.add_tokens names {twice!r} twice: leave one out")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is None and self.architecture is None:
            raise ValueError(
                "needs model.path (a directory or a hub name), or model.init=random with model.architecture"
            )
        if self.architecture is not None and (self.init != "random" or self.path is not None):
            raise ValueError(
                f"model.architecture describes a network without weights: set model.init=random (is {self.init!r}) "
                "and leave model.path unset"
            )
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError('model.architecture needs "model_type", for example llama, qwen3 or gpt2')
        return self
