"""Which format a checkpoint is of: by its first bytes and by what is in a directory, never by its name."""

from __future__ import annotations

import re
from pathlib import Path

from unbroken.errors import UsageError
from unbroken.inspection.formats.base import CheckpointReader, RegularFile, StoredTensor, damaged
from unbroken.inspection.locate import Located, is_checkpoint, locate_checkpoint
from unbroken.inspection.pointers import NUMBERED, STEP, numbered, pointed_to, pointer_in
from unbroken.interchange.marks import is_legacy, is_table, is_zip, may_be_of_bundle
from unbroken.storage.failures import translated

__all__ = ["CheckpointReader", "StoredTensor", "is_foreign", "open_checkpoint", "open_located"]

_SNIFFED_BYTES = 32
_KNOWN = (
    "a checkpoint of unbroken or TensorFlow, a file of torch.save, safetensors with or without an index, "
    "a directory of torch.distributed.checkpoint, Orbax or a trainer, .npz, HDF5, .keras or Flax"
)
_INDEX = ".safetensors.index.json"
_HDF5 = b"\x89HDF\r\n\x1a\n"
# What a `.keras` has its variables in.
_KERAS_WEIGHTS = "model.weights.h5"
# The files of ranks that DeepSpeed writes: the number of the rank, and that of its part of the model.
ZERO_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2})_optim_states\.pt")
# The files of ranks of `torch.distributed.checkpoint`, and what it writes last.
DCP_RANK = re.compile(r"__([0-9]{1,7})_([0-9]{1,7})\.distcp")
DCP_METADATA = ".metadata"
# Of trainers: what they write last, or on every rank; and what they write before that.
_TRAINER_FILE = re.compile(r"trainer_state\.json|rng_state(_[0-9]+)?\.pth|random_states_[0-9]+\.pkl")
_OPTIMIZER_FILE = re.compile(r"optimizer(_[0-9]+)?\.bin")
_MODEL_FILE = re.compile(r"(pytorch_model|model|adapter_model)([-_][0-9a-z-]+)?\.(safetensors|bin)")
# Of Orbax: of a step, of one item in it, of its store of arrays, and in the name of a save that goes on.
ORBAX_CHECKPOINT, ORBAX_TREE, ORBAX_MANIFEST = "_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"
ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
# What the writer of safetensors of DCP calls the blocks of a rank, the first of which is 1.
DCP_SHARD = re.compile(r"shard-([0-9]{5,7})-model-[0-9]{5,7}-of-[0-9]{5,7}\.safetensors")


def open_located(located: Located) -> CheckpointReader:
    """Return a reader of one of our own checkpoints. Raises DamagedError, FormatVersionError."""
    from unbroken.inspection.formats.ours import OurCheckpoint

    return OurCheckpoint(located)


def is_foreign(path: Path) -> bool:
    """Tell whether `path` is a file, or a directory of files, that some other library may have written."""
    if path.is_dir() and (is_checkpoint(path) or is_zero(path) or is_dcp(path) or single_files(path)):
        return not is_checkpoint(path)
    if path.is_dir() and (
        is_orbax(path) or is_training_folder(path) or pointer_in(path) or _named_last(path)
    ):
        return True
    return path.is_file() or is_tensorflow(path)


def open_checkpoint(path: Path) -> CheckpointReader:
    """Return a reader of the checkpoint at `path`. Nothing but headers is read.

    Raises:
        UsageError: there is nothing, or nothing of a known format.
        DamagedError: it is of a known format, and its headers are not whole.
    """
    if is_checkpoint(path):
        return open_located(locate_checkpoint(path))
    reader = _open_directory(path) if path.is_dir() else None
    if reader is not None:
        return reader
    if not (path.is_dir() and single_files(path)) and is_tensorflow(path):
        from unbroken.inspection.formats.tf_bundle import TensorFlowBundle

        return TensorFlowBundle(path)
    if path.is_dir():
        found = single_files(path)
        if found and all(DCP_SHARD.fullmatch(file.name) for file in found):
            from unbroken.inspection.formats.dcp_safetensors import CutSafetensors

            return CutSafetensors(path)
        last = None if found else _named_last(path)
        if last is not None:
            return open_checkpoint(last)
        if len(found) != 1:
            names = ", ".join(sorted(file.name for file in found)[:5]) or "none"
            raise UsageError(f"{path}: expected one checkpoint in it, found {names}", hint="give one file")
        path = found[0]
    return _open_file(path)


def _open_directory(path: Path) -> CheckpointReader | None:
    """Return a reader of a directory that is known by the files in it, None if it is another one."""
    if is_zero(path):
        from unbroken.inspection.formats.zero import ZeroDirectory

        return ZeroDirectory(path)
    if is_dcp(path):
        from unbroken.inspection.formats.dcp import DcpDirectory

        return DcpDirectory(path)
    if is_orbax(path):
        from unbroken.inspection.formats.orbax import OrbaxDirectory

        return OrbaxDirectory(path)
    if is_training_folder(path):
        from unbroken.inspection.formats.folders import TrainerFolder

        return TrainerFolder(path)
    return None


