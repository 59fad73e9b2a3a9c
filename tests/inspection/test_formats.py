"""Every format is read as the library that wrote it reads it: names, values, every bit of every tensor."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.errors import DamagedError, StorageError, UsageError
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.foreign import describe
from unbroken.inspection.formats.base import CheckpointReader

from ..checkpoint.states import snapshot_at
from .golden import GOLDEN, bytes_of, tensors_in

TRAINING = ["training.pt", "training-legacy.pt"]


def path_of(reader: CheckpointReader, path: str) -> str:
    """Return the path that a tensor is kept under, which may be an alias."""
    if path in reader.tensors:
        return path
    return next(first for first, entry in reader.tensors.items() if path in entry.aliases)


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """Copy a zip file with `change(name, data)` of each entry, without those it gives None for."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return target


@pytest.mark.parametrize("name", TRAINING)
def test_every_tensor_of_torch_save_is_read_bit_for_bit(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    # Both hold the same state. In the old form torch cannot read the uint16 that it has written itself.
    expected = dict(tensors_in(torch.load(GOLDEN / "training.pt", weights_only=False)))
    assert len(expected) == 43
    for path, value in expected.items():
        kept = path_of(reader, path)
        assert reader.tensors[kept].shape == tuple(value.shape), path
        assert bytes(reader.read(kept)) == bytes_of(value), path
    places = {place for path, entry in reader.tensors.items() for place in (path, *entry.aliases)}
    assert places - expected.keys() == {"plain/long"}, "a long byte string is listed, too"
    assert bytes(reader.read("plain/long")) == b"long" * 20


@pytest.mark.parametrize("name", TRAINING)
def test_what_is_no_tensor_is_plain_data(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    plain = reader.values["plain"]
    assert math.isnan(plain.pop("nan"))
    assert plain == {
        "deque": [1, 2],
        "set": [3],
        "bytes": "b'short'",
        "long": {"$tensor": "plain/long"},
        "size": [2, 3],
        "device": "cuda:1",
        "dtype": "torch.float32",
        "1": "one",
        "1'": "text",
    }
    assert reader.values["numpy"]["scalar"] == 1.5
    assert reader.values["args"] == {
        "$object": "argparse.Namespace",
        "state": {"lr": 0.01, "data": "/data/digits", "seeds": [1, 2]},
    }
    assert reader.facts["objects"] == ["argparse.Namespace"]
    json.dumps(reader.values)


@pytest.mark.parametrize("name", TRAINING)
def test_optimizer_schedule_counters_and_ties_are_found(name: str) -> None:
    found = describe(open_checkpoint(GOLDEN / name))
    assert found["complete"]
    assert found["counters"] == {"epoch": 3, "global_step": 120}
    (optimizer,) = found["optimizers"]
    assert (optimizer["where"], optimizer["parameters"], optimizer["states"]) == ("optimizer", 6, 6)
    assert (optimizer["learning_rates"], optimizer["moments"]) == ([0.01], ["exp_avg", "exp_avg_sq", "step"])
    assert [(at["where"], at["last_epoch"]) for at in found["schedulers"]] == [("scheduler", 1)]
    assert found["tied"] == [["tied/first", "tied/second"]]
    assert found["parts"]["model"] == {"tensors": 9, "size_bytes": 176, "dtypes": {"F32": 168, "I64": 8}}


@pytest.mark.parametrize("name", ["weights.safetensors", "sharded", "sharded/model.safetensors.index.json"])
def test_safetensors_are_read_in_one_file_and_in_several(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    expected = load_file(GOLDEN / "weights.safetensors")
    assert {path: bytes(reader.read(path)) for path in reader.tensors} == {
        path: bytes_of(value) for path, value in expected.items()
    }
    assert (reader.problems, reader.checksums) == ([], None)


@pytest.mark.parametrize("name", ["arrays.npz", "arrays-compressed.npz"])
def test_arrays_of_numpy_are_read_whatever_their_order(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    expected = dict(np.load(GOLDEN / name))
    assert {path: bytes(reader.read(path)) for path in reader.tensors} == {
        path: bytes_of(np.ascontiguousarray(value)) for path, value in expected.items()
    }


def test_our_own_checkpoints_are_read_like_all_others(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot_at(3))
    reader = open_checkpoint(tmp_path / "checkpoints/step-00000003")
    expected = store.latest().load_tensors()
    assert {path: bytes(reader.read(path)) for path in reader.tensors} == {
        path: bytes(tensor.data) for path, tensor in expected.items()
    }
    assert reader.facts["step"] == 3
    assert [*reader.verify()] == []


def test_a_format_is_known_by_its_content_not_by_its_name(tmp_path: Path) -> None:
    for source in (*TRAINING, "weights.safetensors", "arrays.npz"):
        copy = tmp_path / f"{source}.txt"
        shutil.copy(GOLDEN / source, copy)
        assert open_checkpoint(copy).format == open_checkpoint(GOLDEN / source).format
    (tmp_path / "model.pt").write_text("weights")
    with pytest.raises(UsageError, match="found something else"):
        open_checkpoint(tmp_path / "model.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(UsageError, match="expected a file"):
        open_checkpoint(tmp_path / "pipe.pt")


def test_a_file_from_a_big_endian_machine_is_read_in_this_ones_order(tmp_path: Path) -> None:
    def turned(name: str, data: bytes) -> bytes:
        if name.endswith("byteorder"):
            return b"big"
        # All storages of this file hold 4-byte elements.
        return (
            data if "/data/" not in name else struct.pack(f">{len(data) // 4}f", *memoryview(data).cast("f"))
        )

    torch.save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "little.pt")
    reader = open_checkpoint(rewritten(tmp_path / "little.pt", tmp_path / "big.pt", turned))
    assert bytes(reader.read("w")) == struct.pack("<6f", *range(6))


def test_a_missing_and_a_short_storage_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    def cut(name: str, data: bytes) -> bytes | None:
        if name.endswith("/data/0"):
            return None
        return data[:-1] if name.endswith("/data/1") else data

    reader = open_checkpoint(rewritten(GOLDEN / "training.pt", tmp_path / "cut.pt", cut))
    assert {problem.problem for problem in reader.problems} == {
        "tensor model/0.weight: this entry is missing",
        "tensor model/0.bias: expected 16 bytes, found 15",
    }
    for path in ("model/0.weight", "model/0.bias"):
        with pytest.raises(DamagedError):
            reader.read(path)
    assert len(reader.read("model/1.weight")) == 16


def test_a_shard_that_is_missing_or_of_another_model_makes_the_checkpoint_incomplete(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "sharded", tmp_path / "missing")
    (tmp_path / "missing/model-00002-of-00002.safetensors").unlink()
    found = describe(open_checkpoint(tmp_path / "missing"))
    assert [problem["file"] for problem in found["problems"]] == ["model-00002-of-00002.safetensors"]
    assert not found["complete"]
    assert len(found["tensors"]) == 5
    shutil.copytree(GOLDEN / "sharded", tmp_path / "other")
    shutil.copy(GOLDEN / "weights.safetensors", tmp_path / "other/model-00002-of-00002.safetensors")
    assert "the index does not name it" in str(open_checkpoint(tmp_path / "other").problems)


def test_no_shard_is_followed_out_of_the_directory(tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    shutil.copy(GOLDEN / "weights.safetensors", secret)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/linked.safetensors").symlink_to(secret)
    for name in ("../secret.safetensors", str(secret), "linked.safetensors", "..", ""):
        index = {"weight_map": {"0.weight": name}}
        (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
        reader = open_checkpoint(tmp_path / "model")
        assert (len(reader.problems), len(reader.tensors)) == (1, 0), name


def test_links_into_the_cache_of_a_model_hub_are_followed(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "sharded", tmp_path / "blobs")
    revision = tmp_path / "snapshots/abc"
    revision.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (revision / file.name).symlink_to(Path("../../blobs") / file.name)
    reader = open_checkpoint(revision)
    assert (reader.problems, len(reader.tensors)) == ([], 9)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"a": [0, 4], "b": [2, 6]}, "overlaps"),
        ({"a": [0, 4], "b": [6, 10]}, "2 bytes before it are nobody's"),
        ({"a": [0, 4]}, "4 bytes at the end are nobody's"),
        ({"a": [0, 4], "b": [4, 8], "c": [8, 12]}, "the file ends 4 bytes before it"),
    ],
)
def test_tensors_that_do_not_tile_a_safetensors_file_are_named(
    tmp_path: Path, header: dict[str, list[int]], problem: str
) -> None:
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": at} for name, at in header.items()}
    text = json.dumps(entries).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    assert any(problem in found.problem for found in open_checkpoint(tmp_path / "x").problems)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        '{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": 1}',
        '{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": 1}',
        '{"a": ' + "[" * 100_000,
        '{"a": {"dtype": "F32", "shape": [' + "1000000000, " * 64 + '1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_hostile_header_is_damage_and_nothing_worse(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(8))
    with pytest.raises(DamagedError):
        open_checkpoint(tmp_path / "x")


def test_a_view_that_repeats_a_few_bytes_for_ever_is_listed_and_not_written_out(tmp_path: Path) -> None:
    many = torch.zeros(40).as_strided((2,) * 24, (1,) * 24)
    wide = torch.zeros(1).expand((2,) * 24)
    torch.save({"vast": torch.zeros(1).expand(1 << 40), "many": many, "wide": wide}, tmp_path / "x.pt")
    reader = open_checkpoint(tmp_path / "x.pt")
    assert reader.tensors["vast"].size_bytes == 4 << 40
    for name in ("vast", "many"):
        with pytest.raises(StorageError, match="repeat"):
            reader.read(name)
    assert len(reader.read("wide")) == 64 << 20


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128]
)
def test_views_of_every_stride_are_written_out_in_order(tmp_path: Path, dtype: torch.dtype) -> None:
    grid = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
    views = {
        "turned": grid.permute(3, 1, 0, 2),
        "steps": grid[:, 1:, ::2, 1::3],
        "row": grid[1, 2, 3],
        "column": grid[:, 0, 0, 4],
        "repeated": grid[:, :1].expand(2, 3, 4, 5),
        "swapped": grid.transpose(0, 3)[0],
        "one": grid[:1, :1, :1, 2:3].transpose(0, 1),
        "none": grid[:, :0].transpose(0, 2),
    }
    torch.save(views, tmp_path / "views.pt")
    reader = open_checkpoint(tmp_path / "views.pt")
    for name, view in views.items():
        assert bytes(reader.read(name)) == bytes_of(view), name


def test_names_that_no_terminal_takes_are_shown_in_ascii(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    tensor = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"__metadata__": {"\ud800": "\udfff"}, "\ud801": tensor})
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"x")
    for arguments in (["inspect", "--json"], ["inspect", "--tensors"], ["verify"]):
        assert main([arguments[0], str(tmp_path / "x"), *arguments[1:]]) == 0
        capsysbinary.readouterr().out.decode()


def test_no_framework_is_loaded() -> None:
    script = (
        "import sys; from unbroken.cli.main import main\n"
        f"for name in {[*TRAINING, 'weights.safetensors', 'sharded', 'arrays.npz']!r}:\n"
        f"    assert main(['inspect', {str(GOLDEN)!r} + '/' + name]) == 0\n"
        "assert not {'torch', 'numpy', 'safetensors', 'pickle'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
