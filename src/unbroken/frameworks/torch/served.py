"""A module that is filled with the weights of a checkpoint while a copy of it serves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from unbroken.checkpoint.manifest import TensorEntry
from unbroken.checkpoint.store import Checkpoint
from unbroken.checkpoint.weights import ATTRIBUTES, SPECIAL, PartWeights, weights_in
from unbroken.errors import NotFiniteError, StateMismatchError
from unbroken.frameworks.torch.copies import without_gradients
from unbroken.frameworks.torch.module_names import dotted
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.tensors import TorchCodec, TorchTensor
from unbroken.frameworks.torch.wrappers import PARALLEL, places_of
from unbroken.state.choices import matches
from unbroken.state.handlers import Difference
from unbroken.state.tensors import memory_at
from unbroken.state.tree import Decoder

Target: TypeAlias = tuple[str, torch.Tensor]

# What torch counts on an averaged model, whose weights have the names of the model below `module`.
_AVERAGED = "n_averaged"
_CAST = frozenset({"F16", "BF16", "F32", "F64"})
# What cannot be read straight to where it belongs passes through this much host memory.
_STAGED_BYTES = 256 << 20


def not_finite_as_built(module: nn.Module) -> frozenset[str]:
    """Return the names of the buffers of `module` that hold NaN or infinity, as masks do."""
    return frozenset(
        name
        for name, tensor in _Live.of(module).tensors.items()
        if not isinstance(tensor, nn.Parameter) and not _is_finite(tensor)
    )


def fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    part: str | None,
    *,
    non_finite: Sequence[str] = (),
    masks: Collection[str] = (),
) -> None:
    """Put the weights of the module `part` in `checkpoint` into `module`, in place, every byte verified.

    Floats are cast to the dtypes of `module`. Parameters and buffers are to be finite, but for those that
    match `non_finite` and for the buffers `masks`. When this returns, nothing is under way on any device.

    Raises UsageError and StateMismatchError, with nothing changed; DamagedError, StorageError and
    NotFiniteError, and what is in `module` then is worth nothing.
    """
    live = _Live.of(module)
    weights = _fitted(weights_in(checkpoint.manifest, part), live)
    _check(weights, live, checkpoint)
    targets = {
        name: (live.tensors[name], path) for name, path in weights.paths.items() if name in live.tensors
    }
    _Filling(checkpoint, weights.part, non_finite, masks).fill(targets)
    _put_others(module, checkpoint, weights, targets)
    # The mode is kept with them, and was that of training.
    module.eval()


@dataclass(frozen=True, slots=True)
class _Live:
    """What a module has: the tensors that can be filled, and all names that a checkpoint is to have."""

    tensors: dict[str, torch.Tensor]
    names: set[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Live:
        state: Any = ModuleHandler().state(module)
        own: set[int] = set()
        extra: dict[str, torch.Tensor] = {}
        for place in places_of(module):
            own |= {id(tensor) for tensor in place.module._parameters.values()}
            own |= {id(tensor) for tensor in place.module._buffers.values()}
            for leaf in place.module._non_persistent_buffers_set:
                buffer = place.module._buffers.get(leaf)
                if buffer is not None:
                    extra[dotted(place.name, leaf)] = buffer
        # What state_dict() makes anew for whoever asks goes back by load_state_dict().
        tensors = {name: item for name, item in state.items() if id(item) in own}
        return cls({**extra, **tensors}, state.keys() - SPECIAL)


def _fitted(weights: PartWeights, live: _Live) -> PartWeights:
    """Return the weights of an averaged model by the names of the model itself, if that is what is live."""
    before = f"{PARALLEL}."
    named = {*weights.paths, *weights.others} - {_AVERAGED}
    if any(name.startswith(before) for name in live.names) or not all(
        name.startswith(before) for name in named
    ):
        return weights

    def inner(found: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(before): item for name, item in found.items() if name != _AVERAGED}

    return PartWeights(
        part=weights.part,
        paths=inner(weights.paths),
        others=inner(weights.others),
        attributes=inner(weights.attributes),
    )


def _check(weights: PartWeights, live: _Live, checkpoint: Checkpoint) -> None:
    """Raise StateMismatchError unless the weights are those of such a module."""
    found = {*weights.paths, *weights.others}
    differences = [
        *(Difference("missing", name, "the checkpoint lacks it") for name in sorted(live.names - found)),
        *(
            Difference("unexpected", name, "the module lacks it")
            for name in sorted(found - live.names - live.tensors.keys())
        ),
        *_unlike(weights.paths, live.tensors, checkpoint.manifest.tensors),
    ]
    if differences:
        raise StateMismatchError(
            f"{checkpoint.name}: the module {weights.part} in it is not like the one to serve\n  "
            + "\n  ".join(map(str, differences)),
            hint="serve the class that was trained, built with the same settings",
        )


def _unlike(
    paths: Mapping[str, str], tensors: Mapping[str, torch.Tensor], entries: Mapping[str, TensorEntry]
) -> Iterator[Difference]:
    seen: dict[object, str] = {}
    for name, path in paths.items():
        if name not in tensors:
            continue
        live, saved = TorchTensor(tensors[name]), entries[path]
        if live.shape != saved.shape:
            text = f"shape {live.shape}, the checkpoint has shape {saved.shape}"
            yield Difference("shape", name, text)
        if live.dtype != saved.dtype and not {live.dtype, saved.dtype} <= _CAST:
            yield Difference("dtype", name, f"dtype {live.dtype}, the checkpoint has dtype {saved.dtype}")
        other = name if live.identity is None else seen.setdefault(live.identity, name)
        if entries[paths[other]].digest != saved.digest:
            yield Difference("other", name, f"is one tensor with {other} here, not in the checkpoint")


class _Filling:
    """Fills tensors from one checkpoint: straight in host memory, others by way of it, some at a time."""

    def __init__(
        self, checkpoint: Checkpoint, part: str, non_finite: Sequence[str], masks: Collection[str]
    ) -> None:
        self._checkpoint = checkpoint
        self._entries = checkpoint.manifest.tensors
        self._part = part
        self._non_finite = tuple(non_finite)
        self._masks = frozenset(masks)

    def fill(self, targets: Mapping[str, tuple[torch.Tensor, str]]) -> None:
        """Fill the tensor of each name with what lies at the path beside it."""
        # Tied weights are filled once.
        once = {TorchTensor(item[0]).identity or name: (name, *item) for name, item in targets.items()}
        devices = {tensor.device for tensor, _ in targets.values()}
        # Requests that are over for the host may still be running there.
        _settle(devices)
        straight: dict[str, memoryview] = {}
        waiting: dict[str, list[Target]] = {}
        for name, tensor, path in once.values():
            memory = _memory(tensor, self._entries[path])
            if memory is None or path in straight:
                waiting.setdefault(path, []).append((name, tensor))
            else:
                straight[path] = memory
        self._checkpoint.load_into(straight)
        for name, tensor, path in once.values():
            if path in straight and self._is_in_doubt(tensor):
                self._look(name, tensor, tensor)
        for paths in _groups(waiting, self._entries):
            self._copy(paths, waiting)
            _settle(devices)

    def _copy(self, paths: Sequence[str], waiting: Mapping[str, Sequence[Target]]) -> None:
        loaded = self._checkpoint.load_tensors(paths)
        for path in paths:
            source: Any = TorchCodec().decode_tensor(loaded[path])
            for name, tensor in waiting[path]:
                # Cast here: on a device that serves there may be no memory to spare.
                cast = source.to(tensor.dtype)
                if cast is not source or self._is_in_doubt(tensor):
                    self._look(name, source, cast)
                with _beside(tensor.device), torch.inference_mode():
                    tensor.copy_(cast)

    def _is_in_doubt(self, tensor: torch.Tensor) -> bool:
        """Tell of a tensor of which nobody has looked yet whether it is finite."""
        # Whoever writes a checkpoint looks at what is trained, which running statistics are not.
        return self._checkpoint.manifest.non_finite is None or not isinstance(tensor, nn.Parameter)

    def _look(self, name: str, source: torch.Tensor, cast: torch.Tensor) -> None:
        if name in self._masks or _is_finite(cast):
            return
        full = dotted(self._part, name)
        if _is_finite(source):
            problem = f"numbers that are too large for {cast.dtype}"
        elif not matches(full, self._non_finite):
            problem = "NaN or infinity"
        else:
            return
        raise NotFiniteError(
            f"{self._checkpoint.name}: {full} holds {problem}",
            hint="if they belong there, name it by non_finite=; or serve in another dtype",
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    # Integers are, and torch does not look into floats of 8 bits.
    return tensor.element_size() == 1 or bool(torch.isfinite(tensor).all())


def _memory(tensor: torch.Tensor, entry: TensorEntry) -> memoryview | None:
    """Return the host memory of a tensor, to be filled with the bytes of `entry` as they are, or None."""
    live = TorchTensor(tensor)
    if live.address is None or live.dtype != entry.dtype or not entry.size_bytes:
        return None
    return memory_at(live.address, entry.size_bytes)


def _groups(paths: Iterable[str], entries: Mapping[str, TensorEntry]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for path in paths:
        if group and size + entries[path].size_bytes > _STAGED_BYTES:
            yield group
            group, size = [], 0
        group.append(path)
        size += entries[path].size_bytes
    if group:
        yield group


def _settle(devices: Iterable[torch.device]) -> None:
    """Return when all that was asked of `devices` so far has been done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type != "cpu":
            getattr(torch, device.type).synchronize()


def _beside(device: torch.device) -> Any:
    """Return a context in which work for `device` does not stand in line with that of requests."""
    if device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return nullcontext()


def _put_others(
    module: nn.Module, checkpoint: Checkpoint, weights: PartWeights, done: Mapping[str, object]
) -> None:
    """Restore what is no parameter and no buffer: extra state, and attributes that training changes."""
    others: dict[str, Any] = {
        name: {"$tensor": path, "as": "torch"} for name, path in weights.paths.items() if name not in done
    }
    others.update(weights.others)
    if not others and not weights.attributes:
        return
    decoder = Decoder(lambda path: checkpoint.load_tensors([path])[path], [TorchCodec()])
    state = {name: decoder.decode(item) for name, item in others.items()}
    ModuleHandler().restore(module, {**state, ATTRIBUTES: decoder.decode(weights.attributes)})
    without_gradients(module)
