"""Masks of chat templates as models have them: 32 structures, five tokenizers, and who says what is right."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from raytune_fsdp.base.batch import IGNORE
from raytune_fsdp.base.errors import RowError
from raytune_fsdp.config import ChatFormat
from raytune_fsdp.data.mixture import FIFTH_ORDER, FOURTH_ORDER, OLDEST_ORDER
from raytune_fsdp.data.rows.conversation import Conversation
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.learn import learn
from raytune_fsdp.data.rows.templates import ChatTemplate, TemplateChoice
from raytune_fsdp.data.rows.turns import trained_spans
from raytune_fsdp.demo import CONVERSATIONS
from raytune_fsdp.demo.make_tokenizer import texts
from tests.unit.chat_structures import STRUCTURES, Messages, conversations
from tests.unit.made_tokenizers import demo, metaspace, pieces

NEWER = {
    "glm 4", "glm 4.5", "baichuan",  # no end of their own
    "gpt-oss", "olmo 3, another end behind the last",  # another end later
    "qwen 3", "qwen 3.5, prompt opens the thought", "nemotron", "kimi k2, thinking",  # an empty thought
    "kimi k2",  # ids of calls for their names
    "deepseek 3.1", "deepseek 3.1, to think",  # arguments as text
}  # fmt: skip
"""Structures whose masks the rules of version 5 change. All others are as they were."""


@functools.cache
def unigram() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    corpus = [*texts(CONVERSATIONS), "".join(map(chr, range(33, 127))) + "éöï☃«»"]
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False,
        initial_alphabet=[*map(chr, range(33, 127)), *"éöï☃\n▁"],
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@functools.cache
def prefixing() -> PreTrainedTokenizerBase:
    """Byte-level, with a space in front of every text."""
    backend = copy.deepcopy(demo().backend_tokenizer)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


TOKENIZERS = {
    "byte-level": demo,
    "byte-level, prefixing": prefixing,
    "Metaspace, always": lambda: metaspace("always"),
    "Metaspace, first": lambda: metaspace("first"),
    "Unigram": unigram,
}


@functools.cache
def tokenizer_for(name: str, tokenizer: str) -> PreTrainedTokenizerBase:
    backend = copy.deepcopy(TOKENIZERS[tokenizer]().backend_tokenizer)
    backend.add_special_tokens(STRUCTURES[name].tokens.split())
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def formatter(name: str, tokenizer: str = "byte-level", *, tags: bool = False, order: int = FIFTH_ORDER) -> Formatter:
    structure = STRUCTURES[name]
    choice = TemplateChoice(text=structure.tagged() if tags else structure.bare(), variables=structure.variables)
    made = tokenizer_for(name, tokenizer)
    return Formatter(ChatFormat(), tokenizer=made, vocab_size=len(made), template=choice, order=order)


def documents(made: Formatter, given: list[Messages]) -> list[Document | RowError]:
    return made.documents([{"messages": each} for each in given], [f"row {i}" for i in range(len(given))])


def shown(parts: list[tuple[str, bool]], *, spaces: bool) -> str:
    """What is trained on between « and ». Tokenizers may put a space in front of a piece: without spaces."""
    text = ""
    for part, trained in parts:
        part = part if spaces else re.sub(r"[\s▁]", "", part)
        text += f"«{part}»" if trained and part else part
    return text.replace("»«", "")


def disagreements(name: str, tokenizer: str, many: int, *, tags: bool = False) -> list[tuple[str, str]]:
    structure, spaces = STRUCTURES[name], tokenizer == "byte-level"
    given = conversations(structure, many)
    found = []
    for messages, document in zip(given, documents(formatter(name, tokenizer, tags=tags), given), strict=True):
        parts = re.split("[«»]", structure.write(messages))
        wanted = shown([(part, bool(place % 2)) for place, part in enumerate(parts)], spaces=spaces)
        made = str(document)
        if isinstance(document, Document):
            made = shown(pieces(document, tokenizer_for(name, tokenizer)), spaces=spaces)
        if made != wanted:
            found.append((wanted, made))
    return found


def test_there_are_thirty_structures() -> None:
    assert len(STRUCTURES) >= 30 and len(TOKENIZERS) == 5


@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_of_a_structure(name: str) -> None:
    """With the tokenizer that tells most, and with one of the other four; all five read a thousand conversations."""
    first, *others = TOKENIZERS
    for tokenizer in (first, others[[*STRUCTURES].index(name) % len(others)]):
        assert disagreements(name, tokenizer, 6) == []


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_of_a_thousand_conversations(name: str, tokenizer: str) -> None:
    assert disagreements(name, tokenizer, 1000) == []
    if STRUCTURES[name].tags:
        assert disagreements(name, tokenizer, 200, tags=True) == []


@pytest.mark.parametrize("name", [name for name, structure in STRUCTURES.items() if structure.tags])
def test_masks_of_tags_are_those_that_trl_has(name: str) -> None:
    """TRL's SFTTrainer trains on what this call of transformers marks. It does not cut a text at the borders."""
    structure, made = STRUCTURES[name], tokenizer_for(name, "byte-level")
    given = conversations(structure, 25, seed=2)
    same = 0
    for messages, document in zip(given, documents(formatter(name, tags=True), given), strict=True):
        theirs: Any = made.apply_chat_template(
            messages, chat_template=structure.tagged(), tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True, date_string="26 Jul 2024", **structure.variables,
        )  # fmt: skip
        assert isinstance(document, Document), document
        if document.input_ids.tolist() == theirs["input_ids"]:
            same += 1
            assert (document.labels != IGNORE).astype(int).tolist() == theirs["assistant_masks"]
    assert same >= 20


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_known_of_a_template_is_what_rendering_each_turn_shows(name: str) -> None:
    structure = STRUCTURES[name]
    template, special = ChatTemplate(structure.bare(), structure.variables), tuple(structure.tokens.split())
    for newer in (True, False):
        habits = learn(template, special, newer=newer, tools=False)
        for messages in conversations(structure, 5, seed=3):
            conversation = Conversation(messages, [True] * len(messages), None, "row", "messages")
            ways: list[Any] = []
            for known in (habits, habits.by_turn()):
                try:
                    ways.append(
                        trained_spans(
                            template, conversation, loss="assistant", special=special, newer=newer, habits=known
                        )
                    )
                except RowError as error:
                    ways.append(str(error))
            assert ways[0] == ways[1]


