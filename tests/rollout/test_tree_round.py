"""Rounds with draft trees: the same tokens as plain decoding, the same cache, and what is counted on the way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import DRAFTERS, EOS, SEED, TARGET, VALID, drafter_params, target_params

from adrl_jax.models import transformer
from adrl_jax.models.kv_cache import cached_attention, init_cache
from adrl_jax.rollout.round import RoundConfig, decode_round
from adrl_jax.rollout.state import RolloutState
from adrl_jax.rollout.tree_round import check_tree, tree_round
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, log_law
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason

ROWS, CAPACITY = 12, 64
PROMPTS = np.array([1, 20, 2, 9, 14, 5] * 2, np.int32)
BUDGETS = np.array([3, 30, 17, 1, 24, 32, 2, 40, 11, 8, 5, 33], np.int32)
SHAPES = [(1, 4, 5), (2, 3, 6), (4, 3, 12), (6, 2, 14)]
SLIDING = dataclasses.replace(TARGET, family="gemma3", sliding_window=6, sliding_pattern=2)
MODELS = {"llama": TARGET, "sliding": SLIDING}


@functools.cache
def weights(random=False):
    params = target_params()
    return params, drafter_params(params, random)["eagle"]


def start(config=TARGET, temperature=1.0, ignore_eos=False, rows=None):
    """Prompts that have been through the target, as a state with an EAGLE drafter that knows nothing yet."""
    params, rng = weights()[0], np.random.default_rng(4)
    tokens = rng.integers(6, VALID, (ROWS, CAPACITY)).astype(np.int32)
    tokens[np.arange(CAPACITY) >= PROMPTS[:, None]] = 0
    positions = jnp.broadcast_to(jnp.arange(CAPACITY), tokens.shape)
    attend, cache = cached_attention(positions), init_cache(config, ROWS, CAPACITY)
    run = jax.jit(lambda t: transformer.Transformer(config).apply({"params": params}, t, positions, attend=attend, cache=cache))
    hidden, cache = run(jnp.asarray(tokens))
    zeros = jnp.zeros(ROWS, jnp.int32)
    state = RolloutState(
        tokens=jnp.asarray(tokens),
        log_probs=jnp.zeros((ROWS, CAPACITY)),
        length=jnp.asarray(PROMPTS),
        limit=jnp.asarray(PROMPTS + BUDGETS),
        finish_reason=jnp.full(ROWS, FinishReason.RUNNING, jnp.int32),
        request_keys=jnp.asarray(noise.request_keys(SEED, np.arange(ROWS), 0, 0)),
        temperature=jnp.full(ROWS, temperature),
        ignore_eos=jnp.full(ROWS, ignore_eos),
        cache=cache,
        hidden=hidden,
        drafter_states={"eagle": Eagle(config).init_state(ROWS, CAPACITY)},
        accept_passes=zeros,
        accept_tokens=zeros,
    )
    return state if rows is None else jax.tree.map(lambda x: x[jnp.asarray(rows)], state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(config, strategy, params, own, state):
    drafter = Eagle(config.model) if strategy.speculates else None
    step = tree_round if strategy.speculates else decode_round

    def body(carry):
        state, counts, rounds = carry
        state, fresh = step(config, strategy, drafter, params, own, state)
        return state, jax.tree.map(jnp.add, counts, fresh), rounds + 1

    counts = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda s: step(config, strategy, drafter, params, own, s)[1], state))
    return jax.lax.while_loop(lambda c: jnp.any(c[0].running), body, (state, counts, jnp.int32(0)))


def decode(shape, state, model=TARGET, random=False, law=Law(valid_vocab=VALID), method="coupled"):  # noqa: B008 (frozen)
    """Rounds until every row has finished: the last state, counts and rounds. A shape of None decodes plainly."""
    strategy = OFF if shape is None else Strategy("eagle", *shape)
    config = RoundConfig(model, law, EOS, method)
    params, own = weights(random)
    return _decode(config, strategy, params, own if strategy.speculates else None, state)


def responses(state):
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [tuple(tokens[row, : length[row]]) for row in range(len(length))]


@functools.cache
def plain(temperature, model="llama", ignore_eos=False, law=Law(valid_vocab=VALID)):  # noqa: B008 (frozen)
    return decode(None, start(MODELS[model], temperature, ignore_eos), MODELS[model], law=law)[0]


def assert_same(a, b):
    assert responses(a) == responses(b)
    np.testing.assert_array_equal(a.finish_reason, b.finish_reason)
    inside = (np.arange(CAPACITY) >= PROMPTS[:, None]) & (np.arange(CAPACITY) < np.asarray(a.length)[:, None])
    np.testing.assert_allclose(np.asarray(a.log_probs)[inside], np.asarray(b.log_probs)[inside], atol=1e-4)


@pytest.mark.parametrize("random", [False, True], ids=["good", "random"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_change_nothing(shape, random):
    for temperature in (0.0, 0.7, 1.0):
        assert_same(plain(temperature), decode(shape, start(temperature=temperature), random=random)[0])
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(np.asarray(plain(1.0).finish_reason).tolist())


@pytest.mark.parametrize("law", [Law(top_k=4, valid_vocab=VALID), Law(top_p=0.7, valid_vocab=VALID)], ids=str)
def test_trees_change_nothing_under_filters(law):
    for temperature in (0.7, 1.0):
        assert_same(plain(temperature, law=law), decode((4, 3, 12), start(temperature=temperature), law=law)[0])


def test_trees_change_nothing_with_sliding_layers():
    assert_same(plain(1.0, "sliding"), decode((4, 3, 12), start(SLIDING), SLIDING)[0])


def test_ends_fall_on_every_level_of_a_tree():
    """End tokens and budgets inside accepted paths: what comes after them was never generated."""
    shape, levels = (4, 3, 12), set()
    config, strategy = RoundConfig(TARGET, Law(valid_vocab=VALID), EOS), Strategy("eagle", *shape)
    step = jax.jit(functools.partial(tree_round, config, strategy, DRAFTERS["eagle"]))
    for temperature in (0.7, 1.0):
        state = start(temperature=temperature)
        while state.running.any():
            before = np.asarray(state.length)
            running = np.asarray(state.running)
            state, _ = step(*weights(), state)
            fresh = np.asarray(state.length) - before
            assert (fresh[~running] == 0).all() and (fresh[running] >= 1).all() and (fresh <= 5).all()
            assert (np.asarray(state.length) <= np.asarray(state.limit)).all()
            for row in np.flatnonzero(running & ~np.asarray(state.running)):
                levels.add((int(fresh[row]), FinishReason(int(state.finish_reason[row]))))
        assert_same(plain(temperature), state)
    assert {n for n, reason in levels if reason == FinishReason.LENGTH} >= {1, 2, 3}
    assert {n for n, reason in levels if reason == FinishReason.STOP} >= {1, 2}


@pytest.mark.parametrize("model", sorted(MODELS))
def test_cache_and_hidden_states_are_those_of_plain_decoding(model):
    config = MODELS[model]
    one = plain(1.0, model, ignore_eos=True)
    other = decode((4, 3, 12), start(config, ignore_eos=True), config)[0]
    assert responses(one) == responses(other)
    filled = np.arange(CAPACITY) < (np.asarray(one.length) - 1)[:, None]
    for a, b in zip(one.cache.keys, other.cache.keys):
        np.testing.assert_allclose(*(np.where(filled[:, None, None], x, 0) for x in (a, b)), atol=1e-5)
    for a, b in zip(one.cache.values, other.cache.values):
        np.testing.assert_allclose(*(np.where(filled[:, None, :, None], x, 0) for x in (a, b)), atol=1e-5)
    hidden = [np.where(filled[..., None], x, 0) for x in (one.hidden, other.hidden)]
    np.testing.assert_allclose(*hidden, atol=2e-5)


def test_trees_accept_more_than_chains():
    for temperature in (0.7, 1.0):
        lengths = {}
        for shape in ((4, 1, 5), (4, 4, 14)):
            state = decode(shape, start(temperature=temperature, ignore_eos=True))[0]
            lengths[shape] = float(jnp.sum(state.accept_tokens) / jnp.sum(state.accept_passes))
        assert lengths[4, 4, 14] > 1.1 * lengths[4, 1, 5] > 1.3
    assert float(jnp.mean(decode((4, 4, 14), start(ignore_eos=True), random=True)[0].accept_passes)) > 3


def test_a_tree_of_width_one_is_the_chains_round():
    """Round by round: the same tokens committed, the same counts."""
    config, strategy = RoundConfig(TARGET, Law(valid_vocab=VALID), EOS), Strategy("eagle", 3)
    for method in ("coupled", "rejection"):
        config = dataclasses.replace(config, verification=method)
        steps = [jax.jit(functools.partial(f, config, strategy, DRAFTERS["eagle"])) for f in (decode_round, tree_round)]
        a, b = start(temperature=0.9), start(temperature=0.9)
        for _ in range(4):
            (a, counts), (b, others) = (step(*weights(), state) for step, state in zip(steps, (a, b)))
            np.testing.assert_array_equal(a.length, b.length)
            assert responses(a) == responses(b)
            for x, y in zip(counts, others):
                np.testing.assert_array_equal(x, y)


def test_counts_add_up_to_the_accept_length():
    # Rows of one token have no hidden state to draft from at first, so they are left out.
    rows = np.flatnonzero(PROMPTS > 1)
    state, counts, rounds = decode((4, 3, 12), start(ignore_eos=True, rows=rows))
    passes = int(jnp.sum(state.accept_passes))
    examined, accepted = np.asarray(counts.examined), np.asarray(counts.accepted)
    # The first round of a long prompt finds the drafter lagging; every later pass looks at a first draft.
    lagging = passes - examined[0]
    assert 0 <= lagging <= 4 * len(rows) and (np.diff(examined) <= 0).all()
    assert (examined[1:] <= accepted[:-1]).all() and (accepted <= examined).all() and accepted[0] > 0
    committed = int(jnp.sum(state.accept_tokens))
    assert committed == BUDGETS[rows].sum() and accepted.sum() + passes >= committed
    assert int(rounds) == int(jnp.max(state.accept_passes)) and int(counts.faults) == 0


def test_rejection_trees_have_the_targets_log_probs():
    state, counts, _ = decode((4, 3, 12), start(temperature=0.7), method="rejection")
    assert int(counts.accepted[1]) > 0
    tokens = np.asarray(state.tokens)
    positions = jnp.broadcast_to(jnp.arange(CAPACITY), tokens.shape)
    attend, cache = cached_attention(positions), init_cache(TARGET, ROWS, CAPACITY)
    hidden, _ = transformer.Transformer(TARGET).apply(
        {"params": weights()[0]}, jnp.asarray(tokens), positions, attend=attend, cache=cache
    )
    logits = transformer.logits(weights()[0], hidden)
    law = np.asarray(log_law(logits, jnp.full(tokens.shape, 0.7), Law(valid_vocab=VALID)))
    expected = np.take_along_axis(law[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    inside = (np.arange(CAPACITY) >= PROMPTS[:, None]) & (np.arange(CAPACITY) < np.asarray(state.length)[:, None])
    np.testing.assert_allclose(np.asarray(state.log_probs)[:, 1:][inside[:, 1:]], expected[inside[:, 1:]], atol=1e-4)


def test_a_row_does_not_know_its_batch():
    whole = responses(decode((4, 3, 12), start())[0])
    for rows in ([5], [7, 1, 4]):
        part = responses(decode((4, 3, 12), start(rows=rows))[0])
        assert part == [whole[row] for row in rows]


def test_a_drafter_without_numbers_costs_speed_only():
    params, own = weights()
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), own)
    for method in ("coupled", "rejection"):
        config = RoundConfig(TARGET, Law(valid_vocab=VALID), EOS, method)
        state, counts, _ = _decode(config, Strategy("eagle", 3, 2, 6), params, broken, start())
        assert int(counts.faults) > 0 and int(counts.accepted.sum()) == 0
        assert bool(jnp.isfinite(state.log_probs).all())
        assert_same(plain(1.0), state)  # no draft is tried, so rejection too draws with the target's noise


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match=r"x-d2-w2-v4.*'ngram' drafts chains"):
        check_tree(Strategy("x", 2, 2, 4), DRAFTERS["ngram"])
    config = RoundConfig(TARGET, Law(), EOS, simulate_acceptance=0.5)
    with pytest.raises(ValueError, match=r"simulate_acceptance=0.5.*width=2"):
        tree_round(config, Strategy("eagle", 2, 2, 4), DRAFTERS["eagle"], None, None, None)
