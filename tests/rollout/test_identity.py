"""Speculation, batching and every size of the engine change the speed, never the tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import DEPTHS, EOS, TARGET, VALID

from adrl_jax.models import transformer
from adrl_jax.models.kv_cache import cached_attention, init_cache
from adrl_jax.rollout import ties
from adrl_jax.sampling.law import Law, log_law
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason

FILTERS = {"none": {}, "top_k": {"top_k": 4}, "top_p": {"top_p": 0.7}}


def assert_same(a, b):
    for x, y in zip(a.rollouts, b.rollouts, strict=True):
        assert (x.prompt_id, x.sample) == (y.prompt_id, y.sample)
        np.testing.assert_array_equal(x.token_ids, y.token_ids)
        assert x.finish_reason == y.finish_reason
        np.testing.assert_allclose(x.log_probs, y.log_probs, atol=1e-4)


@pytest.fixture(scope="module")
def plain(world, requests_of):
    """Results without speculation, by (temperature, filters, batch)."""
    known = {}

    def get(temperature, filters="none", batch=8):
        key = (temperature, filters, batch)
        if key not in known:
            known[key] = world.run(requests_of(), temperature, OFF, FILTERS[filters], max_batch=batch, batch_buckets=(batch,))
        return known[key]

    return get


CHAINS = [("ngram", d) for d in DEPTHS] + [("eagle", d) for d in DEPTHS] + [("random", d) for d in DEPTHS] + [("model", 3)]


def run_chain(world, requests, temperature, chain, filters="none", **settings):
    name, depth = chain
    strategy = Strategy("eagle" if name == "random" else name, depth)
    return world.run(requests, temperature, strategy, FILTERS[filters], random=name == "random", **settings)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: f"{c[0]}-d{c[1]}")
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_speculation_changes_nothing(world, requests_of, plain, temperature, chain):
    assert_same(plain(temperature), run_chain(world, requests_of(), temperature, chain))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["ngram", "eagle", "random"])
def test_speculation_changes_nothing_in_small_batches(world, requests_of, plain, name, batch):
    spec = run_chain(world, requests_of(), 1.0, (name, 3), max_batch=batch, batch_buckets=(batch,))
    assert_same(plain(1.0), spec)
    assert_same(plain(1.0), plain(1.0, batch=batch))


@pytest.mark.parametrize("filters", ["top_k", "top_p"])
@pytest.mark.parametrize("name", ["eagle", "random"])
def test_speculation_changes_nothing_under_filters(world, requests_of, plain, name, filters):
    for temperature in (0.7, 1.0):
        assert_same(plain(temperature, filters), run_chain(world, requests_of(), temperature, (name, 3), filters))


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ["ngram", "eagle", "random", "model", "twin"])
def test_speculation_changes_nothing_full_matrix(world, requests_of, plain, name, depth, batch, filters):
    for temperature in (0.0, 0.7, 1.0):
        sizes = dict(max_batch=batch, batch_buckets=(batch,))
        spec = run_chain(world, requests_of(), temperature, (name, depth), filters, **sizes)
        assert_same(plain(temperature, filters), spec)


def test_drafters_differ_in_what_they_accept(world, requests_of):
    """The drafters of these tests are really good, bad and perfect, so the tests above see all cases."""
    names = ("eagle", "random", "twin")
    lengths = {n: run_chain(world, requests_of(forced=True), 1.0, (n, 3)).stats.accept_length for n in names}
    assert lengths["twin"] > 3.3
    assert lengths["eagle"] > 1.6
    assert lengths["random"] < 1.3


def test_a_perfect_drafter_commits_all_it_can(world, requests_of):
    budgets = (4, 8, 12, 20, 40)
    requests = requests_of(forced=True, samples=1, budgets=budgets)
    result = world.run(requests, 1.0, Strategy("twin", 3))
    assert result.stats.accept_length == 4
    for rollout, budget in zip(result.rollouts, budgets):
        assert rollout.response_length == budget
        assert rollout.accept_passes == budget // 4
        assert rollout.accept_tokens == budget
    result = world.run(requests_of(forced=True, samples=1, budgets=(6,) * 5), 1.0, Strategy("twin", 3))
    assert result.stats.accept_length == 3  # 4, then the 2 that the budget leaves


def test_log_probs_are_a_full_forwards(world, requests_of, plain):
    for temperature, filters in ((1.0, "none"), (0.7, "none"), (0.7, "top_p")):
        for result in (
            plain(temperature, filters),
            world.run(requests_of(), temperature, Strategy("eagle", 3), FILTERS[filters]),
        ):
            for rollout in result.rollouts:
                np.testing.assert_allclose(rollout.log_probs, full_forward(world.params, rollout, filters), atol=1e-4)


def full_forward(params, rollout, filters):
    width = 64
    ids = np.zeros((1, width), np.int32)
    n = len(rollout.token_ids)
    ids[0, :n] = rollout.token_ids
    logits = _logits(params, ids)[: n - 1]
    law = Law(**FILTERS[filters], valid_vocab=VALID)
    log_p = np.asarray(log_law(jnp.asarray(logits), jnp.full(n - 1, rollout.sampling.temperature), law))
    return log_p[np.arange(n - 1), rollout.token_ids[1:]][rollout.prompt_length - 1 :]


@jax.jit
def _forward(params, ids):
    positions = jnp.arange(ids.shape[1])[None]
    hidden, _ = transformer.Transformer(TARGET).apply(
        {"params": params}, ids, positions, attend=cached_attention(positions), cache=init_cache(TARGET, 1, ids.shape[1])
    )
    return transformer.logits(params, hidden[0])


def _logits(params, ids):
    return np.asarray(_forward(params, ids))


def test_rows_end_both_ways(plain):
    for temperature in (0.7, 1.0):
        assert {r.finish_reason for r in plain(temperature).rollouts} == {FinishReason.STOP, FinishReason.LENGTH}


def test_greedy_log_probs_are_zero(plain):
    assert all(np.all(r.log_probs == 0) for r in plain(0.0).rollouts)


def test_invalid_ids_are_never_drawn(plain):
    for temperature in (0.0, 1.0):
        assert max(r.response_ids.max() for r in plain(temperature).rollouts) < VALID


@pytest.mark.parametrize("arm", [OFF, Strategy("ngram", 3)], ids=lambda s: s.name)
def test_a_request_does_not_know_its_batch(world, requests_of, arm):
    requests = requests_of()
    reference = world.run(requests, 1.0, arm)
    by_name = {(r.prompt_id, r.sample): r for r in reference.rollouts}

    def check(result):
        for r in result.rollouts:
            np.testing.assert_array_equal(r.token_ids, by_name[r.prompt_id, r.sample].token_ids)
            np.testing.assert_allclose(r.log_probs, by_name[r.prompt_id, r.sample].log_probs, atol=1e-4)

    order = np.random.default_rng(1).permutation(len(requests))
    check(world.run([requests[i] for i in order], 1.0, arm))
    for alone in (1, 4, 9):
        check(world.run([requests[alone]], 1.0, arm))
    shrinking = world.run(requests, 1.0, arm, batch_buckets=(2, 8), rounds_per_launch=3, cache_bucket=16)
    check(shrinking)
    assert {x.batch_bucket for x in shrinking.stats.launches} == {2, 8}
    assert len({x.cache_bucket for x in shrinking.stats.launches}) >= 2
    check(world.run(requests, 1.0, arm, max_batch=3, batch_buckets=(3,), prefill_bucket=7, prefill_batch=2))


def test_strategies_may_change_from_launch_to_launch(world, requests_of, plain):
    """Drafters that slept through plain rounds catch up on their own."""
    arms = [OFF, Strategy("eagle", 3), OFF, OFF, Strategy("twin", 3), Strategy("ngram", 3), Strategy("eagle", 3), OFF]
    result = world.run(requests_of(), 1.0, list(itertools.islice(itertools.cycle(arms), 60)), rounds_per_launch=2)
    assert_same(plain(1.0), result)
    assert len(set(result.stats.arm_trace)) == 4
    requests = requests_of(forced=True, samples=1, budgets=(40,) * 5)
    result = world.run(requests, 1.0, [OFF] * 8 + [Strategy("twin", 3)] * 20, rounds_per_launch=2)
    assert [r.accept_tokens / r.accept_passes for r in result.rollouts] == [4.0] * 5


def test_end_tokens_end_a_row_at_every_place_of_a_block(world, requests_of):
    """The twin commits whole blocks, so with enough rows an end token falls on each of the k + 1 places."""
    requests = requests_of(samples=24, budgets=(40,) * 5)
    result = world.run(requests, 1.0, Strategy("twin", 3))
    places = set()
    for r in result.rollouts:
        ends = np.isin(r.response_ids, EOS)
        if r.finish_reason == FinishReason.STOP:
            assert ends[-1] and not ends[:-1].any()
            places.add((r.response_length - 1) % 4)
        else:
            assert not ends.any() and r.response_length == 40 + r.sample
    assert places == {0, 1, 2, 3}
    assert_same(world.run(requests, 1.0, OFF), result)


def test_forced_lengths_run_over_end_tokens(world, requests_of):
    requests = requests_of(forced=True, samples=4, budgets=(40,) * 5)
    result = world.run(requests, 1.0, Strategy("eagle", 3))
    assert [r.response_length for r in result.rollouts] == [r.max_new_tokens for r in requests]
    assert all(r.finish_reason == FinishReason.LENGTH for r in result.rollouts)
    assert any(np.isin(r.response_ids, EOS).any() for r in result.rollouts)
    assert_same(world.run(requests, 1.0, OFF), result)


def test_rejection_log_probs_are_the_targets(world, requests_of):
    """Another method, other tokens, the same law and the same meaning of log-probs."""
    result = world.run(requests_of(), 0.7, Strategy("eagle", 3), verification="rejection")
    assert 1.2 < result.stats.accept_length < 4
    for rollout in result.rollouts:
        np.testing.assert_allclose(rollout.log_probs, full_forward(world.params, rollout, "none"), atol=1e-4)
    perfect = world.run(requests_of(forced=True), 1.0, Strategy("twin", 3), verification="rejection")
    assert perfect.stats.accept_length > 3.2  # all drafts stand where q = p


def test_ties_are_told_from_differences(world, requests_of):
    a = world.run(requests_of(), 1.0, OFF).rollouts
    b = world.run(requests_of(), 1.0, Strategy("eagle", 3)).rollouts
    how = dict(seed=11, valid_vocab=VALID)
    agreement = ties.compare(TARGET, world.params, a, b, **how)
    assert agreement.identical and agreement.tie_divergences == 0
    changed = list(b)
    ids = changed[1].token_ids.copy()
    ids[-1] = 7 + (ids[-1] == 7)
    changed[1] = type(b[1])(**{**vars(b[1]), "token_ids": ids})
    agreement = ties.compare(TARGET, world.params, a, changed, **how)
    assert not agreement.identical and len(agreement.divergences) == 1
    assert agreement.divergences[0].gap > ties.SCORE_TOLERANCE
    with pytest.raises(ValueError, match="same requests"):
        ties.compare(TARGET, world.params, a, b[:-1], **how)


def test_the_rescored_winner_is_the_sampled_token(world, requests_of):
    """In float64 every sampled token is the best of all: the tie test looks at the right noise, position and law."""
    for temperature, filters in ((1.0, {}), (0.7, {"top_p": 0.7}), (0.0, {}), (1.0, {"top_k": 4})):
        rollout = world.run(requests_of(), temperature, OFF, filters).rollouts[2]
        for place in range(rollout.prompt_length, len(rollout.token_ids)):
            logits = ties.position_logits(TARGET, world.params, rollout.token_ids[:place])
            token = int(rollout.token_ids[place])
            key = ties.noise.request_keys(11, rollout.prompt_id, rollout.visit, rollout.sample)
            key = ties.noise.position_keys(key, np.array([[place]]), ties.noise.Role.TARGET)[0, 0]
            assert ties.score_gap(logits, (token, token), key, rollout.sampling, VALID) < 1e-4
            if place > rollout.prompt_length + 3:
                break
