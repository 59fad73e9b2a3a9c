"""Train twice, once in peace and once through real disasters, and prove that nothing differs.

make demo, or: python demo/run_demo.py [--seed N] [--example digits|characters] [--output DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import table
from disasters import Event, plan_disasters, strike
from leftovers import damaged_checkpoints, stray_files
from picture import Losses, Story, page
from trainer import MARK, Deadline, DemoError, SupervisedRun, Trainer, marked_processes, nothing_left_running

from unbroken.errors import UnbrokenError
from unbroken.rundir import layout
from unbroken.rundir.journal import number
from unbroken.testing.runs import LoggedStep, RunComparison, compare_runs, read_logged_steps

_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_EPOCHS = {"digits": 12, "characters": 5}
_SAVE_EVERY = 20
_TRAINING_SECONDS = 150.0
_COMMAND_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the demo writes."""

    output: Path

    @property
    def undisturbed(self) -> Path:
        return self.output / "undisturbed"

    @property
    def disturbed(self) -> Path:
        return self.output / "disturbed"

    @property
    def picture(self) -> Path:
        return self.output / "loss-curve.html"

    @property
    def user_state(self) -> Path:
        return self.output / "user-state"

    def clear(self) -> None:
        """Remove what an earlier demo wrote here, and only that."""
        self.output.mkdir(parents=True, exist_ok=True)
        self.picture.unlink(missing_ok=True)
        for directory in (self.undisturbed, self.disturbed, self.user_state):
            if directory.exists():
                shutil.rmtree(directory)


def main() -> int:
    """Run the demo and return its exit code: 0 only if everything is bit-identical."""
    options = _parse()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    places = Places(output=options.output.resolve())
    try:
        with nothing_left_running(str(places.output)):
            places.clear()
            return _demo(options.example, options.seed, places)
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has been ended")
        return 128 + signal.SIGINT
    except (DemoError, UnbrokenError) as error:
        print(f"\nfailed: {error}")
        return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train through real disasters; prove that nothing differs.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument("--example", choices=sorted(_EPOCHS), default="digits")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    return parser.parse_args()


def _leave(signal_number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


def _demo(example: str, seed: int, places: Places) -> int:
    print(f"example {example}, seed {seed} (--seed {seed} plans the same disasters again)\n")
    trainer = Trainer(command=_command(example), environment=_environment(places))
    print("1. the undisturbed run: ", end="", flush=True)
    began = time.monotonic()
    trainer.run_plainly(places.undisturbed, Deadline("the undisturbed run", _TRAINING_SECONDS))
    logged = read_logged_steps(places.undisturbed)
    steps = max(entry.step for entry in logged)
    print(f"{steps:,} steps in {time.monotonic() - began:.0f} s\n")

    print("2. the same command under `unbroken run`, with disasters\n")
    began = time.monotonic()
    run = SupervisedRun(trainer, places.disturbed)
    events = _disturb(run, seed, steps)
    again = table.steps_done_again(events)
    print(f"\n   done in {time.monotonic() - began:.0f} s; {again:,} steps were done twice\n")

    print("3. what is left")
    _check_end(run, str(places.output))
    result = compare_runs(places.undisturbed, places.disturbed)
    story = _story(example, result, places, events)
    places.picture.write_text(page(story), encoding="utf-8")
    print(f"   the picture: {os.path.relpath(places.picture)}\n")
    print(story.verdict)
    return 0 if result.is_identical else 1


def _command(example: str) -> tuple[str, ...]:
    script = _EXAMPLES / example / "train.py"
    options = {"--epochs": _EPOCHS[example], "--save-every": _SAVE_EVERY}
    return (sys.executable, str(script), *(str(word) for pair in options.items() for word in pair))


def _environment(places: Places) -> dict[str, str]:
    # The demo itself may have been started by `unbroken run`; its run is not ours.
    ours = (layout.RUN_DIR_VARIABLE, layout.ATTEMPT_VARIABLE)
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    return {
        **inherited,
        MARK: str(places.output),
        "XDG_STATE_HOME": str(places.user_state),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _disturb(run: SupervisedRun, seed: int, steps: int) -> list[Event]:
    """Run it through all disasters to its end, saying what happens as it does."""
    plan = plan_disasters(seed, steps, save_every=_SAVE_EVERY)
    chance = random.Random(seed)
    print(f"   {table.header()}")
    run.start(Deadline("starting the supervised run", _COMMAND_SECONDS))
    events: list[Event] = []
    for disaster in plan:
        for event in strike(run, disaster, chance):
            events.append(event)
            print(f"   {table.row(len(events), event)}", flush=True)
    Deadline("training to the end", _TRAINING_SECONDS).wait(lambda: not run.state.is_live)
    return events


def _check_end(run: SupervisedRun, mark: str) -> None:
    """Raise unless the run is done, its checkpoints intact, and nothing is there that should not be."""
    shown = run.unbroken(
        *("status", "--json", str(run.directory)), deadline=Deadline("unbroken status", _COMMAND_SECONDS)
    )
    status = json.loads(shown)
    if (status["state"], status["exit_code"]) != ("done", 0):
        raise DemoError(f"the run should be done, and is {status['state']}: {status['reason']}")
    print("   unbroken status: done, exit code 0")
    # Reporting its end is the last thing a supervisor does, not the end of its process.
    Deadline("the end of the supervisor", _COMMAND_SECONDS).wait(lambda: not marked_processes(mark))
    strays = stray_files(run.directory)
    damaged = damaged_checkpoints(run.directory)
    if strays or damaged:
        raise DemoError(
            f"left over: {', '.join(strays) or 'nothing'}; damaged: {', '.join(damaged) or 'none'}"
        )
    print("   no process, no half-written checkpoint, no stray file; every checkpoint intact")


def _story(example: str, result: RunComparison, places: Places, events: Sequence[Event]) -> Story:
    attempts: dict[int, list[LoggedStep]] = {}
    for entry in read_logged_steps(places.disturbed):
        attempts.setdefault(entry.attempt, []).append(entry)
    return Story(
        title=f"Training through {len(events)} disasters: {example}",
        verdict=verdict(result),
        is_identical=result.is_identical,
        reference=losses(read_logged_steps(places.undisturbed)),
        attempts=[losses(entries) for entries in attempts.values()],
        events=events,
    )


def verdict(result: RunComparison) -> str:
    """Return the outcome of the comparison in one line."""
    if result.is_identical:
        return (
            f"bit-identical: {result.steps:,} losses and {result.tensors} tensors "
            "equal those of the undisturbed run"
        )
    more = len(result.differences) - 1
    return f"NOT identical: {result.differences[0]}" + (f" (and {more:,} more)" if more else "")


def losses(logged: Sequence[LoggedStep]) -> Losses:
    """Return `(step, loss)` for each step that has a loss."""
    found = [(entry.step, number(entry.metrics.get("loss"))) for entry in logged if entry.kind == "step"]
    return [(step, loss) for step, loss in found if loss is not None]


if __name__ == "__main__":
    sys.exit(main())
