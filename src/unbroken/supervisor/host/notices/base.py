"""What a notice is, and whom to ask for one."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from unbroken.supervisor.host.notices.http import Metadata

# end: the machine goes away.
# risk: it may, or it stands still for a while; a checkpoint now, and training goes on.
Kind: TypeAlias = Literal["end", "risk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One announcement, equal as long as the provider says the same.

    `at_seconds` (since 1970) is when it happens. Where a provider does not say that, `within_seconds` is
    how long after the notice it may begin; one of the two is given for the end of the machine.
    """

    kind: Kind
    what: str
    at_seconds: float | None = None
    within_seconds: float | None = None


class Provider(Protocol):
    """A cloud's metadata service.

    `base_url` is where it is found, `every_seconds` the time from one question to the next,
    `first_seconds` how long the first answer may take.
    """

    name: ClassVar[str]
    base_url: ClassVar[str]
    every_seconds: ClassVar[float]
    first_seconds: ClassVar[float]

    def ask(self, metadata: Metadata) -> list[Notice]:
        """Return what is announced now. Raises OSError or ValueError if there is no sensible answer."""


def utc_seconds(text: str) -> float:
    """Return the seconds since 1970 of a time in ISO 8601; one without a zone is in UTC.

    >>> utc_seconds("1970-01-02T00:00:00Z"), utc_seconds("1970-01-02 08:00:00+08:00")
    (86400.0, 86400.0)
    """
    moment = datetime.datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp()
