"""All that the run needs from PyTorch, in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from unbroken.frameworks.family import Family
from unbroken.frameworks.torch import first_non_finite, gathering, rates
from unbroken.frameworks.torch.at_work import AtWork
from unbroken.frameworks.torch.collective import Ranks, ranks
from unbroken.frameworks.torch.iterable_loader import ResumableIterableLoader
from unbroken.frameworks.torch.keyed import KeyedLoader
from unbroken.frameworks.torch.loader import ResumableLoader
from unbroken.frameworks.torch.lower_rate import LowerRates
from unbroken.frameworks.torch.modes import mark_modes
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.optimizers import OptimizerHandler
from unbroken.frameworks.torch.schedulers import SchedulerHandler
from unbroken.frameworks.torch.stateful_loader import goes_its_own_way
from unbroken.frameworks.torch.tensors import TensorHandler, TorchCodec
from unbroken.frameworks.torch.weights import TorchWeights
from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.tree import LeafCodec


class TorchFamily(Family):
    """PyTorch."""

    def codecs(self, *, describes: bool) -> list[LeafCodec]:
        return [TorchCodec(describes=describes)]

    def handlers(self, parts: Mapping[str, object], choices: Choices) -> list[StateHandler]:
        return [
            ModuleHandler(parts, choices),
            OptimizerHandler(parts),
            SchedulerHandler(parts),
            TensorHandler(),
        ]

    def weights(self, model: object) -> TorchWeights | None:
        return TorchWeights(model) if isinstance(model, torch.nn.Module) else None

    def resumable_loader(self, loader: object) -> ResumableLoader | ResumableIterableLoader | None:
        return resumable_loader(loader)

    def keyed_loader(self, loader: object, name: str) -> KeyedLoader | None:
        return keyed_loader(loader, name)

    def environment(self) -> dict[str, object]:
        return environment()

    def watch(self, parts: Mapping[str, object]) -> AtWork:
        return AtWork(parts)

    def mark_gradients(self, parts: Mapping[str, object]) -> Callable[[], bool]:
        return gathering.mark_gradients(parts.values())

    def drop_gradients(self, values: Iterable[object]) -> None:
        gathering.drop_gradients(values)

    def mark_modes(self, parts: Mapping[str, object]) -> Callable[[], None]:
        return mark_modes(parts.values())

    def lower_rates(
        self, parts: Mapping[str, object], factor: Callable[[], float]
    ) -> tuple[LowerRates | None, list[str]]:
        found = [optimizer for _, optimizer in rates.optimizers_of(parts)]
        return LowerRates(found, factor) if found else None, rates.unknown_optimizers(parts)

    def highest_rate(self, parts: Mapping[str, object]) -> Callable[[], float | None]:
        return rates.HighestRate(parts)

    def has_scaler(self, parts: Mapping[str, object]) -> bool:
        return rates.has_scaler(parts)

    def ranks(self) -> Ranks | None:
        return ranks()

    def step_watch(
        self, parts: Mapping[str, object], usual: Collection[str], before: Any, *, runs_eagerly: bool
    ) -> first_non_finite.StepWatch:
        return first_non_finite.StepWatch(parts, usual, before, runs_eagerly=runs_eagerly)

    def bad_tensors(self, parts: Mapping[str, object]) -> list[str]:
        return first_non_finite.bad_tensors(parts)

    def bad_rows(self, batch: object, size: int) -> list[int]:
        return first_non_finite.bad_rows(batch, size)

    def may_vary(self) -> bool:
        return first_non_finite.may_vary()


FAMILY = TorchFamily()


def resumable_loader(loader: object) -> ResumableLoader | ResumableIterableLoader | None:
    """Return `loader` made resumable, or None if it is no DataLoader, or one that keeps its own position."""
    if not isinstance(loader, DataLoader) or goes_its_own_way(loader):
        return None
    is_stream = isinstance(loader.dataset, IterableDataset)
    return ResumableIterableLoader(loader) if is_stream else ResumableLoader(loader)


def keyed_loader(loader: object, name: str) -> KeyedLoader | None:
    """Return `loader` with keyed randomness, or None if it is no DataLoader."""
    return KeyedLoader(loader, name=name) if isinstance(loader, DataLoader) else None


def environment() -> dict[str, object]:
    """Return what decides the bits of a result: versions, threads, devices, kernels, precision."""
    devices = torch.cuda.device_count()
    # To ask for their names is to start CUDA, which costs memory on a device that may not be ours.
    names = (
        [torch.cuda.get_device_name(index) for index in range(devices)]
        if torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else ["cuda, not in use"] * devices
    )
    return {
        "torch": str(torch.__version__),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "devices": names,
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "float32_matmul_precision": _read(torch.get_float32_matmul_precision),
        "float32_precision": _float32_precision(),
        **_place_among_processes(),
    }


def _place_among_processes() -> dict[str, object]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return {}
    return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}


def _float32_precision() -> dict[str, object]:
    """Return how exactly each backend computes with float32."""
    names = _PRECISIONS if hasattr(torch.backends, "fp32_precision") else _OLDER_PRECISIONS
    return {name.removesuffix(".fp32_precision"): _read(attrgetter(name), torch.backends) for name in names}


def _read(reader: Callable[..., object], *arguments: object) -> object:
    try:
        return reader(*arguments)
    except (AttributeError, RuntimeError):
        # Some builds lack some; and asked in the older terms for what was set in the newer ones, torch
        # refuses to answer.
        return None


_PRECISIONS = (
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
)
# In releases before 2.9.
_OLDER_PRECISIONS = ("cuda.matmul.allow_tf32", "cudnn.allow_tf32")
