"""Torch tensors, dtypes, devices and sizes as leaves of a state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from unbroken.errors import UnsupportedStateError
from unbroken.state.handlers import ORDER_VALUE, Difference, TensorFacts
from unbroken.state.tensors import AwaitedTensor, LoadedTensor, TensorSource, memory_at
from unbroken.state.tree import Json

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
}
# Came with torch 2.7.
if hasattr(torch, "float8_e8m0fnu"):
    _NAMES[torch.float8_e8m0fnu] = "F8_E8M0"
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
# By the size of an element in bytes.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# So many elements are summed at a time: their weights take eight bytes each.
_PIECE = 1 << 20
# Odd; what is multiplied by them, modulo 2**64, has no pattern by which changes could cancel out.
_MIXING = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class TorchTensor(TensorSource):
    """A live tensor as a source of bytes, wherever it lies and however it is strided."""

    __slots__ = ("_tensor", "address", "dtype", "is_frozen", "is_trained", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        # All of it now, while the tensor is at hand: among many, whoever comes back to one waits for memory.
        is_plain = _is_plain(tensor)
        if not is_plain:
            _refuse_unkeepable(tensor)
        self._tensor = tensor
        self.dtype = _NAMES[tensor.dtype]
        self.shape = tuple(tensor.shape)
        # Classes that wrap other tensors have no memory of their own, whatever they say of it. And a
        # conjugate or negative view has the same memory and other values.
        has_memory = is_plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self.address = tensor.data_ptr() if has_memory else None  # type: ignore[misc]
        is_parameter, is_trained = type(tensor) is torch.nn.Parameter, tensor.requires_grad
        self.is_frozen = is_parameter and not is_trained  # type: ignore[misc]
        self.is_trained = is_parameter and is_trained  # type: ignore[misc]

    @property
    def identity(self) -> Hashable | None:
        tensor = self._tensor
        if not tensor.numel() or not tensor.data_ptr():
            return None
        # A conjugate or negative view has the same memory and other values.
        bits = (tensor.is_conj(), tensor.is_neg())
        return ("torch", tensor.device, tensor.data_ptr(), self.shape, tensor.stride(), tensor.dtype, bits)

    def detached(self) -> torch.Tensor:
        """Return the tensor outside of the graph, with the same memory."""
        return self._tensor.detach()

    def checksum(self) -> Hashable:
        """Return what tells by itself, nearly for certain, whether the elements or their order have changed.

        It is added up where they lie; another one each time they are in another place.
        """
        tensor = self._tensor.detach()
        words = tensor.resolve_conj().resolve_neg().view(_WORDS[tensor.element_size()])
        # In the order in which they lie, so that nothing is copied where they lie close together.
        order = sorted(range(words.dim()), key=words.stride, reverse=True)
        in_order = words.permute(order).reshape(-1)
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for start in range(0, in_order.numel(), _PIECE):
            piece = in_order[start : start + _PIECE]
            total += (piece * _weights(start, piece)).sum()
        return (tensor.data_ptr(), tensor.stride(), int(total))

    def copy_to(self, target: memoryview) -> None:
        image = torch.frombuffer(target, dtype=torch.uint8).view(self._tensor.dtype).view(self.shape)
        image.copy_(self._tensor.detach())


def _weights(start: int, piece: torch.Tensor) -> torch.Tensor:
    """Return an odd number for each element of `piece`, by its place, as if drawn by chance."""
    mixed = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=piece.device)
    for factor in _MIXING:
        mixed = (mixed ^ (mixed >> 29)) * factor + factor
    return mixed | 1


class TorchCodec:
    """Tensors become tensors; dtypes, devices and sizes become their names."""

    root = "torch"

    def __init__(self, *, describes: bool = False) -> None:
        # For comparing what is loaded with what is there: dtype and shape, and no memory at all.
        self._describes = describes

    def encode(self, value: object) -> TorchTensor | Json:
        if isinstance(value, torch.Tensor):
            return TorchTensor(value)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        raise UnsupportedStateError(
            f"cannot keep a value of type {type(value).__module__}.{type(value).__qualname__}",
            hint="make it a part of its own, by a keyword of Run, "
            "or give its owner state_dict() and load_state_dict()",
        )

    def decode_tensor(self, tensor: LoadedTensor) -> object:
        dtype = _DTYPES[tensor.dtype]
        if self._describes:
            return torch.empty(tensor.shape, dtype=dtype, device="meta")
        if isinstance(tensor, AwaitedTensor):
            return tensor.made if tensor.made is not None else _await(tensor, dtype)
        if not tensor.data.nbytes:
            return torch.empty(tensor.shape, dtype=dtype)
        return torch.frombuffer(tensor.data, dtype=torch.uint8).view(dtype).view(tensor.shape).clone()

    def decode_value(self, value: Json) -> object:
        assert isinstance(value, dict)
        if "dtype" in value:
            return getattr(torch, str(value["dtype"]))
        if "device" in value:
            return torch.device(str(value["device"]))
        return torch.Size(value["size"])  # type: ignore[arg-type]

    def assign(self, live: object, loaded: object) -> bool:
        fits = (
            isinstance(live, torch.Tensor)
            and isinstance(loaded, torch.Tensor)
            and (live.shape, live.dtype) == (loaded.shape, loaded.dtype)
            and not overlaps_itself(live)
        )
        if fits:
            with torch.no_grad():
                live.copy_(loaded)  # type: ignore[attr-defined]
        return fits


def _await(awaited: AwaitedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor whose memory will receive the bytes: the live one where it can, or a new one."""
    live = awaited.live
    if isinstance(live, TorchTensor) and (live.dtype, live.shape) == (awaited.dtype, awaited.shape):
        tensor, address = live.detached(), live.address
    else:
        tensor, address = None, None
    if tensor is None or address is None:
        # Allocated by torch: where memory is aligned otherwise, some kernels add in another order.
        tensor = torch.empty(awaited.shape, dtype=dtype)
        address = tensor.data_ptr()
    if tensor.numel():
        awaited.memory = memory_at(address, tensor.numel() * tensor.element_size())
    awaited.made = tensor
    return tensor


