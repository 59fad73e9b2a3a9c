"""The words of a judgement: how a process ended, what was seen, and what follows from it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

# completed: training came to its own end.
# vanished: the process ended in order, but its training had not come to its end.
# stopped: on request, or by itself with the state saved; run it again to go on.
# failed: by an exception or an exit code.
# refused: it said that a restart cannot help.
# signalled: by a signal other than SIGKILL.
# killed: by SIGKILL, which names no sender.
# not-started: the command could not be started.
# unkillable: something of it is left that cannot be ended.
Outcome: TypeAlias = Literal[
    "completed",
    "vanished",
    "stopped",
    "failed",
    "refused",
    "signalled",
    "killed",
    "not-started",
    "unkillable",
]
Confidence: TypeAlias = Literal["certain", "likely", "unknown"]

_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How the leader ended: with `code`, or by the signal `signal_number`.

    `is_from_shell` tells that the signal was read from an exit code of 128 + n.
    """

    code: int | None = None
    signal_number: int | None = None
    is_from_shell: bool = False

    @property
    def signal_name(self) -> str:
        """The signal by name, "SIGSEGV"; empty if there was none."""
        if self.signal_number is None:
            return ""
        try:
            return signal.Signals(self.signal_number).name
        except ValueError:
            # A real-time signal between the first and the last has a number only.
            return f"signal {self.signal_number}"

    def __str__(self) -> str:
        if self.signal_number is None:
            return f"exit code {self.code}"
        if self.is_from_shell:
            number = 128 + self.signal_number
            return f"exit code {number}, a shell's way to say that {self.signal_name} ended its command"
        return f"ended by {self.signal_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """How many processes the kernel ended for want of memory meanwhile; None if that cannot be read."""

    machine: int | None = None
    own_group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenException:
    """The last exception in the output; `frame` is "file:line in function" of its innermost frame.

    `hint` is what to do next, if the exception is one of ours, which say it in the line below.
    """

    kind: str
    message: str
    frame: str
    hint: str = ""

    def __str__(self) -> str:
        what = f"{self.kind}: {self.message}" if self.message else self.kind
        return f"{what} ({self.frame})" if self.frame else what


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the supervisor saw of an attempt.

    `ended_because` is its own reason for ending the tree, if it did; `leftovers` outlived the leader
    and were ended after it, `survivors` could not be ended.
    """

    is_stop_asked: bool = False
    ended_because: str | None = None
    made_step: bool = False
    oom_kills: OomKills = OomKills()
    seen_exception: SeenException | None = None
    leftovers: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why an attempt ended, how sure that is, and what it rests on, in plain words.

    `kind`, `message` and `frame` are those of the exception; without one, `kind` is the name of the
    signal or "exit-3". `is_saved` tells that the state was saved before a stop. `exit_code` is what the
    script itself ended with after its training had completed.
    """

    outcome: Outcome
    confidence: Confidence
    evidence: tuple[str, ...]
    kind: str = ""
    message: str = ""
    frame: str = ""
    hint: str = ""
    is_saved: bool = False
    exit_code: int = 0

    @property
    def fingerprint(self) -> tuple[str, str, str, str]:
        """Equal for failures that look alike; numbers and addresses in the message do not count."""
        return (self.outcome, self.kind, self.frame, _VARYING.sub("#", self.message)[:200])

    def with_evidence(self, *lines: str) -> Verdict:
        """Return this verdict with `lines` added to what it rests on."""
        return replace(self, evidence=(*self.evidence, *lines))


def exit_status(wait_status: int) -> ExitStatus:
    """Return what a status of wait(2) means, with a shell's 128 + n taken for signal n.

    >>> exit_status(9) == ExitStatus(signal_number=9), exit_status(137 << 8).signal_number
    (True, 9)
    """
    number = wait_status & 0x7F
    if number:
        return ExitStatus(signal_number=number)
    code = wait_status >> 8
    if code > 128 and code - 128 in signal.valid_signals():
        return ExitStatus(signal_number=code - 128, is_from_shell=True)
    return ExitStatus(code=code)
