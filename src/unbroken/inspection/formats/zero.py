"""What DeepSpeed writes of ZeRO stages 1 and 2: flat state, cut by ranks, here put together again.

A file for each rank holds its piece of the 32-bit weights and of each moment, flat and group by group; a
file of the model holds the names and shapes that the flat state is cut into, in their order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.checkpoint.verify import Finding
from unbroken.inspection.formats.base import (
    DTYPE_BITS,
    CheckpointReader,
    StoredTensor,
    damaged,
    tensor_bytes,
    unreadable,
)
from unbroken.inspection.formats.torch_zip import TorchZip
from unbroken.inspection.formats.zips import ZipEntries
from unbroken.storage.failures import translated

_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2})_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d{2})_model_states\.pt")
_WEIGHTS = "single_partition_of_fp32_groups"
_STATE = "optimizer_state_dict"


@dataclass(frozen=True, slots=True)
class _Slice:
    """A tensor in the flat state of a group: its first element, and how many there are."""

    group: int
    start: int
    count: int
    # Where in the file of each rank its piece of that flat state is.
    path: str


class ZeroDirectory(CheckpointReader):
    """The directory of one step, with the files of all ranks in it."""

    format = "DeepSpeed ZeRO"

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._ranks = {rank: _opened(file) for rank, file in sorted(_rank_files(directory).items())}
        self._model = _opened(_model_file(directory))
        first = next(iter(self._ranks.values()))
        state = _mapping(first.values.get(_STATE), f"{first.path}: {_STATE}")
        stage = state.get("zero_stage")
        if stage not in (1, 2):
            raise unreadable(str(directory), f"ZeRO stage {stage!r}: only stages 1 and 2 are put together")
        self._shapes = _shapes(self._model)
        self._world_size = _world_size(state.get("partition_count"), first.path)
        self._first = first
        self._slices: dict[str, _Slice] = {}
        self._of_groups: dict[str, str] = {}
        self.tensors = {}
        self._add_weights(first)
        self._add_moments(first, state)
        self._add_others()
        self.values = self._values(state)
        files = [self._model, *self._ranks.values()]
        self.size_bytes = sum(file.size_bytes for file in files)
        self.files = {file.path.name: file.size_bytes for file in files}
        self.facts = {
            "objects": sorted({name for file in files for name in file.facts.get("objects", [])}),
            "world_size": self._world_size,
            "zero_stage": stage,
        }
        self.problems = list(self._problems(files))
        self.notes = ["copies of the weights in 16 bits are not listed: those of 32 bits are what is trained"]
        self.checksums = first.checksums

    def read(self, path: str) -> memoryview:
        """Return the bytes of a tensor, put together from the ranks. Raises DamagedError."""
        found = self._slices.get(path)
        if path in self._of_groups:
            return self._first.read(self._of_groups[path])
        if found is None:
            return self._model.read(path.replace("model/", "module/", 1))
        item = DTYPE_BITS[self.tensors[path].dtype] // 8
        begin, end = found.start * item, (found.start + found.count) * item
        target, filled, at = bytearray(end - begin), 0, 0
        for rank in range(self._world_size):
            if rank not in self._ranks:
                raise damaged(str(self.path), f"the file of rank {rank}", "none")
            size = self._ranks[rank].tensors[found.path].size_bytes
            if at < end and at + size > begin:
                piece = self._ranks[rank].read(found.path)[max(begin - at, 0) : min(end - at, size)]
                target[filled : filled + len(piece)] = piece
                filled += len(piece)
            at += size
        if filled < len(target):
            raise damaged(f"{self.path}: {path}", f"{len(target)} bytes", f"{filled} in all ranks together")
        return memoryview(target)

    def verify(self) -> Iterator[Finding]:
        """Read every entry of every file against its checksum."""
        for file in (self._model, *self._ranks.values()):
            for found in file.verify():
                yield Finding(file=f"{file.path.name}: {found.file}", problem=found.problem)

    def _add_weights(self, first: TorchZip) -> None:
        for group in range(len(self._shapes)):
            self._add(first, group, f"{_STATE}/{_WEIGHTS}/{group}", "model/{name}")

    def _add_moments(self, first: TorchZip, state: Mapping[str, Any]) -> None:
        base = state.get("base_optimizer_state")
        states = base.get("state") if isinstance(base, dict) else None
        if not isinstance(states, dict):
            return
        for group in range(len(self._shapes)):
            length = first.tensors[f"{_STATE}/{_WEIGHTS}/{group}"].shape
            for key, value in _mapping(states.get(str(group), {}), f"{first.path}: state {group}").items():
                path = value.get("$tensor") if isinstance(value, dict) else None
                if path not in first.tensors:
                    continue
                if first.tensors[path].shape == length:
                    self._add(first, group, path, f"optimizer/state/{{name}}/{key}")
                    continue
                # The count of steps, for example: one for the whole group, the same in every file.
                full = f"optimizer/groups/{group}/{key}"
                self.tensors[full], self._of_groups[full] = first.tensors[path], path

    def _add(self, first: TorchZip, group: int, path: str, pattern: str) -> None:
        if path not in first.tensors:
            raise damaged(str(first.path), f"tensor {path}", "none")
        start, dtype = 0, first.tensors[path].dtype
        for name, shape in self._shapes[group].items():
            size, count = tensor_bytes(dtype, shape), math.prod(shape)
            if size is None:
                raise damaged(str(self._model.path), f"the shape of {name}", f"{shape}")
            full = pattern.format(name=name)
            where = f"{len(self._ranks)} files of ranks"
            self.tensors[full] = StoredTensor(dtype=dtype, shape=shape, size_bytes=size, where=where)
            self._slices[full] = _Slice(group, start, count, path)
            start += count

    def _add_others(self) -> None:
        """Add what of the model is not trained, buffers for example: the file of the model has it whole."""
        trained = {name for shapes in self._shapes for name in shapes}
        for path, entry in self._model.tensors.items():
            part, _, name = path.partition("/")
            if part == "module" and name not in trained:
                self.tensors[f"model/{name}"] = entry

    def _values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        base = state.get("base_optimizer_state")
        groups = base.get("param_groups") if isinstance(base, dict) else None
        moments: dict[str, dict[str, Any]] = {}
        for path in self.tensors:
            if path.startswith("optimizer/state/"):
                name, _, key = path.removeprefix("optimizer/state/").rpartition("/")
                moments.setdefault(name, {})[key] = {"$tensor": path}
        optimizer = {
            "state": moments,
            "param_groups": [
                {**group, "params": list(names)}
                for group, names in zip(groups or [], self._shapes, strict=False)
                if isinstance(group, dict)
            ],
        }
        left_out = {"module", "param_shapes", "buffer_names"}
        said = {key: value for key, value in self._model.values.items() if key not in left_out}
        return {**said, "optimizer": optimizer}

    def _problems(self, files: Sequence[TorchZip]) -> Iterator[Finding]:
        for file in files:
            for found in file.problems:
                yield Finding(file=f"{file.path.name}: {found.file}", problem=found.problem)
        for rank in range(self._world_size):
            if rank not in self._ranks:
                words = f"the file of rank {rank} of {self._world_size} is missing"
                yield Finding(file=self.path.name, problem=words)
        for path in dict.fromkeys(found.path for found in self._slices.values()):
            for file in self._ranks.values():
                if path not in file.tensors:
                    yield Finding(file=file.path.name, problem=f"tensor {path} is missing")


def _rank_files(directory: Path) -> dict[int, Path]:
    with translated("list", str(directory)):
        names = [path for path in directory.iterdir() if _RANK.fullmatch(path.name)]
    found = {path: _RANK.fullmatch(path.name) for path in names}
    if any(match is not None and match[2] != "00" for match in found.values()):
        raise unreadable(
            str(directory), "a model that is cut by tensor parallelism, too, is not put together"
        )
    return {int(match[1]): path for path, match in found.items() if match is not None}


def _model_file(directory: Path) -> Path:
    with translated("list", str(directory)):
        found = [path for path in directory.iterdir() if _MODEL.fullmatch(path.name)]
    if len(found) != 1:
        raise damaged(str(directory), "one file of the model (mp_rank_00_model_states.pt)", f"{len(found)}")
    return found[0]


def _opened(file: Path) -> TorchZip:
    found = TorchZip(file, ZipEntries(file))
    _mapping(found.values, str(file))
    return found


def _shapes(model: TorchZip) -> list[dict[str, tuple[int, ...]]]:
    """Return for each group the names and shapes of its parameters, in the order of the flat state."""
    groups = model.values.get("param_shapes")
    try:
        return [{str(name): tuple(map(int, shape)) for name, shape in group.items()} for group in groups]
    except (TypeError, ValueError, AttributeError) as error:
        raise damaged(str(model.path), "the shapes of all parameters", f"{type(error).__name__}") from error


def _world_size(partition_count: Any, file: Path) -> int:
    counts = set(partition_count) if isinstance(partition_count, list) else {partition_count}
    (count, *others) = counts or {None}
    if others or type(count) is not int or count < 1:
        raise damaged(str(file), "one number of ranks (partition_count)", f"{partition_count!r}")
    return count


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise damaged(where, "a dictionary", type(value).__name__)
    return value
