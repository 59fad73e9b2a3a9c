"""A small training of several ranks over gloo: python training_script.py RUN OUT WORLD [NAME=JSON ...].

Each rank writes what it saw, a JSON line for each step, to OUT/rank.jsonl, and its last weights to
OUT/rank.txt. `kill` ends a rank by SIGKILL at a step, `kills` several: [attempt, rank, step]; `term` sends it
SIGTERM there, `nan` gives it a loss that is none, and `twice` lets it count a step twice. Under torchrun the
ranks are its own.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unbroken

torch.set_num_threads(1)
EPOCHS, SAMPLES, BATCH = 2, 24, 2


def build(
    rank: int, options: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    torch.manual_seed(options.get("seed", 1))
    random.seed(rank + options.get("seed", 1))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    whole = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=options.get("broadcast", False))
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(SAMPLES), torch.linspace(-1, 1, SAMPLES * 4).reshape(SAMPLES, 4))
    sampler: Any
    if options.get("elastic"):
        sampler = unbroken.ElasticSampler(data, seed=3)
    else:
        sampler = DistributedSampler(data, seed=3)
    # Each rank draws numbers of its own.
    torch.manual_seed(100 + rank)
    if options.get("torn") and rank:
        with torch.no_grad():
            model[0].weight[0, 0] += 1  # type: ignore[index, operator]
    return whole, optimizer, DataLoader(data, batch_size=BATCH, sampler=sampler), sampler


def train(rank: int, directory: Path, out: Path, options: dict[str, Any]) -> None:
    model, optimizer, loader, sampler = build(rank, options)
    counted = {"seen": 0, "drawn": 0.0}
    log = (out / f"{rank}.jsonl").open("a")
    arguments: dict[str, Any] = {"save": [unbroken.EverySteps(options.get("every", 2))]}
    if "health" in options:
        arguments["health"] = unbroken.Health(**options["health"])
    if "invalid" in options and rank == 1:
        arguments["validate"] = lambda: run.step_count != options["invalid"]
    if "own_part" in options and rank == 0:
        arguments["best"] = {"loss": 1.0}
    arguments |= options.get("run", {})
    with unbroken.Run(directory, model=model, optimizer=optimizer, counted=counted, **arguments) as run:
        if rank == 0 and options.get("asks"):
            run.save()
        for epoch in run.epochs(EPOCHS):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            for indices, inputs in run.batches(loader):
                step = run.step_count + 1
                optimizer.zero_grad()
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                counted["seen"] += len(indices)
                counted["drawn"] = random.random()
                here = options.get("rank", 1) == rank and options.get("attempt", 1) == attempt(directory)
                line = {"step": step, "indices": indices.tolist(), "loss": loss.item().hex(), **counted}
                log.write(json.dumps(line) + "\n")
                log.flush()
                if [attempt(directory), rank, step] in options.get("kills", []):
                    os.kill(os.getpid(), signal.SIGKILL)
                if here and options.get("kill") == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                if here and options.get("term") == step:
                    os.kill(os.getpid(), signal.SIGTERM)
                is_bad = here and options.get("nan") == step
                run.step(loss=math.nan if is_bad else loss.item())
                if here and options.get("twice") == step:
                    run.step(loss=loss.item())
    state = {name: item.double().sum().item().hex() for name, item in model.state_dict().items()}
    (out / f"{rank}.txt").write_text(json.dumps([state, counted, random.random(), torch.rand(1).item()]))


def attempt(directory: Path) -> int:
    return len(list((directory / "attempts").iterdir()))


def main() -> None:
    directory, out, world = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    options = {name: json.loads(text) for name, _, text in (word.partition("=") for word in sys.argv[4:])}
    out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        train(int(os.environ["RANK"]), directory, out, options)
        distributed.destroy_process_group()
        return
    meeting = out / f"store-{os.getpid()}"
    children: dict[int, int] = {}
    for rank in range(1, world):
        child = os.fork()
        if not child:
            break
        children[child] = rank
    else:
        rank = 0
    store = distributed.FileStore(str(meeting), world)
    timeout = timedelta(seconds=60)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    code: int | str | None = 0
    try:
        train(rank, directory, out, options)
    except SystemExit as ended:
        code = ended.code
    finally:
        if rank:
            sys.stderr.flush()
    distributed.destroy_process_group()
    if rank:
        os._exit(int(code or 0))
    codes = {
        children[child]: os.waitstatus_to_exitcode(status) for child, status in (os.wait() for _ in children)
    }
    (out / "codes.json").write_text(json.dumps([code, *(codes[rank] for rank in sorted(codes))]))
    sys.exit(code)


if __name__ == "__main__":
    main()
