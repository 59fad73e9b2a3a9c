"""Numbers, lengths of time and moments as people read them on a page."""

from __future__ import annotations

import math
import time


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units.

    >>> duration(0.25), duration(75), duration(7322), duration(120)
    ('0.25 s', '1 min 15 s', '2 h 2 min', '2 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(place for place, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number)


def value(number: float, *, digits: int = 6) -> str:
    """Return a metric's value in some digits.

    >>> value(0.25), value(123456789.0), value(float("nan")), value(0.000121287, digits=4)
    ('0.25', '1.23457e+08', 'NaN', '0.0001213')
    """
    if math.isnan(number):
        return "NaN"
    return f"{number:.{digits}g}" if math.isfinite(number) else ("infinite" if number > 0 else "-infinite")


def count(number: int) -> str:
    """Return a number of things with its thousands set apart.

    >>> count(1200000)
    '1,200,000'
    """
    return f"{number:,}"


def several(number: int, thing: str) -> str:
    """Return how many of something there are.

    >>> several(1, "step"), several(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def size(size_bytes: int) -> str:
    """Return a number of bytes in powers of 1000.

    >>> size(512), size(16300), size(1_490_000_000)
    ('512 B', '16.3 kB', '1.5 GB')
    """
    number = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def moment(seconds: float) -> str:
    """Return a time since 1970 in UTC, to the second; empty if no clock can show it.

    >>> moment(0)
    '1970-01-01 00:00:00'
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""
