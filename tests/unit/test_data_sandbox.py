"""Chat templates are a stranger's programs: they run in a process with limits, which end a run and never a row."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config import ChatFormat
from raytune_fsdp.data.rows import sandbox
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.rows.sandbox import SANDBOX
from raytune_fsdp.data.rows.templates import ChatTemplate, Refused, TooMuchWork
from raytune_fsdp.run.evaluation.answers import encode_prompt
from tests.unit.made_tokenizers import demo

MESSAGES = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]

TWICE = "{% set ns = namespace(x=[1], y=[1], t=(1,)) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}" + (
    "{% set ns.y = [ns.y, ns.y] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)
"""Lists that hold themselves twice, sixty times over: 60 objects, and 2**60 values to whoever goes through them."""

LONG = "{% set s = 'x' * 1000000 %}"

ATTACKS = {
    "times": "{{ 'x' * 10**9 }}",
    "times, a constant": "{% set a = 'x' * 1000000000 %}",
    "list times": "{{ ([0] * 1000000000)|length }}",
    "power": "{{ 2 ** 1000000000 }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled by +": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled by ~": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "printed": TWICE + "{{ ns.x }}",
    "tojson": TWICE + "{{ ns.x|tojson }}",
    "equal": TWICE + "{{ ns.x == ns.y }}",
    "in": TWICE + "{{ ns.x in [ns.y] }}",
    "key of a dict": TWICE + "{{ {ns.t: 1} }}",
    "looked up": TWICE + "{{ {}[ns.t] }}",
    "get": TWICE + "{{ {}.get(ns.t) }}",
    "% of a list": TWICE + "{{ '%s' % ns.x }}",
    "format of a list": TWICE + "{{ '{}'.format(ns.x) }}",
    "raised": TWICE + "{{ raise_exception(ns.x) }}",
    "test": TWICE + "{{ ns.x is eq(ns.y) }}",
    "sort": TWICE + "{{ [ns.x, ns.y]|sort }}",
    "safe": TWICE + "{{ ns.x|safe }}",
    "deep": "{% set ns = namespace(x=1) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "center": "{{ 'x'|center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(tabsize=1000000000) }}",
    "indent": "{{ 'x\ny'|indent(1000000000) }}",
    "% width": "{{ '%1000000000d' % 1 }}",
    "% star": "{{ '%*d' % (1000000000, 1) }}",
    "% precision": "{{ '%.1000000000f' % 1.5 }}",
    "filter format": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format_map": "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "one argument often": LONG + "{{ ('{0}' * 1000).format(s) }}",
    "one entry often": LONG + "{{ ('%(a)s' * 1000) % {'a': s} }}",
    "replace": LONG + "{{ s.replace('x', s) }}",
    "filter replace": LONG + "{{ s|replace('', s) }}",
    "join": LONG + "{{ s.join(s) }}",
    "join of a generator": LONG + "{{ ''.join(range(100000)|map('replace', '', s)) }}",
    "filter join": LONG + "{{ ([s] * 1000)|join }}",
    "translate": LONG + "{{ s.translate({120: s}) }}",
    "split": "{{ ('x ' * 40000000).split()|length }}",
    "splitlines": "{{ ('\n' * 90000000).splitlines()|length }}",
    "list": "{{ ('x' * 90000000)|list|length }}",
    "split often": LONG + "{% for i in range(100000) %}{% set y = s.split() %}{% endfor %}",
    "sliced often": LONG + "{% for i in range(100000) %}{% set y = s[1:] %}{% endfor %}",
    "searched often": LONG + "{% for i in range(100000) %}{% set y = 'y' in s %}{% endfor %}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big')|length }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "tojson indent": "{{ [[1]]|tojson(indent=1000000000) }}",
    "tojson separators": LONG + "{{ ([1] * 1000)|tojson(separators=[s, s]) }}",
    "macro in itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block in itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "much output": LONG + "{% for i in range(100000) %}{{ s }}{% endfor %}",
    "much in a block": LONG + "{% set t %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endset %}",
    "striptags": "{{ ('<!---->' * 100000000)|striptags }}",
    "wordwrap": LONG + "{{ s|wordwrap(1, wrapstring=s) }}",
    "escaped": "{{ ('&' * 30000000)|e }}",
    "markup": "{{ ('x'|safe) * 1000000000 }}",
    "loops, 1": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops, 2": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "loops, 3": "{% for i in range(100000) %}{{ range(100000)|select('eq', -1)|list }}{% endfor %}",
    "loops, 4": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "loops, 5": "{% for x in [1, 2] recursive %}{% if loop.depth < 50 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "loops, 6": "{% for i in range(100000) %}{% for j in range(1000) %}{{ j }}{% endfor %}{% endfor %}",
}


OFTEN = (
    "times", "power", "doubled by +", "printed", "tojson", "equal", "deep", "center", "% width", "join", "split often",
    "macro in itself", "recursive loop", "much output", "loops, 1", "loops, 4",
)  # fmt: skip
"""Tried at every change, each of another kind: the limits, which are the kernel's, know no operation by its name."""


