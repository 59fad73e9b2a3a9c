"""The loop: an attempt, a decision, a pause, the next attempt. Thin effects around pure rules."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from unbroken.errors import StorageError, UnbrokenError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.control import read_stop
from unbroken.rundir.identity import new_attempt, open_run
from unbroken.rundir.lock import RunLock
from unbroken.rundir.process_tree import become_subreaper
from unbroken.rundir.processes import identify_self
from unbroken.supervisor import adoption, memory_hints, progress, registry, restart_policy
from unbroken.supervisor.adoption import Found
from unbroken.supervisor.alarms import Alarms
from unbroken.supervisor.attempt import Care, adopt_attempt, run_attempt
from unbroken.supervisor.host import engines, slurm
from unbroken.supervisor.host.endings import handed_over
from unbroken.supervisor.host.engines import engine_of
from unbroken.supervisor.host.outside import Outside
from unbroken.supervisor.judging.outcome import not_made
from unbroken.supervisor.judging.verdict import Verdict
from unbroken.supervisor.plan import Plan, write_plan
from unbroken.supervisor.records import Records, say
from unbroken.supervisor.restart_policy import Decision, Ended
from unbroken.supervisor.rolling_back import older_checkpoint, roll_back
from unbroken.supervisor.side.side_work import SideWork
from unbroken.supervisor.states import Snapshot, State
from unbroken.supervisor.stopping import StopWatch
from unbroken.supervisor.survivors import refuse_beside_survivors
from unbroken.supervisor.verification import Verification
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

    Made by the process that supervises, which has no other children and has called `block_signals`. With
    `revives` it takes the run over from one that is gone: an attempt that runs is adopted, what failed
    before still counts, and what was held, done or stopped is not started (NotRunningError). Otherwise it
    starts the run.

    Raises RunBusyError if somebody else keeps the run going, or an earlier attempt of it still runs, and
    UsageError if the directory is that of a run with another name.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        revives: bool = False,
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
        self._found = adoption.find(plan.directory) if revives else None
        if self._found is None:
            refuse_beside_survivors(plan.directory)
        become_subreaper()
        engine = engine_of(os.environ)
        self._stop = StopWatch(
            plan.directory,
            grace_seconds=plan.grace_seconds,
            engine=engine.name if engine is not None else "",
        )
        if self._found is None or adoption.is_void(read_stop(plan.directory), self._found):
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
        if plan.whole_batches:
            memory_hints.forget(plan.directory)
        write_plan(replace(plan, whole_batches=False))
        self._records = Records(plan.directory, snapshot)
        self._side_work = SideWork(plan, self._records)
        self._outside = Outside(plan, self._records)
        self._care = Care(
            stop=self._stop,
            records=self._records,
            makers=[self._outside.watcher, self._side_work.watcher, *makers(plan, self._records)],
        )
        self._first_checkpoint: str | None = None
        self._records.show()

    @property
    def found(self) -> str:
        """What a run that is taken over was doing, in words; empty for one that is started."""
        return str(self._found) if self._found is not None else ""

    def run(self) -> int:
        """Run attempts until it is over, and return the exit code of the whole run."""
        decision = self._begin() if self._found is None else self._take_over(self._found)
        while decision.goes_on:
            self._pause(decision)
            if self._stop.is_asked:
                decision = restart_policy.stopped_between_attempts()
                break
            decision = self._attempt()
        return self._finish(decision)

    def _begin(self) -> Decision:
        self._first_checkpoint = progress.newest_or(self._plan.directory, None)
        self._records.event(
            "run-started",
            name=self._records.snapshot.name,
            command=self._plan.command,
            first_checkpoint=self._first_checkpoint,
        )
        self._register()
        return self._attempt()

    def _take_over(self, found: Found) -> Decision:
        """Go on with a run where its last supervisor left it."""
        past = found.past
        self._first_checkpoint, self._history = past.first_checkpoint, list(past.ended)
        self._records.event("run-revived", found=str(found), machine_restarted=found.machine_restarted)
        self._records.show(restarts=len(self._history))
        self._register()
        if found.is_running:
            self._give_time_to_stop()
        # Takes note of a request that the last supervisor could not obey any more.
        self._stop.wait(0)
        if found.begun is not None:
            if not found.is_running:
                # Nobody watches it any more; what it had to say is told all the same.
                Alarms(self._plan.directory, found.begun.attempt, self._records, goes_on=True).end()
            known = self._known_checkpoint
            ended = adopt_attempt(
                self._plan.directory, found.begun, found, care=self._care, known_checkpoint=known
            )
            return self._look_back(ended, found.begun.listed)
        if self._stop.is_asked:
            return restart_policy.stopped_between_attempts()
        if not self._history or past.is_interrupted:
            return self._attempt()
        if past.decision is None or past.next_start is None:
            # It was gone before it could look what the attempt had left.
            return self._decide_by_progress()
        # A clock that was set back since must not make it a pause of years.
        pause = min(max(0.0, past.next_start - time.time()), self._plan.policy.cap_seconds)
        # It is on record already, and people were told of it.
        return replace(past.decision, delay_seconds=pause, back_to=None)

    def _give_time_to_stop(self) -> None:
        try:
            adoption.give_time_to_stop(self._plan.directory, self._plan.grace_seconds)
        except StorageError as error:
            say(f"its time to stop stays over: could not {error.message}")

    def _register(self) -> None:
        try:
            registry.register(self._records.snapshot.name, self._plan.directory)
        except StorageError as error:
            say(f"this run is known by its path only: could not {error.message}")

    @property
    def _known_checkpoint(self) -> str | None:
        return self._history[-1].checkpoint if self._history else self._first_checkpoint

    def _attempt(self) -> Decision:
        directory, command = self._plan.directory, self._plan.command
        self._side_work.prepare()
        try:
            attempt = new_attempt(directory)
        except StorageError as error:
            return self._without_attempt(not_made(error))
        known, listed = self._known_checkpoint, progress.newest_or(directory, None)
        ended = run_attempt(directory, command, attempt, care=self._care, known_checkpoint=known)
        return self._look_back(ended, listed)

    def _look_back(self, ended: Ended, listed: str | None) -> Decision:
        """Return what follows an attempt; `listed` was the newest checkpoint before it, intact or not."""
        self._history.append(ended)
        is_over = ended.verdict.outcome == "completed" or self._stop.is_asked
        # What is given up may be listed still, and then its name is given again.
        has_gone_back = any(one.went_back for one in self._history[-2:])
        if is_over or (not has_gone_back and progress.newest_or(self._plan.directory, listed) == listed):
            return self._decide()
        return self._decide_by_progress()

    def _decide_by_progress(self) -> Decision:
        """Return what follows the last attempt, once it is known how far it got the run.

        That reads all of a checkpoint.
        """
        verification = Verification(partial(self._newest_verified, self._plan.directory))
        if not self._wait_for(verification):
            return restart_policy.stopped_between_attempts()
        self._history[-1] = replace(self._history[-1], checkpoint=verification.newest)
        return self._decide()

    def _decide(self) -> Decision:
        """Return what follows the last attempt; a roll-back that is decided here is recorded here."""
        may_roll_back = restart_policy.may_roll_back(
            self._history, self._plan.policy, first_checkpoint=self._first_checkpoint
        )
        older: str | None = None
        if may_roll_back and not self._stop.is_asked:
            search = Verification(partial(older_checkpoint, self._plan.directory))
            if not self._wait_for(search):
                return restart_policy.stopped_between_attempts()
            older = search.newest
        decision = restart_policy.decide(
            self._history,
            self._plan.policy,
            first_checkpoint=self._first_checkpoint,
            is_stop_asked=self._stop.is_asked,
            now_seconds=time.monotonic(),
            random=self._choose(),
            older=older,
        )
        return decision if decision.back_to is None else self._roll_back(decision, decision.back_to)

    def _roll_back(self, decision: Decision, back_to: str) -> Decision:
        last = self._history[-1]
        try:
            why = last.verdict.message or last.verdict.kind
            roll_back(self._plan.directory, back_to, reason=why, step=last.step)
        except UnbrokenError as error:
            return restart_policy.hold(f"not {decision.reason}; {error.message}", hint=error.hint)
        self._history[-1] = replace(last, checkpoint=back_to, went_back=True, rolled_back=True)
        return decision

    def _wait_for(self, verification: Verification) -> bool:
        """Wait until it is done; False if the run is asked to stop meanwhile, which is not kept waiting."""
        while not verification.is_done:
            if self._stop.wait(_LOOK_SECONDS):
                return False
            self._outside.ask(self._stop)
        return True

    def _without_attempt(self, verdict: Verdict) -> Decision:
        reason = verdict.evidence[0]
        if not verdict.cause:
            return restart_policy.hold(reason, hint=verdict.hint)
        self._history.append(
            Ended(
                verdict=verdict,
                started_seconds=time.monotonic(),
                lived_seconds=0.0,
                has_words=False,
                made_step=False,
                checkpoint=self._known_checkpoint,
            )
        )
        decision = self._decide()
        return replace(decision, reason=f"{reason}; {decision.reason}")

    def _pause(self, decision: Decision) -> None:
        """Let the pause before a restart go by, or less of it if the run is asked to stop."""
        next_start = time.time() + decision.delay_seconds
        self._records.event(
            "decision",
            action=decision.action,
            reason=decision.reason,
            hint=decision.hint,
            next_start=next_start,
            checkpoint=self._known_checkpoint,
            back_to=decision.back_to,
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
            self._outside.ask(self._stop)

    def _is_machine_going(self) -> bool:
        """Tell whether the run ends only since this machine does: it is to go on when the machine is back."""
        request = self._stop.request
        # Of an engine's machines, it is the engine that starts the run again.
        if request is None or engine_of(os.environ) is not None:
            return False
        if request.is_preemption:
            return True
        # Here: it starts programs, for which the supervisor has no other need.
        from unbroken.supervisor.host.systemd import is_machine_going_down

        return request.reason.startswith("SIGTERM") and is_machine_going_down()

    def _finish(self, decision: Decision) -> int:
        decision = handed_over(decision, self._stop.request)
        assert decision.exit_code is not None, "a run that goes on has no exit code"
        state = _STATE_AFTER[decision.action]
        self._side_work.prepare()
        self._records.event(
            "run-ended",
            action=decision.action,
            state=state,
            reason=decision.reason,
            hint=decision.hint,
            exit_code=decision.exit_code,
            is_interrupted=decision.action in ("stopped", "hand-over") and self._is_machine_going(),
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
        # Not before that is written: whoever takes over from one that is killed here must know of it.
        self._stop.clear()
        engines.leave_message(os.environ, state, decision.reason, hint=decision.hint)
        self._side_work.finish()
        if self._plan.requeue and decision.action == "hand-over":
            newest = progress.newest_or(self._plan.directory, self._first_checkpoint)
            # A command without our library keeps its state where we do not see it.
            is_foreign = not any(ended.has_words for ended in self._history)
            has_gone_on = is_foreign or progress.is_newer(newest, self._first_checkpoint)
            # The last: it ends the job, and this process with it.
            slurm.requeue_job(os.environ, self._records, has_gone_on=has_gone_on)
        self._records.close()
        self._lock.release()
        return decision.exit_code
