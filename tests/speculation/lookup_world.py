"""A five-token language decoded with any drafter through its interface, rows with references of their own."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation import verify
from adrl_jax.speculation.drafter import Proposal, draft_chain

V, LENGTH, DEPTH, REFERENCE, CONTEXT = 5, 5, 3, 12, (0, 1)
TABLE = np.random.default_rng(0).normal(size=(V, V, V)).astype(np.float32) * 1.5
OTHER = TABLE + np.random.default_rng(1).normal(size=TABLE.shape).astype(np.float32)


class TableState(NamedTuple):
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class TableDrafter:
    """A learned drafter: its law depends on the last two tokens, its params are the logits of it, `[V, V, V]`.

    It fills `width` entries a call like a neural drafter, so it can lag.
    """

    name: str = "table"
    uses_hidden: bool = False

    def init_params(self, key):
        return jax.random.normal(key, (V, V, V))

    def init_state(self, batch, capacity):
        return TableState(jnp.zeros(batch, jnp.int32))

    def grow(self, state, capacity):
        return state

    def advance(self, params, target_params, state, tokens, length, hidden, width):
        return TableState(jnp.minimum(state.length + width, length))

    def propose(self, params, target_params, state, tokens, length, hidden, draw, depth) -> tuple[Proposal, Any]:
        rows = jnp.arange(tokens.shape[0])

        def step(before, ids, index):
            return params[before, ids[:, 0]][:, None], ids[:, 0]

        last = tokens[rows, length - 1]
        first = params[tokens[rows, length - 2], last][:, None]
        drafts, log_q, _ = draft_chain(first, step, last, length, draw, depth)
        return Proposal(drafts, jnp.where(state.length == length, depth, 0), log_q), state


@functools.partial(jax.jit, static_argnames=("method", "drafter"))
def decode(drafter, params, state, request_keys, temperature, *, method):
    """Rounds of draft, verify, commit until every row has `LENGTH` new tokens: `[B, 2 + LENGTH]`, and drafts that stood."""
    rows = request_keys.shape[0]
    every, law = jnp.arange(rows), Law()
    tokens = jnp.zeros((rows, 2 + LENGTH + DEPTH + 1), jnp.int32).at[:, :2].set(jnp.array(CONTEXT))
    draw = verify.make_draw(method, temperature, request_keys, law)
    table = jnp.asarray(TABLE)

    def round_(carry):
        tokens, length, state, stood = carry
        state = drafter.advance(params, None, state, tokens, length, None, 2 + DEPTH + 1)
        proposal, state = drafter.propose(params, None, state, tokens, length, None, draw, DEPTH)
        last = (tokens[every, length - 2][:, None], tokens[every, length - 1][:, None])
        text = jnp.concatenate([*last, proposal.tokens], axis=1)
        positions = length[:, None] + jnp.arange(DEPTH + 1)
        logits = table[text[:, :-1], text[:, 1:]]
        arguments = (logits, proposal.tokens, proposal.count, temperature, request_keys, positions, law)
        verdict = verify.coupled(*arguments) if method == "coupled" else verify.rejection(*arguments, proposal.log_q)
        count = jnp.minimum(verdict.count, 2 + LENGTH - length)
        places = jnp.arange(tokens.shape[1])
        taken = (places >= length[:, None]) & (places < (length + count)[:, None])
        source = jnp.clip(places - length[:, None], 0, DEPTH)
        tokens = jnp.where(taken, jnp.take_along_axis(verdict.tokens, source, axis=1), tokens)
        return tokens, length + count, state, stood + verdict.count - 1

    start = (tokens, jnp.full(rows, 2, jnp.int32), state, jnp.zeros(rows, jnp.int32))
    tokens, _, _, stood = jax.lax.while_loop(lambda c: jnp.any(c[1] < 2 + LENGTH), round_, start)
    return tokens[:, : 2 + LENGTH], stood


def run(drafter, method, draws, temperature=1.0, references=None, seed=0):
    """`references`: ids `[B, REFERENCE]` from absolute position 0 on; random ones by default."""
    keys = jnp.asarray(noise.request_keys(seed, np.arange(draws), 0, 0))
    state = drafter.init_state(draws, 2 + LENGTH + DEPTH + 1)
    if getattr(drafter, "reference_capacity", 0):
        ids = np.random.default_rng(7).integers(-1, V, (draws, REFERENCE)) if references is None else references
        length, offset = jnp.full(draws, REFERENCE), jnp.zeros(draws, jnp.int32)
        state = drafter.with_references(state, jnp.ones(draws, bool), jnp.asarray(ids, jnp.int32), length, offset)
    tokens, stood = decode(drafter, jnp.asarray(OTHER), state, keys, jnp.full(draws, temperature), method=method)
    return np.asarray(tokens), np.asarray(stood)
