"""How reports write figures: numbers, shares, sizes, times, what was lost and why."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shards.counts import SET_ASIDE
from shards.errors import counted


class Balance(NamedTuple):
    """One line of a balance sheet: read = packed + all of lost."""

    thing: str
    "documents, tokens or targets."
    read: int
    packed: int
    lost: Mapping[str, int]
    "What did not get through, by reason."


def balances(figures: Mapping[str, object]) -> list[Balance]:
    """Return the lines of a balance sheet: documents, tokens and targets of a dataset or of one source."""
    lines = []
    for thing, lost in (("documents", "dropped"), ("tokens", "lost"), ("targets", "lost")):
        sheet: Any = figures[thing]
        lines.append(Balance(thing, sheet["read"], sheet["packed"], sheet[lost]))
    return lines


def format_count(value: float | None) -> str:
    """Return a count with thousands separated, a ratio with four digits, a dash for what nobody knows."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def format_share(share: float) -> str:
    """Return a share with the digits that matter; what is not all or nothing is never rounded to it."""
    digits = 3 if 0 < share < 0.001 or 0.999 < share < 1 else 1
    text = f"{share:.{digits}%}"
    if text == "0.000%":
        return "<0.001%"
    return ">99.999%" if text == "100.000%" else text


def format_bytes(num_bytes: float) -> str:
    """Return bytes in a unit that people read."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return a time in the unit that people read."""
    if seconds < 0.1:
        return "<0.1 s"
    for unit, step in (("s", 60.0), ("min", 60.0), ("h", 24.0)):
        if seconds < 2 * step:
            return f"{seconds:,.0f} {unit}" if seconds >= 10 else f"{seconds:,.1f} {unit}"
        seconds /= step
    return f"{seconds:,.1f} days"


def format_reasons(lost: Mapping[str, int]) -> str:
    """Return why things were lost and how many each time, the most frequent reason first; "" where none were."""
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(lost.items(), key=lambda x: -x[1]) if count)


def unasked(lost: Mapping[str, int]) -> dict[str, int]:
    """Return what was lost without being asked for, by reason."""
    return {reason: count for reason, count in lost.items() if reason not in SET_ASIDE}


def describe_unread(source: str, counts: Mapping[str, int]) -> str:
    """Say which fields of a source's records were not read; no full stop."""
    names = ", ".join(f"{name!r} ({counted(number, 'record')})" for name, number in sorted(counts.items()))
    return f"source {source!r}: no option reads {names}, which may change what the records mean"
