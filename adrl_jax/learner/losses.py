"""Losses as (numerator, denominator) over the whole optimizer batch, composed from small pure pieces.

The pieces work on one row of targets, `[U]`; callers `vmap`. The policy loss is

    sum over targets of  aggregation weight x (weight x mask x surrogate + regularisers)  /  denominator,

whose denominator depends on masks and lengths alone, so gradients of numerators add up over any split and are divided once.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from adrl_jax.learner import importance, kl
from adrl_jax.learner.aggregation import aggregation_weights
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.row import Row
from adrl_jax.learner.weights import MASKS, WEIGHTS


class Loss(NamedTuple):
    """A loss before its only division.

    Attributes:
        numerator, denominator: float32 scalars; the loss is their quotient (0 where the denominator is 0).
        sums: named float32 scalars or vectors that add up over rows, microbatches and devices.
        maxima: named float32 scalars of which the largest counts.
    """

    numerator: jax.Array
    denominator: jax.Array
    sums: dict
    maxima: dict


def policy_loss(config: LossConfig, row: Row) -> Loss:
    """The composed loss of one row, `[U]` fields; 0 at padding, in value and gradient."""
    chex.assert_rank([x for x in row if x is not None], 1)
    chex.assert_equal_shape([x for x in row if x is not None])
    mask = row.mask
    terms = config.parts.function(config, row)
    token_loss = terms.value
    keep = mask
    if config.mask != "none":
        keep = mask & MASKS[config.mask].function(config, row)
    if config.weight != "none":
        token_loss = jax.lax.stop_gradient(WEIGHTS[config.weight].function(config, row)) * token_loss
    if config.mask != "none":
        token_loss = jnp.where(keep, token_loss, 0.0)
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * row.entropy
    if config.kl_coef:
        token_loss = token_loss + config.kl_coef * kl.penalty(row, config.kl_estimator, config.kl_correction)
    weights, denominator = aggregation_weights(row.owner, mask, config.aggregation, config.constant_length, row.group)
    numerator = jnp.sum(jnp.where(mask, weights * token_loss, 0.0))
    sums, maxima = importance.diagnostic_sums(row, keep)
    sums["clip_high"] = _count(mask & terms.clipped_high)
    sums["clip_low"] = _count(mask & terms.clipped_low)
    sums["entropy"] = jnp.sum(jnp.where(mask, row.entropy, 0.0))
    return Loss(numerator, denominator, jax.lax.stop_gradient(sums), jax.lax.stop_gradient(maxima))


def cross_entropy(log_probs, entropy, mask) -> Loss:
    """Supervised loss on one row of targets, `[U]` each: -log p of the given tokens, mean over all tokens of the batch."""
    chex.assert_rank([log_probs, entropy, mask], 1)
    numerator = jnp.sum(jnp.where(mask, -log_probs, 0.0))
    sums = {"tokens": _count(mask), "entropy": jnp.sum(jnp.where(mask, entropy, 0.0))}
    return Loss(numerator, _count(mask), sums, {})


def over_rows(losses: Loss) -> Loss:
    """Adds up losses stacked along a leading axis (and takes the largest of the maxima)."""
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), losses._replace(maxima={}))
    return total._replace(maxima=jax.tree.map(lambda x: jnp.max(x, axis=0), losses.maxima))


def combine(a: Loss, b: Loss) -> Loss:
    """The loss of two disjoint parts of a batch."""
    total = jax.tree.map(jnp.add, a._replace(maxima={}), b._replace(maxima={}))
    return total._replace(maxima=jax.tree.map(jnp.maximum, a.maxima, b.maxima))


def metrics(loss: Loss) -> dict[str, jax.Array]:
    """Named float32 scalars of a finished optimizer batch; shares and means are over its tokens."""
    n = jnp.maximum(loss.sums["tokens"], 1.0)
    out = {
        "loss": loss.numerator / jnp.maximum(loss.denominator, 1e-30),
        "tokens": loss.sums["tokens"],
        "entropy": loss.sums["entropy"] / n,
    }
    if "clip_high" in loss.sums:
        out |= importance.diagnostics(loss.sums, loss.maxima)
        out |= {"clip_frac_high": loss.sums["clip_high"] / n, "clip_frac_low": loss.sums["clip_low"] / n}
    count = jnp.maximum(loss.denominator, 1.0)
    out |= {name.removeprefix("mean/"): x / count for name, x in loss.sums.items() if name.startswith("mean/")}
    if "residual" in loss.sums:
        out["explained_variance"] = 1.0 - _variance(loss.sums, "residual", n) / jnp.maximum(
            _variance(loss.sums, "returns", n), 1e-12
        )
    return out


def _variance(sums: dict, name: str, n: jax.Array) -> jax.Array:
    return sums[f"{name}_squared"] / n - jnp.square(sums[name] / n)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)
