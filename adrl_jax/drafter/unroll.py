"""The drafter's predictions at every depth of a draft, on packed rows (EAGLE-3, arXiv 2503.01840, §3.2: training-time test).

Serving feeds predictions back: only the first draft is made from true hidden states alone. The draft at depth d + 1 reads the
prediction made at depth d, and attends to true entries up to where the draft began and to the d fed-back ones after it. Here
the same happens to all places at once, along the tokens that were really sampled (what an accepted draft consists of).

    guess 0 at target u:      from true hidden states, predicts the hidden state whose law draws target u
    guess k at target u + 1:  from (guess k - 1 at target u, target u), likewise for target u + 1

Depths past the first need no entries but those of response tokens, so they run over targets `[M, U]`, not over places `[M, T]`,
and the predecessor of a target is the column before.

Shapes: `M` rows, `T` places, `U` targets a row, `H` hidden size, `D` depths; heads as in `models.transformer`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from adrl_jax.learner.attention import Reach, packed_attention
from adrl_jax.learner.forward import source_hidden
from adrl_jax.models.families import ModelConfig
from adrl_jax.speculation import eagle
from adrl_jax.types import PackedBatch

_FAR = -1e30


def guesses(
    drafter_params: Any,
    params: Any,
    config: ModelConfig,
    hidden: jax.Array,
    batch: PackedBatch,
    depths: int,
    reach: Reach | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Predicted hidden states of every target at draft depths 1 … `depths`.

    Args:
        params: the target's; only its embedding is read.
        config: the target's.
        hidden: `[M, T, H]`, true final-norm hidden states (stop their gradient before).
        depths: static, >= 1.
        reach: see `learner.attention.reach_of`; None meets every key.

    Returns:
        `[D, M, U, H]` and a mask bool `[D, M, U]`: depth d + 1 exists from the d-th token of a response on (a draft never
        begins inside a prompt), and a prompt of one token has no entry from which its first response token could be guessed.
    """
    segments = eagle.entry_segments(batch.segment_ids)
    packed = packed_attention(segments, batch.branch_ids, batch.positions, reach=reach)

    def remembering(q, k, v, *, layer, window, cache):
        return packed(q, k, v, layer=layer, window=window, cache=None)[0], (k, v)

    predicted, true_entries = eagle.packed_forward(
        drafter_params,
        params,
        config,
        hidden,
        batch.token_ids,
        batch.positions,
        remembering,
        sources=eagle.packed_sources(batch.token_ids.shape[1], batch.source_index, batch.target_index, batch.target_mask),
    )
    guess = source_hidden(predicted, batch)
    usable = batch.target_mask & (_at(segments, batch.source_index) != 0)
    found, masks = [guess], [usable]
    again = _shift(batch.target_mask) & batch.target_mask & (_shift(batch.rollout_index) == batch.rollout_index)
    fed_back: tuple = ()
    for depth in range(1, depths):
        attend = _chain_attention(true_entries, _seen(batch, segments, depth))
        guess, fed_back = eagle.predict(
            drafter_params, params, config, guess, batch.target_ids, _at(batch.positions, batch.source_index), attend, fed_back
        )
        # What was made of target u serves target u + 1.
        guess, fed_back = _shift(guess), jax.tree.map(_shift, fed_back)
        usable = _shift(usable) & again
        found.append(guess)
        masks.append(usable)
    return jnp.stack(found), jnp.stack(masks)


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, places, axis=1)


def _shift(x: jax.Array) -> jax.Array:
    """Each column's predecessor along the second axis; zeros (False) in the first."""
    return jnp.pad(x, [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))[:, :-1]


def _seen(batch: PackedBatch, segments: jax.Array, depth: int) -> jax.Array:
    """Which true entries a fed-back entry of a target may attend to, bool `[M, U, T]`: those of its own sequence that lie at
    least `depth` tokens before it."""
    segment, branch, position = (_at(x, batch.target_index)[:, :, None] for x in (segments, batch.branch_ids, batch.positions))
    of_places = (x[:, None, :] for x in (segments, batch.branch_ids, batch.positions))
    key_segment, key_branch, key_position = of_places
    seen = (segment == key_segment) & (segment != 0) & (key_position <= position - depth)
    return seen & ((key_branch == 0) | (key_branch == branch))


def _chain_attention(true_entries: tuple[jax.Array, jax.Array], seen: jax.Array):
    """An `attend` whose queries see true entries where `seen` says so, and one fed-back entry of each earlier depth.

    Its cache is a tuple of (keys, values) `[M, U, K, D]`, one of each depth so far, in the columns of the queries.
    """
    keys, values = true_entries

    def attend(q, k, v, *, layer, window, cache):
        cache = (*cache, (k, v))
        rows, targets, heads, dim = q.shape
        q = q.reshape(rows, targets, k.shape[2], -1, dim)
        scores = jnp.einsum("mukgd,mtkd->mkugt", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(seen[:, None, :, None], scores, _FAR)
        own = [jnp.einsum("mukgd,mukd->mkug", q, own, preferred_element_type=jnp.float32) for own, _ in cache]
        weights = jax.nn.softmax(jnp.concatenate([scores, jnp.stack(own, axis=-1)], axis=-1), axis=-1).astype(v.dtype)
        places = keys.shape[1]
        out = jnp.einsum("mkugt,mtkd->mukgd", weights[..., :places], values)
        for i, (_, value) in enumerate(cache):
            out += weights[..., places + i].transpose(0, 2, 1, 3)[..., None] * value[:, :, :, None]
        return out.reshape(rows, targets, heads, dim), cache

    return attend
