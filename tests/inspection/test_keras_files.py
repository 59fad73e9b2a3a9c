"""Files of Keras are read as h5py reads them, without Keras, TensorFlow or the C library of HDF5."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.cli.main import main
from unbroken.errors import DamagedError, UnbrokenError, UsageError
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.foreign import describe
from unbroken.inspection.hdf5_target import distinct

GOLDEN = Path(__file__).resolve().parents[1] / "golden/keras"
WHOLE = ["small.weights.h5", "small.keras", "small-legacy.h5"]
FILES = [*WHOLE, "odd-earliest.h5", "odd-latest.h5"]
ODD = ["odd-earliest.h5", "odd-latest.h5"]
WEIGHTS = [
    "layers/dense/kernel",
    "layers/dense/bias",
    "layers/batch_normalization/gamma",
    "layers/batch_normalization/beta",
    "layers/batch_normalization/moving_mean",
    "layers/batch_normalization/moving_variance",
    "layers/dense_1/kernel",
    "layers/dense_1/bias",
]


def arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what h5py reads in a file, by the paths there."""
    if path.suffix == ".keras":
        with (
            zipfile.ZipFile(path) as archive,
            archive.open("model.weights.h5") as inner,
            h5py.File(inner) as file,
        ):
            yield from in_group(file)
    else:
        with h5py.File(path) as file:
            yield from in_group(file)


