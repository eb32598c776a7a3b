"""An independent small model as drafter, with its own cache and its own positions.

Shapes: `B` rows, `S` token capacity, `V` the target's vocabulary size.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import KVCache, cached_attention, init_cache
from adrl_jax.models.transformer import Transformer, init_params, logits
from adrl_jax.speculation.drafter import Draw, Proposal, draft_chain, grow_cache


class ModelState(NamedTuple):
    """What the drafter remembers of each row.

    Attributes:
        cache: its own keys and values, one slot a token.
        feature: `[B, H']`, its own final hidden state after the last filled token.
        length: int32 `[B]`, filled tokens; a row of n tokens has n when complete.
    """

    cache: KVCache
    feature: jax.Array
    length: jax.Array


def check_compatible(target: Any, drafter: Any, target_vocab: int, drafter_vocab: int) -> None:
    """Refuses a drafter that does not speak the target's language.

    Args:
        target, drafter: tokenizers, with `name`, `size` and `fingerprint()`.
        target_vocab, drafter_vocab: rows of the embedding tables, which may exceed the tokenizer's size, each its own way.

    Raises:
        ValueError: the tokenizers differ, or a table is smaller than the tokenizer.
    """
    if target.fingerprint() != drafter.fingerprint():
        raise ValueError(
            f"the drafter's tokenizer {drafter.name!r} ({drafter.size} ids) is not the target's {target.name!r} "
            f"({target.size} ids); a draft model must share the target's tokenizer"
        )
    for which, vocab in (("target", target_vocab), ("drafter", drafter_vocab)):
        if vocab < target.size:
            raise ValueError(f"the {which}'s vocab_size={vocab} is smaller than the tokenizer's {target.size} ids")


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """The drafter; see `drafter.Drafter`. Its params are a `Transformer`'s, best in `transformer.engine_layout`.

    Attributes:
        config: the small model's sizes and traits.
        target_vocab: the target's vocabulary size V. The drafter's logits are cut or padded (with -inf) to it.
    """

    config: ModelConfig
    target_vocab: int
    name: str = "model"
    uses_hidden: bool = False

    def init_params(self, key: jax.Array) -> Any:
        """Fresh parameters, float32, drawn with `key` (consumed)."""
        return init_params(self.config, key)

    def init_state(self, batch: int, capacity: int) -> ModelState:
        c = self.config
        return ModelState(
            init_cache(c, batch, capacity),
            jnp.zeros((batch, c.hidden_size), c.compute_dtype),
            jnp.zeros(batch, jnp.int32),
        )

    def grow(self, state: ModelState, capacity: int) -> ModelState:
        return state._replace(cache=grow_cache(state.cache, capacity))

    def advance(self, params, target_params, state, tokens, length, hidden, width) -> ModelState:
        """Reads committed tokens, over whatever earlier drafts left there."""
        width = min(width, state.cache.capacity)
        # Near the end of a row start earlier, so that no write is slid back; tokens read before are computed again.
        start = jnp.minimum(state.length, state.cache.capacity - width)
        positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)
        ids = jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), axis=1)
        out, cache = self._run(params, ids, positions, state.cache)
        filled = jnp.clip(start + width, state.length, jnp.maximum(length, state.length))
        last = jnp.clip(filled - 1 - start, 0, width - 1)
        feature = jnp.take_along_axis(out, last[:, None, None], axis=1)[:, 0]
        feature = jnp.where((filled > state.length)[:, None], feature, state.feature)
        return ModelState(cache, feature, filled)

    def propose(
        self, params, target_params, state, tokens, length, hidden, draw: Draw, depth: int
    ) -> tuple[Proposal, ModelState]:
        """Decodes on by itself."""

        def step(cache, ids, index):
            out, cache = self._run(params, ids, (length + index)[:, None], cache)
            return self._logits(params, out), cache

        first = self._logits(params, state.feature[:, None])
        drafts, log_q, cache = draft_chain(first, step, state.cache, length, draw, depth)
        count = jnp.where((state.length == length) & (length >= 1), depth, 0).astype(jnp.int32)
        return Proposal(drafts, count, log_q), state._replace(cache=cache)

    def _run(self, params, ids, positions, cache):
        model = Transformer(self.config)
        return model.apply({"params": params}, ids, positions, attend=cached_attention(positions), cache=cache)

    def _logits(self, params, hidden):
        out = logits(params, hidden)
        missing = self.target_vocab - out.shape[-1]
        if missing > 0:
            return jnp.pad(out, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
        return out[..., : self.target_vocab]
