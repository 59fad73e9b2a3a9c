"""Makes the files beside it with the libraries whose formats they are of; `versions.json` says which.

They are kept as they were made: run this in a copy to make others.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent


class _WindowsPath:
    """Pickled as the path class that this machine has not."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pathlib.WindowsPath, ("C:\\", "runs", "digits"))


def training_state() -> dict[str, Any]:
    """Return what a training script might save, with every kind of value that scripts do save."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    grid = torch.arange(12.0).reshape(3, 4)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "global_step": 120,
        "args": argparse.Namespace(lr=0.01, data=pathlib.PosixPath("/data/digits"), seeds=(1, 2)),
        "tied": {"first": grid, "second": grid, "turned": grid.t(), "some": grid[1:, 1::2]},
        "repeated": torch.zeros(1).expand(6),
        "kinds": {
            "bf16": torch.tensor([1.5, -2.0]).bfloat16(),
            "f16": torch.tensor([1.5, -2.0]).half(),
            "f8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
            "u16": torch.tensor([1, 65535], dtype=torch.uint16),
            "flag": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j]),
            "scalar": torch.tensor(7),
            "none": torch.zeros(0, 3),
        },
        "numpy": {
            "swapped": np.arange(6, dtype=">i4").reshape(2, 3),
            "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "scalar": np.float32(1.5),
        },
        "plain": {
            "deque": collections.deque([1, 2], maxlen=3),
            "set": {3},
            "bytes": b"short",
            "long": b"long" * 20,
            "nan": float("nan"),
            "size": torch.Size([2, 3]),
            "device": torch.device("cuda:1"),
            "dtype": torch.float32,
            1: "one",
            "1": "text",
        },
        "rng": torch.get_rng_state()[:64].clone(),
    }


def main() -> None:
    state = training_state()
    torch.save(state, HERE / "training.pt")
    torch.save(state, HERE / "training-legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(
        {
            "weights": {"w": torch.ones(2)},
            "output": _WindowsPath(),
            "data": pathlib.PosixPath("/data/digits"),
        },
        HERE / "windows-path.pt",
    )
    torch.save(nn.Sequential(nn.Linear(2, 1)), HERE / "whole-module.pt")
    weights = {name: value.contiguous() for name, value in state["model"].items()}
    save_file(weights, HERE / "weights.safetensors", metadata={"format": "pt"})
    names = sorted(weights)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    (HERE / "sharded").mkdir(exist_ok=True)
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: weights[name] for name in part}, HERE / "sharded" / file)
    index = {"metadata": {"total_size": 1}, "weight_map": {n: files[i % 2] for i, n in enumerate(names)}}
    (HERE / "sharded/model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    arrays = {"rows": np.arange(6.0).reshape(2, 3), "columns": np.asfortranarray(np.arange(6).reshape(2, 3))}
    np.savez(HERE / "arrays.npz", swapped=np.arange(3, dtype=">i2"), **arrays)
    np.savez_compressed(HERE / "arrays-compressed.npz", **arrays)
    versions = {library.__name__: library.__version__ for library in (torch, np, safetensors)}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
