"""Weights that make responses of an earlier policy count as the current one's, for the drafter's loss.

The loss at a target looks at the context before it (the drafter reads hidden states and tokens up to there), not at the target
itself. What has to be corrected is therefore how likely the *earlier* response tokens were:

    prefix   prod over earlier tokens of pi / mu       exact: expectations under mu become those under pi
    token    pi / mu of the one token before            what the entry reads last; biased, with little variance
    none     1

Weights are cut at a cap (truncated importance sampling), which bounds their variance and biases them downwards.

Shapes: `M` rows, `U` targets a row.
"""

import jax
import jax.numpy as jnp

KINDS = ("none", "token", "prefix")


def target_weights(
    kind: str, cap: float, log_probs: jax.Array, behaviour: jax.Array, mask: jax.Array, rollout_index: jax.Array
) -> jax.Array:
    """Weight of each target, float32 `[M, U]`, at most `cap`, without a gradient; 1 at the first token of a response.

    Args:
        kind: one of `KINDS`.
        cap: > 0, may be infinite.
        log_probs: float32 `[M, U]`, of the law that hidden states belong to.
        behaviour: float32 `[M, U]`, of the law that drew the tokens.
        mask: bool `[M, U]`, False for padding.
        rollout_index: int32 `[M, U]`; the targets of a rollout lie side by side, in order.
    """
    if kind == "none":
        return jnp.ones(mask.shape, jnp.float32)
    delta = jax.lax.stop_gradient(jnp.where(mask, log_probs - behaviour, 0.0)).astype(jnp.float32)
    first = jnp.pad(rollout_index[:, 1:] != rollout_index[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    before = jnp.pad(delta, ((0, 0), (1, 0)))[:, :-1]
    log = jnp.where(first, 0.0, before)
    if kind == "prefix":
        # Sums that begin anew at each response: a scan over (sum, begins here) is associative and loses no digits to what
        # other responses of the row add up to.
        def add(a, b):
            return jnp.where(b[1], b[0], a[0] + b[0]), a[1] | b[1]

        log = jax.lax.associative_scan(add, (log, first), axis=1)[0]
    # Cut before the exponential: nothing overflows on the way.
    return jnp.exp(jnp.minimum(log, jnp.log(jnp.float32(cap))))
