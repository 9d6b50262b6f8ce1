"""A user's mark on a list: a hash of the list, made with a key that nobody else has.

The key is in the user's config directory. If that cannot be written, as for some users in containers, the key is in a
directory of the user's own among the temporary files, and lasts as long as the container does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytune_fsdp.base.untrusted import MIB, open_regular, parse_json, read_file

MOST_BYTES = MIB
_MOST_MARKS = 16
_KEY_FILE, _KEY_BYTES = "mark.key", 32
_ABOUT = (
    "Written by raytune_fsdp: the places that the files of this run name, and a mark of each user who has trained it "
    "there. Commands follow the run to no other place without --trust-places."
)


def made_with(named: Iterable[str]) -> dict[str, Any] | None:
    """Return this user's mark on a list; None if there is no key and none can be made."""
    key = next(_keys(), None) or _new_key()
    places = sorted(named)
    if key is None:
        return None
    return {"by": hashlib.sha256(b"name:" + key).hexdigest()[:16], "places": places, "mac": _mac(key, places)}


def with_mark(content: bytes, mark: Mapping[str, Any]) -> str:
    """Return the new content of a run's file of marks: this mark replaces its user's earlier one, others' stay."""
    others = [each for each in _marks(content) if each.get("by") != mark["by"]]
    return json.dumps({"format": 1, "about": _ABOUT, "marks": [*others[-(_MOST_MARKS - 1) :], mark]}, indent=1)


def chosen_in(content: bytes) -> set[str]:
    """Return what is on the lists that carry this user's mark, in the content of a file of marks."""
    chosen: set[str] = set()
    for key in _keys():
        for mark in _marks(content):
            places, mac = mark.get("places"), mark.get("mac")
            if not isinstance(places, list) or not all(isinstance(each, str) for each in places):
                continue
            if isinstance(mac, str) and hmac.compare_digest(_mac(key, places).encode(), mac.encode()):
                chosen.update(places)
    return chosen


def chosen_by_this_user(file: Path) -> set[str]:
    """Return what is on the lists that carry this user's mark in a file; nothing if it cannot be read."""
    with suppress(OSError, ValueError):
        return chosen_in(read_file(file, limit=MOST_BYTES))
    return set()


def _marks(content: bytes) -> list[dict[str, Any]]:
    with suppress(ValueError):
        found = parse_json(content)
        marks = found.get("marks") if isinstance(found, dict) else None
        return [each for each in marks if isinstance(each, dict)][:_MOST_MARKS] if isinstance(marks, list) else []
    return []


def _mac(key: bytes, places: list[str]) -> str:
    return hmac.new(key, json.dumps(["places", 1, sorted(places)]).encode(), hashlib.sha256).hexdigest()


def _homes() -> Iterator[Path]:
    """Yield the places where this user's key may be, the best first."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    with suppress(RuntimeError):  # a user without a name and a home
        yield (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "raytune_fsdp"
    yield Path(tempfile.gettempdir()) / f"raytune_fsdp-{os.geteuid()}"


def _keys() -> Iterator[bytes]:
    for home in _homes():
        with suppress(OSError, ValueError):
            if _is_own(home):
                yield _read(home / _KEY_FILE)


def _new_key() -> bytes | None:
    for home in _homes():
        with suppress(OSError, ValueError):
            home.parent.mkdir(parents=True, exist_ok=True)
            home.mkdir(mode=0o700, exist_ok=True)
            if _is_own(home):
                return _made(home / _KEY_FILE)
    return None


def _made(file: Path) -> bytes:
    """Return a new key, or the one that another process has made meanwhile."""
    own = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(own, flags, 0o600), "wb", buffering=0) as made:
        made.write(secrets.token_hex(_KEY_BYTES).encode())
        os.fsync(made.fileno())
    try:
        with suppress(FileExistsError):
            os.link(own, file)
    except OSError:  # a file system without hard links
        if not file.exists():
            os.rename(own, file)
    finally:
        own.unlink(missing_ok=True)
    with suppress(ValueError):
        return _read(file)
    file.unlink()  # the file holds no key, and never was one of ours
    return _made(file)


def _read(file: Path) -> bytes:
    handle = open_regular(file)
    with os.fdopen(handle, "rb") as source:
        key = bytes.fromhex(source.read(4 * _KEY_BYTES).decode("ascii"))
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{file} is no key")
    return key


def _is_own(home: Path) -> bool:
    """Return whether nobody else can put a key there.

    The user's own config directory is the user's affair. Among temporary files anybody could have made a directory of
    this name.
    """
    if home.parent != Path(tempfile.gettempdir()):
        return home.is_dir()
    facts = home.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
