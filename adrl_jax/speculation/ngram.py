"""Prompt lookup: propose what followed the last words the last time they occurred (Saxena 2023, "Prompt Lookup Decoding").

Deterministic, without parameters; strong where text repeats itself, harmless elsewhere. The matching is shared with `history`:
every place of a text is compared with the row's last tokens at once, one shifted comparison a token, no index is built.

Shapes: `B` rows, `S` token capacity a row, `R` places of a text that is searched, `K` tokens of the longest suffix.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.speculation.drafter import Draw, Proposal

_BEFORE_ROW, _BEFORE_TEXT = -2, -3  # stand for tokens that are not there; neither equals any other, nor any token


class Match(NamedTuple):
    """What a drafter that looks things up found.

    Attributes:
        tokens: int32 `[B, depth]`, the copied tokens; legal ids everywhere.
        count: int32 `[B]`, how many of them are usable, 0 where nothing matched.
        matched: int32 `[B]`, how many of the row's last tokens agree with those before the copied ones, at most `max_ngram`;
            0 where nothing matched.
        log_chance: float32 `[B, depth]`, see `log_chance`.
    """

    tokens: jax.Array
    count: jax.Array
    matched: jax.Array
    log_chance: jax.Array


def log_chance(matched: jax.Array, votes: jax.Array, voters: jax.Array) -> jax.Array:
    """How likely copied tokens are right: a share of the votes, to which the length of the match adds one vote in parts.

    A draft that is looked at stands behind drafts that were right, so the match before it has grown by as many tokens.

    Args:
        matched: int32 `[B]`, tokens that agree before the first copied one.
        votes, voters: int32 `[B, depth]`, votes for each token, of how many.

    Returns:
        float32 `[B, depth]`: `log((votes + n / (n + 2)) / (voters + 1))` with `n` tokens agreeing before.
    """
    agreed = (matched[:, None] + jnp.arange(votes.shape[1])).astype(jnp.float32)
    return jnp.log((votes + jnp.maximum(agreed, 0.5) / (agreed + 2.0)) / (voters + 1.0))


class NgramState(NamedTuple):
    """`length` int32 `[B]`: tokens seen. The text itself is the index, so nothing else is kept."""

    length: jax.Array


def check_sizes(owner: str, min_ngram: Any, max_ngram: Any) -> None:
    """Raises ValueError unless 1 <= min_ngram <= max_ngram."""
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"{owner}.min_ngram={min_ngram!r} and max_ngram={max_ngram!r} must satisfy 1 <= min_ngram <= max_ngram"
        )


def last_tokens(tokens: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """The row's last `count` tokens, the very last first: int32 `[B, K]`; before the row's beginning nothing that matches."""
    place = length[:, None] - 1 - jnp.arange(count, dtype=jnp.int32)
    ids = jnp.take_along_axis(tokens, jnp.clip(place, 0, tokens.shape[1] - 1), axis=1)
    return jnp.where(place >= 0, ids, _BEFORE_ROW)


def agreeing(text: jax.Array, last: jax.Array) -> jax.Array:
    """How many tokens up to and including each place agree with the row's last ones.

    Args:
        text: int32 `[B, R]`.
        last: int32 `[B, K]` from `last_tokens`.

    Returns:
        int32 `[B, R]`, at most K.
    """
    longest, size = last.shape[1], text.shape[1]
    # Padded once and sliced: slices fuse into one pass over the text.
    padded = jnp.pad(text, ((0, 0), (longest, 0)), constant_values=_BEFORE_TEXT)
    matched, agree = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
    for k in range(longest):
        agree &= padded[:, longest - k : longest - k + size] == last[:, k, None]
        matched += agree
    return matched


@dataclasses.dataclass(frozen=True)
class Ngram:
    """Looks the longest suffix up in the row's own prompt and response.

    Attributes:
        max_ngram, min_ngram: longest and shortest suffix tried, in tokens. The longest match wins, then the most recent.
    """

    max_ngram: int = 3
    min_ngram: int = 1
    name: str = "ngram"
    uses_hidden: bool = False
    keeps_entries: bool = False

    def __post_init__(self):
        check_sizes("Ngram", self.min_ngram, self.max_ngram)

    def init_params(self, key):
        return None

    def init_state(self, batch: int, capacity: int) -> NgramState:
        return NgramState(jnp.zeros(batch, jnp.int32))

    def grow(self, state: NgramState, capacity: int) -> NgramState:
        return state

    def advance(self, params, target_params, state, tokens, length, hidden, width) -> NgramState:
        return NgramState(length)

    def match(self, state: NgramState, tokens: jax.Array, length: jax.Array, depth: int) -> Match:
        """Copies the `depth` tokens after the match; where the text ends first, the copy goes on reading its own output."""
        capacity = tokens.shape[1]
        places = jnp.arange(capacity, dtype=jnp.int32)
        matched = agreeing(tokens, last_tokens(tokens, length, self.max_ngram))
        legal = (places < length[:, None] - 1) & (matched >= self.min_ngram)
        best = jnp.max(jnp.where(legal, matched * capacity + places, -1), axis=1)
        start = best % capacity + 1
        period = jnp.maximum(length - start, 1)
        source = start[:, None] + jnp.arange(depth, dtype=jnp.int32) % period[:, None]
        drafts = jnp.take_along_axis(tokens, jnp.clip(source, 0, capacity - 1), axis=1)
        found = best >= 0
        matched = jnp.where(found, best // capacity, 0)
        alone = jnp.ones(drafts.shape, jnp.int32)
        return Match(drafts, jnp.where(found, depth, 0).astype(jnp.int32), matched, log_chance(matched, alone, alone))

    def propose(
        self, params, target_params, state, tokens, length, hidden, draw: Draw, depth: int
    ) -> tuple[Proposal, NgramState]:
        """The match as a deterministic proposal."""
        match = self.match(state, tokens, length, depth)
        return Proposal(match.tokens, match.count, None, match.log_chance), state
