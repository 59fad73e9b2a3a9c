"""How a run begins: from the checkpoint it goes on from, or from its own start."""

from __future__ import annotations

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir.last_words import LastWords
from unbroken.rundir.rollbacks import read_rollbacks
from unbroken.training import micro_batches, resume
from unbroken.training.attempt import Attempt
from unbroken.training.importing import begin_from
from unbroken.training.leaving_out import in_words, windows_of
from unbroken.training.ranks.following import follow, led, restored_on_all
from unbroken.training.report import RestoreReport, report
from unbroken.training.saver import Saver
from unbroken.training.saves import without_collecting
from unbroken.training.settings import Settings
from unbroken.training.start_report import StartReport
from unbroken.training.whole_state import WholeState


def begin(
    attempt: Attempt, state: WholeState, saver: Saver, settings: Settings
) -> tuple[RestoreReport | None, StartReport | None, list[str]]:
    """Restore `state` from the checkpoint to go on from, or begin; return the reports, and them in words.

    The first report is None if the run begins anew, the second unless that is from a checkpoint of another
    library. Raises what `resume.choose` and `begin_from` raise.
    """
    store, group = CheckpointStore(attempt.run_directory), state.group
    swept = [*store.sweep(), *attempt.sweep()] if group.is_first else []
    act = without_collecting()(state.restore)
    rollbacks = read_rollbacks(attempt.run_directory)
    state.rollbacks, state.position.windows = len(rollbacks), windows_of(rollbacks)
    if group.is_first:
        on_all = restored_on_all(group, act)
        restoring = resume.Restoring(attempt.directory, on_all, settings.choices.non_finite, rollbacks)
        run_id = attempt.run.run_id
        candidate = led(group, lambda: resume.choose(store, settings.resume, run_id, restoring))
    else:
        followed = follow(group, store, act)
        candidate = None if followed is None else resume.Candidate(*followed, {})
    restored: RestoreReport | None = None
    started: StartReport | None = None
    lines = [f"run {attempt.run.name} begins in {attempt.run_directory}"]
    if candidate is not None:
        saver.begin_from(candidate.checkpoint)
        if group.is_first:
            resume.set_later_aside(store, candidate)
        restored = _reported(candidate, state)
        lines = restored.lines()
    elif (source := settings.start_from) is not None:
        known = [*state.parts]
        started = group.attempted(lambda: begin_from(source, settings.values, settings.choices, known))
        state.step = started.step
        lines += started.lines()
    lines += [*in_words(rollbacks, group.size), *micro_batches.in_words()]
    attempt.journal.append(
        "began",
        step=state.step,
        attempt=attempt.number,
        checkpoint=saver.newest_name,
        swept=swept,
        report=lines,
        restored=None if restored is None else restored.as_json(),
        started_from=None if started is None else started.as_json(),
    )
    attempt.say(LastWords(ending="running", step=state.step, checkpoint=saver.newest_name))
    return restored, started, lines


def _reported(candidate: resume.Candidate, state: WholeState) -> RestoreReport:
    return report(
        candidate.checkpoint,
        candidate.restored,
        passed_over=candidate.passed_over,
        died=candidate.died,
        environment=state.environment,
        config=state.config,
    )
