"""Try tokenizers, each in a child process of its own with limits. `tokenizer_trial.py` starts this process and asks it.

It is a program, not a module: it reads requests from its input, a line of JSON each, and writes an answer for each. It
imports transformers without torch, which takes half the time and a third of the memory, and forks for every request: a
child that fills its memory or never ends harms only itself, and the next one begins with everything imported.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

IDLE_SECONDS = 60
"""How long it waits for a request before it ends."""
_WAITS = 4
"""How many times its limit of processor time a child may take by the clock: one that waits for something uses none."""
_ANSWER_BYTES = 1 << 16
# Long runs of one kind of character make backtracking patterns try again and again.
_TEXTS = (
    "Is it?",
    "",
    *(run + "x" for run in ("a" * 200, " " * 200, "1" * 200, "!" * 100, "\n" * 50, "é漢😀" * 30, "aB1 " * 50)),
)
_MOST_TOKENS_PER_BYTE, _MOST_TOKENS = 64, 1000
"""Most tokens of a text: a character has up to four bytes, and a few characters are written as ten others."""


def serve() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)  # what libraries print is not an answer
    os.dup2(nowhere, 2)  # a panic in Rust prints forty lines
    sys.modules["torch"] = None  # type: ignore[assignment]
    ready = False
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        request = json.loads(line)
        if not ready:
            sys.path[:] = request["path"]
            from transformers import AutoTokenizer  # noqa: F401

            from raytune_fsdp.data.rows.template_program import compiled  # noqa: F401  # here, so that children have them

            ready = True
        answers.write(json.dumps(_in_child(request)) + "\n")
        answers.flush()


def _in_child(request: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:  # no exception may leave this block: the child would go on as if it were the parent
            os.close(reader)
            _limit(request["seconds"], request["bytes"])
            found = _try(request["directory"], request["seconds"], request["bytes"])
            os.write(writer, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writer)
    read, deadline = b"", time.monotonic() + _WAITS * request["seconds"]
    try:
        while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reader, _ANSWER_BYTES)
            if not piece:
                break
            read += piece
        else:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(reader)
        os.waitpid(child, 0)
    # A child that says nothing has met a limit, or the end of its memory.
    answer: dict[str, Any] = json.loads(read) if read else {"stage": "limits"}
    return answer


def _limit(seconds: int, memory: int) -> None:
    """Limit what this process may use from now on."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, seconds)
    with open("/proc/self/status") as status:
        now = next((int(line.split()[1]) << 10 for line in status if line.startswith("VmData")), 0)
    _lower(resource.RLIMIT_DATA, now + memory)


def _lower(what: int, most: int) -> None:
    """Set a limit, unless a batch system has set a lower one already."""
    hard = resource.getrlimit(what)[1]
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(what, (most, most))


def _try(directory: str, seconds: int, memory: int) -> dict[str, Any]:
    """Load the tokenizer as a run does, and use it."""
    from transformers import AutoTokenizer

    from raytune_fsdp.data.rows.template_program import compiled

    stage = "load"
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        stage = "use"
        for text in _TEXTS:
            ids = tokenizer(text)["input_ids"]
            if len(ids) > _MOST_TOKENS + _MOST_TOKENS_PER_BYTE * len(text.encode()):
                return {"stage": "use", "error": f"it makes {len(ids)} tokens of a text of {len(text)} characters"}
            tokenizer.decode(ids)
        if tokenizer.is_fast:
            json.loads(tokenizer.backend_tokenizer.to_str())
        tokenizer.get_vocab()
        stage = "template"
        templates = tokenizer.chat_template
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            if isinstance(template, str):
                compiled(template)
    except BaseException as error:  # libraries raise anything; one is written in Rust
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Code that meets a limit may report anything, for example that no thread can be started.
        if isinstance(error, MemoryError) or used.ru_maxrss << 10 > memory // 2 or used.ru_utime > seconds / 2:
            return {"stage": "limits"}
        return {"stage": stage, "error": (str(error).strip() or type(error).__name__).splitlines()[0][:500]}
    return {"stage": "done"}


if __name__ == "__main__":
    serve()
