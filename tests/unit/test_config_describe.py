"""What the fields say about themselves, in help and docs."""

from __future__ import annotations

import pytest

from docs.make.configuration import PAGE, page
from raytune_fsdp.config.load import ROOT
from raytune_fsdp.config.schema import DescribedField, describe, help_text

FIELDS = {field.path: field for field in describe(ROOT)}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("run.name", "text"),
        ("run.seed", "integer >= 0, < 2**63"),
        ("model.path", "text, or null"),
        ("model.overrides", "map with any keys"),
        ("model.architecture", "map with any keys, or null"),
        ("data.train", "list of maps (at least 1)"),
        ("data.packing", "one of best_fit, concat, none"),
        ("model.add_tokens", "list of maps"),
        ("eval.prompts", "list of text or maps"),
        ("optim.beta1", "number >= 0, < 1"),
        ("optim.max_grad_norm", "number > 0, or null"),
        ("optim.schedule.floor", "number >= 0, <= 1"),
        ("optim.schedule.type", "one of constant, linear, cosine, wsd, polynomial, inverse_sqrt, one_cycle"),
        ("tracking.console", "true or false"),
        ("cluster.workers", "integer >= 1, map of min and max, or auto"),
        ("cluster.workers.max", "integer >= 1"),
    ],
)
def test_types_in_words(path: str, words: str) -> None:
    assert FIELDS[path].type == words


@pytest.mark.parametrize(
    ("path", "default"),
    [
        ("run.name", "required"),
        ("run.storage", "runs"),
        ("optim.max_grad_norm", "1.0"),
        ("optim.warmup_steps", "null"),
        ("optim.schedule.type", "cosine"),
        ("data.eval", "[]"),
        ("tracking.console", "true"),
    ],
)
def test_defaults_in_words(path: str, default: str) -> None:
    assert FIELDS[path].default == default


def test_a_field_that_not_every_type_has_says_which_do() -> None:
    assert FIELDS["optim.schedule.decay"].only_with == ("wsd",)
    assert FIELDS["optim.schedule.type"].only_with == ()


def test_a_field_that_means_something_else_with_another_type_is_described_for_each() -> None:
    found = [(each.default, each.only_with) for each in describe(ROOT) if each.path == "optim.optimizer.momentum"]
    assert found[:2] == [("0.9", ("sgd",)), ("0.95", ("muon",))]
    prompts = [(each.default, each.only_with) for each in describe(ROOT) if each.path == "data.train.N.format.prompt"]
    assert prompts[:3] == [("null", ("chat",)), ("instruction", ("instruction",)), ("required", ("template",))]
    assert prompts[3:] == [("prompt", ("preference",)), ("prompt", ("binary",))]


def test_items_of_a_list_are_described() -> None:
    assert FIELDS["data.train.N.path"] == DescribedField(
        "data.train.N.path", "text, or null", "null", FIELDS["data.train.N.path"].doc
    )


def test_every_field_has_a_docstring() -> None:
    assert [path for path, field in FIELDS.items() if not field.doc] == []


def test_every_section_has_a_docstring() -> None:
    sections = {name: ROOT.child(name) for name in ROOT.fields()}
    assert [name for name, place in sections.items() if place is None or not place.doc] == []


@pytest.mark.parametrize("width", [40, 80, 118])
def test_help_names_every_field_and_fits_the_terminal(width: int) -> None:
    text = help_text(ROOT, width)
    assert all(f"  --{path}" in text for path in FIELDS)
    assert max(map(len, text.splitlines())) <= width


def test_the_docs_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m docs.make.configuration"
