"""Rows are filled from a queue: every request gets one, each prompt is prefilled once, and nobody's tokens notice."""

import itertools

import numpy as np
import pytest
from rollout_world import DRAFTERS, EOS, SEED, TARGET, VALID

from adrl_jax.bandit.fixed import fixed
from adrl_jax.rollout.admission import Queue
from adrl_jax.rollout.engine import Engine, EngineConfig
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import Prompt, Request, SamplingParams


def make(groups=5, samples=3, longest=40):
    random = np.random.default_rng(0)
    prompts = [Prompt(g, random.integers(6, VALID, random.integers(1, longest))) for g in range(groups)]
    return [
        Request(p, 0, s, g, max_new_tokens=3 + 7 * ((g * samples + s) % 4))
        for g, p in enumerate(prompts)
        for s in range(samples)
    ]


def config(**settings):
    names = dict(seed=SEED, eos_ids=EOS, valid_vocab=VALID, max_batch=4, cache_bucket=64, rounds_per_launch=3) | settings
    return EngineConfig(**names)


def drain(queue, rows):
    """Admits `rows` at a time, prefilling as an engine does; returns the order and every part ever planned."""
    order, parts = [], []
    while len(queue):
        queue.begin_prefill(rows)
        while (part := queue.next_part()) is not None:
            part.done = part.token_ids.shape[1]
            parts.append(part)
        for part, members in queue.admissible(rows):
            for index, place in members:
                prompt = queue.requests[index].prompt.token_ids
                np.testing.assert_array_equal(part.token_ids[place, : len(prompt) - 1], prompt[:-1])
                order.append(index)
        queue.release()
    return order, parts


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
def test_requests_come_in_order_and_prompts_are_prefilled_once(rows):
    requests = make()
    queue = Queue(requests, config())
    order, parts = drain(queue, rows)
    assert sorted(order) == list(range(len(requests)))
    if rows == 1:
        assert order == list(range(len(requests)))
    assert sum(len(p.keys) for p in parts) == 5 and len({k for p in parts for k in p.keys}) == 5
    assert queue.parts == [] and queue._place == {}


def test_the_longest_expected_come_first():
    requests = make()
    expected = [len(requests) - i if i % 2 else 100.0 for i in range(len(requests))]
    order, _ = drain(Queue(requests, config(admission="longest_first"), expected), 1)
    assert order == sorted(range(len(requests)), key=lambda i: -expected[i])
    order, _ = drain(Queue(requests, config(admission="longest_first")), 1)
    assert [requests[i].max_new_tokens for i in order] == sorted((r.max_new_tokens for r in requests), reverse=True)
    for wrong in ([1.0], [float("nan")] * len(requests)):
        with pytest.raises(ValueError, match="expected_tokens must be 15 finite numbers"):
            Queue(requests, config(admission="longest_first"), wrong)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(admission="random"), "admission='random' is unknown; choose one of arrival, longest_first"),
        (dict(prefill_chunk=0), "prefill_chunk=0 must be a positive integer"),
        (dict(prefill_chunk=33), "prefill_chunk=33 must be a multiple of prefill_bucket=32"),
        (dict(simulate_acceptance=1.5), r"simulate_acceptance=1.5 must be in \[0, 1\]"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


ORDERS = [
    dict(),
    dict(admission="longest_first"),
    dict(prefill_bucket=8, prefill_chunk=8),
    dict(max_batch=1),
    dict(max_batch=3, batch_buckets=(1, 3), rounds_per_launch=1),
    dict(prefill_bucket=8, prefill_chunk=16, prefill_batch=1, admission="longest_first", cache_bucket=16),
]


@pytest.fixture(scope="module")
def alone(world):
    """Each request by itself, without speculation."""
    engine = Engine(TARGET, config(max_batch=1), {})
    engine.publish(world.params, 3)
    return [engine.generate([r], SamplingParams(), fixed(0), fixed(0).init()).rollouts[0] for r in make()]


@pytest.mark.parametrize("settings", ORDERS, ids=lambda s: ",".join(s) or "default")
def test_the_queue_changes_no_token(world, alone, settings):
    strategies = (OFF, Strategy("eagle", 2), Strategy("ngram", 3))
    engine = Engine(TARGET, config(strategies=strategies, **settings), {k: DRAFTERS[k] for k in ("eagle", "ngram")})
    engine.publish(world.params, 3, {"eagle": world.drafter_params["eagle"]})
    trace = [0, 1, 2] * 200
    result = engine.generate(make(), SamplingParams(), fixed(0), fixed(0).init(), replay_arms=trace)
    for a, b in zip(alone, result.rollouts, strict=True):
        assert (a.prompt_id, a.sample, a.finish_reason) == (b.prompt_id, b.sample, b.finish_reason)
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
    stats = result.stats
    assert stats.accept_passes == sum(r.accept_passes for r in result.rollouts) > 0
    prefilled = sum(e.facts["prompts"] for e in stats.events if e.kind == "prefill")
    if "prefill_chunk" not in settings:
        assert prefilled == 5
    assert sum(e.facts["rows"] for e in stats.events if e.kind == "admit") == 15
    running = [x.running for x in stats.launches]
    assert max(running) == min(engine.config.max_batch, 15)


def test_long_prompts_go_through_in_pieces_between_launches(world):
    engine = Engine(TARGET, config(prefill_bucket=8, prefill_chunk=8, max_batch=2), {})
    engine.publish(world.params, 3)
    random = np.random.default_rng(1)
    requests = [
        Request(Prompt(i, random.integers(6, VALID, n)), 0, 0, i, budget, forced_length=True)
        for i, (n, budget) in enumerate([(5, 30), (5, 4), (60, 4)])
    ]
    events = engine.generate(requests, SamplingParams(), fixed(0), fixed(0).init()).stats.events
    kinds = [e.kind for e in events]
    pieces = [i for i, e in enumerate(events) if e.kind == "prefill"][1:]
    assert len(pieces) == 8 and all(events[i].facts["tokens"] == 8 for i in pieces)
    assert all("plain" in kinds[a:b] for a, b in itertools.pairwise(pieces))


def test_memory_of_a_call_does_not_grow_with_its_requests(world):
    """Prompts that nobody waits for are let go, and one set of programs serves any number of requests."""
    engine = Engine(TARGET, config(batch_buckets=(4,)), {})
    engine.publish(world.params, 3)
    requests = [Request(Prompt(i, np.full(4, 6 + i % 40)), 0, 0, i, 3, forced_length=True) for i in range(40)]
    engine.generate(requests[:12], SamplingParams(), fixed(0), fixed(0).init())
    programs = len(engine.programs)
    result = engine.generate(requests, SamplingParams(), fixed(0), fixed(0).init())
    assert len(engine.programs) == programs and len(result.rollouts) == 40
