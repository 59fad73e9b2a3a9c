"""Files of `flax.serialization`, laid out as it documents them: it is not installed where the tests run."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.cli.main import main
from unbroken.errors import DamagedError, UnbrokenError, UsageError
from unbroken.inspection import roles
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats.flax_msgpack import is_flax


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def array(value: Any, code: int = 1, **changes: Any) -> msgspec.msgpack.Ext:
    said = {"shape": list(value.shape), "dtype": value.dtype.name, "data": value.tobytes(), **changes}
    return msgspec.msgpack.Ext(code, packed([*said.values()]))


WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)


def state() -> dict[str, Any]:
    flat = WEIGHTS.reshape(-1)
    return {
        "step": 7,
        "params": {"dense": {"kernel": array(WEIGHTS), "bias": array(np.zeros(3, np.float16))}},
        "opt_state": {"0": {"count": array(np.int32(7), 3), "mu": {"kernel": array(WEIGHTS * 2)}}, "1": None},
        "large": {
            "__msgpack_chunked_array__": True,
            "shape": {"0": 2, "1": 3},
            "chunks": {"0": array(flat[:4]), "1": array(flat[4:])},
        },
        "phase": msgspec.msgpack.Ext(2, packed([1.0, -2.0])),
        "key": b"short",
        "long": b"long" * 20,
        "bf16": array(np.zeros(2, np.uint16), dtype="bfloat16"),
        "odd": array(np.zeros(2, np.uint8), dtype="int4"),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "state.msgpack").write_bytes(packed(state()))
    return tmp_path / "state.msgpack"


def test_arrays_and_values_are_read_as_they_were_written(file: Path) -> None:
    reader = open_checkpoint(file)
    assert (reader.format, reader.problems, reader.checksums) == ("Flax, MessagePack", [], None)
    assert bytes(reader.read("params/dense/kernel")) == WEIGHTS.tobytes()
    assert reader.tensors["params/dense/kernel"].shape == (2, 3)
    assert bytes(reader.read("large")) == WEIGHTS.tobytes()
    assert reader.tensors["large"].shape == (2, 3)
    assert reader.tensors["bf16"].dtype == "BF16"
    assert bytes(reader.read("long")) == b"long" * 20
    assert reader.values["opt_state"] == {
        "0": {"count": 7, "mu": {"kernel": {"$tensor": "opt_state/0/mu/kernel"}}},
        "1": None,
    }
    assert (reader.values["phase"], reader.values["key"]) == ("complex(1.0, -2.0)", "b'short'")
    assert roles.counters(reader.values) == {"step": 7}
    assert reader.notes == ["array odd is not read: elements of the kind int4"]


def test_verify_says_that_there_is_no_checksum(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(file)]) == 0
    assert "Flax, MessagePack carries no checksum" in capsys.readouterr().out
    assert main(["inspect", str(file), "--values", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert rows["params/dense/kernel"]["numbers"]["largest"] == 5


@pytest.mark.parametrize(
    "value",
    [
        array(WEIGHTS, shape=[3, 3]),
        array(WEIGHTS, shape=[-2, 3]),
        array(WEIGHTS, shape=[1 << 60, 1 << 60]),
        array(WEIGHTS, data="text"),
        msgspec.msgpack.Ext(1, b"\x91"),
        {"__msgpack_chunked_array__": True, "shape": {"0": 2, "1": 3}, "chunks": {"0": array(WEIGHTS[0])}},
        {"__msgpack_chunked_array__": True, "shape": 3, "chunks": 4},
    ],
)
def test_a_shape_that_its_elements_do_not_fill_is_damage(tmp_path: Path, value: Any) -> None:
    (tmp_path / "x").write_bytes(packed({"a": value}))
    with pytest.raises(DamagedError):
        open_checkpoint(tmp_path / "x")


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa1a" + b"\x91" * 100_000,
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xdb\xff\xff\xff\xff",
        b"\x81\xa1a\xc1",
    ],
)
def test_hostile_lengths_and_nesting_are_damage_and_nothing_worse(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DamagedError):
        open_checkpoint(tmp_path / "x")


def test_what_was_cut_short_or_lengthened_is_noticed(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data + b"\x00\x00")
    assert [found.problem for found in open_checkpoint(file).problems] == ["2 bytes at the end are nobody's"]
    for length in range(40, len(data), 17):
        file.write_bytes(data[:length])
        with pytest.raises(DamagedError):
            open_checkpoint(file)


def test_other_files_are_not_taken_for_it(tmp_path: Path) -> None:
    assert not any(
        map(is_flax, (b"", b"\x80", b"\x81", b"\x80\x02}q\x00.", b"\x82\x00\x01", b"{}", b"weights"))
    )
    (tmp_path / "x").write_bytes(b"\x82\xa2\xff\xfe")
    with pytest.raises(UsageError):
        open_checkpoint(tmp_path / "x")


@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=6)
)
@settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_change_is_an_error_of_ours_or_does_no_harm(
    tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    data = bytearray(packed(state()))
    for place, bit in flips:
        data[int(place * len(data))] ^= 1 << bit
    (tmp_path / "x").write_bytes(data)
    with suppress(UnbrokenError):
        reader = open_checkpoint(tmp_path / "x")
        for path in reader.tensors:
            reader.read(path)
