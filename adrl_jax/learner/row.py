"""One row of targets as the loss sees it, with padding made harmless, and the log-ratios between the three laws.

Three laws meet at every token: mu drew it (`behaviour`), pi_p is the proximal policy that steps are kept close to, pi_t is
being trained. mu -> pi_p is what an importance weight corrects, pi_p -> pi_t is what a clipped surrogate bounds (decoupled PPO,
arXiv 2110.00641; AReaL, arXiv 2505.24298). Without a proximal policy of its own, pi_p is mu.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.learner import sequences
from adrl_jax.types import PackedBatch

OLD_LOG_PROBS = ("behaviour", "recompute", "interpolate")
_LARGEST_LOG = 20.0
"""Beyond e^20 a ratio carries no information, and an overflow would turn a clipped gradient into 0 * inf."""


class Row(NamedTuple):
    """Targets of one row, `[U]` each (`[M, U]` before `vmap`); 0 at padding. None where a loss does not need it.

    Attributes:
        log_probs, entropy: of the current law, at the sampling temperature; these alone carry a gradient.
        behaviour: log-probs stored when the tokens were drawn.
        advantages: whatever the surrogate multiplies: an advantage, a reward (`copg`), +1 / -1 (pairs).
        mask: False at padding.
        owner, group: int32, which rollout and which group a target belongs to.
        staleness: int32, policy updates between the draw and this batch's first update.
        proximal: log-probs of the proximal policy.
        proximal_lag: int32, updates since the proximal policy.
        reference: log-probs of the frozen reference model.
        keep: bool, a rejection mask that was decided over the whole optimizer batch.
    """

    log_probs: jax.Array
    entropy: jax.Array
    behaviour: jax.Array
    advantages: jax.Array
    mask: jax.Array
    owner: jax.Array
    group: jax.Array
    staleness: jax.Array
    proximal: jax.Array | None = None
    proximal_lag: jax.Array | None = None
    reference: jax.Array | None = None
    keep: jax.Array | None = None

    def sequence_sum(self, values: jax.Array) -> jax.Array:
        return sequences.sums(values, self.owner, self.mask)

    def sequence_mean(self, values: jax.Array) -> jax.Array:
        return sequences.means(values, self.owner, self.mask)

    def group_sum(self, values: jax.Array) -> jax.Array:
        return sequences.sums(values, self.group, self.mask)

    @property
    def lengths(self) -> jax.Array:
        return sequences.sequence_lengths(self.owner, self.mask)


def rows_of(log_probs: jax.Array, entropy: jax.Array, batch: PackedBatch) -> Row:
    """The rows of a batch. What stands at padding, NaN included, reaches neither value nor gradient."""
    mask = batch.target_mask

    def clean(x):
        return None if x is None else jnp.where(mask, x, jnp.zeros_like(x))

    return Row(
        log_probs=clean(log_probs),
        entropy=clean(entropy),
        behaviour=clean(batch.log_probs),
        advantages=clean(batch.advantages),
        mask=mask,
        owner=batch.rollout_index,
        group=batch.group_index,
        staleness=clean(batch.staleness),
        proximal=clean(batch.proximal),
        proximal_lag=clean(batch.proximal_lag),
        reference=clean(batch.reference),
        keep=batch.keep,
    )


def proximal_log_probs(row: Row, kind: str) -> jax.Array:
    """Log-probs of pi_p, `[U]`, without a gradient.

    `behaviour`: those of mu. `recompute`: `row.proximal`. `interpolate`: log mu + a (log pi_t - log mu) with
    a = (v_p - v_b) / (v_t - v_b), which saves the pass (A-3PO); 0 where no update lies between.
    """
    if kind == "behaviour":
        return row.behaviour
    if kind == "recompute":
        return jax.lax.stop_gradient(row.proximal)
    if kind == "interpolate":
        before = row.staleness.astype(jnp.float32)
        share = before / jnp.maximum(before + row.proximal_lag.astype(jnp.float32), 1.0)
        return row.behaviour + share * (jax.lax.stop_gradient(row.log_probs) - row.behaviour)
    raise ValueError(f"old_log_probs={kind!r} is unknown; choose one of {', '.join(OLD_LOG_PROBS)}")


def log_ratio(row: Row, kind: str) -> jax.Array:
    """log pi_t - log pi_p a token, `[U]`: what a surrogate bounds. Carries the gradient of pi_t."""
    return row.log_probs - proximal_log_probs(row, kind)


def log_correction(row: Row, kind: str) -> jax.Array:
    """What a weight or mask looks at, `[U]`, without a gradient: log pi_p - log mu, or, where pi_p is mu, log pi_t - log mu."""
    target = row.log_probs if kind == "behaviour" else proximal_log_probs(row, kind)
    return jax.lax.stop_gradient(target) - row.behaviour


def safe_exp(log: jax.Array) -> jax.Array:
    """exp, with the argument held within ±20."""
    return jnp.exp(jnp.clip(log, -_LARGEST_LOG, _LARGEST_LOG))
