"""Write a safetensors file tensor by tensor, so that no more than one of them is in memory.

The format: eight bytes with the length of a JSON header, the header with type, shape and place of every tensor, then
the tensors without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {"F8_E8M0": torch.float8_e8m0fnu}
"""Types by the format's names for them."""
_CHUNK_BYTES = 4 << 20


class TensorFile:
    """A file that is written once. It keeps the hash of every tensor, so that it can be read back and compared."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, torch.dtype]) -> None:
        self._path = path
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        # Larger types first, so that every tensor begins at a multiple of the size of its numbers.
        for key in sorted(shapes, key=lambda key: -types[key].itemsize):
            start, end = end, end + torch.Size(shapes[key]).numel() * types[key].itemsize
            header[key] = {"dtype": _NAMES[types[key]], "shape": list(shapes[key]), "data_offsets": [start, end]}
            self._spans[key] = start, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # for alignment, too: offsets count from the end of the header
        self._head = len(text).to_bytes(8, "little") + text
        self._hashes: dict[str, str] = {}
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  closed by close()
        self._put(self._head, 0)

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Put a tensor of the announced shape and type where it belongs."""
        start, end = self._spans[key]
        content = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        assert content.nbytes == end - start, f"{key} has {content.nbytes} bytes, not {end - start}"
        self._hashes[key] = xxhash.xxh3_128_hexdigest(content)
        self._put(content, len(self._head) + start)

    def _put(self, content: bytes | memoryview, offset: int) -> None:
        view = memoryview(content)
        while view:  # one call writes at most 2 GiB on Linux, and less to a disk that is filling up
            written = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[written:], offset + written

    def close(self) -> None:
        """Close the file once storage has its content."""
        assert self._hashes.keys() == self._spans.keys(), "a tensor was not written"
        try:
            os.fsync(self._file.fileno())
            # Drop it from the system's cache, so that `differences` reads the disk. Only a hint: some file systems
            # ignore it.
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self._file.close()

    def differences(self) -> list[str]:
        """Read the file again; return the tensors that are not as they were written."""
        buffer = bytearray(_CHUNK_BYTES)
        with open(self._path, "rb", buffering=0) as file:
            wrong = [] if file.read(len(self._head)) == self._head else ["the header"]
            # Read in the order of the file.
            for key, (start, end) in self._spans.items():
                digest, left = xxhash.xxh3_128(), end - start
                while left and (got := file.readinto(memoryview(buffer)[: min(left, _CHUNK_BYTES)])):
                    digest.update(memoryview(buffer)[:got])
                    left -= got
                if left or digest.hexdigest() != self._hashes[key]:
                    wrong.append(key)
            return wrong + (["bytes after the end"] if file.read(1) else [])
