"""From a checkpoint of any format to files of tensors and JSON: one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.checkpoint.container import ShardPlan, plan_shard
from unbroken.errors import UnbrokenError, UsageError
from unbroken.inspection.adapted_reader import AdaptedReader
from unbroken.inspection.conversion_target import Target, UnreadTensor
from unbroken.inspection.formats.base import CheckpointReader, StoredTensor
from unbroken.rundir.journal import finite
from unbroken.state.tensors import ITEM_BYTES
from unbroken.storage.base import Buffer
from unbroken.storage.local import LocalStorage

__all__ = ["METADATA", "SUFFIX", "Conversion", "UnreadTensor", "check_name", "convert", "file_chunks"]

SUFFIX = ".safetensors"
_VALUES_SUFFIX = ".json"
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was written, and a line for each thing that was not.

    The first of `files` is the one that was asked for, the last has what is no tensor.
    """

    tensors: int
    size_bytes: int
    files: tuple[Path, ...]
    dropped: tuple[str, ...]


class SafetensorsTarget(Target):
    """One safetensors file."""

    suffix = SUFFIX

    def files(self, target: Path) -> tuple[Path, ...]:
        return (target,)

    def refusal(self, path: str, entry: StoredTensor) -> str | None:
        if path == METADATA:
            return "in safetensors this name means something else"
        return None if entry.dtype in ITEM_BYTES else f"safetensors has no {entry.dtype}"

    def write(
        self,
        storage: LocalStorage,
        reader: CheckpointReader,
        target: Path,
        tensors: Mapping[str, UnreadTensor],
    ) -> int:
        plan = plan_shard(target.name, tensors)
        storage.write(target.name, file_chunks(plan, tensors))
        return plan.size_bytes


def _bundle() -> Target:
    from unbroken.inspection.bundle_target import BundleTarget

    return BundleTarget()


def _hdf5() -> Target:
    from unbroken.inspection.hdf5_target import Hdf5Target

    return Hdf5Target()


def _keras(like: Path) -> Target:
    from unbroken.inspection.keras_target import KerasTarget

    return KerasTarget(like)


def _npz() -> Target:
    from unbroken.inspection.npz_target import NpzTarget

    return NpzTarget()


def _torch() -> Target:
    from unbroken.inspection.torch_target import TorchTarget

    return TorchTarget()


_LIKE_ANOTHER = ".keras"
# By how the names of their files end. What writes them is loaded when it is asked for.
_TARGETS: dict[str, Callable[[], Target]] = {
    SUFFIX: SafetensorsTarget,
    ".index": _bundle,
    ".weights.h5": _hdf5,
    ".npz": _npz,
    ".pt": _torch,
}


def convert(
    reader: CheckpointReader,
    target: Path,
    *,
    like: Path | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
) -> Conversion:
    """Write the tensors of `reader` to the file `target`, and all else to a JSON file beside it.

    How its name ends says in which format. Names stay as they are but for what `rename` maps, which is
    written as for `Run`, with slashes or dots between segments; and so does every bit, unless `dtype`, such
    as `BF16`, has floating-point numbers rounded to it. Nothing that exists is overwritten; if it fails,
    nothing is left. A `.keras` gets what is no weight from the file `like`, another one of the same model.

    Raises:
        UsageError: `target` is no name for such a file, one of the files is there already, `like` is
            missing or of another model, a rule of `rename` fits no name, or two names become one.
        DamagedError: a tensor is not all there.
    """
    _check_whole(reader)
    form = target_format(target, like)
    values = target.with_name(target.name.removesuffix(form.suffix) + _VALUES_SUFFIX)
    files = (*reversed(form.files(target)), values)
    _check_free(files)
    if rename and not form.keeps_names(reader):
        raise UsageError(
            f"{target}: expected no map of names, for in it weights lie where Keras looks for them",
            hint="leave out --rename, or write .safetensors, whose names are free",
        )
    seen = AdaptedReader(reader, rename or {}, dtype)
    form.check(seen)
    refused = {path: form.refusal(path, entry) for path, entry in seen.tensors.items()}
    tensors = {path: UnreadTensor(seen, path) for path, why in refused.items() if why is None}
    dropped = (*_dropped(seen, refused), *form.notes(seen))
    storage = LocalStorage(target.absolute().parent)
    try:
        storage.write(values.name, [_values(seen, dropped)])
        size_bytes = form.write(storage, seen, target, tensors)
        if losses := tuple(seen.losses()):
            # Only who has read a tensor knows what its numbers became.
            dropped = (*dropped, *losses)
            storage.write(values.name, [_values(seen, dropped)])
    except BaseException:
        # Also after an interrupt: one file without the others looks like a whole checkpoint.
        for file in files:
            with suppress(UnbrokenError):
                storage.delete(file.name)
        raise
    return Conversion(tensors=len(tensors), size_bytes=size_bytes, files=files, dropped=dropped)


