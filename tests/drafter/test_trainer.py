"""Small steps over the buffer: the same as the warm-up's, with the right head, and nothing of what was given is touched."""

import dataclasses

import drafter_world as world
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.drafter import warmup
from adrl_jax.drafter.buffer import DataBuffer, StaleFeatures
from adrl_jax.drafter.lessons import pack_samples, unpack_hidden
from adrl_jax.drafter.loss import DrafterLossConfig
from adrl_jax.drafter.trainer import DrafterTrainer, Heads, TrainerConfig
from adrl_jax.drafter.unroll import guesses
from adrl_jax.learner import packing
from adrl_jax.models.transformer import engine_layout
from adrl_jax.speculation import eagle
from adrl_jax.speculation.eagle import Eagle

CONFIG = DrafterLossConfig(1.0, 0.5, 0.5, depths=2)
IDS = jnp.arange(2, 41, dtype=jnp.int32)
EAGLE = Eagle(world.TINY, draft_vocab_size=len(IDS))


def fresh():
    params = {**EAGLE.init_params(jax.random.key(1)), eagle.DRAFT_IDS: IDS}
    return params, world.OPTIMIZER.init(eagle.split(params)[0])


def trainer_of(buffer, heads, config=CONFIG, **changes):
    return DrafterTrainer(world.TINY, config, world.OPTIMIZER, buffer, heads, TrainerConfig(rows=2), **changes)


def heads_of(**by_version):
    heads = Heads()
    for version, params in by_version.items():
        heads.add(int(version[1:]), engine_layout(params, world.TINY))
    return heads


@pytest.fixture(scope="module")
def running():
    """One trainer whose program is compiled once."""
    buffer = world.buffer_of(world.policy())
    return trainer_of(buffer, heads_of(v0=world.policy()))


def test_it_learns_counts_and_touches_nothing_it_was_given(running):
    params, opt_state = fresh()
    kept = jax.tree.map(np.array, (params, opt_state, world.policy()))
    running.load(params, opt_state, version=5)
    lesson = pack_samples(list(running.buffer._samples.values()), rows=4, row_length=32)
    measure = warmup.make_measure(world.TINY, CONFIG)
    before = measure(params, world.policy(), [lesson])
    rows = [running.step() for _ in range(100)]
    found = running.unload()
    assert found.version == 105 and running.skipped == 0 and not running.loaded
    after = measure(found.params, world.policy(), [lesson])
    assert after["agreement"] > before["agreement"] + 0.1 and after["agreement_2"] > before["agreement_2"] + 0.1
    assert {"loss", "agreement", "grad_norm", "skipped", "tokens", "version"} <= rows[0].keys()
    jax.tree.map(np.testing.assert_array_equal, kept, (params, opt_state, world.policy()))
    np.testing.assert_array_equal(found.params[eagle.DRAFT_IDS], IDS)


def test_a_step_that_is_not_finite_is_counted_and_training_goes_on(running):
    params, opt_state = fresh()
    running.load(params, opt_state, version=0)
    skipped, steps = running.skipped, running.steps
    broken = DataBuffer(1 << 20, 32)
    broken.begin_step(0)
    for s in world.samples(world.policy()):
        broken.add(dataclasses.replace(s, hidden=s.hidden * np.nan))
    whole, running.buffer = running.buffer, broken
    assert running.step()["skipped"] == 1
    running.buffer = whole
    kept = jax.tree.map(np.array, running._state.trained)
    jax.tree.map(np.testing.assert_array_equal, kept, eagle.split(params)[0])
    assert running.step()["skipped"] == 0
    assert (running.skipped - skipped, running.steps - steps) == (1, 2) and running.unload().version == 1


def test_nothing_to_learn_from_is_no_step(running):
    params, opt_state = fresh()
    running.load(params, opt_state, version=0)
    whole, running.buffer = running.buffer, DataBuffer(100, 10)
    assert running.step() is None
    running.buffer = whole
    assert running.unload().version == 0
    with pytest.raises(ValueError, match="call load first"):
        running.step()
    with pytest.raises(ValueError, match="call load first"):
        running.unload()


def test_the_teacher_is_the_head_of_the_samples_own_version():
    """Two policies whose heads differ: agreement of a drafter that knows version 1 shows which head judged it."""
    old, new = world.policy(), dict(world.policy())
    new["embedding"] = jnp.asarray(np.random.default_rng(3).permutation(np.asarray(new["embedding"])))
    heads = heads_of(v0=old, v1=new)
    buffer = world.buffer_of(old)
    lesson = pack_samples(buffer.draw(np.random.default_rng(0), 2), rows=2, row_length=32)
    params, _ = fresh()
    measure = warmup.make_measure(world.TINY, CONFIG)
    expected = {v: measure(params, p, [lesson])["loss"] for v, p in ((0, old), (1, new))}
    assert abs(expected[0] - expected[1]) > 1e-2
    buffer = world.buffer_of(old)
    trainer = trainer_of(buffer, heads)
    trainer.load(*fresh(), version=0)
    got = trainer.step()
    same = pack_samples(world.buffer_of(old).draw(np.random.default_rng([0, 0]), 2), rows=2, row_length=32)
    assert got["version"] == 0 and got["loss"] == pytest.approx(measure(params, old, [same])["loss"], rel=1e-4)
    heads.keep({1})
    assert heads.versions == (1,) and trainer.step() is None and buffer.stale == 8
    with pytest.raises(StaleFeatures, match="policy version 0 need that version's head"):
        heads.of(0)


