"""Estimates of KL(policy || reference) from tokens that the policy, or an earlier one, drew.

Value and gradient are two questions. For tokens drawn from pi_t itself the true gradient is E[k1 grad log pi_t], and
(Schulman 2020, "Approximating KL divergence"; checked by enumeration in the tests)

| in the loss | expected gradient on-policy | with `correction` (x pi_t / mu), on- and off-policy |
|---|---|---|
| k1 = log pi_t - log ref | 0, so it is refused | the KL's own |
| k2 = k1^2 / 2 | the KL's own | the KL's own (the ratio stopped) |
| k3 = exp(-k1) - 1 + k1 | that of KL(ref || pi_t) | the KL's own |

The ratio is the token's own: exact for one token, and for longer responses without the earlier tokens' ratios.
"""

import chex
import jax
import jax.numpy as jnp

from adrl_jax.learner.row import Row, safe_exp

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimates(log_probs: jax.Array, reference: jax.Array) -> dict[str, jax.Array]:
    """Per-token estimates of KL(policy || reference) from tokens that the policy drew.

    k1 = log pi - log ref (unbiased), k2 = k1^2 / 2, k3 = exp(-k1) - 1 + k1 (unbiased, never negative).
    """
    chex.assert_equal_shape([log_probs, reference])
    k1 = log_probs - reference
    return {"k1": k1, "k2": 0.5 * jnp.square(k1), "k3": jnp.expm1(-k1) + k1}


def penalty(row: Row, estimator: str, correction: bool) -> jax.Array:
    """The term of the loss, nats a token, `[U]`; see the module's table.

    Args:
        row: with `reference`.
        estimator: `k1`, `k2` or `k3`.
        correction: multiply by pi_t / mu, with its gradient (k1, k3) or without (k2).
    """
    value = kl_estimates(row.log_probs, row.reference)[estimator]
    if not correction:
        return value
    ratio = safe_exp(row.log_probs - row.behaviour)
    return value * (jax.lax.stop_gradient(ratio) if estimator == "k2" else ratio)
