"""Every kind of damage that files suffer from disks, copies and people: found, and nothing else harmed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.checkpoint.retention import KeepLast
from unbroken.checkpoint.store import CheckpointStore, newest_verified
from unbroken.checkpoint.verify import verify_checkpoint
from unbroken.errors import DamagedError
from unbroken.storage.local import LocalStorage

from .states import snapshot_at, state_at

FILES = ["manifest.json", "manifest.digest", "model-00.safetensors", "state-00.safetensors"]
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "lengthened": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
    "replaced by a directory": lambda path: (path.unlink(), path.mkdir()),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_every_kind_of_damage_to_every_file_is_found_by_load_and_verify(
    tmp_path: Path, file: str, damage: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1))
    DAMAGES[damage](tmp_path / "checkpoints/step-00000001" / file)
    with pytest.raises(DamagedError):
        store.get("step-00000001").load()
    found = verify_checkpoint(store.storage, "checkpoints/step-00000001")
    assert not found.is_intact


def test_a_checkpoint_whose_files_are_all_empty_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(snapshot_at(step))
    for file in FILES:
        os.truncate(tmp_path / "checkpoints/step-00000002" / file, 0)
    with pytest.raises(DamagedError):
        store.get("step-00000002")
    assert not store.is_intact("step-00000002")
    assert store.latest().step == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [(one, two) for one in FILES for two in FILES if one < two],
)
def test_files_swapped_inside_a_checkpoint_are_found(tmp_path: Path, one: str, two: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1))
    directory = tmp_path / "checkpoints/step-00000001"
    swap(directory / one, directory / two)
    with pytest.raises(DamagedError):
        store.get("step-00000001").load()
    assert not store.is_intact("step-00000001")


@pytest.mark.parametrize(
    "files",
    [FILES[:1], FILES[1:2], FILES[:2], FILES[2:3], FILES[3:], FILES],
    ids=",".join,
)
def test_files_swapped_between_checkpoints_are_found_in_both(tmp_path: Path, files: list[str]) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(snapshot_at(step))
    for file in files:
        swap(*(tmp_path / f"checkpoints/step-0000000{step}" / file for step in (1, 2)))
    for name in store.names():
        with pytest.raises(DamagedError):
            store.get(name).load()
        assert not store.is_intact(name)


def swap(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def test_a_shard_that_two_checkpoints_share_and_that_is_damaged_in_place_is_found_in_both(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(snapshot_at(step, state={**state_at(step), "model": state_at(min(step, 2))["model"]}))
    share(tmp_path, "step-00000002", "step-00000003")
    assert all(store.is_intact(name) for name in store.names())
    flip_in_place(tmp_path / "checkpoints/step-00000003/model-00.safetensors", 500_000)
    for name in ("step-00000002", "step-00000003"):
        with pytest.raises(DamagedError, match="model/weight"):
            store.get(name).load()
        assert not store.is_intact(name)
    assert newest_verified(tmp_path) == "step-00000001"
    # The newest is one of the two, so nothing is deleted.
    assert store.prune([KeepLast(1)]).pruned == {}


@pytest.mark.parametrize("step", [2, 3])
def test_deleting_or_setting_aside_one_of_two_that_share_a_shard_leaves_the_other_whole(
    tmp_path: Path, step: int
) -> None:
    store = CheckpointStore(tmp_path)
    for at in (2, 3):
        store.save(snapshot_at(at, state={**state_at(at), "model": state_at(2)["model"]}))
    share(tmp_path, "step-00000002", "step-00000003")
    store.quarantine(f"step-0000000{step}", "a test") if step == 3 else store.prune([KeepLast(1)])
    (left,) = store.names()
    assert store.is_intact(left)
    assert store.latest().load()["model"] == state_at(2)["model"]


@pytest.mark.parametrize("copy", [["cp", "-r"], ["cp", "-a"], ["cp", "-r", "--reflink=auto"]], ids=" ".join)
def test_a_copy_has_bytes_of_its_own_and_is_not_harmed_by_damage_to_the_original(
    tmp_path: Path, copy: list[str]
) -> None:
    store = CheckpointStore(tmp_path / "run")
    for step in (2, 3):
        store.save(snapshot_at(step, state={**state_at(step), "model": state_at(2)["model"]}))
    share(tmp_path / "run", "step-00000002", "step-00000003")
    subprocess.run([*copy, str(tmp_path / "run"), str(tmp_path / "copy")], check=True)
    subprocess.run([*copy, str(tmp_path / "run/checkpoints/step-00000003"), str(tmp_path)], check=True)
    flip_in_place(tmp_path / "run/checkpoints/step-00000003/model-00.safetensors", 500_000)
    assert [store.is_intact(name) for name in store.names()] == [False, False]
    copied = CheckpointStore(tmp_path / "copy")
    assert [copied.is_intact(name) for name in copied.names()] == [True, True]
    assert verify_checkpoint(LocalStorage(tmp_path), "step-00000003").is_intact


def share(root: Path, one: str, two: str, file: str = "model-00.safetensors") -> None:
    """Let two checkpoints have one file in common, as they do where nothing in it has changed."""
    first, second = (root / "checkpoints" / name / file for name in (one, two))
    assert first.read_bytes() == second.read_bytes()
    second.unlink()
    os.link(first, second)


def flip_in_place(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_whole_checkpoint_under_the_name_of_another_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1))
    (tmp_path / "checkpoints/step-00000001").rename(tmp_path / "checkpoints/step-00000009")
    with pytest.raises(
        DamagedError, match="expected the manifest of step-00000009, found that of step-00000001"
    ):
        store.get("step-00000009")


@pytest.mark.parametrize("kind", ["file", "empty file", "hidden file", "directory", "link"])
def test_a_foreign_file_in_a_checkpoint_is_reported_but_does_not_stop_loading(
    tmp_path: Path, kind: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1))
    place = tmp_path / "checkpoints/step-00000001" / (".notes" if kind == "hidden file" else "notes")
    if kind == "directory":
        place.mkdir()
    elif kind == "link":
        place.symlink_to("gone")
    else:
        place.write_text("" if kind == "empty file" else "mine")
    assert store.latest().load() == state_at(1)
    found = store.latest().verify()
    assert [(finding.file, finding.problem) for finding in found.findings] == [
        (place.name, "the manifest does not know this file")
    ]


NOT_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_text("mine"),
    "an empty directory": lambda path: path.mkdir(),
    "a link to another checkpoint": lambda path: path.symlink_to("step-00000001"),
    "a link to nothing": lambda path: path.symlink_to("gone"),
}


@pytest.mark.parametrize("kind", NOT_CHECKPOINTS)
def test_what_only_has_the_name_of_a_checkpoint_is_damaged_and_can_be_set_aside(
    tmp_path: Path, kind: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(1))
    NOT_CHECKPOINTS[kind](tmp_path / "checkpoints/step-00000009")
    assert store.names() == ["step-00000001", "step-00000009"]
    with pytest.raises(DamagedError):
        store.get("step-00000009")
    assert not store.is_intact("step-00000009")
    assert store.latest().step == 1
    store.quarantine("step-00000009", "a test")
    assert store.names() == ["step-00000001"]
    assert store.latest().load() == state_at(1)
