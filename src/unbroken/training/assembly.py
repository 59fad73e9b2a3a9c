"""What a run consists of in this process, put together from what the script has said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from unbroken.checkpoint.retention import KeepBest
from unbroken.errors import StorageFullError, UnbrokenError, UsageError
from unbroken.rundir.save_interval import SaveInterval, write_save_interval
from unbroken.training import families
from unbroken.training.arguments import plain
from unbroken.training.attempt import Attempt, say_refused
from unbroken.training.boundary import Boundary
from unbroken.training.ending import Ending
from unbroken.training.environment import environment
from unbroken.training.failures import failures_before, interval_before
from unbroken.training.full_disk import FullDisk
from unbroken.training.health.agreement import agreement
from unbroken.training.health.keeping import with_one_to_go_back_to
from unbroken.training.health.lowering import Lowering
from unbroken.training.health.policy import Health
from unbroken.training.health.recovery import Recovery
from unbroken.training.health.replaying import Replaying
from unbroken.training.health.watch import HealthWatch
from unbroken.training.memory_guard import MemoryGuard
from unbroken.training.micro_batches import MicroBatches
from unbroken.training.parts import Parts
from unbroken.training.position import Position
from unbroken.training.preemption import Requests
from unbroken.training.pulse import Pulse
from unbroken.training.ranks.agreement import AgreedRequests
from unbroken.training.ranks.following import FollowingSaver, check_same_parts, open_attempt
from unbroken.training.ranks.group import Group, this_group
from unbroken.training.ranks.shares import Shares
from unbroken.training.rehearsing import Rehearsal, rehearsal
from unbroken.training.save_interval import AutoInterval
from unbroken.training.save_policy import SavePolicy
from unbroken.training.saver import Saver
from unbroken.training.saves import Saves
from unbroken.training.settings import Settings
from unbroken.training.unkept import UnkeptWatch
from unbroken.training.validation import Validator
from unbroken.training.whole_state import WholeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The pieces of a run that was entered."""

    attempt: Attempt
    state: WholeState
    saver: Saver
    saves: Saves
    ending: Ending
    pulse: Pulse
    full_disk: FullDisk
    rehearsal: Rehearsal
    unkept: UnkeptWatch
    requests: Requests
    health: HealthWatch
    boundary: Boundary
    micro_batches: MicroBatches
    validator: Validator | None


