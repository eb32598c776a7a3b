"""A policy whose law is a Markov chain, made by hand, and the drafter that knows it: every draft is accepted.

The residual stream holds the current token one-hot; the branches of the layers add nothing; the head is the chain's table. So the
hidden state after a token tells that token, and the perfect drafter passes on the embedding it is given. Any slip by one place,
in training or in serving, would show as a draft that falls.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.bandit.fixed import fixed
from adrl_jax.drafter import warmup
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.eagle3 import Eagle3
from adrl_jax.speculation.fusion import FUSE
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, SamplingParams

VOCAB = 8
CONFIG = ModelConfig("llama", VOCAB, VOCAB, 16, 2, 2, 1, 4, norm_eps=1e-12, tie_embeddings=False)
DEPTH = 4
KINDS = {"eagle": Eagle, "eagle3": Eagle3}


def silent(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def chain():
    """The policy, and `log p(next | current)` `[V, V]`."""
    params = init_params(CONFIG, jax.random.key(0))
    logits = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
    for i in range(CONFIG.num_layers):
        layer = params[f"layer_{i}"]
        params[f"layer_{i}"] = {**layer, "attn": silent(layer["attn"]), "mlp": silent(layer["mlp"])}
    one_hot = jnp.eye(VOCAB)
    # The final norm scales a one-hot vector by sqrt(V).
    params |= {"embedding": one_hot, "head": jnp.asarray(logits) / np.sqrt(VOCAB, dtype=np.float32)}
    return params, jax.nn.log_softmax(logits)


def perfect(kind):
    """Passes the embedding of the last token on, scaled as the final norm would."""
    params = kind(CONFIG).init_params(jax.random.key(1))
    layer = params["layer"]
    kernel = jnp.concatenate([jnp.eye(VOCAB) * np.sqrt(VOCAB), jnp.zeros((VOCAB, VOCAB))]).astype(jnp.float32)
    layer = {**layer, "attn": silent(layer["attn"]), "mlp": silent(layer["mlp"])}
    out = {**params, "fc": {"kernel": kernel}, "layer": layer}
    return out | ({FUSE: params[FUSE]} if FUSE in params else {})


def generate(kind, strategy, verification="coupled"):
    params, _ = chain()
    drafter = KINDS[kind](CONFIG)
    config = EngineConfig(
        seed=3, eos_ids=(), strategies=(OFF, strategy), max_batch=4, batch_buckets=(4,), verification=verification
    )
    engine = Engine(CONFIG, config, {kind: drafter})
    engine.publish(engine_layout(params, CONFIG), 0, {kind: engine_layout(perfect(KINDS[kind]), CONFIG)})
    requests = [Request(Prompt(i, np.arange(2 + i) % VOCAB), 0, 0, i, 41) for i in range(4)]
    found = []
    engine.collect = lambda rollout, hidden: found.append((rollout, hidden))
    bandit = fixed(1, 2)
    result = engine.generate(requests, SamplingParams(0.9), bandit, bandit.init())
    return result, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_the_perfect_drafter_is_accepted_to_the_last_draft(kind, verification):
    result, found = generate(kind, Strategy(kind, DEPTH), verification)
    stats = result.stats
    assert sum(x.accepted[-1] for x in stats.launches) == sum(x.examined[0] for x in stats.launches) > 0
    # 41 tokens: one pass of 1 + 40 is 8 full passes and the rest; the last pass of a row is cut by its budget alone.
    assert all(r.accept_passes == 9 for r in result.rollouts)
    _, table = chain()
    law = jax.nn.log_softmax(table / 0.9)
    for rollout, hidden in found:
        # What the engine hands out are the states of the tokens at their places.
        np.testing.assert_array_equal(np.argmax(hidden[:, :VOCAB], axis=1), rollout.token_ids[:-1])
        assert hidden.shape[1] == KINDS[kind](CONFIG).target.hidden_channels
        before = rollout.token_ids[rollout.prompt_length - 1 : -1]
        np.testing.assert_allclose(rollout.log_probs, law[before, rollout.response_ids], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_training_sees_the_perfect_drafter_as_perfect(kind):
    result, _ = generate(kind, Strategy(kind, DEPTH))
    params, _ = chain()
    drafter = KINDS[kind](CONFIG)
    lessons = warmup.make_lessons(params, drafter.target, result.rollouts, rows=2, row_length=64)
    config = DrafterLossConfig(1.0, 1.0, 1.0, depths=DEPTH)
    found = warmup.make_measure(drafter.target, config)(perfect(KINDS[kind]), params, lessons)
    for depth in ("", "_2", "_3", "_4"):
        assert found[f"agreement{depth}"] == pytest.approx(1.0, abs=1e-5)
    assert found["feature_loss"] == pytest.approx(0.0, abs=1e-6)
    # One that is late by a place (it passes the target's own state on) is found out.
    late = perfect(KINDS[kind])
    late["fc"] = {"kernel": jnp.concatenate([jnp.zeros((VOCAB, VOCAB)), jnp.eye(VOCAB)])}
    assert warmup.make_measure(drafter.target, config)(late, params, lessons)["agreement"] < 0.8
