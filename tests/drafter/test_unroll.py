"""What training predicts at each depth is what serving drafts from there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.drafter.unroll import guesses
from adrl_jax.learner import packing
from adrl_jax.learner.attention import reach_of
from adrl_jax.learner.forward import hidden_states
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import cached_attention, init_cache
from adrl_jax.models.transformer import Transformer, init_params, logits
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.types import FinishReason, Rollout, SamplingParams

TINY = ModelConfig("llama", 41, 32, 48, 2, 4, 2, 8)
DEPTHS = 4
EAGLE = Eagle(TINY)


def wide(tree):
    return jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, tree)


PARAMS = wide(init_params(TINY, jax.random.key(0)))
DRAFTER = wide(EAGLE.init_params(jax.random.key(1)))


def make_rollouts(groups):
    rng, out = np.random.default_rng(0), []
    for g, (p, lengths) in enumerate(groups):
        prompt = rng.integers(0, 41, p)
        for r in lengths:
            ids = np.concatenate([prompt, rng.integers(0, 41, r)]).astype(np.int32)
            facts = (np.full(r, -3, np.float32), np.zeros(r, np.int32), FinishReason.STOP, SamplingParams())
            out.append(Rollout(g, 0, 0, g, ids, p, r, *facts))
    return out


@jax.jit
def served(tokens, length):
    """Logits of each draft, `[B, DEPTHS, V]`, when the true tokens are what is drafted."""
    rows, capacity = tokens.shape
    places = jnp.broadcast_to(jnp.arange(capacity), tokens.shape)
    hidden, _ = Transformer(TINY).apply(
        {"params": PARAMS}, tokens, places, attend=cached_attention(places), cache=init_cache(TINY, rows, capacity)
    )
    state = EAGLE.advance(DRAFTER, PARAMS, EAGLE.init_state(rows, capacity), tokens, length, hidden, capacity)

    def draw(scores, positions):
        return jnp.take_along_axis(tokens, positions, axis=1), scores

    return EAGLE.propose(DRAFTER, PARAMS, state, tokens, length, hidden, draw, DEPTHS)[0].log_q


@jax.jit
def trained(batch):
    hidden = hidden_states(PARAMS, TINY, batch)
    found, usable = guesses(DRAFTER, PARAMS, TINY, hidden, batch, DEPTHS)
    return logits(PARAMS, found), usable


@pytest.mark.parametrize("layout", packing.LAYOUTS)
@pytest.mark.parametrize("row_length", [16, 40])
def test_every_depth_is_what_serving_drafts(layout, row_length):
    rollouts = make_rollouts(((5, (7, 3, 1)), (1, (4,)), (3, (6, 5))))
    batch = packing.pack(rollouts, [0.0] * len(rollouts), row_length=row_length, layout=layout)
    scores, usable = map(np.asarray, trained(jax.tree.map(jnp.asarray, batch)))
    compared = np.zeros(DEPTHS, int)
    for i, r in enumerate(rollouts):
        n, p = len(r.token_ids), r.prompt_length
        # One row for each token of the response that a draft may begin at.
        tokens = np.zeros((n - p, 24), np.int32)
        tokens[:, :n] = r.token_ids
        drafts = np.asarray(served(jnp.asarray(tokens), jnp.arange(p, n)))
        row, columns = np.nonzero(batch.target_mask & (batch.rollout_index == i))
        for rank, at in enumerate(zip(row, columns)):
            for d in range(DEPTHS):
                begun = rank - d
                # A prompt of one token has no entry, so no draft begins right behind it.
                assert usable[(d, *at)] == (begun >= 0 and (p > 1 or begun > 0))
                if usable[(d, *at)]:
                    np.testing.assert_allclose(scores[(d, *at)], drafts[begun, d], atol=2e-3)
                    compared[d] += 1
    assert not usable[:, ~batch.target_mask].any()
    # Of 26 response tokens one cannot be guessed, and each response has one fewer at each depth further on.
    np.testing.assert_array_equal(compared, [25, 19, 14, 9])


def test_reach_leaves_nothing_out():
    rollouts = make_rollouts(((70, (90, 40)), (30, (100,))))
    batch = packing.pack(rollouts, [0.0] * 3, row_length=420)
    hidden = hidden_states(PARAMS, TINY, jax.tree.map(jnp.asarray, batch))
    run = jax.jit(lambda batch, reach: guesses(DRAFTER, PARAMS, TINY, hidden, batch, 2, reach), static_argnums=1)
    (all_keys, usable), (some, _) = run(batch, None), run(batch, reach_of(batch))
    np.testing.assert_allclose(all_keys[usable], some[usable], atol=1e-5)
