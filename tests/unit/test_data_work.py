"""Chat templates are a stranger's programs: their work is limited, by counts that are equal on every machine."""

from __future__ import annotations

import pytest

from raytune_fsdp.base.errors import DataError, RowError
from raytune_fsdp.config import ChatFormat
from raytune_fsdp.data.rows import work
from raytune_fsdp.data.rows.formats import Document, Formatter
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
    "in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
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
    "rfind": LONG + "{{ s.rfind('y' ~ s) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big')|length }}",
    "int of a base": "{{ ('f' * 1000000)|int(base=16) }}",
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
    "striptags": "{{ ('<!---->' * 1000000)|striptags }}",
    "wordwrap": LONG + "{{ s|wordwrap(1, wrapstring=s) }}",
    "escaped": "{{ ('&' * 30000000)|e }}",
    "markup": "{{ ('x'|safe) * 1000000000 }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_template_that_would_hang_or_take_all_memory_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "UNITS", 5_000_000)  # a twentieth: the tests take a twentieth of the time, too
    with pytest.raises(TooMuchWork, match="chat template does too much work: .*data.chat_template"):
        ChatTemplate(ATTACKS[name], {}).render(MESSAGES, None)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{{ range(100000)|select('eq', -1)|list }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% for x in [1, 2] recursive %}{% if loop.depth < 50 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(1000) %}{{ j }}{% endfor %}{% endfor %}",
    ],
)
def test_loops_in_loops_are_counted(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "UNITS", 5_000_000)
    with pytest.raises(TooMuchWork):
        ChatTemplate(source, {}).render(MESSAGES, None)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{% for i in range(9) %}" * 30 + "{% endfor %}" * 30, "cannot be compiled: SyntaxError"),
        ("{{ " + "9" * 100_000 + " }}", "cannot be compiled: ValueError"),
        ("{{ 0x" + "f" * 150_000 + " // 3 }}", "cannot be compiled: ValueError"),
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


def test_prompts_are_rendered_under_the_same_limit() -> None:
    tokenizer = type("Busy", (), {"chat_template": "x", "special_tokens_map": {}})()
    tokenizer.get_chat_template = lambda tools=None: "{{ 'x' * 10**9 }}"
    with pytest.raises(TooMuchWork):
        encode_prompt(tokenizer, "Is it?", positions=100)


def test_long_rows_may_take_more() -> None:
    """A template that gathers the conversation in a variable copies all of it once a message."""
    gather = "{% set ns = namespace(t='', l=[]) %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}" + (
        "{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": "x" * 100_000}] * 100
    text, _ = ChatTemplate(gather, {}).render(messages, None)
    assert text == "x" * 10_000_000


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
