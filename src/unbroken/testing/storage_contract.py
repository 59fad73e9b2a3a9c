"""What every storage must promise. Inherit `StorageContract` and provide a `storage` fixture.

class TestMyStorage(StorageContract):
    @pytest.fixture
    def storage(self):
        return MyStorage(...)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unbroken.errors import StorageError, UsageError
from unbroken.storage.base import Buffer, Storage


class StorageContract:
    """The tests; each one states a promise of the protocol."""

    def test_it_is_a_storage(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)

    def test_a_written_value_is_read_back_whole_and_in_ranges(self, storage: Storage) -> None:
        assert storage.write("a/b", [b"hello ", bytearray(b"wor"), memoryview(b"ld")]) == 11
        assert storage.read("a/b") == b"hello world"
        assert storage.read("a/b", 6) == b"world"
        assert storage.read("a/b", 2, 3) == b"llo"
        assert storage.read("a/b", 11) == b""
        assert storage.size("a/b") == 11

    def test_writing_again_replaces_the_value(self, storage: Storage) -> None:
        storage.write("a", [b"a longer value"])
        storage.write("a", [b"short"])
        assert storage.read("a") == b"short"

    def test_an_empty_value_is_a_value(self, storage: Storage) -> None:
        storage.write("empty", [])
        assert storage.size("empty") == 0
        assert storage.read("empty") == b""

    def test_a_write_that_fails_leaves_the_old_value_and_nothing_else(self, storage: Storage) -> None:
        storage.write("a/b", [b"old"])

        def chunks() -> Iterator[Buffer]:
            yield b"new"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            storage.write("a/b", chunks())
        assert storage.read("a/b") == b"old"
        assert storage.list("a") == ["b"]

    def test_an_absent_value_has_no_size_and_cannot_be_read(self, storage: Storage) -> None:
        assert storage.size("nothing") is None
        with pytest.raises(StorageError, match="nothing"):
            storage.read("nothing")

    def test_a_range_beyond_the_end_is_an_error_that_says_how_much_was_found(self, storage: Storage) -> None:
        storage.write("a", [b"12345"])
        with pytest.raises(StorageError, match="expected 4 bytes, found 2"):
            storage.read("a", 3, 4)

    def test_list_shows_the_names_directly_below_sorted(self, storage: Storage) -> None:
        for key in ("t/b/2", "t/b/1", "t/a", "u"):
            storage.write(key, [b"x"])
        assert storage.list("t") == ["a", "b"]
        assert storage.list("t/b") == ["1", "2"]
        assert storage.list() == ["t", "u"]
        assert storage.list("nowhere") == []
        assert storage.list("u") == []

    def test_a_tree_has_no_size(self, storage: Storage) -> None:
        storage.write("t/a", [b"x"])
        assert storage.size("t") is None

    def test_move_publishes_a_staged_tree_at_once(self, storage: Storage) -> None:
        storage.stage(".staging/x/1", [b"one"])
        storage.stage(".staging/x/2", [b"two"])
        storage.move(".staging/x", "done/x")
        assert storage.list("done/x") == ["1", "2"]
        assert storage.read("done/x/2") == b"two"
        assert storage.list(".staging") == []

    def test_move_refuses_an_existing_target_and_changes_nothing(self, storage: Storage) -> None:
        storage.stage("s/1", [b"new"])
        storage.write("t/1", [b"old"])
        with pytest.raises(StorageError, match="exists"):
            storage.move("s", "t")
        assert storage.read("s/1") == b"new"
        assert storage.read("t/1") == b"old"

    def test_move_of_an_absent_tree_is_an_error(self, storage: Storage) -> None:
        with pytest.raises(StorageError, match="absent"):
            storage.move("absent", "t")

    def test_stage_refuses_an_existing_key(self, storage: Storage) -> None:
        storage.stage("s/1", [b"first"])
        with pytest.raises(StorageError, match="exists"):
            storage.stage("s/1", [b"second"])
        assert storage.read("s/1") == b"first"

    def test_a_stage_that_fails_leaves_nothing_and_can_be_repeated(self, storage: Storage) -> None:
        def chunks() -> Iterator[Buffer]:
            yield b"half"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            storage.stage("s/1", chunks())
        assert storage.list("s") == []
        storage.stage("s/1", [b"whole"])
        assert storage.read("s/1") == b"whole"

    def test_a_link_is_whole_and_outlives_its_source_where_there_are_links(self, storage: Storage) -> None:
        storage.write("a/b", [b"hello"])
        if storage.link("a/b", ".staging/b"):
            storage.move(".staging", "c")
            storage.delete("a")
            assert storage.read("c/b") == b"hello"
        else:
            assert storage.size(".staging/b") is None

    def test_a_link_refuses_an_existing_target_and_an_absent_source(self, storage: Storage) -> None:
        storage.write("a", [b"old"])
        storage.write("b", [b"new"])
        with pytest.raises(StorageError, match="exists"):
            storage.link("b", "a")
        assert storage.read("a") == b"old"
        with pytest.raises(StorageError, match="absent"):
            storage.link("absent", "c")

    def test_a_range_is_read_into_the_memory_that_is_given(self, storage: Storage) -> None:
        storage.write("a", [b"hello world"])
        target = memoryview(bytearray(5))
        storage.read_into("a", 6, target)
        assert bytes(target) == b"world"
        with pytest.raises(StorageError, match="expected 5 bytes, found 1"):
            storage.read_into("a", 10, target)

    def test_a_large_value_is_written_whole(self, storage: Storage) -> None:
        import mmap

        # Page-aligned and not a multiple of a page: pieces, threads and a remainder.
        memory = mmap.mmap(-1, 20 << 20)
        memory[::4096] = bytes(range(256)) * (len(memory) // 4096 // 256)
        view = memoryview(memory)[: (17 << 20) + 123]
        assert storage.stage("large", [view]) == len(view)
        assert storage.read("large") == view
        assert storage.write("parts", [b"x", view, view]) == 1 + 2 * len(view)
        assert storage.read("parts", 1 + len(view)) == view

    def test_the_space_left_is_a_number_or_not_known(self, storage: Storage) -> None:
        space = storage.space()
        assert space is None or space.free_bytes >= 0

    def test_delete_removes_a_value_or_a_whole_tree_and_forgives_absence(self, storage: Storage) -> None:
        for key in ("t/a", "t/b/c", "tt"):
            storage.write(key, [b"x"])
        storage.delete("t")
        storage.delete("t")
        assert storage.list() == ["tt"]
        storage.delete("tt")
        assert storage.list() == []

    @pytest.mark.parametrize("key", ["/etc/x", "../x", "a/../../x", "a//b", ".", ""])
    def test_a_key_that_leaves_the_storage_is_refused(self, storage: Storage, key: str) -> None:
        with pytest.raises(UsageError, match="storage key"):
            storage.write(key, [b"x"])
