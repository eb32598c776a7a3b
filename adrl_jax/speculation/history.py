"""Lookup in what was written before: responses of siblings and of earlier epochs to the same prompt.

Reasoning RL answers every prompt many times, so most of a response has been written before, in almost the same words. Each row
carries a *reference* on the device: several texts one after the other, the most recent last. Where the row's last tokens occur
in it, what followed there is proposed. No index is built: the suffix is compared with all places at once (see `ngram`).

The host decides what the references hold (`history_store.HistoryStore`) and gives them to rows with `with_references`.

Shapes: `B` rows, `S` token capacity a row, `R` tokens of a reference.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.speculation.drafter import Draw, Proposal
from adrl_jax.speculation.ngram import Match, agreeing, check_sizes, last_tokens, log_chance

SEPARATOR = -1
"""Stands between two texts of a reference; matches nothing and ends a copy."""

UNALIGNED = -(1 << 30)
"""The `offset` of a reference without an earlier text of the row's own."""


class HistoryState(NamedTuple):
    """What the drafter knows of each row.

    Attributes:
        reference: int32 `[B, R]`, texts with `SEPARATOR` between them, the most recent last.
        reference_length: int32 `[B]`, how much of it is filled; 0 where there is nothing to look up.
        offset: int32 `[B]`: `reference[b, offset[b] + t]` is what the row's own earlier response has at absolute position t
            (so `offset` may be negative: little of the prompt is stored); `UNALIGNED` where there is none.
        length: int32 `[B]`, tokens seen.
    """

    reference: jax.Array
    reference_length: jax.Array
    offset: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class History:
    """Looks the longest suffix up in the row's reference.

    The longest match wins. Of several that are equally long the most recent ones vote, token by token.

    Attributes:
        reference_capacity: tokens of a reference, R.
        max_ngram, min_ngram: longest and shortest suffix tried, in tokens.
        votes: how many of the longest matches vote; 1 copies the most recent one.
        own_text: also look at the row's own prompt and response, as `Ngram` does; it counts as the most recent text.
        positional: for noise that is reused across epochs, where the row's own earlier response comes back except where the
            policy changed: as long as the last `min_ngram` tokens agree with that response at the *same positions*, what it
            has next is proposed, however long a match there is elsewhere, and counts as a match of `max_ngram` tokens. Where
            they do not, the longest match decides.
    """

    reference_capacity: int
    max_ngram: int = 8
    min_ngram: int = 2
    votes: int = 8
    own_text: bool = True
    positional: bool = False
    name: str = "history"
    uses_hidden: bool = False
    keeps_entries: bool = False

    def __post_init__(self):
        check_sizes("History", self.min_ngram, self.max_ngram)
        for field in ("reference_capacity", "votes"):
            if getattr(self, field) < 1:
                raise ValueError(f"History.{field}={getattr(self, field)!r} must be >= 1")

    def init_params(self, key):
        return None

    def init_state(self, batch: int, capacity: int) -> HistoryState:
        """Rows without references."""
        return HistoryState(
            jnp.full((batch, self.reference_capacity), SEPARATOR, jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.full(batch, UNALIGNED, jnp.int32),
            jnp.zeros(batch, jnp.int32),
        )

    def grow(self, state: HistoryState, capacity: int) -> HistoryState:
        return state

    def with_references(
        self,
        state: HistoryState,
        taken: jax.Array,
        reference: jax.Array,
        reference_length: jax.Array,
        offset: jax.Array | None = None,
    ) -> HistoryState:
        """Gives some rows new references, in place of what they had.

        Args:
            taken: bool `[B]`, the rows meant; the entries of other rows are not looked at.
            reference: int32 `[B, R]`.
            reference_length: int32 `[B]`; 0 takes a row's reference away.
            offset: int32 `[B]`, see `HistoryState`; None: no row has an earlier text of its own.

        Raises:
            ValueError: a reference has not R tokens.
        """
        if reference.shape != state.reference.shape:
            raise ValueError(f"reference has the shape {reference.shape}; these rows take {state.reference.shape}")
        offset = jnp.full_like(state.offset, UNALIGNED) if offset is None else offset
        return state._replace(
            reference=jnp.where(taken[:, None], reference, state.reference),
            reference_length=jnp.where(taken, reference_length, state.reference_length),
            offset=jnp.where(taken, offset, state.offset),
        )

    def advance(self, params, target_params, state, tokens, length, hidden, width) -> HistoryState:
        return state._replace(length=length)

    def match(self, state: HistoryState, tokens: jax.Array, length: jax.Array, depth: int) -> Match:
        """Copies up to `depth` tokens after the match.

        A copy from the reference ends where that text ends; one from the row's own text goes on reading its own output.
        """
        text = self._searched(state, tokens, length)
        size = text.shape[1]
        places = jnp.arange(size, dtype=jnp.int32)
        matched = agreeing(text, last_tokens(tokens, length, self.max_ngram))
        goes_on = jnp.pad(text[:, 1:], ((0, 0), (0, 1)), constant_values=SEPARATOR) != SEPARATOR
        rank = matched * size + places
        if self.positional:
            aligned = places == (state.offset + length - 1)[:, None]
            rank += jnp.where(aligned & (places < self.reference_capacity), (self.max_ngram + 1) * size, 0)
        best = best_of(jnp.where(goes_on & (matched >= self.min_ngram), rank, -1), self.votes)
        level = best // size
        voting = (best >= 0) & (level == level[:, :1])

        start = best % size + 1
        steps = jnp.arange(depth, dtype=jnp.int32)
        end = (self.reference_capacity + 1 + length)[:, None]  # of the row's own text among what is searched
        period = jnp.where(start > self.reference_capacity, jnp.maximum(end - start, 1), depth)
        source = start[..., None] + steps % period[..., None]
        copies = jnp.take_along_axis(text, jnp.minimum(source, size - 1).reshape(len(text), -1), axis=1)
        copies = jnp.where(source < size, copies.reshape(source.shape), SEPARATOR)
        drafts, votes, voters = elect(copies, voting)
        found = jnp.where(voting[:, 0], jnp.minimum(level[:, 0], self.max_ngram), 0)
        return Match(drafts, jnp.sum(votes > 0, axis=1, dtype=jnp.int32), found, log_chance(found, votes, voters))

    def _searched(self, state: HistoryState, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """The reference, a separator, and the row's own text if wanted, with separators for what is not filled."""

        def filled(ids, size):
            return jnp.where(jnp.arange(ids.shape[1]) < size[:, None], ids, SEPARATOR)

        parts = [filled(state.reference, state.reference_length), jnp.full((len(length), 1), SEPARATOR, jnp.int32)]
        if self.own_text:
            parts.append(filled(tokens, length))
        return jnp.concatenate(parts, axis=1)

    def propose(
        self, params, target_params, state, tokens, length, hidden, draw: Draw, depth: int
    ) -> tuple[Proposal, HistoryState]:
        """The match as a deterministic proposal."""
        match = self.match(state, tokens, length, depth)
        return Proposal(match.tokens, match.count, None, match.log_chance), state


def best_of(rank: jax.Array, count: int) -> jax.Array:
    """The `count` (static) largest values of each row, descending: int32 `[B, P]` -> `[B, count]`; -1 where there are no more.

    Values are -1 or distinct. One pass a value: on a CPU a sort would take fifteen times as long.
    """

    def step(before, _):
        value = jnp.max(jnp.where(rank < before[:, None], rank, -1), axis=1)
        return value, value

    highest = jnp.full(len(rank), jnp.iinfo(jnp.int32).max)
    return jax.lax.scan(step, highest, None, length=count)[1].T


def elect(copies: jax.Array, voting: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token by token, what most of the candidates have next; those that have something else do not vote any more.

    Args:
        copies: int32 `[B, C, depth]`, candidates; from a `SEPARATOR` on they have nothing to say.
        voting: bool `[B, C]`, which of them count. Where votes are equal the first one's token is taken.

    Returns:
        tokens int32 `[B, depth]`, 0 where nobody votes; the votes each got, and how many voted, int32 `[B, depth]`.
    """

    def step(voting, ids):
        voting &= ids != SEPARATOR
        same = (ids[:, :, None] == ids[:, None, :]) & voting[:, None, :]
        votes = jnp.where(voting, jnp.sum(same, axis=-1, dtype=jnp.int32), 0)
        first = jnp.argmax(votes, axis=1)[:, None]
        chosen = jnp.take_along_axis(ids, first, axis=1)
        voters = jnp.sum(voting, axis=1, dtype=jnp.int32)
        return voting & (ids == chosen), (jnp.where(voters > 0, chosen[:, 0], 0), jnp.max(votes, axis=1), voters)

    _, found = jax.lax.scan(step, voting, jnp.moveaxis(copies, -1, 0))
    return tuple(x.T for x in found)
