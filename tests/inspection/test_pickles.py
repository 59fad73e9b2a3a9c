"""A pickle is a program: it is read to its end, and not one of its instructions is carried out."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import time
import tracemalloc
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import DamagedError
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats import opcodes, plain
from unbroken.inspection.formats.constructors import read_values, unusual
from unbroken.inspection.formats.opcodes import _WAYS, Machine
from unbroken.inspection.formats.views import torch_storage


def read(data: bytes) -> Any:
    return read_values(Machine(data, "test").load(), torch_storage)[0]


def as_torch_file(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/version", "3\n")
    return path


class _Call:
    """Pickled as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


class Settings:
    def __init__(self) -> None:
        self.lr = 0.1


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol_is_read(protocol: int) -> None:
    value = {
        "integers": [0, 1, -1, 255, 65536, -(2**31), 2**63, -(2**70), True, False, None],
        "floats": [0.1, -0.0, 1e300],
        "texts": ["", "plain", "\u00fc\u4e2d\U0001f600", "x" * 300],
        "nested": [{"a": [[], {}, [1]]}],
    }
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_containers_become_the_nearest_plain_ones(protocol: int) -> None:
    counts: defaultdict[str, int] = defaultdict(int, a=1)
    value = [(1, 2), OrderedDict(b=1, a=2), counts, {3}, frozenset({4}), b"bytes", bytearray(b"more"), 1 + 2j]
    assert read(pickle.dumps(value, protocol)) == [
        [1, 2],
        {"b": 1, "a": 2},
        {"a": 1},
        [3],
        [4],
        "b'bytes'",
        "b'more'",
        "complex(1.0, 2.0)",
    ]


@pytest.mark.parametrize("protocol", range(6))
def test_an_object_is_its_class_and_its_fields(protocol: int) -> None:
    found = read(pickle.dumps(Settings(), protocol))
    assert found["$object"] in (
        f"{Settings.__module__}.Settings",
        "copyreg._reconstructor",
        "copy_reg._reconstructor",
    )
    assert found["state"] == {"lr": 0.1}


def test_every_opcode_of_the_standard_library_is_known() -> None:
    # Buffers outside the pickle are in no file.
    outside = {"NEXT_BUFFER", "READONLY_BUFFER", "STOP"}
    codes = {ord(opcode.code) for opcode in pickletools.opcodes if opcode.name not in outside}
    assert codes == set(_WAYS)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_malicious_pickle_runs_nothing(tmp_path: Path, protocol: int, wrapped: bool) -> None:
    canary = tmp_path / "canary"
    calls = [
        _Call(os.system, f"touch {canary}"),
        _Call(subprocess.run, ["touch", str(canary)]),
        _Call(exec, f"open({str(canary)!r}, 'w')"),
        _Call(open, str(canary), "w"),
        _Call(getattr, _Call(__import__, "os"), "system"),
    ]
    data = pickle.dumps({"weights": calls if wrapped else calls[0]}, protocol)
    reader = open_checkpoint(as_torch_file(tmp_path / "evil.pt", data))
    assert "os.system" in str(reader.values).replace("posix.", "os.")
    assert any(name.endswith(".system") for name in reader.facts["objects"])
    assert [*reader.verify()] == []
    assert not canary.exists()
    pickle.loads(data)
    assert canary.exists(), "the pickle of this test does nothing when it is loaded"


def test_a_module_that_is_named_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert read(b"\x80\x02ctrap\nClass\n)\x81}b.") == {"$object": "trap.Class", "state": {}}
    assert not (tmp_path / "canary").exists()


def test_only_classes_that_are_no_part_of_ordinary_checkpoints_are_pointed_out() -> None:
    ordinary = [
        "collections.OrderedDict",
        "torch._utils._rebuild_tensor_v2",
        "torch.FloatStorage",
        "torch.float32",
    ]
    assert unusual([*ordinary, "os.system", "torch.hub.load"]) == ["os.system", "torch.hub.load"]


