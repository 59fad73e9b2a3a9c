"""Which format a checkpoint is of: by its first bytes and by what is in a directory, never by its name."""

from __future__ import annotations

import re
from pathlib import Path

from unbroken.errors import UsageError
from unbroken.inspection.formats.base import CheckpointReader, RegularFile, StoredTensor, damaged
from unbroken.inspection.locate import Located, is_checkpoint, locate_checkpoint
from unbroken.storage.failures import translated

__all__ = ["CheckpointReader", "StoredTensor", "is_foreign", "open_checkpoint", "open_located"]

_SNIFFED_BYTES = 32
_KNOWN = "a checkpoint of unbroken, a file of torch.save, safetensors with or without an index, or .npz"
_INDEX = ".safetensors.index.json"
# The files of ranks that DeepSpeed writes: the number of the rank, and that of its part of the model.
ZERO_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2})_optim_states\.pt")


def open_located(located: Located) -> CheckpointReader:
    """Return a reader of one of our own checkpoints. Raises DamagedError, FormatVersionError."""
    from unbroken.inspection.formats.ours import OurCheckpoint

    return OurCheckpoint(located)


def is_foreign(path: Path) -> bool:
    """Tell whether `path` is a file, or a directory of files, that some other library may have written."""
    return path.is_file() or (
        path.is_dir() and not is_checkpoint(path) and (is_zero(path) or bool(_in_directory(path)))
    )


def open_checkpoint(path: Path) -> CheckpointReader:
    """Return a reader of the checkpoint at `path`. Nothing but headers is read.

    Raises:
        UsageError: there is nothing, or nothing of a known format.
        DamagedError: it is of a known format, and its headers are not whole.
    """
    if is_checkpoint(path):
        return open_located(locate_checkpoint(path))
    if path.is_dir() and is_zero(path):
        from unbroken.inspection.formats.zero import ZeroDirectory

        return ZeroDirectory(path)
    if path.is_dir():
        found = _in_directory(path)
        if len(found) != 1:
            names = ", ".join(sorted(file.name for file in found)[:5]) or "none"
            raise UsageError(f"{path}: expected one checkpoint in it, found {names}", hint="give one file")
        path = found[0]
    return _open_file(path)


def _open_file(path: Path) -> CheckpointReader:
    # Loaded here: our own checkpoints need none of it.
    from unbroken.inspection.formats import safetensors, torch_legacy, zips

    file = RegularFile(path)
    first = bytes(file.read(0, min(_SNIFFED_BYTES, file.size_bytes)))
    if not first:
        raise damaged(str(path), "a checkpoint", "an empty file")
    if first.startswith(zips.MAGIC) or zips.ends_like_one(file):
        return _open_zip(path)
    if torch_legacy.is_legacy(first):
        return torch_legacy.TorchLegacy(path)
    if safetensors.is_safetensors(first):
        return safetensors.SafetensorsFile(path)
    if first.lstrip().startswith(b"{") and safetensors.is_index(file):
        return safetensors.ShardedSafetensors(path)
    raise UsageError(f"{path}: expected {_KNOWN}, found something else", hint="give a checkpoint")


def _open_zip(path: Path) -> CheckpointReader:
    from unbroken.inspection.formats import npz, torch_zip, zips

    entries = zips.ZipEntries(path)
    names = list(entries.entries)
    if torch_zip.pickle_entry(names) is not None:
        return torch_zip.TorchZip(path, entries)
    if npz.is_npz(names):
        return npz.Npz(path, entries)
    raise UsageError(f"{path}: expected {_KNOWN}, found another zip file", hint="give a checkpoint")


def is_zero(directory: Path) -> bool:
    """Tell whether `directory` has the files of ranks that DeepSpeed writes."""
    with translated("list", str(directory)):
        return any(ZERO_RANK.fullmatch(path.name) for path in directory.iterdir())


def _in_directory(directory: Path) -> list[Path]:
    """Return the index of safetensors files in a directory, or else the single file of that kind."""
    with translated("list", str(directory)):
        names = [path for path in directory.iterdir() if path.is_file()]
    return [path for path in names if path.name.endswith(_INDEX)] or [
        path for path in names if path.name.endswith(".safetensors")
    ]
