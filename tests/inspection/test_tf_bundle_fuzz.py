"""Changed, cut and hostile files of TensorFlow: found damaged, never a crash, never without end."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.errors import DamagedError, UnbrokenError
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.doctor import examine
from unbroken.inspection.foreign import describe
from unbroken.interchange import crc32c as checksums
from unbroken.interchange.crc32c import crc32c, extend_with_integers
from unbroken.interchange.marks import TABLE_MAGIC
from unbroken.interchange.protobuf import fields
from unbroken.interchange.snappy import unpacked
from unbroken.interchange.tf_bundle import TfBundle
from unbroken.interchange.tf_entries import slice_key
from unbroken.interchange.tf_graph import GRAPH, ObjectGraph, parse_graph

from .bundles import GOLDEN, copied, entries_of, field, findings, number_of, rewrite, with_suffix

fuzz = settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
places = st.floats(0, 1, exclude_max=True)


def files_of(prefix: Path) -> list[Path]:
    return sorted(prefix.parent.glob(f"{prefix.name}.*"))


def look_at_all(path: Path) -> None:
    """Do everything that commands do with a checkpoint. Raises errors of ours."""
    reader = open_checkpoint(path)
    describe(reader)
    examine(reader)
    [*reader.verify()]
    for name in reader.tensors:
        with suppress(UnbrokenError):
            reader.read(name)


@pytest.mark.parametrize(("name", "every"), [("names", 5), ("slots", 9), ("objects", 211)])
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, name: str, every: int) -> None:
    prefix = copied(name, tmp_path)
    for file in files_of(prefix):
        data = file.read_bytes()
        for position in range(0, len(data), every):
            changed = data[position] ^ 1 << position // every % 8
            file.write_bytes(data[:position] + bytes([changed]) + data[position + 1 :])
            assert findings(prefix), (file.name, position)
        file.write_bytes(data)
    assert findings(prefix) == []


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["names", "slots", "objects"])
def test_a_flipped_bit_of_each_byte_is_found(tmp_path: Path, name: str) -> None:
    prefix = copied(name, tmp_path)
    for file in files_of(prefix):
        data = file.read_bytes()
        for position in range(len(data)):
            changed = bytes([data[position] ^ 1 << position % 8])
            file.write_bytes(data[:position] + changed + data[position + 1 :])
            assert findings(prefix), (file.name, position)
        file.write_bytes(data)


@pytest.mark.parametrize("name", ["names", "slots"])
def test_a_file_that_was_cut_short_or_grew_is_found(tmp_path: Path, name: str) -> None:
    prefix = copied(name, tmp_path)
    for file in files_of(prefix):
        data = file.read_bytes()
        for length in range(0, len(data), 1 + len(data) // 12):
            file.write_bytes(data[:length])
            assert findings(prefix), (file.name, length)
        file.write_bytes(data + b"more")
        assert findings(prefix), file.name
        file.write_bytes(data)


@given(
    flips=st.lists(st.tuples(places, places, st.integers(0, 255)), min_size=1, max_size=6),
    name=st.sampled_from(["objects", "names", "slots"]),
)
@fuzz
def test_an_index_that_lies_with_checksums_that_are_right_raises_nothing_but_our_errors(
    tmp_path: Path, name: str, flips: list[tuple[float, float, int]]
) -> None:
    prefix = copied(name, tmp_path)
    index = with_suffix(prefix, ".index")
    entries = entries_of(index)
    for which, where, value in flips:
        at = int(which * len(entries))
        key, content = entries[at]
        changed = bytearray(content or b"\0")
        changed[int(where * len(changed))] = value
        entries[at] = (key, bytes(changed))
    rewrite(index, entries)
    with suppress(UnbrokenError):
        look_at_all(prefix)


@given(flips=st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8))
@fuzz
def test_objects_that_are_not_as_they_were_are_read_or_refused(flips: list[tuple[float, int]]) -> None:
    data = bytearray(TfBundle(GOLDEN / "objects/ckpt-2").strings(GRAPH)[0])
    for place, value in flips:
        data[int(place * len(data))] = value
    with suppress(DamagedError):
        parse_graph(memoryview(bytes(data))).paths()


@given(data=st.binary(max_size=80))
@settings(max_examples=150, deadline=None, database=None)
def test_any_bytes_at_all_are_read_or_refused(data: bytes) -> None:
    with suppress(DamagedError):
        unpacked(memoryview(data), 1 << 20, "test")
    with suppress(DamagedError):
        [*fields(memoryview(data), "test")]
    with suppress(DamagedError):
        parse_graph(memoryview(data)).paths()


@given(data=st.binary(max_size=6000), cut=places, piece=st.sampled_from([5, 1700, 1 << 18]))
@settings(max_examples=40, deadline=None, database=None)
def test_checksums_without_a_c_library_are_the_same_in_pieces_of_any_size(
    data: bytes, cut: float, piece: int
) -> None:
    at = int(cut * len(data))
    whole = crc32c(data)
    before, checksums._PIECE_BYTES = checksums._PIECE_BYTES, piece
    try:
        assert extend_with_integers(extend_with_integers(0, data[:at]), data[at:]) == whole
    finally:
        checksums._PIECE_BYTES = before
    table = checksums._by_table(0xFFFFFFFF, data) ^ 0xFFFFFFFF
    assert table == whole


def written(tmp_path: Path, entries: dict[bytes, bytes], data: bytes = bytes(64)) -> Path:
    """Make a bundle of such entries, with one data file."""
    prefix = tmp_path / "made"
    with_suffix(prefix, ".data-00000-of-00001").write_bytes(data)
    header = {b"": field(1, 1) + field(3, field(1, 1))}
    rewrite(with_suffix(prefix, ".index"), sorted({**header, **entries}.items()))
    return prefix


def shape(*lengths: int) -> bytes:
    return field(2, b"".join(field(2, field(1, length)) for length in lengths))


def tensor(*lengths: int, offset: int = 0, size: int = 0, slices: bytes = b"") -> bytes:
    return field(1, 1) + shape(*lengths) + field(4, offset) + field(5, size) + slices


HOSTILE = {
    "a size past the end": {b"w": tensor(1 << 20, size=4 << 20)},
    "an offset past the end": {b"w": tensor(1, offset=1 << 62, size=4)},
    "a size that no machine has": {b"w": tensor(1 << 40, 1 << 40, size=4)},
    "lengths below nothing": {b"w": tensor((1 << 64) - 1, size=4)},
    "many dimensions": {b"w": tensor(*[1] * 300, size=4)},
    "a size that is not that of its shape": {b"w": tensor(3, size=4)},
    "a file that there is not": {b"w": field(3, 7) + tensor(1, size=4)},
    "tensors upon one another": {f"w{n}".encode(): tensor(16, size=64) for n in range(50)},
    "pieces outside": {b"w": tensor(4, slices=field(7, field(1, field(1, 3) + field(2, 2))))},
    "pieces that are not there": {b"w": tensor(4, slices=field(7, field(1, field(2, 4))))},
    "a piece of petabytes": {
        b"w": tensor(1 << 40, slices=field(7, field(1, b""))),
        slice_key(b"w", ((0, None),)): tensor(1 << 40, size=4 << 40),
    },
    "a number that does not end": {b"w": b"\x08" + b"\xff" * 40},
    "more strings than bytes": {b"w": field(1, 7) + shape(1 << 40) + field(5, 60)},
    "strings longer than the file": {b"w": field(1, 7) + shape(1) + field(5, 60)},
    "elements that overlap what follows": {b"w": field(1, 21) + shape(3) + field(5, 60)},
    "objects longer than the file": {GRAPH.encode(): field(1, 7) + shape() + field(5, 1 << 30)},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_tensor_can_be_is_a_finding(tmp_path: Path, what: str) -> None:
    prefix = written(tmp_path, HOSTILE[what], data=b"\xff\xff\xff\x7f" * 16)
    assert findings(prefix)
    with suppress(UnbrokenError):
        look_at_all(prefix)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([((0, 2),), ((2, 2),)], None),
        ([((0, 3),), ((2, 2),)], "do not overlap"),
        ([((0, 2),), ((3, 1),)], "leave gaps"),
    ],
)
def test_pieces_have_to_fill_a_tensor_each_element_once(
    tmp_path: Path, pieces: list[tuple[tuple[int, int], ...]], why: str | None
) -> None:
    data, entries, slices = bytes(range(64)), {}, b""
    for number, extents in enumerate(pieces):
        ((start, length),) = extents
        slices += field(7, field(1, field(1, start) + field(2, length)))
        piece = data[number * 16 : number * 16 + 4 * length]
        stored = tensor(length, offset=number * 16, size=len(piece))
        kept = checksums.masked(crc32c(piece)).to_bytes(4, "little")
        entries[slice_key(b"w", extents)] = stored + b"\x35" + kept
    prefix = written(tmp_path, {**entries, b"w": tensor(4, slices=slices)}, data)
    if why is None:
        assert open_checkpoint(prefix).read("w") == data[:8] + data[16:24]
        return
    assert why in findings(prefix)[0]
    with pytest.raises(DamagedError):
        open_checkpoint(prefix).read("w")


def graph(*nodes: bytes) -> ObjectGraph:
    return parse_graph(memoryview(b"".join(field(1, node) for node in nodes)))


def child(name: str, node: int) -> bytes:
    return field(1, field(1, node) + field(2, name.encode()))


def variable(key: str) -> bytes:
    return field(2, field(1, b"VARIABLE_VALUE") + field(2, b"") + field(3, key.encode()))


def test_objects_in_cycles_and_very_deep_ones_have_paths_of_bounded_length() -> None:
    round_ = graph(child("a", 1), child("b", 0) + child("again", 1) + variable("k"))
    assert round_.paths()["k"][0] == "a"
    deep = graph(*[child("inner", number + 1) for number in range(3000)], variable("end"))
    assert deep.paths() == {}
    wide = graph(b"".join(child(f"to{n}", 1) for n in range(3000)), variable("k") + variable("other"))
    assert len(wide.paths()["k"]) == 3000
    many = graph(
        b"".join(child(f"{'to' * 60}{n}", 1) for n in range(2000)),
        b"".join(variable(f"k{n}") for n in range(2000)),
    )
    # All of them would be half a gigabyte of names.
    assert sum(len(paths) for paths in many.paths().values()) < 1_000_000
    for broken in (child("a", 7), field(3, field(1, 0) + field(3, 9)), field(3, field(1, 9) + field(3, 0))):
        with pytest.raises(DamagedError, match="one of 1 objects"):
            graph(broken)


def test_names_of_one_and_the_same_path_stay_apart(tmp_path: Path) -> None:
    value = tensor(0)
    entries = {b"a/b": value, b"a": value, b"a/b/.ATTRIBUTES/VARIABLE_VALUE": value, b"\xff": value}
    reader = open_checkpoint(written(tmp_path, entries, b""))
    assert len(reader.tensors) == 4
    describe(reader)


def test_a_block_that_unpacks_to_more_than_it_is_worth_is_refused() -> None:
    bomb = number_of(1 << 29) + b"\x00a" + b"\xfe\x01\x00" * 100
    with pytest.raises(DamagedError, match="when unpacked"):
        unpacked(memoryview(bomb), 1 << 30, "test")
    assert unpacked(memoryview(number_of(65) + b"\x00a" + b"\xfe\x01\x00"), 1 << 30, "test") == b"a" * 65


def test_keys_that_repeat_one_another_without_end_are_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "made"
    first = b"\0\0" + number_of(2) + field(1, 1) + b"\0" + number_of(16_000) + b"\0" + b"k" * 16_000
    # Each entry takes four bytes, and all keys together gigabytes.
    longer = b"".join(number_of(16_000) + b"\x01\0" + b"a" for _ in range(10_000))
    block = first + longer + b"\0\0\0\0\x01\0\0\0\0"
    index = b"\0\x01" + number_of(len(number_of(len(block) - 1)) + 1) + b"z\0" + number_of(len(block) - 1)
    index += b"\0\0\0\0\x01\0\0\0\0"
    empty = b"\0\0\0\0\x01\0\0\0\0"
    parts = [part + checksums.masked(crc32c(part)).to_bytes(4, "little") for part in (block, empty, index)]
    handles = (
        number_of(len(parts[0])) + number_of(8) + number_of(len(parts[0]) + 13) + number_of(len(index) - 1)
    )
    with_suffix(prefix, ".index").write_bytes(b"".join(parts) + handles.ljust(40, b"\0") + TABLE_MAGIC)
    with_suffix(prefix, ".data-00000-of-00001").write_bytes(b"")
    assert any("keys" in line for line in findings(prefix))


def test_a_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    prefix = copied("slots", tmp_path)
    data = with_suffix(prefix, ".data-00000-of-00001")
    data.unlink()
    os.mkfifo(data)
    assert any("expected a file" in line for line in findings(prefix))
    os.mkfifo(tmp_path / "checkpoint")
    assert open_checkpoint(tmp_path).tensors
