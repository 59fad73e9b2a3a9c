"""Makes the directories of `torch.distributed.checkpoint` in `dcp`, each saved by two processes.

`fsdp` is the training state of a model that `fully_shard` cuts, and its optimizer; `safetensors` are its
weights as the writer for Hugging Face leaves them, and `whole.pt` is all of it put together by torch itself.
`dcp/versions.json` says which release made them. They are kept as they were made: run this in a copy to make
others.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

HERE = Path(__file__).parent / "dcp"
RANKS = 2


def save(rank: int, rendezvous: str) -> None:
    """Train one step on both ranks, and save what is then there."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    # Of the first layer one rank holds three rows and the other two.
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": 3, "seeds": [1, 2], "rng": torch.arange(9.0)}
    dcp.save(state, checkpoint_id=HERE / "fsdp")
    writer = dcp.HuggingFaceStorageWriter(str(HERE / "safetensors"), save_distributed=True)
    dcp.save(weights, storage_writer=writer)
    whole = gathered(state)
    if rank == 0:
        torch.save(whole, HERE / "whole.pt")
    dist.destroy_process_group()


def gathered(value: Any) -> Any:
    """Return a state with whole tensors."""
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    rendezvous = HERE / "rendezvous"
    torch.multiprocessing.spawn(save, (str(rendezvous),), nprocs=RANKS)
    rendezvous.unlink(missing_ok=True)
    (HERE / "versions.json").write_text(json.dumps({"torch": torch.__version__, "ranks": RANKS}) + "\n")


if __name__ == "__main__":
    main()
