"""What a result depends on beside code and data, and what people look for afterwards.

Plain data, the same again for the same program on the same machine: what changes by itself, such as
process ids and times, is not in it.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.training import families
from unbroken.training.configuration import ChangedValue, differences_of
from unbroken.training.micro_batches import halvings_wanted
from unbroken.training.repository import repository

# Variables that libraries take their threads, devices, kernels and seeds from. None holds a secret.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "KERAS_BACKEND",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TF_CUDNN_DETERMINISTIC",
    "TF_DETERMINISTIC_OPS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "XLA_FLAGS",
)
_VERSIONED = ("numpy", "tensorflow", "keras")
# Where these differ, the same state may train on to other bits. Names, and what is below them.
HAZARDS = frozenset(
    {
        "python",
        "processor",
        "numpy",
        "tensorflow",
        "keras",
        "torch",
        "torch_threads",
        "tensorflow_cuda",
        "tensorflow_cudnn",
        "tensorflow_threads",
        "tensorflow_deterministic",
        "tensorflow_onednn",
        "tensorflow_jit",
        "tensorflow_functions_run_eagerly",
        "tensorflow_devices",
        "tensorflow_graphics",
        "tensor_float_32",
        "cpu_capability",
        "cuda",
        "cudnn",
        "devices",
        "default_dtype",
        "deterministic_algorithms",
        "cudnn_deterministic",
        "cudnn_benchmark",
        "float32_matmul_precision",
        "float32_precision",
        "world_size",
        "micro_batches",
        "variables",
        "git.commit",
        "git.changes",
    }
)
# Of the variables, those that cost or save memory and time only.
_HARMLESS = frozenset(
    {
        "variables.CUDA_LAUNCH_BLOCKING",
        "variables.PYTORCH_ALLOC_CONF",
        "variables.PYTORCH_CUDA_ALLOC_CONF",
    }
)
# The model name is among the first lines of it, repeated for each processor.
_CPUINFO = Path("/proc/cpuinfo")
_CPUINFO_BYTES = 4096


def environment() -> dict[str, object]:
    """Return what is known of the surroundings of this process."""
    from unbroken import __version__

    found: dict[str, object] = {
        "unbroken": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "command": [_text(word) for word in sys.argv],
        "directory": _working_directory(),
        "variables": {name: _text(os.environ[name]) for name in VARIABLES if name in os.environ},
        "rank": _number("RANK", 0),
        "world_size": _number("WORLD_SIZE", 1),
        # In how many parts a batch is computed, where the script can split it.
        "micro_batches": 2 ** halvings_wanted(),
        "git": repository(_places()),
    }
    for name in _VERSIONED:
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    # In a process group a framework knows its place among processes better than the variables do.
    found.update(families.environment())
    return found


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[ChangedValue]:
    """Return what has changed between two encoded environments: what may change the bits comes first.

    What the release that wrote the checkpoint did not record is left out.
    """
    known = {name: value for name, value in now.items() if name in then}
    return sorted(differences_of(dict(then), known), key=lambda change: not is_hazard(change.name))


def is_hazard(name: str) -> bool:
    """Tell whether a change of the value of that dotted name may change the bits of what is computed."""
    if name in _HARMLESS:
        return False
    return any(name == hazard or name.startswith((f"{hazard}.", f"{hazard}[")) for hazard in HAZARDS)


def _places() -> list[Path]:
    """Return the directories whose repository is meant: that of the script, else the one we are in."""
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    try:
        found = [script.resolve().parent] if script is not None and script.is_file() else []
        return [*found, Path.cwd()]
    except OSError:
        return []


def _working_directory() -> str | None:
    try:
        return _text(os.getcwd())
    except OSError:
        # Removed, while this process was in it.
        return None


def _processor() -> str | None:
    """Return the model of the processor: libraries choose their kernels by it."""
    try:
        with _CPUINFO.open("rb") as file:
            lines = file.read(_CPUINFO_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _number(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isascii() and value.isdigit() else default


def _text(value: str) -> str:
    # An argument need not be Unicode; what is kept has to be.
    return value.encode(errors="backslashreplace").decode()
