"""A pickle is a program: it is read to its end, and not one of its instructions is carried out."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import time
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest

from unbroken.errors import DamagedError
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats import plain
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
    ],
)
def test_what_is_no_pickle_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        read(data)
