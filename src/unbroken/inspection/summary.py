"""What a checkpoint holds, as plain values for people and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unbroken.checkpoint.manifest import Manifest, learning_rates, plain_metrics
from unbroken.checkpoint.reader import read_manifest
from unbroken.errors import UnbrokenError
from unbroken.inspection.locate import Located, locate_all


def list_checkpoints(run_directory: Path) -> list[dict[str, Any]]:
    """Return a row for each checkpoint of a run, oldest first.

    Manifests are verified, tensors are not read. `problem` says what is wrong with a manifest; then
    all fields but `name` are None.
    """
    return [_row(located) for located in locate_all(run_directory)]


def summarize(located: Located) -> dict[str, Any]:
    """Return all that the manifest of a checkpoint says; its digest is verified, no tensor is read.

    Raises DamagedError, FormatVersionError.
    """
    manifest = read_manifest(located.storage, located.tree)
    return {
        "path": str(located.directory),
        **_facts(manifest),
        "attempt": manifest.attempt,
        "parent": manifest.parent,
        "format_version": manifest.format_version,
        "samples": _samples(manifest),
        "config": manifest.config,
        "environment": manifest.environment,
        "parts": {name: _part(name, manifest) for name in manifest.parts},
        "files": {name: shard.size_bytes for name, shard in manifest.shards.items()},
        "tensors": [
            {
                "path": path,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "size_bytes": entry.size_bytes,
                "file": entry.file,
                "digest": entry.digest,
                "aliases": list(entry.aliases),
            }
            for path, entry in manifest.tensors.items()
        ],
    }


def _row(located: Located) -> dict[str, Any]:
    name = located.directory.name
    try:
        return {"name": name, **_facts(read_manifest(located.storage, located.tree)), "problem": None}
    except UnbrokenError as error:
        fields = ("run_id", "step", "epoch", "inside_epoch", "created", "size_bytes", "learning_rates")
        return {"name": name, **dict.fromkeys(fields), "metrics": {}, "problem": error.message}


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "run_id": manifest.run_id,
        "step": manifest.step,
        "epoch": manifest.position.epoch,
        "inside_epoch": manifest.position.inside_epoch,
        "created": manifest.created,
        "size_bytes": manifest.size_bytes,
        "learning_rates": list(learning_rates(manifest)),
        "metrics": plain_metrics(manifest),
    }


def _part(name: str, manifest: Manifest) -> dict[str, Any]:
    entry = manifest.parts[name]
    # Tied tensors count in each part that they are reached from.
    mine = [
        tensor
        for path, tensor in manifest.tensors.items()
        if any(at.partition("/")[0] == name for at in (path, *tensor.aliases))
    ]
    return {
        "type": entry.type,
        "handler": entry.handler,
        "tensors": len(mine),
        "size_bytes": sum(tensor.size_bytes for tensor in mine),
    }


def _samples(manifest: Manifest) -> list[int | None]:
    """Return how many samples of its pass each loader had given out, None where it counts none."""
    loaders = manifest.position.loaders
    states = [loader.get("state", {}) if isinstance(loader, dict) else {} for loader in loaders]
    return [state.get("samples") if isinstance(state, dict) else None for state in states]
