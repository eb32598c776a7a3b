"""Snapshots: immutable whatever the learner does, and named by what they hold."""

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import init_params
from adrl_jax.runtime import publish

CONFIG = ModelConfig("llama", 13, 16, 32, 2, 2, 1, 8)


def test_snapshot_survives_donation_of_the_learners_buffers():
    params = init_params(CONFIG, jax.random.key(0))
    drafter = {"fc": jnp.ones((4, 4))}
    snap = publish.snapshot(params, 3, CONFIG, drafter=drafter, drafter_version=5, others={"model": {"w": jnp.ones(2)}})
    before = np.array(snap.params["embedding"], copy=True)
    jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)((params, drafter))
    np.testing.assert_array_equal(np.asarray(snap.params["embedding"]), before)
    np.testing.assert_array_equal(np.asarray(snap.drafter_params["eagle"]["fc"]), 1)
    assert (snap.version, snap.drafter_version) == (3, 5) and set(snap.drafter_params) == {"eagle", "model"}


def test_fingerprint_sees_every_bit_name_order_and_dtype():
    base = {"a": jnp.arange(8.0), "b": jnp.arange(4, dtype=jnp.int32), "c": jnp.ones(3, jnp.bfloat16)}
    others = [
        base | {"a": base["a"].at[3].set(jnp.nextafter(base["a"][3], 9.0))},
        base | {"a": base["a"][::-1]},
        base | {"b": base["b"].at[0].set(-1)},
        base | {"c": base["c"].astype(jnp.float32)},
        {"a": base["a"], "b": base["b"], "d": base["c"]},
    ]
    prints = [publish.fingerprint(tree) for tree in [base, *others]]
    assert len(set(prints)) == len(prints) and all(len(p) == 16 for p in prints)
    assert publish.fingerprint(jax.tree.map(np.asarray, base)) == prints[0]


def test_policy_and_drafter_have_fingerprints_of_their_own():
    params = init_params(CONFIG, jax.random.key(0))
    one = publish.snapshot(params, 0, CONFIG, drafter={"fc": jnp.ones(2)})
    two = publish.snapshot(params, 0, CONFIG, drafter={"fc": jnp.zeros(2)})
    assert one.fingerprint == two.fingerprint and one.drafter_fingerprint != two.drafter_fingerprint
    assert publish.snapshot(params, 0, CONFIG).drafter_fingerprint == ""


def test_snapshot_for_another_device_lives_there_in_the_engines_layout_and_survives():
    params = init_params(CONFIG, jax.random.key(0))
    here, there = jax.devices()[:2]
    near, far = publish.snapshot(params, 3, CONFIG), publish.snapshot(params, 3, CONFIG, device=there)
    assert near.fingerprint == far.fingerprint
    assert jax.tree.structure(near.params) == jax.tree.structure(far.params)
    for a, b in zip(jax.tree.leaves(near.params), jax.tree.leaves(far.params)):
        assert a.devices() == {here} and b.devices() == {there} and a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    before = np.array(far.params["embedding"], copy=True)
    jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(params)
    np.testing.assert_array_equal(np.asarray(far.params["embedding"]), before)


def test_snapshot_from_several_learners_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    params = init_params(CONFIG, jax.random.key(0))
    spread = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    far = publish.snapshot(spread, 1, CONFIG, device=jax.devices()[2])
    assert far.fingerprint == publish.snapshot(params, 1, CONFIG).fingerprint
    assert {d for x in jax.tree.leaves(far.params) for d in x.devices()} == {jax.devices()[2]}
