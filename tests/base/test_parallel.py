"""Work shared by threads: all of it is done, or the first error is raised when nobody is at it any more."""

from __future__ import annotations

import threading

import pytest

from unbroken.storage.parallel import share


@pytest.mark.parametrize("threads", [1, 2, 4, 50])
def test_each_item_is_done_once(threads: int) -> None:
    done: list[int] = []
    share(done.append, range(1000), threads=threads)
    assert sorted(done) == list(range(1000))


def test_nothing_to_do_is_done() -> None:
    share(lambda item: pytest.fail(str(item)), [], threads=4)


def test_an_error_is_raised_when_all_have_ended_and_what_was_not_begun_is_left() -> None:
    done: list[int] = []

    def act(item: int) -> None:
        if item == 10:
            raise ZeroDivisionError
        done.append(item)

    with pytest.raises(ZeroDivisionError):
        share(act, range(100_000), threads=4)
    assert len(done) < 100_000
    assert not [thread for thread in threading.enumerate() if thread.name == "unbroken-share"]


def test_where_no_more_threads_can_be_had_this_one_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    share(done.append, range(100), threads=4)
    assert done == list(range(100))
