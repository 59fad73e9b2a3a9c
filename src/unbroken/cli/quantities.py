"""Lengths of time and numbers of bytes as people write them on a command line."""

from __future__ import annotations

import re

import click

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+|\d+(?:\.\d+)?")
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?i?)b?", re.IGNORECASE)


def parse_duration(text: str) -> float | None:
    """Return the seconds in `text`, or None if it is no length of time.

    >>> parse_duration("90"), parse_duration("1h30m"), parse_duration("soon")
    (90.0, 5400.0, None)
    """
    if not _DURATION.fullmatch(text):
        return None
    if text[-1] not in _SECONDS:
        return float(text)
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))


def parse_size(text: str) -> int | None:
    """Return the bytes in `text`, or None if it is no size.

    >>> parse_size("500MB"), parse_size("1.5 GiB"), parse_size("4096"), parse_size("big")
    (500000000, 1610612736, 4096, None)
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _BYTES:
        return None
    return int(float(match[1]) * _BYTES[match[2].lower()])


def duration(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Turn the value of an option into seconds; the callback of a click option."""
    if value is None:
        return None
    seconds = parse_duration(value)
    if seconds is None:
        raise click.BadParameter(f"{value!r}: expected a length of time such as 90s, 10m, 1h30m or 2d")
    return seconds


def size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """Turn the value of an option into bytes; the callback of a click option."""
    if value is None:
        return None
    size_bytes = parse_size(value)
    if size_bytes is None:
        raise click.BadParameter(f"{value!r}: expected a size such as 500MB, 2GB or 1GiB")
    return size_bytes