@pytest.fixture
def limits() -> Iterator[Callable[[float, int], None]]:
    """Change the limits of the process, whose next request starts another one."""
    before = sandbox.SECONDS, sandbox.MEMORY

    def change(seconds: float, memory: int) -> None:
        SANDBOX.end()
        sandbox.SECONDS, sandbox.MEMORY = seconds, memory

    yield change
    change(*before)


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(each, marks=pytest.mark.slow) for each in ATTACKS if each not in OFTEN)]
)
def test_template_that_would_hang_or_take_all_memory_is_an_error(
    name: str, limits: Callable[[float, int], None]
) -> None:
    limits(0.1, 64 << 20)
    with pytest.raises(TooMuchWork, match="chat template does too much work: it .*data.chat_template"):
        ChatTemplate(ATTACKS[name], {}).render(MESSAGES, None)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{% for i in range(9) %}" * 30 + "{% endfor %}" * 30, "cannot be compiled: SyntaxError"),
        ("x" * 200_001, "has 200001 characters, at most 200000 are read"),
    ],
)
def test_template_that_python_cannot_compile(source: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        ChatTemplate(source, {})


def test_row_that_needs_too_much_work_is_named_and_never_left_out() -> None:
    """Which rows exist may depend on the data only: a limit that left rows out would decide it."""
    busy = "{% for m in messages %}{% if m.content == 'busy' %}{{ 'x' * 10**9 }}{% endif %}{% endfor %}"
    formatter = Formatter(ChatFormat(), tokenizer=demo(), vocab_size=5000, template=busy + str(demo().chat_template))
    (document,) = formatter.documents([{"messages": MESSAGES}], ["f.jsonl:1"])
    assert isinstance(document, Document)
    row = {"messages": [{"role": "user", "content": "busy"}, MESSAGES[1]]}
    with pytest.raises(TooMuchWork, match=r"^f\.jsonl:7: the chat template does too much work") as caught:
        formatter.documents([row], ["f.jsonl:7"])
    assert not isinstance(caught.value, RowError) and caught.value.exit_code == 2
    with pytest.raises(TooMuchWork, match=r"^f\.jsonl:7: the chat template does too much work"):  # in a batch
        formatter.documents([{"messages": MESSAGES}, row], ["f.jsonl:6", "f.jsonl:7"])


def test_prompts_are_rendered_under_the_same_limit() -> None:
    tokenizer = type("Busy", (), {"chat_template": "x", "special_tokens_map": {}, "init_kwargs": {}})()
    tokenizer.get_chat_template = lambda tools=None: "{{ 'x' * 10**9 }}"
    with pytest.raises(TooMuchWork):
        encode_prompt(tokenizer, "Is it?", positions=100)


def test_long_rows_may_take_more(limits: Callable[[float, int], None]) -> None:
    """A template that gathers the conversation in a variable copies all of it once a message."""
    # The conversation has 10 MB. Compiling alone may take an arena of Python's, which has 1 MiB.
    limits(10.0, 8 << 20)
    gather = "{% set ns = namespace(t='', l=[]) %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}" + (
        "{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": f"{n % 10}" * 100_000} for n in range(100)]
    text, _ = ChatTemplate(gather, {}).render(messages, None)
    assert text == "".join(message["content"] for message in messages)


def test_template_sees_nothing_of_what_was_rendered_before() -> None:
    template = ChatTemplate(
        "{% if dict.update %}{{ dict.update(messages[0], {'x': 1}) }}{% endif %}{{ messages[0] }}", {}
    )
    first = template.render(MESSAGES, None)
    assert template.render(MESSAGES, None) == first and "x" not in MESSAGES[0]


