"""Changed and cut files: an error of ours or what was saved; never a crash, never code that runs."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.errors import UnbrokenError
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.diff import compare
from unbroken.inspection.foreign import describe
from unbroken.inspection.formats.constructors import read_values
from unbroken.inspection.formats.opcodes import Machine
from unbroken.inspection.formats.views import torch_storage

from .golden import GOLDEN

FILES = ["training.pt", "training-legacy.pt", "weights.safetensors", "arrays.npz", "arrays-compressed.npz"]

fuzz = settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
places = st.floats(0, 1, exclude_max=True)


def content(path: Path) -> tuple[Any, dict[str, bytes]]:
    """Return all that can be read of a file. Raises an error of ours if any of it cannot be."""
    reader = open_checkpoint(path)
    values = str(describe(reader)["values"])
    return values, {name: bytes(reader.read(name)) for name in reader.tensors}


@cache
def original(name: str) -> tuple[Any, dict[str, bytes]]:
    return content(GOLDEN / name)


def is_found_damaged(path: Path) -> bool:
    try:
        reader = open_checkpoint(path)
        return bool([*reader.problems, *reader.verify()])
    except UnbrokenError:
        return True


def changed(source: Path, target: Path, flips: list[tuple[float, int]], length: float) -> Path:
    data = bytearray(source.read_bytes())
    for place, bit in flips:
        data[int(place * len(data))] ^= 1 << bit
    target.write_bytes(data[: len(data) if length == 1 else int(length * len(data))])
    return target


@pytest.mark.parametrize("name", FILES)
@given(
    flips=st.lists(st.tuples(places, st.integers(0, 7)), min_size=1, max_size=8), length=st.just(1.0) | places
)
@fuzz
def test_a_changed_or_cut_file_raises_nothing_but_our_errors(
    tmp_path: Path, name: str, flips: list[tuple[float, int]], length: float
) -> None:
    path = changed(GOLDEN / name, tmp_path / "changed", flips, length)
    is_found_damaged(path)
    with suppress(UnbrokenError):
        content(path)
    with suppress(UnbrokenError):
        compare(open_checkpoint(path), open_checkpoint(GOLDEN / name)).as_json()
    for target in (tmp_path / f"converted.{end}" for end in ("safetensors", "npz", "pt")):
        try:
            convert(open_checkpoint(path), target, dtype="BF16" if target.suffix == ".pt" else None)
        except UnbrokenError:
            assert not target.exists()
            assert not (tmp_path / "converted.json").exists()
        for file in tmp_path.glob("converted.*"):
            file.unlink()


@pytest.mark.parametrize("name", ["training.pt", "arrays.npz", "arrays-compressed.npz"])
@given(place=places, bit=st.integers(0, 7))
@fuzz
def test_a_flipped_bit_of_a_zip_file_is_found_or_changes_nothing(
    tmp_path: Path, name: str, place: float, bit: int
) -> None:
    path = changed(GOLDEN / name, tmp_path / "flipped", [(place, bit)], 1.0)
    assert is_found_damaged(path) or content(path) == original(name)


@pytest.mark.chaos
@pytest.mark.parametrize("name", FILES)
def test_a_flip_in_any_region_is_noticed_or_does_no_harm(tmp_path: Path, name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    has_checksums = open_checkpoint(GOLDEN / name).checksums is not None
    # Each region of a file is longer than these steps.
    for position in range(0, len(data), 1 + len(data) // 2500):
        bit = 1 << position % 8
        path = tmp_path / "flipped"
        path.write_bytes(data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :])
        if not is_found_damaged(path) and has_checksums:
            assert content(path) == original(name), position
        with suppress(UnbrokenError):
            content(path)


@pytest.mark.parametrize("name", FILES)
@given(length=places)
@fuzz
def test_a_file_that_was_cut_short_is_found_damaged(tmp_path: Path, name: str, length: float) -> None:
    path = changed(GOLDEN / name, tmp_path / "cut", [], length)
    assert is_found_damaged(path)


@given(shape=st.text("0123456789, -x()'", max_size=12) | st.integers(0, 10**30).map(str))
@settings(max_examples=100, deadline=None, database=None)
def test_any_shape_in_a_header_of_numpy_is_read_or_refused(
    shape: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    path = tmp_path_factory.getbasetemp() / "shape.npz"
    with zipfile.ZipFile(path, "w") as archive:
        array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
        archive.writestr("a.npy", array)
    with suppress(UnbrokenError):
        content(path)


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@given(flips=st.lists(st.tuples(places, st.integers(0, 7)), max_size=4))
@fuzz
def test_no_change_of_a_malicious_file_makes_it_run(tmp_path: Path, flips: list[tuple[float, int]]) -> None:
    shutil.rmtree(tmp_path / "canaries", ignore_errors=True)
    (tmp_path / "canaries").mkdir()
    data = bytearray(pickle.dumps([_Touch(tmp_path / "canaries/bird")], 2))
    for place, bit in flips:
        data[int(place * len(data))] ^= 1 << bit
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("x/data.pkl", bytes(data))
    with suppress(UnbrokenError):
        content(tmp_path / "evil.pt")
    assert not any((tmp_path / "canaries").iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["canaries", "evil.pt"]


@given(data=st.binary(max_size=300))
@settings(max_examples=200, deadline=None, database=None)
def test_any_bytes_at_all_are_read_as_a_pickle_or_refused(data: bytes) -> None:
    with suppress(UnbrokenError):
        read_values(Machine(data, "test").load(), torch_storage)
