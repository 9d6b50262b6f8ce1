"""Chat templates by structure, each with a writer of its own that says what a conversation becomes.

A structure is what models have in common that are asked in one way: where headers and ends are, what happens to
reasoning, calls and their results. The templates were written here by these structures; none is a model's own text.
A writer knows nothing of Jinja and of the code that finds masks. It writes « and » around what is trained on: all that
generation would write after its prompt, with what ends it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Messages = list[dict[str, Any]]

OPEN, CLOSE = "⟦", "⟧"
"""Around what the assistant writes, in a template: there a variant with tags has them."""

LAST_USER = "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}" + (
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
HERMES = "{%- for c in m.tool_calls or [] -%}{{ '\n<tool_call>\n' ~ ({'name': c.function.name, 'arguments': " + (
    "c.function.arguments} | tojson) ~ '\n</tool_call>' }}{%- endfor -%}"
)


@dataclass(frozen=True)
class Structure:
    template: str
    write: Callable[[Messages], str]
    tokens: str
    """The special tokens, with spaces between them."""
    has: str = ""
    """What its conversations may have: system, calls (or silent-calls, without words), parallel ones, reasoning, a
    question at the end, white space around contents."""
    variables: dict[str, Any] = field(default_factory=dict)
    tags: bool = True
    """Whether a variant with tags can say the same."""

    def bare(self) -> str:
        return self.template.replace(OPEN, "").replace(CLOSE, "")

    def tagged(self) -> str:
        return self.template.replace(OPEN, "{%- generation -%}").replace(CLOSE, "{%- endgeneration -%}")


def conversations(structure: Structure, many: int, seed: int = 1) -> list[Messages]:
    """Conversations as people and agents have them, with what the structure knows."""
    drawn = random.Random(seed)
    return [_conversation(drawn, structure.has.split()) for _ in range(many)]


_WORDS = ("What", "is", "the", "model", "7", "café", "☃", "a\n\nb", "x = 1", "{}", "</b>", "it's", "GPU.", "No?")


def _conversation(drawn: random.Random, has: list[str]) -> Messages:
    def text() -> str:
        words = " ".join(drawn.choices(_WORDS, k=drawn.randint(1, 8)))
        if "white" in has and drawn.random() < 0.15:
            words = drawn.choice(["\n", "  ", ""]) + words + drawn.choice(["\n", " ", "\n\n"])
        return words

    def answer() -> dict[str, Any]:
        message = {"role": "assistant", "content": text()}
        if "reasoning" in has and drawn.random() < 0.4:
            message["reasoning_content"] = text().strip()
        return message

    messages: Messages = []
    if "system" in has and drawn.random() < 0.5:
        messages.append({"role": "system", "content": "Be brief, please: " + text()})
    call = 0
    for _ in range(drawn.randint(1, 4)):
        messages.append({"role": "user", "content": text()})
        for _ in range(drawn.choice((0, 0, 1, 3)) if {"calls", "silent-calls"} & {*has} else 0):
            calls = []
            for _ in range(drawn.choice((1, 1, 2, 3)) if "parallel" in has else 1):
                arguments = drawn.choice([{"city": "Köln"}, {"days": 2, "of": [1, None]}, {"q": 'a "b"'}])
                name = drawn.choice(("weather", "search"))
                function = {"name": name, "arguments": arguments}
                calls.append({"id": f"{name}:{call}", "type": "function", "function": function})
                call += 1
            # Many templates write no words next to a call.
            said = "" if "silent-calls" in has else drawn.choice(("", text().strip()))
            message = {"role": "assistant", "content": said, "tool_calls": calls}
            if "reasoning" in has and drawn.random() < 0.4:
                message["reasoning_content"] = text().strip()
            messages.append(message)
            for each in calls:
                result = {"role": "tool", "content": text().strip(), "name": each["function"]["name"]}
                messages.append({**result, "tool_call_id": each["id"]})
        messages.append(answer())
    if "question" in has and drawn.random() < 0.2:
        messages.append({"role": "user", "content": text()})
    return messages


def _calls(message: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    found = message.get("tool_calls", [])
    return [(each["function"]["name"], each["function"]["arguments"], each["id"]) for each in found]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(message: dict[str, Any]) -> str:
    return "".join(f"\n<tool_call>\n{_json({'name': n, 'arguments': a})}\n</tool_call>" for n, a, _ in _calls(message))


def _last_user(messages: Messages) -> int:
    return max(i for i, m in enumerate(messages) if m["role"] == "user")


def _each(part: Callable[[Messages, int, dict[str, Any]], str]) -> Callable[[Messages], str]:
    def write(messages: Messages) -> str:
        return "".join(part(messages, index, message) for index, message in enumerate(messages))

    return write


def _turns(
    other: str, answer: str, *, begin: str = "", strip: bool = False, roles: dict[str, str] | None = None
) -> Callable[[Messages], str]:
    """The writer of a structure in which every message is written in one way: {r} is its role and {c} its content."""

    def part(messages: Messages, index: int, message: dict[str, Any]) -> str:
        content = message["content"].strip() if strip else message["content"]
        role = (roles or {}).get(message["role"], message["role"])
        shape = answer if message["role"] == "assistant" else other
        return shape.replace("{r}", role).replace("{c}", content)

    return lambda messages: begin + _each(part)(messages)


STRUCTURES: dict[str, Structure] = {}

# One header and one end for every role.

STRUCTURES["llama 3"] = Structure(
    "{{ '<s>' }}{%- for m in messages -%}{{ '<|sh|>' ~ m.role ~ '<|eh|>\n\n' }}{%- if m.role == 'assistant' -%}"
    "⟦{{ (m.content | trim) ~ '<|eot|>' }}⟧{%- else -%}{{ (m.content | trim) ~ '<|eot|>' }}{%- endif -%}"
    "{%- endfor -%}{{ '<|sh|>assistant<|eh|>\n\n' if add_generation_prompt }}",
    _turns("<|sh|>{r}<|eh|>\n\n{c}<|eot|>", "<|sh|>{r}<|eh|>\n\n«{c}<|eot|>»", begin="<s>", strip=True),
    "<s> <|sh|> <|eh|> <|eot|>",
    "system question white",
)
STRUCTURES["llama 3.1, told the date"] = Structure(
    "{%- if not date_string is defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}"
    "{{ '<s><|sh|>system<|eh|>\n\nToday: ' ~ date_string ~ '\n\n' }}{%- if messages[0].role == 'system' -%}"
    "{{ messages[0].content | trim }}{%- set messages = messages[1:] -%}{%- endif -%}{{ '<|eot|>' }}"
    "{%- for m in messages -%}{%- if m.tool_calls -%}{%- if m.tool_calls | length != 1 -%}"
    "{{ raise_exception('one call at a time') }}{%- endif -%}{%- set f = m.tool_calls[0].function -%}"
    "{{ '<|sh|>assistant<|eh|>\n\n' }}⟦{{ '{\"name\": \"' ~ f.name ~ '\", \"parameters\": ' ~ (f.arguments | tojson) ~ "
    "'}<|eot|>' }}⟧{%- elif m.role == 'tool' -%}{{ '<|sh|>ipython<|eh|>\n\n' ~ (m.content | tojson) ~ '<|eot|>' }}"
    "{%- elif m.role == 'assistant' -%}{{ '<|sh|>assistant<|eh|>\n\n' }}⟦{{ (m.content | trim) ~ '<|eot|>' }}⟧"
    "{%- else -%}{{ '<|sh|>user<|eh|>\n\n' ~ (m.content | trim) ~ '<|eot|>' }}{%- endif -%}{%- endfor -%}"
    "{{ '<|sh|>assistant<|eh|>\n\n' if add_generation_prompt }}",
    lambda messages: _llama_31(messages),
    "<s> <|sh|> <|eh|> <|eot|>",
    "system question white silent-calls",
)


def _llama_31(messages: Messages) -> str:
    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    text = f"<s><|sh|>system<|eh|>\n\nToday: 26 Jul 2024\n\n{system}<|eot|>"
    for m in messages[1:] if messages[0]["role"] == "system" else messages:
        if m["role"] == "tool":
            text += f"<|sh|>ipython<|eh|>\n\n{_json(m['content'])}<|eot|>"
        elif "tool_calls" in m:
            name, arguments, _ = _calls(m)[0]
            text += f'<|sh|>assistant<|eh|>\n\n«{{"name": "{name}", "parameters": {_json(arguments)}}}<|eot|>»'
        else:
            said = f"{m['content'].strip()}<|eot|>"
            text += f"<|sh|>{m['role']}<|eh|>\n\n" + (f"«{said}»" if m["role"] == "assistant" else said)
    return text


STRUCTURES["llama 4"] = Structure(
    "{{ '<s>' }}{%- for m in messages -%}{{ '<|hs|>' ~ m.role ~ '<|he|>\n\n' }}{%- if m.role == 'assistant' -%}"
    "⟦{{ m.content ~ '<|eot|>' }}⟧{%- else -%}{{ m.content ~ '<|eot|>' }}{%- endif -%}{%- endfor -%}"
    "{{ '<|hs|>assistant<|he|>\n\n' if add_generation_prompt }}",
    _turns("<|hs|>{r}<|he|>\n\n{c}<|eot|>", "<|hs|>{r}<|he|>\n\n«{c}<|eot|>»", begin="<s>"),
    "<s> <|hs|> <|he|> <|eot|>",
    "system question white",
)
STRUCTURES["granite 4"] = Structure(
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}{%- if messages[loop.index0 - 1].role != 'tool' -%}"
    "{{ '<|sr|>user<|er|>' }}{%- endif -%}{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|end|>\n' }}{%- endif -%}"
    "{%- elif m.role == 'assistant' -%}{{ '<|sr|>assistant<|er|>' }}⟦{{ m.content }}" + HERMES + "{{ '<|end|>' }}⟧"
    "{{ '\n' }}{%- else -%}{{ '<|sr|>' ~ m.role ~ '<|er|>' ~ m.content ~ '<|end|>\n' }}{%- endif -%}{%- endfor -%}"
    "{{ '<|sr|>assistant<|er|>' if add_generation_prompt }}",
    lambda messages: _grouped(messages, "<|sr|>{r}<|er|>", "<|end|>"),
    "<|sr|> <|er|> <|end|>",
    "system calls parallel question white",
)
STRUCTURES["qwen 2.5"] = Structure(
    STRUCTURES["granite 4"]
    .template.replace("<|sr|>", "<|im_start|>")
    .replace("<|er|>", "\n")
    .replace("<|end|>", "<|im_end|>")
    .replace("'<|im_start|>user\n'", "'<|im_start|>user'"),
    lambda messages: _grouped(messages, "<|im_start|>{r}\n", "<|im_end|>", results="<|im_start|>user"),
    "<|im_start|> <|im_end|>",
    "system calls parallel question white",
)


def _grouped(messages: Messages, header: str, end: str, results: str | None = None) -> str:
    """Results of calls stand together in a turn of the user."""
    text = ""
    for index, message in enumerate(messages):
        before = messages[index - 1]["role"] if index else ""
        after = messages[index + 1]["role"] if index + 1 < len(messages) else ""
        if message["role"] == "tool":
            text += (results or header.replace("{r}", "user")) if before != "tool" else ""
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            text += f"{end}\n" if after != "tool" else ""
        elif message["role"] == "assistant":
            text += f"{header.replace('{r}', 'assistant')}«{message['content']}{_hermes(message)}{end}»\n"
        else:
            text += f"{header.replace('{r}', message['role'])}{message['content']}{end}\n"
    return text


STRUCTURES["phi 4"] = Structure(
    "{%- for m in messages -%}{{ '<|im_start|>' ~ m.role ~ '<|im_sep|>' }}{%- if m.role == 'assistant' -%}"
    "⟦{{ m.content ~ '<|im_end|>' }}⟧{%- else -%}{{ m.content ~ '<|im_end|>' }}{%- endif -%}{%- endfor -%}"
    "{{ '<|im_start|>assistant<|im_sep|>' if add_generation_prompt }}",
    _turns("<|im_start|>{r}<|im_sep|>{c}<|im_end|>", "<|im_start|>{r}<|im_sep|>«{c}<|im_end|>»"),
    "<|im_start|> <|im_sep|> <|im_end|>",
    "system question white",
)
STRUCTURES["phi 3, another end behind the last"] = Structure(
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>\n' }}{%- if m.role == 'assistant' -%}⟦{{ m.content ~ '<|end|>' }}⟧"
    "{%- else -%}{{ m.content ~ '<|end|>' }}{%- endif -%}{{ '\n' }}{%- endfor -%}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '<eos>' }}",
    lambda messages: _turns("<|{r}|>\n{c}<|end|>\n", "<|{r}|>\n«{c}<|end|>»\n")(messages) + "<eos>",
    "<|user|> <|assistant|> <|system|> <|end|> <eos>",
    "system white",
)
STRUCTURES["gemma"] = Structure(
    "{{ '<s>' }}{%- for m in messages -%}{{ '<turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}"
    "{%- if m.role == 'assistant' -%}⟦{{ (m.content | trim) ~ '<end>' }}⟧{%- else -%}"
    "{{ (m.content | trim) ~ '<end>' }}{%- endif -%}{{ '\n' }}{%- endfor -%}"
    "{{ '<turn>model\n' if add_generation_prompt }}",
    _turns("<turn>{r}\n{c}<end>\n", "<turn>{r}\n«{c}<end>»\n", begin="<s>", strip=True, roles={"assistant": "model"}),
    "<s> <turn> <end>",
    "question white",
)
STRUCTURES["zephyr"] = Structure(
    "{%- for m in messages -%}{{ '<|' ~ m.role ~ '|>\n' }}{%- if m.role == 'assistant' -%}⟦{{ m.content ~ '</s>' }}⟧"
    "{%- else -%}{{ m.content ~ '</s>' }}{%- endif -%}{{ '\n' }}{%- endfor -%}"
    "{{ '<|assistant|>\n' if add_generation_prompt }}",
    _turns("<|{r}|>\n{c}</s>\n", "<|{r}|>\n«{c}</s>»\n"),
    "<|user|> <|assistant|> <|system|> </s>",
    "system question white",
)
STRUCTURES["olmo 2, no line break behind the last"] = Structure(
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|assistant|>\n' }}⟦{{ m.content ~ '<eos>' }}⟧"
    "{{ '\n' if not loop.last }}{%- else -%}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '\n' }}{%- endif -%}{%- endfor -%}"
    "{{ '<|assistant|>\n' if add_generation_prompt }}",
    lambda messages: _turns("<|{r}|>\n{c}\n", "<|{r}|>\n«{c}<eos>»\n")(messages).removesuffix(
        "" if messages[-1]["role"] == "user" else "\n"
    ),
    "<|user|> <|assistant|> <|system|> <eos>",
    "system question white",
)
STRUCTURES["olmo 3, another end behind the last"] = Structure(
    "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\nYou have no functions.<|im_end|>\n' }}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' ~ m.content }}"
    "{%- if m.tool_calls -%}{{ '<calls>' }}{%- for c in m.tool_calls -%}{{ c.function.name ~ '(' }}"
    "{%- for key, value in c.function.arguments.items() -%}{{ key ~ '=' ~ (value | tojson) }}"
    "{{ ', ' if not loop.last }}{%- endfor -%}{{ ')' }}{{ '\n' if not loop.last }}{%- endfor -%}{{ '</calls>' }}"
    "{%- endif -%}{{ '<eos>' if loop.last else '<|im_end|>\n' }}{%- else -%}"
    "{{ '<|im_start|>' ~ ('environment' if m.role == 'tool' else m.role) ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
    "{%- endif -%}{{ '<|im_start|>assistant\n' if loop.last and add_generation_prompt }}{%- endfor -%}",
    lambda messages: (
        ("" if messages[0]["role"] == "system" else "<|im_start|>system\nYou have no functions.<|im_end|>\n")
        + _each(_olmo)(messages)
    ),
    "<|im_start|> <|im_end|> <eos>",
    "system calls parallel question white",
    tags=False,
)


def _olmo(messages: Messages, index: int, m: dict[str, Any]) -> str:
    if m["role"] != "assistant":
        return f"<|im_start|>{m['role'].replace('tool', 'environment')}\n{m['content']}<|im_end|>\n"
    calls = [
        f"{name}({', '.join(f'{key}={_json(value)}' for key, value in given.items())})" for name, given, _ in _calls(m)
    ]
    said = m["content"] + ("<calls>" + "\n".join(calls) + "</calls>" if calls else "")
    is_last = index + 1 == len(messages)
    return f"<|im_start|>assistant\n«{said}" + ("<eos>»" if is_last else "»<|im_end|>\n")


STRUCTURES["vicuna, headers in words"] = Structure(
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ 'ASSISTANT:' }}⟦{{ ' ' ~ m.content ~ '</s>' }}⟧"
    "{%- else -%}{{ m.role | upper ~ ': ' ~ m.content ~ '\n' }}{%- endif -%}{%- endfor -%}"
    "{{ 'ASSISTANT:' if add_generation_prompt }}",
    _turns("{r}: {c}\n", "{r}:« {c}</s>»", roles={"user": "USER", "assistant": "ASSISTANT", "system": "SYSTEM"}),
    "</s>",
    "system question white",
)
STRUCTURES["llama 2, mistral 7b"] = Structure(
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}⟦{{ ' ' ~ (m.content | trim) ~ ' </s>' }}⟧"
    "{%- else -%}{{ '<s>[INST] ' ~ (m.content | trim) ~ ' [/INST]' }}{%- endif -%}{%- endfor -%}",
    _turns("<s>[INST] {c} [/INST]", "« {c} </s>»", strip=True),
    "<s> </s>",
    "question white",
)
STRUCTURES["exaone"] = Structure(
    "{%- for m in messages -%}{{ '[|' ~ m.role ~ '|]' }}{%- if m.role == 'assistant' -%}"
    "⟦{{ m.content ~ '[|endofturn|]' }}⟧{{ '\n' }}{%- else -%}{{ m.content ~ '\n' }}{%- endif -%}{%- endfor -%}"
    "{{ '[|assistant|]' if add_generation_prompt }}",
    _turns("[|{r}|]{c}\n", "[|{r}|]«{c}[|endofturn|]»\n"),
    "[|user|] [|assistant|] [|system|] [|endofturn|]",
    "system question white",
)
STRUCTURES["minimax text"] = Structure(
    "{%- for m in messages -%}{{ '<bos>' ~ ('ai' if m.role == 'assistant' else m.role) ~ ' name=' ~ m.role ~ '\n' }}"
    "{%- if m.role == 'assistant' -%}⟦{{ m.content ~ '<eos>' }}⟧{%- else -%}{{ m.content ~ '<eos>' }}{%- endif -%}"
    "{{ '\n' }}{%- endfor -%}{{ '<bos>ai name=assistant\n' if add_generation_prompt }}",
    lambda messages: _turns("<bos>{r} name={r}\n{c}<eos>\n", "<bos>ai name=assistant\n«{c}<eos>»\n")(messages),
    "<bos> <eos>",
    "system question white",
)
STRUCTURES["hunyuan"] = Structure(
    "{%- for m in messages -%}{%- if m.role == 'system' -%}{{ '<bos>' ~ m.content ~ '<|x4|>' }}"
    "{%- elif m.role == 'user' -%}{{ '<bos>' if loop.first or messages[loop.index0 - 1].role != 'system' }}"
    "{{ m.content ~ '<|x0|>' }}{%- else -%}⟦{{ m.content ~ '<|eos|>' }}⟧{%- endif -%}{%- endfor -%}",
    _each(
        lambda messages, index, m: {
            "system": f"<bos>{m['content']}<|x4|>",
            "user": ("" if index and messages[index - 1]["role"] == "system" else "<bos>") + f"{m['content']}<|x0|>",
            "assistant": f"«{m['content']}<|eos|>»",
        }[m["role"]]
    ),
    "<bos> <|x4|> <|x0|> <|eos|>",
    "system question white",
)

# The next message's first token ends a turn: it is trained on, and added behind the last turn.


def _open_ended(shape: Callable[[Messages, int, dict[str, Any]], str], begin: str = "") -> Callable[[Messages], str]:
    """`shape` writes a message without its role's token. What an answer says ends with », after that token."""

    def write(messages: Messages) -> str:
        text = begin
        for index, message in enumerate(messages):
            before = messages[index - 1] if index else {"role": ""}
            token = {
                "user": "<|user|>",
                "system": "<|system|>",
                "assistant": "<|assistant|>",
                "tool": "<|observation|>",
            }[message["role"]]
            token = "" if before["role"] == message["role"] == "tool" else token
            text += token + ("»" if before["role"] == "assistant" else "") + shape(messages, index, message)
        last = messages[-1]
        if last["role"] == "assistant":
            text += ("<|observation|>" if "tool_calls" in last else "<|user|>") + "»"
        return text

    return write


