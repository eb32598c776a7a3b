"""Remainders by repeated subtraction: a procedural task whose visible working has a heavy tail of lengths.

    prompt    "97%12="
    response  "85 73 61 49 37 25 13 01=01"

Each step takes the divisor away from the last number; the answer follows the second "=". Numbers have a fixed number of
digits, which makes a step easy to learn. But a response has as many steps as the quotient, and quotients are drawn from a
log-normal law: with the default settings the median response has 12 characters, one in a hundred has 84 or more, the
longest 98.

Supervised examples are as careless as people's: each step is wrong with probability `slip_rate` (and the rest follows from
it), so a model that imitates them slips as often. One slip spoils the answer, and reinforcement learning, which sees only the
answers, can train the carelessness away.
"""

import dataclasses
import re

import numpy as np

from adrl_jax.tasks.base import Prompts, TextCodec, check_split, encoded, positive
from adrl_jax.types import Prompt, Score

ALPHABET = "0123456789%= "
"""Every character of prompts and responses."""

_STREAMS = {"supervised": 0, "train": 1, "test": 2}
_TEST_SHARE = 10  # one problem in ten is only ever seen in the test split
_ANSWER = re.compile(r"=(\d+)$")


@dataclasses.dataclass(frozen=True)
class Division:
    """The task.

    Attributes:
        seed: names the problems.
        median_steps: median of the quotient before rounding and cutting.
        sigma: standard deviation of the quotient's logarithm; 0 gives every response the same number of steps.
        max_steps: largest quotient.
        max_dividend: largest dividend; divisors shrink so that the quotient fits.
        max_divisor: largest divisor; the smallest is 3.
        slip_rate: chance that a step of a supervised example is off by up to 9. Prompts and scores know no slips.
        train_size, test_size: prompts in each split. No (dividend, divisor) is in both.
        tokenizer: set by `encode`.
    """

    seed: int = 0
    median_steps: float = 3.0
    sigma: float = 1.1
    max_steps: int = 32
    max_dividend: int = 99
    max_divisor: int = 33
    slip_rate: float = 0.12
    train_size: int = 100_000
    test_size: int = 256
    tokenizer: TextCodec | None = None

    name = "division"
    splits = ("train", "test")

    def __post_init__(self):
        positive("Division", **{k: getattr(self, k) for k in ("max_steps", "train_size", "test_size")})
        if not self.median_steps >= 1 or self.median_steps > self.max_steps:
            raise ValueError(f"Division.median_steps={self.median_steps!r} must be in [1, max_steps={self.max_steps}]")
        if not 0 <= self.sigma <= 3:
            raise ValueError(f"Division.sigma={self.sigma!r} must be in [0, 3]")
        if not 0 <= self.slip_rate < 1:
            raise ValueError(f"Division.slip_rate={self.slip_rate!r} must be in [0, 1)")
        if self.max_divisor < 3:
            raise ValueError(f"Division.max_divisor={self.max_divisor!r} must be at least 3")
        if self.max_dividend < 3 * (self.max_steps + 1) - 1:
            raise ValueError(
                f"Division.max_dividend={self.max_dividend!r} leaves no divisor for max_steps={self.max_steps}; "
                f"it must be at least {3 * (self.max_steps + 1) - 1}"
            )

    def encode(self, tokenizer: TextCodec) -> "Division":
        return dataclasses.replace(self, tokenizer=tokenizer)

    def prompts(self, split: str) -> Prompts:
        check_split(self, split)
        encoded(self, ALPHABET)  # fails now if there is no tokenizer or it lacks a character
        return Prompts(self.train_size if split == "train" else self.test_size, lambda i: self._prompt(split, i))

    def _prompt(self, split: str, index: int) -> Prompt:
        dividend, divisor = self.problem(split, index)
        text = self._question(dividend, divisor)
        facts = {"steps": dividend // divisor}
        return Prompt(index, encoded(self, text), text, reference=dividend % divisor, metadata=facts)

    def problem(self, stream: str, index: int) -> tuple[int, int]:
        """(dividend, divisor) number `index` of a stream: `supervised`, `train` or `test`."""
        rng = np.random.default_rng([self.seed, _STREAMS[stream], index])
        while True:
            quotient = round(float(np.exp(rng.normal(np.log(self.median_steps), self.sigma))))
            if not 1 <= quotient <= self.max_steps:
                continue
            divisor = int(rng.integers(3, min(self.max_divisor, (self.max_dividend + 1) // (quotient + 1)) + 1))
            dividend = quotient * divisor + int(rng.integers(divisor))
            if self._held_out(dividend, divisor) == (stream == "test"):
                return dividend, divisor

    def _held_out(self, dividend: int, divisor: int) -> bool:
        # Knuth's multiplicative hash: spreads neighbours evenly, needs no state
        return (dividend * 1000 + divisor) * 2654435761 % 2**32 * _TEST_SHARE // 2**32 == 0

    def supervised_example(self, index: int) -> tuple[str, str]:
        """(prompt, response) for supervised training, slips included, without an end token. Never a problem of the test split."""
        dividend, divisor = self.problem("supervised", index)
        slips = np.random.default_rng([self.seed, len(_STREAMS), index])
        response = working(dividend, divisor, len(str(self.max_dividend)), self.slip_rate, slips)
        return self._question(dividend, divisor), response

    def _question(self, dividend: int, divisor: int) -> str:
        digits = len(str(self.max_dividend))
        return f"{dividend:0{digits}d}%{divisor:0{digits}d}="

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """1 where the number after the last "=" is the remainder, else 0. A truncated response has no answer."""
        found = None if truncated else _ANSWER.search(response_text.strip())
        if found is None:
            return Score(0.0, None, "unparsed_response")
        match = int(found.group(1)) == prompt.reference
        return Score(float(match), found.group(1), "match" if match else "mismatch")


def working(dividend: int, divisor: int, digits: int, slip_rate: float = 0.0, rng: np.random.Generator | None = None) -> str:
    """Every intermediate number, then the last one once more behind "=", each with `digits` digits.

    With `slip_rate` a step is replaced, as often as that, by another number below the one before it that is at most 9 off.
    """
    numbers = []
    left = dividend
    while left >= divisor:
        right = left - divisor
        if slip_rate and rng.random() < slip_rate:
            wrong = [x for x in range(max(right - 9, 0), min(right + 10, left)) if x != right]
            right = int(rng.choice(wrong))
        numbers.append(f"{right:0{digits}d}")
        left = right
    return f"{' '.join(numbers)}={left:0{digits}d}"
