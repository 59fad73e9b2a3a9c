from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from unbroken.state.tensors import address_of
from unbroken.storage.bulk import MOST_GATHERED, HugeBuffers, gather, read_uncached
from unbroken.storage.local import LocalStorage


def test_pieces_of_memory_are_gathered_in_their_order(tmp_path: Path) -> None:
    memory = bytearray(os.urandom(MOST_GATHERED * 8))
    base = address_of(memoryview(memory))
    starts = [8 * index for index in reversed(range(MOST_GATHERED))]
    sizes = [1 + index % 8 for index in range(MOST_GATHERED)]
    expected = b"".join(memory[start : start + size] for start, size in zip(starts, sizes, strict=True))
    with open(tmp_path / "file", "w+b") as file:
        assert gather(file.fileno(), 3, [base + start for start in starts], sizes)
        assert file.read() == bytes(3) + expected


def test_what_cannot_be_gathered_is_said(tmp_path: Path) -> None:
    memory = bytearray(b"content")
    (tmp_path / "file").write_bytes(b"")
    with open(tmp_path / "file", "rb") as file:
        assert not gather(file.fileno(), 0, [address_of(memoryview(memory))], [len(memory)])
    assert (tmp_path / "file").read_bytes() == b""


SIZE = (9 << 20) + 1234


@pytest.fixture
def uncached(tmp_path: Path) -> tuple[Path, bytes]:
    """A file that is not in the page cache, and what is in it."""
    path, data = tmp_path / "value", os.urandom(SIZE)
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path, data


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 4097, 8 << 20])
def test_what_is_read_past_the_cache_is_what_is_in_the_file(uncached: tuple[Path, bytes], start: int) -> None:
    path, data = uncached
    storage = LocalStorage(path.parent)
    for size in (SIZE - start, (1 << 20) + 1, 1 << 20):
        if start + size <= SIZE:
            target = memoryview(bytearray(size))
            storage.read_into("value", start, target)
            assert target == data[start : start + size]


def test_reading_past_the_cache_leaves_nothing_in_it(uncached: tuple[Path, bytes]) -> None:
    path, data = uncached
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _ in range(2):
            target = memoryview(bytearray(SIZE + 100))
            found = read_uncached(path, descriptor, 0, target, HugeBuffers())
            if not found:
                pytest.skip("this file system has no direct I/O, or this kernel does not tell what is cached")
            # Again: had it come by way of the cache, the second time would not be the way past it.
            assert (found, target[:found]) == (SIZE, data)
    finally:
        os.close(descriptor)


def test_what_is_in_the_cache_is_read_from_there(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_bytes(os.urandom(SIZE))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert read_uncached(path, descriptor, 0, memoryview(bytearray(SIZE)), HugeBuffers()) == 0
    finally:
        os.close(descriptor)


def test_a_storage_that_has_read_can_be_handed_to_another_process(uncached: tuple[Path, bytes]) -> None:
    path, data = uncached
    storage = LocalStorage(path.parent)
    storage.read("value")
    assert pickle.loads(pickle.dumps(storage)).read("value") == data
