"""EAGLE drafter: one decoder layer that predicts the target's next hidden state (Li et al. 2024, "EAGLE: Speculative Sampling
Requires Rethinking Feature Uncertainty").

One *entry* of the drafter's sequence fuses the target's hidden state at a place with the embedding of the token that follows:

    entry e = (hidden state e, token e + 1, rotary position e)  ->  predicted hidden state e + 1  ->  law of token e + 2

`inputs` builds these triples for serving and for training alike. The embedding and the vocabulary projection are the
target's own and never trained here; the drafter's parameters are the fusing projection and the layer.

Shapes: `B` rows, `S` token capacity, `W` entries, `H` hidden size, `V` vocabulary; packed training rows are `[M, T]`.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import KVCache, cached_attention, init_cache
from adrl_jax.models.transformer import Attend, DecoderLayer, Dense, embed_tokens, logits, model_ropes
from adrl_jax.speculation.drafter import Draw, Proposal, draft_chain, grow_cache


class EagleState(NamedTuple):
    """What the drafter remembers of each row.

    Attributes:
        cache: keys and values of the single layer, one slot an entry.
        feature: `[B, H]`, the predicted hidden state of the last filled entry.
        length: int32 `[B]`, filled entries; a row of n tokens has n - 1 when complete.
    """

    cache: KVCache
    feature: jax.Array
    length: jax.Array


class EagleLayer(nn.Module):
    """Fused inputs to predicted hidden states."""

    config: ModelConfig

    @nn.compact
    def __call__(self, features: jax.Array, embeddings: jax.Array, positions: jax.Array, *, attend: Attend, cache: Any = None):
        """Args: features, embeddings `[B, W, H]`; positions int32 `[B, W]`. Returns `[B, W, H]` and the cache."""
        c = self.config
        x = jnp.concatenate([embeddings, features.astype(embeddings.dtype)], axis=-1)
        x = Dense(c.hidden_size, name="fc")(x)
        rope = model_ropes(c, positions)[0]
        return DecoderLayer(c, skip_input_norm=True, name="layer")(x, rope, attend=attend, layer=0, cache=cache)


def layer_config(config: ModelConfig) -> ModelConfig:
    """The target's family with one layer that sees its whole row."""
    return dataclasses.replace(config, num_layers=1, sliding_window=None)


