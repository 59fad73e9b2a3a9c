"""A receiver of webhooks."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """A real HTTP server on the loopback that keeps what it is sent."""

    def __init__(self, *, failures: int = 0, moved_to: str | None = None) -> None:
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked: list[str] = []
        self.failures = failures
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.asked.append(self.path)
                receiver.failures -= 1
                is_taken = receiver.failures < 0 and moved_to is None
                if is_taken:
                    receiver.received.append(json.loads(body))
                    receiver.headers.append(dict(self.headers))
                self.send_response(204 if is_taken else 500 if moved_to is None else 302)
                if moved_to is not None:
                    self.send_header("Location", moved_to)
                self.end_headers()

            def do_GET(self) -> None:
                receiver.asked.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/secret"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
