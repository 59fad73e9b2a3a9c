"""All that the run needs from PyTorch, in one place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.data import DataLoader

from unbroken.frameworks.torch.loader import ResumableLoader
from unbroken.frameworks.torch.modules import ModuleHandler
from unbroken.frameworks.torch.optimizers import OptimizerHandler
from unbroken.frameworks.torch.schedulers import SchedulerHandler
from unbroken.frameworks.torch.tensors import TensorHandler, TorchCodec
from unbroken.state.choices import Choices
from unbroken.state.handlers import StateHandler
from unbroken.state.tree import LeafCodec


def codec(*, describes: bool) -> LeafCodec:
    """Return the codec for torch values; with `describes` loaded tensors have a dtype and a shape only."""
    return TorchCodec(describes=describes)


def handlers(parts: Mapping[str, object], choices: Choices) -> list[StateHandler]:
    """Return the handlers for torch objects; `parts` is read at each save, so it may still grow."""
    return [ModuleHandler(parts, choices), OptimizerHandler(parts), SchedulerHandler(), TensorHandler()]


def resumable_loader(loader: object) -> ResumableLoader | None:
    """Return `loader` made resumable, or None if it is not a torch DataLoader."""
    return ResumableLoader(loader) if isinstance(loader, DataLoader) else None


def environment() -> dict[str, object]:
    """Return what decides the bits of a result: versions, threads, devices, deterministic mode."""
    return {
        "torch": str(torch.__version__),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
