"""Finding the answer in a response.

`strict` accepts one form, the line "#### answer". `flexible` accepts, strongest first: that line; `\\boxed{answer}`; a phrase
such as "the answer is …" or "A: …"; the last number of the text. Within a form the last occurrence counts, and a form that
is present but broken or empty means "no answer": an earlier or weaker form must not earn the reward instead.
"""

import re
from typing import NamedTuple

from adrl_jax.rewards.numbers import find_numbers, normalize, parse_number, plain

MODES = ("strict", "flexible")
MARKER = "####"
_BOXED = re.compile(r"\\f?boxed\s*")
_PHRASE = re.compile(r"(?:\banswer\s*(?:is|are|was|:|=|equals)+|^\s*A\s*:)(?P<rest>.*)", re.IGNORECASE | re.MULTILINE)
_FIRST_NUMBER_WORDS = re.compile(r"[^0-9]*$")


class Extraction(NamedTuple):
    """What was found.

    Attributes:
        text: the answer as written, None where there is none.
        form: `marker`, `boxed`, `phrase`, `number`, or `none`.
    """

    text: str | None
    form: str


def check_mode(mode: str) -> None:
    """Raises ValueError for an unknown extraction mode."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; choose one of {', '.join(MODES)}")


def last_boxed(text: str) -> str | None:
    """Contents of the last `\\boxed{…}`, braces balanced; "" where the last box is empty or never closed, None without a box."""
    boxes = list(_BOXED.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not text[start : start + 1] == "{":
        return text[start : start + 1].strip()  # TeX: \boxed 7
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "{" and text[i - 1] != "\\":
            depth += 1
        elif text[i] == "}" and text[i - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[start + 1 : i].strip()
    return ""


def extract_answer(response: str, mode: str) -> Extraction:
    """The answer as text, for scorers that understand more than numbers.

    Raises:
        ValueError: unknown mode.
    """
    check_mode(mode)
    if MARKER in response:
        line = response.rsplit(MARKER, 1)[1].lstrip(" \t").split("\n", 1)[0].strip()
        return Extraction(line or None, "marker")
    if mode == "strict":
        return Extraction(None, "none")
    boxed = last_boxed(response)
    if boxed is not None:
        return Extraction(boxed or None, "boxed")
    phrases = list(_PHRASE.finditer(normalize(response)))
    if phrases and (rest := phrases[-1]["rest"].strip(" \t:*")):
        return Extraction(rest, "phrase")
    numbers = find_numbers(response)
    return Extraction(numbers[-1], "number") if numbers else Extraction(None, "none")


def extract_number(response: str, mode: str) -> Extraction:
    """The answer's number as written: `parse_number` reads `text` whenever it is not None.

    Raises:
        ValueError: unknown mode.
    """
    found = extract_answer(response, mode)
    if found.text is None or parse_number(found.text) is not None:
        return found
    if found.form == "boxed":
        return Extraction(_with_unit(found.text), "boxed")
    # "#### 5 + 3 = 8 apples" and "the answer is 6*3=18": what follows the last "=" is meant
    tail = found.text.rsplit("=", 1)[-1]
    numbers = find_numbers(tail)
    if not numbers and found.form == "phrase":  # "the answer is therefore clear. It is 5": a phrase without a number
        numbers = find_numbers(response)[-1:]
        return Extraction(numbers[0], "number") if numbers else Extraction(None, "none")
    return Extraction(numbers[0] if numbers else None, found.form)


def _with_unit(boxed: str) -> str | None:
    """The number of "18 dollars" or "x = 18"; None for anything that is more than a number, such as "3x" or "(1, 2)"."""
    text = plain(boxed).rsplit("=", 1)[-1].strip()
    number, _, words = text.partition(" ")
    if parse_number(text) is not None:
        return text
    return number if parse_number(number) is not None and _FIRST_NUMBER_WORDS.match(words) else None
