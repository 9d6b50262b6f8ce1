"""A tokenizer is made of what is in its own directory, whatever its config says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from raytune_fsdp.base.errors import ModelError
from raytune_fsdp.model.directory.tokenizer import tokenizer_in, without_files
from raytune_fsdp.model.directory.tokenizer_trial import Trials, is_own
from tests.tokenizer_configs import BYTES, FAMILIES, NAME_FILES, PIECES, SPECIAL, WORDS
from tests.unit.made_tokenizers import demo, metaspace

SECRET = "aws_secret_access_key = wJalrXUtnFEMI"
TEXT = "Hello there, <|endoftext|> 12 wörlds </s>"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "credentials"
    file.write_text(f"[default]\n{SECRET}\n")
    return file


def written(directory: Path, config: Any, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """A directory with this tokenizer; `files`: other JSON files in it."""
    directory.mkdir(exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
    for name, values in {"tokenizer_config": config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(values))
    return directory


def word_pieces() -> Tokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "there", "##e", "w", "##orlds", "1", "##2"]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return tokenizer


def backend(family: str) -> Tokenizer:
    if family in BYTES:
        return demo().backend_tokenizer
    return metaspace("first").backend_tokenizer if family in PIECES else word_pieces()


def of(tokenizer: PreTrainedTokenizerBase, saved: Path) -> dict[str, Any]:
    """All that a tokenizer is, and what is saved of it."""
    tokenizer.save_pretrained(saved)
    files = sorted(file for file in saved.rglob("*") if file.is_file())
    return {
        "class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "ids": tokenizer(TEXT)["input_ids"],
        "special": tokenizer.special_tokens_map, "template": tokenizer.chat_template, "name": tokenizer.name_or_path,
        "sides": (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length),
        "files": {str(file.relative_to(saved)): file.read_bytes() for file in files},
    }  # fmt: skip


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_the_tokenizers_of_forty_families_load_as_they_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int
) -> None:
    """As they are shipped, and again as transformers saves them. `every`: one of so many, and all that name files."""
    assert len(FAMILIES) >= 40
    assert len(FAMILIES) == len(BYTES) + len(PIECES) + len(WORDS)
    for number, (family, config) in enumerate(FAMILIES.items()):
        if number % every and family not in NAME_FILES:
            continue
        place = written(tmp_path / family, config, backend(family))
        for shipped in (place, tmp_path / f"{family}, saved"):
            theirs = of(AutoTokenizer.from_pretrained(shipped), Path(f"{shipped}, saved"))
            with caplog.at_level(logging.WARNING, logger="raytune_fsdp"):
                caplog.clear()
                ours = of(tokenizer_in(shipped, trust_remote_code=False), Path(f"{shipped}, saved by us"))
            assert ours == theirs, family
            said = [record.getMessage() for record in caplog.records if record.name.startswith("raytune_fsdp")]
            dropped = NAME_FILES.get(family, []) if shipped == place else []
            assert len(said) == bool(dropped), (family, said)
            assert not dropped or f": {', '.join(dropped)})" in said[0]


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("family", ["bert", "llama 2"])
def test_no_argument_of_a_tokenizer_s_config_opens_a_file(
    family: str, trusted: bool, secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its whole path, or as one in the working directory."""
    monkeypatch.chdir(tmp_path)
    kind = FAMILIES[family]["tokenizer_class"]
    for name in (str(secret), secret.name):
        for arguments in (
            {"vocab": name}, {"vocab": name, "merges": name}, {"vocab_file": name, "merges_file": name},
            {"init_inputs": [name]}, {"tokenizer_file": name}, {"tokenizer_object": name}, {"gguf_file": name},
            {"sp_model_kwargs": {"model_file": name}},
        ):  # fmt: skip
            for files in (
                {"tokenizer_config": {"tokenizer_class": kind, **arguments}},
                {"tokenizer_config": {"tokenizer_class": kind}, "special_tokens_map": arguments},
            ):
                place = written(tmp_path / "model", files.pop("tokenizer_config"), **files)
                (place / "config.json").write_text("{}")
                try:
                    tokenizer = tokenizer_in(place, trust_remote_code=trusted)
                except Exception as error:
                    assert SECRET not in str(error)
                else:
                    tokenizer.save_pretrained(tmp_path / "saved")
                    assert not any(SECRET in file.read_text() for file in (tmp_path / "saved").iterdir()), arguments
                for file in place.iterdir():
                    file.unlink()


