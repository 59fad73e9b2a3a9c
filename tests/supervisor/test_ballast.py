"""Records of the supervisor on a disk that is full."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.supervisor.side import ballast
from unbroken.supervisor.side.ballast import BALLAST_BYTES, Ballast

from ..durability.disks import MEBIBYTE, FileSystem, room_for_disks
from .conftest import Bench


def test_ballast_takes_real_space_is_given_up_in_pieces_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ballast"
    kept = Ballast(path)
    if not path.exists():
        pytest.skip("the disk of the temporary directory has too little space to set some aside")
    assert path.stat().st_blocks * 512 >= BALLAST_BYTES
    pieces = 0
    while kept.give_up():
        pieces += 1
        assert not path.exists() or path.stat().st_size == BALLAST_BYTES - pieces * 1_000_000
    assert (pieces, path.exists()) == (8, False)
    kept.keep()
    assert not path.exists(), "made again at once, it would take the space that was freed for a record"
    monkeypatch.setattr(ballast, "_TRY_AGAIN_SECONDS", 0.0)
    kept.give_up()
    kept.keep()
    assert path.stat().st_size == BALLAST_BYTES
    kept.remove()
    assert not path.exists()


def test_where_there_can_be_no_ballast_nothing_happens(tmp_path: Path) -> None:
    kept = Ballast(tmp_path / "gone" / "ballast")
    assert not kept.give_up()
    kept.keep()
    kept.remove()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with room_for_disks(tmp_path, "ext4") as place:
        # Without a reserve, which root could use.
        disk = FileSystem("ext4", place / "memory/disk", place / "disk", 128 * MEBIBYTE, "-m", "0")
        disk.mount()
        yield place / "disk"


FILL = """
import os, sys, time
from pathlib import Path
from unbroken.rundir.last_words import LastWords, write_last_words

run = Path(os.environ["UNBROKEN_RUN_DIR"])
here = run / "attempts" / f"{int(os.environ['UNBROKEN_ATTEMPT']):04d}"
descriptor = os.open(run.parent / "other-data", os.O_WRONLY | os.O_CREAT)
for size in (1 << 20, 4096, 1):
    try:
        while True:
            os.write(descriptor, bytes(size))
    except OSError:
        pass
Path(sys.argv[1], "full").touch()
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.02)
raise OSError(28, "No space left on device")
"""


def test_on_a_full_disk_state_verdict_and_journal_are_whole_and_the_run_is_held(
    small_disk: Path, bench: Bench
) -> None:
    run = small_disk / "it"
    script = bench.script("fill.py", FILL)
    command = (sys.executable, script, str(bench.place))
    started = bench.cli("run", "--run-dir", str(run), "--detach", "--max-restarts", "0", "--", *command)
    assert started.returncode == 0, started.stderr
    bench.until((bench.place / "full").exists)
    assert (run / "ballast").stat().st_size == BALLAST_BYTES
    (bench.place / "go").touch()

    def state() -> dict[str, object]:
        value: dict[str, object] = json.loads((run / "supervisor.json").read_text())
        return value

    bench.until(lambda: state()["state"] == "held")
    assert state()["exit_code"] == 78
    assert state()["reason"]
    verdict = json.loads((run / "attempts/0001/verdict.json").read_text())
    assert verdict["outcome"] in ("failed", "vanished", "refused")
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events][-2:] == ["attempt-ended", "run-ended"]
    assert events[-1]["exit_code"] == 78
    status = json.loads(bench.cli("status", str(run), "--json").stdout)
    assert (status["state"], status["exit_code"]) == ("held", 78)
    bench.until(lambda: not bench.strays())
    assert not (run / "ballast").exists()


def test_without_a_ballast_the_same_disk_takes_no_record(small_disk: Path) -> None:
    path = small_disk / "ballast"
    kept = Ballast(path)
    other = os.open(small_disk / "other-data", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError):
        while True:
            os.write(other, bytes(4096))
    os.close(other)
    with pytest.raises(OSError):
        (small_disk / "record").write_bytes(b"x" * 8192)
    assert kept.give_up()
    deadline = time.monotonic() + 5
    while True:
        try:
            (small_disk / "record").write_bytes(b"x" * 8192)
            break
        except OSError:
            assert time.monotonic() < deadline
    assert (small_disk / "record").read_bytes() == b"x" * 8192