STRUCTURES["glm 4"] = Structure(
    "{{ '[gMASK]<sop>' }}{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ '<|observation|>\n' ~ m.content }}"
    "{%- elif m.tool_calls -%}{%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call') }}{%- endif -%}"
    "{{ '<|assistant|>' ~ m.tool_calls[0].function.name ~ '\n' ~ (m.tool_calls[0].function.arguments | tojson) }}"
    "{%- else -%}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{%- endif -%}{%- endfor -%}"
    "{{ '<|assistant|>' if add_generation_prompt }}",
    _open_ended(
        lambda messages, index, m: (
            f"«{_calls(m)[0][0]}\n{_json(_calls(m)[0][1])}"
            if "tool_calls" in m
            else "\n" + m["content"]
            if m["role"] != "assistant"
            else f"«\n{m['content']}"
        ),
        "[gMASK]<sop>",
    ),
    "[gMASK] <sop> <|user|> <|assistant|> <|system|> <|observation|>",
    "system question silent-calls",
    tags=False,
)
STRUCTURES["glm 4.5"] = Structure(
    LAST_USER + "{{ '[gMASK]<sop>' }}{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "{{ '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}"
    "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}{%- elif m.role == 'assistant' -%}"
    "{{ '<|assistant|>' }}{%- if loop.index0 > ns.last and m.reasoning_content -%}"
    "{{ '\n<think>' ~ m.reasoning_content ~ '</think>' }}{%- else -%}{{ '\n<think></think>' }}{%- endif -%}"
    "{{ '\n' ~ (m.content | trim) if m.content | trim }}{%- for c in m.tool_calls or [] -%}"
    "{{ '\n<tool_call>' ~ c.function.name }}{%- for k, v in c.function.arguments.items() -%}"
    "{{ '\n<arg_key>' ~ k ~ '</arg_key>\n<arg_value>' ~ (v if v is string else v | tojson) ~ '</arg_value>' }}"
    "{%- endfor -%}{{ '\n</tool_call>' }}{%- endfor -%}"
    "{%- else -%}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{%- endif -%}{%- endfor -%}"
    "{{ '<|assistant|>' if add_generation_prompt }}",
    _open_ended(lambda messages, index, m: _glm_45(messages, index, m), "[gMASK]<sop>"),
    "[gMASK] <sop> <|user|> <|assistant|> <|system|> <|observation|>",
    "system question calls parallel reasoning white",
    tags=False,
)


def _glm_45(messages: Messages, index: int, message: dict[str, Any]) -> str:
    if message["role"] == "tool":
        return f"\n<tool_response>\n{message['content']}\n</tool_response>"
    if message["role"] != "assistant":
        return "\n" + message["content"]
    body = "\n" + message["content"].strip() if message["content"].strip() else ""
    for name, arguments, _ in _calls(message):
        body += f"\n<tool_call>{name}"
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else _json(value)
            body += f"\n<arg_key>{key}</arg_key>\n<arg_value>{shown}</arg_value>"
        body += "\n</tool_call>"
    if index > _last_user(messages) and "reasoning_content" in message:
        return f"«\n<think>{message['reasoning_content']}</think>{body}"
    return f"\n<think></think>\n«{body[1:]}"


STRUCTURES["baichuan"] = Structure(
    "{%- for m in messages -%}{%- if m.role == 'system' -%}{{ m.content }}{%- else -%}"
    "{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}{%- endif -%}{%- endfor -%}"
    "{{ '<|assistant|>' if add_generation_prompt }}",
    lambda messages: _open_ended(lambda _, i, m: ("«" if m["role"] == "assistant" else "") + m["content"])(
        messages
    ).replace("<|system|>", ""),
    "<|user|> <|assistant|>",
    "system question white",
    tags=False,
)

_baichuan = _open_ended(lambda _, i, m: ("«" if m["role"] == "assistant" else "") + m["content"])

# Reasoning.


def _thinking(
    *,
    header: str,
    end: str,
    opened: str,
    thought: str,
    empty: str,
    call: Callable[[dict[str, Any]], str] = _hermes,
    always: bool = False,
    shut: bool = False,
) -> Callable[[Messages], str]:
    """Reasoning of turns after the last question only (`always`: of all). `opened`: what the prompt has of it.

    `shut`: the prompt has an empty thought. White space behind another one belongs to that.
    """

    def part(messages: Messages, index: int, m: dict[str, Any]) -> str:
        content = m["content"]
        begin = header.replace("{r}", m["role"])
        if m["role"] == "tool":
            before = messages[index - 1]["role"] if index else ""
            last = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            text = header.replace("{r}", "user").rstrip("\n") if before != "tool" else ""
            return text + f"\n<tool_response>\n{m['content']}\n</tool_response>" + (f"{end}\n" if last else "")
        if m["role"] != "assistant":
            return f"{begin}{m['content']}{end}\n"
        body = f"{content}{call(m)}{end}»\n"
        if not always and index < _last_user(messages):
            return f"{begin}«{body}"
        if "reasoning_content" in m:
            whole = thought.replace("{t}", m["reasoning_content"])
            assert whole.startswith(opened)
            return f"{begin}{opened}«{whole.removeprefix(opened)}{body}"
        white = body[: len(body) - len(body.lstrip())] if empty and not shut else ""
        return f"{begin}{empty}{white}«{body.removeprefix(white)}"

    return _each(part)


def _qwen3(opened: str, empty: str, calls: str, *, prompt: str) -> str:
    return (
        LAST_USER + "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
        "{{ '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}"
        "{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}"
        "{{ '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}"
        "{%- elif m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}"
        + opened
        + "{%- if loop.index0 > ns.last and m.reasoning_content -%}"
        "{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}"
        + empty
        + "{%- endif -%}{{ m.content }}"
        + calls
        + "{{ '<|im_end|>\n' }}{%- else -%}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}"
        "{%- endif -%}{%- endfor -%}{{ '" + prompt + "' if add_generation_prompt }}"
    )


EMPTY_LAST = "{%- elif loop.index0 > ns.last -%}{{ '<think>\n\n</think>\n\n' }}"
EMPTY = "<think>\n\n</think>\n\n"
STRUCTURES["qwen 3"] = Structure(
    _qwen3(
        "",
        "{%- elif loop.index0 > ns.last -%}{{ '<think>\n\n</think>\n\n' }}",
        HERMES,
        prompt="<|im_start|>assistant\n",
    ),
    _thinking(
        header="<|im_start|>{r}\n", end="<|im_end|>", opened="", thought="<think>\n{t}\n</think>\n\n", empty=EMPTY
    ),
    "<|im_start|> <|im_end|>",
    "system calls parallel reasoning question",
    tags=False,
)
PARAMETERS = (
    "{%- for c in m.tool_calls or [] -%}{{ '\n<tool_call>\n<function=' ~ c.function.name ~ '>\n' }}"
    "{%- for k, v in c.function.arguments.items() -%}"
    "{{ '<parameter=' ~ k ~ '>\n' ~ (v if v is string else v | tojson) ~ '\n</parameter>\n' }}{%- endfor -%}"
    "{{ '</function>\n</tool_call>' }}{%- endfor -%}"
)


def _parameters(message: dict[str, Any]) -> str:
    text = ""
    for name, arguments, _ in _calls(message):
        text += f"\n<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            text += f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text


STRUCTURES["qwen 3.5, prompt opens the thought"] = Structure(
    _qwen3(
        "",
        "{%- elif loop.index0 > ns.last -%}{{ '<think>\n\n</think>\n\n' }}",
        PARAMETERS,
        prompt="<|im_start|>assistant\n<think>\n' ~ ('\n</think>\n\n' if enable_thinking is false) ~ '",
    ),  # fmt: skip
    _thinking(
        header="<|im_start|>{r}\n",
        end="<|im_end|>",
        opened="<think>\n",
        thought="<think>\n{t}\n</think>\n\n",
        empty=EMPTY,
        call=_parameters,
    ),  # fmt: skip
    "<|im_start|> <|im_end|>",
    "system calls parallel reasoning question",
    tags=False,
)
STRUCTURES["qwen 3.5, not to think"] = Structure(
    STRUCTURES["qwen 3.5, prompt opens the thought"].template,
    _thinking(
        header="<|im_start|>{r}\n", end="<|im_end|>", opened="", thought="", empty=EMPTY, call=_parameters, shut=True
    ),
    "<|im_start|> <|im_end|>",
    "system calls parallel question",
    {"enable_thinking": False},
    tags=False,
)
STRUCTURES["nemotron"] = Structure(
    _qwen3(
        "{%- if not m.reasoning_content -%}{{ '<think></think>' }}{%- endif -%}",
        "",
        HERMES,
        prompt="<|im_start|>assistant\n<think>\n",
    ).replace("loop.index0 > ns.last and m.reasoning_content", "m.reasoning_content"),  # fmt: skip
    _thinking(
        header="<|im_start|>{r}\n",
        end="<|im_end|>",
        opened="<think>\n",
        thought="<think>\n{t}\n</think>\n\n",
        empty="<think></think>",
        always=True,
    ),  # fmt: skip
    "<|im_start|> <|im_end|>",
    "system calls parallel reasoning question",
    tags=False,
)
STRUCTURES["minimax m2"] = Structure(
    LAST_USER + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ ']~b]ai\n' }}"
    "{%- if m.reasoning_content and loop.index0 > ns.last -%}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}"
    "{%- endif -%}{{ m.content ~ '[e~[' }}{%- else -%}{{ ']~b]' ~ m.role ~ '\n' ~ m.content ~ '[e~[' }}{%- endif -%}"
    "{{ '\n' }}{%- endfor -%}{{ ']~b]ai\n<think>\n' if add_generation_prompt }}",
    lambda messages: _thinking(
        header="]~b]{r}\n", end="[e~[", opened="<think>\n", thought="<think>\n{t}\n</think>\n\n", empty=""
    )(messages).replace("]~b]assistant\n", "]~b]ai\n"),
    "]~b] [e~[",
    "system reasoning question",
    tags=False,
)
STRUCTURES["seed oss"] = Structure(
    "{%- for m in messages -%}{{ '<seed:bos>' ~ m.role ~ '\n' }}{%- if m.role == 'assistant' -%}"
    "⟦{%- if m.reasoning_content -%}{{ '<seed:think>' ~ m.reasoning_content ~ '</seed:think>' }}{%- endif -%}"
    "{{ m.content ~ '<seed:eos>' }}⟧{%- else -%}{{ m.content ~ '<seed:eos>' }}{%- endif -%}{%- endfor -%}"
    "{{ '<seed:bos>assistant\n' if add_generation_prompt }}",
    _each(
        lambda messages, index, m: (
            f"<seed:bos>{m['role']}\n"
            + ("«" if m["role"] == "assistant" else "")
            + (f"<seed:think>{m['reasoning_content']}</seed:think>" if "reasoning_content" in m else "")
            + f"{m['content']}<seed:eos>"
            + ("»" if m["role"] == "assistant" else "")
        )
    ),
    "<seed:bos> <seed:eos>",
    "system reasoning question white",
)
STRUCTURES["command a"] = Structure(
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|turn|><|bot|>' }}"
    "⟦{%- if m.reasoning_content -%}{{ '<|START_THINKING|>' ~ m.reasoning_content ~ '<|END_THINKING|>' }}{%- endif -%}"
    "{%- if m.tool_calls -%}{{ '<|action|>[' }}{%- for c in m.tool_calls -%}"
    '{{ \'{"tool_call_id": "\' ~ loop.index0 ~ \'", "tool_name": "\' ~ c.function.name ~ \'", "parameters": \' ~ '
    "(c.function.arguments | tojson) ~ '}' ~ (', ' if not loop.last) }}{%- endfor -%}{{ ']<|/action|>' }}"
    "{%- else -%}{{ '<|response|>' ~ m.content ~ '<|/response|>' }}{%- endif -%}{{ '<|/turn|>' }}⟧"
    "{%- elif m.role == 'tool' -%}{{ '<|turn|><|system|>' ~ (m.content | tojson) ~ '<|/turn|>' }}"
    "{%- else -%}{{ '<|turn|><|' ~ m.role ~ '|>' ~ m.content ~ '<|/turn|>' }}{%- endif -%}{%- endfor -%}"
    "{{ '<|turn|><|bot|>' if add_generation_prompt }}",
    _each(lambda messages, index, m: _command_a(m)),
    "<|turn|> <|bot|> <|user|> <|system|> <|START_THINKING|> <|END_THINKING|> <|action|> <|/action|> <|response|> "
    "<|/response|> <|/turn|>",
    "system silent-calls parallel reasoning question white",
)


