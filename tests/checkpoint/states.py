"""Small states without a framework, and the snapshots of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from unbroken.checkpoint.manifest import PartEntry, Position
from unbroken.checkpoint.snapshot import Description, HostBuffers, Snapshot, capture
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor
from unbroken.state.tree import Encoder

RUN_ID = "20260101-000000-abcdef01"


def tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> HostTensor:
    return HostTensor(dtype, shape, memoryview(data))


def state_at(step: int) -> dict[str, Any]:
    """A state whose every tensor depends on the step; the large part gets a shard of its own."""
    fill = step % 251
    return {
        "model": {
            "weight": tensor("F32", (600, 500), bytes([fill]) * 1_200_000),
            "bias": tensor("F16", (3,), bytes([fill, 1, 2, 3, 4, 5])),
            "empty": tensor("F32", (0, 4), b""),
        },
        "optimizer": {"step": tensor("I64", (), step.to_bytes(8, "little")), "betas": (0.9, 0.999)},
        "rng": {"words": bytes([fill]) * 100},
    }


def snapshot_at(
    step: int,
    *,
    state: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    run_id: str = RUN_ID,
) -> Snapshot:
    table = TensorTable()
    encoder = Encoder(table)
    parts = {
        name: PartEntry(handler="test", type="builtins.dict", state=encoder.encode(value, name))
        for name, value in (state or state_at(step)).items()
    }
    description = Description(
        run_id=run_id,
        step=step,
        attempt=1,
        created=datetime(2026, 1, 1, step // 60 % 24, step % 60, tzinfo=UTC).isoformat(),
        position=Position(epoch=step // 100, inside_epoch=True, loaders=[]),
        parts=parts,
        metrics=metrics or {},
    )
    return capture(description, table, HostBuffers())
