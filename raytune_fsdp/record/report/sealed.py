"""What a page has inside that nothing can break out of, and nothing else can be added to."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any


def embedded(value: Any) -> str:
    """JSON that cannot end the element it is in: `</script>` in a name is text."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def hash_of(text: str) -> str:
    """Of a script or a style, as a Content-Security-Policy names the only one that it lets run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
