"""Draft trees of the EAGLE drafter.

A node's entry fuses its parent's predicted hidden state with the node's token, at the rotary position of its level, and sees
the row's entries and its ancestors'. The entries of nodes are kept beside the drafter's cache and forgotten afterwards:
`Eagle.advance` fills in the true ones.

Shapes: `B` rows, `W` the strategy's width, `F = (depth - 1) W` nodes that are extended below the root, `H` hidden size.
"""

from typing import Any

import jax
import jax.numpy as jnp

from adrl_jax.models.kv_cache import TreeCache, init_cache, tree_attention
from adrl_jax.speculation import eagle
from adrl_jax.speculation.eagle import Eagle, EagleState
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.speculation.tree import Branch, Tree, draft_tree


def propose_tree(
    drafter: Eagle,
    params: Any,
    target_params: Any,
    state: EagleState,
    tokens: jax.Array,
    length: jax.Array,
    branch: Branch,
    weights: jax.Array,
    strategy: Strategy,
) -> Tree:
    """Drafts a tree a row.

    Args:
        state: after `Eagle.advance`; it stays as it is. Rows whose entries are not complete get trees of which nothing is
            usable.
        tokens: int32 `[B, S]`.
        length: int32 `[B]`.
        branch, weights: as in `draft_tree`.
    """
    width, config = strategy.width, eagle.layer_config(drafter.config)
    batch, nodes = length.shape[0], max((strategy.depth - 1) * width, 1)
    root = length - 1
    slots = jnp.arange(nodes, dtype=jnp.int32)
    fresh_positions = root[:, None] + slots // width

    def step(carry, ids, parents, index):
        features, sees, cache = carry
        features = jnp.take_along_axis(features, parents[..., None], axis=1)
        own = index * width + jnp.arange(width, dtype=jnp.int32)
        sees = jnp.take_along_axis(sees, parents[..., None], axis=1) | (slots == own[:, None])
        positions = jnp.broadcast_to((root + index)[:, None], ids.shape)
        attend = tree_attention(positions, root, sees, fresh_positions, index * width)
        features, cache = eagle.predict(params, target_params, drafter.config, features, ids, positions, attend, cache)
        return drafter.draft_logits(params, target_params, features), (features, sees, cache)

    features = jnp.broadcast_to(state.feature[:, None], (batch, width, state.feature.shape[-1]))
    cache = TreeCache(state.cache, init_cache(config, batch, nodes))
    carry = features, jnp.zeros((batch, width, nodes), bool), cache
    first = drafter.draft_logits(params, target_params, state.feature)
    last = jnp.take_along_axis(tokens, root[:, None], axis=1)[:, 0]
    tree, _ = draft_tree(first, step, carry, last, length, branch, weights, strategy)
    complete = (state.length == length - 1) & (length >= 2)
    return tree._replace(usable=tree.usable & complete[:, None], bad=tree.bad & complete)
