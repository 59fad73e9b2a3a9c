"""By which names and bytes the files of other libraries are told.

Apart from what reads them: of all formats, only the one that is found has to be loaded.
"""

from __future__ import annotations

import re

from unbroken.interchange.files import RegularFile

INDEX = ".index"
POINTER = "checkpoint"
_DATA = re.compile(r"(.+)\.data-[0-9]{5}-of-[0-9]{5}", re.DOTALL)
TABLE_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
TABLE_FOOTER_BYTES = 48
_ZIP, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
# A pickle of the number that every file of torch begins with that is older than zip files.
LEGACY_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa85019")


def may_be_of_bundle(name: str) -> bool:
    """Tell whether a file of that name may belong to a checkpoint of TensorFlow."""
    return name.endswith(INDEX) or name == POINTER or prefix_of(name) is not None


def prefix_of(name: str) -> str | None:
    """Return the name of the bundle that a file is the data of, None if it is of none by its name."""
    found = _DATA.fullmatch(name)
    return found[1] if found else None


def is_table(file: RegularFile) -> bool:
    """Tell whether a file ends as a table of TensorFlow does."""
    if file.size_bytes < TABLE_FOOTER_BYTES:
        return False
    return bytes(file.read(file.size_bytes - len(TABLE_MAGIC), len(TABLE_MAGIC))) == TABLE_MAGIC


def is_zip(first: bytes, file: RegularFile) -> bool:
    """Tell whether a file, which begins with `first`, has the beginning or the end of a zip file."""
    if first.startswith(_ZIP):
        return True
    # Its beginning may be damaged.
    end = file.size_bytes - _ZIP_END_BYTES
    return end >= 0 and file.read(end, len(_ZIP_END)) == _ZIP_END


def is_legacy(first: bytes) -> bool:
    """Tell whether a file that begins with `first` is what torch wrote before it wrote zip files."""
    return first[:1] == b"\x80" and first[2 : 2 + len(LEGACY_MAGIC)] == LEGACY_MAGIC
