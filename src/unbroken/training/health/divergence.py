"""Losses that have risen slowly and stay up: blocks of them, compared with the lowest of late. Pure."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import Any, NamedTuple

from unbroken.training.health.reading import Onset, Reading
from unbroken.training.health.spike import FLOOR

_BLOCK_STEPS = 50
_BLOCKS = 20
# So many blocks in a row: what comes and goes within fewer steps is no divergence.
_LASTING = 3


class Block(NamedTuple):
    """The quartiles of the losses of some steps from `first_step`; `size` is the median of their sizes."""

    first_step: int
    lower: float
    median: float
    upper: float
    size: float
    rate: float | None


class DivergenceDetector:
    """Finds blocks in a row whose losses lie well above those of a block of the last thousand steps.

    Three quarters of their losses are above three quarters of that block's, and their medians are `factor`
    times its median.
    """

    def __init__(self, factor: float, warm_up_steps: int) -> None:
        self._factor = factor
        self._to_skip = warm_up_steps
        self._blocks: deque[Block] = deque(maxlen=_BLOCKS)
        self._losses: list[float] = []
        self._first_step = 0
        self._rate: float | None = None
        self._top = 0.0

    def step(self, reading: Reading) -> Onset | None:
        """Take the loss of a step."""
        if self._to_skip:
            self._to_skip -= 1
            return None
        if not self._losses:
            self._first_step, self._rate = reading.since, reading.rate
        self._losses.append(reading.loss)
        if len(self._losses) < _BLOCK_STEPS:
            return None
        block = _block(self._first_step, self._losses, self._rate)
        self._blocks.append(block)
        self._losses = []
        self._top = max(self._top, block.size)
        onset = self._look()
        if onset is not None:
            # If it is only told, and training goes on, this is what is usual now.
            self._blocks.clear()
        return onset

    def state(self) -> dict[str, Any]:
        """Return all that decides about later losses, as plain JSON."""
        return {
            "to_skip": self._to_skip,
            "blocks": [list(block) for block in self._blocks],
            "losses": list(self._losses),
            "first_step": self._first_step,
            "rate": self._rate,
            "top": self._top,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state."""
        self._to_skip = state["to_skip"]
        self._blocks = deque((Block(*block) for block in state["blocks"]), maxlen=_BLOCKS)
        self._losses = list(state["losses"])
        self._first_step, self._rate, self._top = state["first_step"], state["rate"], state["top"]

    def _look(self) -> Onset | None:
        blocks = list(self._blocks)
        before, now = blocks[:-_LASTING], blocks[-_LASTING:]
        known = [block for block in before if _is_comparable(block, now)]
        if not known:
            return None
        best = min(known, key=lambda block: block.median)
        if not all(self._is_above(block, best, known) for block in now):
            return None
        rising = takewhile(lambda block: block.median > best.upper, reversed(before))
        first = [now[0], *rising][-1].first_step
        return Onset(
            first,
            f"the losses have risen since step {first}: their median over {_BLOCK_STEPS} steps is "
            f"{now[-1].median:.6g}, and was {best.median:.6g} from step {best.first_step}",
            (best.median + now[-1].median) / 2,
        )

    def _is_above(self, block: Block, best: Block, known: list[Block]) -> bool:
        if any(one.lower < 0 < one.upper for one in known):
            # Around zero a level says nothing, a size does.
            return block.median > 0 and block.size > self._factor * max(one.size for one in known)
        unit = max(best.size, FLOOR * self._top)
        return block.lower > best.upper and block.median - best.median > (self._factor - 1) * unit


def _is_comparable(block: Block, now: list[Block]) -> bool:
    """Tell whether a block had half of the present rate or more: a lower one gives lower losses."""
    rates = [one.rate for one in now if one.rate is not None]
    return block.rate is None or not rates or 2 * block.rate >= max(rates)


def _block(first_step: int, losses: list[float], rate: float | None) -> Block:
    ordered = sorted(losses)
    lower, median, upper = (ordered[len(ordered) * part // 4] for part in (1, 2, 3))
    return Block(first_step, lower, median, upper, sorted(map(abs, ordered))[len(ordered) // 2], rate)