def test_keys_are_told_apart_whatever_they_are() -> None:
    flat = {"1": "b", "1'": "c", (1, "x"): "d", None: "e", b"k": "f", 1.5: "g", True: "h"}
    assert read(pickle.dumps(flat, 4)) == {
        "1": "b",
        "1'": "c",
        "[1, 'x']": "d",
        "None": "e",
        "b'k'": "f",
        "1.5": "g",
        "True": "h",
    }
    assert read(pickle.dumps({1: "a", "1": "b", "1'": "c"}, 4)) == {"1": "a", "1'": "b", "1''": "c"}
    nested = {((1,), 2): "a", ((1,), 3): "b", frozenset((1, 2)): "c", frozenset((3,)): "d"}
    assert sorted(read(pickle.dumps(nested, 4)).values()) == ["a", "b", "c", "d"]


def test_the_last_value_of_one_key_counts() -> None:
    assert read(b"\x80\x02}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00aK\x02u.") == {"a": 2}


@pytest.mark.parametrize("program", [b"\x8f", b"}", b"]", b"N\x85", b"N\x94", b"U\x01x", b"NQ", b"c\n\n"])
def test_an_opcode_makes_little_beside_what_it_reads(program: bytes) -> None:
    count = 20_000
    tracemalloc.start()
    try:
        Machine(program * count + b".", "test").load()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 90 * count * len(program) + 100_000


def test_a_long_name_for_each_of_many_tensors_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_MOST_PATH_CHARACTERS", 100_000)
    data = pickle.dumps({"x" * 4000: [bytes([index]) * 100 for index in range(50)]}, 4)
    reading = read_values(Machine(data, "test").load(), torch_storage)[1]
    assert len(reading.tensors) == 24
    assert reading.notes == ["too many long names of tensors: the rest is not shown"]


def test_a_program_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "_MOST_OPCODES", 100)
    with pytest.raises(DamagedError, match="more than 100 opcodes"):
        read(b"\x8f" * 101 + b".")


def test_an_extension_is_a_class_that_is_pointed_out() -> None:
    machine = Machine(b"\x80\x02\x82\x07)\x81.", "test")
    machine.load()
    assert unusual(machine.globals) == ["copyreg.extension 7"]


def test_what_does_not_repeat_is_shown_however_much_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_MOST_REPEATED", 100)
    assert read(pickle.dumps([set(range(30)) for _ in range(200)], 2)) == [[*range(30)]] * 200


def _nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def _laughs() -> bytes:
    # Each list holds the one before it ten times: 10 to the power of 40 values.
    out = io.BytesIO()
    out.write(b"\x80\x02]q\x00")
    for index in range(40):
        out.write(b"](" + bytes([ord("h"), index]) * 10 + b"eq" + bytes([index + 1]))
    out.write(b".")
    return out.getvalue()


def _call(name: bytes, count: int, *, argument: bytes) -> bytes:
    """Call `name` many times with one large argument."""
    module, _, function = name.rpartition(b".")
    call = b"h\x01h\x00R"
    return (
        b"\x80\x02](c"
        + module
        + b"\n"
        + function
        + b"\nq\x01"
        + argument
        + b"\x85q\x00"
        + call * count
        + b"e."
    )


def _text(length: int) -> bytes:
    return b"X" + length.to_bytes(4, "little") + b"x" * length


def _calls_in_calls(name: bytes, depth: int) -> bytes:
    module, _, function = name.rpartition(b".")
    head = b"c" + module + b"\n" + function + b"\n"
    return b"\x80\x02" + head * depth + b"X\x04\x00\x00\x00'\"\\x" + b"\x85R" * depth + b"."


def _subclasses_in_subclasses(depth: int) -> bytes:
    head = b"(ctorch._tensor\n_rebuild_from_type_v2\nN"
    return b"\x80\x02" + head[1:-1] + head * depth + b"NN" + b"Nt" * depth + b"R."


def _long_key(count: int) -> bytes:
    return b"\x80\x02}" + _text(100_000) + b"](" + b"]" * count + b"es."


