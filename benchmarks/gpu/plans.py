"""What `raytune-fsdp plan` said of each piece that trains, before anybody had measured it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("plans.json")

STARTING, COMPILING, OTHERS = 15.0, 45.0, 4.0
"""Seconds that a piece takes beside its steps, by a guess: until the first of them; for the graphs of compiled layers;
and how many more steps than the measured ones it takes, profiled ones included."""


@dataclass(frozen=True, slots=True)
class Plans:
    """Plans by the names of pieces, and then of cards. Empty: nothing was planned."""

    pieces: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path = FILE) -> Plans:
        return cls(json.loads(file.read_text(encoding="utf-8"))["pieces"])

    def of(self, piece: str, device: str) -> Mapping[str, Any] | None:
        """Return the plan of a piece on this device, as torch calls it; None: there is none."""
        known = self.pieces.get(piece, {}).get("cards", {})
        return next((plan for card, plan in known.items() if card in device), None)

    def gib(self, piece: str) -> float:
        """Return the least memory that tensors need at the peak of a step on any card; 0: nobody knows."""
        known = self.pieces.get(piece, {}).get("cards", {})
        return min((float(plan["tensors_gib"]) for plan in known.values()), default=0.0)

    def seconds(self, piece: str, device: str, asked: Mapping[str, Any]) -> float | None:
        """Return how long the whole piece may take; None: nobody knows."""
        plan = self.of(piece, device)
        if plan is None:
            return None
        steps = asked["steps"] + 5 + OTHERS
        return STARTING + COMPILING * bool(asked["compiled"]) + steps * float(plan["step_seconds"])
