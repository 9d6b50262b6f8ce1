"""What counts as a secret, and what must not."""

from __future__ import annotations

import importlib
import pkgutil
import time

import pytest
import yaml

import raytune_fsdp.config
from raytune_fsdp.base.redaction import (
    REDACTED,
    find_secrets,
    is_secret_key,
    redact,
    redact_shapes,
    redact_text,
    redact_yaml,
)
from raytune_fsdp.base.urls import holds_credentials
from raytune_fsdp.config.rules import Section
from tests.planted import FILL, SHAPES


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_secret_is_known_by_its_shape(shape: str) -> None:
    secret = SHAPES[shape]
    clean = redact({"note": f"before {secret} after", "list": [{"deep": secret}]})
    assert secret not in str(clean) and FILL not in str(clean)
    assert clean["note"].startswith("before ") and clean["note"].endswith(" after")


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("postgresql://user:p4ss@word@db.internal/mlflow", "p4ss@word"),
        ("https://alice:hunter2@mlflow.internal:5000/x", "hunter2"),
        ("git clone https://abcdef0123@github.com/x/y", "abcdef0123"),
        ("https://b.s3.amazonaws.com/x?X-Amz-Signature=deadbeef&y=1", "deadbeef"),
        ("HF_TOKEN=abc123xyz python train.py", "abc123xyz"),
        ("run --api-key abc123xyz --seed 1", "abc123xyz"),
        ("run --api-key=abc123xyz --seed 1", "abc123xyz"),
        ("error: password=hunter2 was refused", "hunter2"),
        ('{"client_secret": "two words"}', "two words"),
        ("postgresql://user:p4/ss@db.internal/mlflow", "p4/ss"),
        ("see mysql://root:a/b/c?d#e@db, or ask", "a/b/c?d#e"),
        ("https://alice:hunter/2@mlflow.internal:5000/x", "hunter/2"),
        ("https://proxy:3128/https://alice:hunter/2@host/x", "hunter/2"),
        ("https://host/rows.jsonl?page=2&auth=abc123xyz", "abc123xyz"),
        ("[log in](https://host/callback?state=1&code=4/0AeaYSHBxyz)", "4/0AeaYSHBxyz"),
        ("https://host/app#access_token=abc123xyz&expires_in=3600", "abc123xyz"),
        ("https://host/#/callback?id_token=abc123xyz", "abc123xyz"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nxyz\n-----END RSA PRIVATE KEY-----", "MIIE"),
    ],
)
def test_a_secret_is_found_inside_a_text(text: str, secret: str) -> None:
    clean = redact_text(text)
    assert secret not in clean and REDACTED in clean


@pytest.mark.parametrize(
    "key",
    words(
        "HF_TOKEN token hub_token auth_token accessToken api_key apiKey OPENAI_API_KEY aws_secret_access_key "
        "AWS_ACCESS_KEY_ID password db.password credentials private_key Authorization api_tokens "
        "cluster.env.MLFLOW_TRACKING_PASSWORD DB_PASS MYSQL_PWD"
    ),
)
def test_secret_keys(key: str) -> None:
    assert is_secret_key(key)
    assert redact({key: "plain-looking"}) == {key: REDACTED}
    assert redact("plain-looking", key) == REDACTED


@pytest.mark.parametrize(
    "key",
    words(
        "tokenizer tokens target_tokens max_new_tokens pad_token eos_token bos_token_id token_ids tokens_per_second "
        "per_token_loss tokenizer_fast keep_last key key_value_heads monkey RAY_AUTH_MODE author passes compass "
        "forward_pass"
    ),
)
def test_keys_that_only_sound_alike(key: str) -> None:
    assert not is_secret_key(key)
    assert redact({key: "value"}) == {key: "value"}


def test_no_key_of_the_config_counts_as_a_secret() -> None:
    for module in pkgutil.iter_modules(raytune_fsdp.config.__path__):
        importlib.import_module(f"raytune_fsdp.config.{module.name}")
    sections = Section.__subclasses__()
    keys = {name for section in sections for name in section.model_fields}
    assert len(keys) > 40 and "tokenizer" in keys
    assert [key for key in keys if is_secret_key(key)] == []


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/train/part-*.parquet",
        "abfss://container@account.dfs.core.windows.net/data",
        "ssh://git@host/repo",
        "sqlite:////storage/mlflow.db",
        "task-specific-long-name-2024-01",
        "hf_transfer and hf_hub_download",
        "tokens: 4096, tokens_per_second: 12.5, lr=1e-4",
        "the token is <|im_end|>, eos_token: </s>",
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}",
        "a basic explanation of everything, at http://127.0.0.1:5000/#/experiments/1",
        "token: 17",
    ],
)
def test_texts_that_stay(text: str) -> None:
    assert redact_text(text) == text


