"""The closed-form start: it is the regression, it is what serving computes, and training in units does not depend on scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adrl_jax.drafter import start, warmup
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.drafter.unroll import guesses
from adrl_jax.learner.forward import hidden_states
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import init_params
from adrl_jax.speculation import eagle
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.eagle3 import Eagle3
from adrl_jax.speculation.fusion import FUSE, fused
from adrl_jax.types import FinishReason, Rollout, SamplingParams

SIZES = dict(vocab_size=41, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
CONFIGS = {
    "llama": ModelConfig("llama", **SIZES),
    "gemma3": ModelConfig("gemma3", **SIZES, qk_norm=True, norm_offset=1.0, embed_scale=5.0, post_norms=True),
    "gpt_neox": ModelConfig(
        "gpt_neox", **{**SIZES, "num_kv_heads": 4}, tie_embeddings=False, qkv_bias=True, dense_bias=True, norm="layer",
        activation="gelu", gated_mlp=False, parallel_residual=True,
    ),
}  # fmt: skip


def world(config, groups=((4, (9, 5)), (6, (8,)), (3, (4, 7, 6)))):
    """Policy, fresh drafter and lessons of random texts."""
    params = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(config, jax.random.key(0)))
    rng, rollouts = np.random.default_rng(0), []
    for g, (p, lengths) in enumerate(groups):
        prompt = rng.integers(0, 41, p)
        for r in lengths:
            ids = np.concatenate([prompt, rng.integers(0, 41, r)]).astype(np.int32)
            facts = (np.full(r, -3, np.float32), np.zeros(r, np.int32), FinishReason.STOP, SamplingParams())
            rollouts.append(Rollout(g, 0, 0, g, ids, p, r, *facts))
    lessons = warmup.make_lessons(params, config, rollouts, rows=2, row_length=20)
    return params, Eagle(config).init_params(jax.random.key(1)), lessons, rollouts


def entries(config, params, rollouts):
    """(embedding, hidden state) and the next hidden state of every entry, a sequence (of a segment) at a time, float64."""
    table = np.asarray(params["embedding"], np.float64) * config.embed_scale
    run = jax.jit(lambda batch: hidden_states(params, config, batch))
    x, y, done = [], [], set()
    for r in rollouts:
        lesson = warmup.make_lessons(params, config, [r], rows=1, row_length=20)[0]
        hidden = np.asarray(run(lesson.batch)[0], np.float64)
        for at in range(1, len(r.token_ids)):
            if at < r.prompt_length and (r.group_id, at) in done:
                continue  # siblings share their prompt
            done.add((r.group_id, at))
            x.append(np.concatenate([table[r.token_ids[at]], hidden[at - 1]]))
            y.append(hidden[at])
    return np.array(x), np.array(y)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_regression_is_least_squares_over_every_entry(family):
    config = CONFIGS[family]
    params, _, lessons, rollouts = world(config)
    found = start.moments(params, config, lessons)
    x, y = entries(config, params, rollouts)
    assert found.count == len(x)
    np.testing.assert_allclose(found.inputs, x.T @ x, rtol=1e-3, atol=1e-3 * np.abs(x.T @ x).max())
    np.testing.assert_allclose(found.squares, np.sum(y**2, axis=0), rtol=1e-3)
    ridge = 1e-2
    power = ridge * np.mean(np.sum(x**2, axis=0))
    stacked = np.concatenate([x, np.sqrt(power) * np.eye(x.shape[1])])
    expected = np.linalg.lstsq(stacked, np.concatenate([y, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
    np.testing.assert_allclose(start.regression(found, ridge), expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("family", CONFIGS)
def test_a_drafter_begins_as_the_regression_and_every_part_of_it_can_learn(family):
    config = CONFIGS[family]
    params, fresh, lessons, _ = world(config)
    found = start.moments(params, config, lessons)
    begun = start.begin(fresh, config, found)
    assert jax.tree.structure(begun) == jax.tree.structure(fresh)
    lesson = lessons[0]

    @jax.jit
    def predicted(trained):
        return guesses(trained, params, config, lesson.hidden, lesson.batch, 1)[0][0]

    b = lesson.batch
    at = np.arange(len(b.token_ids))[:, None]
    before = eagle.packed_sources(20, b.source_index, b.target_index, b.target_mask)
    source = b.source_index
    table = np.asarray(params["embedding"]) * config.embed_scale
    x = np.concatenate([table[b.token_ids[at, source]], lesson.hidden[at, np.asarray(before)[at, source]]], axis=-1)
    expected = x @ start.regression(found)
    np.testing.assert_allclose(predicted(begun)[b.target_mask], expected[b.target_mask], atol=2e-3 * np.abs(expected).max())
    # Training moves what writes to the stream at once, and what lies behind it from then on.
    optimizer = start.in_units(make_optimizer(OptimizerConfig(learning_rate=1e-2)), start.units(fresh, found))
    step = warmup.make_step(config, DrafterLossConfig(0.1, 1.0, depths=2), optimizer)
    state = warmup.init_state(jax.tree.map(jnp.array, begun), optimizer)
    for _ in range(3):
        state, _ = step(state, {}, params, lesson)
    assert int(state.skipped) == 0
    for (path, a), z in zip(jax.tree_util.tree_leaves_with_path(begun), jax.tree.leaves(state.trained), strict=True):
        assert not np.allclose(a, z), path


def test_training_in_units_does_not_depend_on_the_scale_of_channels():
    """The same regression problem with inputs and outputs in other units has the same course of losses."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 5)), rng.normal(size=(64, 3))
    read, write = rng.uniform(0.01, 30, 5), rng.uniform(0.1, 20, 3)
    plain = make_optimizer(OptimizerConfig(learning_rate=0.05, clip_norm=0.5))

    def course(x, y, optimizer, scale):
        w, losses = jnp.zeros((5, 3)), []
        state = optimizer.init(w)
        loss = jax.jit(jax.value_and_grad(lambda w: jnp.mean(jnp.square((x @ w - y) / scale))))
        for _ in range(20):
            value, grad = loss(w)
            updates, state = optimizer.update(grad, state, w)
            w = optax.apply_updates(w, updates)
            losses.append(float(value))
        return losses

    scaled = start.in_units(plain, jnp.asarray(write / read[:, None], jnp.float32))
    expected = course(jnp.asarray(x), jnp.asarray(y), plain, 1.0)
    found = course(jnp.asarray(x * read), jnp.asarray(y * write), scaled, jnp.asarray(write))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected[-1] < expected[0]


