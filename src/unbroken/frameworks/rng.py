"""The random generators that a whole process shares: Python's, and those of the libraries that it uses.

States are plain values of a few kilobytes: the words of a generator are packed into `bytes`, little-endian,
so that they are small and read the same everywhere. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from unbroken.state.handlers import Difference

_PYTHON_WORDS = struct.Struct("<625I")
_LARGEST_PLAIN_INT = 2**63 - 1
# Keras last: where it sets a seed, it may set that of TensorFlow, too.
_WITH_A_MODULE = ("tensorflow", "keras")


def capture_global_rng() -> dict[str, object]:
    """Return the states of the process-wide generators, as plain values.

    Always holds `python`; holds `numpy`, `torch`, `tensorflow` and `keras` where the process has imported
    them and they have any, and `cuda`, one state per device, where CUDA has been initialised. Nothing is
    imported and no device is woken up.
    """
    state: dict[str, object] = {"python": plain_python_state(random.getstate())}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # The legacy tuple form loses a cached normal draw; the dict form keeps it.
        state["numpy"] = plain_numpy_state(numpy.random.get_state(legacy=False))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = plain_torch_state(torch.get_rng_state())
        if torch.cuda.is_initialized():
            state["cuda"] = tuple(plain_torch_state(device) for device in torch.cuda.get_rng_state_all())
    for library in _WITH_A_MODULE:
        if library in sys.modules and (found := _of(library).capture()):
            state[library] = found
    return state


def restore_present_rng(state: Mapping[str, object]) -> None:
    """Put the process-wide generators into `state`, which `capture_global_rng` returned, here or elsewhere.

    A library that `state` names is imported here, if it has not been yet. One that is missing here is left
    out, and so is a device; what else is here is left as it is. `rng_differences` tells of all that.
    """
    for library in _WITH_A_MODULE:
        if library in state and _is_installed(library):
            _of(library).restore(state[library])
    # After those that draw from it when they are imported or made.
    random.setstate(python_state(state["python"]))
    if "numpy" in state and _is_installed("numpy"):
        numpy: Any = importlib.import_module("numpy")
        numpy.random.set_state(numpy_state(state["numpy"]))
    if "torch" in state and _is_installed("torch"):
        torch: Any = importlib.import_module("torch")
        torch.set_rng_state(torch_state(state["torch"]))
        for device, device_state in enumerate(_devices(state)[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch_state(device_state), device)


def seed_anew(name: str) -> None:
    """Seed the process-wide generators by where they are now, and otherwise for another `name`."""
    seed = int.from_bytes(hashlib.sha256(f"{random.getrandbits(128)} {name}".encode()).digest()[:8], "little")
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def rng_differences(state: Mapping[str, object]) -> list[Difference]:
    """Return why `state` cannot be restored here as a whole; change nothing."""
    problems = [
        Difference("unexpected", library, f"the state has {library}'s, but {library} is not installed here")
        for library in ("numpy", "torch", *_WITH_A_MODULE)
        if library in state and not _is_installed(library)
    ]
    if "cuda" in state:
        saved, here = len(_devices(state)), _device_count()
        if saved != here:
            text = f"the state has {saved} CUDA devices, there are {here} here"
            problems.append(Difference("unexpected" if saved > here else "missing", "cuda", text))
    return problems


def _of(library: str) -> Any:
    """Return what captures and restores the randomness of a library, which is imported if it is not yet."""
    return importlib.import_module(f"unbroken.frameworks.{library}.rng")


def _is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def _device_count() -> int:
    torch: Any = sys.modules.get("torch")
    return 0 if torch is None else int(torch.cuda.device_count())


def _devices(state: Mapping[str, object]) -> Sequence[object]:
    return cast("Sequence[object]", state.get("cuda", ()))


def plain_python_state(state: tuple[Any, ...]) -> dict[str, object]:
    """Return what `random.Random.getstate` gave as plain values."""
    version, words, gauss = state
    return {"version": version, "words": _PYTHON_WORDS.pack(*words), "gauss": gauss}


def python_state(plain: object) -> tuple[Any, ...]:
    """Return the argument of `random.Random.setstate` for a state made plain by `plain_python_state`."""
    fields = cast("Mapping[str, Any]", plain)
    return (fields["version"], _PYTHON_WORDS.unpack(fields["words"]), fields["gauss"])


def plain_numpy_state(value: Any) -> object:
    """Return the state of a numpy bit generator, a nested dict of numbers and arrays, as plain values."""
    if isinstance(value, dict):
        return {key: plain_numpy_state(item) for key, item in value.items()}
    if hasattr(value, "dtype") and value.ndim:
        kind = value.dtype.newbyteorder("<")
        return {"dtype": kind.str, "words": value.astype(kind).tobytes()}
    if isinstance(value, (str, float)):
        return value
    number = int(value)
    # PCG64 counts in 128 bits, more than most formats hold in a number.
    return number if abs(number) <= _LARGEST_PLAIN_INT else {"hex": hex(number)}


def numpy_state(plain: object) -> Any:
    """Return the state that numpy takes for one made plain by `plain_numpy_state`."""
    if not isinstance(plain, dict):
        return plain
    if plain.keys() == {"hex"}:
        return int(plain["hex"], 16)
    if plain.keys() == {"dtype", "words"}:
        numpy: Any = importlib.import_module("numpy")
        words = numpy.frombuffer(plain["words"], dtype=plain["dtype"])
        return words.astype(words.dtype.newbyteorder("="))
    return {key: numpy_state(item) for key, item in plain.items()}


def plain_torch_state(state: Any) -> bytes:
    """Return the state tensor of a torch generator as bytes."""
    return cast("bytes", state.numpy().tobytes())


def torch_state(plain: object) -> Any:
    """Return the state tensor that torch takes for one made plain by `plain_torch_state`."""
    torch: Any = importlib.import_module("torch")
    # A copy: torch warns about tensors over memory that may not be written.
    return torch.frombuffer(bytearray(cast("bytes", plain)), dtype=torch.uint8)
