"""Facts of an attempt that ended, gathered for the judgement: its output, logs, counters, devices."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.errors import StorageError
from unbroken.rundir import layout
from unbroken.rundir.control import read_stop
from unbroken.rundir.last_words import LastWords
from unbroken.supervisor.judging import evidence, gpu_processes, kernel_log, other_killers
from unbroken.supervisor.judging.verdict import ExitStatus, Facts, OomKills, SharedMemory
from unbroken.supervisor.plan import read_plan

_SHARED_MEMORY = Path("/dev") / "shm"
_SHELLS = frozenset({"ash", "bash", "busybox", "dash", "fish", "ksh", "sh", "zsh"})
_MEMORY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a witness saw itself. `processes` and `groups` are the attempt's, none of which lives.

    `leader` is the number of its first process, None if nothing started or nobody knows; `device_users`
    are those that were there lately, on a machine that may have GPUs.
    """

    run_directory: Path
    directory: Path
    started_seconds: float
    status: ExitStatus | None
    words: LastWords | None
    leader: int | None
    processes: frozenset[int]
    groups: tuple[Path, ...]
    device_users: frozenset[int]
    kernel_lines: tuple[str, ...]
    oom_kills: OomKills
    is_stop_asked: bool
    machine_restarted: bool
    ended_because: str | None
    ended_kind: str
    made_step: bool
    leftovers: tuple[str, ...]
    survivors: tuple[str, ...]


def gather(seen: Seen) -> Facts:
    """Return the facts. It may wait up to a minute for the memory of devices to be given back."""
    output = evidence.read_tail(seen.directory / layout.OUTPUT_LOG)
    said = evidence.read_error_file(seen.directory / layout.ERROR_FILE)
    rank = evidence.rank_failure(output)
    processes = seen.processes | ({rank.process_id} if rank is not None else set())
    group = seen.groups[0].name if seen.groups else None
    victims = kernel_log.victims(seen.kernel_lines, group=group, processes=processes)
    request = read_stop(seen.run_directory) if seen.is_stop_asked else None
    is_unexplained = _is_killed(seen, rank.status if rank is not None else None) and not victims
    return Facts(
        is_stop_asked=seen.is_stop_asked,
        is_preempted=request is not None and request.is_preemption,
        machine_restarted=seen.machine_restarted,
        ended_because=seen.ended_because,
        ended_kind=seen.ended_kind,
        made_step=seen.made_step,
        leader=seen.leader,
        processes=processes,
        # The machine's counter began anew with it.
        oom_kills=replace(seen.oom_kills, machine=None) if seen.machine_restarted else seen.oom_kills,
        victims=victims,
        killer=_killer(seen, processes) if is_unexplained else "",
        seen_exception=said or evidence.last_exception(output),
        rank_failure=rank,
        is_code_hidden=_is_shell(seen.run_directory),
        shared_memory=_shared_memory(),
        device_errors=kernel_log.device_errors(seen.kernel_lines),
        device_holders=_device_holders(seen, processes),
        leftovers=seen.leftovers,
        survivors=seen.survivors,
    )


def _is_killed(seen: Seen, rank: ExitStatus | None) -> bool:
    if seen.is_stop_asked or seen.ended_because is not None or seen.oom_kills.attempt:
        return False
    if seen.status is None:
        return not seen.machine_restarted
    ends = [status.signal_number for status in (seen.status, rank) if status is not None]
    return signal.SIGKILL in ends or signal.SIGTERM in ends


def _killer(seen: Seen, processes: frozenset[int]) -> str:
    # Whatever is started to ask would be a child beside those that could not be ended.
    if seen.survivors:
        return ""
    return other_killers.find_killer(seen.groups, processes, started_seconds=seen.started_seconds)


def _device_holders(seen: Seen, processes: frozenset[int]) -> tuple[str, ...]:
    is_over = seen.is_stop_asked or (seen.words is not None and seen.words.ending == "completed")
    if is_over or seen.survivors:
        return ()
    holders = gpu_processes.wait_for_memory(processes | seen.device_users, timeout_seconds=_MEMORY_SECONDS)
    return tuple(str(holder) for holder in holders)


def _is_shell(run_directory: Path) -> bool:
    try:
        plan = read_plan(run_directory)
    except StorageError:
        return False
    return plan is not None and Path(plan.command[0]).name in _SHELLS


def _shared_memory() -> SharedMemory | None:
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None
    return SharedMemory(
        free_bytes=found.f_bavail * found.f_frsize, total_bytes=found.f_blocks * found.f_frsize
    )
