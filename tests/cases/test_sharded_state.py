"""State that was cut for another number of processes: said beforehand, and put together by name."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from unbroken.cli.main import main
from unbroken.inspection.formats.zero import ZeroDirectory

GROUPS = [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
# More than ten: in the order of their names the tenth comes before the second.
RANKS = 12


def state() -> dict[str, dict[str, torch.Tensor]]:
    """Return the whole of it: 32-bit weights and moments by the names of parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        "model": weights,
        "exp_avg": {name: torch.randn_like(weight) for name, weight in weights.items()},
        "exp_avg_sq": {name: torch.rand_like(weight) for name, weight in weights.items()},
    }


def pieces(tensors: dict[str, torch.Tensor], group: list[str], ranks: int) -> list[torch.Tensor]:
    """Cut the flat state of a group, padded so that every rank gets as much, as DeepSpeed does."""
    flat = torch.cat([tensors[name].reshape(-1) for name in group])
    padded = torch.cat([flat, torch.zeros(-flat.numel() % (2 * ranks))])
    return [piece.clone() for piece in padded.chunk(ranks)]


def write_sharded(directory: Path, ranks: int = RANKS) -> Path:
    """Write the files of one step as DeepSpeed lays them out for `ranks` processes and ZeRO stage 2."""
    directory.mkdir()
    whole = state()
    shapes = [OrderedDict((name, whole["model"][name].shape) for name in group) for group in GROUPS]
    module = {name: weight.bfloat16() for name, weight in whole["model"].items()}
    module["1.steps"] = torch.tensor(3)
    said = {"dp_world_size": ranks, "global_steps": 12, "ds_version": "0.18.0"}
    torch.save({"module": module, "param_shapes": shapes, **said}, directory / "mp_rank_00_model_states.pt")
    cut = {kind: [pieces(tensors, group, ranks) for group in GROUPS] for kind, tensors in whole.items()}
    for rank in range(ranks):
        moments = {
            index: {
                "step": torch.tensor(12.0),
                **{kind: cut[kind][index][rank] for kind in ("exp_avg", "exp_avg_sq")},
            }
            for index in range(len(GROUPS))
        }
        optimizer = {
            "zero_stage": 2,
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

    def test_it_is_not_where_the_pieces_are_taken_in_another_order(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = write_sharded(tmp_path / "sharded")
        made = ZeroDirectory.__init__

        def in_order_of_names(self: ZeroDirectory, directory: Path) -> None:
            made(self, directory)
            by_name = sorted(self._ranks.values(), key=lambda file: file.path.name)
            self._ranks = dict(enumerate(by_name))

        monkeypatch.setattr(ZeroDirectory, "__init__", in_order_of_names)
        found = merged(source, tmp_path / "merged.safetensors")
        assert not torch.equal(found["model/0.weight"], state()["model"]["0.weight"])

    def test_a_missing_rank_is_named_and_nothing_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_sharded(tmp_path / "sharded")
        (source / "zero_pp_rank_7_mp_rank_00_optim_states.pt").unlink()
        assert main(["doctor", str(source)]) == 3
        assert "the file of rank 7 of 12 is missing" in capsys.readouterr().out
        assert main(["convert", str(source), str(tmp_path / "merged.safetensors")]) == 2
        assert not list(tmp_path.glob("merged*"))
