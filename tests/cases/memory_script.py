"""Measures the memory of saves and restores in a process of its own.

python memory_script.py REPOSITORY RUN_DIR save|restore|save-often [NAME_OF_A_BROKEN_HANDLER]
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unbroken


def built(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    # Weights of 2 MiB, with twice as much of moments.
    model = nn.ParameterList(torch.full((1024, 512), float(index)) for index in range(layers))
    return model, torch.optim.Adam(model.parameters())


def memory(line: str) -> int:
    """Return resident memory now (VmRSS), or the highest since it was reset (VmHWM), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(found.split()[1]) for found in lines if found.startswith(line)) // 1024


def reset_peak() -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmHWM")


def save(model: nn.Module, optimizer: torch.optim.Optimizer, **keywords: Any) -> None:
    with unbroken.Run(sys.argv[2], model=model, optimizer=optimizer, **keywords) as run:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        run.step()


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, **keywords: Any) -> None:
    before = reset_peak()
    with unbroken.Run(sys.argv[2], resume="must", model=model, optimizer=optimizer, **keywords) as run:
        print("peak", memory("VmHWM") - before)
        run.step()
        gc.collect()
        print("held", memory("VmRSS") - before)


def save_often(model: nn.Module, optimizer: torch.optim.Optimizer, **keywords: Any) -> None:
    with unbroken.Run(
        sys.argv[2], keep=[unbroken.KeepLast(1)], model=model, optimizer=optimizer, **keywords
    ) as run:
        grown = []
        for _ in range(8):
            with torch.no_grad():
                next(model.parameters()).add_(1)
            run.step()
            run.save()
            grown.append(memory("VmRSS"))
        # Two of them to get the buffers.
        print("grown", max(grown) - grown[1])


def main() -> None:
    torch.set_num_threads(1)
    keywords: dict[str, Any] = {}
    model, optimizer = built(4 if sys.argv[3] == "save-often" else 16)
    if len(sys.argv) > 4:
        sys.path.insert(0, sys.argv[1])
        from tests.cases import broken

        parts = {"model": model, "optimizer": optimizer}
        keywords["handlers"] = [getattr(broken, sys.argv[4])(parts)]
    modes = {"save": save, "restore": restore, "save-often": save_often}
    modes[sys.argv[3]](model, optimizer, **keywords)


if __name__ == "__main__":
    main()
