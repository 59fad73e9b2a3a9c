"""`unbroken inspect` shows what a real checkpoint of a PyTorch run holds, in a table and as JSON."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unbroken
from unbroken.cli.main import main
from unbroken.rundir import layout

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1" / "step-00000007.1"
LONG = "a very long prompt " * 100


class Model(nn.Module):
    """Tied weights, a frozen bias, a layer in bfloat16, a module in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4).to(torch.bfloat16)
        self.drop = nn.Dropout().eval()
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight
        self.body.bias.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.tokens(words).to(torch.bfloat16))
        logits: torch.Tensor = self.head(self.drop(hidden).float())
        return logits


def train(directory: Path) -> None:
    model = Model()
    groups = [
        {"params": [model.tokens.weight], "lr": 0.25},
        {"params": [model.body.weight], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.125, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    loader = DataLoader(
        TensorDataset(torch.arange(20) % 5), batch_size=4, shuffle=True, generator=torch.Generator()
    )
    config = argparse.Namespace(rate=0.25, model={"width": 4, "layers": (1, 2)}, prompt=LONG, never=math.nan)
    with unbroken.Run(
        directory,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        counters={"best": 0.5, "seen": [1, 2]},
        noise=np.random.default_rng(0),
        config=config,
    ) as run:
        for _ in run.epochs(2):
            for (words,) in run.batches(loader):
                optimizer.zero_grad()
                model(words).sum().backward()
                optimizer.step()
                run.step(loss=0.5)
                if run.step_count == 7:
                    run.save()
            scheduler.step()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory, hook, threads = (
        tmp_path_factory.mktemp("runs") / "words",
        sys.excepthook,
        torch.get_num_threads(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(layout.RUN_DIR_VARIABLE, raising=False)
        patch.delenv(layout.ATTEMPT_VARIABLE, raising=False)
        torch.set_num_threads(1)
        train(directory)
    yield directory
    torch.set_num_threads(threads)
    sys.excepthook = hook


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    code, out, _ = call(capsys, *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def rows(out: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with `header`."""
    blocks = [block.splitlines() for block in out.split("\n\n")]
    (lines,) = [block for block in blocks if block[0].startswith(header)]
    return [[cell for cell in line.split("  ") if cell] for line in lines[1:]]


def test_each_part_is_shown_with_handler_class_tensors_bytes_and_dtypes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspected(capsys, run)["parts"]
    assert list(found) == ["model", "optimizer", "scheduler", "counters", "noise", "rng"]
    model = found["model"]
    assert (model["handler"], model["tensors"], model["size_bytes"]) == ("torch.module", 3, 80 + 32 + 8)
    assert model["dtypes"] == {"F32": 80, "BF16": 40}
    table = {row[0]: [cell.strip() for cell in row[1:]] for row in rows(call(capsys, run)[1], "PART")}
    assert table["optimizer"] == ["torch.optimizer", "torch.optim.adamw.AdamW", "6", "232 B", "F32, BF16"]
    assert table["model"][0] == "torch.module"


def test_tied_frozen_and_evaluating_weights_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, run)
    assert found["tied"] == [["model/tokens.weight", "model/head.weight"]]
    assert found["parts"]["model"]["frozen"] == ["body.bias"]
    assert found["parts"]["model"]["evaluating"] == ["drop"]
    shown = [[cell.strip() for cell in row] for row in rows(call(capsys, run)[1], "OF")]
    assert ["model", "tied", "model/tokens.weight = model/head.weight"] in shown
    assert ["model", "frozen", "1: body.bias"] in shown
    assert ["model", "evaluating", "1: drop"] in shown


def test_groups_of_optimizers_are_shown_with_their_options(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspected(capsys, run)
    optimizer = found["parts"]["optimizer"]
    assert [group["parameters"] for group in optimizer["groups"]] == [
        ["model.tokens.weight"],
        ["model.body.weight"],
    ]
    options = [group["options"] for group in optimizer["groups"]]
    assert [(group["lr"], group["weight_decay"]) for group in options] == [(0.25, 0.5), (0.125, 0.0)]
    assert options[0]["betas"] == [0.9, 0.999]
    assert options[0]["fused"] is None
    assert optimizer["states"] == 2
    out = call(capsys, run)[1]
    assert "1 parameter, lr 0.25, weight_decay 0.5, betas [0.9, 0.999], eps 1e-08" in out
    assert "fused" not in out


def test_schedulers_counters_and_generators_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, run)
    assert found["parts"]["scheduler"]["values"]["last_epoch"] == 2
    assert found["parts"]["counters"]["values"] == {"best": 0.5, "seen": [1, 2]}
    assert {(each["where"], each["kind"]) for each in found["generators"]} >= {
        ("rng", "python"),
        ("rng", "numpy"),
        ("rng", "torch"),
        ("noise", "numpy.Generator"),
        ("loader 0.generator", "torch.Generator on cpu"),
    }
    out = call(capsys, run)[1]
    assert "last_epoch 2, step_size 100, gamma 0.1, base_lrs [0.25, 0.125]" in out
    assert "best 0.5, seen [1, 2]" in out


def test_the_position_in_the_data_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, run, "step-00000007")
    assert (found["position"]["epoch"], found["position"]["inside_epoch"]) == (1, True)
    assert (found["position"]["passes"], found["position"]["open"]) == ([0], [0])
    assert found["position"]["loaders"] == [
        {"name": None, "samples": 8, "batches": 2, "workers": 0, "generators": ["generator"]}
    ]
    out = call(capsys, run, "step-00000007")[1]
    assert "step 7, inside epoch 1, 8 samples consumed" in out
    assert "8 samples, 2 batches" in out


def test_metrics_parent_and_files_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, run)
    assert (found["metrics"], found["parent"]) == ({"loss": 0.5}, "step-00000007")
    assert sum(found["files"].values()) == found["size_bytes"]
    out = call(capsys, run)[1]
    assert ", after step-00000007" in out
    assert {row[0] for row in rows(out, "FILE")} == set(found["files"])


def test_config_and_environment_are_plain_data_by_dotted_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = inspected(capsys, run)
    assert found["config"] == {
        "rate": 0.25,
        "model": {"width": 4, "layers": [1, 2]},
        "prompt": LONG,
        "never": "nan",
    }
    assert found["environment"]["torch"] == str(torch.__version__)
    out = call(capsys, run)[1]
    config = {name: value.strip() for name, value in rows(out, "CONFIG")}
    assert config["model.width"] == "4"
    assert config["model.layers"] == "[1, 2]"
    environment = {row[0]: row[-1].strip() for row in rows(out, "ENVIRONMENT")}
    assert environment["torch_threads"] == "1"
    assert environment.keys() & {"git", "git.commit"}


def test_a_long_value_is_cut_in_the_table_and_whole_in_json(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = call(capsys, run)[1]
    assert LONG not in out
    assert LONG[:90] in out
    assert max(map(len, out.splitlines())) < 200


def test_tensors_are_listed_with_path_dtype_shape_size_and_aliases(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {
        row[0]: [cell.strip() for cell in row[1:]]
        for row in rows(call(capsys, run, "--tensors")[1], "TENSOR")
    }
    assert shown["model/tokens.weight"][:3] == ["F32", "5x4", "80 B"]
    assert shown["model/tokens.weight"][-1] == "model/head.weight"
    assert shown["model/body.weight"][:3] == ["BF16", "4x4", "32 B"]
    assert shown["model/body.weight"][-1] == "-"
    assert set(shown) == {tensor["path"] for tensor in inspected(capsys, run)["tensors"]}


def test_a_run_directory_its_newest_and_the_checkpoint_itself_show_the_same(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = inspected(capsys, run)
    for target in ((run, "step-00000010"), (run / "checkpoints" / "step-00000010",), (run / "latest",)):
        found = inspected(capsys, *target)
        assert {**found, "path": newest["path"]} == newest


def test_a_checkpoint_of_the_first_format_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, GOLDEN)
    assert found["parts"]["values"]["values"]["numbers"][2] == 2**53 + 1
    assert found["parts"]["values"]["values"]["words"] == {
        "$not a tag": 1,
        "3": "int",
        "3'": "text",
        "[1, 'x']": True,
    }
    assert found["parts"]["values"]["values"]["bytes"][0] == "b'short'"
    assert found["parts"]["model"]["dtypes"]["BF16"] == 4
    code, out, _ = call(capsys, GOLDEN, "--tensors")
    assert code == 0
    assert rows(out, "PART")


def test_a_damaged_manifest_is_not_shown_and_exits_with_3(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    copy = tmp_path / "step-00000010"
    shutil.copytree(run / "checkpoints" / "step-00000010", copy)
    text = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(text.replace("body.bias", "body.bios"))
    for options in ((), ("--json",), ("--tensors",)):
        code, out, err = call(capsys, copy, *options)
        assert (code, out) == (3, "")
        assert err.startswith("error: ")
        assert "\n\nhint: " in err


def test_what_a_file_says_does_not_reach_the_terminal_as_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with unbroken.Run(tmp_path / "r", config={"\x1b[2Jname": "\x1b[31mred\r"}, values={"\x07": "\n"}) as run:
        run.step(**{"\x1b[1mloss": 1.0})
    out = call(capsys, tmp_path / "r", "--tensors")[1]
    assert not {"\x1b", "\x07", "\r"} & set(out)
    assert inspected(capsys, tmp_path / "r")["config"] == {"\x1b[2Jname": "\x1b[31mred\r"}


def test_a_huge_configuration_leaves_the_table_readable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep: dict[str, Any] = {"end": 1}
    for _ in range(20):
        deep = {"in": deep}
    config = {"deep": deep, **{f"name{index}": index for index in range(1000)}}
    with unbroken.Run(tmp_path / "r", config=config) as run:
        run.step()
    out = call(capsys, tmp_path / "r")[1]
    assert len(out.splitlines()) < 200
    assert "more, which --json shows" in out
    assert "deep.in.in.in  {'in': " in out
    assert inspected(capsys, tmp_path / "r")["config"] == config


def test_a_program_that_reads_a_pipe_gets_the_same_text_without_colour(run: Path) -> None:
    code = "import sys; from unbroken.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "inspect", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "torch.optim.adamw.AdamW" in done.stdout


def test_only_tensors_that_fit_a_pattern_are_shown_by_any_of_their_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = [row["path"] for row in inspected(capsys, run)["tensors"]]
    found = inspected(capsys, run, "--match", "model/body.*")
    assert {row["path"] for row in found["tensors"]} == {"model/body.weight", "model/body.bias"}
    assert found["parts"] == inspected(capsys, run)["parts"]
    # The head is tied to the tokens.
    code, out, _ = call(capsys, run, "--tensors", "--match", "*head*", "--match", "model/body.b?as")
    assert code == 0
    assert {row[0] for row in rows(out, "TENSOR")} == {"model/tokens.weight", "model/body.bias"}
    assert f"2 of {len(everything)} tensors fit *head* model/body.b?as: no others are shown" in out


def test_a_pattern_that_fits_nothing_is_an_error_that_names_what_is_nearest(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, run, "--tensors", "--match", "modle/body.weight")
    assert (code, out) == (2, "")
    assert "--match modle/body.weight: expected tensors that fit, found none of " in err
    assert "the nearest names are model/body.weight, " in err


def test_values_are_read_of_what_fits_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "step-00000010"
    shutil.copytree(run / "checkpoints" / "step-00000010", copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    entry = manifest["tensors"]["model/body.weight"]
    shard = copy / entry["file"]
    data = bytearray(shard.read_bytes())
    data[entry["offset"]] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(data)
    assert call(capsys, copy, "--values")[0] == 3
    code, out, _ = call(capsys, copy, "--values", "--match", "model/tokens*")
    assert code == 0
    assert [row[0] for row in rows(out, "TENSOR")] == ["model/tokens.weight"]


def test_a_tree_has_the_number_the_size_and_the_dtypes_of_each_branch(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = call(capsys, run, "--tree")[1].split("\n\n")[-1].splitlines()
    shown = {tuple(line.split()): len(line) - len(line.lstrip()) for line in lines[1:6]}
    assert lines[0].split() == ["BRANCH", "TENSORS", "SIZE", "DTYPES", "SHAPE"]
    assert shown == {
        ("model/", "3", "120", "B", "F32,", "BF16", "-"): 0,
        ("tokens.weight", "-", "80", "B", "F32", "5x4"): 2,
        ("body.", "2", "40", "B", "BF16", "-"): 2,
        ("weight", "-", "32", "B", "BF16", "4x4"): 4,
        ("bias", "-", "8", "B", "BF16", "4"): 4,
    }
    shallow = call(capsys, run, "--tree", "--depth", "1", "--match", "model/*")[1].split("\n\n")[-1]
    assert [line.split()[0] for line in shallow.splitlines()] == ["BRANCH", "model/"]
    code, _, err = call(capsys, run, "--depth", "1")
    assert (code, err.splitlines()[-1]) == (2, "hint: add --tree")


def test_a_listing_loads_what_reads_its_own_format_and_no_other(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    code = (
        "import sys; from unbroken.cli.main import main; code = main(sys.argv[1:]); "
        "print('loaded:', *sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "inspect", str(path), "--tensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown, _, loaded = done.stdout.partition("loaded: ")
    assert "w       F32    1      4 B" in shown
    others = {"torch_zip", "npz", "tables", "flax_msgpack", "orbax", "ours", "zips"}
    unwanted = {f"unbroken.inspection.formats.{name}" for name in others}
    unwanted |= {"msgspec", "zipfile", "unbroken.interchange.tf_bundle", "unbroken.dashboard.page"}
    assert unwanted.isdisjoint(loaded.split())
