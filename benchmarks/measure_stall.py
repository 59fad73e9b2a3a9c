"""Save once in a training loop, and print what the loop felt of it as one line of JSON.

The loop trains a small network on one thread, 10 to 20 ms a step; the state is saved with it and not
trained by it, or its own steps would hide the others'.

python benchmarks/measure_stall.py --directory /scratch --peer "DCP async thread"
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from typing import Any

import child
import torch
from observe import settle
from peers import IsDurable, open_peer, wait_until
from states import spec_of
from torch_state import TorchState, build

WIDTH, LAYERS, BATCH = 512, 4, 64
STEPS_BEFORE, STEPS_AFTER = 40, 20
LONGEST_SECONDS = 300


class Loop:
    """The training loop, whose steps are timed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._batch = torch.randn(BATCH, WIDTH)

    def step(self) -> float:
        """Train one step and return its seconds."""
        began = time.perf_counter()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def steps_until(self, is_durable: IsDurable) -> list[float]:
        times: list[float] = []
        until = time.monotonic() + LONGEST_SECONDS
        while not is_durable():
            if time.monotonic() > until:
                raise TimeoutError(f"not durable after {LONGEST_SECONDS} s of training")
            times.append(self.step())
        return times


def main() -> None:
    given = child.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    loop = Loop()
    # Its optimizer has no state before the first step, and the first steps are slower.
    loop.steps(10)
    ballast = build(spec_of(given.state, is_quick=given.quick))
    state = TorchState({**ballast.parts, "loop_model": loop.model, "loop_optimizer": loop.optimizer})
    scratch = child.emptied(given.directory / "stall")
    with open_peer(given.peer, state, scratch) as peer:
        peer.prepare()
        for name in ("0", "1"):
            (scratch / name).mkdir()
        # The first save fills buffers and starts threads; the second is the one that counts.
        wait_until(peer.save(scratch / "0"))
        state.train()
        was_quiet = settle(state.size_bytes, given.quiet_wait)
        gc.collect()
        before = loop.steps(STEPS_BEFORE)
        began = time.perf_counter()
        is_durable = peer.save(scratch / "1")
        blocked = time.perf_counter() - began
        during = loop.steps_until(is_durable)
        durable = time.perf_counter() - began
        after = loop.steps(STEPS_AFTER)
    shutil.rmtree(scratch)
    child.report(
        peer=given.peer,
        state=given.state,
        size_bytes=state.size_bytes,
        seconds=durable,
        blocked_seconds=blocked,
        was_quiet=was_quiet,
        **felt(before + after, during, blocked),
    )


def felt(normal: list[float], during: list[float], blocked: float) -> dict[str, Any]:
    """Return a normal step, one beside the writing, and all that the save took from training."""
    step = statistics.median(normal)
    return {
        "step_seconds": step,
        "steps_during": len(during),
        "step_seconds_during": statistics.mean(during) if during else None,
        "lost_seconds": blocked + sum(during) - step * len(during),
    }


if __name__ == "__main__":
    main()