def test_refreshed_features_are_judged_by_the_new_policy_and_weighted():
    """Texts of version 0, read by version 1: a lesson holds both laws, and weights are their ratio."""
    old, new = world.policy(), world.policy(9)
    buffer = world.buffer_of(old)
    keys = [s.key for s in buffer._samples.values()]
    rollouts = [s.rollout for s in buffer._samples.values()]
    for key, (hidden, log_probs) in zip(keys, world.seen_by(new, rollouts), strict=True):
        buffer.refresh(key, hidden, 1, log_probs)
    drawn = buffer.draw(np.random.default_rng(0), 4, {1})
    lesson = pack_samples(drawn, rows=4, row_length=32)
    assert lesson.version == 1 and len(drawn) == 8
    mask = lesson.batch.target_mask
    assert np.abs(lesson.log_probs - lesson.batch.log_probs)[mask].max() > 0.1
    params = {**EAGLE.init_params(jax.random.key(1)), eagle.DRAFT_IDS: jnp.arange(41)}
    everything = eagle.split(params)[0]
    measure = warmup.make_measure(world.TINY, CONFIG)
    # All ids through the map, whose normaliser comes from the log-probs, equals all ids without one.
    np.testing.assert_allclose(measure(params, new, [lesson])["loss"], measure(everything, new, [lesson])["loss"], rtol=1e-4)
    weighted = warmup.make_measure(world.TINY, dataclasses.replace(CONFIG, importance_weights="token", importance_cap=1.5))
    found = weighted(everything, new, [lesson])
    assert 0 < found["weight"] < 1.5 and found["loss"] != pytest.approx(measure(everything, new, [lesson])["loss"])


def test_a_lessons_samples_do_not_leak_at_any_depth():
    first, second = world.samples(world.policy(), count=2)
    changed = dataclasses.replace(first.rollout, token_ids=(first.rollout.token_ids + 1) % 41)
    other = dataclasses.replace(first, rollout=changed, hidden=first.hidden + 1)
    lessons = [pack_samples(chosen, rows=1, row_length=32) for chosen in ([first, second], [other, second])]
    own = eagle.split(fresh()[0])[0]
    run = jax.jit(lambda batch, hidden: guesses(own, world.policy(), world.TINY, hidden, batch, 3))
    (a, usable), (b, _) = (map(np.asarray, run(x.batch, x.hidden)) for x in lessons)
    mine = lessons[0].batch.rollout_index == 1
    assert (usable & mine).any(axis=(1, 2)).all()
    np.testing.assert_array_equal(a[usable & mine], b[usable & mine])
    assert np.abs(a - b)[usable & ~mine].max() > 0.01


@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_hidden_states_come_back_from_any_packing(layout):
    rollouts = [dataclasses.replace(r, group_id=7, token_ids=np.r_[[1, 2, 3], r.response_ids], prompt_length=3) for r in
                world.texts(5)] + world.texts(3, seed=5)[1:]  # fmt: skip
    batch = packing.pack(rollouts, [0.0] * len(rollouts), row_length=40, layout=layout)
    marks = np.random.default_rng(0).normal(size=(*batch.token_ids.shape, 2)).astype(np.float32)
    marks[..., 0] = batch.token_ids
    for r, hidden in zip(rollouts, unpack_hidden(batch, marks, len(rollouts)), strict=True):
        np.testing.assert_array_equal(hidden[:, 0], r.token_ids[:-1])


def test_a_lesson_is_one_version_and_temperature_and_fits():
    first, *rest = world.samples(world.policy())
    other = dataclasses.replace(rest[0], version=3, log_probs=rest[0].log_probs)
    with pytest.raises(ValueError, match="one version and temperature"):
        pack_samples([first, other], rows=2, row_length=32)
    with pytest.raises(ValueError, match="more than rows=1"):
        pack_samples([first, *rest], rows=1, row_length=32)
    with pytest.raises(ValueError, match="rows=0"):
        TrainerConfig(rows=0)


def test_a_device_makes_steps_only_once_it_is_prepared(running):
    """A compilation is nothing for a rollout's tail; preparing learns nothing."""
    device, steps = jax.devices()[1], running.steps
    params, opt_state = fresh()
    running.load(params, opt_state, version=0)
    assert not running.try_step(device) and running.steps == steps
    running.prepare([device])
    assert running.steps == steps and (int(running._state.step), int(running._state.skipped)) == (0, 0)
    jax.tree.map(np.testing.assert_array_equal, running._state.trained, eagle.split(params)[0])
    assert running.try_step(device) and running.unload().version == 1
    running._device = None
    with pytest.raises(ValueError, match="call load first"):
        running.prepare([device])
