"""EAGLE-3: which layers are read, that training and serving read the same, and that no token depends on it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from adrl_jax.bandit.fixed import fixed
from adrl_jax.drafter.loss import DrafterLossConfig, packed_drafter_loss
from adrl_jax.drafter.unroll import guesses
from adrl_jax.learner import packing
from adrl_jax.learner.forward import ForwardConfig, forward, hidden_states
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import cached_attention, init_cache
from adrl_jax.models.norm import Norm
from adrl_jax.models.transformer import Transformer, engine_layout, init_params, logits
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.eagle3 import Eagle3
from adrl_jax.speculation.fusion import FUSE, fused, layers_read, stacked, taps_of
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason, Prompt, Request, Rollout, SamplingParams

SIZES = dict(vocab_size=41, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8)
SHALLOW, DEEP = (ModelConfig("llama", num_layers=n, **SIZES) for n in (3, 7))
CONFIGS = {"shallow": SHALLOW, "deep": DEEP}
DEPTHS = 3


@functools.cache
def policy(config):
    return jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(config, jax.random.key(0)))


@functools.cache
def drafter_params(config):
    """A fusion that tells its inputs apart, and a layer whose work shows."""
    params = Eagle3(config).init_params(jax.random.key(1))
    rng = np.random.default_rng(0)
    fuse = params[FUSE]["kernel"] + 0.1 * rng.normal(size=params[FUSE]["kernel"].shape).astype(np.float32)
    grown = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, {k: params[k] for k in ("fc", "layer")})
    return {**grown, FUSE: {"kernel": fuse}}


def test_layers_are_sensible_for_every_depth():
    found = {n: layers_read(n) for n in (2, 3, 4, 5, 6, 7, 12, 28, 30)}
    assert found == {
        2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 4), 5: (1, 3, 5), 6: (1, 3, 6), 7: (2, 3, 4), 12: (2, 6, 9), 28: (2, 14, 25),
        30: (2, 15, 27),
    }  # fmt: skip
    assert taps_of(3) == (1, 2) and taps_of(30) == (2, 15, 27) and taps_of(2) == (1,)
    with pytest.raises(ValueError, match=r"num_layers=1.*choose eagle"):
        Eagle3(ModelConfig("llama", num_layers=1, **SIZES))
    with pytest.raises(ValueError, match=r"taps=\(3,\)"):
        ModelConfig("llama", num_layers=3, taps=(3,), **SIZES)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_taps_are_what_the_layers_return(family):
    """Against models cut off after each layer, whose final norm is undone by comparing normed states."""
    config = tiny.FAMILIES[family]
    target = Eagle3(config).target
    params = tiny.target_params(config)
    tokens = tiny.random_rows(2, 9)
    wide = tiny.hidden_states(target, params, tokens)
    assert wide.shape[-1] == target.hidden_channels == 2 * config.hidden_size
    np.testing.assert_array_equal(wide[..., : config.hidden_size], tiny.hidden_states(config, params, tokens))
    cut = dataclasses.replace(config, num_layers=1)
    norm = Norm(config.norm, config.norm_eps, config.norm_offset)
    after_one = norm.apply({"params": params["final_norm"]}, wide[..., config.hidden_size :])
    np.testing.assert_allclose(after_one, tiny.hidden_states(cut, params, tokens), atol=1e-5)
    if family == "llama":  # the learner's pass keeps the same
        batch = packing.pack([rollout(np.asarray(tokens[0]), 3)], [0.0], row_length=9, layout="plain")
        learnt = {k: v for k, v in params.items() if k != "head"}
        np.testing.assert_allclose(hidden_states(learnt, target, batch)[0], wide[0], atol=1e-4)


def rollout(ids, prompt):
    n = len(ids) - prompt
    facts = (np.full(n, -3, np.float32), np.zeros(n, np.int32), FinishReason.STOP, SamplingParams())
    return Rollout(0, 0, 0, int(ids.sum()), np.asarray(ids, np.int32), prompt, n, *facts)


def test_stacked_is_low_to_high():
    hidden = jnp.arange(3.0).repeat(16)[None]  # final, first tap, second tap
    np.testing.assert_array_equal(stacked(hidden, SHALLOW)[0, ::16], [1.0, 2.0, 0.0])
    wide = jnp.arange(4.0).repeat(16)[None]
    np.testing.assert_array_equal(stacked(wide, DEEP)[0, ::16], [1.0, 2.0, 3.0])
    kernel = jnp.concatenate([jnp.eye(16) * k for k in (100.0, 10.0, 1.0)])
    np.testing.assert_array_equal(fused({FUSE: {"kernel": kernel}}, wide, DEEP)[0], 123.0)
    np.testing.assert_array_equal(fused({FUSE: {"kernel_t": kernel.T}}, wide, DEEP)[0], 123.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_depth_is_what_serving_drafts(name):
    config = CONFIGS[name]
    drafter, params, own = Eagle3(config), policy(config), drafter_params(config)
    rng = np.random.default_rng(0)
    rollouts = [rollout(rng.integers(0, 41, p + r), p) for p, r in ((4, 6), (3, 3))]
    batch = packing.pack(rollouts, [0.0] * 2, row_length=20)

    @jax.jit
    def trained(batch):
        hidden = hidden_states(params, drafter.target, batch)
        found, usable = guesses(own, params, drafter.target, hidden, batch, DEPTHS)
        return logits(params, found), usable

    @jax.jit
    def served(tokens, length):
        rows, capacity = tokens.shape
        places = jnp.broadcast_to(jnp.arange(capacity), tokens.shape)
        cache = init_cache(config, rows, capacity)
        hidden, _ = Transformer(drafter.target).apply(
            {"params": params}, tokens, places, attend=cached_attention(places), cache=cache
        )
        state = drafter.advance(own, params, drafter.init_state(rows, capacity), tokens, length, hidden, capacity)
        draw = lambda scores, at: (jnp.take_along_axis(tokens, at, axis=1), scores)  # noqa: E731
        return drafter.propose(own, params, state, tokens, length, hidden, draw, DEPTHS)[0].log_q

    scores, usable = map(np.asarray, trained(jax.tree.map(jnp.asarray, batch)))
    compared = 0
    for i, r in enumerate(rollouts):
        n, p = len(r.token_ids), r.prompt_length
        tokens = np.zeros((n - p, 16), np.int32)
        tokens[:, :n] = r.token_ids
        drafts = np.asarray(served(jnp.asarray(tokens), jnp.arange(p, n)))
        for rank, at in enumerate(zip(*np.nonzero(batch.target_mask & (batch.rollout_index == i)))):
            for d in range(min(rank + 1, DEPTHS)):
                assert usable[(d, *at)]
                np.testing.assert_allclose(scores[(d, *at)], drafts[rank - d, d], atol=3e-3)
                compared += 1
    assert compared == (6 + 5 + 4) + (3 + 2 + 1)


def test_nothing_of_the_policy_is_trained_and_the_fusion_is():
    batch = packing.pack([rollout(np.arange(9), 4)], [0.0], row_length=12)
    config = DrafterLossConfig(0.5, 1.0, 1.0, depths=2)
    target = Eagle3(SHALLOW).target

    @jax.jit
    def gradients(params, own):
        def objective(params, own):
            out = forward(params, target, ForwardConfig(), batch)
            return packed_drafter_loss(config, own, params, target, ForwardConfig(), out, batch).numerator

        return jax.grad(objective, argnums=(0, 1))(params, own)

    of_policy, of_drafter = gradients(policy(SHALLOW), drafter_params(SHALLOW))
    for g in jax.tree.leaves(of_policy):
        np.testing.assert_array_equal(g, 0.0)
    blocks = np.abs(np.asarray(of_drafter[FUSE]["kernel"])).reshape(3, 16, 16).max(axis=(1, 2))
    assert np.all(blocks > 0)


@pytest.fixture(scope="module")
def engine():
    """Both kinds beside each other: each reads its own share of what the target keeps."""
    arms = (OFF, Strategy("eagle3", 2), Strategy("eagle3", 2, 2, 4), Strategy("eagle", 2))
    drafters = {"eagle3": Eagle3(SHALLOW, draft_vocab_size=30), "eagle": Eagle(SHALLOW)}
    config = EngineConfig(seed=5, eos_ids=(1,), strategies=arms, max_batch=4, batch_buckets=(4,), cache_bucket=64)
    engine = Engine(SHALLOW, config, drafters)
    own = {"eagle3": {**drafters["eagle3"].init_params(jax.random.key(1)), **drafter_params(SHALLOW)}}
    own["eagle"] = drafters["eagle"].init_params(jax.random.key(2))
    engine.publish(engine_layout(policy(SHALLOW), SHALLOW), 0, engine_layout(own, SHALLOW))
    return engine


@pytest.mark.parametrize("arm", [1, 2, 3])
def test_no_token_depends_on_the_drafter(engine, arm):
    requests = [Request(Prompt(i, np.arange(2, 4 + i)), 0, s, i, 20) for i in range(2) for s in range(2)]

    def run(arm):
        bandit = fixed(arm, 4)
        return engine.generate(requests, SamplingParams(1.0), bandit, bandit.init()).rollouts

    for plain, drafted in zip(run(0), run(arm), strict=True):
        np.testing.assert_array_equal(plain.token_ids, drafted.token_ids)
        np.testing.assert_allclose(plain.log_probs, drafted.log_probs, atol=1e-4)
        assert drafted.accept_passes > 0
