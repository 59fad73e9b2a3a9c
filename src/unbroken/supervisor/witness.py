"""What is seen of an attempt from before it starts until it ended, for the judgement on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unbroken.rundir import layout
from unbroken.rundir.heartbeat import read_heartbeat
from unbroken.rundir.last_words import read_last_words
from unbroken.supervisor import evidence, progress
from unbroken.supervisor.outcome import judge
from unbroken.supervisor.verdict import ExitStatus, Facts, Verdict
from unbroken.supervisor.watcher import EndNow


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the tree came to its end, as the supervisor saw it.

    `because` is set if the supervisor ended it; `leftovers` outlived the leader and were ended after it,
    `survivors` could not be ended. `status` is None if the leader never started or is a survivor.
    """

    status: ExitStatus | None
    because: EndNow | None = None
    leftovers: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()


class Witness:
    """Made just before the attempt in `directory` starts: what counts is what changed since."""

    def __init__(self, run_directory: Path, directory: Path) -> None:
        self._run_directory = run_directory
        self._directory = directory
        self._listed = progress.newest_listed(run_directory)
        self._kills = evidence.read_oom_kills()

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

    @property
    def has_new_checkpoint(self) -> bool:
        """True if another checkpoint is the newest now, whether it is intact or not."""
        return progress.newest_listed(self._run_directory) != self._listed

    def judge(self, end: End, *, is_stop_asked: bool) -> Verdict:
        """Return the verdict on the attempt, of which nothing is left but what `end` says."""
        facts = Facts(
            is_stop_asked=is_stop_asked,
            ended_because=end.because.because if end.because is not None else None,
            made_step=self.made_step,
            oom_kills=evidence.new_oom_kills(self._kills, evidence.read_oom_kills()),
            seen_exception=evidence.last_exception(evidence.read_tail(self._directory / layout.OUTPUT_LOG)),
            leftovers=end.leftovers,
            survivors=end.survivors,
        )
        return judge(end.status, read_last_words(self._directory), facts)
