from fractions import Fraction

import pytest

from adrl_jax.rewards.numbers import find_numbers, parse_number


@pytest.mark.parametrize(
    "text, value",
    [
        ("72", 72),
        ("1,000", 1000),
        ("70,000", 70_000),
        ("1,000,000.25", Fraction("1000000.25")),
        ("$3.50", Fraction("3.5")),
        ("$29.00.", 29),
        ("-7", -7),
        ("\u22125", -5),  # the typographic minus sign
        ("-$5", -5),
        ("$-5", -5),
        ("42.", 42),
        ("+3", 3),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("7.41%", Fraction("7.41")),
        (r"7.41\%", Fraction("7.41")),
        (r"\$1{,}000", 1000),
        ("$42$", 42),
        ("= 5", 5),
        ("1/3", Fraction(1, 3)),
        (r"\frac{63}{400}", Fraction(63, 400)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"90^\circ", 90),
        ("004", 4),
        ("0.1", Fraction(1, 10)),
    ],
)
def test_reads_exactly(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", ",", "n/a", "12:00", "1,00", "1,2", "1.2.3", "3x", "x", "--5", "1/0", "5 apples", "(1, 2)", "1e999999999", "9" * 5000],
)
def test_what_is_no_number_is_none(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("The total is 72 clips, altogether.", ["72"]),
        ("It costs $29.00.", ["$29.00"]),
        ("2+40=42", ["2", "40", "42"]),
        ("from 3-5 days", ["3", "5"]),
        ("it fell to -5 degrees", ["-5"]),
        ("it fell to \u22125 degrees", ["-5"]),
        ("1,000 and 2,000.", ["1,000", "2,000"]),
        ("at 12:00", []),
        ("version 1.2.3", []),
        ("**42**", ["42"]),
        ("nothing", []),
    ],
)
def test_finds_numbers_in_text(text, numbers):
    assert find_numbers(text) == numbers


def test_long_runs_of_digits_take_linear_time():
    assert parse_number("1," * 100_000) is None
    assert find_numbers("1" * 200_000) == []
