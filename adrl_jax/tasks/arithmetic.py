"""Small sums for a small instruction-tuned model.

SmolLM2-135M-Instruct knows the answers better than it gives them: asked for the sum of two digits it is right two times in
three when it answers greedily, but less than once in five when it is sampled at temperature 1, because it chats. So
reinforcement learning has something to sharpen, and answers of a few tokens keep its steps cheap.
"""

import dataclasses
import itertools

import numpy as np

from adrl_jax.rewards.extract import check_mode
from adrl_jax.rewards.math import score_number
from adrl_jax.tasks.base import Prompts, TextCodec, check_split, encoded
from adrl_jax.types import Prompt, Score

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
_TEST_SHARE = 5  # one problem in five is only ever seen in the test split


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The task: every problem "a op b" in a range, in a fixed random order, a fifth of them held out for the test split.

    Attributes:
        seed: names the order and what is held out.
        operations: any of `+`, `-`, `*`. Differences are never negative.
        low, high: smallest and largest operand.
        question: template with `{a}`, `{op}` and `{b}`.
        system: system message; "" leaves it to the chat template.
        mode: which answer styles count, `strict` or `flexible`.
        tokenizer: set by `encode`; it must have a chat template.
    """

    seed: int = 0
    operations: tuple[str, ...] = ("+",)
    low: int = 1
    high: int = 9
    question: str = "What is {a} {op} {b}? Answer with one number."
    system: str = ""
    mode: str = "flexible"
    tokenizer: TextCodec | None = None

    name = "arithmetic"
    splits = ("train", "test")

    def __post_init__(self):
        check_mode(self.mode)
        object.__setattr__(self, "operations", tuple(self.operations))
        if not self.operations or any(op not in OPERATIONS for op in self.operations):
            raise ValueError(f"Arithmetic.operations={self.operations!r} must be some of {', '.join(OPERATIONS)}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"Arithmetic.low={self.low!r}, high={self.high!r}: 0 <= low < high is needed")
        if len(self._problems) < 10:
            raise ValueError(
                f"Arithmetic.low={self.low!r}, high={self.high!r} give only {len(self._problems)} problems, 10 are needed"
            )
        for field in ("{a}", "{op}", "{b}"):
            if field not in self.question:
                raise ValueError(f"Arithmetic.question={self.question!r} lacks {field}")

    @property
    def _problems(self) -> list[tuple[int, str, int]]:
        operands = range(self.low, self.high + 1)
        every = itertools.product(operands, self.operations, operands)
        return [(a, op, b) for a, op, b in every if op != "-" or a >= b]

    def encode(self, tokenizer: TextCodec | None) -> "Arithmetic":
        return dataclasses.replace(self, tokenizer=tokenizer)

    def prompts(self, split: str) -> Prompts:
        check_split(self, split)
        encoded(self, "0")  # fails now if there is no tokenizer
        problems = self._problems
        order = np.random.default_rng([self.seed, len(problems)]).permutation(len(problems))
        held_out = -(-len(problems) // _TEST_SHARE)
        chosen = [problems[i] for i in (order[:held_out] if split == "test" else order[held_out:])]
        return Prompts(len(chosen), lambda i: self._prompt(i, *chosen[i]))

    def _prompt(self, index: int, a: int, op: str, b: int) -> Prompt:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.question.format(a=a, op=op, b=b)})
        text = self.tokenizer.chat(messages)
        return Prompt(index, encoded(self, text), text, reference=OPERATIONS[op](a, b), metadata={"problem": f"{a} {op} {b}"})

    def supervised_example(self, index: int) -> tuple[str, str]:
        """(prompt, result) for supervised training; the training problems in turn."""
        prompts = self.prompts("train")
        prompt = prompts[index % len(prompts)]
        return prompt.text, str(prompt.reference)

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """1 where the response's number is the result, else 0. The last number of a cut-off response is no answer."""
        return score_number(response_text, prompt.reference, mode=self.mode, truncated=truncated)
