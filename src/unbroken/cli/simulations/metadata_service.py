"""The metadata service of a cloud, on the loopback device: it announces an interruption when told to."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_INTERRUPTION = "/latest/meta-data/spot/instance-action"
_TOKEN = b"token"


@contextmanager
def metadata_service(interrupted_at: Callable[[], float | None]) -> Iterator[str]:
    """Answer as Amazon's service does meanwhile, and yield the address.

    `interrupted_at()` is when the machine is going to be taken away (seconds since 1970), None if it is not.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._answer(200, _TOKEN)

        def do_GET(self) -> None:
            at = interrupted_at() if self.path == _INTERRUPTION else None
            if at is None:
                self._answer(404, b"")
                return
            time = datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._answer(200, json.dumps({"action": "terminate", "time": time}).encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing: what was asked is in the run's own journal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
