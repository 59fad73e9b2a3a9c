"""`unbroken simulate`: rehearse a failure with a toy job, in seconds."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from unbroken.cli import output
from unbroken.cli.simulations.failures import FAILURES, Failure, Promise, judge
from unbroken.cli.simulations.stage import Stage
from unbroken.cli.simulations.story import Story, read_story
from unbroken.errors import EXIT_ERROR, EXIT_OK


@click.command()
@click.argument("failure", type=click.Choice(list(FAILURES)), metavar="FAILURE")
@click.option("--json", "as_json", is_flag=True, help="JSON: one object.")
def simulate(failure: str, as_json: bool) -> None:
    """Let FAILURE strike a toy job that runs under a real supervisor, and say what happened.

    It takes a few seconds, in a temporary directory, and touches no run of yours.

    \b
    crash            an exception in the middle of training
    oom              memory that runs out, in a memory cgroup where one can be made
    hang             a lock that nobody gives back
    preempt          a spot machine that is taken away, as Amazon announces it
    disk             a disk that is full for a while; needs root, or user namespaces
    kill-supervisor  SIGKILL for the supervisor itself, and `unbroken revive`
    \b
    Fields of --json:
      failure, title
      came_through     whether all promises were kept
      moments          [{seconds (since the start), text, details}] in order
      promises         [{text, is_kept}]
      steps, steps_done_again, seconds

    Exit codes: 0 all promises were kept, 1 one was not.
    """
    wanted = FAILURES[failure]
    if not as_json:
        output.note(f"simulating {failure}: {wanted.title}")
    began = time.time()
    story = _perform(wanted)
    promises = judge(wanted, story)
    seconds = time.time() - began
    if as_json:
        output.data_json(_as_json(failure, wanted, story, promises, began, seconds))
    else:
        _show(story, promises, began)
    came_through = all(promise.is_kept for promise in promises)
    click.get_current_context().exit(EXIT_OK if came_through else EXIT_ERROR)


def _perform(failure: Failure) -> Story:
    with tempfile.TemporaryDirectory(prefix="unbroken-simulate-") as name:
        stage = Stage(Path(name))
        try:
            failure.act(stage)
            return read_story(stage.directory, stage.notes)
        finally:
            stage.leave()


def _show(story: Story, promises: list[Promise], began: float) -> None:
    for moment in story.moments:
        output.data(f"{moment.time - began:6.2f} s  {moment.text}")
        for line in moment.details:
            output.data(f"{'':10}{line}")
    output.data("")
    for promise in promises:
        output.data(f"{'kept' if promise.is_kept else 'BROKEN':<8}{promise.text}")


def _as_json(
    name: str, failure: Failure, story: Story, promises: list[Promise], began: float, seconds: float
) -> dict[str, object]:
    return {
        "failure": name,
        "title": failure.title,
        "came_through": all(promise.is_kept for promise in promises),
        "moments": [
            {
                "seconds": round(moment.time - began, 3),
                "text": moment.text,
                "details": list(moment.details),
            }
            for moment in story.moments
        ],
        "promises": [{"text": promise.text, "is_kept": promise.is_kept} for promise in promises],
        "steps": len(set(story.steps)),
        "steps_done_again": story.steps_done_again,
        "seconds": round(seconds, 3),
    }
