"""One flipped bit anywhere in a checkpoint is detected."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.checkpoint.verify import verify_checkpoint
from unbroken.errors import DamagedError, FormatVersionError

from .states import snapshot_at, tensor

SMALL = {
    "model": {"weight": tensor("F32", (3, 5), bytes(range(60))), "flag": tensor("BOOL", (), b"\1")},
    "optimizer": {"lr": 0.1, "betas": (0.9, 0.999), "words": b"y" * 90},
}


def regions(size: int, header: int, dice: random.Random) -> list[int]:
    """Every byte of the tensors and of the header's text; a sample of its padding."""
    text = range(min(header, 700))
    padding = dice.sample(range(700, header), 40) if header > 740 else []
    return [*text, *padding, *range(header, size)]


@pytest.mark.parametrize("file", ["manifest.json", "manifest.digest", "state-00.safetensors"])
def test_a_flipped_bit_anywhere_is_found_by_load_and_by_verify(tmp_path: Path, file: str) -> None:
    dice = random.Random(file)
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1, state=SMALL))
    path = tmp_path / "checkpoints/step-00000001" / file
    good = path.read_bytes()
    header = 4096 if file.endswith("safetensors") else len(good)
    for offset in regions(len(good), header, dice):
        data = bytearray(good)
        data[offset] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        with pytest.raises((DamagedError, FormatVersionError)):
            store.get("step-00000001").load()
        assert not verify_checkpoint(store.storage, "checkpoints/step-00000001").is_intact, offset
    path.write_bytes(good)
    assert store.get("step-00000001").load() == SMALL
