"""Drafters that look things up leave the target's law alone: whole decoding loops, each row with another reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookup_world import CONTEXT, LENGTH, REFERENCE, TABLE, TableDrafter, V, run
from scipy import stats

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, log_law
from adrl_jax.speculation import verify
from adrl_jax.speculation.history import History
from adrl_jax.speculation.merged import Merged
from adrl_jax.speculation.ngram import Ngram

DRAWS = 60_000
HISTORY = History(REFERENCE, max_ngram=3, min_ngram=1)
DRAFTERS = {
    "ngram": Ngram(2, 1),
    "history": HISTORY,
    "positional": History(REFERENCE, max_ngram=3, min_ngram=1, positional=True, own_text=False),
    "merged": Merged(HISTORY, TableDrafter(), min_match=2),
    "both lookups": Merged(HISTORY, Ngram(1, 1), min_match=3),
}


def conditionals(temperature=1.0):
    p = np.exp(np.asarray(log_law(TABLE, np.full((V, V), temperature, np.float32), Law()), np.float64))
    return p / p.sum(-1, keepdims=True)


def p_values(tokens, temperature=1.0):
    """Of the joint law of the first three tokens, and of the fourth and fifth given the two before them."""
    p = conditionals(temperature)
    joint = p[CONTEXT][:, None, None] * p[CONTEXT[1]][:, :, None] * p
    code = (tokens[:, 2] * V + tokens[:, 3]) * V + tokens[:, 4]
    yield stats.chisquare(np.bincount(code, minlength=V**3), joint.ravel() * len(tokens)).pvalue
    for place in (5, 6):
        counts = np.zeros((V, V, V))
        np.add.at(counts, (tokens[:, place - 2], tokens[:, place - 1], tokens[:, place]), 1)
        expected = counts.sum(-1, keepdims=True) * p
        yield stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), V * V * (V - 1))


@pytest.mark.parametrize("method", verify.METHODS)
@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_output_has_exactly_the_targets_law(name, method):
    tokens, stood = run(DRAFTERS[name], method, DRAWS)
    assert stood.mean() > 0.2
    assert min(p_values(tokens)) > 0.001


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_tokens_are_those_of_plain_decoding(temperature):
    keys = jnp.asarray(noise.request_keys(0, np.arange(DRAWS), 0, 0))
    draw = jax.jit(verify.make_draw("coupled", jnp.full(DRAWS, temperature), keys, Law()))
    plain = np.tile(np.array(CONTEXT), (DRAWS, 1))
    for place in range(2, 2 + LENGTH):
        logits = jnp.asarray(TABLE[plain[:, -2], plain[:, -1]])[:, None]
        plain = np.concatenate([plain, draw(logits, jnp.full((DRAWS, 1), place))[0]], axis=1)
    for drafter in DRAFTERS.values():
        np.testing.assert_array_equal(run(drafter, "coupled", DRAWS, temperature)[0], plain)


@dataclasses.dataclass(frozen=True)
class Faulty(Merged):
    """Copied tokens under the law of the drafter that did not draw them."""

    def propose(self, params, target_params, state, tokens, length, hidden, draw, depth):
        proposal, after = super().propose(params, target_params, state, tokens, length, hidden, draw, depth)
        drawn, _ = self.learned.propose(params, target_params, state.learned, tokens, length, hidden, draw, depth)
        return proposal._replace(log_q=drawn.log_q), after


def test_copies_under_the_law_of_the_learned_drafter_would_be_seen():
    tokens, _ = run(Faulty(HISTORY, TableDrafter(), min_match=2), "rejection", DRAWS)
    assert min(p_values(tokens)) < 1e-12


def test_an_earlier_response_under_the_same_noise_is_accepted():
    earlier, before = run(DRAFTERS["ngram"], "coupled", DRAWS)
    ids = np.full((DRAWS, REFERENCE), -1)
    ids[:, : 2 + LENGTH] = earlier
    for name in ("history", "positional", "merged"):
        tokens, stood = run(DRAFTERS[name], "coupled", DRAWS, references=ids)
        np.testing.assert_array_equal(tokens, earlier)
        # At the same positions: three drafts and the target's own token, then the one left. Elsewhere other places match too.
        assert (stood == 4).all() if name == "positional" else stood.mean() > before.mean() + 0.5
