"""Remove secrets from everything that is written where others read it: configs, params, events, errors.

Secrets are found by key (`password`, `api_key`, `HF_TOKEN`; not `tokenizer`, `eos_token`, `max_new_tokens`) and by the
shape of the value (`hf_...`, `AKIA...`, a password in a URL). A doubtful key counts as a secret. This is a net, not a
proof: secrets belong in the environment, not in a config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

REDACTED = "<redacted>"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _words(
    "secret secrets password passwords passwd passphrase pwd credential credentials authorization bearer cookie "
    "apikey apikeys accesskey privatekey secretkey authtoken accesstoken"
)
_SECRET_KEY_KINDS = _words("api access private secret encryption signing account ssh license")
_SECRET_TOKENS_KINDS = _words("api access auth refresh bearer hf hub")
# `DB_PASS`, but not `forward_pass`.
_BEFORE_SECRET_PASS = _words("db database mysql pg postgres redis smtp mail user admin root proxy http ldap ssh")
# Words around `token` that mean tokens of a vocabulary or counts of tokens: `eos_token`, `per_token_loss`, `token_ids`.
_BEFORE_PLAIN_TOKEN = _words(
    "pad eos bos unk cls sep mask eot eom boi eoi image audio video start end stop special decoder forced per first "
    "last next prev previous new target input output max min num mean added extra"
)
_AFTER_PLAIN_TOKEN = _words("id ids type types count counts index length embedding embeddings loss level")

# Private keys; Hugging Face; AWS; OpenAI and others; GitHub (two); GitLab; Slack; Google; NVIDIA and Databricks;
# Weights & Biases; Groq; npm; Vault; DigitalOcean; SendGrid; JSON web tokens; HTTP headers. Where ordinary words have
# the same shape (`sk-`, `basic`), only what has a digit counts. SECURITY.md lists them.
_SHAPES = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"\bhf_[A-Za-z0-9]{16,}",
        r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"(?<![\w-])sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}",
        r"\bgh[pousr]_[A-Za-z0-9]{20,}",
        r"\bgithub_pat_[A-Za-z0-9_]{20,}",
        r"\bglpat-[A-Za-z0-9_-]{16,}",
        r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
        r"\bAIza[0-9A-Za-z_-]{30,}",
        r"\b(?:nvapi-|dapi)[A-Za-z0-9_-]{24,}",
        r"\bwandb_v[0-9]_(?=[A-Za-z_]*[0-9])[A-Za-z0-9_]{16,}",
        r"\bgsk_[A-Za-z0-9]{20,}",
        r"\bnpm_[A-Za-z0-9]{20,}",
        r"(?<![\w.-])hv[sbr]\.(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}",
        r"\bdo[opr]_v[0-9]_[A-Za-z0-9]{20,}",
        r"(?<![\w.-])SG\.(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}(?:\.[A-Za-z0-9_-]+)?",
        r"(?<![\w-])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
        r"\b(?i:bearer|basic)\s+(?=[A-Za-z._~+/=-]*[0-9])[A-Za-z0-9._~+/=-]{12,}",
    )
)
# A lone `token@` is a secret only in http URLs, because an abfss URL has its container there.
_HTTP_USER = re.compile(r"(?<=http://)[^\s/'\"]+(?=@)|(?<=https://)[^\s/'\"]+(?=@)")
_URL_SIGNATURE = re.compile(r"(?i)([?&](?:sig|signature|x-amz-signature|x-goog-signature|key)=)[^&\s'\"]+")
_URL = re.compile(r"://[^\s'\"]+")
# `user:password@`, whatever the password contains. In `host:5000/a@b` a port, not a password, follows the colon.
_USER = re.compile(r"\A(?!\[)[^/@:?#]*:(?![0-9]{1,5}(?:[/?#]|$)).+(?=@)")
_OPTION = re.compile(r"([?&#;])([\w.-]+)=([^&#;()<>\[\]{},]+)")
_SECRET_OPTIONS = {"auth": 4, "jwt": 4, "code": 6, "assertion": 6}
"""Options of URLs that carry secrets though they are not named like one, and the least length of such a secret:
`?code=404` is none."""
_VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'&,;{}\[\]]+")
# What comes before a value: `key=`, `"key": `, `--key `. Texts come from anywhere: the look-behinds, here and in the
# shapes, keep the search linear.
_NAMED = re.compile(r"(?<![\w.-])(?:(?P<key>[\w.-]+)[\"']?[ \t]*[=:][ \t]*|--(?P<flag>[A-Za-z][\w.-]*)\s+(?!--))")
_PLAIN = frozenset(("none", "null", "true", "false", "~", ""))


def is_secret_key(key: str) -> bool:
    """Return whether a value under this (dotted) key is a secret."""
    return any(_names_secret(words) or _names_token(words) for words in _segments(key))


def redact(value: object, key: str = "") -> Any:
    """Return a copy of the value, which stands under `key`, without secrets. Looks into mappings, lists and strings."""
    if value is None or isinstance(value, bool):
        return value
    secret = [words for words in _segments(key) if _names_secret(words) or _names_token(words)]
    # A number under `token` is a count of tokens; under `password` it is still a password.
    if secret and (not isinstance(value, int | float) or any(map(_names_secret, secret))):
        return value if value in ("", [], {}, ()) else REDACTED
    if isinstance(value, Mapping):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(item) for item in value]
    if isinstance(value, str | PurePath):
        return redact_text(str(value))
    return value


def redact_text(text: str) -> str:
    """Return the text without values that look like secrets or are assigned to a secret's name."""
    text = _without_shapes(text)
    clean, position = [], 0
    # The search goes on right after a name that is not a secret's: its value may hold another name
    # (`error: password=...`).
    while named := _NAMED.search(text, position):
        clean.append(text[position : named.end()])
        position = named.end()
        key = named["key"] or named["flag"]
        # Already redacted, or a vocabulary's `<token>`.
        if not is_secret_key(key) or text.startswith(("<", "'<", '"<'), position):
            continue
        value = _VALUE.match(text, position)
        if value and not _is_harmless(value[0].strip("\"'"), key):
            clean.append(REDACTED)
            position = value.end()
    return "".join([*clean, text[position:]])


