"""Zip files that are written here are read by others, however large or many their entries are."""

from __future__ import annotations

import io
import mmap
import os
import zipfile
from pathlib import Path

import pytest

from unbroken.inspection.formats.zips import ZipEntries
from unbroken.interchange.zip_writer import ZipWriter

_SIZE = (1 << 32) + 5


def test_entries_are_what_was_written_and_begin_where_they_are_to(tmp_path: Path) -> None:
    entries = {"a/b": [b"one", b"two"], "empty": [], "ü": [bytes(1000)], "": [b"x"]}
    path, writer = tmp_path / "x.zip", ZipWriter()
    with path.open("wb") as file:
        for name, pieces in entries.items():
            for piece in writer.entry(name, pieces, alignment=64):
                start = file.tell()
                file.write(piece)
            assert not pieces or (start - len(b"".join(pieces[:-1]))) % 64 == 0
        file.writelines(writer.end())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == {
            name: b"".join(pieces) for name, pieces in entries.items()
        }
    own = ZipEntries(path)
    assert {name: bytes(own.read(name)) for name in own.entries} == {
        name: b"".join(pieces) for name, pieces in entries.items()
    }


@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16, 64, 4096])
def test_every_alignment_is_kept_after_headers_of_every_length(alignment: int) -> None:
    writer, made = ZipWriter(), bytearray()
    for size in range(70):
        header, data = writer.entry("n" * size, [b"data"], alignment=alignment)
        made += header
        assert len(made) % alignment == 0
        made += data
    for piece in writer.end():
        made += piece
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        assert all(archive.read(name) == b"data" for name in archive.namelist())


@pytest.mark.parametrize(
    "count", [0, 65535, *(pytest.param(near, marks=pytest.mark.chaos) for near in (65534, 65536))]
)
def test_more_entries_than_16_bits_count_are_all_there(tmp_path: Path, count: int) -> None:
    path, writer = tmp_path / "x.zip", ZipWriter()
    with path.open("wb") as file:
        for number in range(count):
            file.writelines(writer.entry(str(number), []))
        file.writelines(writer.end())
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == [str(number) for number in range(count)]
    assert len(ZipEntries(path).entries) == count


@pytest.mark.chaos
def test_entries_beyond_four_gigabytes_are_read_by_all(tmp_path: Path) -> None:
    path, writer = tmp_path / "x.zip", ZipWriter()
    with (
        mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as zeros,
        memoryview(zeros) as large,
        path.open("wb") as file,
    ):
        for name, data in (("large", large), ("behind", b"data")):
            for piece in writer.entry(name, [data], alignment=64):
                # A hole is zeros, and takes no room.
                file.seek(len(piece), os.SEEK_CUR) if piece is large else file.write(piece)
                assert file.tell() % 64 == 0 or piece is data
        file.writelines(writer.end())
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("large").file_size == _SIZE
        assert archive.getinfo("behind").header_offset > _SIZE
        assert archive.read("behind") == b"data"
    own = ZipEntries(path)
    assert bytes(own.read("behind")) == b"data"
    assert bytes(own.read_range("large", _SIZE - 3, 3)) == bytes(3)
    assert not [*own.verify()]
