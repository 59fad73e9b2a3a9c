"""`unbroken convert` writes `.pt`, which torch reads as one of its own."""

from __future__ import annotations

import json
import mmap
import os
import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats.views import TORCH_DTYPES
from unbroken.interchange.pickle_writer import PickledTensor, pickled
from unbroken.interchange.zip_writer import ZipWriter

from ..checkpoint.states import snapshot_at
from .golden import GOLDEN, bytes_of, tensors_in

SHAPES = [(), (3,), (0, 2), (2, 0, 3), (2, 1, 3), (300,)]


def state_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    chosen = torch.Generator().manual_seed(0)
    state = {}
    for shape in SHAPES:
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=chosen)
        state[f"of/{shape}"] = data.to(torch.uint8).view(dtype).reshape(shape)
    return state


def loaded(path: Path, *, is_mapped: bool = False) -> dict[str, Any]:
    found = torch.load(path, weights_only=True, mmap=is_mapped)
    assert type(found) is dict
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(name for name in TORCH_DTYPES if hasattr(torch, name)))
def test_torch_reads_every_dtype_bit_for_bit(tmp_path: Path, name: str) -> None:
    state = state_of(getattr(torch, name))
    torch.save(state, tmp_path / "x.pt")
    done = convert(open_checkpoint(tmp_path / "x.pt"), tmp_path / "y.pt")
    assert (done.dropped, done.size_bytes) == ((), (tmp_path / "y.pt").stat().st_size)
    own = open_checkpoint(tmp_path / "y.pt")
    assert [*own.problems, *own.verify(), *own.notes] == []
    for is_mapped in (False, True):
        found = loaded(tmp_path / "y.pt", is_mapped=is_mapped)
        assert list(found) == list(state) == list(own.tensors)
        for path, tensor in state.items():
            assert (found[path].dtype, found[path].shape) == (tensor.dtype, tensor.shape)
            assert found[path].stride() == tensor.contiguous().stride()
            assert bytes_of(found[path]) == bytes_of(tensor) == bytes(own.read(path))
            assert not found[path].requires_grad


@pytest.mark.parametrize("is_mapped", [False, True])
def test_tied_tensors_share_their_storage(tmp_path: Path, is_mapped: bool) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "other": weight.clone(), "b": {"c": weight}, "d": weight}
    torch.save(state, tmp_path / "x.pt")
    convert(open_checkpoint(tmp_path / "x.pt"), tmp_path / "y.pt")
    found = loaded(tmp_path / "y.pt", is_mapped=is_mapped)
    assert {tensor.data_ptr() for name, tensor in found.items() if name != "other"} == {found["a"].data_ptr()}
    found["a"][0, 0] = 9
    assert (found["b/c"][0, 0].item(), found["d"][0, 0].item(), found["other"][0, 0].item()) == (9, 9, 0)
    # As those of a state_dict, they are tensors of their own.
    assert found["a"] is not found["d"]
    assert open_checkpoint(tmp_path / "y.pt").tensors["a"].aliases == ("b/c", "d")


def test_elements_begin_where_torch_has_them_begin(tmp_path: Path) -> None:
    convert(open_checkpoint(GOLDEN / "training.pt"), tmp_path / "y.pt")
    reader = torch._C.PyTorchFileReader(str(tmp_path / "y.pt"))
    with zipfile.ZipFile(tmp_path / "y.pt") as archive:
        assert archive.testzip() is None
        names = [name.partition("/")[2] for name in archive.namelist()]
    assert {"byteorder", "version"} < set(names)
    assert all(reader.get_record_offset(name) % 64 == 0 for name in names)


