"""Alibaba Cloud ECS: release of a preemptible instance, five minutes ahead."""

from __future__ import annotations

from typing import ClassVar

from unbroken.supervisor.host.notices.base import Notice, utc_seconds
from unbroken.supervisor.host.notices.http import Answer, Metadata

_ISSUER = "/latest/api/token"
_TERMINATION = "/latest/meta-data/instance/spot/termination-time"
_LIFETIME_SECONDS = "21600"
_OK, _NOT_FOUND = 200, 404
_EXPIRED = (401, 403)


class Alibaba:
    """The instance metadata service, with the token that its hardened mode asks for."""

    name: ClassVar[str] = "alibaba"
    base_url: ClassVar[str] = "http://100.100.100.200"
    every_seconds: ClassVar[float] = 5.0
    first_seconds: ClassVar[float] = 2.0

    def __init__(self) -> None:
        self._token: str | None = None

    def ask(self, metadata: Metadata) -> list[Notice]:
        """Return what is announced now. Raises OSError or ValueError if there is no sensible answer."""
        answer = self._get(metadata)
        if answer.status in _EXPIRED:
            self._token = None
            answer = self._get(metadata)
        if answer.status == _NOT_FOUND:
            return []
        if answer.status != _OK:
            raise ValueError(f"{_TERMINATION}: expected 200 or 404, found {answer.status}")
        what = "the preemptible instance is released"
        return [Notice(kind="end", what=what, at_seconds=utc_seconds(answer.text))]

    def _get(self, metadata: Metadata) -> Answer:
        if self._token is None:
            answer = metadata.put(_ISSUER, {"X-aliyun-ecs-metadata-token-ttl-seconds": _LIFETIME_SECONDS})
            if answer.status != _OK:
                raise ValueError(f"{_ISSUER}: expected a token, found status {answer.status}")
            self._token = answer.text
        return metadata.get(_TERMINATION, {"X-aliyun-ecs-metadata-token": self._token})
