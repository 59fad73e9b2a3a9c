"""Writing a checkpoint: stage, then publish by one rename."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from unbroken.checkpoint.digest import ALGORITHM, digest
from unbroken.checkpoint.envelope import FORMAT, FORMAT_VERSION
from unbroken.checkpoint.manifest import Manifest, ShardEntry, TensorEntry, encode_manifest
from unbroken.checkpoint.snapshot import Snapshot
from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.storage.base import Storage


def write_checkpoint(
    storage: Storage, snapshot: Snapshot, name: str, *, before_commit: Callable[[], None] = lambda: None
) -> Manifest:
    """Write `snapshot` as the checkpoint `name` and return its manifest.

    Readers see the whole checkpoint or none of it. `before_commit` is called when all bytes are
    durable and nothing is visible yet; what it raises ends the save. On any error the staged files
    are removed and the storage is as it was.
    """
    staging = f"{layout.CHECKPOINTS}/{layout.STAGING_PREFIX}{name}-{os.urandom(4).hex()}"
    try:
        manifest = _manifest(snapshot, name)
        for plan in snapshot.plans:
            storage.stage(f"{staging}/{plan.file}", [snapshot.images[plan.file]])
        data = encode_manifest(manifest)
        storage.stage(f"{staging}/{layout.MANIFEST}", [data])
        storage.stage(f"{staging}/{layout.MANIFEST_DIGEST}", [_digest_line(data)])
        before_commit()
        # Commit point: until this rename no reader looks into the staging directory.
        storage.move(staging, f"{layout.CHECKPOINTS}/{name}")
    except Exception:
        # The first error is the one to tell; what cannot be removed now, the next start sweeps.
        with suppress(StorageError):
            storage.delete(staging)
        raise
    return manifest


def _manifest(snapshot: Snapshot, name: str) -> Manifest:
    parsed = layout.parse_checkpoint_name(name)
    assert parsed is not None, f"not a checkpoint name: {name}"
    said = snapshot.description
    shards, tensors = {}, {}
    for plan in snapshot.plans:
        image = snapshot.images[plan.file]
        shards[plan.file] = ShardEntry(
            size_bytes=plan.size_bytes, header_bytes=len(plan.header), header_digest=digest(plan.header)
        )
        for path, placed in plan.placements.items():
            tensors[path] = TensorEntry(
                dtype=placed.dtype,
                shape=placed.shape,
                file=plan.file,
                offset=placed.offset,
                size_bytes=placed.size_bytes,
                # From host memory, before a byte was written: what the disk returns is held against it.
                digest=digest(image[placed.offset : placed.offset + placed.size_bytes]),
                aliases=tuple(snapshot.aliases.get(path, ())),
            )
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        run_id=said.run_id,
        step=said.step,
        revision=parsed[1],
        attempt=said.attempt,
        created=said.created,
        parent=said.parent,
        digest_algorithm=ALGORITHM,
        position=said.position,
        metrics=said.metrics,
        config=said.config,
        environment=said.environment,
        parts=said.parts,
        shards=shards,
        tensors=tensors,
    )


def _digest_line(data: bytes) -> bytes:
    """The form that `b3sum --check` reads."""
    return f"{digest(data)}  {layout.MANIFEST}\n".encode()
