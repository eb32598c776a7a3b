"""New weights between the launches of running requests: every token is the draw of the version it says."""

import numpy as np
import pytest
from forward64 import all_logits
from rollout_world import DRAFTERS, EOS, SEED, TARGET, VALID, make_requests
from test_refresh import generate, perturbed

from adrl_jax.bandit.fixed import fixed
from adrl_jax.rollout import declared
from adrl_jax.rollout.engine import Engine, EngineConfig, Flow
from adrl_jax.rollout.in_flight import Versions
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import SamplingParams

ARMS = (OFF, Strategy("eagle", 3))
SETTINGS = dict(max_batch=8, batch_buckets=(2, 8), cache_bucket=64, rounds_per_launch=2)


@pytest.fixture(scope="module")
def engine(world):
    return Engine(TARGET, EngineConfig(SEED, EOS, VALID, ARMS, **SETTINGS), {"eagle": DRAFTERS["eagle"]})


def run(engine, world, requests, cache, arm=OFF, swaps=(2, 4), feed=None):
    """Publishes version 10 + k before launch `swaps[k]`; returns what a call gives and what it hands out on the way."""
    drafter = {"eagle": world.drafter_params["eagle"]}
    weights = [world.params] + [perturbed(world.params, 0.05, seed) for seed in (1, 2)]
    engine.publish(weights[0], 10, drafter)
    launches, handed = [], {}

    def on_launch(record):
        launches.append(record)
        if len(launches) in swaps:
            k = swaps.index(len(launches)) + 1
            engine.publish(weights[k], 10 + k, drafter)

    bandit = fixed(engine.config.strategies.index(arm), 2)
    flow = Flow(feed, (lambda done: handed.update(done)) if feed else None, cache)
    result = engine.generate(
        [] if feed else requests, SamplingParams(1.0), bandit, bandit.init(), on_launch=on_launch, flow=flow
    )
    return ([handed[i] for i in sorted(handed)] if feed else result.rollouts), weights


def check_tokens(rollouts, weights, tolerance):
    """Each token is the coupled draw of its version's weights given the text before it, in float64."""
    mixed = 0
    for r in rollouts:
        assert (np.diff(r.policy_versions) >= 0).all()
        mixed += len(set(r.policy_versions.tolist())) > 1
        key = noise.request_keys(SEED, r.prompt_id, r.visit, r.sample)
        logits = {v: all_logits(TARGET, weights[v - 10], r.token_ids, 64)[:, :VALID] for v in set(r.policy_versions.tolist())}
        for place, version in enumerate(r.policy_versions.tolist()):
            position = r.prompt_length + place
            own = logits[version][position - 1]
            u = (noise.bits(noise.position_keys(key, np.array([[position]]), noise.Role.TARGET)[0, 0], VALID) + 0.5) * 2.0**-32
            scores = own - np.log(-np.log1p(-u))
            assert scores.max() - scores[r.token_ids[position]] < tolerance
            law = own - own.max() - np.log(np.exp(own - own.max()).sum())
            assert abs(law[r.token_ids[position]] - r.log_probs[place]) < max(tolerance, 1e-4)
    return mixed


def test_a_recomputed_cache_gives_the_new_versions_own_tokens(engine, world):
    requests = make_requests(budgets=(6, 36, 30, 2, 24), samples=1)
    for arm in ARMS:
        rollouts, weights = run(engine, world, requests, "recompute", arm)
        assert check_tokens(rollouts, weights, 1e-3) >= 2
        seen = {v for r in rollouts for v in r.policy_versions.tolist()}
        assert seen == {10, 11, 12}


