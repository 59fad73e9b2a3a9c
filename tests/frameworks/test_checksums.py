"""A tensor on a device is summed up where it lies: what has changed in it, its order included, shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unbroken.frameworks.torch import tensors
from unbroken.frameworks.torch.tensors import TorchTensor

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float8_e4m3fn),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


def made(dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    return (drawn > 0.5 if dtype is torch.bool else drawn * 100).to(dtype)


def flipped(memory: torch.Tensor) -> None:
    memory.copy_(memory.flip(0).clone())


def rolled(memory: torch.Tensor) -> None:
    memory.copy_(memory.roll(1, 0).clone())


def two_swapped(memory: torch.Tensor) -> None:
    memory[[0, 5]] = memory[[5, 0]]


def one_bit(memory: torch.Tensor) -> None:
    memory[2, 3] ^= 1


@pytest.mark.parametrize("change", [flipped, rolled, two_swapped, one_bit])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_change_shows(dtype: torch.dtype, change: Callable[[torch.Tensor], None]) -> None:
    tensor = made(dtype)
    memory = tensor.view(torch.uint8)
    before, kept = TorchTensor(tensor).checksum(), memory.clone()
    change(memory)
    assert TorchTensor(tensor).checksum() != before
    memory.copy_(kept)
    assert TorchTensor(tensor).checksum() == before


@pytest.mark.parametrize(
    "see",
    [
        torch.Tensor.t,
        lambda tensor: tensor[::2, 1:4],
        lambda tensor: tensor.view(6, 5, 1, 1).to(memory_format=torch.channels_last),
        lambda tensor: torch.view_as_complex(tensor[:, :4].contiguous().view(6, 2, 2)).conj(),
    ],
    ids=["transposed", "sliced", "channels last", "conjugate"],
)
def test_it_shows_however_the_elements_lie(see: Callable[[torch.Tensor], torch.Tensor]) -> None:
    seen = see(made(torch.float32))
    before = TorchTensor(seen).checksum()
    assert TorchTensor(seen).checksum() == before
    seen.copy_(seen.flip(0).clone())
    assert TorchTensor(seen).checksum() != before


def test_it_shows_across_the_pieces_that_are_summed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_PIECE", 4)
    tensor = torch.arange(10.0)
    before = TorchTensor(tensor).checksum()
    tensor.copy_(tensor.roll(4))
    assert TorchTensor(tensor).checksum() != before


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_a_number_and_nothing_have_one_too(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    assert TorchTensor(tensor).checksum() == TorchTensor(tensor).checksum()
