"""What a checkpoint of any format holds, as plain values for people and programs."""

from __future__ import annotations

from typing import Any

from unbroken.inspection import roles
from unbroken.inspection.formats.base import CheckpointReader

# Tensors that stand at the top, beside nothing that would name a part.
ROOT = "(top)"


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return all that the headers of a checkpoint say; no tensor is read."""
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
                "name": reader.facts.get("names", {}).get(path),
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
    found: dict[str, dict[str, Any]] = {}
    for path, entry in reader.tensors.items():
        for place in dict.fromkeys(part_of(at) for at in (path, *entry.aliases)):
            part = found.setdefault(place, {"tensors": 0, "size_bytes": 0, "dtypes": {}})
            part["tensors"] += 1
            part["size_bytes"] += entry.size_bytes
            part["dtypes"][entry.dtype] = part["dtypes"].get(entry.dtype, 0) + entry.size_bytes
    return found
