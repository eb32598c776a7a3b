"""How far the law that is trained has moved from the law that sampled, on raw values before any clipping.

Everything is first reduced to sums and maxima over tokens, which add up (or are maximised) over rows, microbatches and
devices, and only then divided once: no mean of means.
"""

import chex
import jax
import jax.numpy as jnp


def log_ratio(log_probs: jax.Array, behaviour: jax.Array, mask: jax.Array) -> jax.Array:
    """log pi(token) - log mu(token), `[T]`; exactly 0, with gradient exactly 0, where `mask` is False."""
    chex.assert_equal_shape([log_probs, behaviour, mask])
    return jnp.where(mask, log_probs - behaviour, 0.0)


def kl_estimates(log_probs: jax.Array, reference: jax.Array) -> dict[str, jax.Array]:
    """Per-token estimates of KL(policy || reference) from tokens that the policy drew.

    k1 = log pi - log ref (unbiased), k2 = k1^2 / 2, k3 = exp(-k1) - 1 + k1 (unbiased, never negative);
    Schulman 2020, "Approximating KL divergence".
    """
    chex.assert_equal_shape([log_probs, reference])
    k1 = log_probs - reference
    return {"k1": k1, "k2": 0.5 * jnp.square(k1), "k3": jnp.expm1(-k1) + k1}


def diagnostic_sums(log_probs: jax.Array, behaviour: jax.Array, mask: jax.Array) -> tuple[dict, dict]:
    """Sums and maxima over the tokens of one row, `[T]` each, from which `diagnostics` makes the metrics.

    The tokens were drawn from `behaviour`, so KL here is KL(mu || pi).
    """
    delta = log_ratio(log_probs, behaviour, mask)
    estimates = kl_estimates(behaviour, log_probs)
    weight = jnp.exp(delta)
    sums = {
        "tokens": mask,
        "k1": estimates["k1"],
        "k3": estimates["k3"],
        "weight": weight,
        "weight_squared": jnp.square(weight),
    }
    sums = {name: jnp.sum(jnp.where(mask, value, 0), dtype=jnp.float32) for name, value in sums.items()}
    return sums, {"abs_delta": jnp.max(jnp.abs(delta), initial=0.0)}


def diagnostics(sums: dict, maxima: dict) -> dict[str, jax.Array]:
    """Metrics of a whole optimizer batch.

    Returns:
        `k1`, `k3`: nats a token, KL(mu || pi); `max_abs_delta`: the largest |log pi - log mu|; `ess`: effective sample
        size over tokens, (sum w)^2 / (n sum w^2), in (0, 1]; `weight_mean`: mean of pi / mu. All 0 on an empty batch.
    """
    n = jnp.maximum(sums["tokens"], 1.0)
    return {
        "k1": sums["k1"] / n,
        "k3": sums["k3"] / n,
        "max_abs_delta": maxima["abs_delta"],
        "ess": jnp.square(sums["weight"]) / (n * jnp.maximum(sums["weight_squared"], 1e-30)),
        "weight_mean": sums["weight"] / n,
    }
