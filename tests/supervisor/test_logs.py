"""The output of a run: all of it, with times, within bounds, by rank, live and compressed."""

from __future__ import annotations

import errno
import gzip
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from unbroken.cli.follow import OutputFollower, OutputReader, first_data, start_of_lines
from unbroken.cli.logs import logs
from unbroken.cli.quantities import parse_duration, parse_size
from unbroken.cli.run import run
from unbroken.errors import UsageError
from unbroken.rundir import layout
from unbroken.rundir.identity import open_run
from unbroken.supervisor.side import errand_process, output_keeping
from unbroken.supervisor.side.output_keeping import (
    OutputKeeper,
    closed_outputs,
    free_beginning,
    separate_ranks,
)
from unbroken.supervisor.side.output_times import OutputTimes, TimesReader
from unbroken.supervisor.watcher import Look, Started

from .conftest import made_records
from .in_process import look

if TYPE_CHECKING:
    from .conftest import Bench

MEBIBYTE = 1 << 20
_COMPRESS = [sys.executable, "-I", "-S", errand_process.__file__, "compress"]


def compress(log: Path) -> None:
    order = json.dumps({"errand": "compress", "path": str(log)})
    subprocess.run(_COMPRESS, input=order, text=True, check=True)


def read_all(log: Path, *, start: int = 0) -> tuple[bytes, int]:
    pieces = list(OutputReader(1, log, start=start).new())
    return b"".join(piece.data for piece in pieces), sum(piece.freed_bytes for piece in pieces)


def made_run(directory: Path, *outputs: bytes) -> Path:
    """A run with these outputs of its attempts; returns the directory of the first."""
    open_run(directory)
    for attempt, content in enumerate(outputs, start=1):
        place = layout.attempt_directory(directory, attempt)
        place.mkdir(parents=True)
        (place / "out.log").write_bytes(content)
    return layout.attempt_directory(directory, 1)