def redact_shapes(value: object) -> Any:
    """Return a copy of the value without what looks like a secret by itself: in prose, `token: 5` is no assignment."""
    if isinstance(value, Mapping):
        return {name: redact_shapes(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_shapes(item) for item in value]
    return _without_shapes(value) if isinstance(value, str) else value


def find_secrets(value: object, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values that look like secrets or have the name of one.

    Keys that name a token are left out: it may be a token of a vocabulary.
    """
    for path, text in texts_in(value, key):
        if text and (_without_shapes(text) != text or any(map(_names_secret, _segments(path)))):
            yield path


def texts_in(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each text in a value, and the text."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from texts_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from texts_in(item, f"{key}.{index}" if key else str(index))
    elif isinstance(value, str):
        yield key, value


def redact_yaml(text: str) -> str:
    """Return a YAML document without its secrets; the same text, comments included, if it has none."""
    import yaml  # here, as `raytune-fsdp --help` answers where nothing is installed

    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return redact_text(text)
    clean = redact(document)
    if clean == document:
        return redact_text(text)
    return str(yaml.safe_dump(clean, sort_keys=False, allow_unicode=True))


def _without_shapes(text: str) -> str:
    for shape in _SHAPES:
        text = shape.sub(REDACTED, text)
    text = _HTTP_USER.sub(REDACTED, _URL.sub(_without_url_secrets, text))
    return _URL_SIGNATURE.sub(rf"\g<1>{REDACTED}", text)


def _without_url_secrets(url: re.Match[str]) -> str:
    """Return a URL (from its `://` on) without secrets; there may be another URL in it."""
    _, *parts = url[0].split("://")
    clean = (_OPTION.sub(_without_option, _USER.sub(REDACTED, part)) for part in parts)
    return "".join(f"://{part}" for part in clean)


def _without_option(found: re.Match[str]) -> str:
    begin, name, value = found.groups()
    least = 4 if is_secret_key(name) else _SECRET_OPTIONS.get(name.lower())
    secret = least is not None and len(value) >= least and not _is_harmless(value, name)
    return f"{begin}{name}={REDACTED}" if secret else found[0]


def _is_harmless(value: str, key: str) -> bool:
    """Return whether a value is nothing at all, or a number of tokens."""
    if value.lower() in _PLAIN:
        return True
    return value.replace(".", "").isdigit() and not any(map(_names_secret, _segments(key)))


def _segments(key: str) -> list[list[str]]:
    return [[word.lower() for word in _WORD.findall(segment)] for segment in key.split(".")]


def _names_secret(words: list[str]) -> bool:
    return not _SECRET_WORDS.isdisjoint(words) or any(
        (a in _SECRET_KEY_KINDS and b in ("key", "keys")) or (a in _BEFORE_SECRET_PASS and b == "pass")
        for a, b in zip(words, words[1:], strict=False)
    )


def _names_token(words: list[str]) -> bool:
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        after = words[index + 1] if index + 1 < len(words) else ""
        if word == "tokens" and before in _SECRET_TOKENS_KINDS:
            return True
        if word == "token" and before not in _BEFORE_PLAIN_TOKEN and after not in _AFTER_PLAIN_TOKEN:
            return True
    return False