HARMLESS = [
    "hf://datasets/owner/name@rev/train.parquet", "hf://owner/name@refs%2Fconvert%2Fparquet/default/train/0000.parquet",
    "https://huggingface.co/owner/name/resolve/main/config.json", "http://localhost:8080/users/@me", "http://host:5000/",
    "http://10.0.0.7:9/a@b", "http://[::1]:8080/x", "http://[fe80::1%25eth0]:5000/a@b", "redis://cache:6379/0",
    "s3://bucket/path/a:b@c", "gs://bucket/2024-01-01T00:00:00@v1/x", "file:///data/a:b@c.jsonl", "tcp://0.0.0.0:2379",
    "ssh://git@github.com:22/owner/name.git", "git+https://github.com/owner/name@v1.2#subdirectory=x",
    "https://youtu.be/x?t=12&v=1", "https://host/search?q=token&page=2", "https://host/x?code=404",
    "https://host/x?lang=en",
    "https://host/x?auth=none&max_tokens=512", "https://host/x?token_type=mac", "https://host/x?author=someone",
    "https://host/x#section-2", "https://host/#/experiments/1/runs", "https://medium.com/@someone/title-a1b2c3d4e5f6",
    "what does ?code=4f3a9c77 mean in a callback", "GET /callback?code=4f3a9c77&state=1 HTTP/1.1",
    "/login#code=4f3a9c77e1",
    '{"url": "/x?auth=basic_or_bearer"}', "npm_config_registry npm_package_version",
    "npm install && npm_lifecycle_event",
    "wandb_v1_migration_of_all_projects", "hvs.is_not_a_token_but_a_very_long_sentence",
    "SG.UnorderedMapOfStringsToInts",
    "gsk_model_name", "dop_v1_and_v2", "class SG.Node.Value", "git clone git@github.com:owner/name.git",
    "ratio 16:9 @ 60fps, user: someone @ host", "mail to someone@example.com: see https://example.com/a",
    "sqlite:///runs/mlflow.db", "https://host/x?next_token_id=5", "docker://registry.io:5000/image@sha256:0a1b2c",
]  # fmt: skip


def test_forty_harmless_urls_and_texts_stay_as_they_are() -> None:
    assert len(HARMLESS) >= 40
    assert [text for text in HARMLESS if redact_text(text) != text or redact_shapes(text) != text] == []


@pytest.mark.parametrize(
    "url", ["postgresql://u:p/w@host/db", "https://u:p/w@host/x", "https://host/x#access_token=abc"]
)
def test_a_password_with_a_slash_is_refused_where_others_are(url: str) -> None:
    assert holds_credentials(url)


def test_no_harmless_url_is_refused_as_one_with_a_password() -> None:
    """In paths of data, models and checkpoints."""
    refused = [text for text in HARMLESS if "://" in text and " " not in text and holds_credentials(text)]
    assert refused == ["https://host/x?auth=none&max_tokens=512", "https://host/x?token_type=mac",
                       "https://host/x?next_token_id=5"], "as before: their options' names"  # fmt: skip


def test_only_values_that_can_be_secrets_go() -> None:
    kept = {"token": 17, "auth_token": None, "use_auth_token": True, "password": "", "tokens": 5, "loss": 0.25}
    assert redact(kept) == kept
    assert redact({"password": 1234, "credentials": {"user": "x"}}) == {"password": REDACTED, "credentials": REDACTED}


def test_by_shape_alone_sentences_stay() -> None:
    texts = ["the token: a word", f"key={SHAPES['openai']}", ["https://alice:hunter2@host/x"], {"password": "hunter2"}]
    assert redact_shapes(texts) == [
        "the token: a word", f"key={REDACTED}", [f"https://{REDACTED}@host/x"], {"password": "hunter2"},
    ]  # fmt: skip


def test_secrets_are_named_by_their_places() -> None:
    tree = {"a": [{"b": SHAPES["aws"]}], "note": "plain", "db": {"password": "x", "pad_token": "<pad>"}, "n": 3}
    assert list(find_secrets(tree)) == ["a.0.b", "db.password"]


def test_yaml_keeps_comments_unless_something_goes() -> None:
    harmless = "run:\n  name: x  # a comment\nmodel: {tokenizer: gpt2}\n"
    assert redact_yaml(harmless) == harmless
    secret = "env:\n  HF_TOKEN: 'my own'\n  OTHER: |\n    two\n    lines\nseed: 1\n"
    clean = yaml.safe_load(redact_yaml(secret))
    assert clean == {"env": {"HF_TOKEN": REDACTED, "OTHER": "two\nlines\n"}, "seed": 1}
    assert "hunter2" not in redact_yaml("{ broken: [\npassword: hunter2\n")


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a-",
        "a ",
        "key=",
        "token=",
        "token='",
        "token=<",
        "sk-",
        "://",
        "://a:",
        "://a:/",
        "?code=",
        "#a=",
        "wandb_v1_",
        "SG.",
        "http://a:",
        "eyJ.",
        "eyJ-",
        "--a ",
        "bearer ",
        "--BEGIN ",
    ],
)
def test_long_texts_take_no_time(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    before = time.perf_counter()
    redact_text(text)
    assert time.perf_counter() - before < 3
