"""Let a model answer a prompt or the last message of a conversation, with the same tokens as in training."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import GENERATION_CONFIG_NAME

from raytune_fsdp.base.beat import beat
from raytune_fsdp.base.errors import DataError, ModelError, first_line
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.sections.eval import ConversationConfig
from raytune_fsdp.data.rows.templates import ChatTemplate, Refused, TemplateChoice, as_templates_see
from raytune_fsdp.model.attention.choose import positions_of, without_borders
from raytune_fsdp.model.score_head import head_of
from raytune_fsdp.step.parallel import evaluating

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
"""A conversation whose last message is to be answered, as in a row of a chat file."""
_WORDS = "Yes."


def asked(prompt: str | ConversationConfig) -> dict[str, Any]:
    """Return a prompt of the config as event fields: its question and, of a conversation, all messages."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    messages = prompt.model_dump()["messages"]
    return {"prompt": messages[-1]["content"], "messages": messages}


def check_prompts(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase, positions: int) -> None:
    """Refuse prompts of the config that cannot be answered."""
    for index, prompt in enumerate(config.eval.prompts):
        question = asked(prompt)
        try:
            encode_prompt(tokenizer, question.get("messages", question["prompt"]), positions=positions)
        except DataError as error:
            raise DataError(f"eval.prompts.{index}: {error}") from error


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | ConversationConfig],
    *,
    max_new_tokens: int,
    device: torch.device,
    attention: str,
) -> list[dict[str, Any]]:
    """Return each question with the model's answer, by greedy decoding with transformers' `attention`. Collective."""
    found = []
    with evaluating(model), without_borders(model, attention), beating(model):
        for question in map(asked, prompts):
            prompt = question.get("messages", question["prompt"])
            said = answer(model, tokenizer, prompt, max_new_tokens=max_new_tokens, device=device, together=True)
            found.append({**question, "answer": said})
    return found


@contextmanager
def beating(model: PreTrainedModel) -> Iterator[None]:
    """Report a beat for every token: many long answers take longer than any step."""
    with model.register_forward_pre_hook(lambda *_: beat()):
        yield


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    *,
    max_new_tokens: int,
    device: torch.device,
    temperature: float = 0.0,
    streamer: TextStreamer | None = None,
    together: bool = False,
) -> str:
    """Return the answer to one prompt. With a chat template, a text is a user's message; without one, it is continued.

    `together`: all ranks make the same number of passes, even if the last bits of their sums, and so a token, differ
    (collective).
    """
    ids = encode_prompt(tokenizer, prompt, positions=positions_of(model.config)).to(device)
    # A token that the model has no row for would end in an error of its embedding or of the device.
    rows = model.config.get_text_config().vocab_size
    if (most := int(ids.max())) >= rows:
        raise DataError(
            f"the prompt has a token with the id {most}, and the model has only {rows}: its tokenizer is another "
            "model's, so take the one that belongs to it"
        )
    room = positions_of(model.config) - ids.shape[1]
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with nullcontext() if together else errors_of_generate(model):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(max_new_tokens, room),
            use_cache=True,
            streamer=streamer,
            synced_gpus=together and dist.is_initialized() and dist.get_world_size() > 1,
            tokenizer=tokenizer,  # to know stop strings of a generation config in tokens
            **ends(tokenizer),
            **sampling,
        )
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


@contextmanager
def errors_of_generate(model: PreTrainedModel) -> Iterator[None]:
    """Turn an error of `generate` into one line: the configs decide what it does, and computed values what it draws."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise ModelError(
            "the model computes NaN or infinity for the next token, so none can be drawn: its weights are damaged, or "
            "too large for their type"
        ) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot answer as its configs say ({first_line(error)[:300]}): correct its "
            "generation_config.json, or download the model again"
        ) from error


def ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what ends an answer, and what follows it, for `generate`.

    The end is the tokenizer's end token, or the token with which its chat template ends a turn: some models have both.
    If nothing ends a turn there, it is the token with which the next one begins.
    """
    tokens = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": _WORDS}]
        try:
            text = _rendered(tokenizer, turns)
            if text.endswith(_WORDS):  # as in GLM's, a turn ends with what the next message begins with
                text = _rendered(tokenizer, [*turns, {"role": "user", "content": "Go on."}])
        except Refused:
            text = ""
        after = tokenizer(text.rpartition(_WORDS)[2].lstrip(), add_special_tokens=False)["input_ids"]
        if _WORDS in text and after and after[0] in tokenizer.added_tokens_decoder:
            tokens = list(dict.fromkeys([*tokens, after[0]]))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return {"eos_token_id": tokens or None, "pad_token_id": pad}