def _command_a(m: dict[str, Any]) -> str:
    if m["role"] == "tool":
        return f"<|turn|><|system|>{_json(m['content'])}<|/turn|>"
    if m["role"] != "assistant":
        return f"<|turn|><|{m['role']}|>{m['content']}<|/turn|>"
    text = f"<|START_THINKING|>{m['reasoning_content']}<|END_THINKING|>" if "reasoning_content" in m else ""
    if "tool_calls" in m:
        calls = [
            f'{{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {_json(arguments)}}}'
            for number, (name, arguments, _) in enumerate(_calls(m))
        ]
        text += f"<|action|>[{', '.join(calls)}]<|/action|>"
    else:
        text += f"<|response|>{m['content']}<|/response|>"
    return f"<|turn|><|bot|>«{text}<|/turn|>»"


STRUCTURES["kimi k2"] = Structure(
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|im_assistant|>assistant<|im_middle|>' }}"
    "⟦{{ m.content }}{%- if m.tool_calls -%}{{ '<|calls|>' }}{%- for c in m.tool_calls -%}"
    "{{ '<|call|>' ~ c.id ~ '<|arguments|>' ~ (c.function.arguments | tojson) ~ '<|/call|>' }}{%- endfor -%}"
    "{{ '<|/calls|>' }}{%- endif -%}{{ '<|im_end|>' }}⟧{%- elif m.role == 'tool' -%}"
    "{{ '<|im_system|>tool<|im_middle|>## Return of ' ~ m.tool_call_id ~ '\n' ~ m.content ~ '<|im_end|>' }}"
    "{%- else -%}{{ '<|im_' ~ m.role ~ '|>' ~ m.role ~ '<|im_middle|>' ~ m.content ~ '<|im_end|>' }}{%- endif -%}"
    "{%- endfor -%}{{ '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt }}",
    _each(lambda messages, index, m: _kimi(m, "")),
    "<|im_assistant|> <|im_user|> <|im_system|> <|im_middle|> <|im_end|> <|calls|> <|call|> <|arguments|> <|/call|> "
    "<|/calls|>",
    "system calls parallel question white",
    tags=False,
)
STRUCTURES["kimi k2, thinking"] = Structure(
    STRUCTURES["kimi k2"].template.replace(
        "⟦{{ m.content }}", "⟦{{ '<think>' ~ (m.reasoning_content or '') ~ '</think>' ~ m.content }}"
    ),
    _each(lambda messages, index, m: _kimi(m, "<think></think>")),
    STRUCTURES["kimi k2"].tokens,
    "system calls parallel reasoning question",
    tags=False,
)


