"""Two ranks over gloo, one of which meets a NaN: what each of them decides, as JSON.

python health_ranks_script.py DIRECTORY
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch

from unbroken.training.health.agreement import agreement
from unbroken.training.health.policy import Health
from unbroken.training.health.watch import HealthWatch
from unbroken.training.ranks.group import this_group

torch.set_num_threads(1)


def decide(rank: int, directory: Path) -> None:
    store = torch.distributed.FileStore(str(directory / "store"), 2)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    watch = HealthWatch(Health(warm_up_steps=5), agree=agreement(this_group()))
    found = []
    for step in range(1, 31):
        loss = 1 + (step + rank) % 3 / 10
        if rank == 1 and step in (10, 20):
            loss = math.nan
        if rank == 0 and step == 20:
            loss = 100.0
        watch.step(step, {"loss": loss})
        if (finding := watch.take()) is not None:
            found.append(asdict(finding))
    torch.distributed.destroy_process_group()
    (directory / f"{rank}.json").write_text(json.dumps(found))


def main() -> None:
    directory = Path(sys.argv[1])
    child = os.fork()
    decide(0 if child else 1, directory)
    if not child:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
