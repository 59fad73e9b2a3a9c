"""A training script that saves and takes snapshots in every way there is, and can be ended in most.

    python saving_script.py RUN_DIR --steps 100 --snapshot-every 1 --kill-at 7

It needs no framework, and has a model of one only with `--torch`. What it says goes to `RUN_DIR.said`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import unbroken


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", nargs="?")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--snapshot-every", type=int, default=0)
    parser.add_argument("--full-disk", default="pause")
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--size-mb", type=float, default=0)
    parser.add_argument("--step-seconds", type=float, default=0)
    parser.add_argument("--torch", action="store_true")
    for disaster in ("kill", "segfault", "raise", "fork", "leave"):
        parser.add_argument(f"--{disaster}-at", type=int, default=-1)
    parser.add_argument("--plan", default="", help="one disaster for each attempt: kill:5,segfault:9")
    wanted = parser.parse_args()
    attempt = int(os.environ.get("UNBROKEN_ATTEMPT", "0"))
    plan = wanted.plan.split(",") if wanted.plan else []
    if 0 < attempt <= len(plan):
        disaster, _, at = plan[attempt - 1].partition(":")
        setattr(wanted, f"{disaster}_at", int(at))
    return wanted


def act(run: unbroken.Run, wanted: argparse.Namespace) -> None:
    """Called before `step`: the disaster strikes when the step of that number is done, not yet counted."""
    done = run.step_count + 1
    if done == wanted.fork_at:
        fork_and_leave_the_block()
    if done == wanted.raise_at:
        raise RuntimeError("a bug of the user")
    if done not in (wanted.kill_at, wanted.segfault_at, wanted.leave_at):
        return
    said = {"step": run.step_count, "captured": run._saves._snapshot_due._step}
    run.directory.with_suffix(".said").write_text(json.dumps(said))
    if done == wanted.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if done == wanted.segfault_at:
        ctypes.string_at(0)
    os._exit(3)


def fork_and_leave_the_block() -> None:
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


def parts_of(wanted: argparse.Namespace) -> dict[str, Any]:
    parts = {
        "arrays": {"a": np.zeros(100), "big": np.zeros(int(wanted.size_mb * (1 << 17)))},
        "nested": {"seen": [], "deep": {"sum": 0.0, "last": (0, [0])}},
    }
    if wanted.torch:
        import torch

        torch.set_num_threads(1)
        model = torch.nn.Linear(6, 3)
        parts |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    return parts


def train(parts: dict[str, Any]) -> float:
    """Change everything in place, by random numbers of every source."""
    noise = random.random() + float(np.random.rand())
    arrays, nested = parts["arrays"], parts["nested"]
    arrays["a"] += noise
    arrays["big"] += 1
    nested["seen"] = [*nested["seen"][-20:], noise]
    nested["deep"]["sum"] += noise
    nested["deep"]["last"] = (len(nested["seen"]), [noise])
    if "model" not in parts:
        return noise
    import torch

    loss = parts["model"](torch.randn(4, 6) + noise).square().mean()
    parts["optimizer"].zero_grad()
    loss.backward()
    parts["optimizer"].step()
    return float(loss)


def main() -> None:
    wanted = options()
    run_dir = Path(wanted.run_dir or os.environ["UNBROKEN_RUN_DIR"])
    # A run that was killed before its first checkpoint begins anew, and must begin the same.
    seed = os.getpid() if any(run_dir.glob("checkpoints/step-*")) else 7
    random.seed(seed)
    np.random.seed(seed)
    if wanted.torch:
        import torch

        torch.manual_seed(seed)
    parts = parts_of(wanted)
    with unbroken.Run(
        wanted.run_dir,
        save=[unbroken.EverySteps(wanted.save_every)],
        snapshot=[unbroken.EverySteps(wanted.snapshot_every)] if wanted.snapshot_every else [],
        keep=[unbroken.KeepLast(wanted.keep)],
        full_disk=wanted.full_disk,
        **parts,
    ) as run:
        while run.step_count < wanted.steps:
            loss = train(parts)
            act(run, wanted)
            run.step(loss=loss)
            time.sleep(wanted.step_seconds)


if __name__ == "__main__":
    main()
