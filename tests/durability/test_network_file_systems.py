"""What network and other file systems do that local ones do not, injected into the system calls."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unbroken.checkpoint.retention import KeepLast
from unbroken.checkpoint.store import CheckpointStore
from unbroken.checkpoint.writer import write_checkpoint
from unbroken.errors import StorageError
from unbroken.storage.local import LocalStorage
from unbroken.testing.faults import Rule, SystemCall, system_calls

from ..checkpoint.states import snapshot_at, state_at


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def refuses(name: str, number: int, when: Callable[[SystemCall], bool] = lambda call: True) -> Rule:
    """It has no such thing."""

    def rule(call: SystemCall) -> Any:
        if call.name == name and when(call):
            raise error(number)
        return call.make()

    return rule


def loses_the_answer(name: str, number: int) -> Rule:
    """The call is done, its answer lost; asked again, the server finds it done and says that it failed."""

    def rule(call: SystemCall) -> Any:
        result = call.make()
        if call.name == name:
            raise error(number)
        return result

    return rule


def forgets_once(name: str) -> Rule:
    """The first of these calls meets an outdated handle."""
    left = [True]

    def rule(call: SystemCall) -> Any:
        if call.name == name and left:
            left.clear()
            raise error(errno.ESTALE)
        return call.make()

    return rule


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    made = LocalStorage(tmp_path / "run")
    made.write("old/value", [b"old"])
    return made


def test_a_rename_that_was_done_but_is_said_to_have_failed_counts_as_done(storage: LocalStorage) -> None:
    with system_calls(loses_the_answer("rename", errno.ENOENT)):
        storage.write("old/value", [b"new"])
        storage.stage(".staging/1", [b"one"])
        storage.move(".staging", "new")
        assert storage.read("old/value") == b"new"
        assert storage.read("new/1") == b"one"
        storage.delete("new")
    assert os.listdir(storage.root) == ["old"]


def test_a_link_that_was_made_but_is_said_to_exist_counts_as_made(storage: LocalStorage) -> None:
    with system_calls(loses_the_answer("link", errno.EEXIST)):
        assert storage.link("old/value", ".staging/1")
    assert storage.read(".staging/1") == b"old"


def test_a_directory_that_was_made_but_is_said_to_exist_is_synced_when_it_is_published_in(
    storage: LocalStorage,
) -> None:
    with system_calls(loses_the_answer("mkdir", errno.EEXIST)) as made:
        storage.write("new/1", [b"one"])
    assert made[-2].name == "open"
    assert made[-2].arguments[0] == storage.root
    assert made[-1].name == "fsync"
    assert storage.read("new/1") == b"one"


def test_a_file_that_was_removed_but_is_said_to_be_absent_counts_as_removed(storage: LocalStorage) -> None:
    with system_calls(loses_the_answer("unlink", errno.ENOENT)):
        storage.delete("old/value")
        storage.write("t/1", [b"one"])
        storage.delete("t")
    assert storage.list("old") == []
    assert storage.list() == ["old"]


@pytest.mark.parametrize("name", ["rename", "link", "mkdir"])
def test_what_failed_and_was_not_done_is_an_error(storage: LocalStorage, name: str) -> None:
    storage.stage("s/1", [b"one"])
    act = {
        "rename": lambda: storage.move("s", "t"),
        "link": lambda: storage.link("old/value", "s/2"),
        "mkdir": lambda: storage.stage("u/1", [b"x"]),
    }[name]
    with system_calls(refuses(name, errno.ENOENT)), pytest.raises(StorageError) as caught:
        act()
    assert caught.value.hint
    assert storage.list() == ["old", "s"]
    assert storage.list("s") == ["1"]


@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOTEMPTY])
def test_another_writer_who_comes_first_loses_nothing(storage: LocalStorage, number: int) -> None:
    storage.stage(".staging/1", [b"mine"])

    def rule(call: SystemCall) -> Any:
        if call.name == "rename":
            (storage.root / "new").mkdir()
            (storage.root / "new" / "1").write_bytes(b"theirs")
            # The file system says the one or the other.
            with pytest.raises(OSError, match=r"not empty|exists"):
                call.make()
            raise error(number)
        return call.make()

    with system_calls(rule), pytest.raises(StorageError, match="move new: it exists already"):
        storage.move(".staging", "new")
    assert storage.read("new/1") == b"theirs"
    assert storage.read(".staging/1") == b"mine"


READS: dict[str, Callable[[LocalStorage], object]] = {
    "stat": lambda storage: storage.size("old/value"),
    "open": lambda storage: storage.read("old/value"),
    "preadv": lambda storage: storage.read("old/value"),
    "listdir": lambda storage: storage.list("old"),
}


@pytest.mark.parametrize("name", READS)
def test_an_outdated_handle_is_looked_up_afresh_once(storage: LocalStorage, name: str) -> None:
    expected = READS[name](storage)
    with system_calls(forgets_once(name)):
        assert READS[name](storage) == expected
    with system_calls(refuses(name, errno.ESTALE)), pytest.raises(StorageError, match="Stale") as caught:
        READS[name](storage)
    assert "mount it anew" in caught.value.hint


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP])
def test_where_no_link_can_be_made_there_is_none_and_nothing_is_left(
    storage: LocalStorage, number: int
) -> None:
    with system_calls(refuses("link", number)):
        assert not storage.link("old/value", "new/value")
    assert storage.list("new") == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK])
def test_an_unchanged_shard_that_cannot_be_linked_is_written_from_memory(tmp_path: Path, number: int) -> None:
    store = CheckpointStore(tmp_path)
    parent = store.save(snapshot_at(1)).manifest
    path = tmp_path / "checkpoints/step-00000001/model-00.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with system_calls(refuses("link", number)):
        write_checkpoint(store.storage, snapshot_at(2, state=state_at(1)), "step-00000002", parent=parent)
    assert store.get("step-00000002").verify().is_intact


def is_direct(call: SystemCall) -> bool:
    return bool(call.arguments[1] & os.O_DIRECT)


class DirectOnlyInName:
    """Opens for direct I/O, but refuses to write that way."""

    def __init__(self) -> None:
        self.direct: set[int] = set()
        self.refused = 0

    def __call__(self, call: SystemCall) -> Any:
        if call.name == "pwrite" and call.arguments[0] in self.direct:
            self.refused += 1
            raise error(errno.EINVAL)
        result = call.make()
        if call.name == "open":
            self.direct.discard(result)
            if is_direct(call):
                self.direct.add(result)
        return result


LACKS: dict[str, Callable[[], Rule]] = {
    "direct I/O": lambda: refuses("open", errno.EINVAL, is_direct),
    "direct I/O when it comes to writing": DirectOnlyInName,
    "reserving": lambda: refuses("fallocate", errno.EOPNOTSUPP),
    "syncing directories": lambda: refuses(
        "fsync", errno.EINVAL, lambda call: os.path.isdir(f"/proc/self/fd/{call.arguments[0]}")
    ),
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_a_file_system_lacks_is_done_without(tmp_path: Path, lack: str) -> None:
    store = CheckpointStore(tmp_path)
    rule = LACKS[lack]()
    with system_calls(rule):
        for step in (1, 2):
            store.save(snapshot_at(step))
        store.prune([KeepLast(1)])
    assert store.latest().load() == state_at(2)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000002"]
    if isinstance(rule, DirectOnlyInName):
        assert rule.refused > 0


class OpenElsewhere:
    """A client of NFS with readers: a file that one has open is renamed when it is removed, and stays."""

    def __init__(self, held: str) -> None:
        self.held = held
        self.is_open = True

    def __call__(self, call: SystemCall) -> Any:
        if call.name != "unlink" or not self.is_open:
            return call.make()
        path = Path(call.arguments[0])
        if path.name.startswith(".nfs"):
            raise error(errno.EBUSY)
        if path.name == self.held:
            return path.rename(path.with_name(".nfs000000000000002a"))
        return call.make()


def test_a_file_that_a_reader_has_open_goes_when_the_reader_has_closed_it(tmp_path: Path) -> None:
    """Until then pruning is no error and frees the rest, readers see nothing, and sweeping tries again."""
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(snapshot_at(step))
    server = OpenElsewhere("model-00.safetensors")
    with system_calls(server):
        store.prune([KeepLast(1)])
        assert store.storage.list("checkpoints") == ["step-00000002"]
        (hidden,) = {*os.listdir(tmp_path / "checkpoints")} - {"step-00000002"}
        assert os.listdir(tmp_path / "checkpoints" / hidden) == [".nfs000000000000002a"]
        assert store.sweep() == []
        store.save(snapshot_at(3))
        server.is_open = False
        assert store.sweep() == [hidden]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == store.names() == ["step-00000002", "step-00000003"]


def test_a_file_that_vanishes_while_its_tree_is_removed_is_no_error(storage: LocalStorage) -> None:
    """The reader closed it just now, and with that it went."""
    storage.write("t/1", [b"one"])

    def rule(call: SystemCall) -> Any:
        if call.name == "unlink":
            os.unlink(call.arguments[0])
        return call.make()

    with system_calls(rule):
        storage.delete("t")
    assert os.listdir(storage.root) == ["old"]
