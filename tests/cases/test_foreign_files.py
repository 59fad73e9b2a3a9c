"""Files that cannot be loaded where they are: what they hold is listed all the same and written out clean."""

from __future__ import annotations

import json
import pathlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unbroken.cli.main import main
from unbroken.state.readable import readable
from unbroken.state.table import TensorTable
from unbroken.state.tree import Encoder

GOLDEN = Path(__file__).resolve().parents[1] / "golden/foreign"


class _WindowsPath:
    """Pickled as the path class of the other platform, which cannot be built here."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pathlib.WindowsPath, ("D:\\", "runs", "digits"))


@pytest.fixture(params=["zip", "legacy", "golden"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a file that `torch.load` fails on: it names a class of Windows."""
    if request.param == "golden":
        return GOLDEN / "windows-path.pt"
    weights = {"w": torch.ones(2)}
    content = {"weights": weights, "output": _WindowsPath(), "data": pathlib.PosixPath("/data/digits")}
    path = tmp_path / "other-platform.pt"
    torch.save(content, path, _use_new_zipfile_serialization=request.param == "zip")
    return path


def test_a_file_that_names_a_path_class_of_another_platform_is_listed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match="WindowsPath"):
        torch.load(file, weights_only=False)
    assert main(["inspect", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["values"]["output"].endswith("\\runs\\digits")
    assert found["values"]["data"] == "/data/digits"
    assert [tensor["path"] for tensor in found["tensors"]] == ["weights/w"]
    assert found["objects"] == [], "a path is nothing that needs a warning"


def test_convert_writes_a_clean_file_of_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "clean.safetensors"
    assert main(["convert", str(file), str(target)]) == 0
    assert capsys.readouterr().err == "", "nothing was lost"
    assert load_file(target)["weights/w"].tolist() == [1.0, 1.0]
    beside = (tmp_path / "clean.json").read_text()
    assert json.loads(beside)["values"]["data"] == "/data/digits"
    assert "WindowsPath" not in beside


def test_our_own_files_hold_no_path_class_of_any_platform() -> None:
    state = {"output": pathlib.PosixPath("/runs/digits")}
    encoded = Encoder(TensorTable()).encode(state, "part")
    assert readable(encoded) == {"output": "/runs/digits"}
    assert "Posix" not in json.dumps(encoded)
