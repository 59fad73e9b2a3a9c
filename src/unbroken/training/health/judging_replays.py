"""What a replay shows: whether data and optimization lead to the same bad step again, or the hardware did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Losses this close are the same for whoever asks why one was bad: kernels may add in another order.
_NEARLY = 0.01
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The losses of steps that were done again, against the recorded ones; `same` is about the bad step.

    `compared_steps` are those of which both are known, `equal_steps` the ones of them that are equal to the
    bit. `same` is None where the bad step was not done again, or nothing tells. `strays` is the first good
    step that came out otherwise, by more than kernels explain that vary.
    """

    bad_step: int
    recorded: float | None
    replayed: float | None
    same: bool | None
    compared_steps: int
    equal_steps: int
    first_difference: dict[str, Any] | None
    strays: dict[str, Any] | None


def compare(
    bad_step: int,
    recorded: Mapping[int, float],
    replayed: Mapping[int, float],
    *,
    metric: str,
    is_bad_again: bool | None,
    limit: float | None = None,
    may_vary: bool = False,
) -> Comparison:
    """Compare the losses of steps, which are called `metric`.

    `is_bad_again` says so where the loss cannot tell, since it is not what was bad; None where it can. A loss
    above `limit` is bad. `may_vary`: kernels are in use whose results are not the same each time.
    """
    both = sorted(recorded.keys() & replayed.keys())
    differing = [step for step in both if not _is_equal(recorded[step], replayed[step])]
    straying = [
        step
        for step in differing
        if step < bad_step and not (may_vary and _is_nearly(recorded[step], replayed[step]))
    ]
    there, here = recorded.get(bad_step), replayed.get(bad_step)
    same = None if there is None or here is None else _is_as_bad(there, here, limit)

    def first(steps: Sequence[int]) -> dict[str, Any] | None:
        at = [{"step": one, "metric": metric, "here": replayed[one], "there": recorded[one]} for one in steps]
        return at[0] if at else None

    return Comparison(
        bad_step=bad_step,
        recorded=there,
        replayed=here,
        same=same if is_bad_again is None or here is None else is_bad_again,
        compared_steps=len(both),
        equal_steps=len(both) - len(differing),
        first_difference=first(differing),
        strays=first(straying),
    )


def verdict(found: Comparison, checkpoint: str, *, may_vary: bool) -> tuple[str, str]:
    """Return what the comparison means in a sentence, and what to do about it; see `compare`."""
    again = f"step {found.bad_step}, done again from {checkpoint}"
    if found.same is None:
        return f"{again}, has no recorded loss to compare with", ""
    if found.same:
        text = f"{again}, is as bad as it was ({_losses(found)}): "
        return text + "the data or the optimization is the cause, not the hardware", _LOOK_AT_DATA
    is_gradient = found.recorded in (None, found.replayed)
    text = f"{again}, is {'finite this time' if is_gradient else 'not the same'} ({_losses(found)}), "
    hardware = "the hardware or kernels whose results vary" if may_vary else "the hardware"
    cause, hint = _cause_of_another_result(found, hardware)
    return text + cause, f"{_MAKE_REPEATABLE}; {hint}" if may_vary else hint


def _cause_of_another_result(found: Comparison, hardware: str) -> tuple[str, str]:
    """Accuse the hardware only where it is known that the steps are done again as the loop does them."""
    if (at := found.strays) is not None:
        text = (
            f"but neither is step {at['step']} before it, which was well (loss {at['here']:.6g}, recorded "
            f"{at['there']:.6g}): the function given as replay= does not do what the loop does in a step, or "
            f"the loop depends on what no checkpoint keeps; if neither is so, it points to {hardware}"
        )
        return text, _ALL_OF_THE_STEP
    earlier = found.compared_steps - (found.recorded is not None)
    if not earlier:
        text = (
            f"and no step before it can be compared: that is {hardware}, or the function given as replay= "
            "does not do what the loop does in a step"
        )
        return text, f"{_ALL_OF_THE_STEP}; {_TEST_HARDWARE}"
    steps = "the step before it" if earlier == 1 else f"the {earlier} steps before it"
    text = f"and {steps} came out as recorded, which points to {hardware}"
    return text, f"{_TEST_HARDWARE}; {_ALL_OF_THE_STEP}"


def _losses(found: Comparison) -> str:
    text = f"loss {found.replayed:.6g}"
    if found.recorded is None or found.replayed is None:
        return text
    is_equal = _is_equal(found.recorded, found.replayed)
    return f"{text}, as recorded" if is_equal else f"{text}, recorded {found.recorded:.6g}"


_LOOK_AT_DATA = "look at the samples of that batch, the learning rate and the clipping of gradients"
_MAKE_REPEATABLE = "torch.use_deterministic_algorithms(True) tells which"
_TEST_HARDWARE = (
    "look for memory errors and Xid messages in `dmesg` and `nvidia-smi -q`, and test memory and devices"
)
_ALL_OF_THE_STEP = (
    "make sure that the function given as replay= does all that the loop does in a step, such as clipping"
)


def samples_in_words(samples: Sequence[Any]) -> str:
    """Return the first few of `samples`, and how many more there are."""
    shown = ", ".join(str(one) for one in samples[:_SHOWN])
    return shown + (f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else "")


def _is_equal(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _is_as_bad(there: float, here: float, limit: float | None) -> bool:
    """Tell whether the loss `here` is as bad as `there`: what is bad is so by more or less each time."""
    if not (math.isfinite(here) and math.isfinite(there)):
        return not math.isfinite(here)
    return _is_nearly(there, here) or (limit is not None and here > limit)


def _is_nearly(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= _NEARLY * max(abs(one), abs(other))
