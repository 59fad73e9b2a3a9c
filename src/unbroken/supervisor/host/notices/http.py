"""Asking a metadata service: plain HTTP to an address on this machine's own link.

Not by `http.client` or `urllib`: they bring TLS along, which is a third of the supervisor's memory, and
the latter asks proxies of the environment, which such an address must never be asked of.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a service answered."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace").strip()


class Metadata:
    """The service at `base_url`, such as "http://169.254.169.254"; `timeout_seconds` is for each wait."""

    def __init__(self, base_url: str, *, timeout_seconds: float) -> None:
        scheme, _, rest = base_url.partition("://")
        if scheme != "http" or not rest:
            raise ValueError(f"expected the address of a metadata service, http://HOST, found {base_url!r}")
        self._authority = rest.partition("/")[0]
        host, _, port = self._authority.partition(":")
        self._address = (host, int(port or 80))
        self.timeout_seconds = timeout_seconds

    def get(self, path: str, headers: Mapping[str, str] | None = None, *, extra_seconds: float = 0) -> Answer:
        """Ask for `path`; `extra_seconds` is how long the service may think. Raises OSError, ValueError."""
        return self._ask("GET", path, headers or {}, extra_seconds)

    def put(self, path: str, headers: Mapping[str, str]) -> Answer:
        """Send a PUT without a body. Raises OSError, ValueError."""
        return self._ask("PUT", path, {**headers, "Content-Length": "0"}, 0)

    def _ask(self, method: str, path: str, headers: Mapping[str, str], extra_seconds: float) -> Answer:
        fields = {"Host": self._authority, "Connection": "close", "Accept": "*/*", **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        timeout = self.timeout_seconds + extra_seconds
        with socket.create_connection(self._address, timeout=timeout) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            return parse_answer(_read_all(connection))


def parse_answer(received: bytes) -> Answer:
    """Return the answer in what came over a connection that its sender closed. Raises ValueError."""
    head, separator, body = received.partition(b"\r\n\r\n")
    first, *fields = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not separator or not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise ValueError(f"expected an answer in HTTP, found {received[:40]!r}")
    named = {}
    for field in fields:
        name, _, value = field.partition(":")
        named[name.strip().lower()] = value.strip().lower()
    if named.get("transfer-encoding") == "chunked":
        body = _joined(body)
    elif named.get("content-length", str(len(body))) != str(len(body)):
        raise ValueError(f"expected {named['content-length']} bytes, found {len(body)}")
    return Answer(status=int(rest[:3]), body=body)


def _joined(chunks: bytes) -> bytes:
    body = b""
    while True:
        size, _, chunks = chunks.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        if length == 0:
            return body
        if len(chunks) < length:
            raise ValueError(f"expected {length} bytes more, found {len(chunks)}")
        body += chunks[:length]
        chunks = chunks[length + 2 :]


def _read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while len(received) <= _LIMIT_BYTES:
        piece = connection.recv(1 << 16)
        if not piece:
            break
        received += piece
    return bytes(received)
