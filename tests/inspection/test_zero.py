"""DeepSpeed's directories of ranks: what is kept of them, and what tells that one is not whole."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unbroken.checkpoint.verify import Finding
from unbroken.errors import DamagedError, UnbrokenError, UsageError
from unbroken.inspection import roles
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import is_foreign, open_checkpoint
from unbroken.inspection.formats import zero_rank
from unbroken.inspection.formats.base import StoredTensor
from unbroken.inspection.formats.zero import ZeroDirectory

Files = dict[str, Any]
MODEL = "mp_rank_00_model_states.pt"
ENUMERATION = "deepspeed.runtime.zero.config.ZeroStageEnum"


def name(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


class File:
    """What is read of a file of `torch.save`: arrays in its values are tensors of 32 bits in a row."""

    def __init__(self, path: Path, values: Any) -> None:
        self.path = path
        self.size_bytes = 1
        self.tensors: dict[str, StoredTensor] = {}
        self.facts: dict[str, Any] = {}
        self.problems: list[Finding] = []
        self.notes: list[str] = [f"a note of {path.name}"]
        self.checksums = "CRC-32" if not isinstance(values, dict) or "bare" not in values else None
        self._content: dict[str, array[float]] = {}
        self._first: dict[int, str] = {}
        self.values = self._read(values, "")

    def read(self, path: str) -> memoryview:
        return memoryview(self._content[path].tobytes())

    def read_range(self, path: str, start: int, size_bytes: int) -> memoryview:
        return self.read(path)[start : start + size_bytes]

    def verify(self) -> Iterator[Finding]:
        yield from ()

    def _read(self, value: Any, path: str) -> Any:
        if isinstance(value, array):
            first = self._first.setdefault(id(value), path)
            aliases = (*self.tensors[first].aliases, path) if first != path else ()
            size = len(value) * value.itemsize
            dtype = {"f": "F32", "d": "F64"}[value.typecode]
            self.tensors[first] = StoredTensor(
                dtype=dtype, shape=(len(value),), size_bytes=size, where="", aliases=aliases
            )
            self._content[first] = value
            return {"$tensor": first}
        if isinstance(value, list | dict):
            items = enumerate(value) if isinstance(value, list) else value.items()
            read = {key: self._read(item, f"{path}/{key}" if path else str(key)) for key, item in items}
            return [*read.values()] if isinstance(value, list) else read
        return value


def numbers(*values: float) -> array[float]:
    return array("f", values)


def rank_file(weights: array[float], moments: array[float] | None = None, **changes: Any) -> Files:
    state = {
        "zero_stage": 2,
        "partition_count": [2],
        "single_partition_of_fp32_groups": [weights],
        "base_optimizer_state": {
            "state": {"0": {"exp_avg": weights if moments is None else moments}},
            "param_groups": [{"lr": 0.5, "step": 7, "params": [0]}],
        },
        **changes,
    }
    return {"optimizer_state_dict": state}


def files() -> Files:
    """Return two ranks of 2 parameters with 5 elements in all, padded to 8; the last piece is lean."""
    return {
        MODEL: {"module": {}, "param_shapes": [{"a": [3], "b": [2, 1]}]},
        name(0): rank_file(numbers(1, 2, 3, 4), numbers(11, 12, 13, 14)),
        name(1): rank_file(numbers(5), numbers(15, 0, 0, 0)),
    }


Open = Callable[[Files], ZeroDirectory]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Open a directory with files that have these values."""

    def open_files(contents: Files) -> ZeroDirectory:
        for file in tmp_path.iterdir():
            file.unlink()
        for file_name in contents:
            (tmp_path / file_name).touch()
        made = {file_name: File(tmp_path / file_name, values) for file_name, values in contents.items()}
        monkeypatch.setattr(zero_rank, "ZipEntries", lambda path: None)
        monkeypatch.setattr(zero_rank, "TorchZip", lambda path, entries: made[path.name])
        return ZeroDirectory(tmp_path)

    return open_files


def read(reader: ZeroDirectory) -> dict[str, list[float]]:
    return {path: [*memoryview(reader.read(path)).cast("f")] for path in reader.tensors}


