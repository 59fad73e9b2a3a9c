"""TensorFlow's checkpoints are read as TensorFlow reads them, without it: names, bits, and what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.cli.main import main
from unbroken.errors import DamagedError, StorageError, UsageError
from unbroken.inspection.conversion import convert
from unbroken.inspection.detect import open_checkpoint
from unbroken.inspection.doctor import examine
from unbroken.inspection.foreign import describe
from unbroken.inspection.formats import tf_bundle
from unbroken.interchange import table_writer
from unbroken.interchange.crc32c import crc32c, masked
from unbroken.interchange.tf_bundle import TfBundle

from .bundles import GOLDEN, PREFIXES, copied, entries_of, expected, findings, rewrite, with_suffix


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("name", PREFIXES)
def test_every_tensor_is_read_bit_for_bit(name: str) -> None:
    bundle = TfBundle(GOLDEN / PREFIXES[name])
    assert bundle.problems == []
    assert [*bundle.verify()] == []
    assert set(bundle.entries) == set(expected(name))
    for key, (kind, shape, content) in expected(name).items():
        entry = bundle.entries[key]
        assert (entry.element.name, list(entry.shape)) == (kind.removeprefix("bool_"), shape), key
        if content is not None:
            assert bytes(bundle.read(key)).hex() == content, key


def test_tensors_have_the_names_that_people_know_them_by() -> None:
    reader = open_checkpoint(GOLDEN / "objects/ckpt-2")
    # In the file this one is optimizer/_trainable_variables/0, since the optimizer was met first.
    assert reader.tensors["model/small/first/kernel"].shape == (3, 4)
    assert {"optimizer/iterations", "optimizer/learning_rate", "step", "save_counter"} < set(reader.tensors)
    assert "optimizer/adam/small_second_bias_velocity" in reader.tensors
    assert reader.facts["names"]["kinds/bf16"] == "kind_bf16"
    assert reader.tensors["kinds/again"].aliases == ("kinds/inner/rows/1",)
    assert not any("_trainable_variables" in path for path in reader.tensors)
    assert set(describe(reader)["parts"]) == {"(top)", "kinds", "model", "optimizer"}


def test_what_an_optimizer_keeps_is_named_by_its_slot_and_its_variable() -> None:
    reader = open_checkpoint(GOLDEN / "slots")
    powers = {"optimizer/beta1_power", "optimizer/beta2_power"}
    assert {"net", "optimizer/m/net", "optimizer/v/net", *powers} == set(reader.tensors)
    assert reader.facts["names"]["optimizer/m/net"] == "layer/weight/Adam"
    (found,) = describe(reader)["optimizers"]
    assert (found["where"], found["parameters"], found["moments"]) == ("optimizer", 1, ["m", "v"])


def test_counters_rates_and_texts_are_values_and_what_is_no_number_is_said() -> None:
    found = describe(open_checkpoint(GOLDEN / "objects"))
    assert found["counters"] == {"step": 2}
    assert found["optimizers"][0]["learning_rates"] == [pytest.approx(0.01)]
    assert found["optimizers"][0]["moments"] == ["momentums", "velocities"]
    assert found["values"]["kinds"]["text"][1] == "one"
    assert any("data/ITERATOR_STATE: variant of (16,)" in note for note in found["notes"])
    assert any("kinds/i4: int4, read as I8" in note for note in found["notes"])


def test_doctor_knows_the_optimizer_and_the_place_in_the_data() -> None:
    texts = [advice.text for advice in examine(open_checkpoint(GOLDEN / "objects"))]
    assert not any(
        "optimizer" in text or "samples" in text or "where training stood" in text for text in texts
    )
    assert any("random generators" in text for text in texts)
    assert any("no random generators" in text for text in texts)
    names = [advice.text for advice in examine(open_checkpoint(GOLDEN / "names"))]
    assert not any("optimizer" in text or "where training stood" in text for text in names)


def test_each_of_its_files_means_the_whole_checkpoint(tmp_path: Path) -> None:
    prefix = copied("names", tmp_path / "saved/variables")
    shutil.move(
        str(tmp_path / "saved/variables/model.ckpt-5.index"), tmp_path / "saved/variables/variables.index"
    )
    for shard in range(3):
        end = f".data-{shard:05d}-of-00003"
        shutil.move(with_suffix(prefix, end), tmp_path / f"saved/variables/variables{end}")
    (tmp_path / "saved/saved_model.pb").write_bytes(b"\x08\x01")
    variables = tmp_path / "saved/variables"
    paths = (
        variables / "variables",
        variables / "variables.index",
        variables / "variables.data-00001-of-00003",
        variables,
        tmp_path / "saved",
    )
    for path in paths:
        assert len(open_checkpoint(path).tensors) == 5, path
        assert findings(path) == []
    assert open_checkpoint(GOLDEN / "objects/checkpoint").path.name == "ckpt-2"


def test_a_bundle_is_told_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "notes.index").write_text("a list of pages")
    with pytest.raises(UsageError, match="found none"):
        open_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="something else"):
        open_checkpoint(tmp_path / "notes.index")
    shutil.copyfile(GOLDEN / "slots.index", tmp_path / "alone")
    # A table, but no checkpoint of the older kind either.
    with pytest.raises(UsageError, match="something else"):
        open_checkpoint(tmp_path / "alone")


LIES = {
    "it is not there": None,
    "it is no pointer": b"\x00\xff nothing of the kind",
    "it is empty": b"",
    "it names what was deleted": b'model_checkpoint_path: "ckpt-9"\nall_model_checkpoint_paths: "ckpt-9"\n',
    "it leads out": b'model_checkpoint_path: "../../etc/passwd"\n',
    "it leads to the root": b'model_checkpoint_path: "/\\000\\x41\\n"\n',
    "it names itself": b'model_checkpoint_path: ""\n',
}


@pytest.mark.parametrize("lie", LIES)
def test_a_pointer_that_lies_is_told_and_the_newest_whole_checkpoint_is_taken(
    tmp_path: Path, lie: str
) -> None:
    shutil.copytree(GOLDEN / "objects", tmp_path / "run")
    pointer = tmp_path / "run/checkpoint"
    pointer.unlink() if LIES[lie] is None else pointer.write_bytes(LIES[lie] or b"")
    # By number, not by time.
    os.utime(tmp_path / "run/ckpt-1.index")
    reader = open_checkpoint(tmp_path / "run")
    assert reader.path.name == "ckpt-2"
    assert "ckpt-2: the newest that is whole" in reader.notes
    # TensorFlow says that there is none, and training begins anew. A directory without a pointer is no lie.
    assert [finding.file for finding in reader.verify()][:1] == ([] if LIES[lie] is None else ["checkpoint"])
    assert findings(tmp_path / "run/ckpt-2") == []


def test_a_pointer_to_a_checkpoint_that_is_not_whole_is_not_followed(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "objects", tmp_path / "run")
    data = tmp_path / "run/ckpt-2.data-00000-of-00001"
    os.truncate(data, data.stat().st_size - 1)
    reader = open_checkpoint(tmp_path / "run")
    assert reader.path.name == "ckpt-1"
    assert any("ckpt-2" in note and "the file ends 1 bytes before it" in note for note in reader.notes)
    # Asked for by its name, it is the one that is shown.
    assert open_checkpoint(tmp_path / "run/ckpt-2").problems
    os.truncate(tmp_path / "run/ckpt-2.index", 100)
    assert open_checkpoint(tmp_path / "run").path.name == "ckpt-1"


def test_an_absolute_pointer_that_came_along_still_means_what_is_here(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "objects", tmp_path / "moved")
    (tmp_path / "moved/checkpoint").write_text('model_checkpoint_path: "/old/place/ckpt-1"\n')
    reader = open_checkpoint(tmp_path / "moved")
    assert reader.path.name == "ckpt-1"
    assert reader.notes[0] == "checkpoint: names /old/place/ckpt-1, which is not in this directory"


def test_what_saves_left_that_did_not_end_is_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "objects", tmp_path / "run")
    (tmp_path / "run/ckpt-3_temp").mkdir()
    shutil.copyfile(tmp_path / "run/ckpt-2.data-00000-of-00001", tmp_path / "run/ckpt-4.data-00000-of-00001")
    notes = open_checkpoint(tmp_path / "run").notes
    for name in ("ckpt-3_temp", "ckpt-4.data-00000-of-00001"):
        assert f"{name}: left by a save that did not end" in notes
    with pytest.raises(DamagedError, match="its save did not end, or it is lost"):
        open_checkpoint(tmp_path / "run/ckpt-4.data-00000-of-00001")


def test_a_graph_beside_it_is_noted_and_not_looked_into(tmp_path: Path) -> None:
    prefix = copied("names", tmp_path)
    with_suffix(prefix, ".meta").write_bytes(b"\xff" * 100)
    assert any("model.ckpt-5.meta" in note for note in open_checkpoint(prefix).notes)
    assert findings(prefix) == []


def test_a_data_file_that_is_missing_cut_or_a_link_to_elsewhere_is_a_finding(tmp_path: Path) -> None:
    prefix = copied("names", tmp_path / "in")
    shard = with_suffix(prefix, ".data-00001-of-00003")
    os.truncate(shard, 20)
    assert any("tensor" in line and "the file ends" in line for line in findings(prefix))
    shard.unlink()
    assert any(line.startswith(f"{shard.name}: ") and "found none" in line for line in findings(prefix))
    with pytest.raises(DamagedError, match="data-00001-of-00003"):
        open_checkpoint(prefix).read("encoder/w")
    assert bytes(open_checkpoint(prefix).read("bias")).hex() == expected("names")["bias"][2]
    (tmp_path / "elsewhere").write_bytes(b"secret" * 100)
    shard.symlink_to(tmp_path / "elsewhere")
    assert any("a link to" in line for line in findings(prefix))


def test_one_tensor_that_flipped_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    prefix = copied("objects", tmp_path)
    data = with_suffix(prefix, ".data-00000-of-00001")
    entry = TfBundle(prefix).entries["step/.ATTRIBUTES/VARIABLE_VALUE"]
    content = bytearray(data.read_bytes())
    content[entry.offset] ^= 4
    data.write_bytes(content)
    (finding,) = findings(prefix)
    assert "tensor step/.ATTRIBUTES/VARIABLE_VALUE: expected CRC-32C" in finding
    with pytest.raises(DamagedError, match="CRC-32C"):
        open_checkpoint(prefix).read("step")
    assert len(open_checkpoint(prefix).read("model/small/first/bias")) == 16


def packed(data: bytes) -> bytes:
    """Return a block as snappy may have it: bytes as they are, and near and far copies of what was before."""
    found, plain, place = bytearray(_varint(len(data))), bytearray(), 0
    while place < len(data):
        back, length = max(
            ((data.rfind(data[place : place + n], 0, place), n) for n in (4, 12, 40)), key=_use
        )
        if _use((back, length)) <= 0 or place + length > len(data):
            plain.append(data[place])
            place += 1
            continue
        found += _literal(plain)
        plain.clear()
        offset = place - back
        if length < 12 and offset < 2048:
            found += bytes([(offset >> 8) << 5 | (length - 4) << 2 | 1, offset & 255])
        else:
            found += bytes([(length - 1) << 2 | 2]) + offset.to_bytes(2, "little")
        place += length
    return bytes(found + _literal(plain))


def _use(match: tuple[int, int]) -> int:
    return match[1] if match[0] >= 0 else 0


def _literal(plain: bytearray) -> bytes:
    if not plain:
        return b""
    size = len(plain) - 1
    # Both ways to say how long it is.
    return (bytes([size << 2]) if size < 60 else bytes([61 << 2]) + size.to_bytes(2, "little")) + plain


def test_an_index_that_was_packed_with_snappy_is_read_the_same(tmp_path: Path) -> None:
    prefix = copied("objects", tmp_path)
    index = with_suffix(prefix, ".index")
    plain = index.read_bytes()
    whole = TfBundle(prefix)
    # The block of all entries comes first, as large as the place of what follows it says.
    first = plain[: plain.index(b"\0\0\0\0\x01\0\0\0\0", len(plain) - 200) - 5]
    body = packed(first) + b"\x01"
    block = body + masked(crc32c(body)).to_bytes(4, "little")
    assert len(block) < len(first)
    meta = plain[len(first) + 5 : len(first) + 18]
    handle = b"\0" + _varint(len(block) - 5)
    key = b"u"
    entry = bytes([0, len(key), len(handle)]) + key + handle + b"\0\0\0\0\x01\0\0\0\0"
    table = entry + masked(crc32c(entry)).to_bytes(4, "little")
    handles = _varint(len(block)) + _varint(8) + _varint(len(block) + len(meta)) + _varint(len(table) - 5)
    index.write_bytes(block + meta + table + handles.ljust(40, b"\0") + plain[-8:])
    found = TfBundle(prefix)
    assert (found.entries, found.problems, [*found.verify()]) == (whole.entries, [], [])


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def test_an_index_of_many_blocks_is_written_and_read(tmp_path: Path) -> None:
    prefix = copied("slots", tmp_path)
    index = with_suffix(prefix, ".index")
    entries = entries_of(index)
    empty = bytes.fromhex("08011202120035d8ea82a2")
    entries = sorted([*entries, *((f"x/{'y' * 90}{n:05d}".encode(), empty) for n in range(2600))])
    assert sum(len(key) + len(value) for key, value in entries) > table_writer._BLOCK_BYTES
    rewrite(index, entries)
    assert len(open_checkpoint(prefix).tensors) == 2600 + 5
    assert findings(prefix) == []


def test_the_single_file_of_the_first_format_is_listed_and_verified(tmp_path: Path) -> None:
    reader = open_checkpoint(GOLDEN / "single")
    assert {path: entry.shape for path, entry in reader.tensors.items()} == {
        path: tuple(shape) for path, (_, shape, _) in expected("names").items()
    }
    with pytest.raises(StorageError, match="are not read"):
        reader.read("bias")
    assert findings(GOLDEN / "single") == []
    data = bytearray((GOLDEN / "single").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    assert findings(tmp_path / "flipped")


def test_the_commands_show_it_and_exit_with_3_for_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", GOLDEN / "objects", "--tensors") == 0
    shown = capsys.readouterr().out
    assert "TensorFlow checkpoint, complete, CRC-32C of each tensor and of the index" in shown
    assert "4 parameters, 1 group, 4 states, each with momentums, velocities" in shown
    assert "adam/small_first_kernel_momentum" in shown
    assert run("verify", GOLDEN / "names/model.ckpt-5") == 0
    assert "intact  5 tensors" in capsys.readouterr().out
    assert run("diff", GOLDEN / "objects/ckpt-1", GOLDEN / "objects/ckpt-2", "--json") == 1
    changed = {row["path"] for row in json.loads(capsys.readouterr().out)["changed"]}
    assert {"step", "model/small/first/kernel", "optimizer/iterations"} < changed
    prefix = copied("slots", tmp_path)
    data = bytearray(with_suffix(prefix, ".index").read_bytes())
    data[5] ^= 1
    with_suffix(prefix, ".index").write_bytes(data)
    assert run("verify", prefix) == 3
    assert "DAMAGED" in capsys.readouterr().out


@pytest.mark.parametrize("name", PREFIXES)
def test_a_bundle_goes_to_safetensors_and_back_with_every_bit(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(GOLDEN / PREFIXES[name])
    convert(source, tmp_path / "one.index")
    convert(open_checkpoint(tmp_path / "one"), tmp_path / "two.safetensors")
    convert(open_checkpoint(tmp_path / "two.safetensors"), tmp_path / "three.index")
    assert findings(tmp_path / "one") == findings(tmp_path / "three") == []
    whole, last = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "three")
    assert set(whole.tensors) == set(source.tensors)
    # safetensors has no complex128.
    assert set(source.tensors) - set(last.tensors) <= {"kinds/complex128"}
    for path in last.tensors:
        assert last.read(path) == whole.read(path) == source.read(path), path
        assert last.tensors[path].shape == source.tensors[path].shape


def test_convert_overwrites_no_file_of_a_bundle_and_leaves_none_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "kept.data-00000-of-00001"
    data.write_bytes(b"precious")
    assert run("convert", GOLDEN / "slots", tmp_path / "kept.index") == 2
    assert "exists already" in capsys.readouterr().err
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"precious"]
    data.unlink()

    def interrupted(self: tf_bundle.TensorFlowBundle, path: str) -> memoryview:
        raise KeyboardInterrupt

    monkeypatch.setattr(tf_bundle.TensorFlowBundle, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(open_checkpoint(GOLDEN / "slots"), tmp_path / "new.index")
    assert not [file for file in tmp_path.iterdir() if not file.name.startswith(".")]
    for name in ("new", ".index", "new.ckpt"):
        with pytest.raises(UsageError, match=r"ends with \.safetensors or "):
            convert(open_checkpoint(GOLDEN / "slots"), tmp_path / name)


def test_nothing_of_it_needs_numpy_or_tensorflow() -> None:
    script = """
import sys
from pathlib import Path
for name in ("numpy", "tensorflow", "google_crc32c"):
    sys.modules[name] = None
from unbroken.inspection.detect import open_checkpoint
reader = open_checkpoint(Path(sys.argv[1]))
assert [*reader.problems, *reader.verify()] == []
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(GOLDEN / "objects")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
