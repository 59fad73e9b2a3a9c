"""Reading a checkpoint: every byte that is returned was held against its digest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unbroken.checkpoint.container import header_size, parse_header
from unbroken.checkpoint.digest import ALGORITHMS, digest
from unbroken.checkpoint.envelope import HINT, check_name, read_manifest_bytes
from unbroken.checkpoint.manifest import Manifest, ShardEntry, TensorEntry, decode_manifest
from unbroken.checkpoint.stream import stream_tensors
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
    if manifest.digest_algorithm not in ALGORITHMS:
        raise DamagedError(
            f"{key}: expected digests by {' or '.join(ALGORITHMS)}, found {manifest.digest_algorithm!r}",
            hint=HINT,
        )
    check_name(tree, manifest.step, manifest.revision)
    return manifest


def read_tensors(
    storage: Storage, tree: str, manifest: Manifest, paths: Iterable[str] | None = None
) -> dict[str, HostTensor]:
    """Return the tensors at `paths`, or all tensors of the checkpoint, each verified.

    Raises DamagedError naming the first file or tensors that are not what was written.
    """
    entries = {path: manifest.tensors[path] for path in (manifest.tensors if paths is None else paths)}
    memory = {path: memoryview(bytearray(entry.size_bytes)) for path, entry in entries.items()}
    read_into(storage, tree, manifest, memory)
    return {path: HostTensor(entry.dtype, entry.shape, memory[path]) for path, entry in entries.items()}


def read_into(storage: Storage, tree: str, manifest: Manifest, memory: Mapping[str, memoryview]) -> None:
    """Fill `memory`, by the paths of tensors, each with the bytes of its tensor.

    Raises DamagedError as `read_tensors` does; what is in `memory` then is worth nothing.
    """
    for file, (shard, members) in shards(manifest).items():
        wanted = {path: entry for path, entry in members.items() if path in memory}
        if members and not wanted:
            continue
        key = f"{tree}/{file}"
        check_shard(storage, key, shard, members, algorithm=manifest.digest_algorithm)
        damaged = stream_tensors(storage, key, wanted, memory, algorithm=manifest.digest_algorithm)
        if damaged:
            named = ", ".join(damaged[:3])
            raise DamagedError(f"{key}: the bytes of tensor {named} are not those that were saved", hint=HINT)


def shards(manifest: Manifest) -> dict[str, tuple[ShardEntry, dict[str, TensorEntry]]]:
    """Return each file of the checkpoint with the tensors in it."""
    members: dict[str, dict[str, TensorEntry]] = {file: {} for file in manifest.shards}
    for path, entry in manifest.tensors.items():
        # A file that no shard speaks of shows as a shard that its tensors do not fill.
        members.setdefault(entry.file, {})[path] = entry
    return {file: (shard, members[file]) for file, shard in manifest.shards.items()}


def check_shard(
    storage: Storage, key: str, shard: ShardEntry, members: dict[str, TensorEntry], *, algorithm: str
) -> None:
    """Raise DamagedError unless the file is there, of its size, and its header is the one that was saved."""
    size = storage.size(key)
    if size != shard.size_bytes:
        found = "no file" if size is None else f"{size}"
        raise DamagedError(f"{key}: expected {shard.size_bytes} bytes, found {found}", hint=HINT)
    header = bytes(storage.read(key, 0, shard.header_bytes))
    if digest(header, algorithm) != shard.header_digest:
        raise DamagedError(f"{key}: the header is not the one that was saved", hint=HINT)
    check_layout(key, shard, members, header)


def check_layout(key: str, shard: ShardEntry, members: dict[str, TensorEntry], header: bytes) -> None:
    """Raise DamagedError unless header, manifest and file agree and every byte belongs to something.

    `header` is the one that was saved. Header and tensors carry the digests; that they tile the file makes
    sure that no byte is without.
    """
    if header_size(header, shard.size_bytes, key) != shard.header_bytes:
        raise DamagedError(f"{key}: the manifest tells another size of the header", hint=HINT)
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
