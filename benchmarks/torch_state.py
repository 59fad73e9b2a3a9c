"""A training state as a script holds it: live modules and optimizers of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from states import StateSpec, fingerprint

MOMENTS = ("exp_avg", "exp_avg_sq")


class TorchState:
    """Modules and optimizers by part name."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        tensors = self.flat().values()
        self.tensor_count = len(tensors)
        self.size_bytes = sum(tensor.nbytes for tensor in tensors)

    def nested(self) -> dict[str, Any]:
        """Return the `state_dict` of every part; its tensors are the live ones."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def flat(self) -> dict[str, torch.Tensor]:
        """Return the live tensors by their paths, such as `optimizer/state/0/exp_avg`."""
        return dict(_tensors(self.nested(), ""))

    def load(self, nested: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(nested[name])

    def load_flat(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load tensors by their paths; the settings of the optimizers stay as they are."""
        self.load(_with_tensors(self.nested(), tensors, ""))

    def train(self) -> None:
        with torch.no_grad():
            # Not a step of the optimizer: gradients would take as much memory as the model.
            torch._foreach_add_(list(self._trained()), 1e-3)

    def clear(self) -> None:
        with torch.no_grad():
            torch._foreach_zero_(list(self.flat().values()))

    def fingerprint(self) -> int:
        words = (tensor.detach().reshape(-1).view(torch.int32) for tensor in self.flat().values())
        return fingerprint(int(part.sum(dtype=torch.int64)) for part in words)

    def _trained(self) -> Iterator[torch.Tensor]:
        for part in self.parts.values():
            if isinstance(part, torch.optim.Optimizer):
                yield from (value for state in part.state.values() for value in state.values())
            else:
                yield from (value for value in part.parameters() if value.requires_grad)


def build(spec: StateSpec) -> TorchState:
    """Return the model and its AdamW, with random content as after some training."""
    model = build_model(spec)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=3e-4)
    generator = torch.Generator().manual_seed(1)
    for value in optimizer.param_groups[0]["params"]:
        moments = {name: torch.rand(value.shape, generator=generator) for name in MOMENTS}
        optimizer.state[value] = {"step": torch.tensor(1000.0), **moments}
    return TorchState({"model": model, "optimizer": optimizer})


def build_model(spec: StateSpec) -> torch.nn.Module:
    """Return a module that has the parameters of `spec` under their names, with random content."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Module()
    for name, shape in spec.shapes.items():
        *path, last = name.split(".")
        owner = model
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, torch.nn.Module())
            owner = owner.get_submodule(step)
        is_trained = name not in spec.frozen
        values = torch.rand(shape, generator=generator)
        owner.register_parameter(last, torch.nn.Parameter(values, requires_grad=is_trained))
    return model


def _tensors(node: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield path, node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _tensors(value, f"{path}/{key}" if path else str(key))


def _with_tensors(node: Any, tensors: Mapping[str, torch.Tensor], path: str) -> Any:
    """Return the tree `node` with the tensors of `tensors` in the places of its own."""
    if isinstance(node, torch.Tensor):
        return tensors[path]
    if isinstance(node, Mapping):
        items = node.items()
        return {
            key: _with_tensors(value, tensors, f"{path}/{key}" if path else str(key)) for key, value in items
        }
    return node