def in_group(group: h5py.Group) -> list[tuple[str, np.ndarray]]:
    found: list[tuple[str, np.ndarray]] = []
    group.visititems(
        lambda path, item: found.append((path, item[()])) if isinstance(item, h5py.Dataset) else None
    )
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_every_variable_of_a_file_of_keras_is_read_bit_for_bit(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    places = {entry.where: path for path, entry in reader.tensors.items()}
    expected = dict(arrays(GOLDEN / name))
    assert places.keys() == expected.keys()
    assert len(expected) == 22
    for place, value in expected.items():
        assert reader.tensors[places[place]].shape == value.shape
        assert bytes(reader.read(places[place])) == value.tobytes()
    assert reader.problems == []
    assert list(reader.verify()) == []


@pytest.mark.parametrize("name", ["small.weights.h5", "small.keras"])
def test_variables_that_only_have_numbers_are_shown_by_what_keras_calls_them(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    names = list(reader.tensors)
    assert {name for name in names if name.startswith("model/")} == {f"model/{name}" for name in WEIGHTS}
    assert names[:4] == ["optimizer/iteration", "optimizer/learning_rate", "optimizer/2", "optimizer/3"]
    assert reader.facts["metadata"]["layers"]["layers/dense"] == "first"
    assert any("seed generators" in note for note in reader.notes)


def test_a_legacy_file_gives_its_own_names_and_its_configuration() -> None:
    reader = open_checkpoint(GOLDEN / "small-legacy.h5")
    assert "model/small/first/kernel" in reader.tensors
    assert reader.facts["metadata"]["backend"] == "tensorflow"
    assert reader.facts["config"]["class_name"] == "Sequential"
    assert any("never run: twice" in note for note in reader.notes)


def test_a_keras_archive_tells_its_version_and_its_layers_of_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(GOLDEN / "small.keras"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    versions = json.loads((GOLDEN / "versions.json").read_text())
    assert found["metadata"]["keras_version"] == versions["keras"]
    assert found["metadata"]["model"] == "Sequential"
    assert "layers of code, which is never run: twice" in found["notes"]
    assert found["parts"]["model"]["tensors"] == 8


def test_verify_says_that_hdf5_has_no_checksums_and_finds_what_a_keras_archive_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(GOLDEN / "small.weights.h5")]) == 0
    assert "carries no checksum" in capsys.readouterr().out
    data = bytearray((GOLDEN / "small.keras").read_bytes())
    # In the middle of a kernel.
    kernel = dict(arrays(GOLDEN / "small.keras"))["layers/dense/vars/0"].tobytes()
    data[data.index(kernel) + 5] ^= 1
    (tmp_path / "changed.keras").write_bytes(data)
    assert main(["verify", str(tmp_path / "changed.keras")]) == 3
    assert "CRC-32" in capsys.readouterr().out


@pytest.mark.parametrize("name", ODD)
def test_other_hdf5_is_listed_by_its_paths_in_both_forms_of_its_headers(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    assert reader.format == "HDF5"
    assert {path: entry.dtype for path, entry in reader.tensors.items()} == {
        "big": "F64",
        "complex": "C64",
        "flags": "BOOL",
        "inner/numbers": "U16",
    }
    assert set(reader.tensors["flags"].aliases) == {"same", "soft"}
    assert np.frombuffer(reader.read("big"), "<f8").tolist() == [0, 1, 2]
    assert np.frombuffer(reader.read("complex"), "<c8").tolist() == [1 + 2j]
    assert any(note.startswith("pieces: its numbers lie in pieces") for note in reader.notes)


@pytest.mark.parametrize("name", ODD)
def test_numbers_in_other_files_are_a_finding_and_nobody_opens_those(name: str) -> None:
    reader = open_checkpoint(GOLDEN / name)
    found = {problem.file: problem.problem for problem in reader.problems}
    assert "not opened" in found["elsewhere"]
    assert "not followed" in found["far"]
    assert ("virtual" in found) == (name == "odd-latest.h5")
    assert describe(reader)["complete"] is False


fuzz = settings(
    max_examples=15,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def read_all(path: Path) -> None:
    try:
        reader = open_checkpoint(path)
        describe(reader)
        for name in reader.tensors:
            reader.read(name)
        list(reader.verify())
    except UnbrokenError:
        pass


@pytest.mark.parametrize("name", FILES)
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=8),
    length=st.just(1.0) | st.floats(0, 1, exclude_max=True),
)
@fuzz
def test_a_changed_or_cut_file_raises_nothing_but_our_errors(
    tmp_path: Path, name: str, flips: list[tuple[float, int]], length: float
) -> None:
    data = bytearray((GOLDEN / name).read_bytes())
    for place, bit in flips:
        data[int(place * len(data))] ^= 1 << bit
    target = tmp_path / "changed"
    target.write_bytes(data[: len(data) if length == 1 else int(length * len(data))])
    read_all(target)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("value", [0, 0xFF, 0x7FFF_FFFF_FFFF_FFFF])
def test_addresses_and_lengths_that_lead_anywhere_end_in_an_error(
    tmp_path: Path, name: str, value: int
) -> None:
    original = (GOLDEN / name).read_bytes()
    target = tmp_path / "hostile.h5"
    for place in range(0, min(len(original), 4096) - 8, 104):
        data = bytearray(original)
        struct.pack_into("<Q", data, place, value)
        target.write_bytes(data)
        read_all(target)


def test_groups_that_contain_one_another_are_listed_once(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "ring.h5", "w") as file:
        group = file
        for _ in range(5):
            group = group.create_group("in")
        group["top"] = file["/"]
        group["x"] = np.ones(2)
    reader = open_checkpoint(tmp_path / "ring.h5")
    assert list(reader.tensors) == ["in/in/in/in/in/x"]
    assert reader.problems == []


def test_a_configuration_that_is_a_bomb_is_named_and_not_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(GOLDEN / "small.keras") as old, zipfile.ZipFile(tmp_path / "deep.keras", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"[" * 100_000 if name == "config.json" else old.read(name))
    reader = open_checkpoint(tmp_path / "deep.keras")
    assert [problem.file for problem in reader.problems] == ["config.json"]
    assert len(reader.tensors) == 22


def test_without_pyfive_the_hint_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['pyfive'] = None\n"
        "from pathlib import Path\n"
        "from unbroken.inspection.detect import open_checkpoint\n"
        "from unbroken.errors import UsageError\n"
        "try: open_checkpoint(Path(sys.argv[1]))\n"
        "except UsageError as error: print(error.hint)\n"
    )
    command = [sys.executable, "-c", script, str(GOLDEN / "small.weights.h5")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install 'unbroken[hdf5]'" in done.stdout


def test_what_is_cut_short_is_incomplete_wherever_it_was_cut(tmp_path: Path) -> None:
    data = (GOLDEN / "small.weights.h5").read_bytes()
    for length in range(2100, len(data), 2500):
        (tmp_path / "cut.h5").write_bytes(data[:length])
        assert any(
            "it was cut short" in found.problem for found in open_checkpoint(tmp_path / "cut.h5").problems
        )
    (tmp_path / "cut.h5").write_bytes(data[:50])
    with pytest.raises(DamagedError, match="a whole HDF5 file"):
        open_checkpoint(tmp_path / "cut.h5")
    (tmp_path / "text.h5").write_text("no file of Keras at all")
    with pytest.raises(UsageError, match="HDF5"):
        open_checkpoint(tmp_path / "text.h5")


@pytest.mark.parametrize("name", ["training.pt", "weights.safetensors"])
def test_tensors_of_other_formats_are_written_as_named_arrays_bit_for_bit(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = GOLDEN.parent / "foreign" / name, tmp_path / "x.weights.h5"
    assert main(["convert", str(source), str(target)]) == 0
    said = capsys.readouterr().err
    before, after = open_checkpoint(source), open_checkpoint(target)
    refused = {path for path, entry in before.tensors.items() if entry.dtype.startswith("F8")}
    assert after.tensors.keys() == before.tensors.keys() - refused
    for path, entry in after.tensors.items():
        assert (entry.dtype, entry.shape) == (before.tensors[path].dtype, before.tensors[path].shape)
        assert bytes(after.read(path)) == bytes(before.read(path)), path
    assert all(f"tensor {path}: HDF5 has no F8" in said for path in refused)
    assert "what is of a model of Keras only" in said
    with h5py.File(target) as file:
        assert set(dict(in_group(file))) == set(after.tensors)
    assert main(["convert", str(source), str(target)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.weights.h5"]


def test_what_keras_wrote_is_the_same_after_it_was_converted_twice(tmp_path: Path) -> None:
    source = GOLDEN / "small.weights.h5"
    assert main(["convert", str(source), str(tmp_path / "x.safetensors")]) == 0
    assert main(["convert", str(tmp_path / "x.safetensors"), str(tmp_path / "y.weights.h5")]) == 0
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "y.weights.h5")
    assert after.tensors.keys() == before.tensors.keys()
    assert all(bytes(after.read(path)) == bytes(before.read(path)) for path in before.tensors)


def test_a_name_that_others_lie_below_gets_one_of_its_own(tmp_path: Path) -> None:
    assert distinct(["a/b", "a", "a'", "c"]) == {"a/b": "a/b", "a": "a''", "a'": "a'", "c": "c"}
    np.savez(tmp_path / "x.npz", **{"a": np.ones(2), "a/b": np.zeros(3)})
    assert main(["convert", str(tmp_path / "x.npz"), str(tmp_path / "x.weights.h5")]) == 0
    assert {
        path: entry.shape for path, entry in open_checkpoint(tmp_path / "x.weights.h5").tensors.items()
    } == {
        "a'": (2,),
        "a/b": (3,),
    }