@pytest.mark.parametrize("name", ["training.pt", "training-legacy.pt", "weights.safetensors", "sharded"])
def test_what_others_wrote_is_read_by_torch_with_all_its_bits(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(GOLDEN / name)
    convert(source, tmp_path / "y.pt")
    found = dict(tensors_in(loaded(tmp_path / "y.pt")))
    assert set(found) == {*source.tensors, *(a for entry in source.tensors.values() for a in entry.aliases)}
    for path, entry in source.tensors.items():
        assert bytes_of(found[path]) == source.read(path), path
        assert tuple(found[path].shape) == entry.shape


def test_weights_of_a_run_go_into_a_module_of_torch(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "run").save(snapshot_at(3))
    source = tmp_path / "run/checkpoints/step-00000003"
    (tmp_path / "names.json").write_text('{"model": ""}')
    command = ["convert", str(source), str(tmp_path / "y.pt"), "--rename", str(tmp_path / "names.json")]
    assert main(command) == 0
    found = loaded(tmp_path / "y.pt")
    assert bytes_of(found["weight"]) == open_checkpoint(source).read("model/weight")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_programs_load_what_is_written_as_safetensors(tmp_path: Path) -> None:
    storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    state = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5]).bfloat16(), "n": torch.tensor(3)}
    torch.save(state, tmp_path / "x.pt")
    (tmp_path / "weights").mkdir()
    convert(open_checkpoint(tmp_path / "x.pt"), tmp_path / "weights/model.safetensors")
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    reader = storage.HuggingFaceStorageReader(str(tmp_path / "weights"))
    torch.distributed.checkpoint.load(found, storage_reader=reader, no_dist=True)
    assert {name: bytes_of(tensor) for name, tensor in found.items()} == {
        name: bytes_of(tensor) for name, tensor in state.items()
    }


def test_the_pickle_says_nothing_but_tensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "u": torch.ones(2, dtype=torch.uint16)}, tmp_path / "x.pt")
    convert(open_checkpoint(tmp_path / "x.pt"), tmp_path / "y.pt")
    with zipfile.ZipFile(tmp_path / "y.pt") as archive:
        operations = list(pickletools.genops(archive.read("archive/data.pkl")))
    assert {argument for code, argument, _ in operations if code.name == "GLOBAL"} == {
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        "torch FloatStorage",
        "torch.storage UntypedStorage",
        "torch uint16",
        "collections OrderedDict",
    }
    assert max(code.proto for code, _, _ in operations) == 2


def test_names_of_every_kind_are_kept(tmp_path: Path) -> None:
    state = {name: torch.tensor(number) for number, name in enumerate(("", "ü/漢", "a\nb", "\0", "x" * 4000))}
    torch.save(state, tmp_path / "x.pt")
    source = open_checkpoint(tmp_path / "x.pt")
    convert(source, tmp_path / "y.pt")
    assert {name: tensor.item() for name, tensor in loaded(tmp_path / "y.pt").items()} == {
        name or "data": number for number, name in enumerate(state)
    }


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensors_that_mean_nothing_without_a_scale_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    torch.save({"q": quantized, "w": torch.ones(2)}, tmp_path / "x.pt")
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "y.pt"), "--json"]) == 0
    assert "tensor q: torch has QI8 with its scale only" in json.loads(capsys.readouterr().out)["dropped"]
    assert list(loaded(tmp_path / "y.pt")) == ["w"]


def test_it_is_written_without_torch_and_numpy(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    script = """
import sys
from pathlib import Path
for name in ("numpy", "torch"):
    sys.modules[name] = None
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint
for end in (".pt", ".npz"):
    convert(open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2] + end))
    Path(sys.argv[2] + ".json").unlink()
"""
    place = [str(tmp_path / "x.pt"), str(tmp_path / "y")]
    done = subprocess.run([sys.executable, "-c", script, *place], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert loaded(tmp_path / "y.pt")["w"].tolist() == [1, 1]


@pytest.mark.chaos
def test_storages_beyond_four_gigabytes_are_mapped(tmp_path: Path) -> None:
    size, path, writer = (1 << 32) + 64, tmp_path / "x.pt", ZipWriter()
    tensors = [
        PickledTensor(names=("large",), key="0", dtype="U8", shape=(size,), size_bytes=size),
        PickledTensor(names=("behind",), key="1", dtype="F32", shape=(2,), size_bytes=8),
    ]
    behind = torch.tensor([1.0, 2.0]).numpy().tobytes()
    with (
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as zeros,
        memoryview(zeros) as large,
        path.open("wb") as file,
    ):
        entries = {"data.pkl": pickled(tensors), "byteorder": b"little", "data/0": large, "data/1": behind}
        for name, data in (*entries.items(), ("version", b"3\n")):
            for piece in writer.entry(f"archive/{name}", [data], alignment=64):
                # A hole is zeros, and takes no room.
                file.seek(size, os.SEEK_CUR) if piece is large else file.write(piece)
        file.writelines(writer.end())
    found = loaded(path, is_mapped=True)
    assert found["behind"].tolist() == [1, 2]
    assert (found["large"].shape, found["large"][-1].item()) == ((size,), 0)
