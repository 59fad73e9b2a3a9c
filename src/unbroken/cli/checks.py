"""What came of reading every byte of one checkpoint: for `unbroken verify` and `inspect --verify`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unbroken.checkpoint.finding import Finding
    from unbroken.inspection.detect import CheckpointReader
    from unbroken.inspection.locate import Located


def of_ours(located: Located) -> dict[str, Any]:
    """Hold a checkpoint of a run against its digests. Raises DamagedError if its manifest is damaged."""
    # Loaded here: most calls read no bytes.
    from unbroken.checkpoint.verify import verify_checkpoint
    from unbroken.inspection.detect import open_located

    found = verify_checkpoint(located.storage, located.tree)
    # Of one that is damaged the manifest may be what cannot be read.
    checksums = open_located(located).checksums if found.is_intact else None
    return {"intact": found.is_intact, "checksums": checksums, "findings": plain(found.findings)}


def of_others(reader: CheckpointReader) -> dict[str, Any]:
    """Hold a checkpoint of another library against the checksums that its format carries."""
    findings = [*reader.problems, *reader.verify()]
    intact = False if findings else None if reader.checksums is None else True
    return {"intact": intact, "checksums": reader.checksums, "findings": plain(findings)}


def in_words(found: dict[str, Any]) -> str:
    """Return the outcome in a few words."""
    if found["intact"] is False:
        return "DAMAGED"
    if found["intact"]:
        return f"every byte is what was written ({found['checksums']})"
    return "its layout is sound, of its values nobody can tell: the format carries no checksum"


def plain(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Return findings as --json has them."""
    return [{"file": one.file, "problem": one.problem} for one in findings]
