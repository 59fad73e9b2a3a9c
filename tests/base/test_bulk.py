from __future__ import annotations

import os
from pathlib import Path

from unbroken.state.tensors import address_of
from unbroken.storage.bulk import MOST_GATHERED, gather


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
