"""A metadata service on the loopback device, that says what a test tells it to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Said = tuple[int, str]


class Cloud:
    """Answers `answers[path]`, a status and a text or what returns them; 404 for every other path.

    With `needs_token` a question has to carry, in a header of that name, a token that was asked for.
    `asked` are the requests it got: method, path and headers.
    """

    def __init__(self, needs_token: str | None = None) -> None:
        self.answers: dict[str, Said | Callable[[], Said]] = {}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.tokens: list[str] = []
        self._needs_token = needs_token
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(cloud.answer("GET", self.path, dict(self.headers)))

            def do_PUT(self) -> None:
                self.answer(cloud.answer("PUT", self.path, dict(self.headers)))

            def answer(self, said: Said) -> None:
                body = said[1].encode()
                self.send_response(said[0])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Said:
        self.asked.append((method, path, headers))
        if method == "PUT":
            self.tokens.append(f"token-{len(self.tokens)}")
            return 200, self.tokens[-1]
        if self._needs_token is not None and headers.get(self._needs_token) not in self.tokens:
            return 401, ""
        said = self.answers.get(path, (404, "not found"))
        return said() if callable(said) else said

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def in_seconds(seconds: float) -> str:
    """The time that many seconds from now, as the services write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
