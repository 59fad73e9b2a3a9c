"""One kind of work shared by a few threads, for calls that let others run meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def share(act: Callable[[_T], object], items: Sequence[_T], *, threads: int) -> None:
    """Call `act` with each of `items`, in this thread and up to `threads - 1` others.

    Returns when all have ended, also when interrupted: they may be using what the caller then closes or
    frees. Raises the first error; what was not begun by then is not begun.
    """
    errors: list[BaseException] = []
    waiting = iter(items)
    helpers = [
        threading.Thread(target=_work, args=(act, waiting, errors), name="unbroken-share")
        for _ in range(min(threads, len(items)) - 1)
    ]
    started: list[threading.Thread] = []
    try:
        for helper in helpers:
            # No more threads on this machine, or for this user: the others do its share.
            if not _start(helper):
                break
            started.append(helper)
        _work(act, waiting, errors)
    except BaseException as error:  # noqa: BLE001 - raised again when all have ended
        errors.append(error)
    for helper in started:
        _wait_for(helper, errors)
    if errors:
        raise errors[0]


def _start(helper: threading.Thread) -> bool:
    try:
        helper.start()
    except RuntimeError:
        return False
    return True


def _wait_for(helper: threading.Thread, errors: list[BaseException]) -> None:
    while helper.is_alive():
        try:
            helper.join()
        except BaseException as error:  # noqa: BLE001 - raised again when all have ended
            errors.append(error)


def _work(act: Callable[[_T], object], waiting: Iterator[_T], errors: list[BaseException]) -> None:
    try:
        # One iterator for all: `next` on the iterator of a range or a list is atomic.
        for item in waiting:
            if errors:
                return
            act(item)
    except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
        errors.append(error)
