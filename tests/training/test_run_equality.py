"""Equality of runs: equal ones are found equal, and the smallest difference in any place is found."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.manifest import PartEntry, Position
from unbroken.checkpoint.snapshot import Description, HostBuffers, capture
from unbroken.checkpoint.store import CheckpointStore
from unbroken.errors import CheckpointNotFoundError, DamagedError, UsageError
from unbroken.rundir import layout
from unbroken.rundir.journal import Journal
from unbroken.state.table import TensorTable
from unbroken.state.tensors import HostTensor
from unbroken.testing.runs import RunComparison, compare_runs, read_logged_steps

LOSSES = [2.5, 0.1 + 0.2, -0.0, 1e-300, 0.7, 0.6]


def test_a_run_with_repeated_steps_equals_the_undisturbed_one(tmp_path: Path) -> None:
    expected, found = _reference(tmp_path / "a"), _interrupted(tmp_path / "b")
    result = compare_runs(expected, found)
    assert result == RunComparison(steps=6, values=7, repeated_steps=2, tensors=2, differences=())
    assert result.is_identical


def test_the_steps_are_read_in_the_order_in_which_attempts_did_them(tmp_path: Path) -> None:
    logged = read_logged_steps(_interrupted(tmp_path))
    assert [(entry.attempt, entry.step) for entry in logged if entry.kind == "step"] == [
        *((1, step) for step in (1, 2, 3, 4)),
        *((2, step) for step in (3, 4, 5, 6)),
    ]
    assert logged[-1].metrics == {"accuracy": 0.75}


def test_one_flipped_bit_of_a_loss_is_a_difference(tmp_path: Path) -> None:
    expected, found = _reference(tmp_path / "a"), _interrupted(tmp_path / "b")
    _edit_event(found, 2, step=5, loss=_flip_lowest_bit(LOSSES[4]))
    result = compare_runs(expected, found)
    assert not result.is_identical
    assert len(result.differences) == 1
    assert result.differences[0].startswith("step 5: expected loss 0.7 (0x1.6666666666666p-1), found ")


def test_steps_that_a_roll_back_undid_are_not_compared_with_those_done_instead(tmp_path: Path) -> None:
    expected = _reference(tmp_path / "a")
    _log(tmp_path / "b", 1, range(1, 5))
    _append(tmp_path / "b", 1, "step", step=5, epoch=1, metrics={"loss": 1e30})
    _append(tmp_path / "b", 1, "rolled-back", step=4)
    found = _run(tmp_path / "b", [range(5, 7)])
    assert compare_runs(expected, found) == RunComparison(
        steps=6, values=7, repeated_steps=0, tensors=2, differences=()
    )


def test_a_step_that_was_repeated_with_another_loss_is_a_difference(tmp_path: Path) -> None:
    expected, found = _reference(tmp_path / "a"), _interrupted(tmp_path / "b")
    _edit_event(found, 2, step=3, loss=0.0)
    result = compare_runs(expected, found)
    assert result.differences == (
        "step 3, repeated in attempt 2: expected loss -0.0 (-0x0.0p+0), found 0.0 (0x0.0p+0)",
    )


def test_a_loss_that_is_not_a_number_equals_only_another_such(tmp_path: Path) -> None:
    runs = [_reference(tmp_path / name) for name in ("a", "b", "c")]
    for run in runs[:2]:
        _edit_event(run, 1, step=2, loss="nan")
    assert compare_runs(runs[0], runs[1]).is_identical
    assert compare_runs(runs[0], runs[2]).differences[0].startswith("step 2: expected loss 'nan', found ")


def test_several_records_at_one_step_are_compared_in_their_order(tmp_path: Path) -> None:
    runs = [_reference(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        _append(run, 1, "record", step=6, epoch=1, metrics={"other": 3})
    assert compare_runs(*runs).is_identical
    _edit_event(runs[1], 1, step=6, kind="record", other=4)
    assert compare_runs(*runs).differences == ("record at step 6: expected other 3, found 4",)


def test_steps_that_only_one_run_has_are_differences(tmp_path: Path) -> None:
    expected, found = _reference(tmp_path / "a"), _reference(tmp_path / "b")
    _edit_event(found, 1, step=6, new_step=7)
    assert compare_runs(expected, found).differences == ("step 6: missing", "step 7: not expected")


def test_one_flipped_bit_of_a_tensor_is_a_difference(tmp_path: Path) -> None:
    values = bytearray(struct.pack("<4f", *LOSSES[:4]))
    values[6] ^= 1
    expected, found = _reference(tmp_path / "a"), _run(tmp_path / "b", [range(1, 7)], weight=bytes(values))
    assert compare_runs(expected, found).differences == (
        "tensor model/weight: 1 of 16 bytes differ, the first at 6",
    )


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            {"position": Position(epoch=2, inside_epoch=False, loaders=[{"samples": 63}])},
            "position/loaders/0/samples",
        ),
        ({"step": 7}, "step"),
        ({"config": {"lr": 0.2}}, "config/lr"),
        ({"metrics": {"accuracy": 0.5}}, "metrics/accuracy"),
        ({"parts": {"model": PartEntry(handler="h", type="t", state={"lr": 0.1})}}, "part model/state/lr"),
        ({"parts": {"other": PartEntry(handler="h", type="t", state={"lr": 1})}}, "part model"),
    ],
)
def test_any_other_value_of_the_final_state_is_a_difference(
    tmp_path: Path, change: dict[str, Any], difference: str
) -> None:
    found = _run(tmp_path / "b", [range(1, 7)], change=lambda said: dataclasses.replace(said, **change))
    differences = compare_runs(_reference(tmp_path / "a"), found).differences
    assert differences[0].startswith(f"final state, {difference}: ")


def test_a_damaged_final_checkpoint_is_never_passed_over(tmp_path: Path) -> None:
    expected, found = _reference(tmp_path / "a"), _reference(tmp_path / "b")
    shard = next(found.glob("checkpoints/*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0x80
    shard.write_bytes(data)
    with pytest.raises(DamagedError):
        compare_runs(expected, found)


def test_nothing_is_not_equal_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a run that logged steps"):
        compare_runs(tmp_path, tmp_path)
    run = _reference(tmp_path / "a")
    _log(tmp_path / "b", 1, range(1, 7))
    with pytest.raises(CheckpointNotFoundError):
        compare_runs(run, tmp_path / "b")


def _reference(directory: Path) -> Path:
    return _run(directory, [range(1, 7)])


def _interrupted(directory: Path) -> Path:
    return _run(directory, [range(1, 5), range(3, 7)])


def _run(
    directory: Path,
    attempts: list[range],
    *,
    weight: bytes = struct.pack("<4f", *LOSSES[:4]),
    change: Callable[[Description], Description] = lambda said: said,
) -> Path:
    for attempt, steps in enumerate(attempts, start=1):
        _log(directory, attempt, steps)
    _append(directory, len(attempts), "record", step=6, epoch=1, metrics={"accuracy": 0.75})
    table = TensorTable()
    table.add("model/weight", HostTensor("F32", (2, 2), memoryview(weight)))
    table.add("optimizer/count", HostTensor("I64", (), memoryview(struct.pack("<q", 6))))
    # What may differ does: the run, the attempt, the time, the parent, the environment.
    said = Description(
        run_id=directory.name,
        step=6,
        attempt=len(attempts),
        created=f"2026-01-0{len(attempts)}T00:00:00+00:00",
        parent=f"step-0000000{len(attempts)}",
        environment={"directory": str(directory)},
        position=Position(epoch=2, inside_epoch=False, loaders=[{"samples": 64}]),
        config={"lr": 0.1},
        metrics={"accuracy": 0.75},
        parts={"model": PartEntry(handler="h", type="t", state={"lr": 0.25})},
    )
    CheckpointStore(directory).save(capture(change(said), table, HostBuffers()))
    return directory


def _log(directory: Path, attempt: int, steps: range) -> None:
    for step in steps:
        _append(directory, attempt, "step", step=step, epoch=step // 4, metrics={"loss": LOSSES[step - 1]})


def _append(directory: Path, attempt: int, kind: str, **fields: Any) -> None:
    with Journal(_events(directory, attempt)) as journal:
        journal.append(kind, **fields)


def _events(directory: Path, attempt: int) -> Path:
    return layout.attempt_directory(directory, attempt) / layout.events_file()


def _edit_event(directory: Path, attempt: int, *, step: int, kind: str = "step", **changes: Any) -> None:
    """Change the last event of that kind and step in the journal of `attempt`."""
    path = _events(directory, attempt)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    event = [event for event in events if (event["kind"], event["step"]) == (kind, step)][-1]
    event["step"] = changes.pop("new_step", step)
    assert changes.keys() <= event["metrics"].keys()
    event["metrics"].update(changes)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def _flip_lowest_bit(value: float) -> float:
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    (flipped,) = struct.unpack("<d", struct.pack("<q", bits ^ 1))
    assert isinstance(flipped, float)
    return flipped
