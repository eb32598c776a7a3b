"""Held-out prompts under what the engine has published."""

from collections.abc import Callable
from typing import Any

from adrl_jax.metrics import CompileClock, Stopwatch
from adrl_jax.runtime import collect, numbers
from adrl_jax.runtime.parts import EVALUATION_VISIT, Parts
from adrl_jax.types import SamplingParams


def evaluate(
    parts: Parts,
    sampling: SamplingParams,
    samples: int,
    max_new_tokens: int,
    bandit_state: Any,
    clock: CompileClock,
    on_launch: Callable[[Any], None] | None = None,
) -> tuple[dict[str, float], collect.Scored, Any]:
    """Draws `samples` responses to each held-out prompt and scores them.

    All evaluations of a run draw with the same noise, so two of them differ by their weights alone (common random numbers).

    Returns:
        metrics, the scored responses, and the bandit's state afterwards.

    Raises:
        RewardError: a reward is not finite, or the scorer failed.
    """
    watch = Stopwatch(clock)
    prompts = list(parts.eval_prompts)
    requests = collect.requests_for(prompts, [EVALUATION_VISIT] * len(prompts), samples, max_new_tokens)
    with watch.phase("rollout"):
        result = parts.engine.generate(requests, sampling, parts.bandit, bandit_state, on_launch=on_launch)
    with watch.phase("reward"):
        scorer = parts.eval_scorer or parts.scorer
        scored = collect.score(result.rollouts, [r.prompt for r in requests], parts.tokenizer, scorer)
    row = collect.metrics(scored) | numbers.of_rollouts(result.stats, result.rollouts, parts.strategies) | watch.metrics()
    return row, scored, result.bandit_state
