"""The file that DeepSpeed writes for a rank: its pieces of the flat state, and how that was cut."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unbroken.errors import DamagedError
from unbroken.inspection.formats.base import damaged
from unbroken.inspection.formats.torch_zip import TorchZip
from unbroken.inspection.formats.zips import ZipEntries

STATE, BASE = "optimizer_state_dict", "base_optimizer_state"
WEIGHTS = "single_partition_of_fp32_groups"
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
_MOST_RANKS = 1_000_000
_LONGEST_SHOWN = 80
_STEP, _LARGEST_NUMBER_BYTES = "step", 16


class RankFile:
    """The file of a rank: its pieces of the flat state, by group, and what it says of how that was cut."""

    def __init__(self, path: Path) -> None:
        self.file = opened(path)
        self.path = path
        self.state = mapping(self.file.values.get(STATE), f"{path}: {STATE}")
        self.stage = _stage(self.state.get("zero_stage"))
        self.world_size = _world_size(self.state.get("partition_count"), path)
        self.weights = sequence(self.state.get(WEIGHTS), f"{path}: {WEIGHTS}")
        base = self.state.get(BASE)
        # With elastic checkpoints there is nothing but the states, in a list.
        self.base: dict[str, Any] = mapping(
            {"state": dict(enumerate(base))} if isinstance(base, list) else base or {},
            f"{path}: {BASE}",
        )
        states = mapping(self.base.get("state") or {}, f"{path}: state")
        self._moments = {
            str(group): mapping(state, f"{path}: state {group}") for group, state in states.items()
        }
        self.groups = sequence(self.base.get("param_groups") or [], f"{path}: param_groups")

    def moments(self, group: int) -> Mapping[str, Any]:
        """Return what the optimizer keeps for a group."""
        return self._moments.get(str(group), {})

    def _tensor(self, value: Any) -> str | None:
        path = value.get("$tensor") if isinstance(value, dict) else None
        return path if isinstance(path, str) and path in self.file.tensors else None

    def piece(self, group: int, key: str | None) -> str | None:
        """Return the path of its piece of the weights or of a moment, None if there is none."""
        if key is not None:
            return self._tensor(self.moments(group).get(key))
        return self._tensor(self.weights[group]) if group < len(self.weights) else None

    def step(self, group: int) -> bytes | None:
        """Return the count of steps of a group where it is a tensor, None if it is not or cannot be read."""
        path = self.piece(group, _STEP)
        if path is not None and self.file.tensors[path].size_bytes <= _LARGEST_NUMBER_BYTES:
            # What is damaged is found by its checksum.
            with suppress(DamagedError):
                return bytes(self.file.read(path))
        return None

    def said_step(self, group: int) -> int | float | None:
        """Return the count of steps of a group where it is a plain number, None if it is not."""
        options = self.groups[group] if group < len(self.groups) else None
        places = (self.moments(group), options if isinstance(options, dict) else {})
        return next((found[_STEP] for found in places if isinstance(found.get(_STEP), int | float)), None)

    def length(self, group: int, key: str | None) -> int | None:
        """Return how many elements that piece has, None if there is none or it is not flat."""
        path = self.piece(group, key)
        shape = self.file.tensors[path].shape if path is not None else ()
        return shape[0] if len(shape) == 1 else None


def place_of(path: str) -> str:
    """Return where a tensor of the file of a rank is listed.

    >>> place_of("optimizer_state_dict/base_optimizer_state/state/0/step")
    'optimizer/groups/0/step'
    """
    if not path.startswith(f"{STATE}/"):
        return path
    rest = path.removeprefix(f"{STATE}/")
    if not rest.startswith(f"{BASE}/"):
        return f"optimizer/{rest}"
    rest = rest.removeprefix(f"{BASE}/")
    of_group = rest.removeprefix("state/")
    return f"optimizer/groups/{of_group}" if of_group.partition("/")[0].isdigit() else f"optimizer/{rest}"


def opened(file: Path) -> TorchZip:
    """Open a file of `torch.save` that holds a dictionary. Raises DamagedError."""
    found = TorchZip(file, ZipEntries(file))
    mapping(found.values, str(file))
    return found


def _stage(value: Any) -> Any:
    """Return the number of a stage, which is a member of an enumeration: its class called with a value."""
    match value:
        case {"$object": str(), "arguments": [int() as number]}:
            return number
        case {"$object": str(), "arguments": [_, str() as name]} if name in _STAGES:
            return _STAGES.index(name)
    return value


def _world_size(partition_count: Any, file: Path) -> int:
    counts = partition_count if isinstance(partition_count, list) else [partition_count]
    count = counts[0] if counts else None
    if type(count) is not int or any(type(one) is not int or one != count for one in counts):
        raise damaged(str(file), "one number of ranks (partition_count)", shown(partition_count))
    if not 1 <= count <= _MOST_RANKS:
        raise damaged(str(file), f"1 to {_MOST_RANKS} ranks (partition_count)", f"{count}")
    return count


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return `value`, which must be a dictionary. Raises DamagedError."""
    if not isinstance(value, dict):
        raise damaged(where, "a dictionary", type(value).__name__)
    return value


def sequence(value: Any, where: str) -> list[Any]:
    """Return `value`, which must be a list. Raises DamagedError."""
    if not isinstance(value, list):
        raise damaged(where, "a list", type(value).__name__)
    return value


def shown(value: Any) -> str:
    """Return the beginning of what Python prints of `value`."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