def _kimi(m: dict[str, Any], empty: str) -> str:
    if m["role"] == "tool":
        return f"<|im_system|>tool<|im_middle|>## Return of {m['tool_call_id']}\n{m['content']}<|im_end|>"
    if m["role"] != "assistant":
        return f"<|im_{m['role']}|>{m['role']}<|im_middle|>{m['content']}<|im_end|>"
    calls = "".join(f"<|call|>{name}<|arguments|>{_json(arguments)}<|/call|>" for _, arguments, name in _calls(m))
    body = f"{m['content']}{'<|calls|>' + calls + '<|/calls|>' if calls else ''}<|im_end|>»"
    if "reasoning_content" in m and empty:
        return f"<|im_assistant|>assistant<|im_middle|>«<think>{m['reasoning_content']}</think>{body}"
    return f"<|im_assistant|>assistant<|im_middle|>{empty}«{body}"


STRUCTURES["deepseek 3.1"] = Structure(
    "{{ '<s>' }}{%- set ns = namespace(user=false) -%}{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{{ m.content }}"
    "{%- elif m.role == 'user' -%}{%- set ns.user = true -%}{{ '<|User|>' ~ m.content }}{%- elif m.role == 'tool' -%}"
    "{{ '<|result|>' ~ m.content ~ '<|/result|>' }}{%- else -%}{{ '<|Assistant|></think>' if ns.user }}"
    "{%- set ns.user = false -%}{{ m.content }}{%- if m.tool_calls -%}{{ '<|calls|>' }}{%- for c in m.tool_calls -%}"
    "{{ '<|call|>' + c.function.name + '<|sep|>' + c.function.arguments + '<|/call|>' }}{%- endfor -%}"
    "{{ '<|/calls|>' }}{%- endif -%}{{ '<eos>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and ns.user -%}{{ '<|Assistant|>' ~ ('<think>' if thinking else '</think>') }}"
    "{%- endif -%}",
    lambda messages: "<s>" + _each(_deepseek)(messages),
    "<s> <|User|> <|Assistant|> <|result|> <|/result|> <|calls|> <|call|> <|sep|> <|/call|> <|/calls|> <eos>",
    "system calls parallel question",
    tags=False,
)
STRUCTURES["deepseek 3.1, to think"] = Structure(
    STRUCTURES["deepseek 3.1"].template,
    STRUCTURES["deepseek 3.1"].write,
    STRUCTURES["deepseek 3.1"].tokens,
    "system question",
    {"thinking": True},
    tags=False,
)


