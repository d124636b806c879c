from __future__ import annotations

import pytest

from nestsp.units import format_bytes, format_count, format_seconds, plural


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.7, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20, "1.0 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**50, "1.0 PiB"),
        (5000 * 2**50, "5000.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_never_show_1024_of_a_unit_that_has_a_next_one(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (0.0009994, "999 µs"),
        (0.00099951, "1.0 ms"),
        (0.99994, "999.9 ms"),
        (0.99996, "1.00 s"),
        (59.99, "59.99 s"),
        (59.996, "1 min 0 s"),
        (60, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (90061, "25 h 1 min"),
    ],
)
def test_seconds_change_unit_where_rounding_would_show_the_next_one(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_have_separators_and_their_noun_a_plural_unless_there_is_one() -> None:
    assert format_count(1234567) == "1,234,567"
    assert [plural(n, "token") for n in (0, 1, 2, 1000)] == ["0 tokens", "1 token", "2 tokens", "1,000 tokens"]
