"""Runs over data that are cut off, killed and resumed, with a ledger of what they consumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unbroken

Ledger = list[str]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def consumed(
    directory: Path,
    build: Callable[[], Any],
    *,
    epochs: int = 2,
    stop_at: int | None = None,
    evaluate: Callable[[], object] | None = None,
    **parts: Any,
) -> Ledger:
    """Train over what `build` gives; leave by an exception at the batch after `stop_at` of this attempt.

    The state of the step before is saved then: it was captured as the loop asked for that batch.
    """
    loader, ledger = build(), Ledger()
    try:
        with unbroken.Run(directory, save=[unbroken.EverySteps(1)], background=False, **parts) as run:
            for epoch in run.epochs(epochs):
                for batch in run.batches(loader):
                    if len(ledger) == stop_at:
                        raise InterruptedError
                    ledger.append(f"{epoch}: {batch}")
                    # As training does.
                    ledger[-1] += f" {random.random():.6f} {float(torch.rand(())):.6f}"
                    if evaluate is not None and len(ledger) % 3 == 0:
                        evaluate()
                    run.step()
    except InterruptedError:
        pass
    return ledger


def cut_often(directory: Path, build: Callable[[], Any], stops: Sequence[int], **options: Any) -> Ledger:
    """Return the ledger of attempts that are cut off after so many batches each, and of one to the end."""
    ledger = Ledger()
    for number, stop_at in enumerate([*stops, None]):
        seed(0 if not number else 100 + number)
        ledger += consumed(directory, build, stop_at=stop_at, **options)
    return ledger


def whole(directory: Path, build: Callable[[], Any], **options: Any) -> Ledger:
    """Return the ledger of a run that nothing disturbs."""
    seed(0)
    return consumed(directory, build, **options)


class Cursor:
    """Its own iterator, with a state; begins anew after its end."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.next == self.count:
            self.next = 0
            raise StopIteration
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Shuffled(Cursor):
    """Iterated by a generator function, in an order that depends on its epoch."""

    def __init__(self, count: int = 10) -> None:
        super().__init__(count)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        while self.next < self.count:
            self.next += 1
            yield order[self.next - 1]
        self.next, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.epoch = state["next"], state["epoch"]


class FromItsEnd(Cursor):
    """Keeps its position at the end: the first pass after a restore is the empty rest, and then all anew."""

    def __init__(self, count: int = 10) -> None:
        super().__init__(count)
        self.begin_at = 0

    def __iter__(self) -> Iterator[int]:
        first, self.begin_at = self.begin_at, 0
        for index in range(first, self.count):
            self.next = index + 1
            yield index

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at = self.next = state["next"]


class Steps:
    """The iterator has the state, not what gives it."""

    def __init__(self) -> None:
        self.order = random.Random(3)
        self.left = list(range(10))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop(self.order.randrange(len(self.left)))

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "order": self.order.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])
        self.order.setstate(state["order"])


class GivesSteps:
    def __iter__(self) -> Iterator[int]:
        return Steps()


class Again:
    """Without a state, begins anew each time, and shuffles by a generator that it holds."""

    def __init__(self) -> None:
        self.rng = random.Random(8)

    def __iter__(self) -> Iterator[int]:
        order = list(range(10))
        while order:
            yield order.pop(self.rng.randrange(len(order)))
