"""The process that runs errands for a supervisor: sends notifications, compresses closed outputs.

It is a file on its own that needs the standard library only, started as `python -I -S errand_process.py`. It
leaves the supervisor's descendants at once: a supervisor knows by having no child that nothing is left of
an attempt. Errands come as JSON lines on stdin, and how they went goes to stdout the same way. Each is run by
a child of its own, so that none waits for another. It ends when stdin is closed and all is done.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# So many at once, beside one compression; the others wait, and of those that wait the oldest are dropped.
_MOST_SENDING = 4
_MOST_WAITING = 100
_LOOK_SECONDS = 0.05
# Between three tries.
_PAUSES_SECONDS = (1.0, 3.0)
# Each try; apprise is slow to load.
_WEBHOOK_SECONDS = 5.0
_TRY_SECONDS = {"webhook": _WEBHOOK_SECONDS, "command": 30.0, "apprise": 15.0}
# A child that does not even keep to its own limits.
_LIMIT_SECONDS = {"compress": 6 * 3600.0}
_DEFAULT_LIMIT_SECONDS = 150.0
_COPY_BYTES = 1 << 20
# Free for each byte that is compressed: the next attempt has its state to save meanwhile.
_FREE_SHARE = 2


class NotDoneError(OSError):
    """An errand failed, in words of our own: those of others may quote an address with a secret in it."""


class Running:
    """An errand and the child that runs it."""

    def __init__(self, errand: dict[str, Any]) -> None:
        self.errand = errand
        self.ends_at = time.monotonic() + _LIMIT_SECONDS.get(errand["errand"], _DEFAULT_LIMIT_SECONDS)
        # Apprise is a package like any other; all else works also where the user's packages are broken.
        isolated = ["-P"] if errand["errand"] == "apprise" else ["-I", "-S"]
        self.child = subprocess.Popen(
            [sys.executable, *isolated, __file__, errand["errand"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.child.stdin is not None, "asked for a pipe"
        # It may be gone already, and then its exit status tells.
        with suppress(BrokenPipeError), self.child.stdin as pipe:
            pipe.write(json.dumps(errand).encode())

    def report(self) -> dict[str, Any] | None:
        """Return how it went, or None if it goes on."""
        if self.child.poll() is None:
            if time.monotonic() < self.ends_at:
                return None
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
        assert self.child.stdout is not None, "asked for a pipe"
        with self.child.stdout as pipe:
            said = pipe.read().decode(errors="replace").strip()
        problem = "" if self.child.returncode == 0 else said or f"ended with {self.child.returncode}"
        return {"id": self.errand["id"], "problem": problem}


def serve() -> None:
    """Run all errands that come, and return when there are no more."""
    running: list[Running] = []
    waiting: list[dict[str, Any]] = []
    rest, is_open = b"", True
    while is_open or waiting or running:
        if is_open and select.select([0], [], [], _LOOK_SECONDS if running else None)[0]:
            piece = os.read(0, 1 << 16)
            is_open = bool(piece)
            *lines, rest = (rest + piece).split(b"\n")
            waiting += [json.loads(line) for line in lines]
        elif not is_open:
            time.sleep(_LOOK_SECONDS)
        for errand in waiting[:-_MOST_WAITING]:
            tell({"id": errand["id"], "problem": "dropped: too many were waiting"})
        del waiting[:-_MOST_WAITING]
        running = [one for one in running if not finished(one)]
        for errand in list(waiting):
            alike = [one for one in running if is_compression(one.errand) == is_compression(errand)]
            if len(alike) < (1 if is_compression(errand) else _MOST_SENDING):
                waiting.remove(errand)
                running.append(Running(errand))


def is_compression(errand: dict[str, Any]) -> bool:
    return bool(errand["errand"] == "compress")


def finished(one: Running) -> bool:
    report = one.report()
    if report is not None:
        tell(report)
        if report["problem"]:
            what = one.errand.get("name") or one.errand.get("path")
            note(f"{what}: {report['problem']}")
    return report is not None


def tell(report: dict[str, Any]) -> None:
    # The supervisor is gone, or has not listened for long: the log has it.
    with suppress(OSError):
        os.write(1, json.dumps(report).encode() + b"\n")


def note(text: str) -> None:
    # The disk of the log may be full.
    with suppress(OSError):
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode(errors="replace"))


def run(errand: dict[str, Any]) -> None:
    """Run one errand, in a process of its own. Raises whatever prevents it."""
    if errand["errand"] == "compress":
        os.nice(19)
        compress(errand["path"])
        return
    senders: dict[str, Callable[[Any, dict[str, Any]], None]]
    senders = {"webhook": post, "command": call, "apprise": hand_to_apprise}
    send = senders[errand["errand"]]
    signal.signal(signal.SIGALRM, _too_late)
    for pause in (*_PAUSES_SECONDS, None):
        signal.setitimer(signal.ITIMER_REAL, _TRY_SECONDS[errand["errand"]])
        try:
            send(errand["to"], errand["notice"])
        except Exception:
            # Whatever a library raises, the next try is the answer to it.
            signal.setitimer(signal.ITIMER_REAL, 0)
            if pause is None:
                raise
            time.sleep(pause)
        else:
            return


def _too_late(_: int, __: object) -> None:
    raise TimeoutError


def post(url: str, notice: dict[str, Any]) -> None:
    import urllib.error
    import urllib.request

    class Plain(urllib.request.HTTPRedirectHandler):
        # It would go on by GET, and without the notice.
        def redirect_request(self, *_: Any) -> None:
            return None

    address, credentials = without_credentials(url)
    headers = {"Content-Type": "application/json", "User-Agent": "unbroken", **credentials}
    body = json.dumps(notice).encode()
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")  # noqa: S310
    try:
        with urllib.request.build_opener(Plain).open(request, timeout=_WEBHOOK_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        raise NotDoneError(f"HTTP status {error.code}") from error


def without_credentials(url: str) -> tuple[str, dict[str, str]]:
    """Return `url` without the user and password in it, and the header that carries them instead.

    >>> without_credentials("https://me:p%40ss@example.org/hook")
    ('https://example.org/hook', {'Authorization': 'Basic bWU6cEBzcw=='})
    """
    import base64
    from urllib.parse import unquote, urlsplit

    parts = urlsplit(url)
    before, separator, host = parts.netloc.rpartition("@")
    if not separator:
        return url, {}
    name, _, password = before.partition(":")
    words = f"{unquote(name)}:{unquote(password)}".encode()
    plain = parts._replace(netloc=host).geturl()
    return plain, {"Authorization": f"Basic {base64.b64encode(words).decode()}"}


def call(command: list[str], notice: dict[str, Any]) -> None:
    words = {f"UNBROKEN_NOTICE_{name.upper()}": text(value) for name, value in notice.items()}
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        # What it prints goes to the supervisor's log; stdout here is for the report.
        stdout=2,
        env={**os.environ, **words},
        start_new_session=True,
    )
    try:
        # A hook that reads nothing is as good.
        child.communicate(json.dumps(notice).encode())
    except TimeoutError:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    if child.returncode != 0:
        raise NotDoneError(f"the command ended with {child.returncode}")


def text(value: object) -> str:
    return "" if value is None else str(value)


def hand_to_apprise(url: str, notice: dict[str, Any]) -> None:
    import apprise

    service = apprise.Apprise()
    if not service.add(url):
        raise NotDoneError("apprise does not know this kind of address")
    if not service.notify(title=f"{notice['run']}: {notice['event']}", body=notice["text"]):
        raise NotDoneError("apprise could not deliver it")


def compress(path: str) -> None:
    """Put a gzip file in the place of a closed output; whenever it is killed, one of the two is whole."""
    import fcntl
    import gzip

    temporary = f"{path}.gz.new"
    # Open for writing, too: over NFS nothing else can be locked.
    with open(path, "r+b", buffering=0) as log:
        found = os.fstat(log.fileno())
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The process of an earlier supervisor of this run is at it.
            return
        if not os.path.exists(path):
            return
        space = os.statvfs(path)
        free, used = space.f_bavail * space.f_frsize, found.st_blocks * 512
        if free < _FREE_SHARE * used:
            raise NotDoneError(f"not compressed: expected twice its {used} bytes to be free, found {free}")
        start = os.lseek(log.fileno(), 0, os.SEEK_DATA)
        os.lseek(log.fileno(), start, os.SEEK_SET)
        if start:
            write_durably(f"{path.removesuffix('.log')}.start", str(start).encode())
        try:
            with open(temporary, "wb") as file:
                with gzip.GzipFile("", "wb", 6, fileobj=file, mtime=0) as archive:
                    while piece := log.read(_COPY_BYTES):
                        archive.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.utime(temporary, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.replace(temporary, f"{path}.gz")
        except BaseException:
            # What went wrong first is what counts.
            with suppress(OSError):
                os.unlink(temporary)
            raise
        # Still with the lock: whoever takes it next finds the output gone.
        sync_directory(os.path.dirname(path))
        os.unlink(path)


def write_durably(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason_of(error: BaseException) -> str:
    """Return why an errand failed, for a journal that others may read: nothing that quotes an address.

    >>> reason_of(ValueError("https://example.org/secret")), reason_of(ConnectionRefusedError(111, "refused"))
    ('ValueError', 'ConnectionRefusedError: refused')
    """
    if isinstance(error, NotDoneError):
        return str(error)
    # What the network said, within an error of urllib.
    inner = getattr(error, "reason", None)
    cause = inner if isinstance(inner, OSError) else error
    words = cause.strerror if isinstance(cause, OSError) else None
    return ": ".join(filter(None, (type(cause).__name__, words)))


def main(arguments: list[str]) -> int:
    if arguments:
        try:
            run(json.loads(sys.stdin.buffer.read()))
        except Exception as error:  # noqa: BLE001 - the report is what says so
            print(reason_of(error))
            return 1
        return 0
    if os.fork() == 0:
        os.setsid()
        # A supervisor that does not listen must not make us wait.
        os.set_blocking(1, False)
        serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
