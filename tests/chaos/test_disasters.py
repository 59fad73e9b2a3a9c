"""A supervised run to which everything happens, again and again: the result is that of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.store import CheckpointStore
from unbroken.rundir import layout
from unbroken.testing.runs import compare_runs

from ..durability.disks import MEBIBYTE, FileSystem, room_for_disks
from ..supervisor.conftest import Bench
from .disasters import DISASTERS, World

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 1400 << 20
# What the verdict on an attempt must say where there is proof of it, by what befell the attempt.
PROOFS = {
    "kill trainer": ("killed", "SIGKILL"),
    "crash trainer": ("signalled", "SIGSEGV"),
    "preempt trainer": ("stopped", ""),
    "eat all memory": ("killed", "out-of-memory"),
    "stop and start again": ("stopped", ""),
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    bench = Bench(tmp_path)
    with room_for_disks(tmp_path, "ext4") as place, memory_group() as group:
        # Without blocks that root alone may use: full is full.
        disk = FileSystem("ext4", place / "memory/disk.img", place / "disk", 192 * MEBIBYTE, "-m", "0")
        disk.mount()
        try:
            yield World(bench=bench, directory=place / "disk/run", place=tmp_path, group=group)
        finally:
            bench.sweep()
            disk.unmount()


@contextmanager
def memory_group() -> Iterator[Path | None]:
    """Yield a group with a limit of its own, or None where there can be none."""
    group = MEMORY / f"unbroken-disasters-{os.getpid()}"
    if not os.access(MEMORY / "cgroup.procs", os.W_OK):
        yield None
        return
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    try:
        yield group
    finally:
        for below in sorted(group.rglob("*"), reverse=True):
            if below.is_dir():
                below.rmdir()
        group.rmdir()


def survive(world: World, names: list[str], seed: int) -> None:
    world.dice = random.Random(seed)
    world.start()
    for name in names:
        world.befall(name)
    last = world.finish(steps=20)

    assert not (world.place / "two-trainers").exists()
    store = CheckpointStore(world.directory)
    assert all(store.get(name).verify().is_intact for name in store.names())
    assert not (world.directory / layout.QUARANTINE).exists()
    for name, attempt in world.history:
        check_reason(world, name, attempt)
    expected = undisturbed(world, last)
    comparison = compare_runs(expected, world.directory)
    assert comparison.differences == ()
    print(f"\n{len(names)} disasters, {world.attempt()} attempts, {last} steps, all equal")


def check_reason(world: World, name: str, attempt: int) -> None:
    """The reason of each end is known where there is proof of it."""
    if name not in PROOFS:
        return
    path = layout.attempt_directory(world.directory, attempt) / layout.VERDICT_FILE
    verdict: dict[str, Any] = json.loads(path.read_text())
    outcome, kind = PROOFS[name]
    assert verdict["outcome"] == outcome, (name, verdict)
    assert kind in ("", verdict["kind"]), (name, verdict)


def undisturbed(world: World, last: int) -> Path:
    directory = world.place / "expected"
    (world.place / "last-step").write_text(str(last))
    environment = {**world.bench.environment, layout.RUN_DIR_VARIABLE: str(directory)}
    done = subprocess.run(world.command(), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return directory


def rounds(world: World, count: int) -> list[str]:
    """Every disaster that can be made here, in random order, again and again."""
    possible = [name for name in DISASTERS if name != "eat all memory" or world.group is not None]
    dice, names = random.Random(count), []
    while len(names) < count:
        names += dice.sample(possible, len(possible))
    return names[:count]


@pytest.mark.chaos
@pytest.mark.parametrize("name", DISASTERS)
def test_each_disaster_leaves_the_result_as_it_would_have_been(world: World, name: str) -> None:
    if name == "eat all memory" and world.group is None:
        pytest.skip("needs a memory group that this user may make")
    survive(world, [name, name], seed=1)


@pytest.mark.chaos
def test_two_hundred_disasters_leave_the_result_as_it_would_have_been(world: World) -> None:
    survive(world, rounds(world, 200), seed=2)
