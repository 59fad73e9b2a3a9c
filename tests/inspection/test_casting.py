"""Rounding to another dtype is that of torch, bit for bit but for the payload of NaN."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.inspection.casting import CASTABLE, CASTS, cast

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_of(data: bytes | bytearray, dtype: str) -> torch.Tensor:
    kind = TORCH[dtype]
    if not data:
        return torch.empty(0, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def is_cast_as_by_torch(data: bytes, source: str, target: str) -> None:
    before = tensor_of(data, source)
    # torch has no direct way from the kinds of 8 bits to all others; by 32 bits none is rounded twice.
    wide = before if source in CASTS else before.to(torch.float32)
    expected = wide.to(TORCH[target])
    done, overflowed = cast(memoryview(data), source, target)
    found = tensor_of(done, target)
    assert torch.equal(found.isnan(), wide.isnan())
    numbers = ~wide.isnan()
    assert torch.equal(bits_of(found)[numbers], bits_of(expected)[numbers])
    assert overflowed == int((found.isinf() & ~wide.isinf()).sum())


def exact_to_bfloat16(number: float) -> int:
    """Return the bits of the nearest BF16, by fractions of integers alone."""
    magnitude = abs(number)
    below, above = 0, 0x7F80
    while above - below > 1:
        middle = (below + above) // 2
        (value,) = struct.unpack("<f", bytes(2) + struct.pack("<H", middle))
        below, above = (middle, above) if value <= magnitude else (below, middle)
    (low,) = struct.unpack("<f", bytes(2) + struct.pack("<H", below))
    # Where infinity stands, the next number of the same distance would be.
    high = 2.0**128 if above == 0x7F80 else struct.unpack("<f", bytes(2) + struct.pack("<H", above))[0]
    middle_numerator = magnitude - low, high - magnitude
    bits = below if middle_numerator[0] < middle_numerator[1] else above
    if middle_numerator[0] == middle_numerator[1]:
        bits = below if below % 2 == 0 else above
    return bits | (0x8000 if struct.pack(">d", number)[0] & 0x80 else 0)


@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("source", sorted(CASTABLE))
def test_every_number_of_16_and_8_bits_becomes_what_torch_makes_of_it(source: str, target: str) -> None:
    size = TORCH[source].itemsize
    if size <= 2:
        data = b"".join(bits.to_bytes(size, "little") for bits in range(1 << 8 * size))
        is_cast_as_by_torch(data, source, target)
    else:
        # All that is half way between two numbers of 16 bits, and its neighbours.
        halves = struct.unpack("<65536H", bytes(range(256)) * 512)
        words = [half << 16 | low for half in halves[:256] for low in (0, 0x7FFF, 0x8000, 0x8001)]
        floats = struct.pack(f"<{len(words)}I", *words)
        data = floats if source == "F32" else tensor_of(floats, "F32").double().numpy().tobytes()
        is_cast_as_by_torch(data, source, target)


@pytest.mark.parametrize("target", CASTS)
def test_ties_of_32_bits_go_to_the_even_neighbour(target: str) -> None:
    chosen = random.Random(0)
    words = [
        chosen.getrandbits(16) << 16 | low
        for low in (0x1000, 0x3000, 0x0FFF, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
        for _ in range(4000)
    ]
    is_cast_as_by_torch(struct.pack(f"<{len(words)}I", *words), "F32", target)


@settings(max_examples=60, deadline=None, database=None)
@given(words=st.lists(st.integers(0, (1 << 32) - 1), max_size=70), target=st.sampled_from(CASTS))
def test_any_bits_of_32_become_what_torch_makes_of_them(words: list[int], target: str) -> None:
    is_cast_as_by_torch(struct.pack(f"<{len(words)}I", *words), "F32", target)


@settings(max_examples=60, deadline=None, database=None)
@given(numbers=st.lists(st.floats(), max_size=70), target=st.sampled_from(("F64", "F32")))
def test_doubles_become_what_torch_makes_of_them(numbers: list[float], target: str) -> None:
    is_cast_as_by_torch(struct.pack(f"<{len(numbers)}d", *numbers), "F64", target)


@settings(max_examples=200, deadline=None, database=None)
@given(
    near=st.floats(width=32, allow_nan=False, allow_infinity=False),
    apart=st.sampled_from([0.0, 2.0**-52, -(2.0**-52), 2.0**-40, -(2.0**-40)]),
    is_tie=st.booleans(),
)
def test_doubles_are_rounded_once_though_they_pass_through_32_bits(
    near: float, apart: float, is_tie: bool
) -> None:
    if is_tie:
        # Half way between two numbers of 16 bits, as far as 32 bits tell.
        word = struct.unpack("<I", struct.pack("<f", near))[0] & 0xFFFF0000 | 0x8000
        (near,) = struct.unpack("<f", struct.pack("<I", word))
    number = near * (1 + apart)
    done, _ = cast(memoryview(struct.pack("<d", number)), "F64", "BF16")
    assert int.from_bytes(done, "little") == exact_to_bfloat16(number)


def test_doubles_near_ties_of_16_bits_are_rounded_once() -> None:
    # By way of 32 bits this would be a tie, and go down to the even one.
    number = 1 + 2.0**-11 + 2.0**-40
    done, _ = cast(memoryview(struct.pack("<d", number)), "F64", "F16")
    assert struct.unpack("<e", done) == (1 + 2.0**-10,)


@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("source", CASTS)
def test_nan_stays_nan_with_its_sign(source: str, target: str) -> None:
    size, exponent = {"F64": (8, 11), "F32": (4, 8), "BF16": (2, 8), "F16": (2, 5)}[source]
    fraction = size * 8 - 1 - exponent
    infinite = ((1 << exponent) - 1) << fraction
    words = [
        sign << (size * 8 - 1) | infinite | payload
        for sign in (0, 1)
        for payload in (1, (1 << fraction) - 1, 1 << (fraction - 1))
    ]
    data = b"".join(word.to_bytes(size, "little") for word in words)
    found = tensor_of(cast(memoryview(data), source, target)[0], target)
    assert found.isnan().all()
    assert found.signbit().tolist() == [False] * 3 + [True] * 3


def test_a_tensor_of_several_pieces_is_cast_to_its_end() -> None:
    numbers = torch.arange(70_000, dtype=torch.float32) * 0.37 - 9000
    numbers[-1] = 1e30
    is_cast_as_by_torch(numbers.numpy().tobytes(), "F32", "F16")
    is_cast_as_by_torch(numbers.numpy().tobytes(), "F32", "BF16")
