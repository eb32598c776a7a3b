"""Lessons hold what the policy really computed, once a token; steps train the drafter and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.drafter import warmup
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.learner import packing
from adrl_jax.learner.optimizer import OptimizerConfig, make_optimizer
from adrl_jax.learner.update import make_log_probs
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import cached_attention, init_cache
from adrl_jax.models.transformer import Transformer, init_params
from adrl_jax.speculation import eagle
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.types import FinishReason, Rollout, SamplingParams

TINY = ModelConfig("llama", 41, 32, 48, 2, 4, 2, 8)
PARAMS = jax.tree.map(lambda x: x * 6 if x.ndim == 2 else x, init_params(TINY, jax.random.key(0)))
IDS = np.arange(3, 41, dtype=np.int32)
EAGLE = Eagle(TINY, draft_vocab_size=len(IDS))
CONFIG = DrafterLossConfig(1.0, 0.5, 0.5, depths=3)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2))


def make_rollouts(count=9):
    """Random texts at two temperatures, with the log-probs that the policy gives them."""
    rng, out = np.random.default_rng(0), []
    for i in range(count):
        p, r = int(rng.integers(2, 6)), int(rng.integers(1, 8))
        ids = rng.integers(0, 41, p + r).astype(np.int32)
        facts = (np.zeros(r, np.float32), np.zeros(r, np.int32), FinishReason.STOP, SamplingParams(0.7 if i % 3 else 1.0))
        out.append(Rollout(i, 0, 0, i, ids, p, r, *facts))
    scored = []
    for temperature in (0.7, 1.0):
        log_probs = make_log_probs(TINY, temperature=temperature)
        chosen = [r for r in out if r.sampling.temperature == temperature]
        batch = packing.pack(chosen, [0.0] * len(chosen), row_length=16)
        found = packing.unpack_targets(batch, log_probs(PARAMS, batch)[0], len(chosen))
        scored += [dataclasses.replace(r, log_probs=x) for r, x in zip(chosen, found, strict=True)]
    return sorted(scored, key=lambda r: r.prompt_id)


ROLLOUTS = make_rollouts()


def lessons_of(rollouts=ROLLOUTS, **changes):
    return warmup.make_lessons(PARAMS, TINY, rollouts, **{"rows": 2, "row_length": 16, **changes})


def params():
    return {**EAGLE.init_params(jax.random.key(1)), eagle.DRAFT_IDS: jnp.asarray(IDS)}


@jax.jit
def one_row(tokens):
    """Hidden states `[16, H]` of one padded sequence, with the cache that serving uses."""
    places = jnp.arange(16)[None]
    model, cache = Transformer(TINY), init_cache(TINY, 1, 16)
    return model.apply({"params": PARAMS}, tokens[None], places, attend=cached_attention(places), cache=cache)[0][0]


def test_lessons_hold_every_response_token_once_with_its_hidden_state():
    lessons, seen = lessons_of(), []
    assert {x.temperature for x in lessons} == {0.7, 1.0} and {x.batch.token_ids.shape for x in lessons} == {(2, 16)}
    reference = {}
    for r in ROLLOUTS:
        n = len(r.token_ids)
        reference[tuple(r.token_ids.tolist())] = (r, one_row(np.pad(r.token_ids, (0, 16 - n)))[:n])
    for x in lessons:
        b = x.batch
        assert x.tokens == b.target_mask.sum()
        for row in range(2):
            for segment in range(1, b.segment_ids[row].max() + 1):
                places = np.flatnonzero(b.segment_ids[row] == segment)
                rollout, hidden = reference[tuple(b.token_ids[row, places].tolist())]
                np.testing.assert_allclose(x.hidden[row, places], hidden, atol=1e-4)
                targets = np.isin(b.target_index[row], places) & b.target_mask[row]
                np.testing.assert_array_equal(b.log_probs[row, targets], rollout.log_probs)
                assert rollout.sampling.temperature == x.temperature
                seen.append(rollout.prompt_id)
    assert sorted(seen) == list(range(len(ROLLOUTS)))


def test_order_is_all_lessons_every_epoch():
    chosen = list(warmup.order(3, 5, 12))
    assert sorted(chosen[:5]) == sorted(chosen[5:10]) == list(range(5)) and chosen[:5] != chosen[5:10]
    assert chosen == list(warmup.order(3, 5, 12)) != list(warmup.order(4, 5, 12))


def test_training_raises_agreement_at_every_depth_and_leaves_map_and_policy_alone():
    lessons = lessons_of()
    before = jax.tree.map(np.asarray, PARAMS)
    step = warmup.make_step(TINY, CONFIG, OPTIMIZER)
    measure = warmup.make_measure(TINY, CONFIG)
    trained, fixed = eagle.split(params())
    first = measure(params(), PARAMS, lessons)
    state = warmup.init_state(trained, OPTIMIZER)
    for at in warmup.order(0, len(lessons), 150):
        state, metrics = step(state, fixed, PARAMS, lessons[at])
    last = measure({**state.trained, **fixed}, PARAMS, lessons)
    assert int(state.step) == 150 and int(state.skipped) == 0
    for name in ("agreement", "agreement_2", "agreement_3"):
        assert last[name] > first[name] + 0.1, (name, first, last)
    assert last["loss"] < first["loss"] and set(metrics) == {*last, "grad_norm"}
    jax.tree.map(np.testing.assert_array_equal, before, PARAMS)


def test_what_is_measured_does_not_depend_on_how_it_is_packed():
    measure = warmup.make_measure(TINY, CONFIG)
    small = measure(params(), PARAMS, lessons_of())
    large = measure(params(), PARAMS, lessons_of(rows=4, row_length=40, layout="plain"))
    assert small.keys() == large.keys()
    for name, value in small.items():
        assert value == pytest.approx(large[name], rel=1e-4), name


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    step, lesson = warmup.make_step(TINY, CONFIG, OPTIMIZER), lessons_of()[0]
    trained, fixed = eagle.split(params())
    state = warmup.init_state(jax.tree.map(jnp.array, trained), OPTIMIZER)
    state, _ = step(state, fixed, PARAMS, lesson)
    kept = jax.tree.map(np.asarray, state.trained)
    state, metrics = step(state, fixed, PARAMS, lesson._replace(hidden=lesson.hidden * np.nan))
    assert not np.isfinite(metrics["loss"])
    state, _ = step(
        state, fixed, PARAMS, warmup.Lesson(packing.empty_batch(2, 16, lesson.batch.target_ids.shape[1]), *lesson[1:])
    )
    assert (int(state.step), int(state.skipped)) == (3, 2)
    jax.tree.map(np.testing.assert_array_equal, state.trained, kept)


def test_expected_accept_length_is_the_sum_of_products():
    assert warmup.expected_accept_length({"agreement": 0.5, "agreement_2": 0.4}, 3) == pytest.approx(1 + 0.5 + 0.2 + 0.08)
    assert warmup.expected_accept_length({"agreement": 0.0}, 5) == 1.0


def test_faults_come_before_any_pass():
    with pytest.raises(ValueError, match="no rollouts"):
        lessons_of([])
    greedy = dataclasses.replace(ROLLOUTS[0], sampling=SamplingParams(0.0))
    cut = dataclasses.replace(ROLLOUTS[0], sampling=SamplingParams(1.0, top_k=3))
    for bad in (greedy, cut):
        with pytest.raises(ValueError, match="rollout 1 was drawn with"):
            lessons_of([ROLLOUTS[1], bad])
    with pytest.raises(ValueError, match="row_length=4"):
        lessons_of(row_length=4)
