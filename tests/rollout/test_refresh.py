"""A stale rollout refreshed under new weights is a fresh rollout under new weights, token for token, whatever drafts."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import DRAFTERS, TARGET, make_requests

from adrl_jax.bandit.fixed import fixed
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import engine_layout, init_params
from adrl_jax.rollout import refresh, ties
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason, Prompt, Request, SamplingParams

ARMS = (OFF, *(Strategy(name, 3) for name in DRAFTERS))
SAMPLING = SamplingParams(0.9)


def perturbed(params, scale, seed=9):
    """Weights some updates later."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    fresh = [x + scale * jnp.std(x) * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys)]
    return jax.tree.unflatten(treedef, fresh)


def generate(engine, requests, arm=OFF, sampling=SAMPLING):
    bandit = fixed(engine.config.strategies.index(arm), len(engine.config.strategies))
    return engine.generate(requests, sampling, bandit, bandit.init())


@pytest.fixture(scope="module")
def stale(world):
    """Requests, their rollouts under version 3, an engine that serves version 4, and what is fresh under it."""
    engine = world.engine(strategies=ARMS)
    requests = make_requests(budgets=(3, 30, 17, 1, 24))
    old = generate(engine, requests).rollouts
    engine.publish(perturbed(world.params, 0.03), 4, world.drafter_params)
    return requests, old, engine, generate(engine, requests).rollouts


def common(a, b):
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


