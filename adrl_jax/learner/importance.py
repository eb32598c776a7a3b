"""How far the law that is trained has moved from the law that sampled, on raw values before any truncation or mask.

Three gaps, all in d = log target - log source of the sampled tokens:

* `total`: mu -> pi_t, what training on this batch means;
* `engine`: mu -> pi_p, the mismatch between engine and learner plus the staleness the batch arrived with;
* `stale`: pi_p -> pi_t, the updates made since (both only where pi_p was recomputed);

and the total once more by age in policy updates, where age 0 is engine mismatch alone. Everything is first reduced to sums and
maxima over tokens, which add up (or are maximised) over rows, microbatches and devices, and only then divided once: no
mean of means.
"""

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.learner import sequences
from adrl_jax.learner.kl import kl_estimates
from adrl_jax.learner.row import Row, safe_exp

AGES = 4
"""Buckets of staleness: 0, 1, 2, and 3 or more updates."""

EDGES = np.concatenate([[0.0], np.geomspace(1e-7, 20.0, 96)]).astype(np.float32)
"""Upper edges of the histogram of |d|, 22 % apart: how well a quantile is known."""


def _gap(target: jax.Array, source: jax.Array, mask: jax.Array) -> tuple[dict, dict]:
    """Sums and maxima of d over the tokens of a row. KL is KL(source || target): `source` drew the tokens."""
    d = jnp.where(mask, target - source, 0.0)
    estimates = kl_estimates(jnp.where(mask, source, 0.0), jnp.where(mask, target, 0.0))
    weight = safe_exp(d)
    sums = {
        **estimates,
        "abs": jnp.abs(d),
        "weight": weight,
        "weight_squared": jnp.square(weight),
    }
    sums = {name: jnp.sum(jnp.where(mask, value, 0), dtype=jnp.float32) for name, value in sums.items()}
    # Maxima start from 0 wherever parts are put together, so what is maximised must not be negative.
    return sums, {"abs_delta": jnp.max(jnp.abs(d), initial=0.0), "weight": jnp.max(jnp.where(mask, weight, 0.0), initial=0.0)}


def diagnostic_sums(row: Row, keep: jax.Array) -> tuple[dict, dict]:
    """Sums and maxima of one row, from which `diagnostics` makes the metrics.

    Args:
        row: `[U]` fields.
        keep: bool `[U]`, what the rejection mask left.
    """
    mask = row.mask
    d = row.log_probs - row.behaviour
    sums, maxima = _gap(row.log_probs, row.behaviour, mask)
    # One bin a token: searchsorted would loop, comparisons with 97 edges fuse into one reduction.
    above = jnp.abs(d)[:, None] > EDGES[None]
    sums["above"] = jnp.sum(above & mask[:, None], axis=0, dtype=jnp.float32)
    sums["tokens"] = _count(mask)
    sums["masked"] = _count(mask & ~keep)
    first = sequences.first_of(row.owner, mask)
    response = safe_exp(row.sequence_sum(d))
    lost = row.sequence_sum((~keep).astype(jnp.float32)) >= row.lengths
    sums |= {
        "responses": _count(first),
        "response_weight": jnp.sum(jnp.where(first, response, 0.0)),
        "response_weight_squared": jnp.sum(jnp.where(first, jnp.square(response), 0.0)),
        "masked_responses": _count(first & lost),
    }
    age = jnp.minimum(row.staleness, AGES - 1)
    ages = (age[:, None] == jnp.arange(AGES)) & mask[:, None]
    by_age = {"tokens": jnp.ones_like(d), "abs": jnp.abs(d), "k3": kl_estimates(row.behaviour, row.log_probs)["k3"]}
    sums |= {f"age_{name}": jnp.sum(jnp.where(ages, x[:, None], 0.0), axis=0) for name, x in by_age.items()}
    if row.proximal is not None:
        for name, (target, source) in {
            "engine": (row.proximal, row.behaviour),
            "stale": (row.log_probs, row.proximal),
        }.items():
            part, most = _gap(target, source, mask)
            sums |= {f"{name}_{k}": v for k, v in part.items()}
            maxima |= {f"{name}_{k}": v for k, v in most.items()}
    if row.reference is not None:
        estimates = kl_estimates(row.log_probs, row.reference)
        sums |= {f"reference_{k}": jnp.sum(jnp.where(mask, estimates[k], 0.0)) for k in ("k1", "k3")}
    return sums, maxima


