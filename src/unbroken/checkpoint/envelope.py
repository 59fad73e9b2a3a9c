"""The outside of a manifest: its bytes held against their digest, its format and version.

Apart from what is inside, and without the library that decodes it: listing checkpoints starts fast.
"""

from __future__ import annotations

from unbroken.checkpoint.digest import seal
from unbroken.errors import DamagedError, FormatVersionError, StorageError
from unbroken.rundir import layout
from unbroken.storage.base import Storage

FORMAT = "unbroken-checkpoint"
FORMAT_VERSION = 2
HINT = "use another checkpoint; `unbroken verify` names all that is damaged"


def read_manifest_bytes(storage: Storage, tree: str) -> bytearray:
    """Return the manifest's bytes at key `tree`; raises DamagedError unless they are what was written."""
    key = f"{tree}/{layout.MANIFEST}"
    data = read_member(storage, key)
    line = bytes(read_member(storage, f"{tree}/{layout.MANIFEST_DIGEST}"))
    found = seal(data)
    if line != f"{found}  {layout.MANIFEST}\n".encode():
        raise DamagedError(f"{key}: expected digest {line[:64]!r}, found {found}", hint=HINT)
    return data


def read_member(storage: Storage, key: str) -> bytearray:
    """Return a file of a committed checkpoint; raises DamagedError if it is not there."""
    try:
        return storage.read(key)
    except StorageError as error:
        # An absent file of a committed checkpoint is damage; a failing disk is not, and stays an error.
        if storage.size(key) is None:
            raise DamagedError(f"{key}: expected a file, found none", hint=HINT) from error
        raise


def check_format(found_format: object, version: object, where: str) -> None:
    """Raise DamagedError for another format than ours, FormatVersionError for a newer version of it."""
    if found_format != FORMAT:
        raise DamagedError(
            f"{where}: expected format {FORMAT!r}, found {found_format!r}",
            hint="this is no checkpoint of unbroken; move it away",
        )
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{where}: expected format version {FORMAT_VERSION} or older, found {version!r}",
            hint="install the release of unbroken that wrote it, or a newer one",
        )


def check_name(tree: str, step: int, revision: int) -> None:
    """Raise DamagedError if the checkpoint at key `tree` stands under the name of another one."""
    expected, name = layout.checkpoint_name(step, revision), tree.rpartition("/")[2]
    if layout.parse_checkpoint_name(name) is not None and name != expected:
        raise DamagedError(
            f"{tree}/{layout.MANIFEST}: expected the manifest of {name}, found that of {expected}", hint=HINT
        )