@pytest.mark.parametrize("arm", ARMS, ids=lambda s: s.name)
def test_refreshed_is_fresh_for_every_drafter(stale, arm):
    requests, old, engine, fresh = stale
    result = generate(engine, refresh.requests_for(old, requests), arm)
    for a, b, o in zip(result.rollouts, fresh, old, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason and a.group_id == b.group_id and a.sample == b.sample
        assert np.abs(a.log_probs - b.log_probs).max() < 1e-4
        assert set(a.policy_versions.tolist()) == {4} and set(o.policy_versions.tolist()) == {3}
    kept = sum(common(o.response_ids, f.response_ids) for o, f in zip(old, fresh))
    assert result.stats.drafts[:2] == (sum(o.response_length for o in old), kept)
    # The comparison means something: some drafts stood in part, some as a whole, some not at all past a point.
    shares = [common(o.response_ids, f.response_ids) / o.response_length for o, f in zip(old, fresh)]
    assert 0 < np.mean(shares) < 1 and max(shares) == 1


def test_unchanged_weights_keep_every_token_and_take_no_launch(stale):
    requests, _, engine, fresh = stale
    result = generate(engine, refresh.requests_for(fresh, requests))
    assert [r.token_ids.tolist() for r in result.rollouts] == [r.token_ids.tolist() for r in fresh]
    assert not result.stats.launches and result.stats.drafts == (total := sum(r.response_length for r in fresh), total, 0)
    assert [r.finish_reason for r in result.rollouts] == [r.finish_reason for r in fresh]


def test_a_half_finished_response_goes_on_where_it_stopped(stale):
    requests, _, engine, fresh = stale
    halves = [dataclasses.replace(q, draft=r.response_ids[: max(1, r.response_length // 2)]) for q, r in zip(requests, fresh)]
    result = generate(engine, halves)
    assert [r.token_ids.tolist() for r in result.rollouts] == [r.token_ids.tolist() for r in fresh]
    assert all(np.abs(a.log_probs - b.log_probs).max() < 1e-4 for a, b in zip(result.rollouts, fresh))


def test_drafts_that_cannot_be_verified_are_refused(stale):
    requests, old, engine, _ = stale
    too_long = dataclasses.replace(requests[0], draft=np.full(99, 7))
    with pytest.raises(ValueError, match=r"a draft of 99 tokens; 1 to max_new_tokens=3 are legal"):
        generate(engine, [too_long])
    other = Engine(TARGET, dataclasses.replace(engine.config, verification="rejection"), DRAFTERS)
    other._served = engine._served
    with pytest.raises(ValueError, match="only coupled noise can be verified again"):
        generate(other, refresh.requests_for(old, requests))
    with pytest.raises(ValueError, match="not of its request's"):
        refresh.requests_for(old[::-1], requests)


def test_the_law_of_refreshed_rollouts_is_the_new_policys():
    """Five tokens, two positions: all 25 pairs against float64 enumeration, chi-square at 24 degrees of freedom."""
    tiny = ModelConfig("llama", 5, 8, 16, 1, 2, 1, 4, max_positions=16)
    old = jax.tree.map(lambda x: x * 25 if x.ndim == 2 else x, init_params(tiny, jax.random.key(0)))
    new = perturbed(old, 0.4)
    count = 6000
    config = EngineConfig(7, (), None, (OFF,), max_batch=512, batch_buckets=(512,), prefill_batch=512, cache_bucket=8)
    engine = Engine(tiny, config)
    prompt = Prompt(3, np.array([2, 0, 4]))
    requests = [Request(prompt, 0, s, 0, 2, forced_length=True) for s in range(count)]
    engine.publish(engine_layout(old, tiny), 0)
    stale = generate(engine, requests, sampling=SamplingParams(1.0)).rollouts
    engine.publish(engine_layout(new, tiny), 1)
    result = generate(engine, refresh.requests_for(stale, requests), sampling=SamplingParams(1.0))
    reused = result.stats.drafts[1] / (2 * count)
    assert 0.2 < reused < 0.9

    def law(ids):
        logits = ties.position_logits(tiny, engine_layout(new, tiny), np.array(ids))
        p = np.exp(logits - logits.max())
        return p / p.sum()

    first = law([2, 0, 4])
    expected = np.array([first[a] * law([2, 0, 4, a]) for a in range(5)]) * count
    seen = np.zeros((5, 5))
    for r in result.rollouts:
        seen[tuple(r.response_ids)] += 1
    assert expected.min() > 5
    assert ((seen - expected) ** 2 / expected).sum() < 51.2  # 0.1 % of chi-square with 24 degrees of freedom
    stale_seen = np.zeros((5, 5))
    for r in stale:
        stale_seen[tuple(r.response_ids)] += 1
    assert ((stale_seen - expected) ** 2 / expected).sum() > 200  # the test can tell the policies apart


def test_choosing_by_disagreement_selects_and_choosing_for_the_batch_does_not():
    """Two tokens worth 1 and 3, new policy (0.8, 0.2): true value 1.400. Correcting where the coupled draws agree and
    refreshing where they differ gives 0.2 / 0.84 * 0.2 * 3 + 0.8 + 0.64 = 1.583; either one for all gives 1.400."""
    old, new, value, n = np.array([0.16, 0.84]), np.array([0.8, 0.2]), np.array([1.0, 3.0]), 400_000
    keys = noise.position_keys(noise.request_keys(0, 5, 0, np.arange(n)), np.zeros((n, 1), int), noise.Role.TARGET)[:, 0]
    u = (noise.bits(keys, 2).astype(np.float64) + 0.5) * 2.0**-32
    gumbel = -np.log(-np.log1p(-u))
    stale, fresh = (np.argmax(np.log(p) + gumbel, axis=1) for p in (old, new))
    corrected, refreshed = (new / old)[stale] * value[stale], value[fresh]
    selected = np.where(stale == fresh, corrected, refreshed)
    error = 5 * np.std(selected) / np.sqrt(n)
    exact = sum(
        min(o, m) * m / o * v for o, m, v in zip(old, new, value)
    ) + max(new[0] - old[0], 0) * value[0]  # fmt: skip
    assert exact == pytest.approx(1.583, abs=5e-4) and (new @ value) == pytest.approx(1.4)
    assert abs(selected.mean() - 1.583) < error < 0.1 * 0.183
    assert abs(refreshed.mean() - 1.4) < error and abs(corrected.mean() - 1.4) < 5 * np.std(corrected) / np.sqrt(n)


def test_choices_and_judgement_against_plain_loops():
    """`choices` position by position in float64; `judge` against a loop over tokens."""
    params = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(TARGET, jax.random.key(1)))
    hidden = jax.random.normal(jax.random.key(2), (3, 64, TARGET.hidden_size))
    keys = noise.request_keys(1, [1, 2, 3], 0, 0)
    tokens, log_probs = refresh.choices(Law(valid_vocab=50), params, hidden, np.int32(40), keys, np.full(3, 0.7, np.float32))
    logits = np.asarray(hidden, np.float64) @ np.asarray(params["embedding"], np.float64).T
    logits = logits[..., :50] / 0.7
    law = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    for row, place in itertools.product(range(3), (40, 47, 63)):
        key = noise.position_keys(keys[row : row + 1], np.array([[place + 1]]), noise.Role.TARGET)[0, 0]
        u = (noise.bits(key, 50).astype(np.float64) + 0.5) * 2.0**-32
        best = int(np.argmax(law[row, place] - np.log(-np.log1p(-u))))
        assert int(tokens[row, place]) == best and abs(float(log_probs[row, place]) - law[row, place, best]) < 1e-3
    assert not np.asarray(tokens)[:, :32].any()  # the first part holds no place of interest
    random = np.random.default_rng(0)
    for _ in range(200):
        prompt, budget = Prompt(1, random.integers(0, 4, random.integers(1, 4))), int(random.integers(1, 7))
        draft = random.integers(0, 4, random.integers(1, budget + 1))
        own = random.integers(0, 4, 20)
        known = refresh.judge(Request(prompt, 0, 0, 0, budget, draft=draft), own, np.arange(20.0), (0,))
        text, kept = [], 0
        for i, token in enumerate(draft):
            text.append(int(own[len(prompt.token_ids) - 1 + i]))
            if text[-1] != token:
                break
            kept += 1
        assert known.token_ids.tolist() == text and known.kept == kept
        stop = text[-1] == 0
        reason = FinishReason.STOP if stop else FinishReason.LENGTH if len(text) == budget else FinishReason.RUNNING
        assert known.finish_reason == reason
