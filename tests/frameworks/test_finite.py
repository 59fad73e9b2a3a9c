from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.frameworks.finite import count_non_finite

DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.sampled_from([0.0, -0.0, 1.5, 6e4, 3e38, -3e38, math.inf, -math.inf, math.nan]), max_size=40),
)
def test_as_many_are_counted_as_torch_finds(dtype: str, numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(DTYPES[dtype])
    assert count_non_finite(raw(tensor), dtype) == int((~torch.isfinite(tensor)).sum())


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_one_among_many_is_found_wherever_it_stands(dtype: str) -> None:
    tensor = torch.ones(300_000, dtype=DTYPES[dtype])
    for place in (0, 131_071, 131_072, 299_999):
        tensor[place] = math.nan
        assert count_non_finite(raw(tensor), dtype) == 1
        tensor[place] = 1


def test_a_sum_that_overflows_accuses_nobody() -> None:
    assert count_non_finite(raw(torch.full((1000,), 3e38)), "F32") == 0


def test_each_half_of_a_complex_number_counts() -> None:
    tensor = torch.tensor([complex(1, math.inf), complex(math.nan, math.nan)], dtype=torch.complex64)
    assert count_non_finite(raw(torch.view_as_real(tensor)), "C64") == 3


@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "F8_E4M3"])
def test_other_dtypes_are_not_looked_at(dtype: str) -> None:
    assert count_non_finite(b"\xff" * 16, dtype) == 0