def _devices_in_devices(depth: int) -> bytes:
    # What is printed inside what is printed doubles its backslashes.
    head = b"ctorch\ndevice\n("
    return b"\x80\x02" + (head + b"](") * depth + b"X\x01\x00\x00\x00\\" + b"etR" * depth + b"."


def _keys_in_keys(depth: int) -> bytes:
    return b"\x80\x02" + b"}" * depth + b"X\x02\x00\x00\x00\\'" + b"Ns" * depth + b"."


def _shared_keys(depth: int) -> bytes:
    out = io.BytesIO()
    out.write(b"\x80\x02K\x01\x85q\x00")
    for index in range(depth):
        get = bytes([ord("h"), index])
        out.write(get + get + b"\x86q" + bytes([index + 1]))
    return out.getvalue() + b"}" + bytes([ord("h"), depth]) + b"Ns."


def _tuples_in_keys(depth: int) -> bytes:
    return b"\x80\x02}" + b"X\x02\x00\x00\x00\\'" + b"\x85" * depth + b"Ns."


def _same_names(count: int) -> bytes:
    return b"\x80\x02}(" + b"]\x85N" * count + b"u."


def _long_text() -> bytes:
    return b"\x80\x02](" + _text(1 << 20) + b"q\x00" + b"h\x00" * 20_000 + b"e."


@pytest.mark.parametrize(
    "data",
    [
        _nested(50_000),
        _laughs(),
        _long_text(),
        # A list that holds itself, and a dictionary that does.
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
        # An integer of a million digits.
        b"\x80\x02\x8b" + (400_000).to_bytes(4, "little") + b"\x7f" * 400_000 + b".",
        _call(b"collections.OrderedDict", 5000, argument=b"](" + b"K\x01K\x02\x86" * 5000 + b"e"),
        _call(b"builtins.set", 5000, argument=b"](" + b"K\x01" * 5000 + b"e"),
        _call(b"pathlib.PosixPath", 5000, argument=_text(1 << 20)),
        _call(b"_codecs.encode", 5000, argument=_text(1 << 20)),
        _calls_in_calls(b"builtins.complex", 90),
        _calls_in_calls(b"pathlib.WindowsPath", 2000),
        _subclasses_in_subclasses(2000),
        _long_key(20_000),
        _devices_in_devices(33),
        _devices_in_devices(2000),
        # A dictionary that is its own key.
        b"}q\x00h\x00Ns.",
        _keys_in_keys(40),
        _keys_in_keys(50_000),
        _shared_keys(60),
        _tuples_in_keys(5000),
        _same_names(20_000),
        b"\x80\x02](L" + b"7" * 4000 + b"L\nq\x00" + b"h\x00" * 250_000 + b"e.",
        _call(b"builtins.complex", 50_000, argument=b"L" + b"7" * 4000 + b"L\n"),
    ],
    ids=[
        "nested",
        "laughs",
        "long text",
        "list in itself",
        "dictionary in itself",
        "integer",
        "dictionaries of one list",
        "sets of one list",
        "paths of one text",
        "bytes of one text",
        "calls in calls",
        "paths in paths",
        "subclasses in subclasses",
        "long key",
        "devices in devices",
        "devices in many devices",
        "dictionary as its own key",
        "keys in keys",
        "keys in many keys",
        "keys of shared tuples",
        "tuples in keys",
        "keys of one name",
        "one integer",
        "calls with one integer",
    ],
)
def test_a_bomb_does_not_go_off(data: bytes) -> None:
    began = time.process_time()
    assert len(str(read(data))) < 400_000_000
    assert time.process_time() - began < 30


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02\xff.",
        b"\x80\x02h\x05.",
        b"\x80\x02t.",
        b"\x80\x02R.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02(K\x01d.",
        b"\x80\x02K\x01}b.",
        b"\x80\x02X\xff\xff\xff\xffx.",
        b"\x80\x02\x8b\xff\xff\xff\xff.",
        b"I" + b"9" * 10_000 + b"\n.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
        # A name that is joined of two long words, many times over.
        b"\x80\x02" + _text(1 << 20) + b"q\x00h\x00" + b"\x93.",
    ],
)
def test_what_is_no_pickle_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        read(data)
