"""Rewards before they become advantages: penalties for length and for a missing end, on the host.

`N` rewards, float64. Truncation facts come from finish reasons, never from token values.
"""

from collections.abc import Sequence

import numpy as np

from adrl_jax.learner.kl import ESTIMATORS

EOS_RULES = ("none", "replace", "subtract")


def eos_penalty(rewards: np.ndarray, truncated: np.ndarray, rule: str, penalty: float) -> np.ndarray:
    """What a response that did not end by itself is worth.

    `replace`: -penalty, whatever the score was (Asynchronous RLHF's reference code). `subtract`: score - penalty (TRL's
    `missing_eos_penalty`). The two differ: scores [3, -2] become [-p, -p] and [3 - p, -2 - p].
    """
    if rule not in EOS_RULES:
        raise ValueError(f"eos_rule={rule!r} is unknown; choose one of {', '.join(EOS_RULES)}")
    rewards, truncated = np.asarray(rewards, np.float64), np.asarray(truncated, bool)
    if rule == "replace":
        return np.where(truncated, -penalty, rewards)
    return np.where(truncated, rewards - penalty, rewards) if rule == "subtract" else rewards


def overlong_penalty(lengths: np.ndarray, max_tokens: int, margin: int, penalty: float) -> np.ndarray:
    """DAPO's soft punishment, `[N]`, to be subtracted: 0 up to `max_tokens - margin` tokens, then along a line to `penalty` at
    `max_tokens` (arXiv 2503.14476, eq. 13)."""
    over = np.asarray(lengths, np.float64) - (max_tokens - margin)
    return penalty * np.clip(over / margin, 0.0, 1.0)


def token_penalties(log_probs: Sequence[np.ndarray], reference: Sequence[np.ndarray], estimator: str) -> list[np.ndarray]:
    """Per-token KL to the reference, float64 `[R_i]`, to be subtracted from rewards (no gradient passes here).

    Args:
        log_probs: of the law that the KL is of: mu, or the recomputed one.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"kl_estimator={estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}")
    out = []
    for lp, ref in zip(log_probs, reference, strict=True):
        k1 = np.asarray(lp, np.float64) - np.asarray(ref, np.float64)
        out.append({"k1": k1, "k2": 0.5 * k1**2, "k3": np.expm1(-k1) + k1}[estimator])
    return out
