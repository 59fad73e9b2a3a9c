"""The loop: an attempt, a decision, a pause, the next attempt. Thin effects around pure rules."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from unbroken.errors import StorageError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.identity import new_attempt, open_run
from unbroken.rundir.lock import RunLock
from unbroken.rundir.process_tree import become_subreaper
from unbroken.rundir.processes import identify_self
from unbroken.supervisor import progress, registry, restart_policy
from unbroken.supervisor.attempt import run_attempt
from unbroken.supervisor.plan import Plan, write_plan
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.restart_policy import Decision, Ended
from unbroken.supervisor.states import Snapshot, State
from unbroken.supervisor.stopping import StopWatch
from unbroken.supervisor.survivors import refuse_beside_survivors
from unbroken.supervisor.watchers import makers

_LOOK_SECONDS = 0.5
_STATE_AFTER: dict[str, State] = {
    "done": "done",
    "stopped": "stopped",
    "hand-over": "stopped",
    "hold": "held",
}


class Supervisor:
    """Keeps the run of `plan` going until it is done, stopped or held.

    Made by the process that supervises, which has no other children and has called `block_signals`.
    Raises RunBusyError if somebody else keeps the run going, or an earlier attempt of it still runs, and
    UsageError if the directory is that of a run with another name.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        newest_verified: Callable[[Path], str | None] = progress.newest_verified,
        choose: Callable[[], float] = random.random,
    ) -> None:
        self._plan = plan
        self._newest_verified = newest_verified
        self._choose = choose
        self._history: list[Ended] = []
        identity = open_run(plan.directory, name=plan.name)
        if plan.name is not None and plan.name != identity.name:
            raise UsageError(
                f"{plan.directory}: expected run {plan.name}, found run {identity.name}",
                hint="leave out --name, or choose another run directory",
            )
        self._lock = RunLock(
            plan.directory / layout.SUPERVISOR_LOCK,
            plan.directory / layout.SUPERVISOR_HOLDER,
            doing="keeps this run going",
        )
        self._lock.acquire(command=list(plan.command))
        refuse_beside_survivors(plan.directory)
        become_subreaper()
        self._stop = StopWatch(plan.directory, grace_seconds=plan.grace_seconds)
        self._stop.clear()
        now = time.time()
        snapshot = Snapshot(
            state="starting",
            reason="",
            run_id=identity.run_id,
            name=identity.name,
            command=plan.command,
            supervisor=identify_self(),
            started_seconds=now,
            changed_seconds=now,
            grace_seconds=plan.grace_seconds,
        )
        write_plan(plan)
        self._records = Records(plan.directory, snapshot)
        self._makers = makers(plan, self._records)
        self._records.show()

    def run(self) -> int:
        """Run attempts until it is over, and return the exit code of the whole run."""
        directory, name = self._plan.directory, self._records.snapshot.name
        self._records.event("run-started", name=name, command=self._plan.command)
        try:
            registry.register(name, directory)
        except StorageError as error:
            say(f"this run is known by its path only: could not {error.message}")
        first_checkpoint = progress.newest_listed(directory)
        decision = self._attempt(first_checkpoint)
        while decision.action == "restart":
            self._pause(decision)
            if self._stop.is_asked:
                decision = restart_policy.stopped_between_attempts()
                break
            decision = self._attempt(first_checkpoint)
        return self._finish(decision)

    def _attempt(self, first_checkpoint: str | None) -> Decision:
        try:
            attempt = new_attempt(self._plan.directory)
        except StorageError as error:
            return restart_policy.hold(f"no attempt can be made: {error.message}", hint=error.hint)
        self._history.append(
            run_attempt(
                self._plan.directory,
                self._plan.command,
                attempt,
                stop=self._stop,
                records=self._records,
                makers=self._makers,
                known_checkpoint=self._history[-1].checkpoint if self._history else first_checkpoint,
                newest_verified=self._newest_verified,
            )
        )
        return restart_policy.decide(
            self._history,
            self._plan.policy,
            first_checkpoint=first_checkpoint,
            is_stop_asked=self._stop.is_asked,
            now_seconds=time.monotonic(),
            random=self._choose(),
        )

    def _pause(self, decision: Decision) -> None:
        """Let the pause before a restart go by, or less of it if the run is asked to stop."""
        next_start = time.time() + decision.delay_seconds
        self._records.event(
            "decision",
            action="restart",
            reason=decision.reason,
            hint=decision.hint,
            next_start=next_start,
        )
        self._records.show(
            state="backing-off",
            reason=decision.reason,
            hint=decision.hint,
            restarts=len(self._history),
            next_start_seconds=next_start,
        )
        until = time.monotonic() + decision.delay_seconds
        while not self._stop.wait(min(_LOOK_SECONDS, until - time.monotonic())):
            if time.monotonic() >= until:
                return

    def _finish(self, decision: Decision) -> int:
        assert decision.exit_code is not None, "a run that goes on has no exit code"
        self._stop.clear()
        state = _STATE_AFTER[decision.action]
        self._records.event(
            "run-ended",
            action=decision.action,
            state=state,
            reason=decision.reason,
            hint=decision.hint,
            exit_code=decision.exit_code,
        )
        self._records.show(
            state=state,
            reason=decision.reason,
            hint=decision.hint,
            next_start_seconds=None,
            deadline_seconds=None,
            leader=None,
            exit_code=decision.exit_code,
        )
        self._records.close()
        self._lock.release()
        return decision.exit_code
