"""Nothing in a file goes missing unsaid: it is listed, kept beside, or named as what is not read."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unbroken.cli.main import main
from unbroken.errors import DamagedError, StorageError
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats import zips
from unbroken.inspection.formats.base import CheckpointReader

from .test_formats import rewritten


def saved(path: Path, state: Any, **options: Any) -> CheckpointReader:
    torch.save(state, path, **options)
    return open_checkpoint(path)


def numbers(reader: CheckpointReader, path: str) -> list[float]:
    data = bytes(reader.read(path))
    return [*struct.unpack(f"<{len(data) // 4}f", data)]


def test_tensors_whose_paths_are_the_same_are_all_kept(tmp_path: Path) -> None:
    reader = saved(tmp_path / "x.pt", {"a/b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}})
    assert {path: numbers(reader, path) for path in reader.tensors} == {"a/b": [1], "a/b'": [2]}
    assert reader.values == {"a/b": {"$tensor": "a/b"}, "a": {"b": {"$tensor": "a/b'"}}}
    state = {1: torch.tensor([1.0]), "1": torch.tensor([2.0]), "1'": torch.tensor([3.0])}
    reader = saved(tmp_path / "y.pt", state)
    assert sorted(numbers(reader, path) for path in reader.tensors) == [[1], [2], [3]]


def test_an_alias_takes_no_path_of_another_tensor(tmp_path: Path) -> None:
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    reader = saved(tmp_path / "x.pt", {"x": second, "a/b": first, "a": {"b": second}})
    assert reader.tensors["x"].aliases == ("a/b'",)
    assert numbers(reader, "a/b") == [1]


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_storage_of_an_unknown_kind_is_named(tmp_path: Path, is_zip: bool) -> None:
    state = {"known": torch.tensor([5.0]), "odd": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    if is_zip:
        target = rewritten(tmp_path / "x.pt", tmp_path / "y.pt", lambda _, data: renamed(data))
    else:
        target = tmp_path / "y.pt"
        target.write_bytes(renamed((tmp_path / "x.pt").read_bytes()))
    reader = open_checkpoint(target)
    assert list(reader.tensors) == ["known"]
    assert reader.notes == ["tensor odd is not read: storage QUInt4x2Storage"]
    assert "odd" in reader.values
    if is_zip:
        assert main(["convert", str(target), str(tmp_path / "z.safetensors")]) == 0
        assert json.loads((tmp_path / "z.json").read_text())["dropped"] == reader.notes


def renamed(data: bytes) -> bytes:
    return data.replace(b"ctorch\nDoubleStorage\n", b"ctorch\nQUInt4x2Storage\n")


def test_nothing_is_guessed_of_what_follows_elements_of_an_unknown_kind(tmp_path: Path) -> None:
    torch.save(
        {"odd": torch.ones(2, dtype=torch.float64)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False
    )
    (tmp_path / "y.pt").write_bytes(renamed((tmp_path / "x.pt").read_bytes()))
    (found,) = open_checkpoint(tmp_path / "y.pt").problems
    assert "are of no known kind" in found.problem


def test_numbers_that_are_to_be_conjugated_are_not_taken_for_others(tmp_path: Path) -> None:
    reader = saved(tmp_path / "x.pt", {"w": torch.ones(2, dtype=torch.complex64).conj(), "v": torch.ones(1)})
    assert list(reader.tensors) == ["v"]
    assert reader.notes == ["tensor w is not read: its numbers are to be negated or conjugated"]


def test_a_tensor_of_a_part_of_a_storage_is_not_read_from_the_whole(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if obj is Ellipsis:
                return ("storage", torch.FloatStorage, "0", "cpu", 4, ("1", 2, 2))
            return None

    class Tensor:
        def __reduce__(self) -> Any:
            arguments = (Ellipsis, 0, (2,), (1,), False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        with archive.open("x/data.pkl", "w") as file:
            Pickler(file, 2).dump({"w": Tensor()})
        archive.writestr("x/data/0", bytes(16))
    reader = open_checkpoint(tmp_path / "x.pt")
    assert reader.notes == ["tensor w is not read: it lies in a part of a storage"]
    assert not reader.tensors


def test_a_subclass_of_tensor_keeps_what_hangs_on_it(tmp_path: Path) -> None:
    reader = saved(tmp_path / "x.pt", {"w": labelled()})
    assert reader.values["w"] == {"$tensor": "w", "attributes": {"label": "left"}}


class Labelled(torch.Tensor):
    pass


def labelled() -> torch.Tensor:
    found = torch.ones(2).as_subclass(Labelled)
    found.label = "left"  # type: ignore[attr-defined]
    return found


def test_an_array_of_texts_is_named(tmp_path: Path) -> None:
    reader = saved(tmp_path / "x.pt", {"names": np.array(["a", "b"])})
    assert reader.notes == ["tensor names is not read: an array of a kind that is none of plain numbers"]


def test_an_entry_of_an_npz_file_that_stands_there_twice_is_a_problem(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a.npy", archive.read("a.npy"))
    (found,) = open_checkpoint(tmp_path / "x.npz").problems
    assert found.problem == "an entry stands there twice"


@pytest.mark.parametrize("shape", ["1 2,", "9" * 5000])
def test_a_shape_that_is_none_is_no_tensor(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(8)
        archive.writestr("a.npy", array)
    reader = open_checkpoint(tmp_path / "x.npz")
    assert (list(reader.tensors), len(reader.notes)) == ([], 1)


def test_a_name_that_no_file_can_have_is_one_that_is_missing(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "x" * 300}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (found,) = open_checkpoint(tmp_path).problems
    assert found.problem.endswith("expected a file beside the index, found none")


def compressed(source: Path, target: Path) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return target


def test_views_far_inside_a_compressed_storage_are_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = torch.arange(1 << 20, dtype=torch.float32)
    torch.save({str(at): flat[at : at + 4] for at in range(0, 1 << 20, 1 << 15)}, tmp_path / "x.pt")
    compressed(tmp_path / "x.pt", tmp_path / "y.pt")
    monkeypatch.setattr(zips, "_LARGE_WORK_BYTES", 12 << 20)
    monkeypatch.setattr(zips, "_LARGEST_WORK", 0)
    reader = open_checkpoint(tmp_path / "y.pt")
    for path in reader.tensors:
        assert numbers(reader, path) == [int(path) + index for index in range(4)]
    monkeypatch.setattr(zips, "_KEPT_BYTES", 0)
    reader = open_checkpoint(tmp_path / "y.pt")
    with pytest.raises(StorageError, match="unpacked again"):
        for path in reader.tensors:
            reader.read(path)


def test_a_pickle_that_was_compressed_to_nothing_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"\x8f" * (17 << 20))
    with pytest.raises(DamagedError, match="expected at most"):
        open_checkpoint(tmp_path / "x.pt")
