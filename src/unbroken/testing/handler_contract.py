"""What every state handler must promise. Inherit `HandlerContract` and provide four fixtures.

class TestMyHandler(HandlerContract):
    @pytest.fixture
    def handler(self):
        return MyHandler()

    @pytest.fixture
    def make(self):
        return lambda: Meter(window=3)       # what a script builds anew in every process

    @pytest.fixture
    def change(self):
        return lambda meter: meter.add(0.5)  # what training does to it; the same state changes the same way

    @pytest.fixture
    def codecs(self):
        return [MyCodec()]                   # only where arrays or tensors stand in the state
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import pytest

from unbroken.state.handlers import ComparesSettings, StateHandler
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor, TensorSource, copy_bytes
from unbroken.state.tree import Decoder, Encoder, LeafCodec

Make: TypeAlias = Callable[[], Any]
Change: TypeAlias = Callable[[Any], object]
Parts: TypeAlias = Callable[[Any], Sequence[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of one object as a checkpoint has it: JSON, and the tensors by path."""

    encoded: bytes
    tensors: dict[str, HostTensor]


class HandlerContract:
    """The tests; each one states a promise of the protocol.

    As in a run, the state is decoded anew for each restore, each time out of the same tensors. For a
    handler whose codecs share the memory that was read, give `codecs` of that kind.
    """

    @pytest.fixture
    def codecs(self) -> list[LeafCodec]:
        """The codecs of the libraries whose values stand in the state."""
        return []

    @pytest.fixture
    def inner(self) -> Parts:
        """What returns the objects inside that others may hold, which a restore must fill, not replace."""
        return lambda value: []

    def test_it_has_a_name_for_manifests_and_an_order(self, handler: StateHandler) -> None:
        assert isinstance(handler.name, str)
        assert handler.name
        assert isinstance(handler.order, int)

    def test_it_accepts_what_it_is_for_and_no_other_object(
        self, handler: StateHandler, make: Make, change: Change
    ) -> None:
        value = make()
        assert handler.accepts(value)
        change(value)
        assert handler.accepts(value)
        assert not handler.accepts(object())
        assert not handler.accepts(type(value))

    def test_training_changes_the_state(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        # Otherwise the other tests would prove nothing.
        value = make()
        states = [saved(handler, value, codecs)]
        for _ in range(3):
            change(value)
            states.append(saved(handler, value, codecs))
        assert all(one != other for one, other in pairwise(states))

    def test_taking_the_state_changes_nothing(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        value = make()
        change(value)
        assert saved(handler, value, codecs) == saved(handler, value, codecs)

    def test_taking_the_state_copies_no_tensor(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        value = make()
        change(value)
        # Both tables live: of two copies, neither can have the memory of the other.
        first, second = (taken(handler, value, codecs)[1] for _ in range(2))
        assert [source.identity for source in first.values()] == [
            source.identity for source in second.values()
        ]

    def test_a_state_that_was_read_back_has_no_differences_for_a_fresh_object(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        kept = kept_of_a_changed_one(handler, make, change, codecs)
        assert handler.differences(make(), loaded(kept, codecs)) == []

    def test_looking_for_differences_changes_neither_the_object_nor_the_state(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        kept = kept_of_a_changed_one(handler, make, change, codecs)
        fresh, state = make(), loaded(kept, codecs)
        before = saved(handler, fresh, codecs), saved_again(state, codecs)
        handler.differences(fresh, state)
        assert (saved(handler, fresh, codecs), saved_again(state, codecs)) == before

    def test_a_script_that_set_nothing_otherwise_has_changed_no_settings(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        if not isinstance(handler, ComparesSettings):
            return
        kept = kept_of_a_changed_one(handler, make, change, codecs)
        fresh = make()
        before = saved(handler, fresh, codecs)
        assert handler.changed_settings(fresh, loaded(kept, codecs)) == []
        assert saved(handler, fresh, codecs) == before

    def test_a_restored_object_has_the_saved_state_byte_for_byte(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        kept = kept_of_a_changed_one(handler, make, change, codecs)
        fresh = make()
        assert saved(handler, fresh, codecs) != kept
        handler.restore(fresh, loaded(kept, codecs))
        assert saved(handler, fresh, codecs) == kept

    def test_training_goes_on_as_if_it_had_never_stopped(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        value = make()
        change(value)
        kept = saved(handler, value, codecs)
        expected = []
        for _ in range(3):
            change(value)
            expected.append(saved(handler, value, codecs))
        fresh = make()
        handler.restore(fresh, loaded(kept, codecs))
        for state in expected:
            change(fresh)
            assert saved(handler, fresh, codecs) == state

    def test_restoring_fills_the_objects_that_are_there(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec], inner: Parts
    ) -> None:
        kept = kept_of_a_changed_one(handler, make, change, codecs)
        fresh = make()
        held = inner(fresh)
        handler.restore(fresh, loaded(kept, codecs))
        found = inner(fresh)
        assert [id(item) for item in found] == [id(item) for item in held]

    def test_restoring_twice_is_as_restoring_once(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        kept = kept_of_a_changed_one(handler, make, change, codecs)
        fresh = make()
        for _ in range(2):
            handler.restore(fresh, loaded(kept, codecs))
            assert saved(handler, fresh, codecs) == kept

    def test_training_on_leaves_the_saved_bytes_alone_so_that_they_can_be_restored_again(
        self, handler: StateHandler, make: Make, change: Change, codecs: list[LeafCodec]
    ) -> None:
        kept = kept_of_a_changed_one(handler, make, change, codecs)
        before = copied(kept)
        fresh = make()
        handler.restore(fresh, loaded(kept, codecs))
        for _ in range(2):
            change(fresh)
        assert kept == before
        handler.restore(fresh, loaded(kept, codecs))
        assert saved(handler, fresh, codecs) == before


def taken(
    handler: StateHandler, value: object, codecs: Iterable[LeafCodec]
) -> tuple[bytes, dict[str, TensorSource]]:
    """Return the state of a live object as JSON and its tensors, which are still the live ones."""
    return _encoded(handler.state(value), codecs)


def saved(handler: StateHandler, value: object, codecs: Iterable[LeafCodec]) -> SavedState:
    """Return the state of a live object as a checkpoint would have it."""
    return saved_again(handler.state(value), codecs)


def saved_again(state: object, codecs: Iterable[LeafCodec]) -> SavedState:
    """Return a state as a checkpoint would have it."""
    encoded, sources = _encoded(state, codecs)
    return SavedState(encoded=encoded, tensors={path: _captured(source) for path, source in sources.items()})


def loaded(kept: SavedState, codecs: Iterable[LeafCodec]) -> Any:
    """Return the state that a handler is given for a restore; it may share the memory of `kept`."""
    return Decoder(kept.tensors.__getitem__, codecs).decode(msgspec.json.decode(kept.encoded))


def copied(kept: SavedState) -> SavedState:
    """Return the same state in memory of its own."""
    tensors = {path: _captured(tensor) for path, tensor in kept.tensors.items()}
    return SavedState(encoded=kept.encoded, tensors=tensors)


def kept_of_a_changed_one(
    handler: StateHandler, make: Make, change: Change, codecs: Iterable[LeafCodec]
) -> SavedState:
    """Return what a checkpoint has of an object that was trained a little."""
    value = make()
    for _ in range(2):
        change(value)
    return saved(handler, value, codecs)


def _encoded(state: object, codecs: Iterable[LeafCodec]) -> tuple[bytes, dict[str, TensorSource]]:
    table = TensorTable()
    encoded = Encoder(table, codecs).encode(state, "part")
    return msgspec.json.encode(encoded), table.sources


def _captured(source: TensorSource) -> HostTensor:
    return HostTensor(source.dtype, source.shape, memoryview(copy_bytes(source)))