@pytest.mark.parametrize("name", STRUCTURES)
def test_only_structures_that_need_it_get_another_version_of_the_order(name: str) -> None:
    assert formatter(name).order_version == (FIFTH_ORDER if name in NEWER else OLDEST_ORDER)
    if name in NEWER:
        return
    given = conversations(STRUCTURES[name], 6, seed=4)
    newer, older = (documents(formatter(name, order=order), given) for order in (FIFTH_ORDER, FOURTH_ORDER))
    for one, other in zip(newer, older, strict=True):
        assert isinstance(one, Document) and isinstance(other, Document)
        assert one.input_ids.tolist() == other.input_ids.tolist() and one.labels.tolist() == other.labels.tolist()


@pytest.mark.parametrize("name", ["glm 4", "qwen 3"])
def test_runs_of_older_versions_keep_their_masks(name: str) -> None:
    """As the code before these rules made them."""
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
    (document,) = documents(formatter(name, order=FOURTH_ORDER), [messages])
    assert isinstance(document, Document)
    trained = [text for text, flag in pieces(document, tokenizer_for(name, "byte-level")) if flag]
    assert trained == {"glm 4": ["\nYes."], "qwen 3": ["<think>\n\n</think>\n\nYes.<|im_end|>"]}[name]


class Counting(ChatTemplate):
    """Counts what is rendered."""

    messages = 0

    def render(self, messages: Any, tools: Any, *, prompt: bool = False) -> Any:
        self.messages += len(messages)
        return super().render(messages, tools, prompt=prompt)


