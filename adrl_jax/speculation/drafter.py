"""What every drafter offers, and the chain of draws that the neural ones share.

Shapes: `B` rows, `S` token capacity a row, `H` the target's hidden size, `V` the target's vocabulary size.

Drafters are frozen dataclasses (static under jit); everything that changes is in their params and state. States are
NamedTuples of arrays whose leaves all lead with `B`, so rows are gathered by `jax.tree.map(lambda x: x[rows], state)`.
Whatever a drafter proposes, the output law stays the target's; a wrong draft costs time only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from adrl_jax.models.kv_cache import KVCache, with_capacity

Draw = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]
"""`draw(logits [B, 1, V], positions [B, 1]) -> (ids int32 [B, 1], log_q float32 [B, 1, V] or None)`.

Made by `verify.make_draw`. `positions` are the absolute positions of the tokens being drawn. `log_q` is the law the ids were
drawn from, None where the verifier does not need it.
"""


class Proposal(NamedTuple):
    """Drafted tokens of one round.

    Attributes:
        tokens: int32 `[B, depth]`, drafts for absolute positions `length`, `length + 1`, …
        count: int32 `[B]`, how many of them are usable.
        log_q: float32 `[B, depth, V]`, the law each draft was drawn from; None for deterministic drafts (one-hot law) and
            where the verifier does not look at it.
        log_chance: float32 `[B, depth]`, <= 0, how likely a drafter that copies believes each draft to stand, given those
            before it. It decides who gets a slot of a shared pass, never what is committed. None where the law tells.
    """

    tokens: jax.Array
    count: jax.Array
    log_q: jax.Array | None
    log_chance: jax.Array | None = None


class Drafter(Protocol):
    """The interface. `tokens[b, :length[b]]` is prompt plus committed response; the last of them has not been through the
    target yet, so `hidden[b, t]` (the target's final-norm hidden states) is valid for t <= length[b] - 2.

    A state's `length` int32 `[B]` counts the row's filled entries. Entries are filled lazily: `advance` catches up from what
    the target has confirmed, `propose` may write entries past `length` for its own drafts, which are overwritten later.

    Optional: `keeps_entries = False` where a state needs no filling (nothing is ever caught up on); `serve(params,
    target_params)` makes what is served of its parameters, with what they take from the target; `with_references`,
    `reference_capacity` and `positional` (see `history`) for drafters that look up what was answered before.
    """

    name: str
    uses_hidden: bool

    def init_params(self, key: jax.Array) -> Any:
        """Fresh parameters, or None where the drafter has none to draw."""
        ...

    def init_state(self, batch: int, capacity: int) -> Any:
        """An empty state for `batch` rows of `capacity` tokens."""
        ...

    def grow(self, state: Any, capacity: int) -> Any:
        """The same state with room for `capacity` tokens a row (never less than before)."""
        ...

    def advance(
        self,
        params: Any,
        target_params: Any,
        state: Any,
        tokens: jax.Array,
        length: jax.Array,
        hidden: jax.Array | None,
        width: int,
    ) -> Any:
        """Fills up to `width` (static) missing entries a row; rows that miss fewer end up complete."""
        ...

    def propose(
        self,
        params: Any,
        target_params: Any,
        state: Any,
        tokens: jax.Array,
        length: jax.Array,
        hidden: jax.Array | None,
        draw: Draw,
        depth: int,
    ) -> tuple[Proposal, Any]:
        """Drafts `depth` (static) tokens; rows whose entries are not complete have `count` 0."""
        ...


def draft_chain(
    first_logits: jax.Array,
    step: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    carry: Any,
    length: jax.Array,
    draw: Draw,
    depth: int,
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Draws `depth` tokens one after the other.

    Args:
        first_logits: float32 `[B, 1, V]` for absolute position `length`.
        step: `(carry, ids [B, 1], index []) -> (logits [B, 1, V], carry)`: feeds draft number `index` and returns the logits
            of the next one.
        carry: any pytree of arrays of fixed shapes.
        length: int32 `[B]`.

    Returns:
        tokens int32 `[B, depth]`, log_q float32 `[B, depth, V]` or None, and the last carry.
    """
    ids, log_q = draw(first_logits, length[:, None])
    if depth == 1:
        return ids, log_q, carry

    def body(state, index):
        carry, ids = state
        logits, carry = step(carry, ids, index)
        ids, log_q = draw(logits, (length + index + 1)[:, None])
        return (carry, ids), (ids, log_q)

    (carry, _), (more, more_q) = jax.lax.scan(body, (carry, ids), jnp.arange(depth - 1, dtype=jnp.int32))
    tokens = jnp.concatenate([ids, more[..., 0].T], axis=1)
    if log_q is not None:
        log_q = jnp.concatenate([log_q, more_q[:, :, 0].swapaxes(0, 1)], axis=1)
    return tokens, log_q, carry


def grow_cache(cache: KVCache, capacity: int) -> KVCache:
    """`cache` with room for `capacity` tokens a row.

    Raises:
        ValueError: `capacity` is less than the cache has.
    """
    if capacity < cache.capacity:
        raise ValueError(f"capacity={capacity} is less than the {cache.capacity} the cache has; caches only grow")
    return with_capacity(cache, capacity)
