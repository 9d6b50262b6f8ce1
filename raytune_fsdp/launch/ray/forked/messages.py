"""What the processes of this room send each other over sockets of one machine: JSON, and open files."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any

KEPT, LATER, ENDS = b"kept", b"later", b"ends"
"""What a template answers to a driver that has not begun it: it stays; it would refuse its forks, and still has others;
it would, and makes room for another template."""
_FILES = 4
_PART = 1 << 16


def send(connection: socket.socket, message: object, files: Iterable[int] = ()) -> None:
    content = json.dumps(message).encode()
    socket.send_fds(connection, [len(content).to_bytes(4, "big")], list(files))
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Read one message, and the files that came with it; None at the end of the connection."""
    head, files, _, _ = socket.recv_fds(connection, 4, _FILES)
    left, parts, found = int.from_bytes(head, "big"), list[bytes](), None
    try:
        while left and (part := connection.recv(min(left, _PART))):
            parts.append(part)
            left -= len(part)
        if len(head) == 4 and not left:
            found = json.loads(b"".join(parts)), list(files)
    finally:
        if found is None:
            for each in files:
                os.close(each)
    return found


def user_of(connection: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])
