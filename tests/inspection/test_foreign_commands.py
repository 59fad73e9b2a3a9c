"""`inspect`, `verify` and `convert` on files of other libraries, as a person and as a program sees them."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats.torch_zip import TorchZip

from ..checkpoint.states import snapshot_at
from .golden import GOLDEN, bytes_of

ALL = [
    "training.pt",
    "training-legacy.pt",
    "whole-module.pt",
    "weights.safetensors",
    "sharded",
    "arrays.npz",
    "arrays-compressed.npz",
    "dcp/fsdp",
    "dcp/safetensors",
]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect_shows_what_a_file_is_and_what_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "inspect", GOLDEN / "training.pt", "--tensors")
    assert code == 0
    for line in (
        "torch.save, zip, complete, CRC-32 of each entry",
        "epoch 3, global_step 120",
        "learning rate 0.01",
        "optimizer  optimizer  6 parameters, 1 group, 6 states, each with exp_avg, exp_avg_sq, step",
        "pickle     names      argparse.Namespace (listed, never imported or called)",
    ):
        assert line in out.splitlines()
    assert "tied/first" in out
    assert [line.split()[:4] for line in out.splitlines() if line.startswith("kinds/bf16")] == [
        ["kinds/bf16", "BF16", "2", "4"]
    ]


@pytest.mark.parametrize("name", ALL)
def test_inspect_gives_programs_the_same_fields_for_every_format(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "inspect", GOLDEN / name, "--json")
    found = json.loads(out)
    assert (code, err, found["complete"]) == (0, "", True)
    assert len(found["tensors"]) == sum(part["tensors"] for part in found["parts"].values())
    fields = (
        "format",
        "checksums",
        "counters",
        "optimizers",
        "wrappers",
        "tied",
        "objects",
        "notes",
        "values",
    )
    assert all(field in found for field in fields)


def test_inspect_counts_the_names_that_wrappers_have_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"_orig_mod.module.a": torch.ones(1), "_orig_mod.b": torch.ones(1)}, tmp_path / "x.pt")
    found = json.loads(call(capsys, "inspect", tmp_path / "x.pt", "--json")[1])
    assert found["wrappers"] == {"module.": 1, "_orig_mod.": 2}


def test_names_and_values_cannot_move_the_cursor_of_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"\x1b[2J": torch.ones(1), "note": "\x1b[31mred"}, tmp_path / "x.pt")
    for arguments in (
        ("inspect", tmp_path / "x.pt", "--tensors"),
        ("diff", GOLDEN / "training.pt", tmp_path / "x.pt"),
    ):
        assert "\x1b" not in call(capsys, *arguments)[1]


def test_colour_is_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shutil.copytree(GOLDEN / "sharded", tmp_path / "model")
    (tmp_path / "model/model-00001-of-00002.safetensors").unlink()
    code, out, _ = call(capsys, "inspect", tmp_path / "model")
    assert code == 3
    assert "\x1b[31mINCOMPLETE\x1b[0m" in out
    assert "\\x1b" not in out


def test_numbers_and_groups_that_no_trainer_writes_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = [{"lr": 10**400, "params": []}]
    torch.save({"a": {"state": {}, "param_groups": groups}}, tmp_path / "x.pt")
    assert "learning rate 1000000" in call(capsys, "inspect", tmp_path / "x.pt")[1]
    torch.save({"a": {"state": {}, "param_groups": [{"params": 3}]}}, tmp_path / "y.pt")
    assert call(capsys, "inspect", tmp_path / "y.pt")[0] == 0
    assert call(capsys, "diff", tmp_path / "y.pt", tmp_path / "y.pt")[0] == 0


@pytest.mark.parametrize("name", ALL)
def test_verify_says_what_it_could_hold_a_file_against(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", GOLDEN / name)
    (row,) = json.loads(call(capsys, "verify", GOLDEN / name, "--json")[1])
    assert code == 0
    if row["checksums"] is None:
        assert row["intact"] is None
        assert "carries no checksum" in out
    else:
        assert row["intact"] is True
        assert out.rstrip().endswith("intact  " + out.split("intact  ")[1].rstrip())


def test_verify_names_the_entry_and_the_tensor_whose_bits_flipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(GOLDEN / "training.pt") as archive:
        place = archive.getinfo("training/data/7").header_offset
    data = bytearray((GOLDEN / "training.pt").read_bytes())
    # The elements are aligned to 64 bytes behind the header.
    data[(place // 64 + 2) * 64] ^= 1
    (tmp_path / "training.pt").write_bytes(data)
    code, out, _ = call(capsys, "verify", tmp_path / "training.pt")
    assert code == 3
    assert out.splitlines()[0] == "training.pt  DAMAGED"
    assert "training/data/7: tensor model/2.weight: expected CRC-32" in out
    (row,) = json.loads(call(capsys, "verify", tmp_path / "training.pt", "--json")[1])
    assert (row["intact"], [found["file"] for found in row["findings"]]) == (False, ["training/data/7"])


@pytest.mark.parametrize("name", ["training.pt", "arrays.npz"])
def test_a_zip_file_whose_first_bytes_are_gone_is_damaged_not_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).write_bytes(bytes(4) + (GOLDEN / name).read_bytes()[4:])
    assert call(capsys, "verify", tmp_path / name)[0] == 3


@pytest.mark.parametrize("name", ["training.pt", "training-legacy.pt", "weights.safetensors", "arrays.npz"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_that_was_cut_short_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    (tmp_path / name).write_bytes((GOLDEN / name).read_bytes()[:-5])
    assert call(capsys, command, tmp_path / name)[0] == 3
    if command == "verify":
        (row,) = json.loads(call(capsys, command, tmp_path / name, "--json")[1])
        assert (row["intact"], len(row["findings"]) > 0) == (False, True)


def test_an_archive_without_checksums_is_not_called_intact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(5.0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    code, out, _ = call(capsys, "verify", tmp_path / "x.pt")
    assert code == 0
    assert "torch.save, zip carries no checksum" in out


@pytest.mark.parametrize("name", ["training.pt", "training-legacy.pt"])
def test_convert_writes_every_bit_and_says_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    target = tmp_path / "clean.safetensors"
    code, out, err = call(capsys, "convert", GOLDEN / name, target)
    assert code == 0
    assert out.startswith(f"{target}  43 tensors")
    expected, found = torch.load(GOLDEN / "training.pt", weights_only=False), load_file(target)
    for part in ("model", "kinds"):
        for key, value in expected[part].items():
            assert bytes_of(found[f"{part}/{key}"]) == bytes_of(value), key
    assert torch.equal(found["tied/turned"], expected["tied"]["turned"])
    assert np.array_equal(found["numpy/swapped"].numpy(), expected["numpy"]["swapped"])
    beside = json.loads((tmp_path / "clean.json").read_text())
    assert beside["aliases"] == {"tied/first": ["tied/second"]}
    assert beside["values"]["epoch"] == 3
    assert beside["values"]["plain"]["nan"] == "nan"
    assert "not as it was: objects of argparse.Namespace" in err
    assert beside["dropped"] == [line.removeprefix("not as it was: ") for line in err.splitlines()]


def test_convert_says_which_tensors_safetensors_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2), "z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "x.pt")
    done = json.loads(call(capsys, "convert", tmp_path / "x.pt", tmp_path / "y.safetensors", "--json")[1])
    assert (done["tensors"], done["dropped"]) == (1, ["tensor z: safetensors has no C128"])


def test_convert_takes_arrays_and_our_own_checkpoints_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, "convert", GOLDEN / "arrays.npz", tmp_path / "a.safetensors")[0] == 0
    assert load_file(tmp_path / "a.safetensors")["columns"].tolist() == [[0, 1, 2], [3, 4, 5]]
    CheckpointStore(tmp_path / "run").save(snapshot_at(3))
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    assert call(capsys, "convert", checkpoint, tmp_path / "b.safetensors")[0] == 0
    assert call(capsys, "diff", checkpoint, tmp_path / "b.safetensors")[0] == 0


def test_convert_overwrites_nothing_and_leaves_nothing_half_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x.safetensors", "x.json"):
        (tmp_path / name).write_text("mine")
        code, _, err = call(capsys, "convert", GOLDEN / "training.pt", tmp_path / "x.safetensors")
        assert code == 2
        assert "exists already" in err
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    assert call(capsys, "convert", GOLDEN / "training.pt", tmp_path / "x.bin")[0] == 2
    assert call(capsys, "convert", GOLDEN / "training.pt", tmp_path / "no/x.safetensors")[0] == 2
    torch.save({"a": torch.ones(2), "vast": torch.zeros(1).expand(1 << 40)}, tmp_path / "vast.pt")
    assert call(capsys, "convert", tmp_path / "vast.pt", tmp_path / "x.safetensors")[0] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["vast.pt"]


def test_convert_leaves_nothing_after_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: TorchZip, path: str) -> memoryview:
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchZip, "read", interrupted)
    reader = open_checkpoint(GOLDEN / "training.pt")
    with pytest.raises(KeyboardInterrupt):
        convert(reader, tmp_path / "x.safetensors")
    assert not [file for file in tmp_path.iterdir() if not file.name.startswith(".")]


def test_convert_leaves_out_the_one_name_that_means_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"__metadata__": torch.ones(2), "w": torch.ones(3)}, tmp_path / "x.pt")
    done = json.loads(call(capsys, "convert", tmp_path / "x.pt", tmp_path / "y.safetensors", "--json")[1])
    assert (done["tensors"], len(done["dropped"])) == (1, 1)
    assert list(load_file(tmp_path / "y.safetensors")) == ["w"]


def test_convert_keeps_what_hangs_on_dictionaries_and_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tagged = torch.nn.Parameter(torch.ones(1))
    tagged.tag = "left"  # type: ignore[attr-defined]
    torch.save({"model": torch.nn.Linear(1, 1).state_dict(), "p": tagged}, tmp_path / "x.pt")
    assert call(capsys, "convert", tmp_path / "x.pt", tmp_path / "y.safetensors")[0] == 0
    beside = json.loads((tmp_path / "y.json").read_text())
    assert beside["facts"]["attributes"] == {"model": {"_metadata": {"": {"version": 1}}}}
    assert beside["values"]["p"] == {"$tensor": "p", "attributes": {"tag": "left"}}


def test_convert_refuses_what_is_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(GOLDEN / "sharded", tmp_path / "model")
    (tmp_path / "model/model-00001-of-00002.safetensors").unlink()
    code, _, err = call(capsys, "convert", tmp_path / "model", tmp_path / "x.safetensors")
    assert code == 2
    assert "expected a complete checkpoint" in err
