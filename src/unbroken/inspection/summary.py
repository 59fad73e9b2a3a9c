"""What one checkpoint holds, as plain values for people and programs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from unbroken.checkpoint.choosing import reason_against
from unbroken.checkpoint.manifest import Manifest, Position, RankEntry
from unbroken.checkpoint.reader import read_manifest
from unbroken.errors import UnbrokenError
from unbroken.inspection import contents
from unbroken.inspection.listing import facts
from unbroken.inspection.locate import Located
from unbroken.rundir.rollbacks import Rollback, read_rollbacks
from unbroken.state.readable import readable


def summarize(located: Located) -> dict[str, Any]:
    """Return all that the manifest of a checkpoint says; its digest is verified, no tensor is read.

    Raises DamagedError, FormatVersionError.
    """
    manifest = read_manifest(located.storage, located.tree)
    # Of the tensors, which are many, nothing is in a row.
    row = facts(msgspec.to_builtins(msgspec.structs.replace(manifest, tensors={})))
    return {
        "path": str(located.directory),
        **row,
        "against": _against(located, manifest),
        "attempt": manifest.attempt,
        "parent": manifest.parent,
        "format_version": manifest.format_version,
        "samples": _samples(manifest.position),
        "position": contents.position(manifest),
        "config": readable(manifest.config),
        "environment": readable(manifest.environment),
        "choices": readable(manifest.choices),
        "ranks": [_rank(entry) for entry in manifest.ranks],
        "parts": contents.parts(manifest),
        "tied": contents.tied(manifest),
        "generators": contents.generators(manifest),
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


def _rank(entry: RankEntry) -> dict[str, Any]:
    """Return what a further rank has of its own."""
    position = entry.position
    return {
        "epoch": position.epoch,
        "inside_epoch": position.inside_epoch,
        "samples": _samples(position),
        "parts": sorted(entry.parts),
    }


def _against(located: Located, manifest: Manifest) -> str | None:
    """Return why no run goes on from it by itself; a copy outside of its run knows of no roll-backs."""
    rollbacks: tuple[Rollback, ...] = ()
    with suppress(UnbrokenError):
        rollbacks = read_rollbacks(located.directory.resolve().parent.parent)
    return reason_against(manifest, rollbacks)


def _samples(position: Position) -> list[int | None]:
    """Return how many samples of its pass each loader had given out, None where it counts none."""
    loaders = position.loaders
    states = [loader.get("state", {}) if isinstance(loader, dict) else {} for loader in loaders]
    return [state.get("samples") if isinstance(state, dict) else None for state in states]