def generation_config(
    config: FinetuneConfig, network: PreTrainedModel, directory: Path | None, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig | None:
    """Return the generation config of the model's makers, by which an export ends its answers where it was trained to.

    An exported model keeps their sampling and their end tokens.
    """
    if head_of(network) is not None:  # it generates nothing
        return None
    found = network.generation_config
    if directory is not None and (directory / GENERATION_CONFIG_NAME).is_file():
        try:
            found = GenerationConfig.from_pretrained(directory)
        except Exception as error:  # its checks may raise anything
            logger.warning("%s is ignored: %s", directory / GENERATION_CONFIG_NAME, first_line(error))
    other = directory is None or config.model.tokenizer is not None
    return None if found is None else with_ends(found, tokenizer, other=other)


def with_ends(makers: GenerationConfig, tokenizer: PreTrainedTokenizerBase, *, other: bool) -> GenerationConfig:
    """Return a model's generation config with all that ends an answer, for servers, which know only what is in it.

    A base model's makers name no token of the chat template that it is trained with. `other`: the tokenizer is not
    theirs, so that of their tokens only those stay that are special in it.
    """
    try:
        own = ends(tokenizer)["eos_token_id"] or []
    except DataError:  # the template renders the rows, and not our own conversation
        own = []
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    said = makers.eos_token_id
    theirs = [each for each in (said if isinstance(said, list) else [said]) if type(each) is int]  # a stranger's file
    tokens = list(dict.fromkeys([*(each for each in theirs if not other or each in special), *own]))
    made = copy.deepcopy(makers)
    made.eos_token_id = tokens[0] if len(tokens) == 1 else tokens or None
    if other:
        made.bos_token_id, made.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    return made


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, *, positions: int) -> torch.Tensor:
    """Return a prompt's token ids as a batch of one. Raise DataError if it is empty or leaves no room for an answer."""
    shown = repr((prompt if isinstance(prompt, str) else str(prompt[-1]["content"]))[:40])
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = _rendered(tokenizer, messages, prompt=True)
        except Refused as error:
            raise DataError(f"the chat template refuses the prompt {shown}: {error}") from error
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif isinstance(prompt, str):
        tokens = _begun(tokenizer, prompt)
    else:
        raise DataError(
            f"the prompt {shown} is a conversation, and the tokenizer has no chat template: set data.chat_template, or "
            "ask with a text"
        )
    ids = torch.tensor([tokens], dtype=torch.long)
    if not 0 < ids.shape[1] < positions:
        raise DataError(
            f"the prompt {shown} has {ids.shape[1]} tokens; it needs at least 1, and fewer than the "
            f"{positions} positions the model knows"
        )
    return ids


def _begun(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that goes on, without those that the tokenizer would add behind it."""
    whole, bare = (list(tokenizer(text, add_special_tokens=each)["input_ids"]) for each in (True, False))
    begins = (at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare)
    if not bare or (first := next(begins, None)) is None:
        return whole
    return bare if bare[:first] == whole[:first] else whole[: first + len(bare)]  # one that has the first token


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, prompt: bool = False) -> str:
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(
            "the tokenizer has several chat templates, and none of them is the default: set data.chat_template, or "
            "name one of them default"
        ) from error
    choice = TemplateChoice.kept_in(tokenizer)
    template = ChatTemplate(source, {**tokenizer.special_tokens_map, **choice.variables}, date=choice.date)
    return template.render(as_templates_see(messages), None, prompt=prompt)[0]


class Talk:
    """A conversation with a model. It is rendered again for every answer, so the model sees it as in training."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        *,
        system: str | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
    ) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []
        """Messages of the user and of the assistant, in turn."""
        self._model, self._tokenizer, self._device = model, tokenizer, device
        self._max_new_tokens, self._temperature = max_new_tokens, temperature

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system is not None else []), *self.turns]

    def forget(self) -> None:
        self.turns = []

    def ask(self, text: str, *, show: Callable[[str], None], note: Callable[[str], None]) -> str:
        """Return the answer, and give each word of it to `show` as soon as it is there. Ctrl-C ends the answer.

        If the conversation does not fit into the model, the oldest questions are forgotten with their answers, and
        `note` is called. Raise DataError if the question alone is too long, and leave the conversation as it was.
        """
        before = self.turns
        self.turns = [*before, {"role": "user", "content": text}]
        try:
            # Forget the oldest turns until an answer of the full length fits, or only the question is left.
            positions, forgotten = positions_of(self._model.config), 0
            while len(self.turns) > 1 and not self._fits(positions):
                self.turns = self.turns[2:]
                forgotten += 2
            if forgotten:
                note(f"the conversation is longer than the model can read: forgot its first {forgotten} message(s)")
            said = _Shown(self._tokenizer, show)
            try:
                whole = answer(
                    self._model, self._tokenizer, self.messages, max_new_tokens=self._max_new_tokens,
                    device=self._device, temperature=self._temperature, streamer=said,
                )  # fmt: skip
            except KeyboardInterrupt:
                said.end()  # also shows what it holds back until a word is complete
                whole = said.text.strip()
        except DataError:
            self.turns = before
            raise
        self.turns.append({"role": "assistant", "content": whole})
        return whole

    def _fits(self, positions: int) -> bool:
        ids = encode_prompt(self._tokenizer, self.messages, positions=sys.maxsize)
        return ids.shape[1] + min(self._max_new_tokens, positions // 2) <= positions


class _Shown(TextStreamer):  # type: ignore[misc]
    """A streamer that gives the words of an answer to `show` as they come, and keeps them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""
        self._show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._show(text)
