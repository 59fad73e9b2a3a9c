"""Objects that know their own position, by `state_dict` and `load_state_dict`: their states, made plain."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from unbroken.errors import UnsupportedStateError
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor, copy_bytes
from unbroken.state.tree import Decoder, Encoder, LeafCodec


def keeps_position(value: object) -> bool:
    """Tell whether `value` gives its state, takes it back, and is exact then."""
    return _has_methods(value) and not shuffle_buffer(value)


def check_gives_state(value: Any) -> None:
    """Raise UnsupportedStateError for a `state_dict` that has to be told how much was consumed.

    Only whoever made the batches knows that: of a dataset for streaming, the loader that belongs to it.
    """
    if not _has_methods(value):
        return
    try:
        inspect.signature(value.state_dict).bind()
    except TypeError as error:
        raise UnsupportedStateError(
            f"batches: {type(value).__name__}.state_dict() cannot be called without arguments ({error})",
            hint="use the loader that was made for it, which has a state_dict() itself",
        ) from None
    except ValueError:
        return  # written in C, without a signature


def _has_methods(value: object) -> bool:
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(callable(method) for method in methods)


def own_state(value: Any) -> dict[str, object]:
    """Return the state that `value` gives, as plain values that share nothing with it."""
    table = TensorTable()
    encoded = Encoder(table, _codecs()).encode(value.state_dict(), "state_dict")
    tensors = {
        path: {"dtype": source.dtype, "shape": tuple(source.shape), "bytes": bytes(copy_bytes(source))}
        for path, source in table.sources.items()
    }
    return {"json": msgspec.json.encode(encoded), "tensors": tensors}


def load_own_state(value: Any, plain: Mapping[str, object]) -> None:
    """Give a state of `own_state` back to `value`, or to one like it."""
    tensors = cast("Mapping[str, Mapping[str, Any]]", plain["tensors"])

    def tensor(path: str) -> HostTensor:
        kept = tensors[path]
        return HostTensor(kept["dtype"], tuple(kept["shape"]), memoryview(bytearray(kept["bytes"])))

    value.load_state_dict(
        Decoder(tensor, _codecs()).decode(msgspec.json.decode(cast("bytes", plain["json"])))
    )


def forget_loaded(value: Any) -> None:
    """Have the next pass over `value` begin anew, though a state was loaded into it for an earlier one."""
    if _is_of_datasets(value):
        # Its passes begin where the loaded state says, each of them, until the number of the epoch changes.
        value.load_state_dict(None)


def shuffle_buffer(value: object) -> int:
    """Return how many rows a dataset of Hugging Face holds in a buffer that its state leaves out."""
    if not _is_of_datasets(value):
        return 0
    found, todo, seen = 0, [getattr(value, "_ex_iterable", None)], set[int]()
    shuffling = getattr(value, "_shuffling", None)
    while todo:
        stage = todo.pop()
        if stage is None or id(stage) in seen:
            continue
        seen.add(id(stage))
        found = max(found, getattr(stage, "buffer_size", 0))
        todo += [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
    return max(found, getattr(shuffling, "buffer_size", 0) or 0)


def _is_of_datasets(value: object) -> bool:
    return any(
        cls.__module__.partition(".")[0] == "datasets" and cls.__name__ == "IterableDataset"
        for cls in type(value).__mro__
    )


def _codecs() -> list[LeafCodec]:
    found: list[LeafCodec] = []
    if "numpy" in sys.modules:
        from unbroken.frameworks.numpy import NumpyCodec

        found.append(NumpyCodec())
    if "torch" in sys.modules:
        from unbroken.frameworks.torch.tensors import TorchCodec

        found.append(TorchCodec())
    return found
