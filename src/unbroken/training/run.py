"""The run: what a training script talks to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from unbroken.checkpoint.retention import KeepLast, RetentionPolicy
from unbroken.errors import UsageError
from unbroken.rundir.rehearsal import planned
from unbroken.rundir.tell import tell
from unbroken.state.handlers import Horizon, StateHandler
from unbroken.training.arguments import (
    checked,
    choices,
    encoded_metrics,
    numbers,
    plain,
    policies,
    run_directory,
    save_policies,
)
from unbroken.training.assembly import assemble
from unbroken.training.beginning import begin
from unbroken.training.exit_codes import install_exit_codes
from unbroken.training.full_disk import FullDiskPolicy
from unbroken.training.health.after_resume import AfterResume, after_resume
from unbroken.training.health.policy import Health
from unbroken.training.memory_guard import MemoryGuardPolicy
from unbroken.training.preemption import StopRequested
from unbroken.training.rehearsing import AtSteps
from unbroken.training.replay import Batches, Randomness
from unbroken.training.report import RestoreReport
from unbroken.training.save_policy import EveryMinutes, SavePolicy
from unbroken.training.settings import Settings, VerifyPolicy
from unbroken.training.start_report import StartReport

DEFAULT_SAVE: tuple[SavePolicy, ...] = (EveryMinutes(10),)
DEFAULT_KEEP: tuple[RetentionPolicy, ...] = (KeepLast(3),)
_FULL_DISK_HINT = "'pause' waits until there is space again and then goes on by itself"
_MEMORY_GUARD_HINT = "'auto' stops with the state saved before memory runs out, under a supervisor"
_VERIFY_HINT = "'sampled' reads some tensors of each new checkpoint back, 'always' all of it"


class Run:
    """A training run that can be stopped and killed at any moment and goes on where it was.

    Every further keyword is a *part*: a live object whose state is saved and restored (modules,
    optimizers, schedulers, scalers, generators, dictionaries of counters, anything with
    `state_dict` and `load_state_dict`). The random generators of the process are parts without asking.

        with unbroken.Run("runs/digits", model=model, optimizer=optimizer) as run:
            for epoch in run.epochs(20):
                for images, labels in run.batches(loader):
                    run.step(loss=train_step(images, labels))

    `directory` is the run directory; under `unbroken run` it may be left out. `save` and `keep` say
    when to save and what to retain; with `save="auto"` the run finds the interval itself. `resume` is
    "auto" (go on, or begin), "never", "must" or the name of a checkpoint. A run that begins may do so with
    the state in a checkpoint of torch, Lightning, Hugging Face, TensorFlow or another run, by `start_from`:
    see `started_from` then for what was taken. `config` is kept in every
    checkpoint, and a change of it is reported. `handlers` are asked before our own how the state of a
    part is taken out and put back.

    A restore is strict. What may differ is said by name, with `*` for any text: `rename` maps names, or
    their first segments, or regular expressions, from the checkpoint's to the program's; `allow` are names
    that one side may lack or that may differ in shape (they stay as the script built them), `cast` names
    whose dtype may differ, `fresh` parts that begin anew, `override` settings such as "optimizer.lr" for
    which the script's value wins, and `horizon` says what becomes of a schedule of another length: "keep",
    "stretch" or "hold". `non_persistent` are buffers to keep that a state_dict leaves out, `non_finite`
    trained tensors that may hold NaN or infinity: a state with others is saved, and never resumed from.

    `health` says what is done about losses that are not well, see `Health`; without it people are told, and
    no more. `validate()` is asked before each checkpoint: if it returns False or a reason, nothing resumes
    from that one. `verify` says how much of what was written is read back: "off", "sampled" or "always" all.

    Checkpoints are written beside training; with `background=False` training waits. `snapshot` says when
    to copy the state to memory that outlives this process: should it be killed or crash, the newest copy
    becomes a checkpoint. Copies take at most `memory_budget_bytes`. `full_disk` says what to do while the
    disk is full: "pause" training until there is space, "go-on" without saving, or "fail". `memory_guard`
    says what to do just before memory runs out: "stop" with the state saved, "auto" for that under
    `unbroken run` and a save elsewhere, or "off".

    A final checkpoint is written when the `with` block ends, and one when SIGTERM, SIGINT or
    `unbroken stop` asks to stop: the loop is then left by SystemExit with code 75.

    Raises on entering: UsageError, NotARunError, RunBusyError, UnsupportedStateError, StateMismatchError,
    CheckpointNotFoundError, DamagedError, StorageError. A mismatch is found before any object is changed.
    """

    restored: RestoreReport | None = None
    started_from: StartReport | None = None

    def __init__(  # noqa: PLR0913 - each is a thing of its own that a user may set by its name
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        save: Sequence[SavePolicy] | Literal["auto"] = DEFAULT_SAVE,
        keep: Sequence[RetentionPolicy] = DEFAULT_KEEP,
        snapshot: Sequence[SavePolicy] = (),
        resume: str = "auto",
        start_from: str | os.PathLike[str] | None = None,
        config: object = None,
        background: bool = True,
        full_disk: FullDiskPolicy = "pause",
        memory_budget_bytes: int | None = None,
        memory_guard: MemoryGuardPolicy = "auto",
        health: Health | None = None,
        validate: Callable[[], object] | None = None,
        verify: VerifyPolicy = "off",
        handlers: Sequence[StateHandler] = (),
        rename: Mapping[Any, str] | None = None,
        allow: Sequence[str] = (),
        cast: Sequence[str] = (),
        fresh: Sequence[str] = (),
        override: Sequence[str] = (),
        horizon: Horizon | None = None,
        non_persistent: Sequence[str] = (),
        non_finite: Sequence[str] = (),
        **parts: Any,
    ) -> None:
        install_exit_codes()
        plan = planned()
        if plan is not None:
            # What is rehearsed is the loop; when to save, and where, is of the plan.
            save, keep, snapshot, resume = [AtSteps(plan.save_at)], [], [], "auto"
        self.directory = run_directory(directory)
        self._settings = Settings(
            directory=self.directory,
            save=save_policies(save),
            keep=policies("keep", keep),
            snapshot=policies("snapshot", snapshot),
            resume=resume,
            start_from=None if start_from is None else Path(start_from),
            config=plain(config, "config"),
            background=background,
            full_disk=checked("full_disk", full_disk, FullDiskPolicy, hint=_FULL_DISK_HINT),
            memory_budget_bytes=memory_budget_bytes,
            memory_guard=checked(
                "memory_guard",
                memory_guard if plan is None else "off",
                MemoryGuardPolicy,
                hint=_MEMORY_GUARD_HINT,
            ),
            health=health if plan is None else Health(action="off"),
            validate=validate if plan is None else None,
            verify=checked("verify", verify, VerifyPolicy, hint=_VERIFY_HINT),
            handlers=tuple(handlers),
            choices=choices(
                parts,
                rename=rename,
                allow=allow,
                cast=cast,
                fresh=fresh,
                override=override,
                horizon=horizon,
                non_persistent=non_persistent,
                non_finite=non_finite,
            ),
            values=parts,
            plan=plan,
        )
        self._entered = self._epochs_begun = False

    def __enter__(self) -> Self:
        self._process_id = os.getpid()
        built = assemble(self._settings)
        self._attempt, self._state, self._position = built.attempt, built.state, built.state.position
        self._saver, self._saves, self._ending, self._pulse = (
            built.saver,
            built.saves,
            built.ending,
            built.pulse,
        )
        self._full_disk, self._requests, self._rehearsal = built.full_disk, built.requests, built.rehearsal
        self._unkept, self._boundary, self._health = built.unkept, built.boundary, built.health
        self._micro_batches, self._validator = built.micro_batches, built.validator
        try:
            self._begin()
            self._rehearsal.about_to_begin()
        except BaseException as error:
            self._attempt.say_failed(error, self.step_count, None)
            self._close()
            raise
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process_id:
            # A forked child that leaves the block by an exception or sys.exit: the run is its parent's.
            return
        try:
            if self._after_resume is not None:
                self._after_resume.end()
            if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._unkept.tell()
                self._boundary.complete()
            elif not isinstance(error, StopRequested):
                self._ending.fail(error)
        finally:
            self._entered = False
            if not isinstance(error, StopRequested):
                # For the rest of the script; after a stop, until all is closed, another asks for the same.
                self._requests.remove()
            self._close()

    @property
    def step_count(self) -> int:
        """The number of optimizer steps completed, those before a resume included."""
        return self._state.step if "_state" in vars(self) else 0

    @property
    def went_on_from(self) -> tuple[int, ...]:
        """The steps that this process went on from: in a resume at its start, and in each roll-back since."""
        return tuple(self._state.went_on_from) if "_state" in vars(self) else ()

    @property
    def parts(self) -> dict[str, object]:
        """The live parts by name, with those that the run has by itself; none before it was entered."""
        return {part.name: part.value for part in self._state.parts} if "_state" in vars(self) else {}

    def epochs(self, count: int, *, until: Callable[[], object] | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs from 0 that are still to be trained, of `count` in all.

        A run that stopped inside an epoch gets that epoch again, and `batches` the rest of it. When
        the body is done the epoch is: what stands there before and after the batches runs once in
        each epoch, and again if the run stopped in between. `until` is asked before each epoch: with what
        counts as true, as when a part says that it is enough, there are no more.
        """
        self._check_entered("epochs")
        if not self._epochs_begun:
            # What the script did since it entered the run was done before the checkpoint already.
            self._position.put_back()
            self._epochs_begun = True
        for epoch in range(self._position.epoch, count):
            if until is not None and not self._position.inside_epoch and until():
                return
            self._boundary.begin_epoch(epoch, count)
            self._rehearsal.about_to_begin()
            yield epoch
            self._rehearsal.at_end_of_body()
            self._position.end_epoch()
            self._log("epoch", epoch=epoch)
            self._boundary.end_epoch()

    def batches(
        self, loader: Iterable[Any], *, name: str | None = None, randomness: Randomness = "capture"
    ) -> Batches:
        """Return the batches of `loader`; in an epoch that is resumed, only those not yet consumed.

        `loader` is a map-style DataLoader, whose order, worker randomness and values are those without an
        interruption, or an iterable that begins anew each time, whose consumed items are read again.

        Each `for` loop over the result is a pass. Several loops may follow each other or run side by
        side; one that is nested in another may take no steps. `name` tells loaders apart that hold
        generators of their own, where their order in the script does not. With `randomness="keyed"` a
        seed, the epoch and its position decide each sample, whatever the workers, ranks and batches.

        Raises, when a pass begins, UnsupportedStateError for a loader that cannot be continued exactly
        and StateMismatchError for one that has changed.
        """
        self._check_entered("batches")
        return Batches(lambda: self._position.begin_pass(loader, name, randomness), loader)

    def micro_batches(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """Yield `(part, share)` for the parts that `batch` is split into: one, until memory has run out.

            for part, share in run.micro_batches(batch):
                (mean_loss(part) * share).backward()

        After that the supervisor halves them at each restart. The sum of the gradients is that of the
        whole batch, not to the bit. Raises UsageError for a batch that cannot be split.
        """
        self._check_entered("micro_batches")
        return self._micro_batches.of(batch)

    def step(self, **metrics: Any) -> None:
        """Say that one optimizer step is complete.

        Counts the step and writes `metrics` (numbers, or tensors of one element) to the journal. A
        checkpoint that is due is captured, and a request to stop is obeyed, when the body of the loop
        is done: as the loop over `batches` asks for the next batch, or here if there is no such loop.

        Raises, then or here:
            SaveFailedError: the save in the background has failed.
            StopRequested: a SystemExit with code 75; the state is saved.
        """
        self._check_entered("step")
        values = numbers(metrics)
        self._rehearsal.counting()
        self._position.check_whole()
        if self._unkept.is_step_complete():
            self._position.note_step()
        else:
            self._position.note_part_of_a_step()
        self._state.parts.forget()
        self._state.step += 1
        self._state.metrics = encoded_metrics(values)
        self._log("step", epoch=self._position.epoch, metrics=values)
        self._health.step(self._state.step, values)
        if self._after_resume is not None:
            self._after_resume.step(self._state.step, values)
        self._pulse.step()
        self._unkept.check()
        self._boundary.step()
        self._boundary.when_whole()

    def record(self, **metrics: Any) -> None:
        """Record metrics of the state as it is now, such as `accuracy=` after an evaluation.

        They are kept in the checkpoint of this state, and with `KeepBest` on one of them that checkpoint
        is always written: at the end of the epoch, when everything in its body is done, or before the
        next batch in the body of a loop over batches.
        """
        self._check_entered("record")
        values = numbers(metrics)
        self._rehearsal.evaluating()
        self._log("record", epoch=self._position.epoch, metrics=values)
        self._state.metrics.update(encoded_metrics(values))
        self._boundary.record(values.keys())

    def save(self) -> None:
        """Ask for a checkpoint: captured here, or before the next batch in a loop over batches."""
        self._check_entered("save")
        self._saves.wanted = self._settings.plan is None
        self._boundary.when_asked()

    @contextmanager
    def without_saves(self) -> Iterator[None]:
        """Save nothing inside this block; what becomes due is done after it.

        with run.without_saves():
            swap_in(averaged_weights)
            run.record(accuracy=evaluate(model))
            swap_out(averaged_weights)
        """
        self._check_entered("without_saves")
        with self._boundary.without_saves():
            yield

    def _begin(self) -> None:
        self._pulse.beat("restoring")
        found = begin(self._attempt, self._state, self._saver, self._settings)
        self.restored, self.started_from, lines = found
        self._boundary.recovery.begin()
        self._saves.taken(*self._state.progress())
        self._after_resume: AfterResume | None = None
        group = self._state.group
        if self.restored is not None and group.is_first:
            self._after_resume = after_resume(
                self.restored,
                attempt=self._attempt,
                saver=self._saver,
                full_disk=self._full_disk,
                policy=self._health.policy,
                non_finite=self._settings.choices.non_finite,
                is_alone=group.is_alone,
            )
        self._attempt.tell(f"attempt {self._attempt.number}: {lines[0]}", *lines[1:])
        if not self._requests.install():
            tell("not in the main thread: only `unbroken stop` asks this run to stop, signals do not")
        self._pulse.beat("training")

    def _log(self, kind: str, **fields: Any) -> None:
        step, journal = self.step_count, self._attempt.journal
        self._full_disk.write(lambda: journal.append(kind, step=step, **fields), "the journal")

    def _close(self) -> None:
        try:
            with (
                closing(self._attempt),
                closing(self._saver),
                closing(self._unkept),
                closing(self._boundary.recovery),
                closing(self._rehearsal),
            ):
                self._position.close()
        finally:
            self._requests.remove()

    def _check_entered(self, method: str) -> None:
        if not self._entered:
            raise UsageError(
                f"run.{method}: expected to be inside the `with` block of the run",
                hint="write `with unbroken.Run(...) as run:` around the training loop",
            )
        if method not in ("micro_batches", "without_saves"):
            self._position.check_not_replayed(method)
        if self._validator is not None and self._validator.is_asking:
            raise UsageError(
                f"run.{method}: expected not to be called in the check of validate=",
                hint="a check looks at the state and says whether it is good; it is no part of training",
            )
