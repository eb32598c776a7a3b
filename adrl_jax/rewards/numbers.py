"""Numbers as people write them, read exactly: signs, currency, thousands separators, percent, LaTeX odds and ends."""

import re
from fractions import Fraction

_CURRENCY = r"[$€£¥₹]"
# One run of digits with separators in groups of three or none; a sign only where it cannot be a minus between operands; no
# neighbour that makes it part of a longer thing (12:00, 1,2, v1.2.3, a word).
_NUMBER = rf"""
    (?<![\w.^]) (?<!\d[,:/])
    (?P<sign> (?: (?<![)\]\w]) [-+] )? ) \s? {_CURRENCY}? \s? (?P<sign2>-?)
    (?P<digits> [0-9]{{1,3}}(?:,[0-9]{{3}})+ | [0-9]+ | (?=\.[0-9]) )
    (?P<decimals> \.[0-9]+ )?
    (?P<exponent> [eE][-+]?[0-9]+ )?
    (?P<over> \s?/\s?[0-9]+ )?
    (?! [0-9] | [.,:/][0-9] )
"""
_SEARCH = re.compile(_NUMBER, re.VERBOSE)
_FULL = re.compile(rf"{_NUMBER} \s? %?", re.VERBOSE)
_MAX_EXPONENT = 300
_MAX_DIGITS = 4000  # int() refuses more by default
_REPLACED = {"−": "-", "﹣": "-", "－": "-", "＄": "$", "％": "%", "\u00a0": " ", "\u202f": " ", "\u2009": " "}
_LATEX = (
    (re.compile(r"\\(?:left|right|displaystyle|,|;|:|!|\s)"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%#])"), r"\1"),
    (re.compile(r"\\[dtc]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dtc]?frac\s*([0-9])\s*([0-9])(?![0-9])"), r"\1/\2"),
    (re.compile(r"\^?\s*\{?\\circ\}?"), ""),
    (re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}"), r" \1"),
)


def normalize(text: str) -> str:
    """`text` with typographic minus signs, spaces and full-width signs replaced by their plain forms."""
    for old, new in _REPLACED.items():
        text = text.replace(old, new)
    return text


def plain(text: str) -> str:
    """`normalize(text)` with the LaTeX around a number undone: `\\$`, `\\%`, `1{,}000`, `\\frac{1}{3}`, `\\text{cm}`."""
    text = normalize(text)
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text.strip()


def parse_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number and nothing else, else None.

    A percent sign is a unit here and is dropped: "7.41%" is 7.41. Mathematical delimiters `$…$`, a trailing full stop and an
    opening "=" are allowed; words are not.
    """
    text = plain(text)
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text.strip("$").strip()
    text = text.removeprefix("=").strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    match = _FULL.fullmatch(text)
    return None if match is None else _value(match)


def find_numbers(text: str) -> list[str]:
    """Every number in running text, in order, as written (sign and currency included)."""
    return [m.group().strip() for m in _SEARCH.finditer(plain(text)) if _value(m) is not None]


def _value(match: re.Match) -> Fraction | None:
    if match["sign"] and match["sign2"]:
        return None
    digits = match["digits"].replace(",", "")
    exponent = int((match["exponent"] or "e0")[1:])
    if len(match.group()) > _MAX_DIGITS or abs(exponent) > _MAX_EXPONENT:
        return None
    value = Fraction((digits or "0") + (match["decimals"] or "")) * Fraction(10) ** exponent
    if match["over"]:
        denominator = int(match["over"].strip().lstrip("/"))
        if denominator == 0:
            return None
        value /= denominator
    return -value if "-" in (match["sign"] + match["sign2"]) else value
