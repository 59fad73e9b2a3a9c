"""What differs between two checkpoints, whatever wrote them, and what is called by which name."""

from __future__ import annotations

import json
import math
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from unbroken.checkpoint.store import CheckpointStore
from unbroken.cli.main import main
from unbroken.inspection import renames
from unbroken.inspection.closeness import closeness
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.diff import Difference, compare
from unbroken.inspection.renames import find_renamings
from unbroken.rundir.identity import open_run

from ..checkpoint.states import snapshot_at, state_at
from .golden import GOLDEN
from .test_formats import rewritten


def saved(path: Path, state: Any) -> Path:
    torch.save(state, path)
    return path


def difference(a: Path, b: Path) -> Difference:
    return compare(open_checkpoint(a), open_checkpoint(b))


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def state() -> dict[str, Any]:
    found = torch.load(GOLDEN / "training.pt", weights_only=False)
    return {"model": found["model"], "optimizer": found["optimizer"], "step": 10}


def test_equal_checkpoints_of_two_formats_differ_in_nothing(
    tmp_path: Path, state: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    a = saved(tmp_path / "a.pt", state["model"])
    save_file(state["model"], tmp_path / "b.safetensors")
    code, out, _ = call(capsys, "diff", a, tmp_path / "b.safetensors")
    assert code == 0
    assert out.splitlines()[-1] == "nothing differs, 9 tensors are equal to the last bit"
    assert json.loads(call(capsys, "diff", a, a, "--json")[1])["equal"] is True


def test_what_is_missing_as_a_whole_comes_first(
    tmp_path: Path, state: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = saved(tmp_path / "a.pt", state), saved(tmp_path / "b.pt", {"model": state["model"], "step": 11})
    code, out, _ = call(capsys, "diff", a, b)
    assert code == 1
    assert out.splitlines()[2].startswith(
        "optimizer state (optimizer) is in A and not in B: moments lost (exp_avg"
    )
    assert "optimizer/state/0/exp_avg" not in out, "told once"
    assert [line.split() for line in out.splitlines() if line.startswith("step")] == [["step", "10", "11"]]
    assert "is in B and not in A" in call(capsys, "diff", b, a)[1]


def test_an_optimizer_under_another_key_is_not_lost(tmp_path: Path, state: dict[str, Any]) -> None:
    other = {"state_dict": state["model"], "optimizer_states": [state["optimizer"]], "step": 10}
    found = difference(saved(tmp_path / "a.pt", state), saved(tmp_path / "b.pt", other))
    assert (found.lost, found.changed, found.equal_tensors) == ([], [], 27)
    assert not found.is_empty


def test_a_wrapper_before_the_names_is_one_line_and_values_are_compared_beyond_it(
    tmp_path: Path, state: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wrapped = {f"module.{name}": value.clone() for name, value in state["model"].items()}
    wrapped["module.1.bias"] += 0.5
    wrapped["module.0.bias"] = wrapped["module.0.bias"].bfloat16()
    a, b = saved(tmp_path / "a.pt", state["model"]), saved(tmp_path / "b.pt", wrapped)
    found = difference(a, b)
    assert [(item.before, item.after, len(item.pairs)) for item in found.renamed] == [("", "module.", 9)]
    assert (found.only_in_a, found.only_in_b, found.equal_tensors) == ({}, {}, 7)
    assert [(item.path, item.dtypes) for item in found.changed] == [
        ("0.bias", ("F32", "BF16")),
        ("1.bias", ("F32", "F32")),
    ]
    assert found.changed[1].closeness is not None
    assert found.changed[1].closeness.largest == pytest.approx(0.5)
    assert "0.bias -> module.0.bias" in call(capsys, "diff", a, b)[1]


def test_missing_extra_and_reshaped_tensors_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = {
        "same": torch.ones(2),
        "none": torch.ones(0),
        "wide": torch.ones(4, 6),
        "gone": torch.ones(5),
        "cast": torch.ones(3),
    }
    b = {
        "same": torch.ones(2),
        "none": torch.ones(0).half(),
        "wide": torch.ones(6, 4),
        "new": torch.ones(7),
        "cast": torch.ones(3).double(),
    }
    paths = saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b)
    assert ["cast", "F32", "->", "F64", "3", "0", "all", "-"] in [
        line.split() for line in call(capsys, "diff", *paths)[1].splitlines()
    ]
    found = difference(*paths)
    assert (list(found.only_in_a), list(found.only_in_b), found.equal_tensors) == (["gone"], ["new"], 1)
    wide, cast, none = found.changed
    assert none.closeness is not None
    assert (none.path, none.closeness.equal_fraction) == ("none", 1.0)
    assert (wide.path, wide.shapes, wide.closeness) == ("wide", ((4, 6), (6, 4)), None)
    assert cast.closeness is not None
    assert (cast.closeness.equal_fraction, cast.closeness.largest) == (1.0, 0.0)


def test_weights_that_are_tied_in_one_only_are_told(tmp_path: Path) -> None:
    weight = torch.ones(2)
    a = saved(tmp_path / "a.pt", {"embed": weight, "head": weight})
    b = saved(tmp_path / "b.pt", {"embed": weight, "head": weight.clone()})
    found = difference(a, b)
    assert [(item.a, item.b) for item in found.ties] == [(["embed", "head"], "")]
    assert not found.changed


def test_two_checkpoints_of_a_run_are_named_by_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "digits"
    open_run(run)
    for step in (5, 12):
        CheckpointStore(run).save(snapshot_at(step, metrics={"accuracy": step / 100}))
    code, out, _ = call(capsys, "diff", f"{run}:step-00000005", run, "--json")
    found = json.loads(out)
    assert code == 1
    assert [item for item in found["facts"] if item["path"] == "step"] == [{"path": "step", "a": 5, "b": 12}]
    assert found["lost"] == []
    assert call(capsys, "diff", run, f"{run}:step-00000012")[0] == 0
    assert call(capsys, "diff", run, f"{run}:step-7")[0] == 2
    assert call(capsys, "diff", run, "nowhere")[0] == 2


def test_a_part_that_only_one_checkpoint_of_a_run_has_is_told(tmp_path: Path) -> None:
    whole = state_at(1)
    for name, state in (("a", whole), ("b", {"model": whole["model"]})):
        CheckpointStore(tmp_path / name).save(snapshot_at(1, state=state))
    found = difference(*(tmp_path / name / "checkpoints/step-00000001" for name in "ab"))
    assert {lost.part for lost in found.lost} == whole.keys() - {"model"}


def test_a_damaged_checkpoint_is_no_difference_but_damage(
    tmp_path: Path, state: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    a = saved(tmp_path / "a.pt", state)
    (tmp_path / "cut.pt").write_bytes(a.read_bytes()[:-100])
    assert call(capsys, "diff", a, tmp_path / "cut.pt")[0] == 3


def test_damage_in_both_is_named_and_never_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        shutil.copytree(GOLDEN / "sharded", tmp_path / name)
        (tmp_path / name / "model-00002-of-00002.safetensors").unlink()
    code, out, _ = call(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 3
    for side in "AB":
        assert f"{side} is damaged: model-00002-of-00002.safetensors: " in out
    assert "nothing differs" not in out
    code, out, _ = call(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(out)
    assert (code, found["equal"]) == (3, False)
    assert [problem["side"] for problem in found["problems"]] == ["A", "B"]


def quantized(scale: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2) * scale, scale, 0, torch.qint8)


def test_a_shard_that_is_gone_is_not_equal_by_its_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        CheckpointStore(tmp_path / name).save(snapshot_at(1))
    a, b = (tmp_path / name / "checkpoints/step-00000001" for name in "ab")
    (shard, *_) = sorted(b.glob("*.safetensors"))
    shard.unlink()
    code, out, _ = call(capsys, "diff", a, b)
    assert code == 3
    assert f"B is damaged: {shard.name}: this file is missing" in out
    assert "could not be compared" in out


def test_one_damaged_tensor_is_named_and_the_others_are_compared(
    tmp_path: Path, state: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    a = saved(tmp_path / "a.pt", state["model"])
    b = rewritten(a, tmp_path / "b.pt", lambda name, data: None if name.endswith("/data/0") else data)
    code, out, _ = call(capsys, "diff", a, b)
    assert code == 3
    assert "B is damaged: a/data/0: tensor 0.weight: this entry is missing" in out
    assert "1 tensors could not be compared, 0.weight first" in out
    assert "8 tensors are equal to the last bit, of what is damaged nobody can tell" in out


def adam(*, keys: list[Any], moment: str, size: int) -> dict[str, Any]:
    return {
        "state": {key: {moment: torch.full((size,), 1.0 + index)} for index, key in enumerate(keys)},
        "param_groups": [{"lr": 0.1, "params": keys}],
    }


def test_tensors_outside_of_an_optimizer_are_no_state_of_it(tmp_path: Path) -> None:
    a = {
        "optimizer": adam(keys=["w"], moment="m", size=2),
        "x": {"m": torch.ones(3)},
        "y": {"m": torch.ones(5)},
    }
    b = {"optimizer": adam(keys=[0], moment="m", size=2), "m": torch.zeros(3), "z": torch.zeros(7)}
    found = difference(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b))
    assert found.renamed[0].pairs == {"optimizer/state/w/m": "optimizer/state/0/m"}
    assert found.equal_tensors == 1


def test_two_optimizers_do_not_claim_the_same_tensor(tmp_path: Path) -> None:
    a = {"one": adam(keys=["w"], moment="m", size=2), "two": adam(keys=["w"], moment="m", size=2)}
    b = {"one": adam(keys=[0], moment="m", size=2), "three": adam(keys=[0], moment="m", size=2)}
    found = difference(saved(tmp_path / "a.pt", a), saved(tmp_path / "b.pt", b))
    assert (found.only_in_a, found.only_in_b, found.equal_tensors) == ({}, {}, 2)
    twice = {"one": adam(keys=["v", "w"], moment="m", size=2)}
    twice["one"]["param_groups"][0]["params"] = ["v", "w"]
    b["one"]["param_groups"][0]["params"] = [0, 0]
    difference(saved(tmp_path / "a.pt", twice), saved(tmp_path / "b.pt", b))


def test_what_stands_beside_a_lost_optimizer_is_not_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = {"optimizer": adam(keys=[0], moment="m", size=2), "seen": 5, "ema": torch.ones(3)}
    a = saved(tmp_path / "a.pt", {"trainer": inner, "model": torch.ones(4)})
    b = saved(tmp_path / "b.pt", {"trainer": {"seen": 6}, "model": torch.ones(4)})
    _, out, _ = call(capsys, "diff", a, b)
    assert "optimizer state (trainer/optimizer) is in A and not in B" in out
    lines = [line.split()[:2] for line in out.splitlines() if line.startswith("trainer")]
    assert lines == [["trainer/ema", "A"], ["trainer/seen", "5"]]


def test_an_empty_dictionary_is_a_value(tmp_path: Path) -> None:
    states = {"x": {"w": 1, "extra": {}}}, {"x": {"w": 1}}
    paths = saved(tmp_path / "a.pt", states[0]), saved(tmp_path / "b.pt", states[1])
    assert [(item.path, item.a, item.b) for item in difference(*paths).values] == [
        ("x/extra", {}, "(absent)")
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numbers_of_another_scale_are_not_the_same(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / f"{scale}.pt", {"w": quantized(scale)}) for scale in (0.5, 0.25))
    found = difference(a, b)
    assert [(item.path, item.a[-2], item.b[-2]) for item in found.values] == [("w/quantizer", 0.5, 0.25)]


def test_names_that_no_program_gave_take_little_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ("F32", (1,))
    tracemalloc.start()
    try:
        for count in (2000, 5000):
            find_renamings({"x." + "a." * count: kind}, {"y." + "a." * count: kind})
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    monkeypatch.setattr(renames, "_MOST_LOOKS", 1)
    # Each pair has a prefix of its own, and so takes a round of its own.
    many = {f"p{index}.{'a.' * 20}{index}": kind for index in range(50)}
    found = find_renamings(many, {f"q{name}": kind for name in many})
    assert len(found) == renames._FEWEST_ROUNDS


def test_names_that_only_begin_differently_are_paired_by_their_ends() -> None:
    kind, other = ("F32", (2, 3)), ("F32", (3,))
    missing = {"net.body.weight": kind, "net.body.bias": other, "net.tail.weight": kind}
    extra = {"model.trunk.body.weight": kind, "model.trunk.body.bias": other, "model.trunk.tail.weight": kind}
    (found,) = find_renamings(missing, extra)
    assert (found.before, found.after, len(found.pairs)) == ("net.", "model.trunk.", 3)


def test_the_only_tensors_of_a_shape_are_taken_for_one_another() -> None:
    found = find_renamings(
        {"old": ("F32", (7,)), "x": ("F32", (1,))}, {"new": ("F32", (7,)), "y": ("F16", (1,))}
    )
    assert [(item.before, item.after) for item in found] == [("old", "new")]


def test_ten_thousand_renamed_tensors_take_no_time_to_speak_of() -> None:
    kinds = {
        f"layer.{index}.{part}.weight": ("F32", (8, 8)) for index in range(1000) for part in "abcdefghij"
    }
    (found,) = find_renamings(kinds, {f"module.{name}": kind for name, kind in kinds.items()})
    assert (found.before, found.after, len(found.pairs)) == ("", "module.", 10_000)


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_distances_are_those_of_the_framework(dtype: str) -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = [torch.randint(0, 100, (70_000,), generator=generator) for _ in range(2)]
    first, second = (number.to(DTYPES[dtype]) for number in numbers)
    if dtype.startswith(("F", "BF")):
        first = first / 7
    raw = [memoryview(value.view(torch.uint8).numpy().tobytes()) for value in (first, second)]
    found = closeness((dtype, dtype), *raw)
    assert found.largest == (first.double() - second.double()).abs().max().item()
    assert (found.elements, found.equal) == (70_000, (first == second).sum().item())


def test_nan_and_infinities_are_counted_and_do_not_hide_the_rest() -> None:
    def raw(*values: float) -> memoryview:
        return memoryview(struct.pack(f"<{len(values)}f", *values))

    found = closeness(
        ("F32", "F32"), raw(math.nan, 1, math.inf, 2, 5), raw(math.nan, math.nan, math.inf, 2, 8)
    )
    assert (found.largest, found.nans, found.equal) == (3, (1, 2), 3)
    assert closeness(("F32", "F32"), raw(math.inf), raw(1)).largest == math.inf
    assert closeness(("F8_E4M3", "F8_E4M3"), memoryview(b"ab"), memoryview(b"ac")).largest is None
    assert (
        closeness(("C128", "C128"), memoryview(bytes(32)), memoryview(bytes(31) + b"x")).equal_fraction == 0.5
    )