def told(reader: ZeroDirectory) -> str:
    return "\n".join(f"{found.file}: {found.problem}" for found in reader.problems)


def state_of(contents: Files, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = contents[name(rank)]["optimizer_state_dict"]
    return found


class TestWhatIsPutTogether:
    def test_the_weights_of_the_last_rank_are_leaner_than_its_moments(self, opened: Open) -> None:
        reader = opened(files())
        assert told(reader) == ""
        assert read(reader) == {
            "model/a": [1, 2, 3],
            "model/b": [4, 5],
            "optimizer/state/a/exp_avg": [11, 12, 13],
            "optimizer/state/b/exp_avg": [14, 15],
        }
        assert reader.tensors["model/b"].shape == (2, 1)
        assert f"{name(1)}: a note of {name(1)}" in reader.notes
        assert reader.checksums == "CRC-32"
        assert reader.values["optimizer"]["state"]["a"] == {
            "exp_avg": {"$tensor": "optimizer/state/a/exp_avg"}
        }

    def test_of_one_rank_the_moments_are_longer_than_the_weights(self, opened: Open) -> None:
        only = rank_file(numbers(1, 2, 3, 4, 5), numbers(1, 2, 3, 4, 5, 0), partition_count=[1])
        reader = opened({MODEL: files()[MODEL], name(0): only})
        assert told(reader) == ""
        assert read(reader)["optimizer/state/b/exp_avg"] == [4, 5]

    @pytest.mark.parametrize(
        "stage",
        [
            {"$object": ENUMERATION, "arguments": [2]},
            {"$object": "__builtin__.getattr", "arguments": [ENUMERATION, "gradients"]},
        ],
    )
    def test_the_stage_may_be_a_member_of_an_enumeration(self, opened: Open, stage: Any) -> None:
        contents = files()
        for rank in range(2):
            state_of(contents, rank)["zero_stage"] = stage
        reader = opened(contents)
        assert (reader.facts["zero_stage"], told(reader)) == (2, "")

    def test_elastic_checkpoints_keep_lean_states_in_a_list(self, opened: Open) -> None:
        contents = files()
        for rank, moments in enumerate((numbers(11, 12, 13, 14), numbers(15))):
            state_of(contents, rank)["base_optimizer_state"] = [{"exp_avg": moments, "step": numbers(7)}]
        reader = opened(contents)
        assert told(reader) == ""
        assert read(reader)["optimizer/state/b/exp_avg"] == [14, 15]
        assert read(reader)["optimizer/groups/0/step"] == [7]
        assert roles.optimizers(reader.values)[0]["parameters"] == 2


class TestNothingIsDropped:
    def test_tensors_beside_the_model_stay_under_their_own_paths(self, opened: Open) -> None:
        contents = files()
        average = numbers(9, 9)
        contents[MODEL] |= {
            "ema": {"a": average, "again": average},
            "rng": [numbers(1), 3],
            "module": {"a": numbers(1, 1, 1), "mean": numbers(4), "a._extra_state": "scale 2"},
        }
        reader = opened(contents)
        found = read(reader)
        assert (found["ema/a"], found["rng/0"], found["model/mean"]) == ([9, 9], [1], [4])
        assert reader.tensors["ema/a"].aliases == ("ema/again",)
        assert reader.values["ema"] == {"a": {"$tensor": "ema/a"}, "again": {"$tensor": "ema/a"}}
        assert reader.values["rng"] == [{"$tensor": "rng/0"}, 3]
        assert reader.values["model"] == {"a._extra_state": "scale 2"}
        assert found["model/a"] == [1, 2, 3]

    def test_every_reference_leads_to_a_tensor(self, opened: Open) -> None:
        contents = files()
        half, mean = numbers(1, 1, 1), numbers(4)
        contents[MODEL] |= {"module": {"a": half, "mean": mean}, "kept": {"half": half, "mean": mean}}
        state_of(contents, 0)["scales"] = {"now": numbers(3)}
        reader = opened(contents)

        def references(value: Any) -> Iterator[str]:
            if isinstance(value, dict | list):
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    yield from [item] if key == "$tensor" else references(item)

        found = [*references(reader.values)]
        assert {"kept/half", "model/mean", "optimizer/scales/now"} <= {*found}
        assert {*found} <= reader.tensors.keys()
        # The 16-bit copy that is kept elsewhere, too, is not the weight itself.
        assert read(reader)["kept/half"] == [1, 1, 1]

    @pytest.mark.parametrize("is_said", [False, True])
    def test_tied_weights_are_listed_with_both_names(self, opened: Open, is_said: bool) -> None:
        contents = files()
        half = numbers(1, 1, 1)
        other = numbers(1, 1, 1) if is_said else half
        contents[MODEL]["module"] = {"a": half, "head": other, "mean": (mean := numbers(4)), "mean2": mean}
        if is_said:
            contents[MODEL]["shared_params"] = {"head": "a"}
        reader = opened(contents)
        assert reader.tensors["model/a"].aliases == ("model/head",)
        assert reader.tensors["model/mean"].aliases == ("model/mean2",)
        assert reader.tensors.keys() == opened(files()).tensors.keys() | {"model/mean"}

    def test_counts_scalers_and_all_else_of_the_optimizer_stay(self, opened: Open) -> None:
        contents = files()
        for rank in range(2):
            state = state_of(contents, rank)
            state |= {"loss_scaler": {"$object": "Scaler"}, "overflow": False}
            state["base_optimizer_state"]["state"]["0"] |= {"step": 7, "norm": numbers(3)}
        optimizer = opened(contents).values["optimizer"]
        assert optimizer["groups"] == [{"step": 7, "norm": {"$tensor": "optimizer/groups/0/norm"}}]
        assert (optimizer["overflow"], optimizer["loss_scaler"]) == (False, {"$object": "Scaler"})
        assert optimizer["param_groups"] == [{"lr": 0.5, "step": 7, "params": ["a", "b"]}]

    def test_a_model_and_an_optimizer_of_the_script_itself_are_told_apart_from_ours(
        self, opened: Open
    ) -> None:
        contents = files()
        contents[MODEL] |= {"model": {"a": numbers(8)}, "optimizer": {"of": "the script"}}
        reader = opened(contents)
        assert read(reader)["model/a'"] == [8]
        assert reader.values["model"] == {"a": {"$tensor": "model/a'"}}
        assert reader.values["optimizer'"] == {"of": "the script"}


class TestWhatIsNotWhole:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"zero_stage": 1}, "the ZeRO stage: expected 2, found 1"),
            ({"partition_count": [3]}, "ranks: expected 2, found 3"),
            ({"single_partition_of_fp32_groups": [numbers()]}, "at least 1 elements in a row, found (0,)"),
            ({"single_partition_of_fp32_groups": []}, "groups of weights: expected 1, found 0"),
            ({"single_partition_of_fp32_groups": [array("d", [5])]}, "as F32, found F64"),
            ({"single_partition_of_fp32_groups": [numbers(*range(5))]}, "at most 4 elements, found 5"),
        ],
    )
    def test_a_rank_of_another_save_is_named(
        self, opened: Open, tmp_path: Path, changes: Files, words: str
    ) -> None:
        contents = files()
        state_of(contents, 1).update(changes)
        reader = opened(contents)
        assert words in told(reader)
        with pytest.raises(UsageError, match="expected a complete checkpoint"):
            convert(reader, tmp_path.parent / "merged.safetensors")

    def test_a_rank_of_another_step_is_named(self, opened: Open) -> None:
        contents = files()
        state_of(contents, 1)["base_optimizer_state"]["param_groups"][0]["step"] = 8
        assert f"{name(1)}: the step of group 0: expected 7, found 8" in told(opened(contents))
        for rank, step in enumerate((7, 8)):
            base = state_of(contents, rank)["base_optimizer_state"]
            base["param_groups"][0].pop("step")
            base["state"]["0"]["step"] = numbers(step)
        reader = opened(contents)
        assert told(reader) == ""
        assert [found.file for found in reader.verify()] == [name(1)]

    def test_a_rank_that_is_left_from_a_save_with_more_of_them_is_named(self, opened: Open) -> None:
        contents = files() | {name(2): rank_file(numbers(1, 2))}
        assert "a file of rank 2, though there are 2 ranks" in told(opened(contents))

    def test_a_moment_that_a_rank_lacks_or_has_alone_is_named(self, opened: Open) -> None:
        for state in ({}, {"exp_avg": numbers(15), "more": numbers(1)}):
            contents = files()
            state_of(contents, 1)["base_optimizer_state"]["state"]["0"] = state
            assert "the state of group 0: expected ['exp_avg'], found" in told(opened(contents))
        contents = files()
        state_of(contents, 1)["base_optimizer_state"]["state"]["0"] = {}
        with pytest.raises(DamagedError, match="exp_avg of group 0 in the file of rank 1, found none"):
            opened(contents).read("optimizer/state/b/exp_avg")

    def test_missing_ranks_are_one_finding_and_more_than_there_can_be_are_refused(self, opened: Open) -> None:
        contents = files()
        state_of(contents, 0)["partition_count"] = 1_000_000
        reader = opened(contents)
        assert "rank 2 and 999997 more of 1000000 are missing" in told(reader)
        assert len(reader.problems) < 6
        state_of(contents, 0)["partition_count"] = [10**12]
        with pytest.raises(DamagedError, match="1 to 1000000 ranks"):
            opened(contents)

    def test_a_shape_that_no_rank_can_fill_is_named_and_takes_no_memory(self, opened: Open) -> None:
        contents = files()
        contents[MODEL]["param_shapes"] = [{"w": [1 << 47]}]
        reader = opened(contents)
        assert "at least 70368744177664 elements" in told(reader)
        with pytest.raises(DamagedError, match="at least 70368744177664 elements"):
            reader.read("model/w")

    def test_without_checksums_in_one_file_there_are_none(self, opened: Open) -> None:
        assert opened(files() | {name(1): {**files()[name(1)], "bare": 1}}).checksums is None

    def test_two_files_of_one_rank_are_refused(self, opened: Open) -> None:
        with pytest.raises(DamagedError, match="one file of rank 1"):
            opened(files() | {f"bf16_{name(1)}": files()[name(1)]})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("partition_count",), {}),
        (("partition_count",), [{}]),
        (("base_optimizer_state", "param_groups"), 5),
        (("base_optimizer_state", "param_groups"), [5]),
        (("base_optimizer_state",), 5),
        (("single_partition_of_fp32_groups",), 5),
    ],
)
def test_what_no_library_writes_is_refused_as_damaged(
    opened: Open, path: tuple[str, ...], value: object
) -> None:
    contents = files()
    place = state_of(contents, 0)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(DamagedError):
        opened(contents)


