"""What DeepSpeed writes of ZeRO stages 1 and 2: flat state, cut by ranks, here put together again.

A file for each rank holds its piece of the 32-bit weights and of each moment, flat and group by group; a
file of the model holds the names and shapes that the flat state is cut into, in their order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.checkpoint.finding import Finding
from unbroken.inspection.detect import ZERO_RANK
from unbroken.inspection.formats.base import (
    DTYPE_BITS,
    CheckpointReader,
    StoredTensor,
    damaged,
    tensor_bytes,
    unreadable,
)
from unbroken.inspection.formats.joined import placed
from unbroken.inspection.formats.torch_zip import TorchZip
from unbroken.inspection.formats.views import integers
from unbroken.inspection.formats.zero_rank import (
    BASE,
    STATE,
    WEIGHTS,
    RankFile,
    mapping,
    opened,
    place_of,
    sequence,
    shown,
)
from unbroken.storage.failures import translated

_MODEL = re.compile(r"mp_rank_([0-9]{2})_model_states\.pt")
# How the state was cut, which is undone here, and what has a place of its own.
_OF_THE_CUT = (WEIGHTS, BASE, "zero_stage", "partition_count", "group_paddings", "param_slice_mappings")
_OF_THE_BASE = ("state", "param_groups")
_OF_THE_MODEL = ("module", "param_shapes", "buffer_names")
# The pieces of all ranks have this many elements, or a multiple of it.
_ALIGNED = 2


@dataclass(frozen=True, slots=True)
class _Slice:
    """A tensor in the flat state of a group: of the moment `key`, or of the weights if that is None."""

    group: int
    key: str | None
    start: int
    count: int


class ZeroDirectory(CheckpointReader):
    """The directory of one step, with the files of all ranks in it."""

    format = "DeepSpeed ZeRO"

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._ranks = {rank: RankFile(file) for rank, file in sorted(_rank_files(directory).items())}
        self._model = opened(_model_file(directory))
        if not self._ranks:
            raise damaged(str(directory), "the file of a rank", "none")
        self._first = self._ranks[min(self._ranks)]
        if self._first.stage not in (1, 2):
            words = f"ZeRO stage {shown(self._first.stage)}: only stages 1 and 2 are put together"
            raise unreadable(str(directory), words)
        self._shapes = _shapes(self._model)
        self._world_size = self._first.world_size
        # As many elements of the flat state of each group are in the piece of a rank, with the padding.
        totals = [sum(map(math.prod, shapes.values())) for shapes in self._shapes]
        self._totals = totals
        self._full = [_ALIGNED * -(-total // (_ALIGNED * self._world_size)) for total in totals]
        self._slices: dict[str, _Slice] = {}
        self._whole: dict[str, tuple[TorchZip, str]] = {}
        self.tensors = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._add_flat()
        moved = self._add_of_the_model(), self._add_of_the_optimizer()
        self.values = self._values(*moved)
        files = [self._model, *(rank.file for rank in self._ranks.values())]
        self.size_bytes = sum(file.size_bytes for file in files)
        self.files = {file.path.name: file.size_bytes for file in files}
        self.facts = {
            "objects": sorted({name for file in files for name in file.facts.get("objects", [])}),
            "attributes": self._attributes(*moved),
            "world_size": self._world_size,
            "zero_stage": self._first.stage,
        }
        self.problems = list(self._problems(files))
        self.notes = ["copies of the weights in 16 bits are not listed: those of 32 bits are what is trained"]
        self.notes += [f"{file.path.name}: {note}" for file in files for note in file.notes]
        self.checksums = self._model.checksums if all(file.checksums for file in files) else None

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor, put together from the ranks. Raises DamagedError."""
        if path in self._whole:
            file, name = self._whole[path]
            return file.read(name)
        found, item = self._slices[path], DTYPE_BITS[self.tensors[path].dtype] // 8
        begin, end, full = found.start, found.start + found.count, self._full[found.group]
        pieces = []
        # What a rank lacks is found before its bytes are asked for: a shape alone must not fill the memory.
        for rank in range(begin // full, -(-end // full)) if found.count else ():
            wrong = self._wrong(rank, found.group, found.key)
            if wrong is not None:
                raise damaged(f"{self.path}: {path}", *wrong)
            source, at = self._ranks[rank], rank * full
            piece = source.piece(found.group, found.key)
            assert piece is not None, "nothing is wrong with it"
            start, stop = max(begin - at, 0), min(end - at, full)
            pieces.append(source.file.read_range(piece, start * item, (stop - start) * item))
        return pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces))

    def verify(self) -> Iterator[Finding]:
        """Read every entry of every file against its checksum, and the counts of steps against each other."""
        for file in (self._model, *(rank.file for rank in self._ranks.values())):
            for found in file.verify():
                yield Finding(file=f"{file.path.name}: {found.file}", problem=found.problem)
        for group in range(len(self._shapes)):
            counts = {rank: file.step(group) for rank, file in self._ranks.items()}
            known = {rank: count for rank, count in counts.items() if count is not None}
            for rank, count in known.items():
                if count != known[min(known)]:
                    words = f"the step of group {group} is not that of rank {min(known)}"
                    yield Finding(file=self._ranks[rank].path.name, problem=words)

    def _add_flat(self) -> None:
        """Add the weights, and every moment that is cut as they are."""
        for group in range(len(self._shapes)):
            self._add(group, None)
        for group in range(len(self._shapes)):
            for key in self._flat_moments(group):
                self._add(group, key)

    def _flat_moments(self, group: int) -> list[str]:
        # Of the weights the padding of the last rank is left out, of the moments it is not.
        least = max(1, self._first.length(group, None) or 0)
        moments = self._first.moments(group)
        return [key for key in moments if (self._first.length(group, key) or 0) >= least]

    def _add(self, group: int, key: str | None) -> None:
        piece = self._first.piece(group, key)
        if piece is None:
            raise damaged(str(self._first.path), f"the weights of group {group}", "none")
        start, dtype = 0, self._first.file.tensors[piece].dtype
        for name, shape in self._shapes[group].items():
            size, count = tensor_bytes(dtype, shape), math.prod(shape)
            if size is None:
                raise damaged(str(self._model.path), f"the shape of {name}", shown(shape))
            path = self._free(f"model/{name}" if key is None else f"optimizer/state/{name}/{key}")
            where = f"{len(self._ranks)} files of ranks"
            self.tensors[path] = StoredTensor(dtype=dtype, shape=shape, size_bytes=size, where=where)
            self._slices[path] = _Slice(group, key, start, count)
            if key is not None:
                self._states.setdefault(name, {})[key] = {"$tensor": path}
            start += count

    def _add_of_the_model(self) -> dict[str, str]:
        """Add what else the file of the model has; return where it is now, by where it is in that file.

        Its copies of what is trained are of 16 bits: of them only the names count, which may be tied.
        """
        shared = self._model.values.get("shared_params")
        shared = shared if isinstance(shared, dict) else {}
        moved: dict[str, str] = {}
        for path, entry in self._model.tensors.items():
            places = (path, *entry.aliases)
            names = [place.partition("/")[2] for place in places if place.startswith("module/")]
            names += [shared[name] for name in names if isinstance(shared.get(name), str)]
            others = [place for place in places if not place.startswith("module/")]
            own = [f"model/{name}" for name in names]
            trained = next((name for name in own if name in self._slices), None)
            if trained is not None:
                aliases = dict.fromkeys([*self.tensors[trained].aliases, *own])
                new = tuple(name for name in aliases if name not in self._slices)
                self.tensors[trained] = replace(self.tensors[trained], aliases=new)
            else:
                others = own + others
            if others:
                moved[path] = self._add_whole(self._model, path, others)
        return moved

    def _add_of_the_optimizer(self) -> dict[str, str]:
        """Add what else the first rank has: a count of steps, for example, is the same in every file."""
        first = self._first
        cut = {first.piece(found.group, found.key) for found in self._slices.values()}
        cut |= {first.piece(group, None) for group in range(len(first.weights))}
        return {
            path: self._add_whole(first.file, path, [*map(place_of, (path, *entry.aliases))])
            for path, entry in first.file.tensors.items()
            if path not in cut
        }

    def _add_whole(self, file: TorchZip, source: str, names: Sequence[str]) -> str:
        path = self._free(names[0])
        self.tensors[path] = replace(file.tensors[source], aliases=tuple(dict.fromkeys(names[1:])))
        self._whole[path] = file, source
        return path

    def _free(self, path: str) -> str:
        while path in self.tensors:
            path += "'"
        return path

    def _values(self, of_model: Mapping[str, str], of_optimizer: Mapping[str, str]) -> dict[str, Any]:
        first, said = self._first, dict(self._model.values)
        rest = {**_without(first.state, _OF_THE_CUT), **_without(first.base, _OF_THE_BASE)}
        beside = [
            _without(first.moments(group), self._flat_moments(group)) for group in range(len(self._shapes))
        ]
        # Elastic checkpoints have no groups.
        named = zip(first.groups or [{}] * len(self._shapes), self._shapes, strict=False)
        groups = [{**mapping(group, "param_groups"), "params": list(names)} for group, names in named]
        groups += first.groups[len(groups) :]
        optimizer = placed({**rest, "param_groups": groups}, of_optimizer)
        if any(beside):
            optimizer["groups"] = placed(beside, of_optimizer)
        module = said.get("module")
        kept = {
            key: _without(value, ["$tensor"]) if isinstance(value, dict) else value
            for key, value in (module if isinstance(module, dict) else {}).items()
            if not (isinstance(value, dict) and value.keys() == {"$tensor"})
        }
        found = {
            **placed(_without(first.file.values, (STATE, *said)), of_optimizer),
            **placed(_without(said, _OF_THE_MODEL), of_model),
        }
        ours = {"optimizer": {**optimizer, "state": self._states}, "model": placed(kept, of_model)}
        for key, value in ours.items():
            if value and found.get(key) is not None:
                found[f"{key}'"] = found[key]
            if value:
                found[key] = value
        return found

    def _attributes(self, of_model: Mapping[str, str], of_optimizer: Mapping[str, str]) -> dict[str, Any]:
        """Return what hangs on the dictionaries of both files, by where these are now."""
        found = placed(self._first.file.facts.get("attributes", {}), of_optimizer)
        said = placed(self._model.facts.get("attributes", {}), of_model)
        found = {place_of(path): value for path, value in found.items()}
        return found | {re.sub("^module(?=/|$)", "model", path): value for path, value in said.items()}

    def _problems(self, files: Sequence[TorchZip]) -> Iterator[Finding]:
        for file in files:
            for found in file.problems:
                yield Finding(file=f"{file.path.name}: {found.file}", problem=found.problem)
        missing = [rank for rank in range(self._world_size) if rank not in self._ranks]
        if len(missing) == 1:
            words = f"the file of rank {missing[0]} of {self._world_size} is missing"
            yield Finding(file=self.path.name, problem=words)
        elif missing:
            more = f"{len(missing) - 1} more of {self._world_size}"
            words = f"the files of rank {missing[0]} and {more} are missing"
            yield Finding(file=self.path.name, problem=words)
        for rank, of_rank in self._ranks.items():
            for words in self._other_than_first(rank, of_rank):
                yield Finding(file=of_rank.path.name, problem=words)

    def _other_than_first(self, rank: int, file: RankFile) -> Iterator[str]:
        """Yield what tells that a file is of another save, or not whole."""
        first = self._first
        pairs = {
            "ranks": (self._world_size, file.world_size),
            "the ZeRO stage": (first.stage, file.stage),
            "groups of weights": (len(self._shapes), len(file.weights)),
        }
        for what, (expected, found) in pairs.items():
            if expected != found:
                yield f"{what}: expected {shown(expected)}, found {shown(found)}"
        if rank >= self._world_size:
            yield f"a file of rank {rank}, though there are {self._world_size} ranks: it is of another save"
            return
        for group in range(len(self._shapes)):
            keys, known = set(file.moments(group)), set(first.moments(group))
            if keys != known:
                words = f"expected {shown(sorted(known))}, found {shown(sorted(keys))}"
                yield f"the state of group {group}: {words}"
            if file.said_step(group) != first.said_step(group):
                words = f"expected {first.said_step(group)}, found {file.said_step(group)}"
                yield f"the step of group {group}: {words}"
            for key in (None, *(key for key in self._flat_moments(group) if key in keys)):
                wrong = self._wrong(rank, group, key)
                if wrong is not None:
                    yield f"expected {wrong[0]}, found {wrong[1]}"

    def _wrong(self, rank: int, group: int, key: str | None) -> tuple[str, str] | None:
        """Return what is expected of a piece and what is found instead, None if nothing is wrong with it."""
        what = f"{'the weights' if key is None else key} of group {group} in the file of rank {rank}"
        file, first = self._ranks.get(rank), self._first.piece(group, key)
        path = file.piece(group, key) if file is not None else None
        if file is None or path is None or first is None:
            return what, "none"
        dtype, wanted = file.file.tensors[path].dtype, self._first.file.tensors[first].dtype
        if dtype != wanted:
            return f"{what} as {wanted}", dtype
        full, length = self._full[group], file.length(group, key)
        least = min(max(self._totals[group] - rank * full, 0), full)
        if length is None or length < least:
            return f"{what}: at least {least} elements in a row", f"{file.file.tensors[path].shape}"
        # With more of them all that comes after would be cut at wrong places.
        if key is None and length > full:
            return f"{what}: at most {full} elements", f"{length}"
        return None


