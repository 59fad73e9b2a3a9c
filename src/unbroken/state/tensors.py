"""Tensors without a framework: a dtype name, a shape and bytes."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from unbroken.errors import DamagedError

# The dtype names of the safetensors format, with the size of one element in bytes.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "C64": 8,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


# Those that can be NaN or infinite, as far as that is looked at.
FLOATING = frozenset({"F16", "BF16", "F32", "F64", "C64"})


def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor of that dtype and shape has."""
    return math.prod(shape) * ITEM_BYTES[dtype]


class TensorSource(ABC):
    """Something whose bytes can be captured: a live tensor of a framework, or a `HostTensor`.

    An abstract class rather than a protocol: it is asked for at every leaf of a state, and the check of
    a protocol takes fifty times as long.
    """

    __slots__ = ()

    dtype: str
    shape: tuple[int, ...]

    @property
    @abstractmethod
    def identity(self) -> Hashable | None:
        """Equal for two sources that are the same memory seen the same way; None if that is not known."""

    @property
    def address(self) -> int | None:
        """Where the elements lie in host memory, row-major, little-endian, without gaps; None if not so.

        Good until the owner of the tensor changes or frees it: for a copy made at once.
        """
        return None

    @property
    def library(self) -> str | None:
        """The root of the codec that loads it, where that is another one than encoded it."""
        return None

    @property
    def is_frozen(self) -> bool:
        """True if training is not meant to change it: kept apart, so that it need not be written again.

        A hint for the layout only; whether it changed is told by its bytes.
        """
        return False

    @property
    def is_trained(self) -> bool:
        """True if training makes it, so that it is finite as long as training is sound."""
        return False

    @abstractmethod
    def copy_to(self, target: memoryview) -> None:
        """Copy the elements, row-major and little-endian, into `target`, which has their exact size."""


def memory_at(address: int, size: int) -> memoryview:
    """Return the `size` bytes of host memory at `address`, which its owner must keep, to read and write."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def address_of(memory: memoryview) -> int:
    """Return where `memory`, which may be written, lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def bytes_of(source: TensorSource) -> memoryview:
    """Return the bytes of a tensor: its own memory where that lies in order, otherwise a copy."""
    size, address = size_bytes(source.dtype, source.shape), source.address
    return memoryview(copy_bytes(source)) if not size or address is None else memory_at(address, size)


def copy_bytes(source: TensorSource) -> bytearray:
    """Return a copy of the bytes of a tensor."""
    data = bytearray(size_bytes(source.dtype, source.shape))
    if data:
        source.copy_to(memoryview(data))
    return data


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor(TensorSource):
    """A tensor in host memory. Two are equal if dtype, shape and every byte are."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        expected = size_bytes(self.dtype, self.shape)
        if self.data.nbytes != expected:
            raise DamagedError(
                f"tensor {self.dtype} {self.shape}: expected {expected} bytes, found {self.data.nbytes}",
                hint="use another checkpoint",
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostTensor):
            return NotImplemented
        return (self.dtype, self.shape) == (other.dtype, other.shape) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    @property
    def identity(self) -> Hashable | None:
        return None

    def copy_to(self, target: memoryview) -> None:
        target[:] = self.data


class LoadedTensor(Protocol):
    """A tensor that a checkpoint holds: `data` are its bytes, row-major and little-endian."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> memoryview: ...


class AwaitedTensor:
    """A tensor of a checkpoint that has not been read yet.

    Whoever makes a tensor of it may say in `memory` where the bytes have to go, and keep what it made in
    `made` for the next who asks; they are there before anybody uses it. `live` is the tensor that
    stands in this place now and may be filled. Asking for `data` has the bytes read at once, by `load`.
    """

    __slots__ = ("_load", "dtype", "live", "made", "memory", "shape")

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        load: Callable[[], memoryview],
        *,
        live: TensorSource | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.live = live
        self.memory: memoryview | None = None
        self.made: object = None
        self._load = load

    @property
    def data(self) -> memoryview:
        return self._load()
