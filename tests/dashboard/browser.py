"""A real browser without a window, asked over a pipe in its own protocol; nothing else is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-quic", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
# Of a loaded machine: a page takes less than a second.
_PATIENCE_SECONDS = 60.0


class Browser:
    """Shows one page at a time. `asked` are the addresses it wanted, `said` what it complained of."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # It reads from descriptor 3 and writes to 4. First out of the way: they may be among those.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser, from_browser)]
        nowhere = [(os.POSIX_SPAWN_OPEN, end, os.devnull, os.O_RDWR, 0) for end in (0, 1, 2)]
        self._process_id = os.posix_spawn(
            BINARY,
            [BINARY, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            os.environ,
            file_actions=[
                *nowhere,
                *((os.POSIX_SPAWN_DUP2, end, place) for end, place in zip(ends, (3, 4), strict=True)),
            ],
            setsid=True,
        )
        for end in (*ends, to_browser, from_browser):
            os.close(end)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.asked: list[str] = []
        self.said: list[str] = []
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call("Page.setLifecycleEventsEnabled", enabled=True)

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Show the page at `path` in a window that is `width` pixels wide; a narrow one is a telephone's."""
        self.asked.clear()
        self.said.clear()
        self._events.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        loader = self._call("Page.navigate", url=path.as_uri())["loaderId"]
        # Not only "load": that of an earlier page may still be on its way.
        self._await("Page.lifecycleEvent", name="load", loaderId=loader)

    def look(self, expression: str) -> Any:
        """Return what `expression` gives in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page to `path`."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """End the browser and all its processes."""
        os.close(self._to)
        os.killpg(self._process_id, signal.SIGKILL)
        os.waitpid(self._process_id, 0)
        os.close(self._from)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        call: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            call["sessionId"] = self._session
        os.write(self._to, json.dumps(call).encode() + b"\0")
        answer = self._next(lambda message: message.get("id") == self._number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _await(self, method: str, **parameters: Any) -> None:
        """Return once an event with these parameters has come, also before a call was answered."""

        def is_it(message: dict[str, Any]) -> bool:
            return message.get("method") == method and parameters.items() <= message["params"].items()

        if not any(map(is_it, self._events)):
            self._next(is_it)

    def _next(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            message = self._read(deadline)
            if is_it(message):
                return message

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"the browser said nothing of what was waited for in {_PATIENCE_SECONDS} s"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.said.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.said.append(parameters["entry"]["text"])
            case "Page.lifecycleEvent":
                self._events.append(message)
        return message
