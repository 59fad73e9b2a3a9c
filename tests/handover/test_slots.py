"""Snapshots in shared memory: whole, or not there."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.checkpoint.image import plan_image
from unbroken.checkpoint.snapshot import copy_into
from unbroken.errors import StorageError
from unbroken.handover.committer import Committer
from unbroken.handover.slots import Filled, Slot, SlotReader
from unbroken.rundir.processes import identify_self
from unbroken.state.tensors import TensorSource
from unbroken.storage.base import PAGE_BYTES

from ..checkpoint.states import state_at, tensor
from .states import MEBIBYTE, LiveTensor, bytes_of, described, small_state

RECORD_BYTES = 40
DIGEST_BYTES = 32


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot()
    yield slot
    slot.close()


def read(slot: Slot) -> Filled | None:
    return SlotReader(slot.descriptor).read()


def tensors_in(found: Filled) -> dict[str, bytes]:
    return {
        path: bytes(found.snapshot.images[plan.file][placed.offset :][: placed.size_bytes])
        for plan in found.snapshot.plans
        for path, placed in plan.placements.items()
    }


def mixed(count: int, *, seed: int = 0) -> dict[str, TensorSource]:
    """Tensors of all sizes, most of them small; some have no address. The sizes depend on `count` alone."""
    sizes, content = random.Random(count), random.Random(seed)
    tensors: dict[str, TensorSource] = {}
    for index in range(count):
        size = sizes.choice([0, 1, 4, 4, 64, 64, 1000, 4096, 4097, 20_000])
        if not size or index % 997 == 5:
            tensors[f"{index}"] = tensor("U8", (size,), content.randbytes(size))
        else:
            live = LiveTensor(size)
            live.data[:] = content.randbytes(size)
            tensors[f"{index}"] = live
    return tensors


class TestFilling:
    def test_what_is_filled_is_read_back_equal(self, slot: Slot) -> None:
        description, table = described(7, state_at(7))
        slot.fill(description, table, 1)
        found = read(slot)
        assert found is not None
        assert (found.sequence, found.snapshot.description) == (1, description)
        assert tensors_in(found) == bytes_of(table)
        assert found.snapshot.aliases == {}

    def test_another_descriptor_of_the_memory_shows_the_same(self, slot: Slot) -> None:
        description, table = described(7, state_at(7))
        slot.fill(description, table, 1)
        other = os.dup(slot.descriptor)
        child = os.fork()
        if child == 0:
            found = SlotReader(other).read()
            is_same = found is not None and tensors_in(found) == bytes_of(table)
            os._exit(0 if is_same and found.snapshot.description == description else 1)
        os.close(other)
        assert os.waitpid(child, 0)[1] == 0

    @pytest.mark.parametrize("fill", ["by the kernel", "one by one"])
    def test_many_small_tensors_are_copied_exactly(self, fill: str) -> None:
        state = {"many": mixed(3000), "few": mixed(3)}
        _, table = described(1, state)
        plan = plan_image(table.sources)
        with open(os.memfd_create("image"), "r+b") as file:
            os.ftruncate(file.fileno(), PAGE_BYTES + plan.size_bytes)
            with mmap.mmap(file.fileno(), 0) as memory, memoryview(memory)[PAGE_BYTES:] as image:
                # Not to be written by its descriptor: then by its memory.
                flags = os.O_RDWR if fill == "by the kernel" else os.O_RDONLY
                descriptor = os.open(f"/proc/self/fd/{file.fileno()}", flags)
                copy_into(image, plan, table.sources, file=(descriptor, PAGE_BYTES))
                os.close(descriptor)
                expected = bytes_of(table)
                for shard in plan.shards:
                    start = plan.starts[shard.file]
                    assert image[start : start + len(shard.header)] == shard.header
                    for path, placed in shard.placements.items():
                        found = bytes(image[start + placed.offset :][: placed.size_bytes])
                        assert found == expected[path], path

    def test_tensors_that_moved_are_copied_from_where_they_are_now(self, slot: Slot) -> None:
        for step in range(1, 4):
            description, table = described(step, {"many": mixed(50, seed=step)})
            slot.fill(description, table, step)
            found = read(slot)
            assert found is not None
            assert tensors_in(found) == bytes_of(table)

    def test_each_filling_replaces_the_one_before(self, slot: Slot) -> None:
        reader = SlotReader(slot.descriptor)
        for step in range(1, 6):
            description, table = described(step, state_at(step))
            slot.fill(description, table, step)
            found = reader.read()
            assert found is not None
            assert (found.sequence, found.snapshot.description.step) == (step, step)
            assert tensors_in(found) == bytes_of(table)

    def test_nothing_is_in_a_new_slot(self, slot: Slot) -> None:
        assert read(slot) is None
        assert SlotReader(slot.descriptor).sequence() == 0

    def test_a_state_without_tensors_is_a_snapshot_too(self, slot: Slot) -> None:
        description, table = described(3, {"counters": {"samples": 12}})
        slot.fill(description, table, 1)
        found = read(slot)
        assert found is not None
        assert (found.snapshot.plans, found.snapshot.description) == ([], description)

    def test_a_slot_that_is_being_filled_holds_no_snapshot(self, slot: Slot) -> None:
        seen: list[Filled | None] = []

        class Looking(LiveTensor):
            address = None  # type: ignore[assignment]

            def copy_to(self, target: memoryview) -> None:
                seen.append(read(slot))

        slot.fill(*described(1, state_at(1)), 1)
        slot.fill(*described(2, {**state_at(2), "looking": Looking(8)}), 2)
        assert seen == [None]
        assert SlotReader(slot.descriptor).sequence() == 2

    def test_an_error_while_it_is_filled_leaves_none_and_the_next_filling_works(self, slot: Slot) -> None:
        class Broken(LiveTensor):
            address = None  # type: ignore[assignment]

            def copy_to(self, target: memoryview) -> None:
                raise ZeroDivisionError

        slot.fill(*described(1, state_at(1)), 1)
        with pytest.raises(ZeroDivisionError):
            slot.fill(*described(2, {**state_at(2), "broken": Broken(8)}), 2)
        assert (read(slot), slot.sequence) == (None, 0)
        slot.fill(*described(3, state_at(3)), 3)
        assert SlotReader(slot.descriptor).sequence() == 3

    def test_it_grows_with_the_state_and_holds_smaller_ones_as_well(self, slot: Slot) -> None:
        reader = SlotReader(slot.descriptor)
        sizes = [10, 5_000, 3 * MEBIBYTE, 20, 3 * MEBIBYTE + 1, 0, 9 * MEBIBYTE, 100]
        for sequence, size in enumerate(sizes, start=1):
            description, table = described(sequence, {"x": tensor("U8", (size,), os.urandom(size))})
            slot.fill(description, table, sequence)
            found = reader.read()
            assert found is not None
            assert found.snapshot.description == description
            assert tensors_in(found) == bytes_of(table)
        assert slot.size_bytes < 10 * MEBIBYTE

    def test_the_layout_is_planned_once_for_states_of_one_shape(self, slot: Slot) -> None:
        reader = SlotReader(slot.descriptor)
        plans = []
        for sequence, state in enumerate([state_at(1), state_at(2), small_state(3)], start=1):
            slot.fill(*described(sequence, state), sequence)
            found = reader.read()
            assert found is not None
            plans.append((slot._plan, found.snapshot.plans))
        first, second, other = plans
        assert second[0] is first[0]
        assert all(one is two for one, two in zip(first[1], second[1], strict=True))
        assert other[0] is not first[0]

    def test_memory_that_cannot_be_had_is_an_error_of_ours(self, slot: Slot) -> None:
        class Endless(LiveTensor):
            def __init__(self) -> None:
                self.dtype, self.shape, self.data = "U8", (1 << 62,), bytearray(1)

        with pytest.raises(StorageError, match="memory for snapshots"):
            slot.fill(*described(1, {"x": Endless()}), 1)


class TestDamage:
    def test_any_flipped_bit_in_record_digest_or_words_makes_it_no_snapshot(self, slot: Slot) -> None:
        slot.fill(*described(2, state_at(2)), (1 << 40) + 5)
        reader = SlotReader(slot.descriptor)
        image_size, words_size = struct.unpack("<QQ", os.pread(slot.descriptor, 16, 24))
        # The words are the last of all.
        start, size = PAGE_BYTES + image_size, words_size
        sealed = list(range(RECORD_BYTES + DIGEST_BYTES))
        dice = random.Random(1)
        sealed += [start, start + size - 1, *(start + dice.randrange(size) for _ in range(400))]
        for at in sealed:
            byte = os.pread(slot.descriptor, 1, at)[0]
            for bit in (dice.randrange(8), dice.randrange(8)):
                os.pwrite(slot.descriptor, bytes([byte ^ 1 << bit]), at)
                assert (reader.read(), reader.sequence()) == (None, 0), at
            os.pwrite(slot.descriptor, bytes([byte]), at)
        assert reader.sequence() == (1 << 40) + 5


class Filler:
    """A process that fills slots again and again, each time with other bytes, until it is killed."""

    def __init__(self, slots: list[Slot], sequence: int) -> None:
        told, tell = os.pipe()
        self.process_id = os.fork()
        if self.process_id == 0:
            try:
                self._fill(slots, sequence, tell)
            finally:
                os._exit(1)
        os.close(tell)
        # The first filling is slow, all its memory is new.
        assert os.read(told, 1) == b"1"
        os.close(told)

    def _fill(self, slots: list[Slot], sequence: int, tell: int) -> None:
        large = LiveTensor(9 * MEBIBYTE)
        while True:
            sequence += 1
            large.fill(sequence % 251)
            state = {"large": large, "bytes": bytes([sequence % 251]) * MEBIBYTE, **small_state(sequence)}
            slots[sequence % len(slots)].fill(*described(sequence, state), sequence)
            if sequence % 2 == 0:
                os.write(tell, b"1")

    def kill(self) -> None:
        os.kill(self.process_id, signal.SIGKILL)
        assert os.waitpid(self.process_id, 0)[1] == signal.SIGKILL


def check_whole(found: Filled) -> None:
    step = found.snapshot.description.step
    assert step == found.sequence
    tensors = tensors_in(found)
    description, table = described(step, {"bytes": bytes([step % 251]) * MEBIBYTE, **small_state(step)})
    assert tensors == {"large": bytes([step % 251]) * 9 * MEBIBYTE, **bytes_of(table)}
    assert found.snapshot.description.parts["model"] == description.parts["model"]


def kill_while_it_fills(slots: list[Slot], sequence: int, dice: random.Random) -> None:
    filler = Filler(slots, sequence)
    # The moment is what is random here; one filling takes some milliseconds.
    time.sleep(dice.random() * 0.02)
    filler.kill()


def test_killed_in_the_middle_of_filling_it_holds_the_whole_snapshot_or_none(slot: Slot) -> None:
    dice, reader = random.Random(5), SlotReader(slot.descriptor)
    seen = {"none": 0, "whole": 0}
    for time_of_it in range(1, 23):
        kill_while_it_fills([slot], time_of_it * 1000, dice)
        found = reader.read()
        seen["none" if found is None else "whole"] += 1
        if found is not None:
            assert found.sequence // 1000 == time_of_it
            check_whole(found)
    assert min(seen.values()) > 0, seen


def test_of_two_slots_one_is_whole_at_any_moment_and_the_newest_is_the_one_left(tmp_path: Path) -> None:
    dice, slots = random.Random(6), [Slot(), Slot()]
    readers = [SlotReader(slot.descriptor) for slot in slots]
    committer = Committer(tmp_path, 1, identify_self())
    for time_of_it in range(1, 9):
        kill_while_it_fills(slots, time_of_it * 1000, dice)
        left = committer.newest_left(readers)
        assert left is not None
        found = left.read()
        assert found is not None
        assert found.sequence // 1000 == time_of_it
        assert found.sequence == max(reader.sequence() for reader in readers)
        check_whole(found)
    for slot in slots:
        slot.close()


class TestWhatIsLeft:
    @pytest.fixture
    def slots(self) -> Iterator[list[Slot]]:
        slots = [Slot(), Slot()]
        yield slots
        for slot in slots:
            slot.close()

    def fill(self, slot: Slot, sequence: int) -> None:
        slot.fill(*described(sequence, small_state(sequence)), sequence)

    def test_nothing_is_left_in_no_slots_in_empty_ones_and_in_committed_ones(
        self, tmp_path: Path, slots: list[Slot]
    ) -> None:
        committer = Committer(tmp_path, 1, identify_self())
        readers = [SlotReader(slot.descriptor) for slot in slots]
        assert committer.newest_left([]) is None
        assert committer.newest_left(readers) is None
        self.fill(slots[0], 4)
        self.fill(slots[1], 5)
        committer.sequence = 5
        assert committer.newest_left(readers) is None

    def test_the_newest_that_is_no_checkpoint_is_left(self, tmp_path: Path, slots: list[Slot]) -> None:
        committer = Committer(tmp_path, 1, identify_self())
        readers = [SlotReader(slot.descriptor) for slot in slots]
        self.fill(slots[0], 4)
        assert committer.newest_left(readers) is readers[0]
        self.fill(slots[1], 5)
        assert committer.newest_left(readers) is readers[1]
        committer.sequence = 4
        assert committer.newest_left(readers) is readers[1]
        self.fill(slots[0], 6)
        assert committer.newest_left(readers) is readers[0]


def test_closing_gives_descriptor_and_memory_back() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        slot = Slot()
        slot.fill(*described(1, state_at(1)), 1)
        assert copy_of_maps().count("unbroken-snapshot") == 1
        slot.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "unbroken-snapshot" not in copy_of_maps()


def copy_of_maps() -> str:
    return Path("/proc/self/maps").read_text()
