"""What `unbroken convert` writes in any format comes back bit for bit, from any format to any other."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats.base import CheckpointReader
from unbroken.inspection.formats.views import TORCH_DTYPES

from ..checkpoint.states import snapshot_at
from .golden import GOLDEN

FORMATS = [".safetensors", ".index", ".weights.h5", ".npz", ".pt"]
# What no format can but that of torch.
RARE = {"C32"}
DTYPES = {name: kind for name, kind in TORCH_DTYPES.items() if hasattr(torch, name) and kind not in RARE}
SOME = settings(max_examples=8, deadline=None, database=None)
MANY = settings(max_examples=150, deadline=None, database=None)
names = st.text("abc/._0é", min_size=1, max_size=9).filter(
    lambda name: {"", ".", ".."}.isdisjoint(name.split("/")) and not name.endswith(".npy")
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = getattr(torch, draw(st.sampled_from(sorted(DTYPES))))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = torch.Size(shape).numel() * dtype.itemsize
    elements = st.integers(0, 1 if dtype == torch.bool else 255)
    data = draw(st.lists(elements, min_size=size, max_size=size))
    return torch.tensor(data, dtype=torch.uint8).view(dtype).reshape(shape)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.int32, torch.float64, torch.bool) else torch.rand(tensor.shape)


states = st.dictionaries(names, tensors(), min_size=1, max_size=6)
ways = st.lists(st.sampled_from(FORMATS), min_size=2, max_size=5)


def content(reader: CheckpointReader) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    assert [*reader.problems, *reader.verify()] == []
    return {
        path: (entry.dtype, entry.shape, bytes(reader.read(path))) for path, entry in reader.tensors.items()
    }


def written(source: CheckpointReader, target: Path) -> tuple[CheckpointReader, set[str]]:
    """Return the reader of what was written, and the tensors that it does not have."""
    done = convert(source, target)
    opened = target.with_suffix("") if target.suffix == ".index" else target
    lines = [line for line in done.dropped if line.startswith("tensor ")]
    dropped = {path for path in source.tensors if any(line.startswith(f"tensor {path}: ") for line in lines)}
    assert len(lines) == len(dropped) == len(source.tensors) - done.tensors
    return open_checkpoint(opened), dropped


def is_kept_in(end: str, state: dict[str, torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        torch.save(state, f"{directory}/source.pt")
        source = open_checkpoint(Path(directory, "source.pt"))
        before = content(source)
        reader, dropped = written(source, Path(directory, f"x{end}"))
        found = content(reader)
    kept = {path: value for path, value in before.items() if path not in dropped}
    assert sorted(found.values()) == sorted(kept.values())
    # HDF5 has no group and array of the same name; those that change theirs for it are told.
    assert end == ".weights.h5" or found == kept


def is_kept_on_the_way(state: dict[str, torch.Tensor], ends: list[str]) -> None:
    # Every format has it.
    state = {name.replace("/", "_"): numbers(tensor) for name, tensor in state.items()}
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, f"{number}{end}") for number, end in enumerate((".pt", *ends))]
        torch.save(state, paths[0])
        reader = open_checkpoint(paths[0])
        before = content(reader)
        for target in paths[1:]:
            reader, dropped = written(reader, target)
            assert not dropped
            assert content(reader) == before


@SOME
@given(state=states)
@pytest.mark.parametrize("end", FORMATS)
def test_a_state_is_in_every_format_what_it_was(end: str, state: dict[str, torch.Tensor]) -> None:
    is_kept_in(end, state)


@pytest.mark.chaos
@MANY
@given(state=states)
@pytest.mark.parametrize("end", FORMATS)
def test_many_states_are_in_every_format_what_they_were(end: str, state: dict[str, torch.Tensor]) -> None:
    is_kept_in(end, state)


@SOME
@given(state=states, ends=ways)
def test_what_goes_from_format_to_format_stays_as_it_was(
    state: dict[str, torch.Tensor], ends: list[str]
) -> None:
    is_kept_on_the_way(state, ends)


@pytest.mark.chaos
@MANY
@given(state=states, ends=ways)
def test_much_that_goes_from_format_to_format_stays_as_it_was(
    state: dict[str, torch.Tensor], ends: list[str]
) -> None:
    is_kept_on_the_way(state, ends)


@pytest.mark.parametrize("end", FORMATS)
def test_a_cast_and_other_names_are_the_same_in_every_format(tmp_path: Path, end: str) -> None:
    source = open_checkpoint(GOLDEN / "weights.safetensors")
    kinds = {entry.dtype for entry in source.tensors.values()}
    assert "F32" in kinds
    rename = {path: f"new_{number}" for number, path in enumerate(source.tensors)}
    convert(source, tmp_path / f"y{end}", rename=rename, dtype="F64")
    found = open_checkpoint(tmp_path / ("y" if end == ".index" else f"y{end}"))
    for path, entry in source.tensors.items():
        if entry.dtype == "F32":
            kept = found.tensors[rename[path]]
            assert (kept.dtype, kept.shape) == ("F64", entry.shape)
            wide = torch.frombuffer(bytearray(source.read(path)), dtype=torch.float32).double()
            assert bytes(found.read(rename[path])) == wide.numpy().tobytes()


def test_names_in_hdf5_need_not_be_ascii(tmp_path: Path) -> None:
    names = ["é/漢/w", "ü", "plain"]
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "x.pt")
    convert(open_checkpoint(tmp_path / "x.pt"), tmp_path / "y.weights.h5")
    assert set(content(open_checkpoint(tmp_path / "y.weights.h5"))) == set(names)


@pytest.mark.parametrize("end", FORMATS)
def test_a_tensor_that_is_not_what_was_saved_is_in_no_format(tmp_path: Path, end: str) -> None:
    CheckpointStore(tmp_path / "run").save(snapshot_at(3))
    shard = max((tmp_path / "run/checkpoints/step-00000003").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (tmp_path / "out").mkdir()
    command = ["convert", str(tmp_path / "run/checkpoints/step-00000003"), str(tmp_path / f"out/y{end}")]
    assert main([*command, "--dtype", "F16"]) == 3
    assert not [*(tmp_path / "out").iterdir()]