def _deepseek(messages: Messages, index: int, m: dict[str, Any]) -> str:
    if m["role"] in ("system", "user", "tool"):
        return {"system": "{c}", "user": "<|User|>{c}", "tool": "<|result|>{c}<|/result|>"}[m["role"]].replace(
            "{c}", m["content"]
        )
    calls = "".join(f"<|call|>{name}<|sep|>{_json(arguments)}<|/call|>" for name, arguments, _ in _calls(m))
    header = "<|Assistant|></think>" if messages[index - 1]["role"] == "user" else ""
    return f"{header}«{m['content']}{'<|calls|>' + calls + '<|/calls|>' if calls else ''}<eos>»"


STRUCTURES["mistral 3"] = Structure(
    "{{ '<s>' }}{%- for m in messages -%}{%- if m.role == 'system' -%}{{ '[SYS]' ~ m.content ~ '[/SYS]' }}"
    "{%- elif m.role == 'user' -%}{{ '[INST]' ~ m.content ~ '[/INST]' }}{%- elif m.role == 'tool' -%}"
    "{{ '[RESULT]' ~ m.content ~ '[/RESULT]' }}{%- else -%}"
    "⟦{%- if m.reasoning_content -%}{{ '[THINK]' ~ m.reasoning_content ~ '[/THINK]' }}{%- endif -%}{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}{{ '[CALL]' ~ c.function.name ~ '[ARGS]' ~ (c.function.arguments | tojson) }}"
    "{%- endfor -%}{{ '</s>' }}⟧{%- endif -%}{%- endfor -%}",
    lambda messages: "<s>" + _each(lambda _, i, m: _mistral(m))(messages),
    "<s> </s> [SYS] [/SYS] [INST] [/INST] [RESULT] [/RESULT] [THINK] [/THINK] [CALL] [ARGS]",
    "system calls parallel reasoning question white",
)


