"""Prompt lookup: propose what followed the last words the last time they occurred (Saxena 2023, "Prompt Lookup Decoding").

Deterministic, without parameters; strong where text repeats itself, harmless elsewhere.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.speculation.drafter import Proposal


class NgramState(NamedTuple):
    """`length` int32 `[B]`: tokens seen. The text itself is the index, so nothing else is kept."""

    length: jax.Array


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

    def __post_init__(self):
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"Ngram.min_ngram={self.min_ngram!r} and max_ngram={self.max_ngram!r} must satisfy 1 <= min_ngram <= max_ngram"
            )

    def init_params(self, key):
        return None

    def init_state(self, batch: int, capacity: int) -> NgramState:
        return NgramState(jnp.zeros(batch, jnp.int32))

    def grow(self, state: NgramState, capacity: int) -> NgramState:
        return state

    def advance(self, params, target_params, state, tokens, length, hidden, width) -> NgramState:
        return NgramState(length)

    def propose(self, params, target_params, state, tokens, length, hidden, draw, depth) -> tuple[Proposal, NgramState]:
        """Copies the `depth` tokens after the match; where the text ends first, the copy goes on reading its own output."""
        batch, capacity = tokens.shape
        places = jnp.arange(capacity, dtype=jnp.int32)
        # matched[b, e]: how many tokens up to and including place e agree with the row's last ones.
        matched = jnp.zeros((batch, capacity), jnp.int32)
        agree = jnp.ones((batch, capacity), bool)
        for k in range(self.max_ngram):
            suffix = jnp.take_along_axis(tokens, jnp.maximum(length - 1 - k, 0)[:, None], axis=1)
            shifted = jnp.pad(tokens, ((0, 0), (k, 0)))[:, :capacity]
            agree &= (shifted == suffix) & (places >= k) & (length[:, None] > k)
            matched += agree
        matched = jnp.where(places < length[:, None] - 1, matched, 0)
        score = jnp.where(matched >= self.min_ngram, matched * capacity + places, -1)
        best = jnp.max(score, axis=1)
        start = best % capacity + 1
        period = jnp.maximum(length - start, 1)
        source = start[:, None] + jnp.arange(depth, dtype=jnp.int32) % period[:, None]
        drafts = jnp.take_along_axis(tokens, jnp.clip(source, 0, capacity - 1), axis=1)
        count = jnp.where(best >= 0, depth, 0).astype(jnp.int32)
        return Proposal(drafts, count, None), state
