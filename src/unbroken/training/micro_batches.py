"""A batch in parts: less memory at once, and the gradient of the whole batch all the same."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from unbroken.errors import StorageError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.files import write_json
from unbroken.rundir.tell import tell

# Values that say something about a whole batch, or about one sample of a list.
_PLAIN = (str, bytes, int, float, complex, type(None))
_HINT = (
    "hand in tensors, or lists of plain values, of one length; split samples that are tensors of their own "
    "by their numbers: `for part, share in run.micro_batches(list(range(len(samples))))`"
)


class MicroBatches:
    """Splits the batches of an attempt, and says in its `directory` that it can.

    A supervisor asks nobody else for it: a script that cannot split would be told in vain.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._halvings = halvings_wanted()
        self._most_samples = 0

    def of(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """Yield the parts of `batch`, each with its share of it. Raises UsageError if it cannot be split."""
        samples = count_samples(batch)
        if samples > self._most_samples:
            self._most_samples = samples
            self._say()
        yield from split(batch, samples, 2**self._halvings)

    def _say(self) -> None:
        mark = {"halvings": self._halvings, "samples": self._most_samples}
        try:
            write_json(self._directory / layout.MICRO_BATCHES_FILE, mark, durable=False)
        except StorageError as error:
            # Training needs it not; only a later attempt may.
            tell(f"that batches can be split is not on record: {error.message}")


def halvings_wanted() -> int:
    """Return how often batches are to be halved, as the supervisor, or the user, has said."""
    text = os.environ.get(layout.HALVINGS_VARIABLE, "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def in_words() -> list[str]:
    """Return what is to be said of it at the start of a run, in lines."""
    halvings = halvings_wanted()
    if not halvings:
        return []
    parts = 2**halvings
    return [f"micro-batches: each batch is computed in {parts} parts, not bit-exact with one that is whole"]


def count_samples(batch: Any) -> int:
    """Return the number of samples in `batch`: the length that all of its tensors and lists have.

    Raises UsageError if they differ, if there are none, or for an object of another kind.
    """
    lengths = dict(_lengths(batch, "the batch"))
    if len(set(lengths.values())) == 1:
        return next(iter(lengths.values()))
    found = ", ".join(f"{where} has {length}" for where, length in lengths.items()) or "nothing that has one"
    raise UsageError(f"micro_batches: expected one number of samples in the batch, found {found}", hint=_HINT)


def split(batch: Any, samples: int, count: int) -> Iterator[tuple[Any, float]]:
    """Yield `batch` in `count` parts, or as many as it has `samples`, whose sizes differ by one at most.

    >>> list(split({"x": [1, 2, 3, 4]}, 4, 2))
    [({'x': [1, 2]}, 0.5), ({'x': [3, 4]}, 0.5)]
    """
    count = min(count, samples)
    if count <= 1:
        yield batch, 1.0
        return
    for index in range(count):
        start, stop = samples * index // count, samples * (index + 1) // count
        yield _mapped(batch, operator.itemgetter(slice(start, stop))), (stop - start) / samples


def _lengths(value: Any, where: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, _PLAIN):
        return
    if _is_tensor(value):
        if len(value.shape):
            yield where, int(value.shape[0])
    elif _is_list_of_samples(value):
        yield where, len(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lengths(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        _refuse_doubtful(value, where)
        for index, item in enumerate(value):
            yield from _lengths(item, f"{where}[{index}]")
    else:
        raise UsageError(
            f"micro_batches: expected tensors, and dictionaries, lists and tuples of them, found "
            f"{type(value).__name__} in {where}",
            hint=_HINT,
        )


def _refuse_doubtful(value: list[Any] | tuple[Any, ...], where: str) -> None:
    """Raise UsageError for a list that may be one of samples: the wrong guess would train on nonsense."""
    if not isinstance(value, list):
        return
    if not any(_has_tensor(item) for item in value):
        raise UsageError(
            f"micro_batches: expected tensors, dictionaries or a tuple in {where}, found a list of lists",
            hint=_HINT,
        )
    ranks = {len(item.shape) if _is_tensor(item) else 0 for item in value}
    # Images of one batch, say, whose first dimension counts no samples.
    if len(value) > 1 and len(ranks) == 1 and max(ranks) > 1:
        raise UsageError(
            f"micro_batches: expected fields, or samples, that are told apart in {where}, found a list of "
            f"{len(value)} tensors that all have {max(ranks)} dimensions",
            hint=f"are they fields, make it a tuple of them; are they samples: {_HINT}",
        )


def _mapped(value: Any, act: Callable[[Any], Any]) -> Any:
    """Return `value`, which `_lengths` has accepted, with all that has samples replaced by `act` of it."""
    if isinstance(value, _PLAIN):
        return value
    if _is_tensor(value):
        return act(value) if len(value.shape) else value
    if _is_list_of_samples(value):
        return act(value)
    if isinstance(value, Mapping):
        # One that cannot be changed becomes a dictionary.
        mapped: Any = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, item in value.items():
            mapped[key] = _mapped(item, act)
        return mapped
    items = [_mapped(item, act) for item in value]
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return tuple(items) if isinstance(value, tuple) else items


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "__getitem__")


def _is_list_of_samples(value: Any) -> bool:
    is_plain = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return is_plain and all(isinstance(item, _PLAIN) for item in value)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return _is_tensor(value)