def inputs(
    hidden: jax.Array, token_ids: jax.Array, positions: jax.Array, source: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The triples of the entries whose tokens lie at `place` and whose hidden states lie at `source`.

    Args:
        hidden: `[B, S, H]`, the target's final-norm hidden states.
        token_ids, positions: int32 `[B, S]`.
        source: int32 `[B, W]`, the place before `place` in the token's own sequence.
        place: int32 `[B, W]`.

    Returns:
        hidden states `[B, W, H]`, token ids and rotary positions int32 `[B, W]` each.
    """

    def gather(x, at):
        return jnp.take_along_axis(x, jnp.clip(at, 0, x.shape[1] - 1), axis=1)

    features = jnp.take_along_axis(hidden, jnp.clip(source, 0, hidden.shape[1] - 1)[..., None], axis=1)
    return features, gather(token_ids, place), gather(positions, source)


def packed_sources(length: int, source_index: jax.Array, target_index: jax.Array, target_mask: jax.Array) -> jax.Array:
    """Each place's predecessor in its own sequence, int32 `[M, T]`, from a `PackedBatch`'s `[M, U]` index fields.

    That is the place before, except for first response tokens, whose predecessor is the (shared) last prompt token. The first
    token of a segment has none; its value here means nothing, see `entry_segments`.
    """
    rows = target_index.shape[0]
    before = jnp.broadcast_to(jnp.maximum(jnp.arange(length, dtype=jnp.int32) - 1, 0), (rows, length))
    at = jnp.where(target_mask, target_index, length)
    return before.at[jnp.arange(rows)[:, None], at].set(source_index, mode="drop")


def entry_segments(segment_ids: jax.Array) -> jax.Array:
    """Segment ids `[M, T]` of the entries at each place: 0 (padding) at the first token of a segment, which has no entry."""
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(segment_ids == before, segment_ids, 0)


def packed_forward(
    params: Any,
    target_params: Any,
    config: ModelConfig,
    hidden: jax.Array,
    token_ids: jax.Array,
    positions: jax.Array,
    attend: Attend,
    *,
    sources: jax.Array | None = None,
) -> jax.Array:
    """Predicted hidden states of packed rows, for training.

    The result at place i is the prediction of `hidden[i]`, so `logits` of it is the drafter's law for the token after i.

    Args:
        config: the target's.
        hidden: `[M, T, H]`, the target's final-norm hidden states (stop their gradient before).
        token_ids, positions: int32 `[M, T]`, as in `PackedBatch`.
        attend: packed attention whose segment ids are `entry_segments(segment_ids)`.
        sources: int32 `[M, T]` from `packed_sources`; None where no prefix is shared: the place before.

    Returns:
        `[M, T, H]` in the compute dtype.
    """
    rows, length = token_ids.shape
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    sources = jnp.maximum(place - 1, 0) if sources is None else sources
    features, ids, at = inputs(hidden, token_ids, positions, sources, place)
    return _predict(params, target_params, config, features, ids, at, attend, None)[0]


def _predict(params, target_params, config, features, ids, positions, attend, cache):
    embeddings = embed_tokens(target_params["embedding"], ids, config)
    variables = {"params": params}
    return EagleLayer(layer_config(config)).apply(variables, features, embeddings, positions, attend=attend, cache=cache)


@dataclasses.dataclass(frozen=True)
class Eagle:
    """The drafter; see the module's docstring and `drafter.Drafter`.

    Attributes:
        config: the target's sizes and traits.
    """

    config: ModelConfig
    name: str = "eagle"
    uses_hidden: bool = True

    def init_params(self, key: jax.Array) -> Any:
        """Fresh parameters `{fc, layer}`, float32, drawn with `key` (consumed)."""
        c = self.config
        x = jnp.zeros((1, 2, c.hidden_size), c.compute_dtype)
        layer = EagleLayer(layer_config(c))
        return layer.init(key, x, x, jnp.zeros((1, 2), jnp.int32), attend=lambda q, k, v, *, layer, window, cache: (q, cache))[
            "params"
        ]

    def init_state(self, batch: int, capacity: int) -> EagleState:
        c = self.config
        return EagleState(
            init_cache(layer_config(c), batch, capacity),
            jnp.zeros((batch, c.hidden_size), c.compute_dtype),
            jnp.zeros(batch, jnp.int32),
        )

    def grow(self, state: EagleState, capacity: int) -> EagleState:
        return state._replace(cache=grow_cache(state.cache, capacity))

    def advance(self, params, target_params, state, tokens, length, hidden, width) -> EagleState:
        """Fills entries from the target's true hidden states, over whatever earlier drafts left there."""
        batch, capacity = tokens.shape
        width = min(width, state.cache.capacity)
        # Near the end of a row start earlier, so that no write is slid back; entries filled before are computed again.
        start = jnp.minimum(state.length, state.cache.capacity - width)
        entries = start[:, None] + jnp.arange(width, dtype=jnp.int32)
        places = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (batch, capacity))
        features, ids, _ = inputs(hidden, tokens, places, entries, entries + 1)
        predicted, cache = _predict(
            params, target_params, self.config, features, ids, entries, cached_attention(entries), state.cache
        )
        filled = jnp.clip(start + width, state.length, jnp.maximum(length - 1, state.length))
        last = jnp.clip(filled - 1 - start, 0, width - 1)
        feature = jnp.take_along_axis(predicted, last[:, None, None], axis=1)[:, 0]
        feature = jnp.where((filled > state.length)[:, None], feature, state.feature)
        return EagleState(cache, feature, filled)

    def propose(
        self, params, target_params, state, tokens, length, hidden, draw: Draw, depth: int
    ) -> tuple[Proposal, EagleState]:
        """Feeds its own predictions back as hidden states."""

        def step(carry, ids, index):
            feature, cache = carry
            positions = (length - 1 + index)[:, None]
            feature, cache = _predict(
                params, target_params, self.config, feature, ids, positions, cached_attention(positions), cache
            )
            return logits(target_params, feature), (feature, cache)

        feature = state.feature[:, None]
        drafts, log_q, (_, cache) = draft_chain(
            logits(target_params, feature), step, (feature, state.cache), length, draw, depth
        )
        complete = (state.length == length - 1) & (length >= 2)
        count = jnp.where(complete, depth, 0).astype(jnp.int32)
        return Proposal(drafts, count, log_q), state._replace(cache=cache)
