"""Rules and fields that several sections share."""

from __future__ import annotations

import os
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from raytune_fsdp.base.redaction import find_secrets
from raytune_fsdp.base.urls import holds_credentials, is_url

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def safe_name(value: str) -> str:
    """Check a name that becomes part of a path: it must not lead out of its directory."""
    if not _NAME.fullmatch(value) or ".." in value:
        raise ValueError(
            "must be 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit, without '..' or '/'"
        )
    return value


OWN_ROWS = "own-rows"
"""Below `run.storage`: rows that programs have given to `finetune`."""


def run_name(value: str) -> str:
    """Check the name of a run's directory. The data's cache is next to it, in `cache`."""
    if value in ("cache", OWN_ROWS):
        what = "prepared data" if value == "cache" else "rows that programs have given"
        raise ValueError(f"'{value}' is the directory of {what} in run.storage; choose another name")
    return safe_name(value)


class CredentialsError(ValueError):
    """The value holds credentials, so the message must not show it."""


def without_credentials(value: str) -> str:
    """Refuse a path or URL with credentials: a config is written to the run directory and shown in messages."""
    if holds_credentials(value):
        raise CredentialsError(
            "must not hold credentials, because it is written to the run directory: set them in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, HF_TOKEN and so on)"
        )
    return value


def without_secret_values(values: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuse secrets in a map that goes into the `config.json` of checkpoints and exports."""
    for name in find_secrets(values):
        raise CredentialsError(
            f"{name} looks like a secret, and would be written to the model's config.json: remove it"
        )
    return values


def function_name(value: str) -> str:
    """Check the name of a function of the user's."""
    module, _, function = value.partition(":")
    if not all(name.isidentifier() for name in (*module.split("."), function)):
        raise ValueError(
            f"{value!r} is not module:function; write the module's name as in an import, such as rows:chat"
        )
    return value


def model_place(value: str) -> str:
    """Check the place of a model: a directory, a hub name or a URL."""
    if not value.strip():
        raise ValueError("must not be empty: name a directory, a model on the hub, or leave it out")
    return without_credentials(value)


def local_path(value: str) -> str:
    """Check a path on a mounted file system. A URL would silently become a directory of that name."""
    if not value or is_url(value) or "\0" in value:
        raise ValueError("must be a directory on a mounted file system (object stores are not supported yet)")
    # Unless it is there: an older version has made such directories, and a run in one goes on.
    if (variable := re.search(r"\$\{?\w+\}?", value)) is not None and not os.path.exists(value):
        raise ValueError(
            f"{variable[0]} is not expanded in a config: write the path itself, or give the field as a flag in double "
            "quotes, where the shell does it"
        )
    return value


def checkpoint_place(value: str) -> str:
    """Check the place of checkpoints: a directory, or the URL of one in an object store."""
    if not is_url(value):
        return local_path(value)
    if "?" in value or value.endswith("://"):
        raise ValueError(
            "must be a URL without options, such as s3://bucket/path: set the endpoint and the region in the environment "
            "(AWS_ENDPOINT_URL, AWS_REGION)"
        )
    return without_credentials(value)


def check_expression(field: str, value: Any) -> None:
    """Check that a value is a regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{field}: {value!r} is not a regular expression ({error}): correct it") from error


# The base of every config section.


class Section(BaseModel):
    """A section of the config: frozen, strict about names, documented by the docstrings under its fields."""

    # Without allow_inf_nan=False, `lr: .inf` would pass every bound below.

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


# How often something is done, for fields that allow more than a number of steps.


class PerEpoch(Section):
    per_epoch: int = Field(ge=1)
    """How many times in every pass over the data: after the same steps on any number of ranks. Needs `train.epochs`."""

    def __str__(self) -> str:
        return f"{{per_epoch: {self.per_epoch}}}"


class SaveEvery(Section):
    """One of two ways to say how often a run is saved."""

    minutes: float | None = Field(default=None, gt=0)
    """Minutes of training after the newest checkpoint."""

    per_epoch: int | None = Field(default=None, ge=1)
    """How many times in every pass over the data: after the same steps on any number of ranks. Needs `train.epochs`."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.minutes is None) == (self.per_epoch is None):
            raise ValueError(f"minutes={self.minutes} and per_epoch={self.per_epoch}: set one of the two")
        return self

    def __str__(self) -> str:
        return f"{{minutes: {self.minutes:g}}}" if self.per_epoch is None else f"{{per_epoch: {self.per_epoch}}}"