def test_faults():
    config = CONFIGS["llama"]
    params, _, lessons, _ = world(config)
    with pytest.raises(ValueError, match="ridge=0 must be > 0"):
        start.regression(start.moments(params, config, lessons), 0)
    with pytest.raises(ValueError, match="no entry"):
        start.moments(params, config, [])


def test_an_eagle3_drafter_begins_with_the_final_state_fused_from_what_it_reads():
    """The last of two layers is among those read, so nothing is lost: it begins where EAGLE does."""
    config = CONFIGS["llama"]
    drafter, (params, fresh, lessons, rollouts) = Eagle3(config), world(config)
    wide = warmup.make_lessons(params, drafter.target, rollouts, rows=2, row_length=20)
    fuse = start.fusion(drafter.target, wide)
    for lesson, plain in zip(wide, lessons, strict=True):
        real = lesson.batch.segment_ids != 0
        found = np.asarray(fused({FUSE: {"kernel": jnp.asarray(fuse.kernel)}}, jnp.asarray(lesson.hidden), drafter.target))
        np.testing.assert_allclose(found[real], plain.hidden[real], atol=1e-2 * np.abs(plain.hidden).max())
    fresh3 = drafter.init_params(jax.random.key(1))
    begun = start.begin(fresh3, config, start.moments(params, drafter.target, wide, fuse), fuse=fuse)
    assert jax.tree.structure(begun) == jax.tree.structure(fresh3)
    units = start.units(fresh3, start.moments(params, drafter.target, wide, fuse), fuse)
    assert all(np.all(np.isfinite(x)) and np.all(np.asarray(x) > 0) for x in jax.tree.leaves(units))
    plain = start.begin(fresh, config, start.moments(params, config, lessons))
    measure, loss = warmup.make_measure, DrafterLossConfig(1.0, 1.0)
    with_three, with_one = (
        measure(c, loss)(own, params, x) for c, own, x in ((drafter.target, begun, wide), (config, plain, lessons))
    )
    assert with_three["feature_loss"] == pytest.approx(with_one["feature_loss"], rel=0.05)