def shown(directory: Path, *options: str) -> bytes:
    done = CliRunner().invoke(logs, [str(directory), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout_bytes


def lines_of(bench: Bench, *options: str) -> list[dict[str, Any]]:
    done = look(bench, "logs", "it", "--json", *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_line_has_the_time_of_the_look_that_saw_it(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import time
        from pathlib import Path
        print("early")
        while not Path("go").exists():
            time.sleep(0.01)
        print("late")
        """,
    )
    assert bench.python(script, "--detach").returncode == 0
    times = bench.directory / "attempts/0001/out.times"
    bench.until(lambda: times.exists() and times.read_text().endswith(" 6\n"))
    between = time.time()
    (bench.place / "go").touch()
    bench.until(lambda: bench.state()["state"] == "done")
    early, late = lines_of(bench)
    assert (early["line"], late["line"]) == ("early", "late")
    assert early["time"] - 0.01 <= between <= late["time"] + 0.01
    stamped = shown(bench.directory, "--timestamps").decode()
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (early|late)\n){2}", stamped)


def test_notes_of_times_are_bounded_and_survive_a_torn_last_one(tmp_path: Path) -> None:
    path = tmp_path / "out.times"
    times = OutputTimes(path, most_notes=10)
    for size in range(1, 40):
        times.note(size * 100, is_last=True)
    assert len(path.read_text().splitlines()) <= 10
    with path.open("a") as file:
        file.write("17645")
    reader = TimesReader(path)
    reader.refresh()
    cut = list(reader.cut(0, 5000, beyond_seconds=7.0))
    assert cut[-1] == (5000, 7.0)
    assert [to for to, _ in cut] == sorted({to for to, _ in cut})
    times = OutputTimes(path, most_notes=10)
    for size in range(40, 60):
        times.note(size * 100, is_last=True)
        reader.refresh()
        assert next(reader.cut(size * 100 - 1, size * 100, beyond_seconds=7.0))[1] > 7.0
    assert list(TimesReader(tmp_path / "none").cut(3, 9, beyond_seconds=7.0)) == [(9, 7.0)]


def test_since_shows_the_lines_written_since_then_over_attempts(tmp_path: Path) -> None:
    long_ago = time.time() - 7200
    first = made_run(tmp_path, b"a\nin 1\n", b"in 2\n")
    (first / "out.times").write_text(f"{long_ago} 2\n{time.time()} 7\n")
    assert shown(tmp_path, "--since", "1h30m") == b"in 1\nin 2\n"
    compress(first / "out.log")
    assert shown(tmp_path, "--since", "1h30m") == b"in 1\nin 2\n"
    os.utime(first / "out.log.gz", (long_ago, long_ago))
    assert shown(tmp_path, "--since", "90m") == b"in 2\n"
    assert CliRunner().invoke(logs, [str(tmp_path), "--since", "soon"]).exit_code == 2


def test_tail_shows_the_last_lines_and_a_bar_counts_as_one(tmp_path: Path) -> None:
    written = b"".join(b"line %d\n" % n for n in range(500)) + b"\r 1%\r 2%\nend\n"
    made_run(tmp_path, written)
    assert shown(tmp_path, "--tail", "3") == b"line 499\n 2%\nend\n"
    assert shown(tmp_path, "--tail", "0") == b""
    assert len(shown(tmp_path, "--tail", "9999").splitlines()) == 502
    assert shown(tmp_path, "--raw") == written
    assert shown(tmp_path, "--raw", "--tail", "2") == b"\r 1%\r 2%\nend\n"


def test_the_place_of_the_last_lines_is_found_from_the_end(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"".join(b"%06d\n" % n for n in range(20_000)) + b"torn")
    assert start_of_lines(log, 2) == 20_000 * 7 - 14
    assert start_of_lines(log, 15_000) == 5_000 * 7
    assert start_of_lines(log, 20_000) == start_of_lines(log, 99_999) == 0
    assert start_of_lines(log, 1, end=21) == 14
    assert start_of_lines(tmp_path / "none", 5) == 0


def test_the_last_lines_are_not_looked_for_in_what_was_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "out.log"
    with log.open("wb") as file:
        file.seek(1 << 30)
        file.write(b"kept\nlines\n")
    with log.open("rb") as file:
        if first_data(file.fileno(), 0) == 0:
            pytest.skip("the file system of the temporary directory keeps no holes")
    reads = []

    def pread(descriptor: int, size: int, position: int) -> bytes:
        reads.append(position)
        return real_pread(descriptor, size, position)

    real_pread = os.pread
    monkeypatch.setattr(os, "pread", pread)
    assert start_of_lines(log, 5) == 0
    assert len(reads) <= 3
    assert read_all(log, start=0) == (b"kept\nlines\n", 1 << 30)


def test_output_larger_than_its_limit_loses_its_oldest_part_and_its_writer_notices_nothing(
    bench: Bench,
) -> None:
    script = bench.script(
        "train.py",
        """
        import time
        from pathlib import Path
        for number in range(7):
            print("\\n".join(f"{number:02} {'x' * 1020}" for _ in range(1024)))
            time.sleep(0.05)
        freed = Path("runs/it/journal.jsonl")
        while "output-freed" not in freed.read_text():
            time.sleep(0.02)
        print("last words")
        """,
    )
    done = bench.python(script, "--log-limit", "4MiB")
    assert done.returncode == 0, done.stderr
    log = bench.directory / "attempts/0001/out.log"
    found = log.stat()
    assert found.st_size == 7 * MEBIBYTE + len("last words\n")
    if found.st_blocks * 512 >= found.st_size:
        pytest.skip("the file system of the temporary directory cannot free a part of a file")
    assert found.st_blocks * 512 <= 5 * MEBIBYTE
    seen = CliRunner().invoke(logs, [str(bench.directory)])
    lines = seen.stdout.splitlines()
    assert lines[-1] == "last words"
    assert lines[-2] == f"06 {'x' * 1020}"
    assert "\0" not in seen.stdout
    assert re.fullmatch(r"\.\.\. \d+\.\d MB of older output freed\n", seen.stderr)
    assert "of older output freed" in done.stderr
    compress(log)
    archived = CliRunner().invoke(logs, [str(bench.directory)])
    assert (archived.stdout, archived.stderr) == (seen.stdout, seen.stderr)


def test_a_reader_that_is_overtaken_skips_what_was_freed(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_bytes(b"a" * 3 * MEBIBYTE + b"b" * MEBIBYTE)
    reader = OutputReader(1, log)
    pieces = reader.new()
    assert next(pieces).data[:1] == b"a"
    try:
        assert free_beginning(log, 3 * MEBIBYTE + 5) == 3 * MEBIBYTE
    except OSError as error:
        pytest.skip(f"the file system of the temporary directory frees no part of a file: {error}")
    rest = list(pieces)
    assert b"".join(piece.data for piece in rest) == b"b" * MEBIBYTE
    assert rest[0].freed_bytes == 3 * MEBIBYTE - (1 << 16)
    assert free_beginning(log, 3 * MEBIBYTE) == 0


def test_closed_outputs_are_compressed_and_read_as_before(bench: Bench) -> None:
    # Each ends in its own way, or the second would be the last.
    command = "seq 20000; a=$UNBROKEN_ATTEMPT; echo in $a; test $a = 3 || exit 1$a"
    assert bench.run("sh", "-c", command).returncode == 0
    attempts = bench.directory / "attempts"
    # The one whose end was judged last is left as it is.
    bench.until(lambda: not (attempts / "0001/out.log").exists() and not (attempts / "0002/out.log").exists())
    assert (attempts / "0003/out.log").exists()
    assert (attempts / "0001/out.log.gz").stat().st_size < 60_000
    expected = [str(number) for number in range(1, 20001)]
    for attempt in (1, 2, 3):
        lines = shown(bench.directory, "--attempt", str(attempt), "--timestamps").decode().splitlines()
        assert [line.split()[-1] for line in lines[:-1]] == expected
        assert lines[-1].endswith(f"in {attempt}")
    assert shown(bench.directory, "--attempt", "1", "--tail", "1") == b"in 1\n"
    assert shown(bench.directory, "--since", "1h").count(b"\n20000\n") == 3
    bench.until(lambda: not bench.strays())


def test_small_outputs_and_the_newest_are_not_compressed(tmp_path: Path) -> None:
    for attempt, size in ((1, 100), (2, 1 << 17), (3, 1 << 17)):
        directory = layout.attempt_directory(tmp_path, attempt)
        directory.mkdir(parents=True)
        (directory / "out.log").write_bytes(b"x" * size)
    assert closed_outputs(tmp_path) == [layout.attempt_directory(tmp_path, 2) / "out.log"]
    assert closed_outputs(tmp_path / "none") == []


def test_a_compression_that_is_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    content = os.urandom(300_000) * 6
    for seconds in (0.08, 0.16):
        if not log.exists():
            log.write_bytes(content)
        process = subprocess.Popen(_COMPRESS, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps({"errand": "compress", "path": str(log)}).encode())
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert read_all(log) == (content, 0)
    compress(log) if log.exists() else None
    assert not log.exists()
    assert gzip.decompress((tmp_path / "out.log.gz").read_bytes()) == content


def test_an_output_that_is_being_compressed_by_another_is_left_to_it(tmp_path: Path) -> None:
    import fcntl

    log = tmp_path / "out.log"
    log.write_bytes(b"x" * 1000)
    with log.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        compress(log)
        assert [path.name for path in tmp_path.iterdir()] == ["out.log"]
    compress(log)
    assert [path.name for path in tmp_path.iterdir()] == ["out.log.gz"]
    assert read_all(log, start=990) == (b"x" * 10, 0)


def test_a_follower_goes_on_reading_while_what_it_reads_is_compressed(tmp_path: Path) -> None:
    directory = layout.attempt_directory(tmp_path, 1)
    directory.mkdir(parents=True)
    log = directory / "out.log"
    log.write_bytes(b"x" * 200_000)
    follower = OutputFollower(tmp_path, 1)
    pieces = follower.new()
    size = len(next(pieces).data)
    compress(log)
    assert size + sum(len(piece.data) for piece in pieces) == 200_000


def test_options_of_torchrun_are_left_to_a_user_who_gives_one(tmp_path: Path) -> None:
    assert separate_ranks({}, tmp_path, 3) == {
        "PET_LOG_DIR": str(tmp_path / "attempts/0003/ranks"),
        "PET_REDIRECTS": "3",
        "PET_TEE": "3",
    }
    assert separate_ranks({"PET_TEE": "1"}, tmp_path, 3) == {}


def test_a_rank_without_output_of_its_own_is_a_usage_error(tmp_path: Path) -> None:
    attempt = made_run(tmp_path, b"all\n")
    assert shown(tmp_path, "--rank", "0") == b"all\n"
    with pytest.raises(UsageError, match="found the output of all ranks together"):
        shown(tmp_path, "--rank", "1")
    place = attempt / "ranks/none_x/attempt_0/0"
    place.mkdir(parents=True)
    (place / "stdout.log").write_text("before\nafter\n")
    (place / "stderr.log").write_text("in trouble\n")
    (place / "stdout.times").write_text("1000 7\n3000 13\n")
    (place / "stderr.times").write_text("2000 11\n")
    assert shown(tmp_path, "--rank", "0") == b"before\nin trouble\nafter\n"
    with pytest.raises(UsageError, match="found ranks 0"):
        shown(tmp_path, "--rank", "1")


@pytest.mark.chaos
def test_torchrun_keeps_the_output_of_each_rank(bench: Bench) -> None:
    pytest.importorskip("torch")
    script = bench.script(
        "train.py",
        """
        import os, sys
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("rank", dist.get_rank(), "was here")
        print("rank", dist.get_rank(), "complained", file=sys.stderr)
        dist.destroy_process_group()
        """,
    )
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = bench.run(sys.executable, *launcher, script)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        lines = [line["line"] for line in lines_of(bench, "--rank", str(rank))]
        assert f"rank {rank} was here" in lines
        assert f"rank {rank} complained" in lines
        assert not any(f"rank {1 - rank}" in line for line in lines)
        assert f"rank {rank} was here" in bench.output()


def test_on_a_terminal_a_bar_is_drawn_in_its_place_while_it_is_followed(bench: Bench) -> None:
    script = bench.script(
        "train.py",
        """
        import sys, time
        from pathlib import Path
        sys.stdout.write("\\x1b[32mgreen\\x1b[0m\\n\\r 10%\\r 20%")
        sys.stdout.flush()
        while not Path("go").exists():
            time.sleep(0.02)
        print("\\r100%")
        """,
    )
    assert bench.python(script, "--detach").returncode == 0
    ours, theirs = pty.openpty()
    follower = bench.popen(bench.command("logs", "-f", "it"), stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    seen = b""
    while b" 20%" not in seen:
        assert select.select([ours], [], [], 20)[0], seen
        seen += os.read(ours, 4096)
    assert b"\x1b[32mgreen\x1b[0m\r\n" in seen
    assert b" 10%" not in seen
    (bench.place / "go").touch()
    assert follower.wait(timeout=20) == 0
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        seen += piece
    os.close(ours)
    assert seen.endswith(b"100%\r\n")


def test_where_nothing_can_be_freed_all_is_kept_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # No file system of test machines is that old.
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(output_keeping, "free_beginning", refuse)
    (tmp_path / "out.log").write_bytes(b"x" * 5 * MEBIBYTE)
    begun = Started(attempt=1, directory=tmp_path, run_directory=tmp_path, leader=1)
    keeper = OutputKeeper(begun, limit_bytes=1, records=made_records(tmp_path))
    for second in range(1000):
        keeper.look(Look(now_seconds=second, beat=None, is_stop_asked=False, has_leader=True))
    keeper.end()
    said = capfd.readouterr().err
    assert said.count("this file system frees no part of a file; all of it is kept") == 1
    assert (tmp_path / "out.log").read_bytes() == b"x" * 5 * MEBIBYTE


def test_sizes_and_durations_are_written_as_people_do() -> None:
    for size in ("lots", "4QB", "-1GB"):
        refused = CliRunner().invoke(run, ["--log-limit", size, "--", "true"])
        assert refused.exit_code == 2
        assert "expected a size such as 500MB" in refused.output
    assert [parse_size(text) for text in ("4096", "500MB", "1.5GiB", "2g")] == [
        4096,
        500_000_000,
        3 << 29,
        2_000_000_000,
    ]
    assert [parse_duration(text) for text in ("90", "90s", "1h30m", "2d", "5x")] == [
        90,
        90,
        5400,
        172800,
        None,
    ]
