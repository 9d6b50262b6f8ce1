"""What a chat template does around each turn of the assistant, so that a conversation is not rendered for every turn.

Where a turn begins and ends follows from a rendering of the conversation up to it (`turns.py`), so one of 800 turns
would take a hundred times as long as one of 80. But a template does the same around every turn that looks the same: the
same text in front of it and behind it, after the same kind of message. So what was found for one such turn holds for
the others. It is learned from conversations of our own, once for each template, and otherwise from the conversation
itself: after two turns that look the same and are the same. It never comes from other rows, so a row's mask depends on
nothing but the row.

A template could break this rule, so some rows of each dataset are rendered both ways beforehand (`data/trial.py`). If
they differ, all of its rows are rendered turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Key = tuple[Any, ...]
"""What a turn looks like."""


@dataclass(slots=True, eq=False)
class Habits:
    """What is known of turns, by what they look like."""

    _known: Mapping[Key, Any] = field(default_factory=dict)
    is_by_turn: bool = False
    """Whether no turn is known: each is rendered."""
    names_calls_by_id: bool = False
    """Whether the template writes the ids of calls instead of their names, as Kimi's does."""
    open_ended: bool = False
    """Whether nothing ends a turn but what follows it."""
    wants_text: bool = False
    """Whether the template prints the arguments of calls as they are, so that they must be JSON text."""
    _seen: dict[Key, list[Any]] = field(default_factory=dict, init=False)

    def of_row(self, *, alike: bool) -> Habits:
        """Return what is known when a row begins. `alike`: it has no text that the template looks for."""
        return replace(self, _known=self._known if alike else {})

    def by_turn(self) -> Habits:
        """Return the same template's, of which no turn is known."""
        return replace(self, _known={}, is_by_turn=True)

    def learned(self) -> Habits:
        """Return what was found, where it was always the same, as known."""
        same = {key: seen[0] for key, seen in self._seen.items() if all(each == seen[0] for each in seen)}
        return replace(self, _known=same, is_by_turn=False)

    def known(self, key: Key) -> Any:
        """Return what is known of this, or None."""
        return self._known.get(key)

    def ask(self, key: Key, find: Callable[[], Any]) -> Any:
        """Return what is known of turns that look like this, or find it."""
        if key in self._known:
            return self._known[key]
        seen = self._seen.setdefault(key, [])
        if len(seen) == 2 and seen[0] == seen[1] and not self.is_by_turn:
            return seen[0]
        value = find()
        if len(seen) < 2:
            seen.append(value)
        elif value != seen[0]:  # only where each turn is rendered
            seen[:] = [seen[0], value]
        return value
