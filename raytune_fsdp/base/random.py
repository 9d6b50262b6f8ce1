"""Randomness that is looked up, never drawn: a key for each tuple of numbers and names, the same in every process.

The keys must never change unless ORDER_VERSION (data/mixture.py) is raised: the order of every run follows from them.
"""

from __future__ import annotations

import xxhash

_MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Scramble a 64-bit integer (a bijection): the finalizer of splitmix64."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def derive_key(*parts: int | str) -> int:
    """Return a 64-bit key for this tuple of integers and strings; no two different tuples share an encoding."""
    encoded = bytearray()
    for part in parts:
        kind, body = (b"s", part.encode()) if isinstance(part, str) else (b"i", str(int(part)).encode())
        encoded += kind + str(len(body)).encode() + b":" + body + b","
    return xxhash.xxh3_64_intdigest(bytes(encoded))
