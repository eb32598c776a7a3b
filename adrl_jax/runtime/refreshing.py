"""A batch made current: verified and continued under the policy that the engine serves now (`rollout.refresh`)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from adrl_jax.rollout import refresh
from adrl_jax.rollout.stats import LaunchRecord, RolloutStats
from adrl_jax.runtime.batches import Batch
from adrl_jax.runtime.parts import Parts
from adrl_jax.types import Rollout, SamplingParams


def made_current(
    parts: Parts, sampling: SamplingParams, batch: Batch, bandit_state: Any, on_launch: Callable[[LaunchRecord], None]
) -> tuple[Batch, Any]:
    """The batch as the policy that the engine serves draws it with the batch's own noise, and the bandit's state after it.

    The result's `stats` are those of the refresh.
    """
    requests = refresh.requests_for(batch.rollouts, batch.requests)
    result = parts.engine.generate(requests, sampling, parts.bandit, bandit_state, on_launch=on_launch, history=parts.history)
    return dataclasses.replace(batch, rollouts=result.rollouts, stats=result.stats, refreshed=True), result.bandit_state


def numbers(batch_rollouts: Sequence[Rollout], stats: RolloutStats, stale: Sequence[Rollout]) -> dict[str, Any]:
    """Metrics of a refresh: `refresh/reused` (share of draft tokens that stood), `refresh/disagreement` (share of them that
    the current policy would not draw), `refresh/changed` (share of responses), `refresh/tokens_per_s`."""
    tokens, kept, differing = stats.drafts
    changed = sum(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(batch_rollouts, stale, strict=True))
    return {
        "refresh/reused": kept / tokens,
        "refresh/disagreement": differing / tokens,
        "refresh/changed": changed / len(stale),
        "refresh/tokens_per_s": sum(r.response_length for r in batch_rollouts) / max(stats.seconds, 1e-9),
    }
