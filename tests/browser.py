"""A Chromium that a test drives over its DevTools protocol, on two pipes: nothing to install, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "headless_shell"))), ""
)


class Browser:
    """One page of it, and everything that it has asked for or complained of."""

    def __init__(self, profile: Path) -> None:
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={profile}"]
        # It reads from 3 and writes to 4, whatever the numbers are here; shells redirect none above 9.
        given = [fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (theirs, answers)]
        become = (
            "import os, sys; [os.dup2(int(sys.argv[n]), n + 2) for n in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"
        )
        start = [sys.executable, "-S", "-c", become, *map(str, given), CHROMIUM, *flags]
        self._process = subprocess.Popen(start, pass_fds=given, stderr=subprocess.DEVNULL)
        for each in (theirs, answers, *given):
            os.close(each)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._buffer += more
        text, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, url: str, *, width: int = 1200, scheme: str = "light") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1300, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        place = json.dumps(url.partition("#")[0])
        self.wait(f"document.readyState === 'complete' && location.href.split('#')[0] === {place}")

    def picture(self, place: Path, *, most: int) -> None:
        """Take a picture of the page, of its first `most` pixels of height."""
        wide, high = self.value("[innerWidth, Math.ceil(document.body.getBoundingClientRect().bottom + scrollY)]")
        clip = {"x": 0, "y": 0, "width": wide, "height": min(high, most), "scale": 1}
        taken = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        place.write_bytes(base64.b64decode(taken["data"]))

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < until, expression
            time.sleep(0.05)

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                code = {"ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "Enter": 13, "Escape": 27}[key]
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    @property
    def requests(self) -> list[str]:
        """Addresses but those that are text themselves."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [each["params"] for each in self.events if each.get("method") in kinds]
