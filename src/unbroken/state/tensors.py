"""Tensors without a framework: a dtype name, a shape and bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass

from unbroken.errors import DamagedError

# The dtype names of the safetensors format, with the size of one element in bytes.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
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

    @abstractmethod
    def copy_to(self, target: memoryview) -> None:
        """Copy the elements, row-major and little-endian, into `target`, which has their exact size."""


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
