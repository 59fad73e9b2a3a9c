"""Requests to stop: what several of them make together, and which signals are one."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from unbroken.cli.stop import ask_to_stop
from unbroken.errors import StorageFullError
from unbroken.rundir.control import read_stop, request_stop
from unbroken.rundir.last_words import LastWords
from unbroken.rundir.processes import identify_self
from unbroken.supervisor import stopping
from unbroken.supervisor.asking import is_file_enough
from unbroken.supervisor.stopping import StopWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("ending", "trainer", "expected"),
    [
        (None, None, False),
        ("running", None, False),
        # The leader trains itself.
        ("running", 7, False),
        ("stopped", 7, True),
        # It runs what trains.
        ("running", 9, True),
        ("stopped", 9, False),
    ],
)
def test_whether_the_stop_file_is_enough(ending: Any, trainer: int | None, expected: bool) -> None:
    words = LastWords(ending=ending, step=1) if ending is not None else None
    assert is_file_enough(words, trainer=trainer, leader=7) is expected


class Asked(NamedTuple):
    """Two requests, each with its reason, its seconds and whether it is a preemption; and what they make."""

    first: tuple[str, float, bool]
    second: tuple[str, float, bool]
    expected: tuple[str, float, bool]


@pytest.mark.parametrize(
    "case",
    [
        Asked(("person", 100, False), ("machine", 10, True), ("person", 10, False)),
        Asked(("person", 10, False), ("machine", 100, True), ("person", 10, False)),
        Asked(("machine", 10, True), ("person", 100, False), ("person", 10, False)),
        Asked(("machine", 100, True), ("person", 10, False), ("person", 10, False)),
        Asked(("notice", 100, True), ("signal", 10, True), ("signal", 10, True)),
        Asked(("notice", 10, True), ("signal", 100, True), ("notice", 10, True)),
        Asked(("patient", 100, False), ("now", 0, False), ("now", 0, False)),
        Asked(("now", 0, False), ("patient", 100, False), ("now", 0, False)),
    ],
)
@pytest.mark.parametrize("is_disk_full", [False, True])
def test_a_second_request_never_gives_more_time_and_a_person_stays_the_one_who_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Asked, is_disk_full: bool
) -> None:
    watch = StopWatch(tmp_path, grace_seconds=60)
    begun = time.time()
    for reason, seconds, is_preemption in (case.first, case.second):
        watch.ask(reason, seconds, is_preemption=is_preemption)
        if is_disk_full:
            monkeypatch.setattr(stopping, "request_stop", refuse)
    assert watch.wait(0)
    assert watch.request is not None
    assert watch.is_written is not is_disk_full
    if not is_disk_full:
        assert read_stop(tmp_path) == watch.request
    assert watch.request.deadline_seconds is not None
    left = watch.request.deadline_seconds - begun
    reason, seconds, is_preemption = case.expected
    assert (watch.request.reason, watch.request.is_preemption) == (reason, is_preemption)
    assert seconds <= left < seconds + 9


def refuse(*_: object, **__: object) -> None:
    raise StorageFullError("write: no space left", hint="")


def test_the_command_line_says_how_much_time_there_really_is(tmp_path: Path) -> None:
    gone = replace(identify_self(), start_ticks=1)
    assert ask_to_stop(tmp_path, gone, reason="preemption", seconds=20) == 20
    assert 19 < ask_to_stop(tmp_path, gone, reason="unbroken stop", seconds=600) <= 20
    assert ask_to_stop(tmp_path, gone, reason="unbroken stop", seconds=0) == 0
    assert ask_to_stop(tmp_path, gone, reason="unbroken stop", seconds=9) == 0


@pytest.fixture
def send() -> Iterator[Callable[[signal.Signals], None]]:
    """Sends a signal to this thread, where it waits as it does for a supervisor."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    yield lambda number: signal.pthread_kill(threading.get_ident(), number)
    while signal.sigtimedwait({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}, 0):
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize(
    ("number", "is_news"), [(signal.SIGTERM, True), (signal.SIGUSR1, True), (signal.SIGINT, False)]
)
def test_a_signal_of_an_engine_shortens_the_stop_that_a_person_asked_for(
    tmp_path: Path, send: Callable[[signal.Signals], None], number: signal.Signals, is_news: bool
) -> None:
    request_stop(tmp_path, reason="unbroken stop", deadline_seconds=time.time() + 600)
    watch = StopWatch(tmp_path, grace_seconds=30, engine="Slurm")
    assert watch.wait(0)
    send(number)
    assert watch.wait(0) is is_news
    assert watch.request is not None
    assert (watch.request.reason, watch.request.is_preemption) == ("unbroken stop", False)
    assert watch.request.deadline_seconds is not None
    assert (watch.request.deadline_seconds < time.time() + 31) is is_news