def _open_file(path: Path) -> CheckpointReader:
    file = RegularFile(path)
    first = bytes(file.read(0, min(_SNIFFED_BYTES, file.size_bytes)))
    if not first:
        raise damaged(str(path), "a checkpoint", "an empty file")
    if first.startswith(_HDF5):
        from unbroken.inspection.formats.keras import KerasFile

        return KerasFile(path)
    if is_table(file):
        from unbroken.inspection.formats import tables

        if tables.is_older_checkpoint(file):
            return tables.TensorFlowTable(path)
    if is_zip(first, file):
        return _open_zip(path)
    if is_legacy(first):
        from unbroken.inspection.formats.torch_legacy import TorchLegacy

        return TorchLegacy(path)
    return _open_text(path, file, first)


def _open_text(path: Path, file: RegularFile, first: bytes) -> CheckpointReader:
    """Return a reader of a file that begins with names: of safetensors, of their index, or of Flax."""
    from unbroken.inspection.formats import safetensors

    if safetensors.is_safetensors(first):
        return safetensors.SafetensorsFile(path)
    if first.lstrip().startswith(b"{") and safetensors.is_index(file):
        return safetensors.ShardedSafetensors(path)
    from unbroken.inspection.formats import flax_msgpack

    if flax_msgpack.is_flax(first):
        return flax_msgpack.FlaxMsgpack(path)
    raise UsageError(f"{path}: expected {_KNOWN}, found something else", hint="give a checkpoint")


def _open_zip(path: Path) -> CheckpointReader:
    from unbroken.inspection.formats import npz, torch_zip, zips

    entries = zips.ZipEntries(path)
    names = list(entries.entries)
    if torch_zip.pickle_entry(names) is not None:
        return torch_zip.TorchZip(path, entries)
    if npz.is_npz(names):
        return npz.Npz(path, entries)
    if _KERAS_WEIGHTS in names:
        from unbroken.inspection.formats.keras import KerasFile

        return KerasFile(path, entries)
    raise UsageError(f"{path}: expected {_KNOWN}, found another zip file", hint="give a checkpoint")


def is_zero(directory: Path) -> bool:
    """Tell whether `directory` has the files of ranks that DeepSpeed writes."""
    with translated("list", str(directory)):
        return any(ZERO_RANK.fullmatch(path.name) for path in directory.iterdir())


def is_dcp(directory: Path) -> bool:
    """Tell whether `directory` has what `torch.distributed.checkpoint` writes."""
    with translated("list", str(directory)):
        return any(
            DCP_RANK.fullmatch(path.name) or (path.name == DCP_METADATA and path.is_file())
            for path in directory.iterdir()
        )


def is_training_folder(directory: Path) -> bool:
    """Tell whether `directory` has the files of one save of the Trainer of Hugging Face or of Accelerate."""
    with translated("list", str(directory)):
        names = [path.name for path in directory.iterdir()]
    has_model = any(map(_MODEL_FILE.match, names))
    is_begun = NUMBERED.fullmatch(directory.resolve().name) or any(map(_OPTIMIZER_FILE.fullmatch, names))
    return any(map(_TRAINER_FILE.fullmatch, names)) or (has_model and is_begun is not None and bool(is_begun))


def _named_last(directory: Path) -> Path | None:
    """Return the checkpoint that a trainer would take of several in `directory`. Raises DamagedError."""
    pointer = pointer_in(directory)
    if pointer is not None:
        return pointed_to(pointer)
    folders = [path for path in numbered(directory).values() if is_training_folder(path)]
    return folders[-1] if folders else _last_of_orbax(directory)


def _last_of_orbax(directory: Path) -> Path | None:
    """Return the step of the highest number, which Orbax restores, whatever is in it. Raises DamagedError."""
    steps = [*numbered(directory, STEP).values()]
    whole = [path for path in steps if is_orbax(path)]
    if whole and whole[-1] != steps[-1]:
        raise damaged(
            str(directory),
            f"a checkpoint in {steps[-1].name}, which Orbax takes for the last one",
            f"none; {whole[-1].name} is one",
        )
    return whole[-1] if whole else None


def is_orbax(directory: Path) -> bool:
    """Tell whether `directory` has what Orbax writes for one checkpoint, or is what is left of a save."""
    if ORBAX_TEMPORARY in directory.resolve().name or (directory / ORBAX_CHECKPOINT).is_file():
        return True
    return (directory / ORBAX_TREE).is_file() and (
        (directory / ORBAX_MANIFEST).is_file() or (directory / "_sharding").is_file()
    )


def is_tensorflow(path: Path) -> bool:
    """Tell whether `path` means a checkpoint of TensorFlow: its prefix, one of its files or a directory."""
    if path.is_file() and not may_be_of_bundle(path.name):
        return False
    # Loaded here: most files have other names.
    from unbroken.interchange.tf_place import find_bundle

    return find_bundle(path) is not None


def single_files(directory: Path) -> list[Path]:
    """Return the index of safetensors files in a directory, or else the single file of that kind."""
    with translated("list", str(directory)):
        names = [path for path in directory.iterdir() if path.is_file()]
    return [path for path in names if path.name.endswith(_INDEX)] or [
        path for path in names if path.name.endswith(".safetensors")
    ]
