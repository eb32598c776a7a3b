"""How token losses become one loss: weights of targets and a denominator, both from masks and lengths alone.

So gradients of numerators add up over any split, and the one division comes last. The denominator counts what was packed,
before any rejection mask: a rejected token contributes 0 to the numerator and is still counted (AReaL's convention; verl's
`masked_mean` would make the surviving tokens' steps larger).
"""

import chex
import jax
import jax.numpy as jnp

from adrl_jax.learner.sequences import sequence_lengths

AGGREGATIONS = ("token", "sequence", "sequence_sum", "constant", "group")


def aggregation_weights(
    rollout_index: jax.Array,
    mask: jax.Array,
    kind: str,
    constant_length: int | None = None,
    group_index: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weights of the targets of a row, float32 `[U]`, and the row's share of the denominator.

    * `token`: mean over all tokens of the optimizer batch (DAPO, arXiv 2503.14476, eq. 8).
    * `sequence`: mean over responses of each one's token mean (GRPO, arXiv 2402.03300, eq. 3).
    * `sequence_sum`: mean over responses of each one's token sum (REINFORCE on whole responses, RLOO).
    * `constant`: as `sequence_sum`, divided by `constant_length` (Dr. GRPO, arXiv 2503.20783).
    * `group`: mean over groups of each one's token mean (ScaleRL's prompt mean, arXiv 2510.13786). Needs `group_index`, and
      groups that packing keeps in one row.

    For token losses [1] and [3, 3, 3] they give 2.5, 2.0, 5.0 and, with length 4, 1.25; 2.5 where both are one group.
    """
    chex.assert_equal_shape([rollout_index, mask])
    present = mask.astype(jnp.float32)
    if kind == "token":
        return present, jnp.sum(present)
    if kind == "group":
        per_group = present / sequence_lengths(group_index, mask)
        return per_group, jnp.sum(per_group)
    per_sequence = present / sequence_lengths(rollout_index, mask)
    if kind == "sequence":
        return per_sequence, jnp.sum(per_sequence)
    if kind == "sequence_sum":
        return present, jnp.sum(per_sequence)
    if kind == "constant":
        # Every sequence contributes its own tokens' 1 / length, that is 1, times the agreed length.
        return present, jnp.sum(per_sequence) * constant_length
    raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
