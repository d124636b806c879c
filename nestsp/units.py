"""Numbers as people read them. Inside the program all quantities are SI base units: seconds, bytes, tokens."""

from __future__ import annotations

import re

__all__ = ["format_bytes", "format_count", "format_seconds", "parse_bytes", "plural"]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = {unit: 1024**power for power, unit in enumerate(_BINARY)} | {
    unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))
}


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit.

    >>> format_bytes(512), format_bytes(66_571_993_088)
    ('512 B', '62.0 GiB')
    """
    value = float(num_bytes)
    for unit in _BINARY:
        if abs(value) < (1023.5 if unit == "B" else 1023.95) or unit == _BINARY[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def parse_bytes(text: str) -> int:
    """A number of bytes with a unit, rounded down.

    Raises:
        ValueError: It is something else.

    >>> parse_bytes("70GiB"), parse_bytes("1.5 TB"), parse_bytes("4096 B")
    (75161927680, 1500000000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no number of bytes with a unit ({', '.join(_UNITS)}), such as 70GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_count(count: int) -> str:
    """A count with thousands separators.

    >>> format_count(262144)
    '262,144'
    """
    return f"{count:,}"


def format_seconds(seconds: float) -> str:
    """Seconds with the unit that leaves one to three digits before the point.

    >>> format_seconds(0.00042), format_seconds(0.042), format_seconds(4.2), format_seconds(4200)
    ('420 µs', '42.0 ms', '4.20 s', '1 h 10 min')
    """
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plural(count: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "sequence"), plural(1200, "sequence")
    ('1 sequence', '1,200 sequences')
    """
    return f"{format_count(count)} {noun}" if count == 1 else f"{format_count(count)} {noun}s"
