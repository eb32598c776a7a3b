"""EAGLE's loss: the formula, the same value for every packing, nothing of the policy trained, and a drafter that learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.drafter import loss as drafter_loss
from adrl_jax.drafter.law_loss import law_loss
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.learner import packing, supervised, update
from adrl_jax.learner.attention import packed_attention
from adrl_jax.learner.forward import ForwardConfig, forward, hidden_states
from adrl_jax.learner.log_probs import head_matrix
from adrl_jax.learner.losses import LossConfig
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import cached_attention, init_cache
from adrl_jax.models.transformer import Transformer, engine_layout, init_params, logits
from adrl_jax.speculation import eagle
from adrl_jax.types import FinishReason, Rollout, SamplingParams

TINY = ModelConfig("llama", 41, 32, 48, 2, 4, 2, 8)
CONFIG = DrafterLossConfig()


def params_of(seed=0):
    draw = init_params(TINY, jax.random.key(seed))
    return jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, draw)


def drafter_params_of(seed=1):
    return jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, eagle.Eagle(TINY).init_params(jax.random.key(seed)))


def make_rollouts(groups=((5, (1, 4)), (1, (3,)), (6, (2, 7)))):
    rng, out = np.random.default_rng(0), []
    for g, (p, lengths) in enumerate(groups):
        prompt = rng.integers(0, 41, p)
        for r in lengths:
            ids = np.concatenate([prompt, rng.integers(0, 41, r)]).astype(np.int32)
            facts = (np.full(r, -3, np.float32), np.zeros(r, np.int32), FinishReason.STOP, SamplingParams())
            out.append(Rollout(g, 0, 0, g, ids, p, r, *facts))
    return out


def loss_of(drafter_params, params, batch, temperature=1.0):
    config = ForwardConfig(temperature, vocab_block=16)
    out = forward(params, TINY, config, batch)
    return drafter_loss.packed_drafter_loss(CONFIG, drafter_params, params, TINY, config, out, batch)


def unpacked(drafter_params, params, rollouts, temperature, drafted=slice(None)):
    """The loss one sequence at a time, with the cache and the entries that serving uses; `drafted` are the ids that may be."""
    total, count = 0.0, 0
    for r in rollouts:
        n = len(r.token_ids)
        tokens, places = jnp.asarray(r.token_ids)[None], jnp.arange(n)[None]
        hidden, _ = Transformer(TINY).apply(
            {"params": params}, tokens, places, attend=cached_attention(places), cache=init_cache(TINY, 1, n)
        )
        entries = jnp.arange(n - 1)[None]
        features, ids, positions = eagle.inputs(hidden, tokens, places, entries, entries + 1)
        predicted, _ = eagle.predict(
            drafter_params, params, TINY, features, ids, positions, cached_attention(entries), init_cache(TINY, 1, n, 1)
        )
        for source in range(max(1, r.prompt_length - 1), n - 1):
            h, f = hidden[0, source], predicted[0, source - 1]
            p = jax.nn.softmax(logits(params, h) / temperature)[drafted]
            d = jnp.abs(f - h)
            total += jnp.mean(jnp.where(d < 1, 0.5 * d**2, d - 0.5))
            total += -0.1 * jnp.sum(p * jax.nn.log_softmax(logits(params, f)[drafted] / temperature))
            count += 1
    return total, count


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_every_packing_equals_serving_one_sequence_at_a_time(temperature):
    params, drafter_params, rollouts = params_of(), drafter_params_of(), make_rollouts()
    reference = jax.jit(jax.value_and_grad(lambda d: unpacked(d, params, rollouts, temperature), has_aux=True))
    (value, count), gradient = reference(drafter_params)
    # The one prompt of a single token gives no entry for the first token of its response.
    assert count == sum(r.response_length for r in rollouts) - 1

    @jax.jit
    def packed(drafter_params, batch):
        def objective(d):
            loss = loss_of(d, params, batch, temperature)
            return loss.numerator, loss.denominator

        return jax.value_and_grad(objective, has_aux=True)(drafter_params)

    for layout in packing.LAYOUTS:
        for row_length, rows in ((13, 6), (64, 1)):  # the last group needs two of the short rows
            batch = packing.pack(rollouts, [0.0] * len(rollouts), row_length=row_length, layout=layout, row_multiple=rows)
            (got, got_count), got_gradient = packed(drafter_params, batch)
            assert float(got_count) == count
            np.testing.assert_allclose(got, value, rtol=1e-5)
            for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(got_gradient), strict=True):
                assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_a_draft_vocabulary_is_compared_on_its_ids_and_is_no_weight(layout):
    params, trained, rollouts = params_of(), drafter_params_of(), make_rollouts()
    ids = jnp.asarray([0, 3, 4, 11, 17, 18, 25, 40])
    reference = jax.jit(jax.value_and_grad(lambda d: unpacked(d, params, rollouts, 0.7, ids), has_aux=True))
    (value, count), gradient = reference(trained)

    @jax.jit
    def packed(trained, batch):
        def objective(d):
            loss = loss_of({**d, eagle.DRAFT_IDS: ids}, params, batch, 0.7)
            return loss.numerator, loss.denominator

        return jax.value_and_grad(objective, has_aux=True)(trained)

    batch = packing.pack(rollouts, [0.0] * len(rollouts), row_length=20, layout=layout)
    (got, got_count), got_gradient = packed(trained, batch)
    assert float(got_count) == count
    np.testing.assert_allclose(got, value, rtol=1e-5)
    assert jax.tree.structure(got_gradient) == jax.tree.structure(eagle.split({**trained, eagle.DRAFT_IDS: ids})[0])
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(got_gradient), strict=True):
        assert np.linalg.norm(a - b) <= 2e-5 * np.linalg.norm(a)


@pytest.mark.parametrize("reduced", [False, True])
def test_the_policy_has_no_gradient_from_the_drafter(reduced):
    """Not even through the hidden states and log-probs of the pass that the drafter reads."""
    batch = packing.pack(make_rollouts(), [0.0] * 5, row_length=24)
    extra = {eagle.DRAFT_IDS: jnp.arange(0, 41, 3)} if reduced else {}
    config = DrafterLossConfig(1.0, 1.0, 1.0, depths=3, importance_weights="prefix" if reduced else "none")

    @jax.jit
    def gradient(params):
        def objective(params):
            forward_config = ForwardConfig(0.7)
            out = forward(params, TINY, forward_config, batch)
            drafter = {**drafter_params_of(), **extra}
            return drafter_loss.packed_drafter_loss(config, drafter, params, TINY, forward_config, out, batch).numerator

        return jax.value_and_grad(objective)(params)

    value, gradients = gradient(params_of())
    assert value > 0
    for g in jax.tree.leaves(gradients):
        np.testing.assert_array_equal(g, 0.0)


def test_trained_places_are_the_ones_serving_drafts_from():
    # Prompt of 3 tokens, response of 4 (places 3 … 6): the entry (hidden p, token p + 1) predicts token p + 2.
    batch = packing.pack([make_rollouts(((3, (4,)),))[0]], [0.0], row_length=9)
    sources = eagle.packed_sources(9, *map(jnp.asarray, (batch.source_index, batch.target_index, batch.target_mask)))
    entry_hidden = np.asarray(sources)[0, batch.source_index[0][batch.target_mask[0]]]
    np.testing.assert_array_equal(entry_hidden, [1, 2, 3, 4])
    np.testing.assert_array_equal(batch.target_index[0][batch.target_mask[0]], [3, 4, 5, 6])


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("block", [8, 41, None])
def test_soft_cross_entropy_equals_the_plain_formula(by_row, block):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(41, 8)), jnp.float32)
    params = {"embedding": table} if by_row else {"embedding": table, "head": table.T}
    true, guess = (jnp.asarray(rng.normal(size=(5, 8)), jnp.float32) for _ in range(2))

    def plain(guess):
        p = jax.nn.softmax((true @ table.T)[:, :33] / 0.7)
        log_q = jax.nn.log_softmax((guess @ table.T)[:, :33] / 0.7)
        return -jnp.sum(p * log_q, axis=1), jnp.sum(jnp.minimum(p, jnp.exp(log_q)), axis=1)

    def ours(guess):
        matrix, by_row = head_matrix(params)
        out = law_loss(matrix, true, guess[None], 0.7, by_row=by_row, valid_vocab=33, vocab_block=block)
        return out.value[0], out.overlap[0]

    for a, b in zip(ours(guess), plain(guess), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    weight = jnp.arange(5.0)
    gradients = [jax.grad(lambda g, f=f: jnp.sum(weight * f(g)[0]))(guess) for f in (ours, plain)]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-5)


def test_agreement_is_one_for_a_perfect_drafter():
    params = params_of()
    h = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
    out = law_loss(params["embedding"], h, h[None], 1.0)
    value, agreement = out.value[0], out.overlap[0]
    law = jax.nn.log_softmax(h @ params["embedding"].T)
    np.testing.assert_allclose(agreement, 1.0, rtol=1e-5)
    np.testing.assert_allclose(value, -jnp.sum(jnp.exp(law) * law, axis=1), rtol=1e-5)


def test_documents_do_not_leak():
    params, drafter_params = params_of(), drafter_params_of()
    batch = packing.pack(make_rollouts(((3, (4,)), (5, (3,)))), [0.0, 0.0], row_length=20, layout="plain")

    @jax.jit
    def predicted(batch):
        segments = eagle.entry_segments(batch.segment_ids)
        return eagle.packed_forward(
            drafter_params,
            params,
            TINY,
            hidden_states(params, TINY, batch),
            batch.token_ids,
            batch.positions,
            packed_attention(segments, batch.branch_ids, batch.positions),
            sources=eagle.packed_sources(20, batch.source_index, batch.target_index, batch.target_mask),
        )[0]

    batch = jax.tree.map(jnp.asarray, batch)
    other = batch._replace(token_ids=jnp.where(batch.segment_ids == 1, (batch.token_ids + 1) % 41, batch.token_ids))
    # The first place of a segment has no entry; its number means nothing.
    second = (np.asarray(batch.segment_ids[0]) == 2) & (np.asarray(batch.positions[0]) > 0)
    a, b = np.asarray(predicted(batch))[0], np.asarray(predicted(other))[0]
    np.testing.assert_array_equal(a[second], b[second])
    first = (np.asarray(batch.segment_ids[0]) == 1) & (np.asarray(batch.positions[0]) > 0)
    assert np.any(a[first] != b[first])


def test_the_policy_is_trained_as_without_a_drafter():
    rollouts = make_rollouts()
    batch = packing.pack(rollouts, np.linspace(-1, 1, len(rollouts)), row_length=24, row_multiple=2)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2))
    arguments = (TINY, LossConfig(), optimizer, update.data_mesh(2))
    alone = update.make_update(*arguments, microbatch_rows=1)
    jointly = update.make_update(*arguments, microbatch_rows=1, drafter=CONFIG, drafter_optimizer=optimizer)
    state, _ = alone(update.init_state(params_of(), optimizer), batch)
    joint, metrics = jointly(
        update.init_state(params_of(), optimizer, drafter_params=drafter_params_of(), drafter_optimizer=optimizer), batch
    )
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(joint.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    moved = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (drafter_params_of(), joint.drafter_params)), strict=True)
    ]
    assert min(moved) > 0
    assert int(joint.version) == int(joint.drafter_version) == 1
    expected = jax.jit(loss_of)(drafter_params_of(), params_of(), batch)
    np.testing.assert_allclose(metrics["drafter/loss"], expected.numerator / expected.denominator, rtol=1e-5)


def test_a_bad_drafter_step_leaves_the_policy_alone():
    rollouts = make_rollouts()
    batch = packing.pack(rollouts, [1.0] * len(rollouts), row_length=24)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2))
    step = update.make_update(
        TINY,
        LossConfig(),
        optimizer,
        update.data_mesh(1),
        microbatch_rows=1,
        drafter=CONFIG,
        drafter_optimizer=optimizer,
    )
    broken = jax.tree.map(lambda x: x * np.nan, drafter_params_of())
    state = update.init_state(params_of(), optimizer, drafter_params=broken, drafter_optimizer=optimizer)
    state, metrics = step(state, batch)
    assert float(metrics["skipped"]) == 0 and float(metrics["drafter/skipped"]) == 1
    assert int(state.version) == 1 and int(state.drafter_version) == 0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params))


def test_a_drafter_learns_a_cycle_and_is_accepted():
    """Warm start on 1 -> 2 -> 3 -> 1 …: what training calls agreement is what serving accepts."""
    pairs = [
        (np.array([1 + (s + i) % 3 for i in range(3)]), np.array([1 + (s + i) % 3 for i in range(3, 15)])) for s in range(3)
    ]
    batch = packing.pack(supervised.examples(pairs), [0.0] * 3, row_length=48, layout="plain")
    optimizer = make_optimizer(OptimizerConfig(learning_rate=5e-3))
    step = supervised.make_supervised_update(
        TINY, optimizer, update.data_mesh(1), microbatch_rows=1, drafter=CONFIG, drafter_optimizer=optimizer
    )
    drafter = eagle.Eagle(TINY)
    state = update.init_state(
        init_params(TINY, jax.random.key(0)),
        optimizer,
        drafter_params=drafter.init_params(jax.random.key(1)),
        drafter_optimizer=optimizer,
    )
    for _ in range(200):
        state, metrics = step(state, batch)
    assert float(metrics["drafter/agreement"]) > 0.95

    n, depth, capacity = 7, 4, 16
    tokens = jnp.asarray([[1 + (s + i) % 3 for i in range(capacity)] for s in range(3)], jnp.int32)
    places = jnp.broadcast_to(jnp.arange(capacity), tokens.shape)
    hidden, _ = Transformer(TINY).apply(
        {"params": state.params}, tokens, places, attend=cached_attention(places), cache=init_cache(TINY, 3, capacity)
    )
    length = jnp.full(3, n)
    served = engine_layout(state.params, TINY)

    def draw(scores, positions):
        return jnp.argmax(scores, axis=-1), None

    memory = drafter.init_state(3, capacity)
    memory = drafter.advance(state.drafter_params, served, memory, tokens, length, hidden, n)
    proposal, _ = drafter.propose(state.drafter_params, served, memory, tokens, length, hidden, draw, depth)
    accepted = np.asarray(proposal.tokens) == np.asarray(tokens)[:, n : n + depth]
    assert abs(accepted[:, 0].mean() - float(metrics["drafter/agreement"])) < 0.05
    assert accepted.mean() > 0.9


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(feature_weight=-1.0), "feature_weight=-1.0"),
        (dict(token_weight=float("inf")), "token_weight=inf"),
        (dict(overlap_weight=float("nan")), "overlap_weight=nan"),
        (dict(depths=0), "depths=0"),
        (dict(depth_decay=1.5), "depth_decay=1.5"),
        (dict(feature_weight=0.0, token_weight=0.0), "all 0"),
    ],
)
def test_bad_configs_name_field_and_value(fields, message):
    with pytest.raises(ValueError) as error:
        DrafterLossConfig(**fields)
    assert message in str(error.value)