def assemble(settings: Settings) -> Assembly:
    """Open the run for writing and return its pieces.

    Raises UsageError, UnsupportedStateError, NotARunError, RunBusyError and StorageError.
    """
    group = Group()
    try:
        # First: to look at a value that several processes hold may wait for all of them.
        families.check_processes()
        group = this_group()
        _check_plan(settings, group)
        parts = group.attempted(lambda: Parts(settings.values, settings.handlers, settings.choices))
        check_same_parts(group, parts.names)
        position = Position(parts)
        attempt = open_attempt(settings.directory, group)
    except UnbrokenError as error:
        if group.is_first:
            say_refused(settings.directory, error)
        raise
    heartbeat = attempt.heartbeat
    guard = MemoryGuard(settings.memory_guard, attempt.directory, save_seconds=lambda: heartbeat.save_seconds)
    own = Requests(settings.directory, guard)
    requests = own if group.is_alone else AgreedRequests(own, group)
    full_disk = FullDisk(
        settings.full_disk,
        beat=lambda phase: pulse.beat(phase),  # noqa: PLW0108 - it is made further below
        is_asked_to_stop=lambda: own.stop_reason() is not None,
    )
    # Of several ranks each would have to live for its copy to be of use.
    snapshots = settings.snapshot if group.is_alone else ()
    if settings.snapshot and not snapshots:
        attempt.tell("snapshot= is for runs of one process: no copies are made for a crash")
    saver = (
        _saver(settings, attempt, full_disk, keeps_snapshots=bool(snapshots))
        if group.is_first
        else FollowingSaver()
    )
    health = HealthWatch(
        settings.health or Health(action="warn"),
        rate=families.highest_rate(settings.values),
        goal_step=lambda: heartbeat.goal_step,
        has_scaler=lambda: families.has_scaler(settings.values),
        agree=agreement(group),
    )
    state = WholeState(
        parts=parts,
        position=position,
        health=health,
        group=group,
        shares=Shares(group),
        run_id=attempt.run.run_id,
        attempt=attempt.number,
        config=settings.config,
        environment={name: plain(value, f"environment/{name}") for name, value in environment().items()},
    )
    pulse = Pulse(heartbeat, state, saver)
    validator = None if settings.validate is None else Validator(settings.validate, state)
    saves = Saves(
        saver,
        state.captured,
        policies=_policies(settings, attempt, full_disk) if group.is_first else [],
        snapshots=snapshots,
        in_background=settings.background,
        pulse=pulse,
        validator=validator,
        group=group,
    )
    ending = Ending(
        attempt=attempt,
        state=state,
        saver=saver,
        saves=saves,
        full_disk=full_disk,
        beat=pulse.beat,
        group=group,
    )
    rehearsing = rehearsal(settings.plan, state, saver)
    unkept = UnkeptWatch(settings.values, parts)
    recovery = Recovery(
        watch=health,
        attempt=attempt,
        state=state,
        saver=saver,
        saves=saves,
        full_disk=full_disk,
        choices=settings.choices,
        lowering=Lowering(settings.values, lambda: state.step),
        beat=pulse.beat,
        replaying=Replaying(
            policy=health.policy,
            attempt=attempt,
            state=state,
            full_disk=full_disk,
            beat=pulse.step,
            is_asked_to_stop=lambda: requests.stop_reason() is not None,
            take_stepped=unkept.is_step_complete,
        ),
    )
    boundary = position.loop = Boundary(
        state=state,
        saves=saves,
        ending=ending,
        requests=requests,
        rehearsal=rehearsing,
        unkept=unkept,
        recovery=recovery,
        pulse=pulse,
        best_of={policy.metric for policy in settings.keep if isinstance(policy, KeepBest)},
        copies=settings.plan is None and group.is_alone,
        group=group,
    )
    return Assembly(
        attempt=attempt,
        state=state,
        saver=saver,
        saves=saves,
        ending=ending,
        pulse=pulse,
        full_disk=full_disk,
        rehearsal=rehearsing,
        unkept=unkept,
        requests=requests,
        health=health,
        boundary=boundary,
        micro_batches=MicroBatches(attempt.directory),
        validator=validator,
    )


def _check_plan(settings: Settings, group: Group) -> None:
    if settings.plan is not None and not group.is_alone:
        raise UsageError(
            f"unbroken drill: expected a script of one process, found {group.size} ranks",
            hint="rehearse the training with one rank",
        )


def _saver(settings: Settings, attempt: Attempt, full_disk: FullDisk, *, keeps_snapshots: bool) -> Saver:
    return Saver(
        settings.directory,
        attempt,
        keep=with_one_to_go_back_to(settings.keep, settings.health),
        keeps_snapshots=keeps_snapshots,
        full_disk=full_disk,
        memory_budget_bytes=settings.memory_budget_bytes,
        verify=settings.verify,
    )


def _policies(settings: Settings, attempt: Attempt, full_disk: FullDisk) -> Sequence[SavePolicy]:
    return _auto(attempt, full_disk) if settings.save == "auto" else settings.save


def _auto(attempt: Attempt, full_disk: FullDisk) -> list[SavePolicy]:
    """Return what save="auto" stands for: it goes on from what the attempts before have measured."""

    def keep(interval: SaveInterval) -> None:
        try:
            write_save_interval(attempt.directory, interval)
        except StorageFullError as error:
            # The next save writes it again.
            full_disk.lose(error, "the record of the save interval")

    def tell(interval: SaveInterval) -> None:
        event = {"reason": interval.reason(), **asdict(interval)}
        full_disk.write(lambda: attempt.journal.append("save-interval", **event), "the save interval")

    return [
        AutoInterval(
            failures_before(attempt.run_directory, attempt.number),
            kept=keep,
            told=tell,
            before=interval_before(attempt.run_directory, attempt.number),
            durable_seconds=lambda: attempt.heartbeat.save_seconds,
        )
    ]