def process() -> psutil.Process:
    found = SANDBOX._process
    assert found is not None
    return psutil.Process(found.pid)


def test_process_that_was_killed_is_started_again() -> None:
    template = ChatTemplate("{{ messages[1].content }}", {})
    was = process()
    os.kill(was.pid, signal.SIGTERM)  # batch systems send it to all processes of a run, long before its end
    assert template.render(MESSAGES, None) == ("Yes.", [])
    assert process() == was
    was.kill()
    was.wait(10)
    assert template.render(MESSAGES, None) == ("Yes.", [])
    assert process() != was


def test_limits_hold_below_a_process_that_blocks_or_ignores_the_signal(limits: Callable[[float, int], None]) -> None:
    limits(0.5, 64 << 20)
    template = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", {})
    process().kill()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        with pytest.raises(TooMuchWork, match="processor time"):
            template.render(MESSAGES, None)
    finally:
        signal.signal(signal.SIGPROF, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def test_how_many_digits_a_number_may_have_does_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ 10 ** (messages|length * 4096) }}", {})
    texts = set()
    for digits in ("0", "640", "4300"):
        monkeypatch.setenv("PYTHONINTMAXSTRDIGITS", digits)
        texts.add(template.render(MESSAGES, None)[0])
        process().kill()
    assert texts == {"1" + "0" * 8192}


def test_an_error_that_no_template_raises_ends_the_run_by_name() -> None:
    """And is not tried again: the same template would do the same."""
    with pytest.raises(DataError, match="the chat template fails: RuntimeError: at least one item") as caught:
        ChatTemplate("{{ cycler() }}", {}).render(MESSAGES, None)
    assert not isinstance(caught.value, RowError) and caught.value.exit_code == 2


def test_half_a_surrogate_pair_stays_one() -> None:
    text, spans = ChatTemplate("{{ '\\ud83d' }}{{ '\\ude00' }}{% generation %}ab{% endgeneration %}", {}).render(
        MESSAGES, None
    )
    assert (len(text), spans) == (4, [(2, 4)])


def test_the_order_of_a_set_is_the_same_in_every_process() -> None:
    """A template can make one. Python's hashes of texts differ from process to process."""
    source = "{% set d = dict(" + ", ".join(f"key{n}={n}" for n in range(40)) + ") %}{{ (d.keys() - ['x'])|join(' ') }}"
    texts = set()
    for _ in range(3):
        texts.add(ChatTemplate(source, {}).render(MESSAGES, None)[0])
        process().kill()
    assert len(texts) == 1


def test_process_ends_with_the_one_that_it_renders_for() -> None:
    """A fork has a process of its own, too: two that asked the same one would get each other's texts."""
    ours = ChatTemplate("{{ messages[1].content }}", {})
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if ours.render(MESSAGES, None) == ("Yes.", []):
                os.write(writer, str(process().pid).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        pid = int(said.read())
    os.waitpid(child, 0)
    assert pid != process().pid
    until = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert ours.render(MESSAGES, None) == ("Yes.", [])


def test_what_templates_may_use_is_what_transformers_gives_them() -> None:
    source = (
        "{{- messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(', ') }}"
        "{{ '%-5s|' % 'a' ~ '{:>4}|{!r}'.format(7, 'b') }}{{ {'é': '<'}|tojson }} {{ dict(a=1).items()|list }}"
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}{% else %}none{% endfor %}"
        "{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}"
        "{% macro f(a, b=2) %}{{ a + b }}{{ caller() }}{% endmacro %}{% call f(1) %}!{% endcall %}"
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ '<think>a</think>b'.split('</think>')[-1] }}{{ 'x' in ['x', 1] }}{{ [1, 2, 3][::-1] }}{{ none }}{{ u }}"
        "{{ 2 ** 10 + 7 % 4 }}{{ 'a' if u is not defined }}{{ strftime_now('%%') }}{{ ('<' ~ 'a')|e }}{{ messages[0] }}"
    )
    from transformers.utils.chat_template_utils import render_jinja_template

    ours, _ = ChatTemplate(source, {}).render(MESSAGES, None)
    theirs, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert ours == theirs[0]
    for code in ("raise_exception('no')", "messages.append(1)", "''.__class__.mro()", "1 + ''"):
        with pytest.raises(Refused):
            ChatTemplate("{{ " + code + " }}", {}).render(MESSAGES, None)
