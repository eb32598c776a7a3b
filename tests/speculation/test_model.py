"""A draft model with a vocabulary table and positions of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from adrl_jax.sampling.law import Law
from adrl_jax.speculation import verify
from adrl_jax.speculation.model import ModelDrafter, check_compatible


@dataclasses.dataclass(frozen=True)
class Words:
    name: str
    size: int

    def fingerprint(self):
        return f"{self.name}-{self.size}"


@pytest.mark.parametrize("table", [10, 14])
def test_differently_padded_tables_are_cut_to_the_tokenizer(table):
    # Target table of 12 rows, drafter table of 10 (or 14), tokenizer of 9: ids past 8 have no mass anywhere.
    small = dataclasses.replace(tiny.LLAMA, vocab_size=table)
    drafter = ModelDrafter(small, target_vocab=12)
    params = tiny.drafter_params(drafter, 0)
    tokens, length = tiny.random_rows(2, 10, 9), jnp.array([4, 7])
    law = Law(valid_vocab=9)
    draw = verify.make_draw("rejection", jnp.ones(2), tiny.request_keys(2), law)

    @jax.jit
    def propose():
        state = drafter.advance(params, None, drafter.init_state(2, 10), tokens, length, None, 10)
        return drafter.propose(params, None, state, tokens, length, None, draw, 3)[0]

    proposal = propose()
    assert proposal.log_q.shape == (2, 3, 12)
    assert not jnp.exp(proposal.log_q[..., 9:]).any() and int(proposal.tokens.max()) < 9
    np.testing.assert_allclose(jnp.exp(proposal.log_q).sum(-1), 1, atol=1e-5)
    logits = jnp.zeros((2, 4, 12)).at[..., 11].set(30.0)
    positions = length[:, None] + jnp.arange(4)
    verdict = jax.jit(verify.rejection, static_argnames="law")(
        logits, proposal.tokens, proposal.count, jnp.ones(2), tiny.request_keys(2), positions, law=law, log_q=proposal.log_q
    )
    assert int(verdict.tokens.max()) < 9


def test_positions_are_its_own():
    drafter = ModelDrafter(tiny.LLAMA, tiny.SIZES["vocab_size"])
    params = tiny.target_params(tiny.LLAMA, seed=5)
    tokens, length = tiny.random_rows(2, 10), jnp.array([5, 7])
    advance = jax.jit(lambda tokens, length: drafter.advance(
        params, None, drafter.init_state(2, 10), tokens, length, None, 10
    ))  # fmt: skip
    state = advance(tokens, length)
    # Its own model over the row alone, from position 0 on, says the same.
    for row in range(2):
        n = int(length[row])
        alone = tiny.hidden_states(tiny.LLAMA, params, tokens[row : row + 1, :n])
        np.testing.assert_allclose(state.feature[row], alone[0, -1], atol=1e-4)


def test_foreign_tokenizers_are_refused_with_both_names():
    check_compatible(Words("smol", 9), Words("smol", 9), 12, 10)
    with pytest.raises(ValueError, match=r"'llama'.*'smol'"):
        check_compatible(Words("smol", 9), Words("llama", 9), 12, 12)
    with pytest.raises(ValueError, match="drafter's vocab_size=8"):
        check_compatible(Words("smol", 9), Words("smol", 9), 12, 8)
