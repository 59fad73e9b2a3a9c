"""The weights of a module by name, and weights in files of torch: for a warm start."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbroken.checkpoint.weights import SPECIAL
from unbroken.errors import DamagedError, UsageError
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.tensors import TorchCodec, TorchTensor, tensor_differences
from unbroken.frameworks.torch.wrappers import PARALLEL, WRAPPED_AS
from unbroken.state.handlers import Difference
from unbroken.state.tensors import LoadedTensor

# Where training scripts keep the weights among other things in one file.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights")


class TorchWeights:
    """The parameters and persistent buffers of a module, by names without those of wrappers."""

    def __init__(self, module: nn.Module) -> None:
        state: Any = ModuleHandler().state(module)
        self.tensors: dict[str, torch.Tensor] = {
            name: item
            for name, item in state.items()
            if name not in SPECIAL and isinstance(item, torch.Tensor)
        }
        self._first: dict[str, str] = {}
        by_memory: dict[Hashable, str] = {}
        for name, tensor in self.tensors.items():
            memory = TorchTensor(tensor).identity
            self._first[name] = name if memory is None else by_memory.setdefault(memory, name)

    def made_of(self, tensor: Any) -> torch.Tensor:
        """Return the tensor with these bytes; one that is of torch already as it is."""
        return tensor if isinstance(tensor, torch.Tensor) else made_of(tensor)

    def differences(self, found: Mapping[str, torch.Tensor]) -> list[Difference]:
        """Return how `found` differs from these in names, shapes and dtypes, and in what is tied."""
        # Files keep tied weights under one of their names at times.
        present = {self._first[name] for name in found if name in self.tensors}
        differences = [
            Difference("missing", name, "the source lacks it")
            for name in self.tensors
            if self._first[name] not in present
        ]
        seen: dict[str, str] = {}
        for name, tensor in found.items():
            if name not in self.tensors:
                differences.append(Difference("unexpected", name, "the model lacks it"))
                continue
            differences += tensor_differences(name, self.tensors[name], tensor)
            other = seen.setdefault(self._first[name], name)
            if not _is_same(tensor, found[other]):
                text = f"has other values than {other} in the source; in the model both are one tensor"
                differences.append(Difference("unexpected", name, text))
        return differences

    def fill(self, found: Mapping[str, torch.Tensor]) -> None:
        """Copy `found` into the tensors of the same names, in place, cast to their dtype."""
        with torch.no_grad():
            for name, tensor in found.items():
                self.tensors[name].copy_(tensor)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    # By their bytes: NaN is itself.
    mine, theirs = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(mine, theirs)


def made_of(tensor: LoadedTensor) -> torch.Tensor:
    """Return the torch tensor with these bytes."""
    made = TorchCodec().decode_tensor(tensor)
    assert isinstance(made, torch.Tensor)
    return made


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a file of `torch.save`, read without running any code in it.

    Raises DamagedError if torch cannot read it, UsageError if there is more in it than weights and plain
    values, or no weights by name.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        if _is_whole(path):
            raise UsageError(
                f"{path}: expected tensors and plain values, found other objects, which are not loaded: "
                f"to load them is to run code",
                hint="save the weights alone: torch.save(model.state_dict(), path)",
            ) from error
        raise DamagedError(
            f"{path}: expected a file of torch.save that holds tensors and plain values, found {error!s:.99}",
            hint="save the weights alone: torch.save(model.state_dict(), path)",
        ) from error
    for key in (None, *_USUAL_KEYS):
        candidate = content if key is None else content.get(key) if isinstance(content, dict) else None
        if isinstance(candidate, dict) and any(isinstance(item, torch.Tensor) for item in candidate.values()):
            return {str(name): item for name, item in candidate.items() if isinstance(item, torch.Tensor)}
    raise UsageError(
        f"{path}: expected tensors by name, found {type(content).__name__}",
        hint="save the weights alone: torch.save(model.state_dict(), path)",
    )


def _is_whole(path: Path) -> bool:
    """Tell whether every byte of a file of torch.save is as it was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error):
        return False


def without_wrappers(names: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield `names` with ever fewer of the segments that wrappers have put into them, first as they are."""
    found = dict(names)
    yield found
    found = {_without_segments(name): tensor for name, tensor in found.items()}
    while found:
        yield found
        if {name.partition(".")[0] for name in found} != {PARALLEL}:
            return
        found = {name.partition(".")[2]: tensor for name, tensor in found.items()}


def _without_segments(name: str) -> str:
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPED_AS)