def test_an_argument_that_is_a_pipe_or_a_device_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", str(tmp_path / "pipe"), "/proc/self/fd/0", 0):
        place = written(tmp_path / "model", {"tokenizer_class": "BertTokenizer", "vocab": name, "vocab_file": name})
        assert len(tokenizer_in(place, trust_remote_code=False).get_vocab()) == 5


def test_other_files_of_a_tokenizer_are_those_of_its_directory(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.1.0.json").write_text(demo().backend_tokenizer.to_str())
    bert = {"tokenizer_class": "PreTrainedTokenizerFast"}
    place = written(tmp_path / "model", {**bert, "fast_tokenizer_files": ["../tokenizer.1.0.json"]}, word_pieces())
    assert len(tokenizer_in(place, trust_remote_code=False)) < 20
    (tmp_path / "tokenizer.1.0.json").rename(place / "tokenizer.1.0.json")
    written(place, {**bert, "fast_tokenizer_files": ["tokenizer.1.0.json"]})
    assert len(tokenizer_in(place, trust_remote_code=False)) == len(demo())


def test_a_link_of_a_tokenizer_s_file_to_any_file_is_refused(secret: Path, tmp_path: Path) -> None:
    """Those of the hub's cache, and those that people make of the same file elsewhere, are followed."""
    place = written(tmp_path / "model", {"tokenizer_class": "BertTokenizer"})
    (place / "vocab.txt").symlink_to(secret)
    with pytest.raises(ModelError, match=r"vocab\.txt is a link to '/.*put the file itself there"):
        tokenizer_in(place, trust_remote_code=False)
    (place / "vocab.txt").unlink()
    (place / "sub").mkdir()
    (place / "sub" / "vocab.txt").symlink_to(secret)
    (place / "vocab.txt").symlink_to("sub/vocab.txt")
    with pytest.raises(ModelError, match="is a link to"):
        tokenizer_in(place, trust_remote_code=False)
    words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n"
    blob = tmp_path / "blobs" / ("0" * 40)
    blob.parent.mkdir()
    blob.write_text(words)
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "vocab.txt").symlink_to("../../blobs/" + "0" * 40)
    (place / "vocab.txt").unlink()
    (place / "vocab.txt").symlink_to(snapshot / "vocab.txt")
    assert len(tokenizer_in(place, trust_remote_code=False)) == 6


def test_a_tokenizer_class_that_is_none_is_refused(tmp_path: Path) -> None:
    for name in ("AutoModelForCausalLM", "RagTokenizer", "AutoTokenizer"):
        place = written(tmp_path / "model", {"tokenizer_class": name}, demo().backend_tokenizer)
        with pytest.raises(ModelError, match=f"tokenizer_class='{name}', which is no tokenizer"):
            tokenizer_in(place, trust_remote_code=False)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "raytune_fsdp"


