"""What the device knows of running requests.

Shapes: `B` rows, `S` token capacity a row, `H` hidden size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import KVCache, fit, init_cache, with_capacity
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
        hidden: `[B, S, H]`, the target's final-norm hidden states (with taps, theirs behind them), valid for positions
            < length - 1; None where no drafter reads them.
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


class Tally(NamedTuple):
    """Drafts that were looked at, summed over running rows.

    Attributes:
        examined: int32 `[D]`, how often the draft at depth `i + 1` (level of a tree) was looked at: the drafter offered one and
            all earlier drafts of its path stood.
        accepted: int32 `[D]`, how many of those stood.
        faults: int32 `[]`, row-passes in which the drafter produced something that is not a number; its drafts from there on
            were left out.
    """

    examined: jax.Array
    accepted: jax.Array
    faults: jax.Array

    @classmethod
    def empty(cls, depth: int) -> "Tally":
        return cls(jnp.zeros(depth, jnp.int32), jnp.zeros(depth, jnp.int32), jnp.zeros((), jnp.int32))

    def __add__(self, other: "Tally") -> "Tally":
        return jax.tree.map(jnp.add, self, other)


class Admitted(NamedTuple):
    """Requests that enter a running state, `A` of them. Numpy.

    Attributes:
        row: int32 `[A]`, where each goes; a row past the batch goes nowhere (padding to a compiled size).
        source: int32 `[A]`, its prompt among those prefilled.
        tokens: int32 `[A, S]`; length, limit, request_keys, temperature and ignore_eos as in `RolloutState`.
    """

    row: np.ndarray
    source: np.ndarray
    tokens: np.ndarray
    length: np.ndarray
    limit: np.ndarray
    request_keys: np.ndarray
    temperature: np.ndarray
    ignore_eos: np.ndarray


class Prefilled(NamedTuple):
    """What the target makes of `P` prompts padded to `W` tokens: a cache of capacity W, and `[P, W, H]` hidden states or None."""

    cache: KVCache
    hidden: jax.Array | None


def empty(config: ModelConfig, batch: int, capacity: int, drafters: Mapping[str, Drafter], keep_hidden: bool) -> RolloutState:
    """A state in which no row serves a request."""
    zeros = jnp.zeros(batch, jnp.int32)
    return RolloutState(
        tokens=jnp.zeros((batch, capacity), jnp.int32),
        log_probs=jnp.zeros((batch, capacity), jnp.float32),
        length=jnp.ones(batch, jnp.int32),
        limit=jnp.ones(batch, jnp.int32),
        finish_reason=jnp.full(batch, FinishReason.ABORTED, jnp.int32),
        request_keys=jnp.zeros((batch, 2), jnp.uint32),
        temperature=jnp.ones(batch, jnp.float32),
        ignore_eos=jnp.zeros(batch, bool),
        cache=init_cache(config, batch, capacity),
        hidden=jnp.zeros((batch, capacity, config.hidden_channels), config.compute_dtype) if keep_hidden else None,
        drafter_states={name: d.init_state(batch, capacity) for name, d in drafters.items()},
        accept_passes=zeros,
        accept_tokens=zeros,
    )


def admit(state: RolloutState, fresh: Admitted, prompts: Prefilled) -> RolloutState:
    """Puts requests into rows that serve none (any more): the cost is that of the rows written, not of the batch."""
    count, _capacity = fresh.row.shape[0], state.capacity

    def put(old, new):
        return old.at[fresh.row].set(jnp.asarray(new, old.dtype), mode="drop")

    def put_prompts(old, new, axis):
        # Prompts are padded to wide buckets; what lies past a row's length means nothing, nor does what a cut leaves out.
        width = min(new.shape[axis], old.shape[axis])
        new = jax.lax.slice_in_dim(new, 0, width, axis=axis)[fresh.source]
        place = (fresh.row, *[slice(None)] * (axis - 1), slice(0, width))
        return old.at[place].set(new.astype(old.dtype), mode="drop")

    cache = KVCache(
        tuple(put_prompts(a, b, 3) for a, b in zip(state.cache.keys, prompts.cache.keys, strict=True)),
        tuple(put_prompts(a, b, 2) for a, b in zip(state.cache.values, prompts.cache.values, strict=True)),
    )
    return state._replace(
        tokens=put(state.tokens, fresh.tokens),
        length=put(state.length, fresh.length),
        limit=put(state.limit, fresh.limit),
        finish_reason=put(state.finish_reason, jnp.full(count, FinishReason.RUNNING)),
        request_keys=put(state.request_keys, fresh.request_keys),
        temperature=put(state.temperature, fresh.temperature),
        ignore_eos=put(state.ignore_eos, fresh.ignore_eos),
        cache=cache,
        hidden=None if state.hidden is None else put_prompts(state.hidden, prompts.hidden, 1),
        drafter_states={name: forget(s, fresh.row) for name, s in state.drafter_states.items()},
        accept_passes=put(state.accept_passes, jnp.zeros(count)),
        accept_tokens=put(state.accept_tokens, jnp.zeros(count)),
    )


def forget(drafter_state: Any, rows: jax.Array) -> Any:
    """A drafter's state in which these rows (int32 `[A]`) have no entries: every `length` in it, at whatever depth, is 0.

    Length is the only truth about an entry, so nothing else is touched.
    """
    if not hasattr(drafter_state, "_fields"):
        return drafter_state
    fields = {name: forget(getattr(drafter_state, name), rows) for name in drafter_state._fields}
    if "length" in fields:
        fields["length"] = fields["length"].at[rows].set(0, mode="drop")
    return type(drafter_state)(**fields)


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


def more_rows(state: RolloutState, batch: int) -> RolloutState:
    """A state of `batch` rows, more than before: the new ones serve no request and stand last."""
    extra = batch - state.length.shape[0]
    grown = jax.tree.map(lambda x: jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)), state)
    old = jnp.arange(batch) < batch - extra
    return grown._replace(
        finish_reason=jnp.where(old, grown.finish_reason, FinishReason.ABORTED),
        length=jnp.where(old, grown.length, 1),
        limit=jnp.where(old, grown.limit, 1),
        temperature=jnp.where(old, grown.temperature, 1.0),
    )
