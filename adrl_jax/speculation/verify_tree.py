"""Deciding which path of a draft tree stands, so that what comes out is distributed exactly as the target's own law.

`coupled`: at each node the target's token is argmax(log p + g), with the noise of its absolute position; the walk goes on
where a child has that token. The output is, token for token, what plain decoding gives, whatever the tree.

`rejection` (Miao et al. 2024, "SpecInfer", multi-step speculative sampling, here for children drawn without replacement as in
Jeon et al. 2024, "Recursive Speculative Decoding"): the children x1, x2, … of a node are tried one after the other. With q
the law left after removing earlier children and p the law left after earlier rejections, x stands with probability
min(1, p(x) / q(x)); where it falls, p becomes max(p - q, 0), renormalised. Where all fall the token is drawn from what is
left of p. The law is the target's as long as the tree's shape does not depend on what was drawn, see `tree`.

Shapes: `B` rows, `N` nodes, `D` the tree's depth, `V` vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, choose, log_law, race
from adrl_jax.sampling.noise import Role
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.speculation.tree import Tree
from adrl_jax.speculation.verify import Verdict


class Walk(NamedTuple):
    """What one verify pass commits, and which nodes it went through.

    Attributes:
        verdict: over `D + 1` tokens.
        path: int32 `[B, D + 1]`, the root and the accepted nodes; the first `verdict.count` of a row count. The token at
            place i was drawn at node `path[:, i]`.
        examined: bool `[B, D]`, whether drafts for level i + 1 were looked at: the walk came to level i and the tree goes on.
    """

    verdict: Verdict
    path: jax.Array
    examined: jax.Array


def coupled(
    logits: jax.Array,
    tree: Tree,
    strategy: Strategy,
    temperature: jax.Array,
    request_keys: jax.Array,
    length: jax.Array,
    law: Law,
) -> Walk:
    """Follows the target's own tokens.

    Args:
        logits: `[B, N, V]`, the target's at each node.
        strategy: the tree's, static.
        temperature: float32 `[B]`.
        request_keys: uint32 `[B, 2]`.
        length: int32 `[B]`, tokens committed: the root's children stand for this absolute position.
        law: static.
    """
    keys = noise.position_keys(request_keys, length[:, None] + tree.levels, Role.TARGET)
    return matching(*choose(logits, temperature, keys, law), tree, strategy)


def matching(own: jax.Array, log_probs: jax.Array, tree: Tree, strategy: Strategy) -> Walk:
    """`coupled` once the target's own token at each node (int32 `[B, N]`) and its log-prob are known."""
    drafted = tree.usable & (tree.levels > 0)
    stands = drafted & (tree.tokens == jnp.take_along_axis(own, tree.parents, axis=1))
    node, going = jnp.zeros_like(own[:, 0]), jnp.ones(own.shape[:1], bool)
    path, examined = [node], []
    for _ in range(strategy.depth):
        below = tree.parents == node[:, None]
        examined.append(going & jnp.any(below & drafted, axis=1))
        below &= stands
        going &= jnp.any(below, axis=1)
        node = jnp.where(going, jnp.argmax(below, axis=1), node).astype(jnp.int32)
        path.append(node)
    path = jnp.stack(path, axis=1)
    count = jnp.take_along_axis(tree.levels, node[:, None], axis=1)[:, 0] + 1
    own, log_probs = (jnp.take_along_axis(x, path, axis=1) for x in (own, log_probs))
    return Walk(Verdict(own, log_probs, count), path, jnp.stack(examined, axis=1))


def rejection(
    logits: jax.Array,
    tree: Tree,
    strategy: Strategy,
    temperature: jax.Array,
    request_keys: jax.Array,
    length: jax.Array,
    law: Law,
) -> Walk:
    """Tries the children of each node in turn. Arguments as in `coupled`; the tree must carry its laws."""
    log_p = log_law(logits, jnp.broadcast_to(temperature[:, None], tree.tokens.shape), law)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    drafted = tree.usable & (tree.levels > 0)
    # Unusable nodes come last among siblings, so those left are the first draws.
    rank = lambda below: jnp.cumsum(below, axis=1) - 1  # noqa: E731

    def at(x, place):
        return jnp.take_along_axis(x, place.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]

    def level(state, index):
        node, going = state
        log_p_here = at(log_p, node)
        p, q = jnp.exp(log_p_here), jnp.exp(at(tree.log_q, at(tree.law, node)))
        below = drafted & (tree.parents == node[:, None])
        examined, stood, fell = going & jnp.any(below, axis=1), jnp.zeros_like(going), jnp.zeros_like(going)
        token, after = jnp.zeros_like(node), node
        coins = _coins(request_keys, length + index, strategy.width)
        for tried in range(strategy.width):
            mine = below & (rank(below) == tried)
            child = jnp.argmax(mine, axis=1).astype(jnp.int32)
            draft = at(tree.tokens, child)
            stands = coins[:, tried] * at(q, draft) < at(p, draft)
            trying = jnp.any(mine, axis=1) & going & ~stood
            token, after = (jnp.where(trying & stands, new, old) for new, old in ((draft, token), (child, after)))
            stood, falls = stood | (trying & stands), trying & ~stands
            fell |= falls
            # Where p <= q everywhere (p = q up to rounding) nothing is left over, and any draw from p is right.
            p = jnp.where(falls[:, None], _normalised(jnp.maximum(p - q, 0.0), p), p)
            q = jnp.where(falls[:, None], _normalised(jnp.where(ids == draft[:, None], 0.0, q), q), q)
        fell &= ~stood
        residual_keys, target_keys = (
            noise.position_keys(request_keys, (length + index)[:, None], role)[:, 0] for role in (Role.RESIDUAL, Role.TARGET)
        )
        weights = jnp.where(fell[:, None], jnp.log(p), log_p_here)
        own = race(weights - jnp.max(weights, axis=-1, keepdims=True), jnp.where(fell[:, None], residual_keys, target_keys))
        token = jnp.where(stood, token, own)
        return (after, stood), (node, token, at(log_p_here, token), examined, stood)

    start = jnp.zeros_like(length), jnp.ones(length.shape, bool)
    steps = jnp.arange(strategy.depth + 1, dtype=jnp.int32)
    _, outputs = jax.lax.scan(level, start, steps)
    path, tokens, log_probs, examined, stood = (x.swapaxes(0, 1) for x in outputs)
    count = jnp.sum(stood, axis=1, dtype=jnp.int32) + 1
    return Walk(Verdict(tokens, log_probs, count), path, examined[:, :-1])


def _coins(request_keys: jax.Array, positions: jax.Array, count: int) -> jax.Array:
    """Uniform numbers in [0, 1), one for each child: float32 `[B, count]`; the first is `noise.uniform` of the position."""
    keys = noise.position_keys(request_keys, positions[:, None], Role.ACCEPT)[:, 0]
    return (noise.bits(keys, count) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _normalised(weights: jax.Array, otherwise: jax.Array) -> jax.Array:
    """`weights` `[B, V]` with sum 1; rows without any weight are `otherwise`."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(total > 0, weights / total, otherwise)
