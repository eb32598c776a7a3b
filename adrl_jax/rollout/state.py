"""What the device knows of running requests.

Shapes: `B` rows, `S` token capacity a row, `H` hidden size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models.kv_cache import KVCache, fit, with_capacity
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.types import FinishReason


class RolloutState(NamedTuple):
    """A batch of rows. `length` is the only truth about a row: whatever lies at or past it means nothing.

    The last token of a row has not been through the target yet, so the cache holds `length - 1` valid entries.

    Attributes:
        tokens: int32 `[B, S]`, prompt and committed response.
        log_probs: float32 `[B, S]`, behaviour log-prob of each response token at its absolute position.
        length: int32 `[B]`, tokens known.
        limit: int32 `[B]`, the length at which the budget ends.
        finish_reason: int32 `[B]`, `FinishReason` values.
        request_keys: uint32 `[B, 2]`, names the row's noise.
        temperature: float32 `[B]`.
        ignore_eos: bool `[B]`.
        cache: the target's keys and values.
        hidden: `[B, S, H]`, the target's final-norm hidden states, valid for positions < length - 1; None where no drafter
            reads them.
        drafter_states: by drafter name.
        accept_passes, accept_tokens: int32 `[B]`, speculative passes the row ran in and the tokens they committed.
    """

    tokens: jax.Array
    log_probs: jax.Array
    length: jax.Array
    limit: jax.Array
    finish_reason: jax.Array
    request_keys: jax.Array
    temperature: jax.Array
    ignore_eos: jax.Array
    cache: KVCache
    hidden: jax.Array | None
    drafter_states: dict[str, Any]
    accept_passes: jax.Array
    accept_tokens: jax.Array

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    @property
    def running(self) -> jax.Array:
        """bool `[B]`."""
        return self.finish_reason == FinishReason.RUNNING


class Rows(NamedTuple):
    """The host's half of a new state, numpy, one entry a row; `tokens` is `[B, S]`, see `RolloutState`."""

    tokens: np.ndarray
    length: np.ndarray
    limit: np.ndarray
    finish_reason: np.ndarray
    request_keys: np.ndarray
    temperature: np.ndarray
    ignore_eos: np.ndarray


class Prefilled(NamedTuple):
    """What the target makes of `P` prompts padded to `W` tokens: a cache of capacity W, and `[P, W, H]` hidden states or None."""

    cache: KVCache
    hidden: jax.Array | None


def expand(rows: Rows, source: jax.Array, prompts: Prefilled, drafters: Mapping[str, Drafter]) -> RolloutState:
    """A fresh state in which row b continues prompt `source[b]` (int32 `[B]`)."""
    batch, capacity = rows.tokens.shape
    cache, hidden = _of_rows(prompts, source, capacity)
    return RolloutState(
        tokens=jnp.asarray(rows.tokens),
        log_probs=jnp.zeros((batch, capacity), jnp.float32),
        length=jnp.asarray(rows.length),
        limit=jnp.asarray(rows.limit),
        finish_reason=jnp.asarray(rows.finish_reason),
        request_keys=jnp.asarray(rows.request_keys),
        temperature=jnp.asarray(rows.temperature),
        ignore_eos=jnp.asarray(rows.ignore_eos),
        cache=cache,
        hidden=hidden,
        drafter_states={name: d.init_state(batch, capacity) for name, d in drafters.items()},
        accept_passes=jnp.zeros(batch, jnp.int32),
        accept_tokens=jnp.zeros(batch, jnp.int32),
    )


def insert(state: RolloutState, prompts: Prefilled, source: jax.Array, taken: jax.Array) -> RolloutState:
    """Gives the rows where `taken` (bool `[B]`) the cache of prompt `source[b]`, for waves prefilled in several parts."""
    fresh = _of_rows(prompts, source, state.capacity)

    def choose(new, old):
        return jnp.where(taken.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    cache, hidden = jax.tree.map(choose, fresh, Prefilled(state.cache, state.hidden))
    return state._replace(cache=cache, hidden=hidden)


def _of_rows(prompts: Prefilled, source: jax.Array, capacity: int) -> Prefilled:
    # Prompts are padded to wide buckets; what lies past a row's length means nothing.
    return Prefilled(
        jax.tree.map(lambda x: x[source], with_capacity(prompts.cache, capacity)),
        None if prompts.hidden is None else fit(prompts.hidden, 1, capacity)[source],
    )


def reshape(state: RolloutState, rows: jax.Array, drafters: Mapping[str, Drafter], capacity: int) -> RolloutState:
    """The given rows of a state (int32 `[B']`), with room for `capacity` tokens, never less than before."""
    grown = state._replace(
        tokens=fit(state.tokens, 1, capacity),
        log_probs=fit(state.log_probs, 1, capacity),
        cache=with_capacity(state.cache, capacity),
        hidden=None if state.hidden is None else fit(state.hidden, 1, capacity),
        drafter_states={name: drafters[name].grow(s, capacity) for name, s in state.drafter_states.items()},
    )
    return jax.tree.map(lambda x: x[rows], grown)
