from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from unbroken.checkpoint.reader import read_manifest, read_tensors
from unbroken.checkpoint.verify import verify_checkpoint
from unbroken.state.tree import Decoder
from unbroken.storage.local import LocalStorage

from .contents import CONTENTS

HERE = Path(__file__).parent


@pytest.mark.parametrize("version", [1, 2])
def test_a_checkpoint_of_each_format_is_intact_and_holds_what_was_saved(version: int) -> None:
    storage, tree = LocalStorage(HERE), f"format-{version}/step-00000007.1"
    assert verify_checkpoint(storage, tree).is_intact
    manifest = read_manifest(storage, tree)
    assert (manifest.step, manifest.revision, manifest.format_version) == (7, 1, version)
    assert (manifest.position.epoch, manifest.position.inside_epoch) == (3, True)
    assert manifest.metrics == {"accuracy": 0.5, "loss": {"$float": "nan"}}
    assert manifest.parent == "step-00000007"
    decoder = Decoder(read_tensors(storage, tree, manifest).__getitem__)
    found = {name: decoder.decode(part.state) for name, part in manifest.parts.items()}
    assert found == CONTENTS
    assert math.copysign(1, found["values"]["numbers"][4]) == -1


def test_damage_to_a_checkpoint_of_format_1_is_found_by_the_digests_of_that_format(tmp_path: Path) -> None:
    shutil.copytree(HERE / "format-1", tmp_path / "format-1")
    storage, tree = LocalStorage(tmp_path), "format-1/step-00000007.1"
    file, shard = next(iter(read_manifest(storage, tree).shards.items()))
    data = bytearray((tmp_path / tree / file).read_bytes())
    data[shard.header_bytes] ^= 1
    (tmp_path / tree / file).write_bytes(data)
    assert not verify_checkpoint(storage, tree).is_intact