def test_each_content_is_tried_once_by_a_user(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In another process, which cannot be started any more when the same content is loaded again."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    place = written(tmp_path / "model", config, word_pieces())
    tokenizer_in(place, trust_remote_code=False)
    (mark,) = (own_cache / "tokenizers").iterdir()
    for each in (own_cache, own_cache / "tokenizers"):
        assert each.stat().st_mode & 0o777 == 0o700
    Trials.end()
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    tokenizer_in(place, trust_remote_code=False)
    tokenizer_in(written(tmp_path / "same", config, word_pieces()), trust_remote_code=False)
    other = written(tmp_path / "other", {**config, "model_max_length": 5}, word_pieces())
    tokenizer_in(other, trust_remote_code=True)  # its code may do what it likes
    assert not caplog.records
    tokenizer_in(other, trust_remote_code=False)
    assert "could not be tried in a process of its own" in caplog.text
    assert list((own_cache / "tokenizers").iterdir()) == [mark]


def test_the_word_of_somebody_else_counts_for_nothing(own_cache: Path, tmp_path: Path) -> None:
    """A cache that others may write to becomes the user's own; one of another user is not used."""
    (own_cache / "tokenizers").mkdir(parents=True)
    (own_cache / "tokenizers").chmod(0o777)
    place = written(tmp_path / "model", {"tokenizer_class": "PreTrainedTokenizerFast"}, word_pieces())
    tokenizer_in(place, trust_remote_code=False)
    assert (own_cache / "tokenizers").stat().st_mode & 0o777 == 0o700
    (mark,) = (own_cache / "tokenizers").iterdir()
    if os.geteuid() == 0:
        os.chown(mark, 65534, 65534)
        assert not is_own(mark)
        mark.unlink()
        os.chown(own_cache / "tokenizers", 65534, 65534)
        tokenizer_in(place, trust_remote_code=False)
        assert not list((own_cache / "tokenizers").iterdir())


def test_a_tokenizer_that_takes_too_long_is_refused_and_the_next_one_is_tried(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytune_fsdp.model.directory.tokenizer_trial.SECONDS", 1)
    slow = word_pieces()
    slow.add_tokens([AddedToken(f"<{number}>", normalized=True) for number in range(100_000)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    with pytest.raises(ModelError, match="more than 1 s of processor time or 1 GB of memory"):
        tokenizer_in(written(tmp_path / "slow", config, slow), trust_remote_code=False)
    tokenizer_in(written(tmp_path / "model", config, word_pieces()), trust_remote_code=False)


def test_tokens_may_be_any_text_and_code_that_is_trusted_has_arguments_of_its_own(secret: Path) -> None:
    tokens = {
        "bos_token": "/etc/passwd", "image_token": str(secret), "extra_special_tokens": ["/etc/passwd"],
        "added_tokens_decoder": {"0": {"content": "/dev/zero"}}, "chat_template": "/etc/passwd", "pad_token": None,
        "sp_model_kwargs": {"enable_sampling": True, "alpha": 0.1}, "vocab": {"/etc/passwd": 0}, "merges": ["/ e"],
        "think_end": "</think>", "tokenizer_file": None, "device_map": "auto",
    }  # fmt: skip
    assert without_files(tokens, trusted=False) == (tokens, [])
    theirs = {"rules": "data/rules.txt", "rules_file": "rules.txt", "more": {"inner_path": "x/y"}, **SPECIAL}
    assert without_files(theirs, trusted=True) == (theirs, [])
    assert without_files(theirs, trusted=False)[1] == ["rules", "rules_file", "more.inner_path"]
    for trusted in (False, True):
        known = {"vocab_file": "x", "sp_model_kwargs": {"model_file": "x", "alpha": 1}, "vocab": "x", "merges": "x"}
        assert without_files(known, trusted=trusted) == (
            {"sp_model_kwargs": {"alpha": 1}}, ["vocab_file", "sp_model_kwargs.model_file", "vocab", "merges"],
        )  # fmt: skip


@pytest.mark.parametrize("limit", [pytest.param("RLIMIT_CPU", marks=pytest.mark.slow), "RLIMIT_DATA"])
def test_a_limit_of_a_batch_system_is_kept_and_ends_no_trial(tmp_path: Path, limit: str) -> None:
    """It sets hard limits below those that a tokenizer is tried with, which nobody may raise."""
    demo().save_pretrained(tmp_path / "tokenizer")
    hard = {"RLIMIT_CPU": 40, "RLIMIT_DATA": 8 << 30}[limit]
    code = f"""
import json, resource, sys
from raytune_fsdp.model.directory import tokenizer_child as child
sys.modules["torch"] = None
resource.setrlimit(resource.{limit}, ({hard}, {hard}))
answer = child._in_child({{"directory": {str(tmp_path / "tokenizer")!r}, "seconds": 60, "bytes": 1 << 40}})
child._limit(60, 1 << 40)
print(json.dumps([answer, resource.getrlimit(resource.{limit})]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(done.stdout) == [{"stage": "done"}, [hard, hard]], done.stderr
