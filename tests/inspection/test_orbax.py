"""Checkpoints of Orbax: each layout is read as it was written, and what is missing is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.cli.main import main
from unbroken.errors import DamagedError, StorageError, UnbrokenError, UsageError
from unbroken.inspection import doctor, neighbours, roles
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats import orbax
from unbroken.inspection.formats.base import CheckpointReader
from unbroken.inspection.formats.orbax_arrays import Arrays, library

GOLDEN = Path(__file__).resolve().parents[1] / "golden/orbax"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
LAYOUTS = ["steps", "plain", "zarr3"]
# What of it nobody needs who reads the arrays.
_BESIDE = ("_sharding", "commit_success.txt", "process_0", "_CHECKPOINT_METADATA")


@pytest.fixture
def copy(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    name = getattr(request, "param", "plain")
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def opened(directory: Path) -> tuple[CheckpointReader, str]:
    reader = open_checkpoint(directory)
    return reader, "state/" if any(path.startswith("state/") for path in reader.tensors) else ""


def problems_of(directory: Path) -> list[str]:
    try:
        reader = open_checkpoint(directory)
        return [found.problem for found in [*reader.problems, *reader.verify()]]
    except DamagedError as error:
        return [error.message]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_array_is_read_bit_for_bit(layout: str) -> None:
    reader, below = opened(GOLDEN / layout)
    assert reader.tensors.keys() == {f"{below}{path}" for path in EXPECTED}
    for path, expected in EXPECTED.items():
        entry = reader.tensors[f"{below}{path}"]
        found = bytes(reader.read(f"{below}{path}"))
        assert entry.shape == tuple(expected["shape"]), path
        # Of four bits a byte each: its upper half in memory of that library is not said to be anything.
        assert found.hex() == ("01fe" if expected["dtype"] == "int4" else expected["bytes"]), path
    assert (reader.problems, [*reader.verify()], reader.checksums) == ([], [], None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_no_array_is_plain_data(layout: str) -> None:
    values = open_checkpoint(GOLDEN / layout).values
    state = values.get("state", values)
    assert (state["step"], state["lr"], state["none"], state["empty"]) == (7, 0.5, None, {})
    assert state["opt"][1] == {"count": {"$tensor": f"{'state/' if state is not values else ''}opt/1/count"}}
    if layout == "steps":
        assert (state["name"], values["extra"]) == ("run", {"epoch": 2})


def test_what_several_devices_wrote_in_parts_is_one_array() -> None:
    reader = open_checkpoint(GOLDEN / "sharded")
    assert (reader.problems, [*reader.verify()]) == ([], [])
    for path, first in (("params/kernel", 0), ("opt_state/0/mu/kernel", 100), ("opt_state/0/nu/kernel", 200)):
        assert reader.tensors[path].shape == (4, 6)
        assert [*reader.read(path).cast("f")] == [*range(first, first + 24)]


def test_states_of_optax_are_known_for_optimizers() -> None:
    reader = open_checkpoint(GOLDEN / "sharded")
    assert roles.optimizers_in(reader) == [
        {
            "where": "opt_state/0",
            "groups": 1,
            "parameters": 1,
            "learning_rates": [],
            "states": 1,
            "moments": ["mu", "nu"],
        }
    ]
    assert not any("it holds no optimizer" in one.text for one in doctor.examine(reader))
    trace = {"trace": {"a": {"$tensor": "a"}, "b": [{"$tensor": "b/0"}, {"$tensor": "b/1"}]}}
    assert [found["parameters"] for found in roles.optimizers({"opt": [trace, {}]})] == [3]
    # A model may have layers of these names, and numbers.
    assert roles.optimizers({"trace": 3, "mu": {"kernel": {"$tensor": "mu"}, "nu": {}}}) == []


def test_a_directory_of_steps_means_the_one_that_orbax_would_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Path(shutil.copytree(GOLDEN / "steps", tmp_path / "steps"))
    assert open_checkpoint(steps).path == steps / "7"
    (steps / "12").mkdir()
    assert main(["inspect", str(steps)]) == 3
    assert "expected a checkpoint in 12, which Orbax takes for the last one, found none; 7 is one" in (
        capsys.readouterr().err
    )
    advice = neighbours.advise(open_checkpoint(steps / "7"))
    assert any("12 is not whole, and a trainer that takes the last one" in one.text for one in advice)


def test_folders_of_numbers_are_steps_of_orbax_only_beside_one_of_orbax(tmp_path: Path) -> None:
    weights = tmp_path / "7/weights.safetensors"
    weights.parent.mkdir()
    assert main(["convert", str(GOLDEN / "plain"), str(weights)]) == 0
    (tmp_path / "12").mkdir()
    assert neighbours.advise(open_checkpoint(weights)) == []
    (tmp_path / "7/trainer_state.json").write_text("{}")
    assert not any("12" in one.text for one in neighbours.advise(open_checkpoint(tmp_path / "7")))


def test_without_tensorstore_names_are_told_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(orbax, "library", lambda: None)
    reader = open_checkpoint(GOLDEN / "steps")
    assert (reader.tensors, reader.problems) == ({}, [])
    assert reader.values["state"]["params"]["dense"]["kernel"] == {"type": "jax.Array"}
    assert (reader.values["state"]["name"], reader.values["extra"]) == ("run", {"epoch": 2})
    assert any("pip install 'unbroken[orbax]'" in note for note in reader.notes)
    # What nobody has looked at is not said to be sound, and a file without weights is none.
    with pytest.raises(UsageError, match="expected tensorstore"):
        reader.read("state/step")
    asked = ["verify"], ["inspect", "--verify"], ["convert"]
    for command in asked:
        target = [str(tmp_path / "weights.safetensors")] if command == ["convert"] else []
        assert main([*command, str(GOLDEN / "steps"), *target]) == 2
        assert "pip install 'unbroken[orbax]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("copy", LAYOUTS, indirect=True)
def test_any_file_that_is_missing_is_told(copy: Path) -> None:
    step = copy / "7" if (copy / "7").is_dir() else copy
    assert problems_of(step) == []
    needed = [path for path in step.rglob("*") if path.is_file() and path.name not in _BESIDE]
    # Each process has a store of its own, of which the merged one needs no index.
    needed = [path for path in needed if not (path.name == "manifest.ocdbt" and "process" in str(path))]
    unnoticed = []
    for path in needed:
        data = path.read_bytes()
        path.unlink()
        if not problems_of(step):
            unnoticed.append(path.relative_to(step))
        path.write_bytes(data)
    # A process leaves old parts of its index, which the common one has taken the place of.
    left = {path for path in step.glob("**/ocdbt.process_*/d/*") if path.relative_to(step) in unnoticed}
    assert len(left) == len(unnoticed)
    assert not left or left < set(step.glob("**/ocdbt.process_*/d/*"))


@pytest.mark.parametrize("copy", ["plain", "sharded"], indirect=True)
def test_a_chunk_of_another_name_is_none(copy: Path) -> None:
    chunk = next(path for path in (copy / "numpy/0", copy / "params.kernel/1.0") if path.exists())
    chunk.rename(chunk.with_name("7" if chunk.name == "0" else "7.0"))
    assert problems_of(copy) != []


@pytest.mark.parametrize("copy", ["plain", "zarr3", "steps"], indirect=True)
def test_older_ones_that_say_less_are_read_as_well(copy: Path) -> None:
    expected, below = opened(GOLDEN / copy.name)
    step = copy / "7" if copy.name == "steps" else copy
    for path in step.rglob("_METADATA"):
        said = json.loads(path.read_text())
        path.write_text(json.dumps({"tree_metadata": said["tree_metadata"]}))
    for path in step.rglob("_CHECKPOINT_METADATA"):
        said = json.loads(path.read_text())
        path.write_text(json.dumps({"commit_timestamp_nsecs": said["commit_timestamp_nsecs"]}))
    reader = open_checkpoint(step)
    assert reader.problems == []
    assert {path: bytes(reader.read(path)) for path in reader.tensors} == {
        path: bytes(expected.read(path)) for path in expected.tensors
    }
    assert any("chunks of zeros were left out" in note for note in reader.notes)
    assert (reader.values.get("extra") == {"epoch": 2}) == (below == "state/")


def test_in_older_ones_a_chunk_that_was_left_out_is_zeros(copy: Path) -> None:
    (copy / "numpy/0").unlink()
    assert any("numpy" in problem for problem in problems_of(copy))
    said = json.loads((copy / "_METADATA").read_text())
    del said["store_array_data_equal_to_fill_value"]
    (copy / "_METADATA").write_text(json.dumps(said))
    assert bytes(open_checkpoint(copy).read("numpy")) == bytes(24)


def test_a_save_that_did_not_end_is_told(tmp_path: Path) -> None:
    half = Path(shutil.copytree(GOLDEN / "plain", tmp_path / "9.orbax-checkpoint-tmp"))
    assert any("a save that did not end" in problem for problem in problems_of(half))
    begun = Path(shutil.copytree(GOLDEN / "plain", tmp_path / "9"))
    said = json.loads((begun / "_CHECKPOINT_METADATA").read_text())
    (begun / "_CHECKPOINT_METADATA").write_text(json.dumps({**said, "commit_timestamp_nsecs": None}))
    assert any("never committed" in problem for problem in problems_of(begun))


@pytest.mark.parametrize("copy", ["steps"], indirect=True)
def test_an_item_that_is_missing_is_told(copy: Path) -> None:
    shutil.rmtree(copy / "7/state")
    reader = open_checkpoint(copy / "7")
    assert [(found.file, found.problem) for found in reader.problems] == [("state", "the item is missing")]


def test_links_are_not_followed(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes((copy / "numpy/0").read_bytes())
    (copy / "numpy/0").unlink()
    (copy / "numpy/0").symlink_to(tmp_path / "elsewhere")
    reader = open_checkpoint(copy)
    assert [(found.file, found.problem) for found in reader.problems] == [
        ("numpy/0", "a link, which is not followed")
    ]
    assert reader.tensors == {}


def test_a_few_bytes_do_not_become_terabytes(copy: Path) -> None:
    shape = [1 << 40]
    described = json.loads((copy / "numpy/.zarray").read_text())
    (copy / "numpy/.zarray").write_text(json.dumps({**described, "shape": shape, "chunks": shape}))
    tree = json.loads((copy / "_METADATA").read_text())
    tree["tree_metadata"]["('numpy',)"]["value_metadata"]["write_shape"] = shape
    (copy / "_METADATA").write_text(json.dumps(tree))
    reader = open_checkpoint(copy)
    with pytest.raises(StorageError, match="are not written out"):
        reader.read("numpy")
    assert any("are not written out" in problem for problem in problems_of(copy))


def test_chunks_that_are_larger_than_their_array_are_refused(tmp_path: Path) -> None:
    huge = [1 << 40]
    plain = Path(shutil.copytree(GOLDEN / "plain", tmp_path / "plain"))
    described = json.loads((plain / "numpy/.zarray").read_text())
    (plain / "numpy/.zarray").write_text(json.dumps({**described, "chunks": huge}))
    assert any("chunks of an array of [3]" in problem for problem in problems_of(plain))
    inner = deep = _sharding(huge, {"name": "bytes"})
    for _ in range(20):
        deep = _sharding([3], deep)
    for codec in (inner, deep):
        (tmp_path / "third/numpy").mkdir(parents=True, exist_ok=True)
        (tmp_path / "third/numpy/zarr.json").write_text(
            json.dumps(
                {
                    "shape": [3],
                    "data_type": "int64",
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3]}},
                    "codecs": [codec],
                }
            )
        )
        arrays = Arrays(library(), tmp_path / "third", 1 << 10, is_ocdbt=False, may_lack_chunks=False)
        with pytest.raises(DamagedError, match=r"chunks of an array of \[3\]"):
            arrays.array("numpy")


def _sharding(piece: list[int], codec: dict[str, Any]) -> dict[str, Any]:
    return {"name": "sharding_indexed", "configuration": {"chunk_shape": piece, "codecs": [codec]}}


def test_it_is_converted_with_all_its_bits(tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    assert main(["convert", str(GOLDEN / "zarr3"), str(target)]) == 0
    made, source = open_checkpoint(target), open_checkpoint(GOLDEN / "zarr3")
    assert made.tensors.keys() == source.tensors.keys()
    for path in source.tensors:
        assert bytes(made.read(path)) == bytes(source.read(path)), path


_BAD_VALUES: list[Any] = [[1], 1, None, "x", float("inf"), {}, {"key": "x", "key_type": float("inf")}]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_other_value_in_its_json_is_an_error_of_ours_or_does_no_harm(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("orbax") / "9"
    shutil.copytree(GOLDEN / data.draw(st.sampled_from(["steps/7", "plain", "zarr3"])), directory)
    names = ("_METADATA", "_CHECKPOINT_METADATA", ".zarray", "metadata", "_strings.json")
    files = sorted(path for path in directory.rglob("*") if path.name in names and path.is_file())
    file = data.draw(st.sampled_from(files))
    whole = json.loads(file.read_text())
    places = [*_places(whole)]
    place = data.draw(st.sampled_from(places))
    file.write_text(json.dumps(_replaced(whole, place, data.draw(st.sampled_from(_BAD_VALUES)))))
    try:
        reader = open_checkpoint(directory)
        assert all(isinstance(one.problem, str) for one in [*reader.problems, *reader.verify()])
        json.dumps(reader.values)
    except UnbrokenError:
        pass
    finally:
        shutil.rmtree(directory)


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*place, key))


def _replaced(value: Any, place: tuple[str | int, ...], by: Any) -> Any:
    if not place:
        return by
    made = value.copy()
    made[place[0]] = _replaced(value[place[0]], place[1:], by)
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_is_an_error_of_ours_or_does_no_harm(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout = data.draw(st.sampled_from(["steps/7", "plain", "zarr3"]))
    directory = tmp_path_factory.mktemp("orbax") / "9"
    shutil.copytree(GOLDEN / layout, directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        reader = open_checkpoint(directory)
        found = [*reader.problems, *reader.verify()]
        json.dumps(reader.values)
        for path in reader.tensors:
            reader.read(path)
    except UnbrokenError:
        pass
    else:
        assert all(isinstance(one.problem, str) for one in found)
    finally:
        shutil.rmtree(directory)
