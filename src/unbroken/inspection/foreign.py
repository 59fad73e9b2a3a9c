"""What a checkpoint of any format holds, as plain values for people and programs."""

from __future__ import annotations

from typing import Any

from unbroken.inspection import roles
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor

# Tensors that stand at the top, beside nothing that would name a part.
ROOT = "(top)"


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return all that the headers of a checkpoint say; no tensor is read."""
    names = reader.facts.get("names", {})
    return {
        "path": str(reader.path),
        "format": reader.format,
        "complete": not reader.problems,
        "problems": [{"file": found.file, "problem": found.problem} for found in reader.problems],
        "size_bytes": reader.size_bytes,
        "files": reader.files,
        "checksums": reader.checksums,
        "counters": roles.counters(reader.values),
        "optimizers": roles.optimizers_in(reader),
        "schedulers": roles.schedulers(reader.values),
        "parts": _parts(reader),
        "wrappers": roles.wrappers(reader.tensors),
        "tied": [[path, *entry.aliases] for path, entry in reader.tensors.items() if entry.aliases],
        "objects": reader.facts.get("objects", []),
        "metadata": reader.facts.get("metadata", {}),
        "attributes": reader.facts.get("attributes", {}),
        "notes": reader.notes,
        "values": reader.values,
        "tensors": [
            {
                "path": path,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "size_bytes": entry.size_bytes,
                "where": entry.where,
                "aliases": list(entry.aliases),
                "name": names.get(path),
            }
            for path, entry in reader.tensors.items()
        ],
    }


def part_of(path: str) -> str:
    """Return the part that a tensor belongs to: what it stands under at the top.

    >>> part_of("model/encoder.weight"), part_of("encoder.weight")
    ('model', '(top)')
    """
    part, separator, _ = path.partition("/")
    return part if separator else ROOT


def _parts(reader: CheckpointReader) -> dict[str, dict[str, Any]]:
    members: dict[str, list[StoredTensor]] = {}
    for path, entry in reader.tensors.items():
        for place in {part_of(at): None for at in (path, *entry.aliases)}:
            members.setdefault(place, []).append(entry)
    return {
        place: {
            "tensors": len(entries),
            "size_bytes": sum(entry.size_bytes for entry in entries),
            "dtypes": _dtypes(entries),
        }
        for place, entries in members.items()
    }


def _dtypes(entries: list[StoredTensor]) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries:
        found[entry.dtype] = found.get(entry.dtype, 0) + entry.size_bytes
    return found