def test_a_kept_cache_says_so_in_versions_and_draws_what_it_says(engine, world):
    """Tokens before the first swap are version 10's; later ones come from a law that no single version has."""
    requests = make_requests(budgets=(6, 36, 30, 2, 24), samples=1)
    kept, _ = run(engine, world, requests, "keep")
    plain = generate_plain(engine, world, requests)
    swapped = False
    for a, b in zip(kept, plain):
        first = int((a.policy_versions == 10).sum())
        assert a.response_ids[:first].tolist() == b.response_ids[:first].tolist()
        swapped |= a.response_ids.tolist() != b.response_ids.tolist()
    assert swapped and {v for r in kept for v in r.policy_versions.tolist()} == {10, 11, 12}
    recomputed, _ = run(engine, world, requests, "recompute")
    assert [r.policy_versions[0] for r in kept] == [r.policy_versions[0] for r in recomputed]
    assert any(np.abs(a.log_probs[-1] - b.log_probs[-1]) > 1e-6 for a, b in zip(kept, recomputed))


def generate_plain(engine, world, requests):
    engine.publish(world.params, 10, {"eagle": world.drafter_params["eagle"]})
    return generate(engine, requests, sampling=SamplingParams(1.0)).rollouts


def test_without_leave_to_swap_a_call_ends_with_the_weights_it_began_with(engine, world):
    requests = make_requests(budgets=(6, 20), samples=2)
    rollouts, _ = run(engine, world, requests, None)
    assert {v for r in rollouts for v in r.policy_versions.tolist()} == {10}
    assert [r.token_ids.tolist() for r in rollouts] == [r.token_ids.tolist() for r in generate_plain(engine, world, requests)]
    with pytest.raises(ValueError, match="choose one of keep, recompute"):
        Flow(cache="drop")


def test_requests_that_come_and_go_get_the_tokens_they_get_alone(engine, world):
    """A feed that holds back, comes in drops and lets the batch shrink and grow again."""
    requests = make_requests(budgets=(3, 14, 9, 1, 12), samples=3)
    waiting, idle_calls = list(requests), []

    def feed(room, idle):
        assert 0 < room <= 8
        if not waiting:
            return None
        if not idle and len(waiting) < 10:
            return []
        idle_calls.append(idle)
        some, waiting[:] = waiting[: min(room, 4)], waiting[min(room, 4) :]
        return some

    rollouts, _ = run(engine, world, requests, None, feed=feed)
    alone = generate_plain(engine, world, requests)
    assert [r.token_ids.tolist() for r in rollouts] == [r.token_ids.tolist() for r in alone]
    assert [r.sample for r in rollouts] == [r.sample for r in requests] and sum(idle_calls) >= 2
    kinds = {key[0] for key in engine.programs.keys()}
    assert {"more_rows", "rewrite"} <= kinds
    law = Law.of(SamplingParams(1.0), VALID)
    known = declared.programs(engine.config, 60, 20, engine.drafters, law, flow=True)
    assert not [key for key in engine.programs.keys() if key not in set().union(*known.values())]


def test_new_drafter_weights_alone_change_no_version_and_no_token(engine, world):
    requests = make_requests(budgets=(6, 14), samples=2)
    plain = generate_plain(engine, world, requests)
    engine.publish_drafter({"eagle": world.random_drafter_params["eagle"]}, 7)
    assert (engine.version, engine.drafter_version) == (10, 7)
    again = generate(engine, requests, ARMS[1], sampling=SamplingParams(1.0)).rollouts
    assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in plain]
    assert {v for r in again for v in r.policy_versions.tolist()} == {10}
    with pytest.raises(ValueError, match="call publish first"):
        Engine(TARGET, engine.config, engine.drafters).publish_drafter({}, 1)


def test_versions_by_marks():
    versions = Versions()
    versions.mark(np.array([4, 7]), np.array([5, 3]), 1)
    versions.mark(np.array([4]), np.array([8]), 2)
    assert versions.of(4, 3, 10, 3).tolist() == [1, 1, 2, 2, 2, 3, 3]
    assert versions.of(4, 3, 5, 3).tolist() == [3, 3]  # forgotten
    versions.restart(7, 6, 5)
    assert versions.of(7, 2, 8, 6).tolist() == [5, 5, 5, 5, 6, 6]
