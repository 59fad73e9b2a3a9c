"""Reading a checkpoint: every byte that is returned was held against its digest."""

from __future__ import annotations

from unbroken.checkpoint.container import header_size, parse_header
from unbroken.checkpoint.digest import ALGORITHM, digest
from unbroken.checkpoint.envelope import HINT, check_name, read_manifest_bytes, read_member
from unbroken.checkpoint.manifest import Manifest, ShardEntry, TensorEntry, decode_manifest
from unbroken.errors import DamagedError
from unbroken.rundir import layout
from unbroken.state.tensors import HostTensor
from unbroken.storage.base import Storage


def read_manifest(storage: Storage, tree: str) -> Manifest:
    """Return the verified manifest of the checkpoint at key `tree`.

    Raises:
        DamagedError: the manifest or its digest is missing or is not what was written.
        FormatVersionError: a newer release wrote it.
    """
    key = f"{tree}/{layout.MANIFEST}"
    manifest = decode_manifest(read_manifest_bytes(storage, tree), key)
    if manifest.digest_algorithm != ALGORITHM:
        raise DamagedError(
            f"{key}: expected digests by {ALGORITHM}, found {manifest.digest_algorithm!r}", hint=HINT
        )
    check_name(tree, manifest.step, manifest.revision)
    return manifest


def read_tensors(storage: Storage, tree: str, manifest: Manifest) -> dict[str, HostTensor]:
    """Return all tensors of the checkpoint, each verified.

    Raises DamagedError naming the first file or tensor that is not what was written.
    """
    tensors: dict[str, HostTensor] = {}
    for file, shard in manifest.shards.items():
        members = {path: entry for path, entry in manifest.tensors.items() if entry.file == file}
        tensors.update(_read_shard(storage, f"{tree}/{file}", shard, members))
    return tensors


def _read_shard(
    storage: Storage, key: str, shard: ShardEntry, members: dict[str, TensorEntry]
) -> dict[str, HostTensor]:
    size = storage.size(key)
    if size != shard.size_bytes:
        found = "no file" if size is None else f"{size}"
        raise DamagedError(f"{key}: expected {shard.size_bytes} bytes, found {found}", hint=HINT)
    data = memoryview(read_member(storage, key))
    check_layout(key, shard, members, bytes(data[: shard.header_bytes]))
    tensors = {}
    for path, entry in members.items():
        view = data[entry.offset : entry.offset + entry.size_bytes]
        if digest(view) != entry.digest:
            raise DamagedError(f"{key}: the bytes of tensor {path} are not those that were saved", hint=HINT)
        tensors[path] = HostTensor(entry.dtype, entry.shape, view)
    return tensors


def check_layout(key: str, shard: ShardEntry, members: dict[str, TensorEntry], header: bytes) -> None:
    """Raise DamagedError unless header, manifest and file agree and every byte belongs to something.

    Header and tensors carry the digests; that they tile the file makes sure that no byte is without.
    """
    if header_size(header, shard.size_bytes, key) != shard.header_bytes or (
        digest(header) != shard.header_digest
    ):
        raise DamagedError(f"{key}: the header is not the one that was saved", hint=HINT)
    placed = parse_header(header, key)
    end = shard.header_bytes
    for path, entry in sorted(members.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        where = placed.get(path)
        if where is None or (where.dtype, where.shape, where.offset, where.size_bytes) != (
            entry.dtype,
            entry.shape,
            entry.offset,
            entry.size_bytes,
        ):
            raise DamagedError(f"{key}: manifest and header disagree about tensor {path}", hint=HINT)
        if entry.offset != end:
            raise DamagedError(f"{key}: bytes {end} to {entry.offset} belong to no tensor", hint=HINT)
        end += entry.size_bytes
    if end != shard.size_bytes or len(placed) != len(members):
        raise DamagedError(f"{key}: the tensors of the manifest do not fill the file", hint=HINT)