def target_format(target: Path, like: Path | None) -> Target:
    """Return the format that the name of a file asks for. Raises UsageError if it asks for none."""
    if target.name.endswith(_LIKE_ANOTHER) and target.name != _LIKE_ANOTHER:
        _check_directory(target)
        if like is None:
            raise UsageError(
                f"{target}: expected --like OTHER.keras, for a checkpoint has no configuration for Keras",
                hint="let model.save('like.keras') write one, of the same model: trained or not",
            )
        return _keras(like)
    if like is not None:
        raise UsageError(
            f"{target}: expected no --like, which is for names that end with {_LIKE_ANOTHER}",
            hint=f"end the name with {_LIKE_ANOTHER}, or leave out --like",
        )
    for suffix, form in _TARGETS.items():
        if target.name.endswith(suffix) and target.name != suffix:
            _check_directory(target)
            return form()
    raise UsageError(
        f"{target}: expected a name that ends with {' or '.join((*_TARGETS, _LIKE_ANOTHER))}",
        hint="the end of the name says in which format tensors are written",
    )


def check_name(target: Path) -> None:
    """Raise UsageError unless a safetensors file can have the name `target`."""
    if target.suffix != SUFFIX:
        raise UsageError(
            f"{target}: expected a name that ends with {SUFFIX}", hint="tensors are written in that format"
        )
    _check_directory(target)


def _check_whole(reader: CheckpointReader) -> None:
    if reader.problems:
        found = reader.problems[0]
        raise UsageError(
            f"{reader.path}: expected a complete checkpoint, found {found.file}: {found.problem}",
            hint="`unbroken verify` names all that is damaged",
        )
    if reader.needs is not None:
        raise UsageError(
            f"{reader.path}: expected a library that reads the tensors of {reader.format}, found none",
            hint=reader.needs,
        )


def _check_directory(target: Path) -> None:
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target.parent}: no such directory", hint="make it first")


def _check_free(files: tuple[Path, ...]) -> None:
    for file in files:
        if file.exists() or file.is_symlink():
            raise UsageError(f"{file}: exists already", hint="nothing is overwritten: give another name")


def file_chunks(plan: ShardPlan, tensors: Mapping[str, UnreadTensor]) -> Iterator[Buffer]:
    """Yield the bytes of the file that `plan` lays out; each tensor is read when it is its turn."""
    yield plan.header
    for path in plan.placements:
        yield tensors[path].data


def _dropped(reader: CheckpointReader, refused: Mapping[str, str | None]) -> Iterator[str]:
    yield from (f"tensor {path}: {why}" for path, why in refused.items() if why is not None)
    for name in reader.facts.get("objects", []):
        yield f"objects of {name}: kept as their name, arguments and fields in the JSON file"
    yield from reader.notes


def _values(reader: AdaptedReader, dropped: tuple[str, ...]) -> bytes:
    found: dict[str, Any] = {
        "converted_from": {"file": reader.path.name, "format": reader.format},
        "renamed": reader.renamed,
        "cast": reader.cast,
        "aliases": {path: list(entry.aliases) for path, entry in reader.tensors.items() if entry.aliases},
        "dropped": list(dropped),
        "facts": reader.facts,
        "values": reader.values,
    }
    return json.dumps(finite(found), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
