"""What the engine refuses, counts and remembers."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import pytest
from rollout_world import DRAFTERS, EOS, SEED, TARGET, VALID, target_params

from adrl_jax.bandit.base import Bandit
from adrl_jax.bandit.beg import beg
from adrl_jax.bandit.fixed import fixed
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.rollout.serving import Serving
from adrl_jax.rollout.settings import round_up
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, SamplingParams

SMALL = dict(strategies=(OFF, Strategy("ngram", 3)), rounds_per_launch=2)


def request(prompt=4, budget=4, start=6, **fields):
    ids = np.arange(start, start + prompt)
    return Request(Prompt(1, ids), visit=0, sample=0, group_id=0, max_new_tokens=budget, **fields)


@pytest.mark.parametrize(
    "requests,message",
    [
        ([], "requests is empty"),
        ([request(budget=0)], "max_new_tokens=0"),
        ([request(prompt=40, budget=100)], "prompt 1 has 40 tokens and max_new_tokens=100: 140 exceed the 64"),
        ([request(prompt=50, start=2), request(prompt=50, budget=15, start=2)], "65 exceed the 64"),
        ([dataclasses.replace(request(), prompt=Prompt(5, np.full(64, 7)))], "prompt 5 has 64 tokens, but prompt and response"),
        ([request(start=58)], r"token id 61, outside \[0, 61\)"),
        ([request(start=-1)], "token id -1"),
    ],
)
def test_bad_requests_are_refused_before_anything_compiles(world, requests, message):
    engine = world.engine(max_length=64, **SMALL)
    before = len(engine.programs)
    with pytest.raises(ValueError, match=message):
        engine.generate(requests, SamplingParams(), fixed(0), fixed(0).init())
    assert len(engine.programs) == before


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(max_batch=0), "max_batch=0"),
        (dict(cache_bucket=-1), "cache_bucket=-1"),
        (dict(rounds_per_launch=1.5), "rounds_per_launch=1.5"),
        (dict(verification="typical"), "choose one of coupled, rejection"),
        (dict(strategies=(Strategy("ngram", 2),)), "must contain OFF"),
        (dict(strategies=(OFF, OFF)), "duplicates"),
        (dict(strategies=(OFF, Strategy("ngram", 2, width=2, verify_tokens=4))), "drafts chains"),
        (dict(batch_buckets=(2, 4)), "must reach max_batch=8"),
        (dict(batch_buckets=(0, 8)), "positive integers"),
        (dict(eos_ids=(-1,)), "eos_ids"),
        (dict(eos_ids=(61,)), "eos_ids contains 61"),
        (dict(valid_vocab=62), r"valid_vocab=62 must be in \[1, 61\]"),
        (dict(max_length=257), "max_length=257 exceeds the model's max_positions=256"),
        (dict(strategies=(OFF, Strategy("oracle", 2))), "needs the drafter 'oracle'"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Engine(TARGET, EngineConfig(**{**dict(seed=0, eos_ids=EOS, max_batch=8), **changes}), DRAFTERS)


def test_publishing_asks_for_what_is_needed(world):
    engine = Engine(TARGET, EngineConfig(0, EOS), DRAFTERS)
    with pytest.raises(ValueError, match="call publish first"):
        engine.generate([request()], SamplingParams(), fixed(0), fixed(0).init())
    with pytest.raises(ValueError, match="drafter 'eagle' needs parameters"):
        engine.publish(world.params, 0)
    with pytest.raises(ValueError, match="version=-1"):
        engine.publish(world.params, -1, world.drafter_params)
    assert engine.version == -1


def test_new_weights_leave_nothing_behind(world, requests_of):
    """After a publish, tokens and log-probs are those of an engine that never saw the old weights."""
    config = EngineConfig(SEED, EOS, VALID, (OFF, Strategy("ngram", 3)), max_batch=8, batch_buckets=(8,), cache_bucket=128)
    other = target_params(seed=5)
    engines = [Engine(TARGET, config, DRAFTERS) for _ in range(2)]
    run = lambda e: e.generate(requests_of(), SamplingParams(), fixed(1), fixed(1).init())  # noqa: E731
    engines[0].publish(world.params, 0, world.drafter_params)
    old = run(engines[0])
    for e in engines:
        e.publish(other, 1, world.drafter_params)
    new, fresh = map(run, engines)
    for a, b, c in zip(new.rollouts, fresh.rollouts, old.rollouts):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
        assert set(a.policy_versions) == {1} and set(c.policy_versions) == {0}
    assert any(not np.array_equal(a.token_ids, c.token_ids) for a, c in zip(new.rollouts, old.rollouts))


def test_weights_published_during_a_call_wait_for_the_next(world, requests_of):
    engine = Engine(TARGET, EngineConfig(SEED, EOS, VALID, max_batch=8, rounds_per_launch=2), {})
    engine.publish(world.params, 0)
    other = target_params(seed=5)
    reference = engine.generate(requests_of(), SamplingParams(), fixed(0), fixed(0).init())
    swapped = engine.generate(
        requests_of(), SamplingParams(), fixed(0), fixed(0).init(), on_launch=lambda _: engine.publish(other, 1)
    )
    for a, b in zip(reference.rollouts, swapped.rollouts):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        assert set(b.policy_versions) == {0}
    assert engine.version == 1


def test_samples_of_a_prompt_differ_and_repeat(world):
    group = [dataclasses.replace(request(budget=12, forced_length=True), sample=s) for s in range(4)]
    a, b = (world.run(group, 1.0).rollouts for _ in range(2))
    assert len({r.token_ids.tobytes() for r in a}) == 4
    assert all(np.array_equal(x.token_ids, y.token_ids) for x, y in zip(a, b))
    again = world.run([dataclasses.replace(r, visit=7) for r in group], 1.0).rollouts
    assert not any(np.array_equal(x.token_ids, y.token_ids) for x, y in zip(a, again))


def test_groups_share_one_prefill(world, requests_of):
    engine = world.engine(prefill_batch=4, **SMALL)
    engine.generate(requests_of(samples=1), SamplingParams(), fixed(0), fixed(0).init())
    shapes = sorted(key[1] for key in engine.programs.keys() if key[0] == "prefill")
    assert shapes == [(1, 32), (4, 32)]  # five prompts: a power of two at a time
    engine.generate(requests_of(samples=8), SamplingParams(), fixed(0), fixed(0).init())
    assert sorted(key[1] for key in engine.programs.keys() if key[0] == "prefill")[-1] == (4, 32)


def test_programs_are_one_an_arm_and_size_and_compiled_once(world, requests_of):
    engine = Engine(
        TARGET,
        EngineConfig(
            SEED,
            EOS,
            VALID,
            (OFF, Strategy("ngram", 3)),
            max_batch=8,
            batch_buckets=(2, 8),
            cache_bucket=32,
            rounds_per_launch=4,
        ),
        DRAFTERS,
    )
    engine.publish(world.params, 0, world.drafter_params)

    def run(**sampling):
        trace = [0, 1] * 40
        return engine.generate(requests_of(), SamplingParams(**sampling), fixed(0), fixed(0).init(), replay_arms=trace)

    first = run()
    assert first.stats.compile_seconds > 0 and first.stats.programs == len(engine.programs)
    launches = {(x.arm, x.batch_bucket, x.cache_bucket) for x in first.stats.launches}
    programs = [key for key in engine.programs.keys() if key[0] == "launch"]
    assert len(programs) == len(launches)
    catching_up = [key for key in engine.programs.keys() if key[0] == "catch_up"]
    assert len(launches) <= sum(x.compiled for x in first.stats.launches) <= len(launches) + len(catching_up)
    for temperature in (1.0, 0.3, 0.0):
        stats = run(temperature=temperature).stats
        if temperature == 1.0:
            assert stats.programs == first.stats.programs and stats.compile_seconds == 0
            assert not any(x.compiled for x in stats.launches)
    # Another law compiles new launches; nothing else knows of it.
    count = len(engine.programs)
    run(top_k=3)
    assert len(engine.programs) > count
    others = [key for key in engine.programs.keys() if key[0] != "launch"]
    assert not any(isinstance(part, Law) for key in others for part in key)


def test_the_bandit_sees_every_launch_once_and_no_compilation(world, requests_of):
    told, asked = [], []

    def select(state, key, context):
        assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) and context.batch >= context.running >= 1
        asked.append(context)
        return np.int32(state % 2)

    def update(state, report):
        told.append(report)
        return state + 1

    spy = Bandit(lambda: 0, select, update)
    engine = world.engine(batch_buckets=(4, 8), **SMALL)
    engine.generate(requests_of(), SamplingParams(), spy, 0)
    told.clear()
    asked.clear()
    seen = []
    result = engine.generate(requests_of(), SamplingParams(), spy, 1, on_launch=seen.append)
    launches = result.stats.launches
    assert tuple(seen) == launches
    kept = [x for x in launches if not x.compiled]
    sizes = lambda x: (x.running, x.batch_bucket, x.cache_bucket)  # noqa: E731
    assert [(r.arm, r.tokens, r.seconds, r.rounds, r.running, r.batch, r.cache) for r in told] == [
        (x.arm, x.tokens, x.seconds, x.rounds, *sizes(x)) for x in kept
    ]
    assert [tuple(c)[:3] for c in asked] == [sizes(x) for x in launches]
    assert all(c.gap.shape == (2,) and not c.gap.any() for c in asked)  # looking up has nothing to catch up on
    assert result.bandit_state == 1 + len(kept)
    assert sum(x.tokens for x in launches) == sum(r.response_length for r in result.rollouts)
    assert all(b.start >= a.start + a.seconds for a, b in itertools.pairwise(launches))
    assert 0 <= result.stats.host_gap_fraction < 1
    assert result.stats.seconds >= result.stats.device_seconds + result.stats.compile_seconds
    assert [n for _, n in result.stats.running_over_time] == [x.running for x in launches]


def test_a_recorded_trace_is_replayed(world, requests_of):
    engine = world.engine(**SMALL)
    bandit = beg(engine.config.strategies, (1,), epsilon=0.5)
    result = engine.generate(requests_of(), SamplingParams(), bandit, bandit.init())
    trace = result.stats.arm_trace
    state = bandit.init()
    again = engine.generate(requests_of(), SamplingParams(), bandit, state, replay_arms=trace)
    assert again.stats.arm_trace == trace and again.bandit_state is state
    passes = [r.accept_passes for r in result.rollouts]
    assert [r.accept_passes for r in again.rollouts] == passes and any(passes)
    with pytest.raises(ValueError, match=f"replay_arms has {len(trace) - 1} arms"):
        engine.generate(requests_of(), SamplingParams(), bandit, state, replay_arms=trace[:-1])
    with pytest.raises(ValueError, match="arm 2 of launch 0 is not one of the 2"):
        engine.generate(requests_of(), SamplingParams(), bandit, state, replay_arms=[2])


def test_plain_rounds_do_not_count_as_speculation(world, requests_of):
    result = world.run(requests_of(), 1.0, OFF)
    assert np.isnan(result.stats.accept_length)
    assert all(r.accept_passes == 0 and np.isnan(r.accept_length) for r in result.rollouts)
    spec = world.run(requests_of(), 1.0, Strategy("ngram", 3))
    for r in spec.rollouts:
        assert r.accept_tokens == r.response_length >= r.accept_passes >= r.response_length / 4
    total = sum(r.accept_tokens for r in spec.rollouts) / sum(r.accept_passes for r in spec.rollouts)
    assert spec.stats.accept_length == pytest.approx(total)


def test_sizes_come_in_few_steps():
    assert [round_up(n, 16) for n in (1, 16, 17, 128, 129, 257, 1000)] == [16, 16, 32, 128, 160, 320, 1024]
    assert len({round_up(n, 16) for n in range(1, 4097)}) <= 8 + 5 * 4
    config = EngineConfig(0, (), max_batch=24)
    assert config.batches == (1, 2, 4, 8, 16, 24)


def test_a_launch_is_charged_for_its_drafters_catching_up(world, monkeypatch):
    real = Serving._catch_up

    def slow(self, strategy):
        time.sleep(0.05)
        return real(self, strategy)

    monkeypatch.setattr(Serving, "_catch_up", slow)
    config = EngineConfig(SEED, EOS, VALID, (OFF, Strategy("ngram", 3)), max_batch=8, batch_buckets=(8,), cache_bucket=128)
    engine = Engine(TARGET, config, DRAFTERS)
    engine.publish(world.params, 0, world.drafter_params)
    launches = engine.generate([request()], SamplingParams(), fixed(1), fixed(1).init()).stats.launches
    assert launches and min(x.seconds for x in launches) >= 0.05


def test_the_bandit_is_told_what_a_drafter_would_have_to_catch_up_on(world, requests_of):
    """Three plain launches, then a drafter's: it lacks all that was decoded without it, and nothing after."""
    asked, told, arms = [], [], (0, 0, 0, 1, 1)

    def select(state, key, context):
        asked.append(context)
        return np.int32(arms[min(state, len(arms) - 1)])

    def update(state, report):
        told.append(report)
        return state + 1

    spy = Bandit(lambda: 0, select, update)
    engine = world.engine(strategies=(OFF, Strategy("eagle", 2)), rounds_per_launch=2)
    work = requests_of(forced=True)
    engine.generate(work, SamplingParams(), fixed(0), fixed(0).init())
    engine.generate(work, SamplingParams(), fixed(1), fixed(1).init())  # compiled: what compiles is not told
    asked.clear()
    result = engine.generate(work, SamplingParams(), spy, 0)
    gaps = [c.gap.tolist() for c in asked]
    longest = max(len(r.prompt.token_ids) for r in work)
    assert all(off == 0 for off, _ in gaps) and gaps[3][1] >= longest > 0
    assert gaps[3][1] > gaps[2][1]  # plain launches make it grow
    caught = [x for x in result.stats.launches if x.catch_up_tokens]
    assert caught and caught[0] is next(x for x in result.stats.launches if x.arm == 1)
    assert caught[0].catch_up_seconds > 0
    assert [r.gap for r in told] == [x.catch_up_tokens for x in result.stats.launches if not x.compiled]


def test_another_seed_is_the_same_programs_and_that_seeds_tokens(world, requests_of):
    engine, other = world.engine(**SMALL), world.engine(seed=SEED + 1, **SMALL)
    work = requests_of()
    run = lambda e: [r.token_ids.tolist() for r in e.generate(work, SamplingParams(), fixed(0), fixed(0).init()).rollouts]  # noqa: E731
    first, wanted = run(engine), run(other)
    programs = len(engine.programs)
    engine.reseed(SEED + 1)
    assert run(engine) == wanted != first and len(engine.programs) == programs
    engine.reseed(SEED)
    assert run(engine) == first
