"""From a config to its data: names, the cache's place, and a warning where evaluation sees what was trained on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from raytune_fsdp.base.errors import ConfigError, DataError
from raytune_fsdp.data.open import open_data, open_evals
from raytune_fsdp.plan.run_dir import cache_of
from tests.rows import VOCABULARY, demo_tokenizer
from tests.runs import make_config

TOKENS = {"type": "tokens"}


def open_with(directory: Path, evals: list[dict[str, Any]]) -> Any:
    make_config(directory)
    data = {"train": [{"path": str(directory / "tokens.jsonl"), "format": TOKENS}], "eval": evals}
    return open_data(make_config(directory, data=data), demo_tokenizer(), VOCABULARY)


def test_evaluation_on_trained_data_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_config(tmp_path)
    shutil.copy(tmp_path / "tokens.jsonl", tmp_path / "copy.jsonl")
    (tmp_path / "other.jsonl").write_text('{"input_ids": [1, 2], "labels": [1, 2]}\n')
    _, evals = open_with(
        tmp_path, [{"path": str(tmp_path / f"{name}.jsonl"), "format": TOKENS} for name in ("copy", "other")]
    )
    assert list(evals) == ["copy", "other"]
    (record,) = caplog.records
    assert "data.eval copy: 1 of its 1 file(s) are also trained on" in record.getMessage()
    assert str(tmp_path / "copy.jsonl") in record.getMessage() and str(tmp_path / "tokens.jsonl") in record.getMessage()


def test_the_evaluations_of_a_run_have_its_order(tmp_path: Path) -> None:
    """Only the order of the training data is on record: an evaluation of another one would change at a restart."""
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/e.jsonl").write_text('{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}\n')
    (tmp_path / "eval/again").symlink_to(".")
    train, evals = open_with(tmp_path, [{"path": f"{tmp_path}/eval/**/*.jsonl", "format": {"type": "tokens"}}])
    (measured,) = evals.values()
    assert [len(source) for source in measured.sources] == [1]
    assert train.order_version == measured.order_version == 3


def run_of_rows(directory: Path, evals: list[dict[str, Any]]) -> Any:
    """A run of plain rows, which has version 2 of the order, with these evaluations."""
    make_config(directory)
    data = {"train": [{"path": str(directory / "tokens.jsonl"), "format": TOKENS}], "eval": evals}
    return make_config(directory, data=data)


def test_an_evaluation_that_a_run_gains_is_read_as_at_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the newest version that there was then; what the run had keeps its version, and so its windows."""
    for name, many in (("gained/train", 3), ("gained/test", 2), ("had/only", 4)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        row = {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({**row, "n": n}) + "\n" for n in range(many)))
    had = {"path": f"{tmp_path}/had", "format": TOKENS}
    gained = {"path": f"{tmp_path}/gained", "format": TOKENS, "split": "test"}
    begun, begun_evals = open_data(run_of_rows(tmp_path, [had]), demo_tokenizer(), VOCABULARY)
    assert begun.order_version == 2
    config = run_of_rows(tmp_path, [had, gained])

    def rows(newest: int | None) -> int:
        train, evals = open_data(config, demo_tokenizer(), VOCABULARY, order_version=2, newest_order=newest)
        assert train.fingerprint == begun.fingerprint
        assert evals["had"].fingerprint == begun_evals["had"].fingerprint
        alone = open_evals(config, demo_tokenizer(), VOCABULARY, order_version=2, newest_order=newest)
        assert {name: each.fingerprint for name, each in alone.items()} == {
            name: each.fingerprint for name, each in evals.items()
        }
        return evals["gained"].rows(0)

    caplog.clear()
    assert rows(4) == 2 and not caplog.records, "its split alone, and nothing to warn of"
    for older in (None, 3):
        caplog.clear()
        assert rows(older) == 5 and "goes on with all of its splits" in caplog.text


def test_data_of_several_versions_is_opened_once(tmp_path: Path) -> None:
    """The highest is then the version of all, as if all had been opened by it."""
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/e.jsonl").write_text('{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}\n')
    (tmp_path / "eval/again").symlink_to(".")
    config = run_of_rows(tmp_path, [{"path": f"{tmp_path}/eval/**/*.jsonl", "format": TOKENS}])
    read: list[str] = []
    train, evals = open_data(config, demo_tokenizer(), VOCABULARY, lambda what, done, total: read.append(what))
    compared = [what for what in read if what.startswith("comparing the rows of ")]
    assert len(compared) == len(set(compared)) == 2
    again, evals_again = open_data(config, demo_tokenizer(), VOCABULARY, order_version=3)
    (measured,), (measured_again,) = evals.values(), evals_again.values()
    assert train.order_version == measured.order_version == again.order_version == 3
    assert train.identity == again.identity and train.fingerprint == again.fingerprint
    assert measured.fingerprint == measured_again.fingerprint
    assert train.cache.directory == again.cache.directory


