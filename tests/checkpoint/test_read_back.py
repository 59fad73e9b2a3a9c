"""A sample of a checkpoint, and reading past what the system remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.checkpoint.verify import verify_sample
from unbroken.storage.local import LocalStorage

from .states import snapshot_at, state_at, tensor

TREE = "checkpoints/step-00000007"


def many_tensors() -> dict[str, Any]:
    return {"model": {f"weight{number}": tensor("U8", (100,), bytes([number]) * 100) for number in range(20)}}


def damaged_by_turns(directory: Path, state: dict[str, Any]) -> list[str]:
    """Return the tensors that a sample finds damaged, if each is damaged alone."""
    store = CheckpointStore(directory)
    found = []
    manifest = store.save(snapshot_at(7, state=state)).manifest
    for path, entry in manifest.tensors.items():
        if not entry.size_bytes:
            continue
        file = directory / TREE / entry.file
        before = file.read_bytes()
        data = bytearray(before)
        data[entry.offset] ^= 1
        file.write_bytes(data)
        found += [path for finding in verify_sample(store.storage, TREE).findings if path in finding.problem]
        file.write_bytes(before)
    return found


def test_a_sample_reads_a_tenth_of_a_shard(tmp_path: Path) -> None:
    assert len(damaged_by_turns(tmp_path, many_tensors())) == 2


def test_a_sample_reads_at_least_one_tensor_of_each_shard(tmp_path: Path) -> None:
    found = damaged_by_turns(tmp_path, state_at(7))
    files = {entry.file for entry in CheckpointStore(tmp_path).get("step-00000007").manifest.tensors.values()}
    manifest = CheckpointStore(tmp_path).get("step-00000007").manifest
    assert {manifest.tensors[path].file for path in found} == files
    assert len(files) == 2


def test_samples_of_different_checkpoints_are_of_different_tensors(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    seen = set()
    for step in range(1, 11):
        name = store.save(snapshot_at(step, state=many_tensors())).name
        shard = next((tmp_path / "checkpoints" / name).glob("*.safetensors"))
        # The header ends where the tensors begin, on a page.
        shard.write_bytes(shard.read_bytes()[:4096] + bytes(shard.stat().st_size - 4096))
        findings = verify_sample(store.storage, f"checkpoints/{name}").findings
        seen |= {finding.problem.split(":")[0] for finding in findings}
    assert len(seen) > 5


def test_the_header_and_the_size_of_each_shard_are_looked_at(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(7))
    for file in (tmp_path / TREE).glob("*.safetensors"):
        before = file.read_bytes()
        for change in (before[:9] + b"?" + before[10:], before[:-1], before + b"\0"):
            file.write_bytes(change)
            assert verify_sample(store.storage, TREE).findings
        file.write_bytes(before)
    assert verify_sample(store.storage, TREE).is_intact


def read_from_disk() -> int:
    words = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(words["read_bytes"])


def test_what_was_dropped_is_read_from_the_disk(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    # Too small for direct I/O: it goes through the memory of the system.
    storage.write("tree/value", [bytes(500_000)])
    storage.read("tree/value")
    before = read_from_disk()
    storage.read("tree/value")
    assert read_from_disk() == before
    storage.drop_cached("tree")
    storage.read("tree/value")
    if read_from_disk() == before:
        pytest.skip("the file system here is in memory, or says nothing of what it reads")
    assert read_from_disk() - before >= 500_000
