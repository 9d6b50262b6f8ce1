"""Paths and URLs as text: tell them apart, and leave out what must not be shown."""

from __future__ import annotations

import re

_SECRET_OPTION = re.compile(r"[?&#][^=&#]*(secret|token|password|key)[^=&]*=", re.IGNORECASE)


def is_url(place: str) -> bool:
    """Return whether a place is in an object store or the like, not a path of a mounted file system."""
    return "://" in place


def split_query(url: str) -> tuple[str, str]:
    """Split a URL from the options after it. A `?` alone is a wildcard."""
    found = re.search(r"\?\w[\w.-]*=", url)
    return (url[: found.start()], url[found.start() :]) if found else (url, "")


def without_secrets(url: str) -> str:
    """Return the URL without what may be a password: the user before the host, and the options. Paths stay as is."""
    return without_user(split_query(url)[0]) if is_url(url) else url


def without_user(url: str) -> str:
    """Return the URL without the user and the password before its host. Paths stay as is."""
    if not is_url(url):
        return url
    url, options = split_query(url)
    scheme, rest = url.split("://", 1)
    place = rest.partition("/")[0]
    end = place.rfind("@")
    _, colon, port = (place.rpartition("]")[2] if place.startswith("[") else place).partition(":")
    # A password may have slashes, as many keys of AWS do. What follows the colon is a password unless it is a port, and
    # buckets have no port.
    if end < 0 and colon and (scheme in ("s3", "gs") or not port.isdigit()):
        end = rest.find("@")
    return f"{scheme}://{rest[end + 1 :]}{options}"


def _user_of(url: str) -> str:
    """Return what `without_user` leaves out."""
    return url.split("://", 1)[1][: len(url) - len(without_user(url))]


def holds_credentials(place: str) -> bool:
    """Return whether a path or URL contains a password, a key or a token."""
    scheme, _, rest = place.rpartition("://")
    host = rest.split("/")[0]
    # Buckets have neither a port nor a user. Elsewhere a name before @ may belong to the place (abfs).
    secret = any(c in host for c in ":@") if scheme in ("s3", "gs", "gcs") else ":" in host.rpartition("@")[0]
    # A password with a slash is not found in the host, which ends at the slash.
    return bool(scheme and (secret or ":" in _user_of(place) or _SECRET_OPTION.search(rest)))
