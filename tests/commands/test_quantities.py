from __future__ import annotations

import argparse

import pytest

from refocused.commands.output import (
    age,
    count,
    count_text,
    duration_text,
    positive,
    ratio,
    size_text,
)


def test_quantities_are_spelt_for_people() -> None:
    assert [size_text(n) for n in (0, 999, 1500, 2.5e9, 3e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 GB",
        "3.0 TB",
    ]
    assert [count_text(n) for n in (12_345, 3.4e6, 51.6e9)] == ["12,345", "3.40 M", "51.60 B"]
    assert [duration_text(s) for s in (0.4, 59, 61, 3_700, 90_000)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h 1 min",
        "1 d 1 h",
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("1e8", 10**8),
        ("100_000", 10**5),
        ("1,000", 1000),
        ("1.5M", 1_500_000),
        ("2b", 2e9),
    ],
)
def test_counts_are_read_in_every_usual_form(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "1e", "nan", "1x"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        count(text)


def test_shares_and_positive_numbers() -> None:
    assert (ratio("0"), ratio("0.5"), positive("7.92")) == (0.0, 0.5, 7.92)
    for read, texts in ((ratio, ("-0.1", "1.1", "x", "nan")), (positive, ("0", "inf", "nan", "x"))):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError):
                read(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "just now"),
        (59, "just now"),
        (125, "2 min ago"),
        (3 * 3600 + 600, "3 h 10 min ago"),
        (3 * 86400 + 7200, "3 d 2 h ago"),
    ],
)
def test_ages_are_said_in_two_units(seconds: float, text: str) -> None:
    assert age(seconds) == text