def _mistral(m: dict[str, Any]) -> str:
    if m["role"] != "assistant":
        name = {"system": "SYS", "user": "INST", "tool": "RESULT"}[m["role"]]
        return f"[{name}]{m['content']}[/{name}]"
    thought = f"[THINK]{m['reasoning_content']}[/THINK]" if "reasoning_content" in m else ""
    calls = "".join(f"[CALL]{name}[ARGS]{_json(arguments)}" for name, arguments, _ in _calls(m))
    return f"«{thought}{m['content']}{calls}</s>»"


STRUCTURES["gpt-oss"] = Structure(
    "{{ '<|start|>system<|message|>Current date: ' ~ strftime_now('%Y-%m-%d') ~ '<|end|>' }}"
    "{%- set ns = namespace(call=none) -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if m.tool_calls -%}{%- if m.thinking -%}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{%- endif -%}"
    "{%- set ns.call = m.tool_calls[0].function -%}{{ '<|start|>assistant to=functions.' ~ ns.call.name ~ "
    "'<|channel|>commentary json<|message|>' ~ (ns.call.arguments | tojson) ~ '<|call|>' }}"
    "{%- elif loop.last and not add_generation_prompt -%}{%- if m.thinking -%}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}{%- endif -%}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|return|>' }}{%- else -%}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}{%- endif -%}"
    "{%- elif m.role == 'tool' -%}{{ '<|start|>functions.' ~ ns.call.name ~ "
    "' to=assistant<|channel|>commentary<|message|>' ~ (m.content | tojson) ~ '<|end|>' }}{%- else -%}"
    "{{ '<|start|>' ~ ('developer' if m.role == 'system' else 'user') ~ '<|message|>' ~ m.content ~ '<|end|>' }}"
    "{%- endif -%}{%- endfor -%}{{ '<|start|>assistant' if add_generation_prompt }}",
    lambda messages: "<|start|>system<|message|>Current date: 2024-07-26<|end|>" + _each(_harmony)(messages),
    "<|start|> <|message|> <|channel|> <|end|> <|return|> <|call|>",
    "system silent-calls reasoning question white",
    tags=False,
)


def _harmony(messages: Messages, index: int, m: dict[str, Any]) -> str:
    if m["role"] == "tool":
        name = next(_calls(each)[0][0] for each in reversed(messages[:index]) if "tool_calls" in each)
        return f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{_json(m['content'])}<|end|>"
    if m["role"] != "assistant":
        role = "developer" if m["role"] == "system" else "user"
        return f"<|start|>{role}<|message|>{m['content']}<|end|>"
    thought = f"<|channel|>analysis<|message|>{m.get('reasoning_content')}<|end|><|start|>assistant"
    thought = thought if "reasoning_content" in m else ""
    if "tool_calls" in m:
        name, arguments, _ = _calls(m)[0]
        call = f" to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments)}<|call|>"
        return f"<|start|>assistant«{thought}{call}»"
    if index + 1 < len(messages):
        return f"<|start|>assistant«<|channel|>final<|message|>{m['content']}»<|end|>"
    return f"<|start|>assistant«{thought}<|channel|>final<|message|>{m['content']}<|return|>»"
