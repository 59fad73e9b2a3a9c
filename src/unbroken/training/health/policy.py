"""What a user says about the health of training: what to look for, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from unbroken.errors import UsageError

Action: TypeAlias = Literal["off", "warn", "stop", "roll-back"]

# non-finite: a loss or a gradient norm that is NaN or infinite.
# spike: a loss far above those before it.       divergence: losses that have risen and stay up.
# plateau: losses that are exactly equal.        zero-rate: learning rates at zero with steps left.
Kind: TypeAlias = Literal["non-finite", "spike", "divergence", "plateau", "zero-rate"]

_DEFAULTS: dict[Kind, Action] = {
    "non-finite": "roll-back",
    "spike": "roll-back",
    "divergence": "roll-back",
    "plateau": "warn",
    "zero-rate": "warn",
}
# Going back leads to the same place again: there are no batches to leave out.
_NEVER_BACK: tuple[Kind, ...] = ("plateau", "zero-rate")
_HINT = "see docs/how-to/health.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What is watched in the numbers that `run.step` is given, and what is done where they are not well.

        Health()                                     roll back, leave out the batches, go on; warn of the rest
        Health(action="warn")                        one action for all kinds of findings
        Health(spike="stop", divergence="off")       or one for each

    "warn" tells people, "stop" saves and ends the run with exit code 78, "roll-back" goes back to the last
    checkpoint before the trouble and goes on behind the batches that led to it. `loss` and `grad_norm` name
    the metrics that are watched.

    One loss of more than `spike_factor` times the usual is a spike, or three in a row half as far off; the
    first `warm_up_steps` losses are only learned from. Losses are divergent that stay at more than
    `divergence_factor` times the lowest level of the last thousand steps.

    After `max_rollbacks` in a row without getting past the place the run stops. The learning rates are
    multiplied by `rate_factor` in the first `rate_steps` steps after a roll-back.

    In the first `resume_steps` steps after a resume the mean of the losses may be `resume_factor` times what
    it was before. `replay(batch)` does one training step and returns the loss, to find out why.
    """

    action: Action | None = None
    non_finite: Action | None = None
    spike: Action | None = None
    divergence: Action | None = None
    plateau: Action | None = None
    zero_rate: Action | None = None
    loss: str = "loss"
    grad_norm: str = "grad_norm"
    spike_factor: float = 6.0
    divergence_factor: float = 2.5
    warm_up_steps: int = 50
    max_rollbacks: int = 3
    rate_factor: float = 1.0
    rate_steps: int = 0
    resume_factor: float = 1.5
    resume_steps: int = 10
    replay: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("action", *(_field(kind) for kind in _DEFAULTS)):
            _check_action(name, getattr(self, name))
        for name in ("spike_factor", "divergence_factor", "resume_factor"):
            _check(name, getattr(self, name), lambda value: value > 1, "a number above 1")
        _check("rate_factor", self.rate_factor, lambda value: 0 < value <= 1, "above 0 and at most 1")
        for name in ("warm_up_steps", "max_rollbacks", "rate_steps", "resume_steps"):
            _check_count(name, getattr(self, name))
        for name in ("loss", "grad_norm"):
            if not isinstance(getattr(self, name), str):
                raise _usage(name, getattr(self, name), "the name of a metric that run.step is given")
        if self.replay is not None and not callable(self.replay):
            raise _usage("replay", self.replay, "a function of a batch that returns the loss")

    def action_for(self, kind: Kind) -> Action:
        """Return what is done about a finding of that kind: its own action, else that for all."""
        own: Action | None = getattr(self, _field(kind))
        if own is not None:
            return own
        if self.action is None or (self.action == "roll-back" and kind in _NEVER_BACK):
            return _DEFAULTS[kind]
        return self.action

    @property
    def is_on(self) -> bool:
        """Whether anything is watched."""
        return any(self.action_for(kind) != "off" for kind in _DEFAULTS)

    @property
    def acts(self) -> bool:
        """Whether more may be done than to tell people."""
        return any(self.action_for(kind) in ("stop", "roll-back") for kind in _DEFAULTS)

    @property
    def rolls_back(self) -> bool:
        """Whether the run may be rolled back."""
        return any(self.action_for(kind) == "roll-back" for kind in _DEFAULTS)


def _field(kind: Kind) -> str:
    return kind.replace("-", "_")


def _check_action(name: str, given: object) -> None:
    allowed = [one for one in get_args(Action) if name not in map(_field, _NEVER_BACK) or one != "roll-back"]
    if given is not None and given not in allowed:
        raise _usage(name, given, f"one of {', '.join(map(repr, allowed))}")


def _check(name: str, given: Any, is_right: Callable[[float], bool], expected: str) -> None:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not math.isfinite(given) or not is_right(given):
        raise _usage(name, given, expected)


def _check_count(name: str, given: object) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise _usage(name, given, "a whole number, 0 or more")


def _usage(name: str, given: object, expected: str) -> UsageError:
    return UsageError(f"Health: expected {name} to be {expected}, found {given!r}", hint=_HINT)
