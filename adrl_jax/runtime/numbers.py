"""The numbers of a training step under the names that charts of this field use. Units: tokens, seconds, nats."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adrl_jax.speculation.strategy import Strategy
from adrl_jax.types import Rollout

# Metric of an update -> its name in metrics.jsonl.
_UPDATE = {
    "loss": "loss/pg",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "weight_mean": "ratio/mean",
    "clip_frac_high": "clip_frac/high",
    "clip_frac_low": "clip_frac/low",
}
# Raw distance between the law that sampled and the learner's, before any update of this batch.
_MISMATCH = (
    *("k1", "k2", "k3", "mean_abs_delta", "p99_abs_delta", "max_abs_delta", "weight_std", "weight_max", "ess", "chi2"),
    *("ess_response", "chi2_response"),
)
_PREFIXES = ("drafter/", "value/", "engine/", "stale/", "age", "reference/", "masked_", "lr_scale")


def on_host(values: Mapping[str, jax.Array]) -> dict[str, float]:
    """Device scalars as floats; waits for them."""
    return {name: float(value) for name, value in jax.device_get(dict(values)).items()}


def of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of one batch; mismatch from the first, before anything was learnt from the batch."""
    if not updates:  # nothing of the batch was worth an update
        return {"update/skipped": 0.0, "update/tokens": 0.0}
    out = {new: float(np.mean([u[old] for u in updates])) for old, new in _UPDATE.items() if old in updates[0]}
    out |= {f"mismatch/{name}": updates[0][name] for name in _MISMATCH if name in updates[0]}
    out |= {n: float(np.mean([u[n] for u in updates])) for n in updates[0] if n.startswith(_PREFIXES)}
    out["clip_frac"] = out.get("clip_frac/high", 0.0) + out.get("clip_frac/low", 0.0)
    return out | {"update/skipped": sum(u["skipped"] for u in updates), "update/tokens": sum(u["tokens"] for u in updates)}


def of_rollouts(stats: Any, rollouts: Sequence[Rollout], strategies: Sequence[Strategy]) -> dict[str, float]:
    """Speed and speculation of one generation; `bandit/arm/<name>` are shares of launches."""
    launches = stats.launches
    used = Counter(x.arm for x in launches)
    passes, tokens = sum(r.accept_passes for r in rollouts), sum(r.accept_tokens for r in rollouts)
    out = {
        "rollout/tokens": float(sum(r.response_length for r in rollouts)),
        "rollout/tokens_per_s": float(stats.tokens_per_s),
        "rollout/launches": float(len(launches)),
        "rollout/host_gap_fraction": float(stats.host_gap_fraction),
        "spec/accept_len": tokens / passes if passes else float("nan"),
    }
    return out | {f"bandit/arm/{s.name}": used[i] / max(len(launches), 1) for i, s in enumerate(strategies)}


def most_used(stats: Any, strategies: Sequence[Strategy]) -> str:
    """Name of the arm that committed most tokens."""
    tokens: Counter[int] = Counter()
    for launch in stats.launches:
        tokens[launch.arm] += launch.tokens
    return strategies[tokens.most_common(1)[0][0]].name if tokens else "none"
