"""The limits: the same number of bytes written and read with nothing around them, and one copy in memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from observe import huge_pages, sync_path
from peers import IsDurable, Peer
from states import StateSpec

PIECE_BYTES = 8 << 20
BLOCK_BYTES = 4096
THREADS = 2
# The bounds of the pieces of a file: an iterator that threads share.
Pieces = Iterator[tuple[int, int]]


class RawState:
    """As many bytes as the state has, random, in huge pages."""

    def __init__(self, spec: StateSpec) -> None:
        self.size_bytes = spec.size_bytes
        self.tensor_count = 1
        # Direct I/O takes whole blocks.
        self.memory = huge_pages(-(-self.size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        for start, end in _pieces(len(self.memory)):
            self.memory[start:end] = os.urandom(end - start)

    def train(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def fingerprint(self) -> int:
        return self.size_bytes


def build(spec: StateSpec) -> RawState:
    return RawState(spec)


@contextmanager
def raw_direct(state: RawState, directory: Path) -> Iterator[Peer]:
    """Two threads and direct I/O, past the page cache."""

    def save(path: Path) -> IsDurable:
        descriptor = os.open(path / "raw", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, len(state.memory))
            pieces = _pieces(len(state.memory))
            _in_threads(lambda: _write(descriptor, state.memory, pieces))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _named(path)

    yield Peer(save=save, load=lambda path: _read_all(path / "raw", os.O_DIRECT))


@contextmanager
def raw_buffered(state: RawState, directory: Path) -> Iterator[Peer]:
    """One thread through the page cache, then fsync; read by two threads."""

    def save(path: Path) -> IsDurable:
        descriptor = os.open(path / "raw", os.O_WRONLY | os.O_CREAT)
        try:
            _write(descriptor, state.memory, _pieces(len(state.memory)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _named(path)

    yield Peer(save=save, load=lambda path: _read_all(path / "raw", 0))


@contextmanager
def memory_copy(state: Any, directory: Path) -> Iterator[Peer]:
    """One thread copies every tensor into memory that was used before: the least that a capture can cost."""
    tensors = list(state.flat().values())
    memory = huge_pages(state.size_bytes)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def save(path: Path) -> IsDurable:
        target = begin
        for tensor in tensors:
            ctypes.memmove(target, tensor.data_ptr(), tensor.nbytes)
            target += tensor.nbytes
        return lambda: True

    yield Peer(save=save)


def _read_all(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        pieces = _pieces(os.fstat(descriptor).st_size)
        _in_threads(lambda: _read(descriptor, pieces))
    finally:
        os.close(descriptor)


def _read(descriptor: int, pieces: Pieces) -> None:
    with huge_pages(PIECE_BYTES) as memory, memoryview(memory) as view:
        for start, end in pieces:
            if os.preadv(descriptor, [view[: end - start]], start) != end - start:
                raise EOFError(f"expected {end - start} bytes at {start}")


def _write(descriptor: int, memory: Any, pieces: Pieces) -> None:
    with memoryview(memory) as view:
        for start, end in pieces:
            if os.pwrite(descriptor, view[start:end], start) != end - start:
                raise OSError(f"expected to write {end - start} bytes at {start}")


def _pieces(size_bytes: int) -> Pieces:
    starts = range(0, size_bytes, PIECE_BYTES)
    return iter([(start, min(start + PIECE_BYTES, size_bytes)) for start in starts])


def _in_threads(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(work) for _ in range(THREADS)]:
            done.result()


def _named(path: Path) -> IsDurable:
    for folder in (path, path.parent):
        sync_path(folder)
    return lambda: True