def diagnostics(sums: dict, maxima: dict) -> dict[str, jax.Array]:
    """Metrics of a whole optimizer batch, all 0 on an empty one.

    Returns:
        Of the total gap: `k1`, `k2`, `k3` (nats a token, KL(mu || pi_t)), `mean_abs_delta`, `p99_abs_delta` (to 22 %),
        `max_abs_delta`, `weight_mean`, `weight_std`, `weight_max`, `ess` (effective sample size over tokens,
        (sum w)^2 / (n sum w^2), in (0, 1]), `chi2` (mean w^2 - 1), and `ess_response`, `chi2_response` from products over
        responses. Of `engine/` and `stale/`: k1, k2, k3, mean_abs_delta, max_abs_delta, weight_mean, weight_std, weight_max,
        ess, chi2. By age: `age<i>/share`, `age<i>/mean_abs_delta`, `age<i>/k3`. Of the mask: `masked_share`,
        `masked_response_share`. Of the reference: `reference/k1`, `reference/k3`.
    """
    n = jnp.maximum(sums["tokens"], 1.0)
    some = jnp.minimum(sums["tokens"], 1.0)  # 0 on an empty batch
    out = _gap_metrics(sums, maxima, "", n, some)
    beyond = sums["above"] > 0.01 * n  # |d| above this edge is more than the last hundredth
    edges = jnp.asarray(np.concatenate([EDGES[1:], [np.float32(np.inf)]]))
    out["p99_abs_delta"] = jnp.minimum(jnp.max(jnp.where(beyond, edges, 0.0), initial=0.0), out["max_abs_delta"])
    count = jnp.maximum(sums["responses"], 1.0)
    squared = sums["response_weight_squared"]
    out["ess_response"] = jnp.square(sums["response_weight"]) / (count * jnp.maximum(squared, 1e-30))
    out["chi2_response"] = some * (squared / count - 1.0)
    out["masked_share"] = sums["masked"] / n
    out["masked_response_share"] = sums["masked_responses"] / count
    for i in range(AGES):
        tokens = jnp.maximum(sums["age_tokens"][i], 1.0)
        out[f"age{i}/share"] = sums["age_tokens"][i] / n
        out[f"age{i}/mean_abs_delta"] = sums["age_abs"][i] / tokens
        out[f"age{i}/k3"] = sums["age_k3"][i] / tokens
    for name in ("engine", "stale"):
        if f"{name}_k1" in sums:
            found = _gap_metrics(sums, maxima, f"{name}_", n, some)
            out |= {f"{name}/{key}": value for key, value in found.items()}
    if "reference_k1" in sums:
        out |= {f"reference/{k}": sums[f"reference_{k}"] / n for k in ("k1", "k3")}
    return out


def _gap_metrics(sums: dict, maxima: dict, prefix: str, n: jax.Array, some: jax.Array) -> dict[str, jax.Array]:
    mean = sums[f"{prefix}weight"] / n
    squared = sums[f"{prefix}weight_squared"]
    return {
        **{k: sums[f"{prefix}{k}"] / n for k in ("k1", "k2", "k3")},
        "mean_abs_delta": sums[f"{prefix}abs"] / n,
        "max_abs_delta": maxima[f"{prefix}abs_delta"],
        "weight_mean": mean,
        "weight_std": jnp.sqrt(jnp.maximum(squared / n - jnp.square(mean), 0.0)),
        "weight_max": maxima[f"{prefix}weight"],
        "ess": jnp.square(sums[f"{prefix}weight"]) / (n * jnp.maximum(squared, 1e-30)),
        "chi2": some * (squared / n - 1.0),
    }


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)
