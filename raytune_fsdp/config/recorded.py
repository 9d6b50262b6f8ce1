"""What others may read of a config, and what the mark in place of a secret means when it is read again.

A config is written to the run directory and sent to MLflow. It then has a mark in place of each secret. The mark is not
a value: `cluster.env` takes the variable from the environment instead, and every other field refuses the mark.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import PydanticUndefined

from raytune_fsdp.base.redaction import REDACTED, redact, redact_shapes, texts_in
from raytune_fsdp.base.urls import without_user
from raytune_fsdp.config.rules import Section
from raytune_fsdp.config.schema import TAG


def recorded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, as a tree, without its secrets. The tree may come from an old file, and so be anything."""
    # In most fields only the shape of a value counts: a prompt such as `the token: a word` is no secret.
    clean: dict[str, Any] = redact_shapes(tree)
    cluster, tracking = clean.get("cluster"), clean.get("tracking")
    if isinstance(cluster, dict) and isinstance(cluster.get("env"), dict):
        # Whole values are replaced: a value with a mark inside could not be completed from the environment.
        cluster["env"] = {
            name: REDACTED if REDACTED in str(redact(value, str(name))) else value
            for name, value in cluster["env"].items()
        }
    if isinstance(tracking, dict) and isinstance(tracking.get("mlflow"), dict):
        uri = tree["tracking"]["mlflow"].get("uri")
        if isinstance(uri, str):
            tracking["mlflow"]["uri"] = shown_uri(uri)
    return clean


def setting(config: Any, path: str) -> Any:
    """Return a value of a config, as a tree, by its dotted path; None if there is none."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def shown_uri(uri: str) -> str:
    """Return a tracking URI without its user."""
    return str(redact_shapes(without_user(uri)))


def filled_from_environment(env: dict[str, str]) -> dict[str, str]:
    """Return `cluster.env` with this process's variables in place of marks. ValueError names those that are not set."""
    marked = [name for name, value in env.items() if value == REDACTED]
    missing = [name for name in marked if name not in os.environ]
    if missing:
        fields = " and ".join(f"cluster.env.{name}" for name in missing)
        raise ValueError(
            f"{fields}: {REDACTED} stands for a secret that this config does not hold: set {', '.join(missing)} in the "
            "environment, or write the value"
        )
    return {**env, **{name: os.environ[name] for name in marked}}


def check_no_marks(tree: Mapping[str, Any]) -> None:
    """Raise ValueError for marks in fields other than `cluster.env`."""
    texts = texts_in({name: value for name, value in tree.items() if name != "cluster"})
    marked = [path for path, text in texts if REDACTED in text]
    if marked:
        raise ValueError(
            f"{', '.join(marked)}: {REDACTED} stands for a secret that this config does not hold: write the value"
        )


# Where a config differs from its defaults.

REQUIRED = "(required)"
"""What stands in place of the default of a field that has none."""


def differing(config: Section) -> dict[str, tuple[Any, Any]]:
    """Return value and default of the fields that are not at their defaults, by dotted path.

    A section of another `type` than the default's is compared with the defaults of its own type; the type is listed,
    too.
    """
    return dict(_differing(config, None, ""))


def _differing(section: Section, default: Section | None, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, info in type(section).model_fields.items():
        value, here = getattr(section, name), f"{path}{name}"
        unset = info.get_default(call_default_factory=True, validated_data={})
        other = getattr(default, name) if default is not None else unset
        if isinstance(value, Section):
            same = isinstance(other, Section) and type(other) is type(value)
            if not same and hasattr(value, TAG):
                yield f"{here}.{TAG}", (getattr(value, TAG), getattr(other, TAG, _default(other)))
            yield from _differing(value, other if same else None, f"{here}.")
        elif isinstance(value, list) and value and all(isinstance(each, Section) for each in value):
            for index, each in enumerate(value):
                yield from _differing(each, None, f"{here}.{index}.")
        elif value != other and name != TAG:
            yield here, (value, _default(other))


def _default(value: Any) -> Any:
    return REQUIRED if value is PydanticUndefined else value.model_dump() if isinstance(value, Section) else value
