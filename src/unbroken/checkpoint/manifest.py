"""The manifest: what a checkpoint holds, where each byte lies, and the digest it must have.

The document is docs/format.md. The bytes of manifest.json are what its digest is of: a manifest is
never re-encoded, so no question of a canonical form arises.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unbroken.checkpoint.envelope import check_format
from unbroken.errors import DamagedError


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor: `offset` is from the start of the shard, `aliases` are further paths to it."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    size_bytes: int
    digest: str
    aliases: tuple[str, ...] = ()


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One safetensors file. Its header and its tensors together are all of its bytes."""

    size_bytes: int
    header_bytes: int
    header_digest: str


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One part: the handler that took it out, the class it was of, its state as tagged JSON."""

    handler: str
    type: str
    state: Any


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where training stood.

    `epoch` counts from 0. `inside_epoch` tells whether the body of that epoch was left unfinished;
    if not, the epoch is the next one to begin. `loaders` is the tagged state of each data loader;
    `passes` lists, by index into it, the passes that the body of the epoch had begun, and `open` those
    loaders whose last pass was not over. `steps` tells which batches went into the last steps.
    """

    epoch: int
    inside_epoch: bool
    loaders: Any
    passes: tuple[int, ...] = ()
    open: tuple[int, ...] = ()
    steps: tuple[tuple[int, ...], ...] = ()


class RankEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a further rank has otherwise than the first: its position, and the parts whose words differ."""

    parts: dict[str, PartEntry]
    position: Position


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """What the user's own check said of the state, before it was written."""

    passed: bool
    reason: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All of manifest.json but the tensors' bytes.

    `metrics`, `config`, `environment` and `health` are tagged JSON.
    """

    format: str
    format_version: int
    run_id: str
    step: int
    revision: int
    attempt: int
    created: str
    parent: str | None
    digest_algorithm: str
    position: Position
    metrics: dict[str, Any]
    config: Any
    environment: dict[str, Any]
    # What the user chose where a restore was not exact: fresh parts, settings of the script.
    choices: dict[str, Any] = {}
    # How many numbers are NaN or infinite, by the paths of tensors that must not; None: nobody looked.
    non_finite: dict[str, int] | None = None
    # None: the user has given no check of his own.
    validation: Validation | None = None
    # How often the run had been rolled back: a checkpoint of before a roll-back may be of what it undid.
    rollbacks: int = 0
    # What the watch over training goes on with.
    health: Any = None
    # The further ranks of a group that trained together, in order; the first one's state is all the rest.
    ranks: tuple[RankEntry, ...] = ()
    parts: dict[str, PartEntry]
    shards: dict[str, ShardEntry]
    tensors: dict[str, TensorEntry]

    @property
    def is_good(self) -> bool:
        """Whether nothing is known against going on from it: it is finite, and passed the user's check."""
        return not self.non_finite and (self.validation is None or self.validation.passed)

    @property
    def size_bytes(self) -> int:
        """The size of all shards."""
        return sum(shard.size_bytes for shard in self.shards.values())


class _Header(msgspec.Struct):
    format: str
    format_version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json, indented for people."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(data: bytes | bytearray, where: str) -> Manifest:
    """Return the manifest in `data`; `where` is named in errors.

    Raises:
        DamagedError: the bytes are no manifest.
        FormatVersionError: a newer release wrote it.
    """
    try:
        header = msgspec.json.decode(data, type=_Header)
        check_format(header.format, header.format_version, where)
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(
            f"{where}: expected a manifest, found {error}", hint="use another checkpoint"
        ) from error
