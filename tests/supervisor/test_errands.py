"""What the process beside the supervisor does: it sends, it compresses, and it says why it could not."""

from __future__ import annotations

import base64
import errno
import fcntl
import gzip
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.supervisor.side import errand_process

from .receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def test_a_user_and_a_password_in_the_address_are_sent_as_such(receiver: Receiver) -> None:
    url = receiver.url.replace("http://", "http://me:p%40ss@")
    errand_process.post(url, {"event": "held"})
    assert receiver.received == [{"event": "held"}]
    words = receiver.headers[0]["Authorization"].removeprefix("Basic ")
    assert base64.b64decode(words) == b"me:p@ss"
    assert receiver.headers[0]["Host"] == url.partition("@")[2].partition("/")[0]


def test_a_redirection_is_not_followed_but_reported(receiver: Receiver) -> None:
    moved = Receiver(moved_to=receiver.url)
    try:
        with pytest.raises(errand_process.NotDoneError) as caught:
            errand_process.post(moved.url, {"event": "held"})
    finally:
        moved.close()
    assert errand_process.reason_of(caught.value) == "HTTP status 302"
    assert receiver.asked == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://user:secret@127.0.0.1:secret/secret", "InvalidURL"),
        ("http://127.0.0.1/se\ncret", "InvalidURL"),
        ("http://127.0.0.1:1/secret", "ConnectionRefusedError: Connection refused"),
        ("http://[secret/", "ValueError"),
    ],
)
def test_why_nothing_was_sent_tells_no_secret(monkeypatch: pytest.MonkeyPatch, url: str, reason: str) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(Exception) as caught:
        errand_process.post(url, {"event": "held"})
    assert errand_process.reason_of(caught.value) == reason


def test_an_output_is_compressed_where_only_what_is_open_for_writing_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock_of_nfs(file: Any, _: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    log = tmp_path / "out.log"
    log.write_bytes(b"line\n" * 1000)
    errand_process.compress(str(log))
    assert not log.exists()
    assert gzip.decompress((tmp_path / "out.log.gz").read_bytes()) == b"line\n" * 1000


def test_nothing_is_compressed_where_the_next_attempt_needs_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(os.urandom(1 << 16))
    used = log.stat().st_blocks * 512
    free = SimpleNamespace(f_bavail=2 * used - 1, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    with pytest.raises(errand_process.NotDoneError, match=f"twice its {used} bytes to be free, found"):
        errand_process.compress(str(log))
    assert list(tmp_path.iterdir()) == [log]
    free.f_bavail += 1
    errand_process.compress(str(log))
    assert [path.name for path in tmp_path.iterdir()] == ["out.log.gz"]


def deliver(kind: str, to: object, notice: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """What the side process does with a notification, in a process of its own as there."""
    return subprocess.run(
        [sys.executable, "-I", "-S", errand_process.__file__, kind],
        input=json.dumps({"errand": kind, "to": to, "notice": notice}),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.chaos
def test_a_try_that_failed_is_repeated() -> None:
    receiver = Receiver(failures=1)
    try:
        assert deliver("webhook", receiver.url, {"event": "held"}).returncode == 0
    finally:
        receiver.close()
    assert receiver.received == [{"event": "held"}]


@pytest.mark.chaos
def test_what_fails_three_times_is_reported_with_the_reason() -> None:
    failed = deliver("command", ["sh", "-c", "echo no >&2; exit 3"], {"event": "held"})
    assert (failed.returncode, failed.stdout) == (1, "the command ended with 3\n")
    assert failed.stderr == "no\n" * 3
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    refused = deliver("webhook", f"http://127.0.0.1:{port}/", {"event": "held"})
    assert "refused" in refused.stdout
