"""Scores of a whole batch: worker processes, checks that must not be skipped, and the counts for the log."""

import collections
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

from adrl_jax.rewards.pool import ON_ERROR, ScorerPool
from adrl_jax.types import Prompt, Score

TaskScore = Callable[[Prompt, str, bool], Score]


class Grader:
    """Scores responses with a task's `score`, in this process or in workers with a time limit.

    Args:
        score: `(prompt, response_text, truncated) -> Score`, such as `task.score`.
        workers: worker processes; 0 scores in this process, for scorers known to be fast and to end.
        timeout_s: limit for one response, in seconds; only workers can keep it.
        on_error: `raise` ends the batch with the scorer's own exception, `zero` counts it as a score of 0.
    """

    def __init__(self, score: TaskScore, *, workers: int = 1, timeout_s: float = 10.0, on_error: str = "raise"):
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error={on_error!r} is unknown; choose one of {', '.join(ON_ERROR)}")
        self._score, self._on_error = score, on_error
        self._pool = (
            ScorerPool(portable_score(score), workers=workers, timeout_s=timeout_s, on_error=on_error) if workers else None
        )

    def grade(self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]) -> list[Score]:
        """One score a response, in order. Warns where not one response could be read.

        Raises:
            ValueError: lengths differ, or a score is NaN or infinite (names the prompt and the value).
            Exception: whatever the scorer raised, with `on_error="raise"`.
        """
        if not len(prompts) == len(responses) == len(truncated):
            raise ValueError(
                f"as many prompts as responses and truncation flags are needed, got {len(prompts)}, {len(responses)}, {len(truncated)}"
            )
        calls = [(p, r, bool(t)) for p, r, t in zip(prompts, responses, truncated)]
        scores = self._pool.score(calls) if self._pool else [self._score_here(call) for call in calls]
        check_finite(scores, prompts)
        warn_if_unparsed(scores, responses)
        return scores

    def _score_here(self, call: tuple[Prompt, str, bool]) -> Score:
        if self._on_error == "raise":
            return self._score(*call)
        try:
            return self._score(*call)
        except Exception as e:
            return Score(0.0, None, "error", detail=f"{type(e).__name__}: {e}")

    def close(self) -> None:
        """Ends the workers."""
        if self._pool:
            self._pool.close()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def portable_score(score: TaskScore) -> TaskScore:
    """`score` without the tokenizer of the task it is a method of: workers have no use for it."""
    task = getattr(score, "__self__", None)
    if dataclasses.is_dataclass(task) and getattr(task, "tokenizer", None) is not None:
        return getattr(dataclasses.replace(task, tokenizer=None), score.__name__)
    return score


def check_finite(scores: Sequence[Score], prompts: Sequence[Prompt]) -> None:
    """Raises ValueError for the first reward that is NaN or infinite."""
    for score, prompt in zip(scores, prompts):
        if not math.isfinite(score.value):
            raise ValueError(
                f"reward of prompt {prompt.prompt_id} is {score.value!r}, it must be finite "
                f"(reason {score.reason!r}, extracted {score.extracted!r}, prompt {prompt.text[-200:]!r})"
            )


def warn_if_unparsed(scores: Sequence[Score], responses: Sequence[str]) -> None:
    """Warns where every response of a batch was unreadable, which usually means a wrong answer format."""
    if scores and all(s.reason == "unparsed_response" for s in scores):
        warnings.warn(
            f"none of {len(scores)} responses has an answer in the expected form; check the prompt and the extraction mode. "
            f"The first response ends with {responses[0][-200:]!r}",
            stacklevel=3,
        )


def summarize(scores: Sequence[Score]) -> dict[str, float]:
    """Metrics of a batch: `mean`, `parsed_fraction` (of all responses), and `<reason>_count` for every reason."""
    if not scores:
        raise ValueError("there are no scores to summarize")
    counts = collections.Counter(s.reason for s in scores)
    parsed = counts["match"] + counts["mismatch"]
    summary = {"mean": math.fsum(s.value for s in scores) / len(scores), "parsed_fraction": parsed / len(scores)}
    return summary | {f"{reason}_count": float(counts[reason]) for reason in Score.REASONS}