class TensorHandler:
    """A tensor that is a part of its own, filled in place."""

    name = "torch.tensor"
    order = ORDER_VALUE
    tensor_facts = TensorFacts(are_streamed=True)

    def accepts(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def state(self, value: Any) -> object:
        if overlaps_itself(value):
            raise UnsupportedStateError(
                "an expanded tensor, whose elements share memory, cannot be filled by a restore",
                hint="pass the tensor that it was expanded from, or a clone()",
            )
        return value

    def differences(self, value: Any, state: Any) -> list[Difference]:
        return tensor_differences("", value, state)

    def restore(self, value: Any, state: Any) -> None:
        # One of another shape was allowed: it stays as it is, and nothing is spread over it.
        if value.shape == state.shape:
            with torch.no_grad():
                value.copy_(state)


def tensor_differences(name: str, live: torch.Tensor, loaded: object) -> list[Difference]:
    """Return how a loaded tensor differs in shape and dtype from the live one of that name."""
    if not isinstance(loaded, torch.Tensor):
        text = f"expected a tensor, the checkpoint holds a {type(loaded).__name__}"
        return [Difference("other", name, text)]
    found = []
    if loaded.shape != live.shape:
        text = f"shape {tuple(live.shape)}, the checkpoint has shape {tuple(loaded.shape)}"
        found.append(Difference("shape", name, text))
    if loaded.dtype != live.dtype:
        text = f"dtype {live.dtype}, the checkpoint has dtype {loaded.dtype}"
        found.append(Difference("dtype", name, text))
    return found


def overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def overlapping(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of tensors that share a part of their memory, or all of it in another shape.

    Those that are the same memory seen the same way are tied, which is told elsewhere: of these the first
    name stands for all.
    """
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _span_bytes(tensor), name)
        for name, tensor in tensors.items()
        if type(tensor) in _PLAIN and tensor.layout is _STRIDED and not tensor.is_nested
    )
    groups: list[list[str]] = []
    end = 0
    for start, stop, name in spans:
        if start == stop or not start:
            continue
        if start < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, stop)
    several = (_told_apart({name: tensors[name] for name in group}) for group in groups if len(group) > 1)
    return sorted(sorted(group) for group in several if len(group) > 1)


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return how far the memory of a tensor reaches from its first element."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()


def _told_apart(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names without those of tensors that are the same as an earlier one."""
    seen: dict[Hashable, str] = {}
    for name, tensor in tensors.items():
        seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
    return list(seen.values())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell of the kind that nearly all leaves of a state are of, that it can be kept."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype in _NAMES
        and tensor.layout is _STRIDED
        and tensor.is_cpu
        and not tensor.is_nested
    )


def _refuse_unkeepable(tensor: torch.Tensor) -> None:
    found = _problem(tensor)
    if found is not None:
        problem, hint = found
        raise UnsupportedStateError(f"cannot keep a tensor {problem}", hint=hint)


def _problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a tensor cannot be kept, and what to do about it."""
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialised yet", "run one forward pass before the run starts"
    if tensor.is_meta:
        return "on the meta device", "materialise the model before the run starts"
    if tensor.is_nested:
        return "that is nested", "keep its values and lengths as plain tensors"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}", "keep a dense tensor, or its indices and values"
    if tensor.is_quantized:
        hint = "keep its int_repr(), q_scale() and q_zero_point(), or train in floats and quantize afterwards"
        return f"of dtype {tensor.dtype}", hint
    if tensor.dtype not in _NAMES:
        hint = _INSTEAD.get(tensor.dtype, "keep a view(torch.uint8) of it, which has the same bits")
        return f"of dtype {tensor.dtype}, for which the safetensors format has no name", hint
    if tensor.numel() and not tensor.data_ptr():
        kind = type(tensor).__name__
        return f"of class {kind}, which has no memory of its own", "keep the tensors that it is made of"
    return None


_INSTEAD = {
    torch.complex128: "keep torch.view_as_real() of it, which is of float64",
    torch.complex32: "keep torch.view_as_real() of it, which is of float16",
}
