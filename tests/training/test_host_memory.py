"""How much of the host's memory is used, by what the kernel says of groups and of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.rundir import host_memory
from unbroken.rundir.control_groups import ControlGroup
from unbroken.rundir.host_memory import MemoryGroup, Use, host_memories, resident_bytes

from ..out_of_memory import MEBIBYTE, Group, memory_group


@pytest.fixture
def group() -> Iterator[Group]:
    with memory_group(160 * MEBIBYTE) as found:
        yield found


def test_what_limits_this_process_can_be_read_here() -> None:
    memories = host_memories()
    assert "this machine's memory" in [memory.name for memory in memories]
    for memory in memories:
        use = memory.read()
        assert use is None or (use.own_bytes > 0 and 0 < use.used_bytes <= use.limit_bytes)
        memory.close()
    assert resident_bytes(os.getpid()) > MEBIBYTE


def test_a_group_of_either_version_counts_without_what_the_kernel_gives_back(tmp_path: Path) -> None:
    """Files as the kernel shows them: 900 of 1000 bytes are charged, 150 of them for files."""
    one, two = tmp_path / "memory/job/step", tmp_path / "job"
    for place in (one, two):
        place.mkdir(parents=True)
    (one / "memory.usage_in_bytes").write_text("900\n")
    (one / "memory.limit_in_bytes").write_text("1000\n")
    (one / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 100\ntotal_active_file 50\n")
    (two / "memory.current").write_text("900\n")
    (two / "memory.max").write_text("1000\n")
    (two / "memory.stat").write_text("anon 700\ninactive_file 90\nactive_file 50\nslab_reclaimable 10\n")
    # One above has no limit, in the way of its version.
    (tmp_path / "memory/job/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory.max").write_text("max\n")
    groups = {"memory": ControlGroup(one, tmp_path / "memory"), "unified": ControlGroup(two, tmp_path)}
    found = list(host_memory._limited(groups))
    assert found == [(one, 1), (two, 2)]
    for directory, version in found:
        memory = MemoryGroup(directory, version)
        assert memory.read() == Use(used_bytes=750, limit_bytes=1000, own_bytes=750)
        memory.close()
    (two / "memory.max").write_text("2000\n")
    memory = MemoryGroup(two, 2)
    assert memory.read() is None
    memory.close()


def test_files_that_the_kernel_can_read_again_do_not_count_as_used(group: Group, tmp_path: Path) -> None:
    memory = MemoryGroup(group.directory, version=1)
    script = """
import sys
with open(sys.argv[1], "wb") as file:
    for _ in range(100):
        file.write(b"x" * (1 << 20))
held = b"y" * (60 << 20)
print("ready", flush=True)
input()
"""
    process = subprocess.Popen(
        group.command([sys.executable, "-c", script, str(tmp_path / "file")]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # Cached pages fill most of the group, and yet it is far from full.
        assert group.used_bytes() > 0.8 * group.limit_bytes
        assert memory.read() is None
    finally:
        process.communicate()
        memory.close()