@pytest.mark.parametrize(
    "name",
    [
        "qwen 2.5",
        "qwen 3",
        "glm 4.5",
        "gpt-oss",
        "olmo 3, another end behind the last",
        "mistral 3",
        "deepseek 3.1",
        "kimi k2",
    ],
)
@pytest.mark.parametrize("agent", [False, True])
def test_a_long_conversation_is_rendered_few_times(name: str, agent: bool) -> None:
    structure = STRUCTURES[name]
    messages: Messages = []
    for turn in range(100):
        if not agent or turn == 0:
            messages.append({"role": "user", "content": f"What is {turn}?"})
        if agent and turn < 99:
            name = ("look", "search", "ask")[turn % 3]
            call = {"id": f"look:{turn}", "type": "function", "function": {"name": name, "arguments": {"at": turn}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": f"result {turn}", "tool_call_id": f"look:{turn}"})
        else:
            messages.append({"role": "assistant", "content": f"It is {turn}."})
    special = tuple(structure.tokens.split())
    template = Counting(structure.bare(), structure.variables)
    habits = learn(ChatTemplate(structure.bare(), structure.variables), special, newer=True, tools=False)
    conversation = Conversation(messages, [True] * len(messages), None, "row", "messages")
    text, spans = trained_spans(template, conversation, loss="assistant", special=special, habits=habits)
    assert spans is not None and len(spans) == 100
    marked = "".join(
        text[end:start] + f"«{text[start:stop]}»"
        for (start, stop), end in zip(spans, [0, *(stop for _, stop in spans)], strict=False)
    )
    assert marked + text[spans[-1][1] :] == structure.write(messages)
    assert template.messages <= 3.2 * len(messages), "once without marks, once with them, and a little more"


NO_END = (
    "{%- for m in messages -%}{{ m.role | title ~ ': ' ~ m.content }}{%- if not loop.last -%}{{ ' ' }}{%- endif -%}"
    "{%- endfor -%}{{ ' Assistant: ' if add_generation_prompt }}"
)


def test_row_whose_turn_nothing_ends_is_refused_and_the_way_out_works() -> None:
    row = {"messages": [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]}

    def one(template: str, order: int = FIFTH_ORDER) -> Document | RowError:
        made = Formatter(ChatFormat(), tokenizer=demo(), vocab_size=5000, template=template, order=order)
        return made.documents([row], ["f.jsonl:7"])[0]

    error = one(NO_END)
    assert isinstance(error, RowError) and error.reason == "template"
    assert re.match(
        r"f\.jsonl:7: the chat template writes nothing after messages\[1\].*not learn to end its turn; write the token "
        r"that ends a turn there \(\{\{ eos_token \}\}\).*data\.chat_template",
        str(error),
    )
    assert isinstance(one(NO_END, FOURTH_ORDER), Document), "a run of before goes on"
    mended = one(NO_END.replace("m.content }}", "m.content ~ (eos_token if m.role == 'assistant' else '') }}"))
    assert isinstance(mended, Document) and pieces(mended, demo())[-1] == ("Yes.<|endoftext|>", True)


def test_call_that_gpt_oss_leaves_out_is_refused() -> None:
    """Its template writes one call. The name of the function, written again before its result, does not hide that."""
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": at}}} for at in (1, 2)]
    messages = [
        {"role": "user", "content": "Is it?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": f"{at}"} for at in (1, 2)),
        {"role": "assistant", "content": "Yes."},
    ]
    (error,) = documents(formatter("gpt-oss"), [messages])
    assert isinstance(error, RowError) and "leaves out tool_calls of messages[1]" in str(error)
    alone = [messages[0], {**messages[1], "tool_calls": calls[:1]}, messages[2], messages[4]]
    assert isinstance(documents(formatter("gpt-oss"), [alone])[0], Document)


def test_the_date_that_gpt_oss_is_told_stands_in_the_config() -> None:
    structure = STRUCTURES["gpt-oss"]
    template = ChatTemplate(structure.bare(), {}, date="2025-03-01")
    assert "Current date: 2025-03-01<|end|>" in template.render([{"role": "user", "content": "Hm?"}], None)[0]
    own = ChatTemplate("{{ date_string }} {{ strftime_now('%d %b %Y %H:%M') }}", {}, date="2025-03-01")
    assert own.render([], None)[0] == "01 Mar 2025 01 Mar 2025 00:00"
