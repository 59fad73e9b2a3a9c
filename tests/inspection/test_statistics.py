from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unbroken
from unbroken.cli.main import main
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.formats.base import StoredTensor
from unbroken.inspection.statistics import Statistics, statistics, with_histogram
from unbroken.inspection.suspicious import advise_on_values

from .golden import GOLDEN, bytes_of

KINDS = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}


class OneTensor:
    """What is asked of a checkpoint with one tensor in it."""

    def __init__(self, dtype: str, tensor: torch.Tensor) -> None:
        data = bytes_of(tensor)
        self._data = data
        entry = StoredTensor(dtype=dtype, shape=tuple(tensor.shape), size_bytes=len(data), where="")
        self.tensors = {"x": entry}

    def read(self, path: str) -> memoryview:
        return memoryview(bytearray(self._data))


def of(dtype: str, tensor: torch.Tensor) -> Statistics:
    found = statistics(OneTensor(dtype, tensor), "x")  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", KINDS)
@given(data=st.data())
@settings(max_examples=15, deadline=None, database=None)
def test_the_numbers_are_what_torch_finds(dtype: str, data: st.DataObject) -> None:
    kind = KINDS[dtype]
    tiny = torch.finfo(kind).tiny
    special = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, tiny / 2, -tiny / 4, tiny, 1.5])
    values = data.draw(st.lists(special | st.floats(-1e4, 1e4, width=16), max_size=20))
    tensor = torch.tensor(values, dtype=torch.float64).to(kind)
    found, wide = of(dtype, tensor), tensor.double()
    finite = wide[wide.isfinite()]
    assert found.elements == len(values)
    assert (found.nans, found.infinities) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert found.zeros == int((wide == 0).sum())
    assert found.denormals == int(((finite != 0) & (finite.abs() < tiny)).sum())
    if len(finite):
        assert (found.least, found.largest) == (float(finite.min()), float(finite.max()))
        assert found.mean == pytest.approx(float(finite.mean()), abs=1e-9)
    else:
        assert (found.least, found.largest, found.mean) == (None, None, None)


def test_integers_have_a_range_and_zeros_and_more_of_them_than_fit_at_once() -> None:
    found = of("I64", torch.arange(-3, 100_000))
    assert (found.least, found.largest, found.zeros, found.mean) == (-3, 99_999, 1, 49998.0)
    assert of("BOOL", torch.tensor([True, False, False])).zeros == 2
    assert of("F32", torch.zeros(0)).least is None


def test_numbers_so_large_that_their_sum_is_none_have_a_range(tmp_path: Path) -> None:
    found = of("F64", torch.full((4,), 1.7e308, dtype=torch.float64))
    assert (found.largest, found.infinities, found.mean) == (1.7e308, 0, None)


def histogram_of(dtype: str, tensor: torch.Tensor) -> tuple[int, ...] | None:
    found, histogram = with_histogram(OneTensor(dtype, tensor), "x")  # type: ignore[arg-type]
    assert found == of(dtype, tensor)
    return histogram


def test_a_histogram_counts_what_torch_counts() -> None:
    numbers = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = histogram_of("F64", numbers)
    assert found == tuple(torch.histc(numbers, bins=32).long().tolist())
    # In 16 bits many numbers lie on the edges of bins.
    half = numbers[:1000].half()
    assert histogram_of("F16", half) == tuple(torch.histc(half.double(), bins=32).long().tolist())
    whole = torch.arange(-3, 99_997)
    assert histogram_of("I64", whole) == tuple(torch.histc(whole.double(), bins=32).long().tolist())


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None, database=None)
def test_a_histogram_counts_each_finite_number_once(values: list[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    found = histogram_of("F64", torch.tensor(values, dtype=torch.float64))
    if found is None:
        assert len({value + 0.0 for value in finite}) < 2
    else:
        assert (len(found), sum(found)) == (32, len(finite))
        assert min(found[0], found[-1]) > 0


def test_numbers_of_the_whole_range_and_the_smallest_ones_have_a_histogram() -> None:
    far = torch.tensor([-1.7e308, 0.0, 1.7e308, math.nan], dtype=torch.float64)
    assert histogram_of("F64", far) == (1, *[0] * 15, 1, *[0] * 14, 1)
    near = torch.tensor([0.0, 5e-324, math.inf], dtype=torch.float64)
    assert histogram_of("F64", near) == (1, *[0] * 30, 1)
    wide = torch.tensor([-(2**63), 2**63 - 1])
    assert histogram_of("I64", wide) == (1, *[0] * 30, 1)
    assert histogram_of("F32", torch.ones(3)) is None


def test_a_kind_that_is_not_read_as_numbers_has_none() -> None:
    reader = open_checkpoint(GOLDEN / "training.pt")
    assert statistics(reader, "kinds/f8") is None
    assert with_histogram(reader, "kinds/f8") == (None, None)
    assert statistics(reader, "kinds/bf16") is not None


def test_inspect_reads_the_tensors_of_every_format_if_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 3.0]]))
    with unbroken.Run(tmp_path / "run", model=model) as run:
        run.step()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "run"), "--values"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model/weight")]
    assert line.split() == ["model/weight", "1", "3", "2", "-", "-", "-", "-"]
    torch.save({"w": torch.tensor([1.0, torch.nan, 0.0])}, tmp_path / "w.pt")
    assert main(["inspect", str(tmp_path / "w.pt"), "--values"]) == 0
    assert "1 of 1 tensors are not finite, w for one" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "w.pt"), "--values", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["tensors"]
    expected: dict[str, Any] = {"elements": 3, "least": 0.0, "largest": 1.0, "mean": 0.5, "zeros": 1}
    assert row["numbers"] == {**expected, "denormals": 0, "nans": 1, "infinities": 0}


def test_doctor_finds_suspicious_numbers_if_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "nan": torch.tensor([1.0, torch.nan, -torch.inf]),
        "large": torch.tensor([60_000.0, 1.0], dtype=torch.float16),
        "empty": torch.zeros(16),
        "small": torch.full((20,), 1e-40),
        "good": torch.ones(20),
    }
    torch.save(state, tmp_path / "state.pt")
    assert main(["doctor", str(tmp_path / "state.pt"), "--values", "--json"]) == 1
    found = {one["text"]: one for one in json.loads(capsys.readouterr().out)["advice"]}
    assert found["it holds numbers that are not finite"]["evidence"] == "nan: 1 NaN, 1 infinite"
    large = found["numbers in float16 are near the largest that it holds"]
    assert (large["severity"], large["evidence"]) == ("warning", "large: 1 to 60000")
    assert found["1 of 5 tensors hold nothing but zeros"]["evidence"] == "empty"
    assert "small" in found["1 of 5 tensors have more than 1 % of numbers that lost digits"]["evidence"]
    assert main(["doctor", str(tmp_path / "state.pt"), "--json"]) == 1
    assert "not finite" not in capsys.readouterr().out


def test_doctor_says_which_numbers_it_could_not_read_and_goes_on() -> None:
    advice = advise_on_values(open_checkpoint(GOLDEN.parent / "tensorflow/single"))
    assert [one.text for one in advice] == ["the numbers of 5 tensors could not be read"]
