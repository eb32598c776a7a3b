"""Policy losses as (numerator, denominator) over the whole optimizer batch, composed from small pure pieces.

The pieces work on one row of targets, `[U]`; callers `vmap`. A loss is

    sum over targets of  aggregation weight x surrogate  /  denominator,

whose denominator depends on masks and lengths alone, so gradients of numerators add up over any split and are divided once.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from adrl_jax.learner import importance

AGGREGATIONS = ("token", "sequence", "constant")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """GRPO's knobs.

    Attributes:
        clip_low, clip_high: the ratio pi / mu is clipped to [1 - clip_low, 1 + clip_high] (asymmetric: DAPO).
        aggregation: `token` (mean over all tokens of the optimizer batch), `sequence` (mean over sequences of each one's
            token mean) or `constant` (sum over tokens / (sequences x `constant_length`), Dr. GRPO).
        constant_length: tokens, required with and only with `constant`.
        entropy_coef: entropy bonus, in units of the loss a nat.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: str = "token"
    constant_length: int | None = None
    entropy_coef: float = 0.0

    def __post_init__(self):
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low={self.clip_low!r} must be in (0, 1]")
        if not self.clip_high > 0:
            raise ValueError(f"clip_high={self.clip_high!r} must be positive")
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation={self.aggregation!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
        if (self.constant_length is not None) != (self.aggregation == "constant"):
            raise ValueError(
                f"constant_length={self.constant_length!r} with aggregation={self.aggregation!r}: "
                "constant_length is required with aggregation='constant' and has no meaning otherwise"
            )
        if self.constant_length is not None and self.constant_length < 1:
            raise ValueError(f"constant_length={self.constant_length!r} must be a positive integer")
        if not 0 <= self.entropy_coef < float("inf"):
            raise ValueError(f"entropy_coef={self.entropy_coef!r} must be finite and >= 0")


class Loss(NamedTuple):
    """A loss before its only division.

    Attributes:
        numerator, denominator: float32 scalars; the loss is their quotient (0 where the denominator is 0).
        sums: named float32 scalars that add up over rows, microbatches and devices.
        maxima: named float32 scalars of which the largest counts.
    """

    numerator: jax.Array
    denominator: jax.Array
    sums: dict
    maxima: dict


def clipped_surrogate(log_ratio: jax.Array, advantages: jax.Array, low: float, high: float) -> jax.Array:
    """PPO's -min(r A, clip(r, 1 - low, 1 + high) A) a token, `[U]`; arXiv 1707.06347, eq. 7."""
    chex.assert_equal_shape([log_ratio, advantages])
    # Beyond e^20 the ratio carries no information, and an overflow would turn a clipped gradient into 0 * inf.
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


def sequence_numbers(rollout_index: jax.Array, mask: jax.Array) -> jax.Array:
    """Numbers the sequences of a row 0, 1, … in order of appearance, int32 `[U]`; padding joins the last one.

    A response lies in one row and its targets lie side by side, so a sequence begins where the owner changes.
    """
    chex.assert_rank([rollout_index, mask], 1)
    changes = (rollout_index[1:] != rollout_index[:-1]) & mask[1:]
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(changes, dtype=jnp.int32)])


def sequence_lengths(rollout_index: jax.Array, mask: jax.Array) -> jax.Array:
    """For each target the number of unmasked targets of its sequence, float32 `[U]`, at least 1."""
    numbers = sequence_numbers(rollout_index, mask)
    counts = jax.ops.segment_sum(mask.astype(jnp.float32), numbers, mask.shape[0])
    return jnp.maximum(counts[numbers], 1.0)


def aggregation_weights(
    rollout_index: jax.Array, mask: jax.Array, kind: str, constant_length: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Weights of the targets of a row, float32 `[U]`, and the row's share of the denominator.

    For token losses [1] and [3, 3, 3] the three kinds give 2.5, 2.0 and, with length 4, 1.25.
    """
    chex.assert_equal_shape([rollout_index, mask])
    present = mask.astype(jnp.float32)
    per_sequence = present / sequence_lengths(rollout_index, mask)
    if kind == "token":
        return present, jnp.sum(present)
    if kind == "sequence":
        return per_sequence, jnp.sum(per_sequence)
    if kind == "constant":
        # Every sequence contributes its own tokens' 1 / length, that is 1, times the agreed length.
        return present, jnp.sum(per_sequence) * constant_length
    raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")


def grpo(config: LossConfig, log_probs, entropy, behaviour, advantages, mask, rollout_index) -> Loss:
    """GRPO on one row of targets, `[U]` each; arXiv 2402.03300, eq. 3 without the reference term.

    Args:
        log_probs: float32, of the current policy, at the sampling temperature.
        entropy: float32, of the current law, nats.
        behaviour: float32, log-probs stored when the tokens were drawn.
        advantages: float32.
        mask: bool, False for padding.
        rollout_index: int32, which rollout a target belongs to.
    """
    chex.assert_rank([log_probs, entropy, behaviour, advantages, mask, rollout_index], 1)
    delta = importance.log_ratio(log_probs, behaviour, mask)
    token_loss = clipped_surrogate(delta, jnp.where(mask, advantages, 0.0), config.clip_low, config.clip_high)
    if config.entropy_coef:
        token_loss = token_loss - config.entropy_coef * entropy
    weights, denominator = aggregation_weights(rollout_index, mask, config.aggregation, config.constant_length)
    numerator = jnp.sum(jnp.where(mask, weights * token_loss, 0.0))
    sums, maxima = importance.diagnostic_sums(log_probs, behaviour, mask)
    # Clipping acts only where it lowers the objective: above for good tokens, below for bad ones.
    sums["clip_high"] = _count(mask & (delta > jnp.log1p(config.clip_high)) & (advantages > 0))
    sums["clip_low"] = _count(mask & (jnp.exp(delta) < 1 - config.clip_low) & (advantages < 0))
    sums["entropy"] = jnp.sum(jnp.where(mask, entropy, 0.0))
    return Loss(numerator, denominator, sums, maxima)


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
    if "weight" in loss.sums:
        out |= importance.diagnostics(loss.sums, loss.maxima)
        out |= {"clip_frac_high": loss.sums["clip_high"] / n, "clip_frac_low": loss.sums["clip_low"] / n}
    return out


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)
