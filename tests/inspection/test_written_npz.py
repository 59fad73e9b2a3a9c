"""`unbroken convert` writes `.npz`, which NumPy reads without pickles."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from unbroken.cli.main import main
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint

from .golden import bytes_of

DTYPES = [
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


def test_numpy_reads_every_dtype_it_has_bit_for_bit(tmp_path: Path) -> None:
    state = {
        f"{dtype}/{shape}": torch.randint(0, 2, shape).to(dtype)
        for dtype in DTYPES
        for shape in ((), (3,), (0, 2), (2, 1, 3))
    }
    state["odd"] = torch.tensor([torch.nan, -0.0, torch.inf, 1e-40])
    torch.save(state, tmp_path / "x.pt")
    done = convert(open_checkpoint(tmp_path / "x.pt"), tmp_path / "y.npz")
    assert (done.dropped, done.size_bytes) == ((), (tmp_path / "y.npz").stat().st_size)
    own = open_checkpoint(tmp_path / "y.npz")
    assert [*own.problems, *own.verify(), *own.notes] == []
    with np.load(tmp_path / "y.npz", allow_pickle=False) as found:
        assert set(found.files) == set(state) == set(own.tensors)
        for path, tensor in state.items():
            assert found[path].dtype == tensor.numpy().dtype
            assert found[path].shape == tuple(tensor.shape) == own.tensors[path].shape
            assert found[path].tobytes() == bytes_of(tensor) == bytes(own.read(path))


def test_it_is_laid_out_as_savez_does_and_the_same_each_time(tmp_path: Path) -> None:
    torch.save({"a/b": torch.ones(2, 3)}, tmp_path / "x.pt")
    for name in ("y.npz", "z.npz"):
        convert(open_checkpoint(tmp_path / "x.pt"), tmp_path / name)
    np.savez(tmp_path / "numpy.npz", **{"a/b": np.ones((2, 3), np.float32)})
    ours, numpys = (zipfile.ZipFile(tmp_path / name) for name in ("y.npz", "numpy.npz"))
    with ours, numpys:
        assert ours.namelist() == numpys.namelist()
        # NumPy leaves room to grow in its header; all else is the same.
        assert ours.read("a/b.npy")[:60] == numpys.read("a/b.npy")[:60]
        assert ours.read("a/b.npy")[-24:] == numpys.read("a/b.npy")[-24:]
    assert (tmp_path / "y.npz").read_bytes() == (tmp_path / "z.npz").read_bytes()


def test_what_numpy_has_no_dtype_for_is_named_and_cast_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "brain": torch.tensor([1.5, -0.1]).bfloat16(),
        "eight": torch.tensor([1.5, -448.0]).to(torch.float8_e4m3fn),
        "count": torch.arange(3),
    }
    torch.save(state, tmp_path / "x.pt")
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "y.npz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == [
        "tensor brain: NumPy has no BF16",
        "tensor eight: NumPy has no F8_E4M3",
    ]
    with np.load(tmp_path / "y.npz", allow_pickle=False) as found:
        assert found.files == ["count"]
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "z.npz"), "--dtype", "F32"]) == 0
    with np.load(tmp_path / "z.npz", allow_pickle=False) as found:
        assert found["brain"].dtype == found["eight"].dtype == np.float32
        assert found["brain"].tolist() == state["brain"].tolist()
        assert found["eight"].tolist() == [1.5, -448.0]
        assert found["count"].tolist() == [0, 1, 2]


def test_names_that_numpy_would_take_for_others_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["a", "a.npy", "b\0c", "../up", "/root", "with space", "ü/漢", "file", "a\\b"]
    torch.save({name: torch.tensor(number) for number, name in enumerate(names)}, tmp_path / "x.pt")
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "y.npz"), "--json"]) == 0
    dropped = json.loads(capsys.readouterr().out)["dropped"]
    assert [line.partition(": ")[2] for line in dropped if line.startswith("tensor ")] == [
        "NumPy takes .npy off the end of names",
        "a zip file has no such names",
    ]
    with np.load(tmp_path / "y.npz", allow_pickle=False) as found:
        kept = {name: number for number, name in enumerate(names) if name not in ("a.npy", "b\0c")}
        assert {name: found[name].item() for name in found.files} == kept
    own = open_checkpoint(tmp_path / "y.npz")
    assert set(own.tensors) == set(kept)