def _without(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    left_out = set(keys)
    return {key: value for key, value in values.items() if key not in left_out}


def _rank_files(directory: Path) -> dict[int, Path]:
    with translated("list", str(directory)):
        names = sorted(directory.iterdir())
    found: dict[int, Path] = {}
    for path in names:
        match = ZERO_RANK.fullmatch(path.name)
        if match is None:
            continue
        if match[2] != "00":
            raise unreadable(
                str(directory), "a model that is cut by tensor parallelism, too, is not put together"
            )
        rank = int(match[1])
        if rank in found:
            raise damaged(str(directory), f"one file of rank {rank}", f"{found[rank].name}, {path.name}")
        found[rank] = path
    return found


def _model_file(directory: Path) -> Path:
    with translated("list", str(directory)):
        found = [path for path in directory.iterdir() if _MODEL.fullmatch(path.name)]
    if len(found) != 1:
        raise damaged(str(directory), "one file of the model (mp_rank_00_model_states.pt)", f"{len(found)}")
    return found[0]


def _shapes(model: TorchZip) -> list[dict[str, tuple[int, ...]]]:
    """Return for each group the names and shapes of its parameters, in the order of the flat state."""
    found: list[dict[str, tuple[int, ...]]] = []
    names: set[str] = set()
    for group in sequence(model.values.get("param_shapes"), f"{model.path}: param_shapes"):
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in mapping(group, f"{model.path}: param_shapes").items():
            lengths = integers(shape)
            if lengths is None or name in names:
                expected = "a shape" if lengths is None else "it in one group"
                raise damaged(f"{model.path}: parameter {name}", expected, shown(shape))
            shapes[name] = lengths
            names.add(name)
        found.append(shapes)
    return found
