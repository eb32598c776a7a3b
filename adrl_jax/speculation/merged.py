"""Two drafters as one: a copied candidate where the match is long, a learned drafter elsewhere.

Which of the two speaks for a row depends on the row's past alone, never on what either of them drew. So a proposal still has
one law a place, the learned drafter's or one-hot at the copied token, and either verification stays exact.

Shapes: `B` rows, `V` vocabulary size.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from adrl_jax.speculation.drafter import Drafter, Draw, Proposal
from adrl_jax.speculation.ngram import Match


class Lookup(Drafter, Protocol):
    """A drafter without parameters that tells how long its match is: `Ngram`, `History`."""

    max_ngram: int

    def match(self, state: Any, tokens: jax.Array, length: jax.Array, depth: int) -> Match:
        """What `propose` would propose, with the length of the match."""
        ...


class MergedState(NamedTuple):
    """The states of both."""

    lookup: Any
    learned: Any

    @property
    def length(self) -> jax.Array:
        """int32 `[B]`: the learned drafter's filled entries; looking up needs none."""
        return self.learned.length


@dataclasses.dataclass(frozen=True)
class Merged:
    """Row by row:

    1. the lookup's candidate where at least `min_match` tokens matched;
    2. else the learned drafter's, where it has one (its entries are complete);
    3. else the lookup's, however short its match.

    A row takes its tokens, their number and their law from one drafter. Its params are the learned drafter's own, so the same
    weights may be published for both. The learned drafter does not draw at all in rounds in which case 1 holds for all rows.

    Attributes:
        lookup: `Ngram` or `History`.
        learned: any other drafter.
        min_match: in tokens, at most `lookup.max_ngram`: no longer match is told.
    """

    lookup: Lookup
    learned: Drafter
    min_match: int = 4
    name: str = "merged"

    def __post_init__(self):
        if not hasattr(self.lookup, "match"):
            raise ValueError(f"Merged.lookup={self.lookup!r} must be a drafter that looks things up: Ngram or History")
        if not 1 <= self.min_match <= self.lookup.max_ngram:
            raise ValueError(
                f"Merged.min_match={self.min_match!r} must be in [1, {self.lookup.max_ngram}], "
                f"where the latter is max_ngram of the lookup {self.lookup.name!r}"
            )

    @property
    def uses_hidden(self) -> bool:
        return self.learned.uses_hidden

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers that the learned drafter reads beside the last."""
        return getattr(self.learned, "taps", ())

    @property
    def reference_capacity(self) -> int:
        """Tokens of a reference a row, 0 where the lookup takes none."""
        return getattr(self.lookup, "reference_capacity", 0)

    @property
    def positional(self) -> bool:
        """Whether the lookup drafts position by position, see `History`."""
        return getattr(self.lookup, "positional", False)

    def init_params(self, key: jax.Array) -> Any:
        return self.learned.init_params(key)

    def serve(self, params: Any, target_params: Any) -> Any:
        """As the learned drafter's, where it has one."""
        return self.learned.serve(params, target_params) if hasattr(self.learned, "serve") else params

    def init_state(self, batch: int, capacity: int) -> MergedState:
        return MergedState(self.lookup.init_state(batch, capacity), self.learned.init_state(batch, capacity))

    def grow(self, state: MergedState, capacity: int) -> MergedState:
        return MergedState(self.lookup.grow(state.lookup, capacity), self.learned.grow(state.learned, capacity))

    def with_references(self, state: MergedState, taken, reference, reference_length, offset=None) -> MergedState:
        """As `History.with_references`.

        Raises:
            ValueError: the lookup takes no references.
        """
        if not self.reference_capacity:
            raise ValueError(f"the lookup {self.lookup.name!r} of {self.name!r} takes no references; only History does")
        return state._replace(lookup=self.lookup.with_references(state.lookup, taken, reference, reference_length, offset))

    def advance(self, params, target_params, state, tokens, length, hidden, width) -> MergedState:
        return MergedState(
            self.lookup.advance(None, target_params, state.lookup, tokens, length, hidden, width),
            self.learned.advance(params, target_params, state.learned, tokens, length, hidden, width),
        )

    def propose(
        self, params, target_params, state, tokens, length, hidden, draw: Draw, depth: int
    ) -> tuple[Proposal, MergedState]:
        """One drafter's proposal a row; `log_q` is None exactly where the learned drafter's is."""
        match = self.lookup.match(state.lookup, tokens, length, depth)
        copied = (match.matched >= self.min_match) & (match.count > 0)

        # What a drafter leaves in its state when it proposes is its own drafts, to be overwritten: dropped here, so that a
        # round that asks nobody does not copy the state.
        def ask(own):
            return self.learned.propose(params, target_params, own, tokens, length, hidden, draw, depth)[0]

        def skip(own):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(ask, own))

        drawn = jax.lax.cond(jnp.all(copied), skip, ask, state.learned)
        copied |= (drawn.count == 0) & (match.count > 0)
        log_q, chance = drawn.log_q, drawn.log_chance
        if log_q is not None and log_q.shape[-1] == 1:  # of the drawn ids only
            chance = log_q[..., 0]
        elif log_q is not None:
            one_hot = jnp.where(jnp.arange(log_q.shape[-1]) == match.tokens[..., None], 0.0, -jnp.inf)
            log_q = jnp.where(copied[:, None, None], one_hot, log_q)
        proposal = Proposal(
            jnp.where(copied[:, None], match.tokens, drawn.tokens),
            jnp.where(copied, match.count, drawn.count),
            log_q,
            None if chance is None else jnp.where(copied[:, None], match.log_chance, chance),
        )
        return proposal, state
