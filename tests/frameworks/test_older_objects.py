"""A loader that is built after a moment is told from one that was there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from unbroken.frameworks.older_objects import OlderObjects


class Items:
    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


def build() -> DataLoader[int]:
    return DataLoader(range(4), generator=torch.Generator())  # type: ignore[arg-type]


def test_what_is_built_later_is_younger() -> None:
    before = [build(), Items()]
    older = OlderObjects()
    after = [build(), Items()]

    assert [older.lack(value) for value in before] == [False, False]
    assert [older.lack(value) for value in after] == [True, True]


def test_an_object_in_the_place_of_one_that_is_gone_is_younger() -> None:
    gone = Items()
    older = OlderObjects()
    place = id(gone)
    del gone
    several = [Items() for _ in range(50)]

    assert place in {id(value) for value in several}
    assert all(older.lack(value) for value in several)


def test_nothing_is_kept_alive() -> None:
    value = Items()
    older = OlderObjects()
    ref = weakref.ref(value)
    del value
    gc.collect()

    assert ref() is None
    assert not older.lack([1, 2])
