"""State that was cut for another number of processes: said beforehand, and put together by name."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from unbroken.cli.main import main
from unbroken.inspection.formats.base import RegularFile
from unbroken.inspection.formats.zero import ZeroDirectory

GROUPS = [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
# More than ten: in the order of their names the tenth comes before the second.
RANKS = 12
ENUMERATION = "deepspeed.runtime.zero.config"


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that the pickles of DeepSpeed name: a stage is a member of its enumeration."""
    names = ENUMERATION.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    made: Any = Enum(
        "ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3}, type=int, module=ENUMERATION
    )
    sys.modules[ENUMERATION].ZeroStageEnum = made  # type: ignore[attr-defined]


def stage(number: int) -> Any:
    return sys.modules[ENUMERATION].ZeroStageEnum(number)


def state() -> dict[str, dict[str, torch.Tensor]]:
    """Return the whole of it: 32-bit weights and moments by the names of parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 5))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        "model": weights,
        "exp_avg": {name: torch.randn_like(weight) for name, weight in weights.items()},
        "exp_avg_sq": {name: torch.rand_like(weight) for name, weight in weights.items()},
    }


def pieces(
    tensors: dict[str, torch.Tensor], group: list[str], ranks: int, *, is_lean: bool
) -> list[torch.Tensor]:
    """Cut the flat state of a group, padded so that every rank gets as much, as DeepSpeed does.

    Of the weights, and of nothing else, the last rank leaves the padding out again.
    """
    flat = torch.cat([tensors[name].reshape(-1) for name in group])
    padding = -flat.numel() % (2 * ranks)
    found = [piece.clone() for piece in torch.cat([flat, torch.zeros(padding)]).chunk(ranks)]
    if is_lean:
        found[-1] = found[-1][: found[-1].numel() - padding]
    return found


def write_sharded(directory: Path, ranks: int = RANKS) -> Path:
    """Write the files of one step as DeepSpeed lays them out for `ranks` processes and ZeRO stage 2."""
    directory.mkdir()
    whole = state()
    shapes = [OrderedDict((name, whole["model"][name].shape) for name in group) for group in GROUPS]
    # As a state_dict is: with the versions of its modules in an attribute.
    module = OrderedDict((name, weight.bfloat16()) for name, weight in whole["model"].items())
    module._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    module["1.steps"] = torch.tensor(3)
    said = {"dp_world_size": ranks, "global_steps": 12, "ds_version": "0.18.0"}
    torch.save({"module": module, "param_shapes": shapes, **said}, directory / "mp_rank_00_model_states.pt")
    cut = {
        kind: [pieces(tensors, group, ranks, is_lean=kind == "model") for group in GROUPS]
        for kind, tensors in whole.items()
    }
    for rank in range(ranks):
        moments = {
            index: {
                "step": torch.tensor(12.0),
                **{kind: cut[kind][index][rank] for kind in ("exp_avg", "exp_avg_sq")},
            }
            for index in range(len(GROUPS))
        }
        optimizer = {
            "zero_stage": stage(2),
            "partition_count": [ranks] * len(GROUPS),
            "single_partition_of_fp32_groups": [cut["model"][index][rank] for index in range(len(GROUPS))],
            "base_optimizer_state": {
                "state": moments,
                "param_groups": [{"lr": 0.1, "params": [index]} for index in range(len(GROUPS))],
            },
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.18.0"}, directory / name)
    return directory


def merged(source: Path, target: Path) -> dict[str, torch.Tensor]:
    assert main(["convert", str(source), str(target)]) == 0
    return load_file(target)


class TestAnotherNumberOfProcesses:
    """A run on 4 nodes cannot start on 6, and says so in the middle of it (deepspeedai/DeepSpeed#2898)."""

    def test_doctor_says_so_beforehand_and_names_the_way_out(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_sharded(tmp_path / "sharded", ranks=4)
        assert main(["doctor", str(source), "--world-size", "6"]) == 1
        shown = capsys.readouterr().out
        assert "error: 6 processes cannot load it directly: its state is cut for 4" in shown
        assert f"unbroken convert {source}" in shown

    def test_it_says_nothing_of_the_kind_where_the_number_is_the_same(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_sharded(tmp_path / "sharded", ranks=4)
        assert main(["doctor", str(source), "--world-size", "4", "--json"]) == 0
        advice = json.loads(capsys.readouterr().out)["advice"]
        assert not any(one["severity"] == "error" for one in advice)

    def test_put_together_it_is_what_was_cut_to_the_last_bit(self, tmp_path: Path) -> None:
        found = merged(write_sharded(tmp_path / "sharded"), tmp_path / "merged.safetensors")
        whole = state()
        expected = {f"model/{name}": weight for name, weight in whole["model"].items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            expected |= {f"optimizer/state/{name}/{kind}": item for name, item in whole[kind].items()}
        expected |= {f"optimizer/groups/{index}/step": torch.tensor(12.0) for index in range(2)}
        expected["model/1.steps"] = torch.tensor(3)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[path], tensor) for path, tensor in expected.items())

    def test_it_is_not_where_the_pieces_are_taken_in_another_order(self, tmp_path: Path) -> None:
        reader = ZeroDirectory(write_sharded(tmp_path / "sharded"))
        expected = state()["model"]["0.weight"].numpy().tobytes()
        assert reader.read("model/0.weight") == expected
        assert reader.facts["attributes"] == {"model": {"_metadata": {"": {"version": 1}}}}
        # In the order of their names the file of rank 10 comes where that of rank 2 belongs.
        reader._ranks[2] = reader._ranks[10]
        assert reader.read("model/0.weight") != expected

    def test_each_byte_of_the_ranks_is_read_about_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = ZeroDirectory(write_sharded(tmp_path / "sharded", ranks=1))
        read, counts = RegularFile.read, []

        def counted(self: RegularFile, start: int, size_bytes: int) -> bytearray:
            counts.append(size_bytes)
            return read(self, start, size_bytes)

        monkeypatch.setattr(RegularFile, "read", counted)
        weights = [path for path in reader.tensors if path.startswith("model/") and path != "model/1.steps"]
        for path in weights:
            reader.read(path)
        # The headers of entries are short, and read for each tensor.
        in_all = sum(reader.tensors[path].size_bytes for path in weights)
        assert sum(count for count in counts if count >= 8 * 5) <= in_all + len(weights) * 100
        assert max(counts) == max(reader.tensors[path].size_bytes for path in weights)

    def test_a_stage_that_is_cut_otherwise_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_sharded(tmp_path / "sharded", ranks=1)
        file = source / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        saved = torch.load(file, weights_only=False)
        saved["optimizer_state_dict"]["zero_stage"] = stage(3)
        torch.save(saved, file)
        assert main(["doctor", str(source)]) != 0
        assert "ZeRO stage 3: only stages 1 and 2" in capsys.readouterr().err

    def test_a_missing_rank_is_named_and_nothing_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_sharded(tmp_path / "sharded")
        (source / "zero_pp_rank_7_mp_rank_00_optim_states.pt").unlink()
        assert main(["doctor", str(source)]) == 3
        assert "the file of rank 7 of 12 is missing" in capsys.readouterr().out
        assert main(["convert", str(source), str(tmp_path / "merged.safetensors")]) == 2
        assert not list(tmp_path.glob("merged*"))
