"""What is seen of an attempt from before it starts until it ended, for the judgement on it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.rundir import layout
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.last_words import read_last_words
from unbroken.supervisor import cells, cgroups, progress
from unbroken.supervisor.history import Begun
from unbroken.supervisor.judging.device_users import DeviceUsers
from unbroken.supervisor.judging.facts import Seen, gather
from unbroken.supervisor.judging.kernel_log import KernelLog
from unbroken.supervisor.judging.outcome import judge
from unbroken.supervisor.judging.verdict import ExitStatus, Verdict
from unbroken.supervisor.watcher import EndNow

_KILL_SECONDS = 60.0
_LOOK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the tree came to its end, as the supervisor saw it.

    `because` is set if the supervisor ended it; `leftovers` outlived the leader and were ended after it,
    `survivors` could not be ended. `status` is None if the leader never started, is a survivor, or ended
    while nobody watched. `machine_restarted` tells that the machine was booted since it started.
    `leader` is the number that its first process had.
    """

    status: ExitStatus | None
    because: EndNow | None = None
    leftovers: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    machine_restarted: bool = False
    leader: int | None = None


class Witness:
    """Made just before the attempt in `directory` starts: what counts is what changed since.

    Of an attempt that another supervisor started, `begun` tells what there was before. `cell` is the
    control group that the attempt has for itself, if it has one.
    """

    def __init__(self, run_directory: Path, directory: Path, *, begun: Begun | None = None) -> None:
        self._run_directory = run_directory
        self._directory = directory
        self._listed = begun.listed if begun is not None else progress.newest_or(run_directory, None)
        # The one who takes over may be in another group: its counter is no difference to the other's.
        self._kills = (
            replace(begun.oom_kills, own_group=None) if begun is not None else cgroups.read_oom_kills()
        )
        self._started_seconds = begun.started if begun is not None else time.time()
        if begun is None:
            cells.remove_old_cells(run_directory)
        self.cell = cells.make_cell(directory) if begun is None else cells.find_cell(directory)
        self.device_users = DeviceUsers(self.cell)
        self._kernel_log = KernelLog()

    @property
    def before(self) -> dict[str, Any]:
        """What there was before, for the journal: a supervisor that takes over needs it."""
        return {"listed": self._listed, "oom_kills": asdict(self._kills)}

    def in_cell(self) -> AbstractContextManager[None]:
        """Let what is started meanwhile be in the attempt's own control group."""
        return self.cell.entered() if self.cell is not None else nullcontext()

    @property
    def step(self) -> int | None:
        """The last step in the heartbeat, or None if there was none."""
        beat = read_heartbeat(self._directory / layout.HEARTBEAT)
        return beat.step if beat is not None else None

    @property
    def made_step(self) -> bool:
        """True if a step was completed beyond the checkpoint that there was."""
        step = self.step
        return step is not None and step > (progress.step_of(self._listed) or 0)

    def judge(self, end: End, *, is_stop_asked: bool) -> Verdict:
        """Return the verdict on the attempt, of which nothing is left but what `end` says."""
        words = read_last_words(self._directory)
        beat = read_heartbeat(self._directory / layout.HEARTBEAT)
        survivors = end.survivors or self._left_in_cell()
        seen = Seen(
            run_directory=self._run_directory,
            directory=self._directory,
            started_seconds=self._started_seconds,
            status=end.status,
            words=words,
            leader=end.leader,
            processes=frozenset(
                {end.leader or 0, beat.process_id if beat is not None else 0} - {0},
            ),
            groups=self.cell.directories if self.cell is not None else (),
            device_users=self.device_users.process_ids,
            kernel_lines=tuple(self._kernel_log.read()),
            oom_kills=cgroups.new_oom_kills(
                self._kills,
                cgroups.read_oom_kills(self.cell.oom_kills() if self.cell is not None else None),
            ),
            is_stop_asked=is_stop_asked,
            machine_restarted=end.machine_restarted,
            ended_because=end.because.because if end.because is not None else None,
            ended_kind=end.because.kind if end.because is not None else "",
            made_step=self.made_step,
            leftovers=end.leftovers,
            survivors=survivors,
        )
        return judge(end.status, words, gather(seen))

    def close(self) -> None:
        """Release what is held: the attempt's own control group is removed."""
        self._kernel_log.close()
        if self.cell is not None:
            cells.remove_cell(self._directory, self.cell)

    def _left_in_cell(self) -> tuple[str, ...]:
        """End what is still in the attempt's own group, and return what cannot be ended.

        Of an attempt that another supervisor started, only the group proves that nothing is left.
        """
        until = time.monotonic() + _KILL_SECONDS
        while self.cell is not None and not self.cell.is_empty():
            if time.monotonic() >= until:
                return (f"something in the control group {self.cell.name}",)
            self.cell.kill()
            time.sleep(_LOOK_AGAIN_SECONDS)
        return ()
