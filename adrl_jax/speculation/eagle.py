"""EAGLE drafter: one decoder layer that predicts the target's next hidden state (Li et al. 2024, "EAGLE: Speculative Sampling
Requires Rethinking Feature Uncertainty").

One *entry* of the drafter's sequence fuses the target's hidden state at a place with the embedding of the token that follows:

    entry e = (hidden state e, token e + 1, rotary position e)  ->  predicted hidden state e + 1  ->  law of token e + 2

`inputs` builds these triples for serving and for training alike. The embedding and the vocabulary projection are the
target's own and never trained here; the drafter's parameters are the fusing projection and the layer.

With a *draft vocabulary* (EAGLE-3, arXiv 2503.01840, speaks of a reduced one) only some ids are ever drafted: a map of them,
`draft_ids`, stands beside the parameters, is chosen once and never trained, and serving keeps the current target's
projections of these ids next to each other. A token outside the map costs an accepted draft, never correctness.

Shapes: `B` rows, `S` token capacity, `W` entries, `H` hidden size, `V` vocabulary, `V'` draft vocabulary; packed training rows
are `[M, T]`.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from adrl_jax.models import kernel_attention
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import KVCache, cached_attention, init_cache
from adrl_jax.models.projection import project
from adrl_jax.models.transformer import Attend, DecoderLayer, Dense, embed_tokens, logits, model_ropes
from adrl_jax.speculation.drafter import Draw, Proposal, draft_chain, grow_cache
from adrl_jax.speculation.fusion import FUSE, fused

DRAFT_IDS = "draft_ids"
"""Key of the map among a drafter's parameters: int32 `[V']`, distinct ids, ascending."""

DRAFT_HEAD = "draft_head"
"""Key of the served projection of these ids, `[V', H]`: the target's own rows, copied when a target is published."""


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
    return dataclasses.replace(config, num_layers=1, sliding_window=None, taps=())


def split(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is trained, and what is not (the map, where there is one). `trained | fixed` puts them together again.

    Gradients and optimizers see the first part only.
    """
    fixed = {name: params[name] for name in (DRAFT_IDS,) if name in params}
    return {name: value for name, value in params.items() if name not in (DRAFT_IDS, DRAFT_HEAD)}, fixed


@jax.jit
def head_rows(target_params: Any, ids: jax.Array) -> jax.Array:
    """The target's vocabulary projection of some ids, `[V', H]`: differentiable in nothing but the target."""
    if "head" in target_params:
        return target_params["head"][:, ids].T
    return target_params.get("head_t", target_params["embedding"])[ids]


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
    cache: Any = None,
) -> tuple[jax.Array, Any]:
    """Predicted hidden states of packed rows, for training.

    The result at place i is the prediction of `hidden[i]`, so `logits` of it is the drafter's law for the token after i.

    Args:
        config: the target's.
        hidden: `[M, T, H]`, the target's final-norm hidden states (stop their gradient before).
        token_ids, positions: int32 `[M, T]`, as in `PackedBatch`.
        attend: packed attention whose segment ids are `entry_segments(segment_ids)`.
        sources: int32 `[M, T]` from `packed_sources`; None where no prefix is shared: the place before.
        cache: any pytree, handed to `attend`.

    Returns:
        `[M, T, H]` in the compute dtype, and the cache.
    """
    rows, length = token_ids.shape
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    sources = jnp.maximum(place - 1, 0) if sources is None else sources
    features, ids, at = inputs(hidden, token_ids, positions, sources, place)
    return predict(params, target_params, config, features, ids, at, attend, cache)


def predict(
    params: Any,
    target_params: Any,
    config: ModelConfig,
    features: jax.Array,
    token_ids: jax.Array,
    positions: jax.Array,
    attend: Attend,
    cache: Any,
) -> tuple[jax.Array, Any]:
    """The layer on triples that `inputs` builds (or on predictions put in the place of hidden states).

    Args:
        config: the target's.
        features: `[B, W, H]`; true hidden states of a target with taps are wider, and are fused first (`fusion`).
        token_ids, positions: int32 `[B, W]`.
        attend, cache: as in `Transformer`.

    Returns:
        predicted hidden states `[B, W, H]` and the cache.
    """
    if FUSE in params and features.shape[-1] != config.hidden_size:
        features = fused(params, features, config)
    embeddings = embed_tokens(target_params["embedding"], token_ids, config)
    layer = EagleLayer(layer_config(config))
    return layer.apply({"params": split(params)[0]}, features, embeddings, positions, attend=attend, cache=cache)


