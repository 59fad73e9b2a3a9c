from __future__ import annotations

import math
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.checkpoint.container import header_size, parse_header, plan_shard
from unbroken.errors import DamagedError
from unbroken.state.tensors import ITEM_BYTES, HostTensor
from unbroken.storage.base import PAGE_BYTES

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes),
    max_size=12,
)


def sources(kinds: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, HostTensor]:
    return {
        name: HostTensor(dtype, shape, memoryview(bytes(math.prod(shape) * ITEM_BYTES[dtype])))
        for name, (dtype, shape) in kinds.items()
    }


@given(tensors)
@settings(max_examples=150)
def test_tensors_tile_the_file_from_a_page_boundary_on_each_aligned_to_its_elements(
    kinds: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    plan = plan_shard("x.safetensors", sources(kinds))
    end = len(plan.header)
    assert end % PAGE_BYTES == 0
    for placed in sorted(plan.placements.values(), key=lambda at: (at.offset, at.size_bytes)):
        assert placed.offset == end
        assert placed.offset % ITEM_BYTES[placed.dtype] == 0
        end += placed.size_bytes
    assert end == plan.size_bytes


@given(tensors)
@settings(max_examples=150)
def test_our_reader_and_the_safetensors_library_find_what_was_planned(
    kinds: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    plan = plan_shard("x.safetensors", sources(kinds))
    assert header_size(plan.header[:8], plan.size_bytes, "x") == len(plan.header)
    assert parse_header(plan.header, "x") == plan.placements
    data = plan.header + bytes(plan.size_bytes - len(plan.header))
    found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in safetensors.deserialize(data)}
    assert found == kinds


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"", "at least 8 bytes"),
        (b"\xff" * 8, "a header within"),
        ((200).to_bytes(8, "little"), "a header within"),
    ],
)
def test_a_hostile_header_length_is_damage(header: bytes, problem: str) -> None:
    with pytest.raises(DamagedError, match=problem):
        header_size(header, 100, "x")


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}',
        b'{"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_header_that_is_none_is_damage_not_a_crash(text: bytes) -> None:
    with pytest.raises(DamagedError, match=r"^x"):
        parse_header(len(text).to_bytes(8, "little") + text, "x")


def test_the_safetensors_library_opens_a_shard_of_a_checkpoint(tmp_path: Path) -> None:
    from unbroken.checkpoint.store import CheckpointStore

    from .states import snapshot_at

    CheckpointStore(tmp_path).save(snapshot_at(7))
    file = tmp_path / "checkpoints" / "step-00000007" / "model-00.safetensors"
    with safetensors.safe_open(file, framework="numpy") as opened:
        assert sorted(opened.keys()) == ["model/bias", "model/empty", "model/weight"]
        assert opened.get_tensor("model/weight").shape == (600, 500)
