"""Compare a checkpoint by unbroken with its peers, each measurement in a fresh process.

python benchmarks/run_all.py [--quick] [--only save,load] [--states gpt,small] [--peers torch.save,DCP]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import machine
import plan
from peers import ENTRIES, OURS
from states import STATES
from table import tables

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LONGEST_SECONDS = 1800
LONGEST_REASON = 160


class ChildFailedError(Exception):
    """A measuring process ended without a measurement; the message is its last word."""


def main() -> None:
    given = _arguments()
    work = given.directory or HERE.parent / "build"
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=work) as scratch:
        for measurement in given.only:
            results = measure(measurement, given, Path(scratch))
            print("\n".join(tables(results)), flush=True)


def measure(measurement: str, given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run all cases of a measurement, keep the results after each repetition, and return them."""
    results: dict[str, Any] = {
        "measurement": measurement,
        "quick": given.quick,
        "repetitions": given.repetitions,
        "machine": machine.facts(scratch),
        "left_out": [],
        "runs": [],
    }
    for group in plan.groups(measurement, states=given.states, peers=given.peers, is_quick=given.quick):
        for repetition in range(given.repetitions):
            take_turns(group, repetition, results, partial(run_case, scratch=scratch, wait=given.quiet_wait))
            if given.results:
                _keep(results, given.results)
    return results


def take_turns(
    group: plan.Group,
    repetition: int,
    results: dict[str, Any],
    run: Callable[[plan.Case], list[dict[str, Any]]],
) -> None:
    """Run every case of `group` once and add to `results`; a case that failed before is left out."""
    # Alternating, so that a slow hour of the machine hits all alike; in no fixed order, so that nobody
    # always comes after the same neighbour.
    for case in random.Random(repetition).sample(group, len(group)):
        if any(gone["label"] == case.label for gone in results["left_out"]):
            continue
        _tell(f"{results['measurement']} {repetition + 1}/{results['repetitions']} {case.label}")
        try:
            results["runs"] += [{"repetition": repetition, **found} for found in run(case)]
        except ChildFailedError as error:
            _tell(f"  left out: {error}")
            gone = {"label": case.label, "peer": case.peer, "state": case.state, "reason": str(error)}
            results["left_out"].append(gone)


def run_case(case: plan.Case, *, scratch: Path, wait: float) -> list[dict[str, Any]]:
    """Run the processes of `case` in an empty directory and return what they measured."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    common = ["--directory", str(directory), "--quiet-wait", str(wait)]
    try:
        runs = [run_child([str(HERE / name), *options, *common]) for name, *options in case.commands]
    finally:
        shutil.rmtree(directory)
    return [run for run in runs if not run.get("made")]


def run_child(command: list[str]) -> dict[str, Any]:
    """Run a measuring process and return the line it prints. Raises ChildFailedError."""
    # Files, not pipes: a worker that it leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=output,
            stderr=errors,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        output.seek(0)
        errors.seek(0)
        if code == 0:
            line: dict[str, Any] = json.loads(output.read().strip().splitlines()[-1])
            return line
        end = f"not done after {LONGEST_SECONDS} s" if code is None else f"exit status {code}"
        raise ChildFailedError(_last_word(errors.read()) or end)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a measuring process: its session is its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of a measuring process: on the CPU, quiet, and in no supervised run."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("UNBROKEN_")}
    return {
        **ours,
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONWARNINGS": "ignore",
    }


def _last_word(errors: str) -> str:
    """Return the last line without the places of this machine, which are nobody's business."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return re.sub(r"(?<!\w)/[^\s'\"]*/", ".../", lines[-1])[:LONGEST_REASON] if lines else ""


def _keep(results: dict[str, Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{results['measurement']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="states fifty times smaller: does it all work?")
    parser.add_argument("--repetitions", type=int, metavar="N", help="5, or 1 if quick")
    parser.add_argument("--only", default=",".join(plan.MEASUREMENTS), help="the measurements")
    parser.add_argument("--states", default=",".join(STATES), help="the states of save and load")
    parser.add_argument("--peers", default=",".join(ENTRIES), help="the peers")
    parser.add_argument("--directory", type=Path, help="where to write (default: build/ of this repository)")
    parser.add_argument("--results", type=Path, help=f"where to keep results (default: {RESULTS.name}/)")
    parser.add_argument(
        "--quiet-wait", type=float, metavar="SECONDS", help="how long to wait for a quiet moment (25)"
    )
    given = parser.parse_args()
    given.only = _chosen(parser, given.only.split(","), plan.MEASUREMENTS)
    given.states = _chosen(parser, given.states.split(","), STATES)
    # Everything is compared with it.
    given.peers = _chosen(parser, [OURS, *given.peers.split(",")], ENTRIES)
    given.repetitions = given.repetitions or (1 if given.quick else 5)
    given.quiet_wait = given.quiet_wait if given.quiet_wait is not None else (1 if given.quick else 25)
    # A quick run says whether all of it works; its numbers are not worth keeping.
    given.results = given.results or (None if given.quick else RESULTS)
    return given


def _chosen(parser: argparse.ArgumentParser, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    chosen, allowed = tuple(names), tuple(known)
    for name in chosen:
        if name not in allowed:
            parser.error(f"expected some of {', '.join(allowed)}, found {name!r}")
    return chosen


if __name__ == "__main__":
    main()
