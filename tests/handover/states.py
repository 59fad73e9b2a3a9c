"""States as a run hands them to a slot: described, and still live."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Any

from unbroken.checkpoint.manifest import PartEntry, Position
from unbroken.checkpoint.snapshot import Description
from unbroken.state.table import TensorTable
from unbroken.state.tensors import TensorSource, copy_bytes
from unbroken.state.tree import Encoder

from ..checkpoint.states import RUN_ID, tensor

MEBIBYTE = 1 << 20


class LiveTensor(TensorSource):
    """Bytes that change in place, copied from their address, in pieces if they are many."""

    def __init__(self, size: int) -> None:
        self.dtype = "U8"
        self.shape = (size,)
        self.data = bytearray(size)

    @property
    def identity(self) -> Hashable | None:
        return None

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def copy_to(self, target: memoryview) -> None:
        target[:] = self.data

    def fill(self, byte: int) -> None:
        ctypes.memset(self.address, byte, len(self.data))


def small_state(step: int) -> dict[str, Any]:
    return {"model": {"weight": tensor("I64", (2,), step.to_bytes(8, "little") * 2), "step": step}}


def described(step: int, state: dict[str, Any], *, attempt: int = 1) -> tuple[Description, TensorTable]:
    """What a run hands over at `step`."""
    table = TensorTable()
    encoder = Encoder(table)
    parts = {
        name: PartEntry(handler="test", type="builtins.dict", state=encoder.encode(value, name))
        for name, value in state.items()
    }
    description = Description(
        run_id=RUN_ID,
        step=step,
        attempt=attempt,
        created=datetime(2026, 1, 1, tzinfo=UTC).isoformat(),
        position=Position(epoch=step // 100, inside_epoch=True, loaders=[]),
        parts=parts,
    )
    return description, table


def bytes_of(table: TensorTable) -> dict[str, bytes]:
    return {path: bytes(copy_bytes(source)) for path, source in table.sources.items()}
