"""The certificate of a resume, as training left it in its journal, and what it says in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unbroken.rundir import layout
from unbroken.rundir.journal import parse_event
from unbroken.storage.failures import failed

_KIND = "resume-certificate"
_MARK, _BEGAN_MARK = f'"kind":"{_KIND}"'.encode(), b'"kind":"began"'
# Training writes it after the steps that it repeats, which it knows from at most 4 MB of journals; the same
# steps may take more here, as where metrics were added.
_LIMIT_BYTES = 1 << 25
_NAMES = (
    *("checkpoint", "digests_equal", "not_exact", "repeated_steps", "equal_steps"),
    *("first_difference", "largest_relative_difference", "others_that_differ"),
)


def read_certificate(directory: Path, attempt: int | None) -> dict[str, Any] | None:
    """Return the certificate of attempt `attempt` of the run in `directory`, or None if it has none.

    It is looked for in the first 32 MB of the journal. Raises StorageError.
    """
    if attempt is None:
        return None
    path = layout.attempt_directory(directory, attempt) / layout.events_file()
    read_bytes = 0
    try:
        with path.open("rb") as file:
            for line in file:
                read_bytes += len(line)
                event = parse_event(line) if _MARK in line or _BEGAN_MARK in line else None
                if event is not None and event["kind"] == _KIND:
                    return {name: event.get(name) for name in _NAMES}
                if read_bytes > _LIMIT_BYTES or (event is not None and _began_anew(event)):
                    return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise failed("read", path, error) from error
    return None


def certificate_in_words(certificate: dict[str, Any]) -> str:
    """Return what a certificate says, in one line.

    >>> certificate_in_words({"checkpoint": "step-00000007", "digests_equal": True, "repeated_steps": 0})
    'step-00000007 was restored bit for bit; there was no step to compare'
    """
    exact = "bit for bit" if certificate.get("digests_equal") else "but not all of it"
    inexact = ", ".join(certificate.get("not_exact") or [])
    restored = f"{certificate.get('checkpoint')} was restored {exact}" + (f" ({inexact})" if inexact else "")
    repeated, equal = certificate.get("repeated_steps") or 0, certificate.get("equal_steps") or 0
    if not repeated:
        return f"{restored}; there was no step to compare"
    if equal == repeated:
        others = ", ".join(certificate.get("others_that_differ") or [])
        beside = f" in their loss, but not in {others}" if others else ""
        return f"{restored}; {repeated} steps repeated, all as before{beside}"
    first = certificate.get("first_difference") or {}
    largest = certificate.get("largest_relative_difference")
    return (
        f"{restored}; {equal} of {repeated} steps repeated as before, first difference at step "
        f"{first.get('step')}: {first.get('metric')} {first.get('here')}, before {first.get('there')} "
        f"(largest relative difference {largest})"
    )


def _began_anew(event: dict[str, Any]) -> bool:
    return event["kind"] == "began" and event.get("restored", event) is None