def test_two_of_one_name(tmp_path: Path) -> None:
    path = {"path": str(tmp_path / "tokens.jsonl"), "format": TOKENS}
    with pytest.raises(DataError, match=r"data\.eval: two datasets have the same name; .*data\.eval\.\*\.name"):
        open_with(tmp_path, [path, path])


def test_a_wrong_path_of_an_evaluation_is_named_by_its_field(tmp_path: Path) -> None:
    """Recipes name one, of which who gives only data.train.0.path has not heard."""
    with pytest.raises(DataError, match=r"^data\.eval\.1: .*nope\.jsonl: no such file.*; correct data\.eval\.1\.path$"):
        open_with(
            tmp_path, [{"path": str(tmp_path / each), "format": TOKENS} for each in ("tokens.jsonl", "nope.jsonl")]
        )


def test_the_cache_is_beside_the_runs_unless_it_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert cache_of(config) == tmp_path / "runs" / "cache"
    assert cache_of(make_config(tmp_path, data={"cache": {"path": str(tmp_path / "c")}})) == tmp_path / "c"
    with pytest.raises(ValueError, match="'cache' is the directory of prepared data"):
        make_config(tmp_path, run={"name": "cache"})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([{"path": "a", "share": 0.5}, {"path": "b"}], "if one dataset has a share, all need one"),
        ([{"path": "a", "share": 0.5}, {"path": "b", "share": 0.6}], "add up to 1.1; they must add up to 1"),
        ([{"path": "a", "weight": 0}, {"path": "b", "weight": 0}], "all are 0, so nothing would be trained on"),
        ([{"path": "a", "weight": 1, "share": 1}], "weight=1.0 and share=1.0: set at most one"),
        ([{}], "path=None and hub=None: set exactly one of the two"),
        ([{"hub": ""}], "path=None and hub='': set exactly one of the two"),
        ([{"path": "a", "hub": "b"}], "path='a' and hub='b': set exactly one of the two"),
        ([{"path": "a", "revision": "main"}], "subset and revision belong to a hub dataset"),
    ],
)
def test_mixtures_that_make_no_sense(tmp_path: Path, train: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_config(tmp_path, data={"train": train})


def test_weights_are_not_for_evaluation(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.eval\.0: weight and share are for data\.train"):
        make_config(tmp_path, data={"train": [{"path": "a"}], "eval": [{"path": "b", "weight": 2}]})


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("s3://AKIA:SECRET/with/slash@bucket/x.jsonl", True),
        ("s3://AKIA:12/abc@bucket/x.jsonl", True),
        ("https://user:pass@host/x.jsonl", True),
        ("s3://bucket/x.jsonl?secret_key=abc", True),
        ("s3://bucket/x@y:z.jsonl", False),
        ("http://host:8080/x.jsonl", False),
        ("hf://datasets/org/name@main/x.parquet", False),
        ("abfs://container@account.dfs.core.windows.net/x.jsonl", False),
        ("data/a:b@c.jsonl", False),
    ],
)
def test_credentials_are_kept_out_of_the_config_and_of_the_error(tmp_path: Path, url: str, refused: bool) -> None:
    from raytune_fsdp.config.load import load_config
    from tests.config_text import dump_config

    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config(tmp_path)))
    if not refused:
        assert load_config(path, ["--data.train.0.path", url]).data.train[0].path == url
        return
    with pytest.raises(ConfigError, match=r"^data\.train\.0\.path: must not hold credentials") as caught:
        load_config(path, ["--data.train.0.path", url])
    assert not any(secret in str(caught.value) for secret in ("AKIA", "slash", "pass@", "abc"))


@pytest.mark.parametrize("template", ["chatml", None])
def test_headings_that_nobody_asks_under_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    """Where there is a chat template, of each dataset that leaves the style to its default, in a new run."""
    tokenizer = demo_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", None)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"instruction": "Say", "output": name}) + "\n")
    plain = {"path": str(tmp_path / "a.jsonl"), "format": {"type": "instruction"}}
    chosen = {"path": str(tmp_path / "b.jsonl"), "format": {"type": "instruction", "style": "alpaca"}}
    config = make_config(tmp_path, data={"train": [plain, chosen], "chat_template": template})

    def said(order: int | None) -> list[str]:
        caplog.clear()
        open_data(config, tokenizer, VOCABULARY, order_version=order)
        return [each.getMessage() for each in caplog.records]

    assert said(2) == []
    if template is None:
        assert said(None) == []
    else:
        (line,) = said(None)
        assert "dataset 'a'" in line and "format.style=chat to train" in line and "format.style=alpaca to keep" in line
