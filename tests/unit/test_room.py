"""How much memory there is for the copies of a save."""

from __future__ import annotations

from raytune_fsdp.checkpoint.room import _worst


def test_the_node_that_lacks_most() -> None:
    one, other = ("node", "boot"), ("node", "another boot")
    assert _worst([(one, 60, 100), (other, 60, 100)]) is None
    assert _worst([(one, 60, 100), (one, 60, 90)]) == {"node": "node", "wanted": 120, "free": 90}
    assert _worst([(one, 60, 100), (other, 60, 50), (one, 20, 100)]) == {"node": "node", "wanted": 60, "free": 50}
