"""Tencent Cloud CVM: reclaim of a spot instance, about two minutes ahead."""

from __future__ import annotations

from typing import ClassVar

from unbroken.supervisor.host.notices.base import Notice, utc_seconds
from unbroken.supervisor.host.notices.http import Metadata

_TERMINATION = "/latest/meta-data/spot/termination-time"
# The service tells the time of China, without saying so.
_ZONE = "+08:00"
_OK, _NOT_FOUND = 200, 404


class Tencent:
    """The instance metadata service."""

    name: ClassVar[str] = "tencent"
    base_url: ClassVar[str] = "http://metadata.tencentyun.com"
    every_seconds: ClassVar[float] = 5.0
    first_seconds: ClassVar[float] = 2.0

    def ask(self, metadata: Metadata) -> list[Notice]:
        """Return what is announced now. Raises OSError or ValueError if there is no sensible answer."""
        answer = metadata.get(_TERMINATION)
        if answer.status == _NOT_FOUND:
            return []
        if answer.status != _OK:
            raise ValueError(f"{_TERMINATION}: expected 200 or 404, found {answer.status}")
        at = utc_seconds(answer.text + _ZONE)
        return [Notice(kind="end", what="the spot instance is reclaimed", at_seconds=at)]
