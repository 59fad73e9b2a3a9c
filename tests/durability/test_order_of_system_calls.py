"""What a real save and prune ask of the system, in which order, seen from outside."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = [
    *("openat", "write", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync"),
    *("rename", "renameat", "renameat2", "link", "linkat", "mkdir", "mkdirat", "unlink", "unlinkat", "rmdir"),
]
WRITES = {"write", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate"}
SYNCS = {"fsync", "fdatasync"}
REMOVALS = {"unlink", "unlinkat", "rmdir"}
COMMITTED = re.compile(r"/checkpoints/step-\d{8}(/|$)")
HIDDEN = re.compile(r"/checkpoints/\.unbroken-tmp-[0-9a-f]+(/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that succeeded; `paths` are those of its arguments, of descriptors, too."""

    name: str
    paths: tuple[str, ...]
    words: str

    @property
    def makes(self) -> str | None:
        """The path that this call gave a name in its directory."""
        if self.name in ("mkdir", "mkdirat", "link", "linkat"):
            return self.paths[-1]
        return self.paths[-1] if self.name == "openat" and "O_CREAT" in self.words else None

    @property
    def writes(self) -> str | None:
        return self.paths[0] if self.name in WRITES and self.paths else None

    @property
    def is_report(self) -> bool:
        return self.name == "write" and self.words.startswith("1<")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Five saves, each but the first two followed by a prune."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace to see the system calls")
    place = tmp_path_factory.mktemp("traced")
    if subprocess.run(["strace", "-o", place / "try", "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace here")
    # A question mark for calls that this machine does not have.
    which = "trace=" + ",".join(f"?{name}" for name in CALLS)
    saver = [sys.executable, "-m", "tests.durability.saver", str(place / "run"), "1", "5"]
    trace = ["strace", "-f", "-y", "-s", "300", "-e", which, "-o", str(place / "trace"), *saver]
    subprocess.run(trace, check=True, capture_output=True, cwd=ROOT)
    found = parse((place / "trace").read_text(), str(place))
    assert sum("step-" in call.words for call in found if call.is_report) == 5
    return found


def parse(trace: str, place: str) -> list[Call]:
    """Return the calls on paths in `place` and the reports on stdout, each where it ended."""
    begun: dict[str, str] = {}
    found = []
    for line in trace.splitlines():
        process, _, words = line.partition(" ")
        words = words.strip()
        if words.endswith("<unfinished ...>"):
            begun[process] = words.removesuffix("<unfinished ...>")
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", words)
        if resumed:
            words = begun.pop(process) + resumed[1]
        call = re.match(r"(\w+)\((.*)\)\s+= (\d+)", words)
        if call is None:
            continue
        name, arguments = call[1], call[2]
        paths = tuple(path for path in re.findall(r'[<"](/[^">]*)', arguments) if path.startswith(place))
        if paths or (name == "write" and arguments.startswith("1<")):
            found.append(Call(name=name, paths=paths, words=arguments))
    return found


def renames(calls: list[Call], source: str, target: re.Pattern[str]) -> list[tuple[int, str, str]]:
    """Return `(index, source, target)` of the renames from a name with `source` to one like `target`."""
    return [
        (at, *call.paths)
        for at, call in enumerate(calls)
        if call.name.startswith("rename") and source in call.paths[0] and target.search(call.paths[1])
    ]


def last(calls: list[Call], before: int, is_it: list[str]) -> int:
    return max(at for at, call in enumerate(calls[:before]) if call.name in is_it)


def test_each_staged_file_is_synced_after_its_last_write_and_before_the_commit(calls: list[Call]) -> None:
    commits = renames(calls, "/.staging-", COMMITTED)
    assert len(commits) == 5
    for commit, staging, _ in commits:
        files = {call.writes for call in calls[:commit] if call.writes and call.writes.startswith(staging)}
        assert len(files) >= 3
        for file in files:
            written = max(at for at, call in enumerate(calls[:commit]) if call.writes == file)
            assert is_synced(calls[written:commit], file), file


def is_synced(calls: list[Call], path: str) -> bool:
    return any(call.name in SYNCS and call.paths == (path,) for call in calls)


def test_the_staging_directory_is_synced_after_its_last_entry_and_before_the_commit(
    calls: list[Call],
) -> None:
    for commit, staging, _ in renames(calls, "/.staging-", COMMITTED):
        entries = [
            at for at, call in enumerate(calls[:commit]) if (call.makes or "").startswith(f"{staging}/")
        ]
        assert len(entries) >= 4
        assert is_synced(calls[entries[-1] : commit], staging)


def test_the_parent_is_synced_after_the_commit_and_before_the_save_is_reported(calls: list[Call]) -> None:
    for commit, _, target in renames(calls, "/.staging-", COMMITTED):
        name = Path(target).name
        reported = next(
            at for at, call in enumerate(calls) if call.words.startswith("1<") and name in call.words
        )
        assert is_synced(calls[commit:reported], str(Path(target).parent))


def test_the_directory_of_the_checkpoints_is_synced_into_the_run_before_the_first_report(
    calls: list[Call],
) -> None:
    first = next(at for at, call in enumerate(calls) if call.is_report)
    made = next(at for at, call in enumerate(calls) if (call.makes or "").endswith("/checkpoints"))
    assert is_synced(calls[made:first], str(Path(str(calls[made].makes)).parent))


def test_nothing_inside_a_committed_checkpoint_is_ever_written_or_opened_for_writing(
    calls: list[Call],
) -> None:
    for call in calls:
        inside = [path for path in call.paths if COMMITTED.search(path)]
        is_for_writing = call.name == "openat" and re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC)", call.words)
        if call.name in WRITES or is_for_writing or call.makes in inside:
            assert not inside, call


def test_a_pruned_checkpoint_is_renamed_away_and_that_is_synced_before_anything_in_it_is_removed(
    calls: list[Call],
) -> None:
    prunes = [found for found in renames(calls, "/step-", HIDDEN) if COMMITTED.search(found[1])]
    assert len(prunes) == 3
    for pruned, source, hidden in prunes:
        removed = [at for at, call in enumerate(calls) if call.name in REMOVALS and hidden in call.paths[-1]]
        assert len(removed) >= 5
        assert is_synced(calls[pruned : removed[0]], str(Path(source).parent))
    for call in calls:
        assert call.name not in REMOVALS or HIDDEN.search(call.paths[-1]), call


def test_a_shard_that_did_not_change_is_shared(calls: list[Call]) -> None:
    assert [call.name for call in calls if call.name.startswith("link")] == ["linkat"]
