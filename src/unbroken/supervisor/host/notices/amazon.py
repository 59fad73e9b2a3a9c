"""Amazon EC2: interruption of a spot instance, two minutes ahead; rebalance recommendations, earlier."""

from __future__ import annotations

import json
from typing import ClassVar

from unbroken.supervisor.host.notices.base import Kind, Notice, utc_seconds
from unbroken.supervisor.host.notices.http import Answer, Metadata

_ISSUER = "/latest/api/token"
_INTERRUPTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_LIFETIME_SECONDS = "21600"
_OK, _UNAUTHORIZED, _NOT_FOUND = 200, 401, 404


class Amazon:
    """The instance metadata service, version 2: every question carries a token."""

    name: ClassVar[str] = "aws"
    base_url: ClassVar[str] = "http://169.254.169.254"
    every_seconds: ClassVar[float] = 5.0
    first_seconds: ClassVar[float] = 2.0

    def __init__(self) -> None:
        self._token: str | None = None

    def ask(self, metadata: Metadata) -> list[Notice]:
        """Return what is announced now. Raises OSError or ValueError if there is no sensible answer."""
        interruption = self._get(metadata, _INTERRUPTION)
        rebalance = self._get(metadata, _REBALANCE)
        notices = []
        if interruption.status == _OK:
            notices.append(parse_interruption(interruption.text))
        if rebalance.status == _OK:
            notices.append(Notice(kind="risk", what="the instance is at a higher risk of interruption"))
        return notices

    def _get(self, metadata: Metadata, path: str) -> Answer:
        answer = self._get_once(metadata, path)
        if answer.status == _UNAUTHORIZED:
            # Tokens end after some hours; a new one comes for the asking.
            self._token = None
            answer = self._get_once(metadata, path)
        if answer.status not in (_OK, _NOT_FOUND):
            raise ValueError(f"{path}: expected 200 or 404, found {answer.status}")
        return answer

    def _get_once(self, metadata: Metadata, path: str) -> Answer:
        if self._token is None:
            answer = metadata.put(_ISSUER, {"X-aws-ec2-metadata-token-ttl-seconds": _LIFETIME_SECONDS})
            if answer.status != _OK:
                raise ValueError(f"{_ISSUER}: expected a token, found status {answer.status}")
            self._token = answer.text
        return metadata.get(path, {"X-aws-ec2-metadata-token": self._token})


def parse_interruption(text: str) -> Notice:
    """Return the notice in the JSON of the service. Raises ValueError.

    >>> parse_interruption('{"action": "terminate", "time": "1970-01-02T00:00:00Z"}').at_seconds
    86400.0

    A hibernation is no end: it has begun when it is announced, and all goes on when the instance wakes,
    where the notice may still stand.
    """
    value = json.loads(text)
    try:
        action, time = str(value["action"]), str(value["time"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected an action and its time, found {text[:80]!r}") from error
    kind: Kind = "risk" if action == "hibernate" else "end"
    return Notice(
        kind=kind, what=f"the spot instance is interrupted ({action})", at_seconds=utc_seconds(time)
    )
