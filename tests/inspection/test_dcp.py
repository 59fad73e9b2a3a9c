"""Directories of `torch.distributed.checkpoint`: what two ranks wrote, put together; what tells of damage."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from unbroken.cli.main import main
from unbroken.errors import DamagedError, StorageError, UnbrokenError
from unbroken.inspection import roles
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import is_foreign, open_checkpoint
from unbroken.inspection.diff import compare
from unbroken.inspection.formats.base import CheckpointReader
from unbroken.inspection.formats.pieces import Piece, Tiling

from .golden import GOLDEN, bytes_of, tensors_in

DCP = GOLDEN / "dcp"


def content(reader: CheckpointReader) -> dict[str, bytes]:
    return {path: bytes(reader.read(path)) for path in reader.tensors}


def told(reader: CheckpointReader) -> str:
    return "\n".join(f"{found.file}: {found.problem}" for found in (*reader.problems, *reader.verify()))


def whole() -> dict[str, Any]:
    found: dict[str, Any] = torch.load(DCP / "whole.pt", weights_only=False)
    return found


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DCP / "fsdp", tmp_path / "fsdp"))


def change(directory: Path, edit: Callable[[Metadata], object]) -> CheckpointReader:
    """Rewrite the metadata of a directory as torch would have pickled them."""
    said = pickle.loads((directory / ".metadata").read_bytes())
    edit(said)
    (directory / ".metadata").write_bytes(pickle.dumps(said))
    return open_checkpoint(directory)


class TestWhatIsPutTogether:
    def test_every_tensor_of_two_ranks_is_read_as_torch_reads_it(self) -> None:
        reader = open_checkpoint(DCP / "fsdp")
        expected = {path: bytes_of(value) for path, value in tensors_in(whole())}
        assert content(reader) == expected
        assert (told(reader), reader.checksums) == ("", "CRC-32 of each entry")
        assert "2 pieces in __0_0.distcp, __1_0.distcp" in reader.tensors["model/0.weight"].where

    def test_settings_and_counters_are_values_as_in_a_file_of_torch_save(self) -> None:
        reader = open_checkpoint(DCP / "fsdp")
        assert (reader.values["epoch"], reader.values["seeds"]) == (3, [1, 2])
        assert reader.values["optimizer"] == open_checkpoint(DCP / "whole.pt").values["optimizer"]
        (optimizer,) = roles.optimizers(reader.values)
        assert (optimizer["learning_rates"], optimizer["parameters"], optimizer["states"]) == ([0.01], 6, 6)

    def test_weights_that_ranks_wrote_as_safetensors_are_put_together(self) -> None:
        reader = open_checkpoint(DCP / "safetensors")
        assert content(reader) == {path: bytes_of(value) for path, value in whole()["model"].items()}
        assert told(reader) == ""

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_what_one_process_saves_is_read_bit_for_bit(self, tmp_path: Path) -> None:
        state = {
            "kinds": {
                "bf16": torch.tensor([1.5, -2.0]).bfloat16(),
                "f8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
                "scalar": torch.tensor(7),
                "none": torch.zeros(0, 3),
                "turned": torch.arange(6.0).reshape(2, 3).t(),
            },
            "rng": {"cpu": torch.get_rng_state()},
            "list": [torch.ones(2), {"inner": torch.zeros(1)}, "text"],
            "tuple": (1, "two"),
        }
        dcp.save(state, checkpoint_id=tmp_path / "one", no_dist=True)
        reader = open_checkpoint(tmp_path / "one")
        found = content(reader)
        for path, value in tensors_in({**state["kinds"], "cpu": state["rng"]["cpu"]}):  # type: ignore[dict-item]
            part = "rng" if path == "cpu" else "kinds"
            assert found[f"{part}/{path}"] == bytes_of(value), path
        assert found["list/0"] == bytes_of(torch.ones(2))
        assert reader.values["list"][1:] == [{"inner": {"$tensor": "list/1/inner"}}, "text"]
        assert reader.values["tuple"] == [1, "two"]
        assert told(reader) == ""

    def test_it_goes_through_every_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert is_foreign(DCP / "fsdp")
        assert main(["inspect", str(DCP / "fsdp"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["counters"] == {"epoch": 3}
        assert main(["verify", str(DCP / "fsdp")]) == 0
        assert "intact" in capsys.readouterr().out
        assert compare(open_checkpoint(DCP / "fsdp"), open_checkpoint(DCP / "whole.pt")).as_json()["equal"]
        convert(open_checkpoint(DCP / "fsdp"), tmp_path / "merged.safetensors")
        assert content(open_checkpoint(tmp_path / "merged.safetensors")) == content(
            open_checkpoint(DCP / "fsdp")
        )

    def test_what_megatron_puts_beside_the_pieces_is_a_part(self, copied: Path) -> None:
        torch.save({"iteration": 7, "args": {"seed": 1}, "w": torch.ones(2)}, copied / "common.pt")
        reader = open_checkpoint(copied)
        assert roles.counters(reader.values) == {"epoch": 3, "common/iteration": 7}
        assert bytes(reader.read("common/w")) == bytes_of(torch.ones(2))
        (copied / "common.pt").write_bytes((copied / "common.pt").read_bytes()[:-9])
        assert "common.pt: " in told(open_checkpoint(copied))


class TestOtherReleases:
    def test_fields_that_were_added_later_may_be_missing(self, copied: Path) -> None:
        def as_it_was(said: Any) -> None:
            for name in ("storage_meta", "version"):
                del said.__dict__[name]
            # Where a tensor in one piece begins was not said.
            said.storage_data = {
                replace(index, offset=None) if index.fqn == "rng" else index: info
                for index, info in said.storage_data.items()
            }

        before = content(open_checkpoint(copied))
        assert content(change(copied, as_it_was)) == before

    def test_without_the_keys_of_the_state_the_flat_names_are_kept(self, copied: Path) -> None:
        reader = change(copied, lambda said: setattr(said, "planner_data", None))
        assert "model.0.weight" in reader.tensors
        assert reader.values["optimizer.param_groups.0.lr"] == 0.01

    def test_ranks_that_saved_for_themselves_are_refused_in_words(self, copied: Path) -> None:
        (copied / ".metadata").rename(copied / "__0.metadata")
        with pytest.raises(StorageError, match="each rank saved for itself"):
            open_checkpoint(copied)

    def test_pieces_that_went_through_a_transform_are_listed_and_not_read(self, copied: Path) -> None:
        def compressed(said: Any) -> None:
            for info in said.storage_data.values():
                if info.relative_path == "__0_0.distcp":
                    info.transform_descriptors = ["stream.zstd"]

        reader = change(copied, compressed)
        assert "model/0.weight" in reader.tensors
        with pytest.raises(StorageError, match=r"it went through stream\.zstd"):
            reader.read("model/0.weight")

    def test_a_directory_of_which_all_went_through_a_transform_is_sound_and_says_so(
        self, copied: Path
    ) -> None:
        def compressed(said: Any) -> None:
            for info in said.storage_data.values():
                info.transform_descriptors = ["stream.zstd"]
                info.length = min(info.length, 8)

        reader = change(copied, compressed)
        assert told(reader) == ""
        assert reader.values["epoch"] == "(not read)"
        for what in ("value epoch", "tensor model/0.weight"):
            assert f"{what} is not read: it went through stream.zstd" in reader.notes


class TestDamage:
    def test_without_metadata_nothing_was_committed(
        self, copied: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (copied / ".metadata").unlink()
        assert main(["verify", str(copied)]) == 3
        assert "2 files of ranks without it: the save was never finished" in capsys.readouterr().out

    def test_the_file_of_a_rank_that_is_missing_is_named_with_what_it_held(self, copied: Path) -> None:
        (copied / "__0_0.distcp").unlink()
        reader = open_checkpoint(copied)
        assert "__0_0.distcp: " in told(reader)
        assert "model.0.weight: __0_0.distcp is missing" in told(reader)
        with pytest.raises(DamagedError):
            reader.read("model/0.weight")
        assert len(reader.read("rng")) == 36

    def test_a_file_that_was_cut_short_is_found_by_its_length(self, copied: Path) -> None:
        os.truncate(copied / "__1_0.distcp", 60_000)
        assert "__1_0.distcp ends" in str(open_checkpoint(copied).problems)

    def test_a_flipped_bit_is_found_and_the_tensor_is_named(self, copied: Path) -> None:
        info = pickle.loads((copied / ".metadata").read_bytes()).storage_data
        (place,) = (at for index, at in info.items() if index.fqn == "rng")
        data = bytearray((copied / place.relative_path).read_bytes())
        at = data.index(bytes_of(torch.arange(9.0)), place.offset)
        data[at + 30] ^= 4
        (copied / place.relative_path).write_bytes(data)
        reader = open_checkpoint(copied)
        assert reader.problems == []
        (found,) = reader.verify()
        assert found.file == "__1_0.distcp"
        assert found.problem.startswith("tensor rng, piece at (0,): archive/data/0: ")

    def test_a_file_of_another_save_is_noted(self, copied: Path) -> None:
        shutil.copy(copied / "__1_0.distcp", copied / "__2_0.distcp")
        assert any("__2_0.distcp for one: of another save" in note for note in open_checkpoint(copied).notes)

    def test_pieces_that_do_not_tile_their_tensor_are_named(self, copied: Path) -> None:
        def cut_otherwise(said: Any) -> None:
            tensors = said.state_dict_metadata
            del tensors["model.0.weight"].chunks[1]
            tensors["model.0.bias"].size = torch.Size([4])
            tensors["model.2.weight"].chunks[1] = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 5]))

        reader = change(copied, cut_otherwise)
        for words in (
            "model.0.weight: 6 of its 15 elements are in no piece",
            "model.0.bias: its piece at (3) reaches beyond (4)",
            "model.2.weight: its pieces at (0, 0) and (0, 0) overlap",
        ):
            assert words in told(reader)
        with pytest.raises(DamagedError):
            reader.read("model/0.weight")

    def test_a_piece_that_is_another_tensor_than_was_said_is_damage(self, copied: Path) -> None:
        def swap(said: Any) -> None:
            of = {index.fqn: info for index, info in said.storage_data.items()}
            mean, rng = of["model.1.num_batches_tracked"], of["rng"]
            mean.__dict__, rng.__dict__ = rng.__dict__, mean.__dict__

        reader = change(copied, swap)
        assert "expected F32 (9,), found I64 ()" in told(reader)
        with pytest.raises(DamagedError):
            reader.read("rng")

    def test_blocks_of_safetensors_that_are_missing_are_noticed(self, tmp_path: Path) -> None:
        shutil.copytree(DCP / "safetensors", tmp_path / "cut")
        for rank in (3, 4):
            shutil.copy(
                tmp_path / "cut/shard-00001-model-00001-of-00001.safetensors",
                tmp_path / f"cut/shard-{rank:05d}-model-00001-of-00001.safetensors",
            )
        (tmp_path / "cut/shard-00003-model-00001-of-00001.safetensors").unlink()
        said = told(open_checkpoint(tmp_path / "cut"))
        assert "the file of rank 2 is missing" in said
        assert "tensor 0.weight: its pieces at (0, 0) and (0, 0) overlap" in said
        for file in (tmp_path / "cut").iterdir():
            save_file({"a": torch.ones(2)}, file)
        assert "where it begins is not said" in told(open_checkpoint(tmp_path / "cut"))


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


class TestHostileMetadata:
    def test_nothing_in_them_is_executed(self, copied: Path, tmp_path: Path) -> None:
        reader = change(copied, lambda said: setattr(said, "storage_meta", _Touch(tmp_path / "canary")))
        assert told(reader) == ""
        assert not (tmp_path / "canary").exists()

    @pytest.mark.parametrize("name", ["../secret.distcp", "/etc/passwd", "linked.distcp", "..", "", "a\x00"])
    def test_no_file_outside_of_the_directory_is_read(self, copied: Path, name: str) -> None:
        shutil.move(copied / "__0_0.distcp", copied.parent / "secret.distcp")
        (copied / "linked.distcp").symlink_to(copied.parent / "secret.distcp")

        def lead_out(said: Any) -> None:
            for info in said.storage_data.values():
                if info.relative_path == "__0_0.distcp":
                    info.relative_path = name

        reader = change(copied, lead_out)
        assert reader.problems
        with pytest.raises(DamagedError):
            reader.read("model/0.weight")

    def test_a_shape_is_only_a_claim(self, copied: Path) -> None:
        def claim(said: Any) -> None:
            huge = said.state_dict_metadata["rng"]
            huge.size = torch.Size([1 << 45])
            huge.chunks = [ChunkStorageMetadata(torch.Size([0]), huge.size)]

        reader = change(copied, claim)
        with pytest.raises(DamagedError):
            reader.read("rng")

    def test_one_range_of_a_file_is_no_source_of_many_pieces(self, copied: Path) -> None:
        def repeat(said: Any) -> None:
            index, info = next((at, info) for at, info in said.storage_data.items() if at.fqn == "rng")
            piece = torch.Size([9])
            said.state_dict_metadata["rng"].size = torch.Size([9 * 50])
            said.state_dict_metadata["rng"].chunks = [
                ChunkStorageMetadata(torch.Size([9 * at]), piece) for at in range(50)
            ]
            said.storage_data |= {replace(index, offset=torch.Size([9 * at])): info for at in range(50)}

        reader = change(copied, repeat)
        assert "it lies where rng lies, too" in told(reader)
        with pytest.raises(DamagedError):
            reader.read("rng")

    @given(
        flips=st.lists(
            st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=6
        ),
        file=st.sampled_from([".metadata", ".metadata", "__0_0.distcp", "__1_0.distcp"]),
    )
    @settings(
        max_examples=20,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    def test_any_change_is_an_error_of_ours_or_does_no_harm(
        self, copied: Path, flips: list[tuple[float, int]], file: str
    ) -> None:
        data = bytearray((DCP / "fsdp" / file).read_bytes())
        for place, bit in flips:
            data[int(place * len(data))] ^= 1 << bit
        (copied / file).write_bytes(data)
        with suppress(UnbrokenError):
            reader = open_checkpoint(copied)
            [*reader.verify()]
            for path in reader.tensors:
                with suppress(UnbrokenError):
                    reader.read(path)
        shutil.copy(DCP / "fsdp" / file, copied / file)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[int], list[Piece]]:
    """Draw a shape and the pieces that it is cut into along each dimension."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cuts = [sorted({0, length, *draw(st.sets(st.integers(0, length), max_size=3))}) for length in shape]
    blocks = product(*([*pairwise(along)] for along in cuts))
    return shape, [
        Piece(offsets=tuple(at for at, _ in block), sizes=tuple(end - at for at, end in block), place=None)
        for block in blocks
    ]


@given(drawn=tilings(), data=st.data())
@settings(max_examples=60, deadline=None, database=None)
def test_pieces_tile_a_tensor_unless_one_is_missing_there_twice_or_elsewhere(
    drawn: tuple[list[int], list[Piece]], data: st.DataObject
) -> None:
    shape, pieces = drawn
    pieces = data.draw(st.permutations(pieces))
    assert Tiling().problem(shape, pieces) is None
    assert "in no piece" in (Tiling().problem(shape, pieces[1:]) or "")
    assert "overlap" in (Tiling().problem(shape, [*pieces, pieces[0]]) or "")
    longer = replace(pieces[0], sizes=(pieces[0].sizes[0] + 1, *pieces[0].sizes[1:]))
    assert Tiling().problem(shape, [longer, *pieces[1:]]) is not None