@pytest.mark.parametrize("shape", [[float("inf")], "12", [-1], [True], 5, [1 << 60], {"b": 1}])
def test_a_shape_that_no_tensor_has_is_refused_as_damaged(opened: Open, shape: object) -> None:
    contents = files()
    contents[MODEL]["param_shapes"] = [{"a": shape}]
    with pytest.raises(DamagedError):
        opened(contents)


def test_a_number_of_a_rank_that_no_run_has_is_none(tmp_path: Path) -> None:
    (tmp_path / name(1234567)).touch()
    assert not is_foreign(tmp_path)
    with pytest.raises(UsageError, match="expected one checkpoint in it, found none"):
        open_checkpoint(tmp_path)


KEYS = ["state", "step", "module", "shared_params", "$tensor", "a", "b", "0", "params", "arguments"]
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*KEYS, "module/a"])
tensors = st.lists(st.floats(width=32), max_size=6).map(lambda found: array("f", found))
anything = st.recursive(
    plain | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*above, key)
            yield from places(item, (*above, key))


@given(data=st.data())
@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[*HealthCheck])
def test_whatever_stands_in_the_files_it_is_read_or_refused(opened: Open, data: st.DataObject) -> None:
    contents = files()
    for _ in range(data.draw(st.integers(1, 3))):
        *above, last = data.draw(st.sampled_from([place for place in places(contents) if len(place) > 1]))
        target: Any = contents
        for key in above:
            target = target[key]
        target[last] = data.draw(anything)
    try:
        reader = opened(contents)
    except UnbrokenError:
        return
    list(reader.verify())
    for path, entry in reader.tensors.items():
        with suppress(UnbrokenError) if reader.problems else nullcontext():
            assert reader.read(path).nbytes == entry.size_bytes
