"""The weights of a module by name, and weights in files of torch: for a warm start."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbroken.errors import DamagedError, UsageError
from unbroken.frameworks.torch.module_names import SPECIAL
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.tensors import TorchCodec, tensor_differences
from unbroken.state.handlers import Difference
from unbroken.state.tensors import LoadedTensor

# Where training scripts keep the weights among other things in one file.
_USUAL_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights")
# Segments that wrappers put before every name.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")


class TorchWeights:
    """The parameters and persistent buffers of a module, by names without those of wrappers."""

    def __init__(self, module: nn.Module) -> None:
        state: Any = ModuleHandler().state(module)
        self.tensors: dict[str, torch.Tensor] = {
            name: item
            for name, item in state.items()
            if name not in SPECIAL and isinstance(item, torch.Tensor)
        }

    def differences(self, found: Mapping[str, torch.Tensor]) -> list[Difference]:
        """Return how `found` differs from these in names, shapes and dtypes."""
        differences = [
            Difference("missing", name, "the source lacks it") for name in self.tensors if name not in found
        ]
        for name, tensor in found.items():
            if name in self.tensors:
                differences += tensor_differences(name, self.tensors[name], tensor)
            else:
                differences.append(Difference("unexpected", name, "the model lacks it"))
        return differences

    def fill(self, found: Mapping[str, torch.Tensor]) -> None:
        """Copy `found` into the tensors of the same names, in place, cast to their dtype."""
        with torch.no_grad():
            for name, tensor in found.items():
                self.tensors[name].copy_(tensor)


def made_of(tensor: LoadedTensor) -> torch.Tensor:
    """Return the torch tensor with these bytes."""
    made = TorchCodec().decode_tensor(tensor)
    assert isinstance(made, torch.Tensor)
    return made


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a file of `torch.save`, read without running any code in it.

    Raises DamagedError if torch cannot read it, UsageError if there are no weights by name in it.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
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


def without_wrappers(names: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `names` without the segments that wrappers have put before every one."""
    found = dict(names)
    while found:
        first = {name.partition(".")[0] for name in found}
        if len(first) > 1 or next(iter(first)) not in _WRAPPERS:
            break
        found = {name.partition(".")[2]: tensor for name, tensor in found.items()}
    return found
