"""Whether another model is what it was when a run began, and what it has said, too: by their digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from raytune_fsdp.base.collectives import on_rank0
from raytune_fsdp.base.errors import OtherRunError, ResumeError
from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.run.described import computed_on
from raytune_fsdp.run.fetching import Say, brought
from raytune_fsdp.run.reference.network import MORE, decided_by
from raytune_fsdp.run.starting_weights import ReferenceModel, fill_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDigest:
    """Digests of a model and of how it computes, joined by a hyphen."""

    of: str
    older: str
    """The same as older versions wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBy:
    """By which digests of a model, and of how it computes, what it has said is kept for a run."""

    first: str
    """That with which the run began."""
    also: tuple[str, ...] = ()
    """Those of later attempts that computed something where one computes otherwise."""
    now: str
    """That of this attempt. Whatever it computes is kept by this, so no other run takes it for what it is not."""

    @classmethod
    def of(cls, first: Any, also: Any, now: str) -> KeptBy:
        """Return those of a run whose checkpoint has these entries. `now`: a digest, or of how is computed alone."""
        if not isinstance(first, str):
            return cls(first=now, now=now)
        which, _, _ = first.partition("-")
        others = also if isinstance(also, list) else []
        return cls(first=first, also=tuple(map(str, others)), now=f"{which}-{now.rpartition('-')[2]}")

    @property
    def every(self) -> list[str]:
        """All of them; that of this attempt is the last."""
        return [*(each for each in (self.first, *self.also) if each != self.now), self.now]

    def record(self, of: str, also: str, *, used: bool) -> dict[str, Any]:
        """Return the entries of a checkpoint. `used`: whether something is kept by that of this attempt."""
        more = [self.now] if used and self.now not in (self.first, *self.also) else []
        return {of: self.first, **({also: [*self.also, *more]} if self.also or more else {})}


def digest_now(model: ReferenceModel, identity: Mapping[str, Any], how: Mapping[str, Any], say: Say) -> ModelDigest:
    """Return the digest of a model, and of how rank 0 computes with it, as they are now. Collective.

    `identity`: the run's.
    """
    origin, adapter = brought(model.config, model.origin, model.adapter, say)
    alone = fill_mode(model.config, origin, adapter) == "rank0"
    which = decided_by(model, identity, origin, adapter, alone=alone)
    same, older = digest_of_how(how), {key: value for key, value in which.items() if key != MORE}
    return ModelDigest(of=f"{_hash(which)}-{same}", older=f"{_hash(older)}-{same}")


def digest_of_how(how: Mapping[str, Any]) -> str:
    """Return the digest of how rank 0 computes. Collective."""
    return _hash(on_rank0(lambda: how, what="find out what it computes with"))


def _hash(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def how_computed(config: FinetuneConfig, device: torch.device) -> dict[str, Any]:
    """Return what decides the last digits of values, but for what the network itself decides."""
    parallel, computed = config.parallel, computed_on(device, {})
    if not config.run.exact:  # ranks have other threads at each world, and only exact runs keep theirs
        del computed["threads"]
    return {
        **computed, "precision": parallel.precision, "fp8_scaling": parallel.fp8_scaling, "tf32": parallel.tf32,
        "mesh": [parallel.mesh.sequence, parallel.mesh.tensor], "micro_batch": config.train.micro_batch,
        "attention": config.model.attention, "loss": config.model.loss,
    }  # fmt: skip


def check_unchanged(before: str, now: ModelDigest, problem: str) -> None:
    """Refuse another model than that of the digest from before, however either computes."""
    if before.partition("-")[0] not in (now.of.partition("-")[0], now.older.partition("-")[0]):
        raise OtherRunError(
            f"{problem}: its files have changed since the run began; put these back, or choose another run.name"
        )


def same_values(before: Mapping[str, str], now: Mapping[str, str], where: Path, what: str) -> dict[str, str]:
    """Return the digests of all values that a run has ever used, by name. Refuse others than checkpoints name."""
    for name, digest in now.items():
        if before.get(name, digest) != digest:
            raise ResumeError(
                f"{where / name}: {what} are not those that this run began with: they were computed again, with "
                "other kernels or on another kind of device, and it would not be the same run; restore the file from "
                "before, or start again under another run.name"
            )
    return {**before, **now}
