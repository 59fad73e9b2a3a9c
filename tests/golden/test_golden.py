from __future__ import annotations

import math
from pathlib import Path

from unbroken.checkpoint.reader import read_manifest, read_tensors
from unbroken.checkpoint.verify import verify_checkpoint
from unbroken.state.tree import Decoder
from unbroken.storage.local import LocalStorage

from .contents import FORMAT_1

HERE = Path(__file__).parent


def test_a_checkpoint_of_format_1_is_intact_and_holds_what_was_saved() -> None:
    storage, tree = LocalStorage(HERE), "format-1/step-00000007.1"
    assert verify_checkpoint(storage, tree).is_intact
    manifest = read_manifest(storage, tree)
    assert (manifest.step, manifest.revision, manifest.format_version) == (7, 1, 1)
    assert (manifest.position.epoch, manifest.position.inside_epoch) == (3, True)
    assert manifest.metrics == {"accuracy": 0.5, "loss": {"$float": "nan"}}
    assert manifest.parent == "step-00000007"
    decoder = Decoder(read_tensors(storage, tree, manifest).__getitem__)
    found = {name: decoder.decode(part.state) for name, part in manifest.parts.items()}
    assert found == FORMAT_1
    assert math.copysign(1, found["values"]["numbers"][4]) == -1
