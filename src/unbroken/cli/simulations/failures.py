"""The failures that can be rehearsed: what each does to the job, and what must come of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from unbroken.cli.simulations.job import HURT_IN_STEP, SAVE_EVERY, undisturbed_value, write_job
from unbroken.cli.simulations.memory_group import memory_group
from unbroken.cli.simulations.metadata_service import metadata_service
from unbroken.cli.simulations.small_disk import fill, small_disk
from unbroken.cli.simulations.stage import Stage
from unbroken.cli.simulations.story import Story
from unbroken.rundir.heartbeat import DISK_FULL

STEPS = 40
_STEPS_BEFORE = 15
_NOTICE_SECONDS = 120.0
_WAIT_SECONDS = 1.0
_RESUMED_AFTER = (HURT_IN_STEP - 1) // SAVE_EVERY * SAVE_EVERY


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Something that a run has to keep to, and whether this one did."""

    text: str
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`title` says what strikes, `act` lets it, `promises` are those of this failure alone."""

    title: str
    act: Callable[[Stage], None]
    promises: Callable[[Story], Iterable[Promise]]
    steps: int = STEPS


def judge(failure: Failure, story: Story) -> list[Promise]:
    """Return all promises, those of every failure first."""
    steps = failure.steps
    is_same = story.final_value == undisturbed_value(steps)
    return [
        Promise(
            text="the run came to its end by itself", is_kept=(story.state, story.exit_code) == ("done", 0)
        ),
        Promise(
            text=f"each of its {steps} steps is done", is_kept=set(story.steps) == set(range(1, steps + 1))
        ),
        Promise(text="its result is that of a run that nothing happens to, bit for bit", is_kept=is_same),
        *failure.promises(story),
    ]


def _crash(stage: Stage) -> None:
    write_job(stage.job, hurt='raise RuntimeError("the data server did not answer")', steps=STEPS)
    stage.start()
    stage.until_ended()


def _after_crash(story: Story) -> Iterable[Promise]:
    yield _told(story, "the exception is named, with the place where it was raised", outcome="failed")
    yield from _restarted(story)


def _oom(stage: Stage) -> None:
    group = stage.resources.enter_context(memory_group())
    if group is None:
        stage.note(
            "stand-in: no memory cgroup can be made here, so that the job kills itself by SIGKILL",
            "what the kernel does to a process for want of memory looks the same from outside, but for "
            "the kernel's counters, which say here that it was not that",
        )
        write_job(stage.job, hurt="os.kill(os.getpid(), signal.SIGKILL)", steps=STEPS)
        stage.start()
    else:
        hurt = "taken = []\nwhile True:\n    taken.append(os.urandom(1) * (1 << 20))"
        write_job(stage.job, hurt=hurt, steps=STEPS)
        stage.start(through=group.through)
    stage.until_ended()


def _after_oom(story: Story) -> Iterable[Promise]:
    if any(moment.text.startswith("stand-in") for moment in story.moments):
        yield _told(story, "the SIGKILL is told", outcome="killed")
    else:
        yield _told(story, "the kernel's kill is told from any other SIGKILL", cause="memory")
    yield from _restarted(story)


def _hang(stage: Stage) -> None:
    write_job(stage.job, hurt="lock = threading.Lock()\nlock.acquire()\nlock.acquire()", steps=STEPS)
    stage.start("--hang-after", "1.5")
    stage.until_ended()


def _after_hang(story: Story) -> Iterable[Promise]:
    yield _told(story, "it is told as a hang", outcome="hung")
    evidence = " ".join(story.verdicts[0].get("evidence", ())) if story.verdicts else ""
    yield Promise(text="the function that it hung in is named", is_kept="hurt" in evidence)
    yield from _restarted(story)


def _preempt(stage: Stage) -> None:
    announced: list[float] = []

    def interrupted_at() -> float | None:
        beat = stage.beat()
        if not announced and beat is not None and beat.step >= _STEPS_BEFORE:
            announced.append(time.time() + _NOTICE_SECONDS)
            stage.note("the metadata service announces that the machine is taken away in two minutes")
        return announced[0] if announced else None

    # The service is asked every five seconds.
    write_job(stage.job, steps=STEPS, step_seconds=0.15)
    with metadata_service(interrupted_at) as url:
        stage.start("--notices", "aws", environment={"UNBROKEN_METADATA_URL": url})
        stage.until_ended()
    stage.note("the same command, on the next machine")
    write_job(stage.job, steps=STEPS)
    stage.start("--notices", "off")
    stage.until_ended()


def _after_preemption(story: Story) -> Iterable[Promise]:
    saved = {"outcome": "stopped", "is_saved": True, "cause": "preemption"}
    yield _told(story, "it saved and stopped before the machine was gone", **saved)
    yield Promise(
        text="it went on from there, no step done twice",
        is_kept=len(story.verdicts) == 2 and story.steps_done_again == 0,
    )


def _disk(stage: Stage) -> None:
    disk = stage.place / "disk"
    disk.mkdir()
    stage.resources.enter_context(small_disk(disk))
    stage.directory = disk / "run"
    write_job(stage.job, steps=STEPS, step_seconds=0.05)
    stage.start()
    stage.until_step(_STEPS_BEFORE)
    filler = fill(disk)
    stage.note("the disk is full: another program has taken all that was free")
    stage.until(lambda: (beat := stage.beat()) is not None and beat.phase == DISK_FULL, "a pause")
    stage.note("training waits: `unbroken status` shows the phase disk-full")
    time.sleep(_WAIT_SECONDS)
    filler.unlink()
    stage.note("there is space again")
    stage.until_ended()


def _after_full_disk(story: Story) -> Iterable[Promise]:
    yield Promise(
        text="it went on by itself: it was not restarted, and no step was done twice",
        is_kept=len(story.verdicts) == 1 and story.steps_done_again == 0,
    )


def _kill_supervisor(stage: Stage) -> None:
    write_job(stage.job, steps=STEPS, step_seconds=0.06)
    stage.start()
    stage.until_step(_STEPS_BEFORE // 2)
    supervisor = stage.supervisor_state()["supervisor"]["process_id"]
    os.kill(supervisor, signal.SIGKILL)
    stage.note(f"the supervisor, process {supervisor}, is ended by SIGKILL")
    stage.until_step(_STEPS_BEFORE)
    stage.note(f"without one, the job has come to step {_STEPS_BEFORE}")
    stage.call("revive", str(stage.directory))
    stage.until_ended()


def _after_kill_of_supervisor(story: Story) -> Iterable[Promise]:
    yield _told(story, "how it ended is known for certain", outcome="completed", confidence="certain")
    yield Promise(
        text="the job ran on, as the same process: it was not restarted, and no step was done twice",
        is_kept=len(story.verdicts) == 1 and story.steps_done_again == 0,
    )


def _told(story: Story, text: str, **expected: object) -> Promise:
    verdict = story.verdicts[0] if story.verdicts else {}
    is_kept = all(verdict.get(name) == value for name, value in expected.items())
    return Promise(text=text, is_kept=is_kept and bool(verdict.get("evidence")))


def _restarted(story: Story) -> Iterable[Promise]:
    yield Promise(text="it was restarted once", is_kept=len(story.verdicts) == 2)
    resumed = story.resumed_at[1:] == (_RESUMED_AFTER,)
    again = HURT_IN_STEP - 1 - _RESUMED_AFTER
    yield Promise(text=f"it went on from its newest checkpoint, after step {_RESUMED_AFTER}", is_kept=resumed)
    yield Promise(
        text=f"no more was lost than since then: {again} steps are done again",
        is_kept=story.steps_done_again == again,
    )


FAILURES: dict[str, Failure] = {
    "crash": Failure(title="an exception in the middle of training", act=_crash, promises=_after_crash),
    "oom": Failure(title="memory that runs out", act=_oom, promises=_after_oom),
    "hang": Failure(title="a lock that nobody gives back", act=_hang, promises=_after_hang),
    "preempt": Failure(title="a spot machine that is taken away", act=_preempt, promises=_after_preemption),
    "disk": Failure(title="a disk that is full for a while", act=_disk, promises=_after_full_disk),
    "kill-supervisor": Failure(
        title="SIGKILL for the supervisor itself",
        act=_kill_supervisor,
        promises=_after_kill_of_supervisor,
    ),
}
