"""Rounds with drafters that look things up: the same tokens as without, and what they save where history repeats itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout_world import DRAFTERS, EOS, SEED, TARGET, VALID, drafter_params, make_requests, target_params

from adrl_jax.rollout import round as rounds
from adrl_jax.rollout.state import Admitted, admit, empty, reshape
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.history import History
from adrl_jax.speculation.history_store import HistoryStore
from adrl_jax.speculation.merged import Merged
from adrl_jax.speculation.strategy import OFF, Strategy
from adrl_jax.types import FinishReason, Rollout, SamplingParams

CAPACITY, DEPTH, REFERENCE = 64, 3, 96
CONFIG = rounds.RoundConfig(TARGET, Law(valid_vocab=VALID), EOS, "coupled")
HISTORY = History(REFERENCE, positional=True)
LOOKUPS = {"history": HISTORY, "merged": Merged(HISTORY, DRAFTERS["eagle"], min_match=4)}
REQUESTS = make_requests()


@functools.cache
def params():
    target = target_params()
    return target, {"history": None, "merged": drafter_params(target)["eagle"]}


@functools.cache
def start():
    """All requests as rows, prefilled; their drafters know nothing yet."""
    batch, lengths = len(REQUESTS), [len(r.prompt.token_ids) for r in REQUESTS]
    tokens = np.zeros((batch, CAPACITY), np.int32)
    for row, request in enumerate(REQUESTS):
        tokens[row, : lengths[row]] = request.prompt.token_ids
    rows = np.arange(batch, dtype=np.int32)
    fresh = Admitted(
        row=rows,
        source=rows,
        tokens=tokens,
        length=np.array(lengths, np.int32),
        limit=np.array([n + r.max_new_tokens for n, r in zip(lengths, REQUESTS)], np.int32),
        request_keys=noise.request_keys(SEED, [r.prompt.prompt_id for r in REQUESTS], 1, [r.sample for r in REQUESTS]),
        temperature=np.array([1.0, 0.7] * (batch // 2), np.float32),
        ignore_eos=np.zeros(batch, bool),
    )
    width = max(lengths)
    prompts = jax.jit(functools.partial(rounds.prefill, TARGET, width, True))(params()[0], tokens[:, :width])
    return jax.jit(admit)(empty(TARGET, batch, CAPACITY, LOOKUPS, True), fresh, prompts)


@functools.cache
def program(strategy):
    run = functools.partial(rounds.launch, CONFIG, strategy, LOOKUPS)
    return jax.jit(lambda params, own, state, count: run(params, own, state, count, jnp.int32(0)))


def run(strategy, state, times=100):
    own = params()[1].get(strategy.drafter)
    return program(strategy)(params()[0], own, state, jnp.int32(times))[0]


@functools.cache
def plain():
    return run(OFF, start())


def rollouts(state, visit=0):
    for row, request in enumerate(REQUESTS):
        n, p = int(state.length[row]), len(request.prompt.token_ids)
        yield Rollout(
            request.prompt.prompt_id, visit, request.sample, request.group_id, np.asarray(state.tokens[row, :n]), p, n - p,
            np.asarray(state.log_probs[row, p:n]), np.zeros(n - p, np.int32), FinishReason(int(state.finish_reason[row])),
            SamplingParams(),
        )  # fmt: skip


def with_history(state, store, own_samples):
    """What an engine does when rows are admitted."""
    samples = [r.sample for r in REQUESTS] if own_samples else None
    given = store.references([r.prompt.prompt_id for r in REQUESTS], REFERENCE, samples)
    taken = jnp.ones(len(REQUESTS), bool)
    states = {n: d.with_references(state.drafter_states[n], taken, *given) for n, d in LOOKUPS.items()}
    return state._replace(drafter_states=states)


def assert_same(a, b):
    np.testing.assert_array_equal(a.length, b.length)
    np.testing.assert_array_equal(a.finish_reason, b.finish_reason)
    written = np.arange(CAPACITY) < np.asarray(a.length)[:, None]
    np.testing.assert_array_equal(np.where(written, a.tokens, 0), np.where(written, b.tokens, 0))
    np.testing.assert_allclose(np.where(written, a.log_probs, 0), np.where(written, b.log_probs, 0), atol=1e-4)


def store_of(kind):
    store = HistoryStore(max_tokens=2000, max_texts=40, max_responses=4)
    if kind in ("siblings", "same noise"):
        for rollout in rollouts(plain()):
            store.add(rollout)
    if kind == "other texts":
        rng = np.random.default_rng(0)
        for rollout in rollouts(plain()):
            ids = rollout.token_ids.copy()
            ids[rng.random(len(ids)) < 0.3] = rng.integers(0, VALID)
            store.add(Rollout(**{**vars(rollout), "token_ids": ids}))
    return store


def accept_length(state):
    return float(state.accept_tokens.sum() / state.accept_passes.sum())


@pytest.mark.parametrize("kind", ["nothing", "other texts", "siblings", "same noise"])
@pytest.mark.parametrize("name", sorted(LOOKUPS))
def test_speculation_changes_nothing(name, kind):
    state = with_history(start(), store_of(kind), own_samples=kind == "same noise")
    assert_same(run(Strategy(name, DEPTH), state), plain())


@pytest.mark.parametrize("name", sorted(LOOKUPS))
def test_slots_shared_by_votes_change_nothing_and_gain(name):
    state = with_history(start(), store_of("siblings"), own_samples=False)
    shared = run(Strategy(name, DEPTH, 1, 2), state)
    assert_same(shared, plain())
    assert accept_length(shared) > accept_length(run(Strategy(name, 1), state))  # as many slots, given equally


def test_slots_go_by_what_the_drafter_says(monkeypatch):
    seen, real = [], rounds.share_out

    def spy(log_chance, *rest):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), log_chance)
        return real(log_chance, *rest)

    monkeypatch.setattr(rounds, "share_out", spy)
    state = with_history(start(), store_of("siblings"), own_samples=False)
    run(Strategy("history", DEPTH, 1, 3), state, 1)
    jax.effects_barrier()
    expected = HISTORY.match(state.drafter_states["history"], state.tokens, state.length, DEPTH).log_chance
    assert np.unique(expected).size > 3
    np.testing.assert_allclose(seen[0], expected, rtol=1e-6)


def test_the_same_noise_again_commits_whole_blocks():
    state = with_history(start(), store_of("same noise"), own_samples=True)
    state = run(Strategy("history", DEPTH), state)
    made = np.asarray(plain().length - start().length)
    known = np.array([len(r.prompt.token_ids) for r in REQUESTS]) >= HISTORY.min_ngram
    np.testing.assert_array_equal(state.accept_passes[known], -(-made // (DEPTH + 1))[known])
    assert accept_length(state) > 1.3 * accept_length(run(Strategy("history", DEPTH), start()))


def test_merged_copies_where_it_can_and_draws_elsewhere():
    """Without history it is as good as its learned drafter alone, with history at least as good as looking up alone."""
    strategy = Strategy("merged", DEPTH)
    nothing, history = run(strategy, start()), run(strategy, with_history(start(), store_of("same noise"), own_samples=True))
    assert accept_length(nothing) > 1.6
    lookup = run(Strategy("history", DEPTH), with_history(start(), store_of("same noise"), own_samples=True))
    assert accept_length(history) >= accept_length(lookup) > accept_length(nothing)


def test_arms_may_change_and_rows_move_and_references_arrive_late():
    move = jax.jit(functools.partial(reshape, drafters=LOOKUPS, capacity=CAPACITY))
    catch_up = jax.jit(functools.partial(rounds.catch_up, LOOKUPS["merged"], 8))
    state, store = with_history(start(), store_of("nothing"), own_samples=False), store_of("siblings")
    rows = np.arange(len(REQUESTS))
    for step, strategy in enumerate((OFF, Strategy("merged", DEPTH), Strategy("history", DEPTH), OFF) * 2):
        if step == 2:
            state = with_history(state, store, own_samples=False)
        state = run(strategy, state, 2)
        order = np.roll(np.arange(len(rows)), 1)
        state, rows = move(state, order), rows[order]
        gap = rounds.missing_entries(state, LOOKUPS["merged"])
        assert gap >= 0 and rounds.missing_entries(state, HISTORY) >= 0
        if strategy == OFF:  # as the host does before the next speculative launch
            state = catch_up(params()[0], params()[1]["merged"], state)
            assert rounds.missing_entries(state, LOOKUPS["merged"]) == max(int(gap) - 8, 0)
    assert_same(move(run(OFF, state), np.argsort(rows)), plain())