@dataclasses.dataclass(frozen=True)
class Eagle:
    """The drafter; see the module's docstring and `drafter.Drafter`.

    Attributes:
        config: the target's sizes and traits.
        draft_vocab_size: V', how many ids may be drafted; None drafts any, and then the parameters hold no map.
        kernels: who computes the attention of a chain's passes, see `adrl_kernels.choice`; not `auto`. An engine sets it.
    """

    config: ModelConfig
    name: str = "eagle"
    uses_hidden: bool = True
    draft_vocab_size: int | None = None
    kernels: str = "xla"

    def __post_init__(self):
        size, vocab = self.draft_vocab_size, self.config.vocab_size
        if size is not None and not 1 <= size <= vocab:
            raise ValueError(f"Eagle.draft_vocab_size={size!r} must be in [1, {vocab}], the target's vocab_size, or None")

    taps = ()  # no field: layers of the target that are read beside the last, see `eagle3`

    @property
    def target(self) -> ModelConfig:
        """The target's config, asking for what this drafter reads of it."""
        return dataclasses.replace(self.config, taps=self.taps)

    def init_params(self, key: jax.Array) -> Any:
        """Fresh parameters `{fc, layer}`, float32, drawn with `key` (consumed); with a draft vocabulary also `draft_ids`, the
        lowest ids until better ones are known."""
        c = self.config
        x = jnp.zeros((1, 2, c.hidden_size), c.compute_dtype)
        layer = EagleLayer(layer_config(c))
        attend = lambda q, k, v, *, layer, window, cache: (q, cache)  # noqa: E731
        params = layer.init(key, x, x, jnp.zeros((1, 2), jnp.int32), attend=attend)["params"]
        if self.draft_vocab_size is None:
            return params
        return {**params, DRAFT_IDS: jnp.arange(self.draft_vocab_size, dtype=jnp.int32)}

    def serve(self, params: Any, target_params: Any) -> Any:
        """`params` as the engine reads them: with a draft vocabulary, `draft_head` taken from the target that is served.

        Args:
            params, target_params: best in `transformer.engine_layout`.

        Raises:
            ValueError: the map is missing, or has another length than `draft_vocab_size`.
        """
        ids = params.get(DRAFT_IDS)
        found = None if ids is None else ids.shape[0]
        if found != self.draft_vocab_size:
            raise ValueError(
                f"{DRAFT_IDS} of the drafter's parameters has {found} ids, draft_vocab_size={self.draft_vocab_size}"
            )
        if ids is None:
            return params
        head = head_rows(target_params, ids.astype(jnp.int32)).astype(self.config.compute_dtype)
        return {**params, DRAFT_IDS: ids.astype(jnp.int32), DRAFT_HEAD: head}

    def draft_logits(self, params: Any, target_params: Any, feature: jax.Array) -> jax.Array:
        """The drafter's logits at predicted hidden states.

        With a draft vocabulary only `V' x H` weights are read, and the logits of all other ids are -inf.

        Args:
            params: best as `serve` returns them; without `draft_head` its rows are gathered here, which costs more.
            feature: `[..., H]`.

        Returns:
            `[..., V]`, at least float32.
        """
        if DRAFT_IDS not in params:
            return logits(target_params, feature)
        ids, head = params[DRAFT_IDS], params.get(DRAFT_HEAD)
        scores = project(feature, head_rows(target_params, ids) if head is None else head)
        scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
        everywhere = jnp.full((*feature.shape[:-1], self.config.vocab_size), -jnp.inf, scores.dtype)
        # On CPU this scatter costs a tenth of what drawing a token does, and less than a gather by the inverse map at batch 1.
        return everywhere.at[..., ids].set(scores, unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds")

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
        # Another drafter beside this one may read more layers.
        hidden = hidden[..., : self.target.hidden_channels]
        features, ids, _ = inputs(hidden, tokens, places, entries, entries + 1)
        predicted, cache = predict(
            params, target_params, self.config, features, ids, entries, self._attention(entries), state.cache
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
            feature, cache = predict(
                params, target_params, self.config, feature, ids, positions, self._attention(positions), cache
            )
            return self.draft_logits(params, target_params, feature), (feature, cache)

        feature = state.feature[:, None]
        first = self.draft_logits(params, target_params, feature)
        drafts, log_q, (_, cache) = draft_chain(first, step, (feature, state.cache), length, draw, depth)
        complete = (state.length == length - 1) & (length >= 2)
        count = jnp.where(complete, depth, 0).astype(jnp.int32)
        return Proposal(drafts, count, log_q), state._replace(cache=cache)

    def _attention(self, positions: jax.Array) -> Attend:
        """Over what a row's entries see. Catching up on more entries than a verify pass has nodes is a prefill: XLA's."""
        if self.kernels == "xla" or positions.shape[1] > kernel_attention.MAX_TOKENS:
            return cached_attention(positions)
        return kernel_attention.chain_attention(positions, self.kernels)
