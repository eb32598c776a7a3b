"""Packed attention against the dense formula, and the reach that lets it skip keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adrl_jax.learner import packing
from adrl_jax.learner.attention import BLOCK, Reach, packed_attention, reach_of
from adrl_jax.types import FinishReason, Rollout, SamplingParams

HEADS, KV_HEADS, DIM = 4, 2, 8


def rollouts_of(groups, seed=0):
    rng, out = np.random.default_rng(seed), []
    for g, (p, lengths) in enumerate(groups):
        prompt = rng.integers(0, 9, p)
        for r in lengths:
            ids = np.concatenate([prompt, rng.integers(0, 9, r)]).astype(np.int32)
            facts = (np.zeros(r, np.float32), np.zeros(r, np.int32), FinishReason.STOP, SamplingParams())
            out.append(Rollout(g, 0, 0, g, ids, p, r, *facts))
    return out


def packed(groups, row_length, layout="prefix_shared", seed=0):
    rollouts = rollouts_of(groups, seed)
    return packing.pack(rollouts, [0.0] * len(rollouts), row_length=row_length, layout=layout)


def seen_of(batch, window=None):
    """The rule of `PackedBatch`, written down once more."""
    s, b, p = (np.asarray(x) for x in (batch.segment_ids, batch.branch_ids, batch.positions))
    seen = (s[:, :, None] == s[:, None]) & (s[:, :, None] != 0) & np.tri(s.shape[1], dtype=bool)
    seen &= (b[:, None] == 0) | (b[:, None] == b[:, :, None])
    return seen if window is None else seen & (p[:, None] > p[:, :, None] - window)


GROUPS = {
    "one group": [(100, (150, 90, 120))],
    "long prompt": [(300, (40, 30, 20, 10))],
    "many segments": [(20, (60, 50)), (70, (30, 90, 10)), (5, (100,)), (33, (44, 55))],
    "one sequence": [(10, (500,))],
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("layout", packing.LAYOUTS)
def test_the_reach_covers_every_visible_key(name, layout):
    batch = packed(GROUPS[name], 640, layout)
    reach = reach_of(batch)
    met = np.zeros((640, 640), bool)
    for start in range(0, 640, BLOCK):
        for first, last in reach.spans(start, start + BLOCK):
            met[start : start + BLOCK, first:last] = True
    assert not np.any(seen_of(batch) & ~met)


def test_the_reach_follows_segments_not_rows():
    assert reach_of(packed([(128, (256,) * 4)], 1152)) == Reach(128, 128)
    many = [(20, (60,))] * 30
    assert reach_of(packed(many, 640)).lookback <= 2 * BLOCK
    assert reach_of(packing.empty_batch(2, 1024, 8)).lookback == 0
    assert reach_of(packed([(10, (1000,))], 1024)) == Reach()


def test_reaches_are_few():
    rng, found = np.random.default_rng(0), set()
    for seed in range(40):
        groups = [(int(rng.integers(20, 200)), tuple(rng.integers(1, 300, 4))) for _ in range(3)]
        found.add(reach_of(packed(groups, 1024, seed=seed)))
    assert len(found) <= 12


@pytest.mark.parametrize(
    "name,window", [("one group", None), ("many segments", None), ("many segments", 37), ("long prompt", 64)]
)
def test_equals_dense_attention_in_value_and_gradient(name, window):
    batch = packed(GROUPS[name], 640)
    keys = jax.random.split(jax.random.key(0), 4)
    rows, t = batch.token_ids.shape
    q, target = (jax.random.normal(k, (rows, t, HEADS, DIM)) for k in keys[:2])
    k, v = (jax.random.normal(k, (rows, t, KV_HEADS, DIM)) for k in keys[2:])
    seen = seen_of(batch, window)
    real = jnp.asarray(np.asarray(batch.segment_ids) != 0)[..., None, None]

    def dense(q, k, v):
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
        scores = jnp.where(seen[:, None], jnp.einsum("btnd,bsnd->bnts", q, k), -1e30)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1), v)

    def ours(reach, q, k, v):
        attend = packed_attention(
            *(jnp.asarray(x) for x in (batch.segment_ids, batch.branch_ids, batch.positions)), reach=reach
        )
        flat = (x.reshape(1, rows * t, -1, DIM) for x in (q, k, v))
        return attend(*flat, layer=0, window=window, cache=None)[0].reshape(q.shape)

    def with_gradient(f):
        def loss(q, k, v):
            out = jnp.where(real, f(q, k, v), 0.0)
            return jnp.sum(out * target), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    expected = with_gradient(dense)
    assert (reach_of(batch) != Reach()) == (name != "long prompt")  # there everything is near
    for reach in (reach_of(batch), None):
        got = with_gradient(lambda q, k, v, reach=reach: ours(reach, q, k, v))
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(a).max())))


def test_rows_of_padding_are_finite():
    batch = packing.empty_batch(2, 160, 8)
    x = jnp.ones((2, 160, 2, DIM))

    def loss(x):
        attend = packed_attention(*(jnp.asarray(y) for y in (batch.segment_ids, batch.branch_ids, batch.positions)))
        return jnp.sum(attend(x, x, x, layer=0, window=None, cache=None)[0])

    value, gradient = jax.value_and_grad(loss)(x)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_scores_are_not_kept_for_the_backward_pass():
    t = 1024
    batch = packed([(10, (1000,))], t)
    ids = tuple(jnp.asarray(x) for x in (batch.segment_ids, batch.branch_ids, batch.positions))

    def loss(x, layers):
        for _ in range(layers):
            x = x + packed_attention(*ids)(x, x, x, layer=0, window=None, cache=None)[0]
        return jnp.sum(x)

    def temporaries(layers):
        compiled = jax.jit(jax.grad(loss), static_argnums=1).lower(jnp.zeros((1, t, 2, DIM)), layers).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Two more layers add less than one head's scores.
    assert temporaries(4) - temporaries(2) < 4 * t * t
