"""`unbroken convert --rename --dtype`: other names and another dtype, or nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.errors import UsageError
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint
from unbroken.state.renaming import idle_segments, renaming

from ..checkpoint.states import snapshot_at
from .golden import GOLDEN, bytes_of


def source_in(directory: Path) -> Path:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {
        "model": {"body.0.weight": weight, "body.0.bias": torch.ones(2), "head.weight": weight},
        "step": torch.tensor(7),
        "epoch": 3,
    }
    torch.save(state, directory / "x.pt")
    return directory / "x.pt"


def written(directory: Path, rename: object) -> Path:
    path = directory / "rename.map"
    path.write_text(rename if isinstance(rename, str) else json.dumps(rename))
    return path


def refused(directory: Path, capsys: pytest.CaptureFixture[str], rename: object, *more: str) -> str:
    source, names = source_in(directory), written(directory, rename)
    target = directory / "y.safetensors"
    assert main(["convert", str(source), str(target), "--rename", str(names), *more]) == 2
    assert {file.name for file in directory.iterdir()} == {"x.pt", "rename.map"}
    return capsys.readouterr().err


@pytest.mark.parametrize("between", ["/", "."])
def test_names_and_first_segments_are_mapped_and_the_longest_rule_counts(
    tmp_path: Path, between: str
) -> None:
    source = source_in(tmp_path)
    rename = {"model": "net", f"model/body{between}": "trunk", "model/head.weight": "model/last", "step": "n"}
    if between == ".":
        rename["model/body"] = rename.pop("model/body.")
    names = written(tmp_path, rename)
    assert main(["convert", str(source), str(tmp_path / "y.safetensors"), "--rename", str(names)]) == 0
    found = load_file(tmp_path / "y.safetensors")
    assert set(found) == {"trunk.0.weight", "trunk.0.bias", "n"}
    assert found["trunk.0.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    beside = json.loads((tmp_path / "y.json").read_text())
    assert beside["aliases"] == {"trunk.0.weight": ["model/last"]}
    assert beside["values"]["model"]["head.weight"] == {"$tensor": "trunk.0.weight"}
    assert beside["values"]["step"] == {"$tensor": "n"}
    assert beside["renamed"] == {
        "model/body.0.weight": "trunk.0.weight",
        "model/body.0.bias": "trunk.0.bias",
        "model/head.weight": "model/last",
        "step": "n",
    }
    assert beside["cast"] == {}


def test_what_becomes_nothing_is_cut_off(tmp_path: Path) -> None:
    convert(open_checkpoint(source_in(tmp_path)), tmp_path / "y.safetensors", rename={"model": ""})
    model = torch.nn.ModuleDict({"body": torch.nn.Sequential(torch.nn.Linear(3, 2))})
    found = load_file(tmp_path / "y.safetensors")
    assert found.pop("step").item() == 7
    assert model.load_state_dict(found)


def test_every_format_gets_the_new_names(tmp_path: Path) -> None:
    source = open_checkpoint(source_in(tmp_path))
    for name, opened in (("y.index", "y"), ("y.weights.h5", "y.weights.h5"), ("y.safetensors",) * 2):
        convert(source, tmp_path / name, rename={"model": "net"})
        assert set(open_checkpoint(tmp_path / opened).tensors) == {
            "net/body.0.weight",
            "net/body.0.bias",
            "step",
        }
        (tmp_path / "y.json").unlink()


def test_a_rule_that_fits_nothing_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "'model/bod', which fits none" in refused(tmp_path, capsys, {"model/bod": "trunk", "step": "n"})


@pytest.mark.parametrize(
    "rename",
    [
        {"model/body.0.weight": "step"},
        {"model/body.0.weight": "w", "model/body.0.bias": "w"},
        {"model/head.weight": "model/body.0.weight"},
    ],
)
def test_two_names_that_become_one_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rename: dict[str, str]
) -> None:
    assert "expected a map that keeps tensors apart" in refused(tmp_path, capsys, rename)


def test_a_tensor_keeps_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'step' become nothing" in refused(tmp_path, capsys, {"step": ""})


def test_two_names_may_change_places(tmp_path: Path) -> None:
    rename = {"model/body.0.bias": "step", "step": "model/body.0.bias"}
    convert(open_checkpoint(source_in(tmp_path)), tmp_path / "y.safetensors", rename=rename)
    found = load_file(tmp_path / "y.safetensors")
    assert (found["step"].tolist(), found["model/body.0.bias"].item()) == ([1, 1], 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "found a list"),
        ("{", "Expecting property name"),
        ('{"step": 3}', "'step' becomes 3"),
        ('{"step": {"a": "b"}}', "'step' becomes"),
        ('{"step": "a", "step": "b"}', "two rules for 'step'"),
        ("{}", "an empty one"),
        ('{"step": "\\ud800"}', "which is no text"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_map_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    assert words in refused(tmp_path, capsys, text)


def test_a_map_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = [str(source_in(tmp_path)), str(tmp_path / "y.safetensors")]
    assert main(["convert", *place, "--rename", str(tmp_path / "no.json")]) == 2
    assert "expected a file with a map of names, found none" in capsys.readouterr().err


def test_a_map_for_places_that_keras_gives_is_refused(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN.parent / "keras/small.weights.h5")
    with pytest.raises(UsageError, match="where Keras looks for them"):
        convert(source, tmp_path / "z.weights.h5", rename={"small": "b"})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16"])
def test_floating_point_tensors_are_cast_and_no_others(tmp_path: Path, dtype: str) -> None:
    state = {
        "single": torch.tensor([1.0, -0.1, 3e38, torch.inf]),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "brain": torch.ones(0, 2, dtype=torch.bfloat16),
        "half": torch.tensor([[0.1]], dtype=torch.float16),
        "eight": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
        "count": torch.arange(3),
        "mask": torch.tensor([True, False]),
        "wave": torch.tensor([1 + 2j], dtype=torch.complex64),
    }
    torch.save(state, tmp_path / "x.pt")
    command = ["convert", str(tmp_path / "x.pt"), str(tmp_path / "y.safetensors"), "--dtype", dtype.lower()]
    assert main(command) == 0
    found = load_file(tmp_path / "y.safetensors")
    kind = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    for name, tensor in state.items():
        kept = name in ("count", "mask", "wave")
        wide = tensor.float() if name == "eight" else tensor
        expected = tensor if kept else wide.to(kind)
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
        assert bytes_of(found[name]) == bytes_of(expected), name
    before = {"single": "F32", "double": "F64", "brain": "BF16", "half": "F16", "eight": "F8_E4M3"}
    cast = json.loads((tmp_path / "y.json").read_text())["cast"]
    assert cast == {name: kind for name, kind in before.items() if kind != dtype}


def test_tensors_in_which_numbers_became_infinite_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = torch.tensor([65519.0, 65520.0, -1e9, torch.inf, torch.nan])
    torch.save({"large": large, "small": torch.ones(2)}, tmp_path / "x.pt")
    target, names = tmp_path / "y.safetensors", written(tmp_path, {"large": "big"})
    options = ["--dtype", "F16", "--rename", str(names), "--json"]
    assert main(["convert", str(tmp_path / "x.pt"), str(target), *options]) == 0
    shown = capsys.readouterr()
    line = "tensor big: 2 finite numbers of F32 are infinite as F16"
    assert shown.err == f"not as it was: {line}\n"
    assert json.loads(shown.out)["dropped"] == [line]
    assert json.loads((tmp_path / "y.json").read_text())["dropped"] == [line]
    found = load_file(target)["big"]
    assert found[:4].tolist() == [65504.0, torch.inf, -torch.inf, torch.inf]
    assert found[4].isnan()


def test_our_own_checkpoints_are_renamed_and_cast_too(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "run").save(snapshot_at(3))
    source = open_checkpoint(tmp_path / "run/checkpoints/step-00000003")
    convert(source, tmp_path / "y.safetensors", rename={"model": ""}, dtype="BF16")
    found = load_file(tmp_path / "y.safetensors")
    expected = torch.frombuffer(bytearray(source.read("model/weight")), dtype=torch.float32)
    assert torch.equal(found["weight"].reshape(-1), expected.to(torch.bfloat16))


def test_nothing_of_a_cast_needs_numpy_or_torch(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
for name in ("numpy", "torch"):
    sys.modules[name] = None
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint
convert(open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]), rename={"step": "n"}, dtype="BF16")
"""
    place = [str(source_in(tmp_path)), str(tmp_path / "y.safetensors")]
    done = subprocess.run([sys.executable, "-c", script, *place], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert load_file(tmp_path / "y.safetensors")["model/body.0.bias"].dtype == torch.bfloat16


def test_the_longest_rule_counts_wherever_segments_end() -> None:
    new = renaming({"a": "x", "a.b": "y", "a.b.c": ""}, boundaries="./")
    assert [new(name) for name in ("a", "a.bc", "a/b", "a.b/z", "a.b.c.d", "ab")] == [
        "x",
        "x.bc",
        "x/b",
        "y/z",
        "d",
        "ab",
    ]


def test_rules_that_a_longer_one_hides_are_no_slip_of_the_pen() -> None:
    assert idle_segments({"a": "x", "a.b": "y", "c": "z"}, ["a.b.c", "d"]) == ["c"]
