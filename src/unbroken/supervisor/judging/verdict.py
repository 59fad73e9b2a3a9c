"""The words of a judgement: how a process ended, what was seen, and what follows from it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

# completed: training came to its own end.
# vanished: the process ended in order, but its training had not come to its end.
# stopped: on request, or by itself with the state saved; run it again to go on.
# failed: by an exception or an exit code.
# refused: it said that a restart cannot help.
# signalled: by a signal other than SIGKILL.
# killed: by SIGKILL, which names no sender.
# not-started: the command could not be started.
# hung: it lived without progress, and was ended for that.
# lost: it ended while nobody looked, and nobody can say how.
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
    "hung",
    "lost",
    "unkillable",
]
# What was behind it, where that is known; it decides what follows and what is worth trying.
# memory, device-memory, shared-memory: the host's, the accelerator's, that of /dev/shm ran out.
# disk-full, read-only, storage: a file system that is full, took no writes, or failed otherwise.
# network, collective: a connection, or one between ranks.      device: an accelerator that failed.
# not-finite: numbers of training that are NaN or infinite.
# preemption, reboot: the machine was taken away, or started again.
Cause: TypeAlias = Literal[
    "",
    "memory",
    "device-memory",
    "shared-memory",
    "disk-full",
    "read-only",
    "storage",
    "network",
    "collective",
    "device",
    "not-finite",
    "preemption",
    "reboot",
]
Confidence: TypeAlias = Literal["certain", "likely", "unknown"]

# Memory that cannot be corrected or remapped, links, a device off its bus, its system processor.
_XID_OF_HARDWARE = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120})
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
    """How many processes the kernel ended for want of memory meanwhile; None if that cannot be read.

    `attempt` counts those in a group that the attempt had for itself, `own_group` those in the
    supervisor's, which others may share.
    """

    machine: int | None = None
    own_group: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A process that the kernel ended for want of memory, as its log says; `size_bytes` is what it held."""

    process_id: int
    name: str
    size_bytes: int

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.name}), which held {self.size_bytes / 1e6:.0f} MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The rank that a launcher saw fail first. A launcher's own exit code is 1 whatever happened."""

    rank: int
    process_id: int
    status: ExitStatus

    def __str__(self) -> str:
        return f"the launcher saw rank {self.rank} (process {self.process_id}) fail first: {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceError:
    """An error that NVIDIA's driver logged, by its number (Xid); `process_id` is None if it names none."""

    code: int
    line: str
    process_id: int | None = None

    @property
    def is_of_hardware(self) -> bool:
        """True if a restart of the program alone does not mend it."""
        return self.code in _XID_OF_HARDWARE


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The file system in memory that data workers hand batches over by."""

    free_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        free, total = self.free_bytes / 1e6, self.total_bytes / 1e6
        return f"shared memory, /dev/shm, has {free:.0f} MB free of {total:.0f} MB now"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenException:
    """The last exception in the output; `frame` is "file:line in function" of the innermost own frame.

    `hint` is what to do next, if the exception is one of ours, which say it in the line below.
    `is_last` tells that nothing was printed after it, as where it ended its process.
    """

    kind: str
    message: str
    frame: str
    hint: str = ""
    is_last: bool = False

    def __str__(self) -> str:
        what = f"{self.kind}: {self.message}" if self.message else self.kind
        return f"{what} ({self.frame})" if self.frame else what


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the supervisor saw of an attempt.

    `ended_because` is its own reason for ending the tree, if it did, and `ended_kind` names it;
    `leftovers` outlived the leader and were ended after it, `survivors` could not be ended.
    `machine_restarted` tells that this machine was booted since it started, `is_preempted` that the
    machine was about to be taken away. `is_code_hidden` tells that the exit code is that of a shell or
    a pipe. `leader` is the number of the process whose end is judged; `processes` are known to have been of
    the attempt. `victims` and `device_errors` are of the kernel's log; `killer` is what another program
    that ends processes for memory says it did; `device_holders` are those that hold an accelerator's
    memory now.
    """

    is_stop_asked: bool = False
    is_preempted: bool = False
    machine_restarted: bool = False
    ended_because: str | None = None
    ended_kind: str = "by-supervisor"
    made_step: bool = False
    leader: int | None = None
    processes: frozenset[int] = frozenset()
    oom_kills: OomKills = OomKills()
    victims: tuple[Victim, ...] = ()
    killer: str = ""
    seen_exception: SeenException | None = None
    rank_failure: RankFailure | None = None
    is_code_hidden: bool = False
    shared_memory: SharedMemory | None = None
    device_errors: tuple[DeviceError, ...] = ()
    device_holders: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why an attempt ended, how sure that is, and what it rests on, in plain words.

    `kind`, `message` and `frame` are those of the exception; without one, `kind` is the name of the
    signal or "exit-3". `cause` is what was behind it. `is_saved` tells that the state was saved before a
    stop. `exit_code` is what the script itself ended with after its training had completed.
    """

    outcome: Outcome
    confidence: Confidence
    evidence: tuple[str, ...]
    kind: str = ""
    cause: Cause = ""
    message: str = ""
    frame: str = ""
    hint: str = ""
    is_saved: bool = False
    exit_code: int = 0

    @property
    def fingerprint(self) -> tuple[str, str, str, str]:
        """Equal for failures that look alike; numbers and addresses in the message do not count."""
        return (self.outcome, self.kind, self.frame, _VARYING.sub("#", self.message)[:200])

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Verdict | None:
        """Return the verdict written in `value`, or None if it is none that this release knows."""
        try:
            verdict = cls(**{**value, "evidence": tuple(value["evidence"])})
        except (KeyError, TypeError):
            return None
        is_known = verdict.outcome in get_args(Outcome) and verdict.cause in get_args(Cause)
        return verdict if is_known else None

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
