"""Scores of mathematical answers: exact for numbers, through math-verify for everything else.

A response without a readable answer is `unparsed_response`, a reference that cannot be read is `unparsed_reference`; both
are worth 0 and are counted apart from a wrong answer.
"""

import logging
import math
import re
from fractions import Fraction

from adrl_jax.rewards.extract import MARKER, Extraction, check_mode, extract_answer, extract_number, last_boxed
from adrl_jax.rewards.numbers import parse_number
from adrl_jax.types import Score

_CLOCK = re.compile(r"\d\s*:\s*\d")
_NO_ANSWER = re.compile(r"(n/?a|none|null|nan|unknown|undefined)", re.IGNORECASE)
_MAX_EXPRESSION = 500  # characters; longer "answers" are prose
_DECIMAL_TOLERANCE = 5e-6  # six significant digits


def reference_text(reference: str | int | float) -> str:
    """The answer within a reference, which may be a whole worked solution ending in "#### answer" or `\\boxed{answer}`."""
    text = str(reference)
    if MARKER in text:
        return text.rsplit(MARKER, 1)[1].strip()
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def score_number(
    response: str,
    reference: str | int | float,
    *,
    mode: str = "flexible",
    tolerance: float = 0.0,
    truncated: bool = False,
) -> Score:
    """1 where the response's number equals the reference's, else 0.

    Args:
        response: the decoded response.
        reference: a number, its text, or a worked solution (`reference_text`).
        mode: `strict` or `flexible`, see `adrl_jax.rewards.extract`.
        tolerance: largest absolute difference that still matches. Comparison is exact (rational) at 0.
        truncated: the response was cut off: its last number is no answer unless a form says so.

    Raises:
        ValueError: unknown mode; `tolerance` negative or not finite.
    """
    check_mode(mode)
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance={tolerance!r} must be finite and >= 0")
    gold = parse_number(reference_text(reference))
    found = _unless_cut(extract_number(response, mode), truncated)
    if gold is None:
        return Score(0.0, found.text, "unparsed_reference", detail=f"reference {str(reference)[-80:]!r} has no number")
    if found.text is None:
        return Score(0.0, None, "unparsed_response")
    match = abs(parse_number(found.text) - gold) <= Fraction(tolerance)
    return Score(float(match), found.text, "match" if match else "mismatch")


def score_math(response: str, reference: str | int | float, *, mode: str = "flexible", truncated: bool = False) -> Score:
    """1 where the response's expression is mathematically equal to the reference, else 0.

    Rational numbers are compared exactly. A decimal matches an irrational number to six significant digits. All else is
    decided by math-verify (sets, intervals, tuples, equations, symbolic expressions); clock times by their text. Symbols are
    complex numbers: equalities that need a sign, such as √(1/n) = 1/√n, do not hold.

    A symbolic comparison may take for ever: call this through `adrl_jax.rewards.pool.ScorerPool`, which has a time limit.

    Raises:
        ValueError: unknown mode.
        ImportError: math-verify is not installed.
    """
    check_mode(mode)
    gold = reference_text(reference)
    found = _unless_cut(extract_answer(response, mode), truncated)
    gold_number = parse_number(gold)
    if gold_number is not None:
        # a number is wanted: read the reply as one first, with whatever unit it has
        number = extract_number(response, mode)
        if found.text is not None and number.text is not None:
            match = parse_number(number.text) == gold_number
            return Score(float(match), number.text, "match" if match else "mismatch")
    if _CLOCK.search(gold) or (found.text and _CLOCK.search(found.text)):
        return _compared_as_text(found, gold)
    gold_parsed = _parse(gold)
    if not gold_parsed:
        return Score(0.0, found.text, "unparsed_reference", detail=f"reference {str(reference)[-80:]!r} is no expression")
    parsed = _parse(found.text) if found.text else []
    if not parsed:
        return Score(0.0, None, "unparsed_response")
    match = _equal(gold_parsed, parsed)
    return Score(float(match), found.text, "match" if match else "mismatch")


def _unless_cut(found: Extraction, truncated: bool) -> Extraction:
    return Extraction(None, "none") if truncated and found.form == "number" else found


def _compared_as_text(found: Extraction, gold: str) -> Score:
    if found.text is None:
        return Score(0.0, None, "unparsed_response")
    match = "".join(found.text.split()).strip("$.") == "".join(gold.split()).strip("$.")
    return Score(float(match), found.text, "match" if match else "mismatch")


def _parse(text: str) -> list:
    """math-verify's readings of a bare expression; empty where there are none."""
    try:
        import math_verify
    except ImportError as e:
        raise ImportError("score_math needs math-verify: pip install math-verify") from e
    text = text.strip().rstrip(".").strip()
    if not any(map(str.isalnum, text)) or len(text) > _MAX_EXPRESSION or _NO_ANSWER.fullmatch(text):
        return []  # math-verify would read "n/a" as a quotient of symbols
    if "$" not in text and "\\(" not in text and "\\[" not in text:
        text = f"${text}$"
    # No time limit here: math-verify's own uses signals, which fail off the main thread. It warns about that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify.parse(
        text,
        extraction_config=[math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()],
        parsing_timeout=None,
        raise_on_error=True,
    )


def _equal(gold: list, answer: list) -> bool:
    import math_verify
    import sympy

    g, a = gold[0], answer[0]
    if isinstance(g, sympy.Expr) and isinstance(a, sympy.Expr) and g.is_number and a.is_number:
        return _equal_numbers(g, a)
    return math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True)


def _equal_numbers(gold, answer) -> bool:
    """math-verify rounds to six decimals, which makes all tiny numbers equal."""
    import sympy

    def exact(x):
        return x.replace(lambda e: e.is_Float, lambda e: sympy.Rational(str(e)))

    difference = sympy.simplify(exact(gold) - exact(answer))
    if difference.is_zero:
        return True
    decimal = (gold.has(sympy.Float) or answer.has(sympy.Float)) and not (exact(gold).is_Rational and exact(answer).is_Rational)
    if not decimal:
        return False
    size, error = abs(complex(gold.evalf())), abs(complex(difference.evalf()))
    return error <= _DECIMAL_TOLERANCE * size
