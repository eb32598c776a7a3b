"""commit: every implementation against a loop over rows and places; nothing else may change, NaN included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adrl_kernels.choice import UnsupportedError
from adrl_kernels.commit import api, pallas_tpu, reference
from kernel_world import TPU_INTERPRET, attention_case

RUNS = {
    "reference": reference.commit,
    "interpret": functools.partial(pallas_tpu.commit, interpret=True),
    "tpu_interpret": functools.partial(pallas_tpu.commit, interpret=TPU_INTERPRET),
}
# start, count a row; rows of count 0 must stay as they are wherever they stand.
CASES = {
    "contiguous": (dict(capacity=256, kv_heads=1), [126, 250, 0, 46], [5, 0, 1, 3]),
    "pages": (dict(capacity=256, page=128, kv_heads=1), [0, 126, 255, 251], [0, 4, 1, 5]),
}
WIDE = {
    "nobody commits": (dict(capacity=256), [1, 2, 3, 4], [0, 0, 0, 0]),
    "short rows, bfloat16": (dict(capacity=64, dtype=jnp.bfloat16), [60, 0, 59, 30], [4, 5, 5, 0]),
    "wide pages": (dict(capacity=512, page=256), [127, 255, 300, 0], [5, 5, 0, 5]),
    "first rows idle": (dict(capacity=256, page=128, dtype=jnp.bfloat16), [7, 9, 100, 130], [0, 0, 5, 5]),
}


def commit_case(options, start, count, seed=0):
    nodes, cache, _ = attention_case(batch=4, count=6, lengths=start, seed=seed, **options)
    rng = np.random.default_rng(seed)
    if cache.table is not None:
        order = rng.permutation(cache.keys.shape[0])[: cache.table.size]
        cache = cache._replace(table=jnp.asarray(order.reshape(cache.table.shape), jnp.int32))
    path = jnp.asarray(rng.integers(0, 6, (4, 5)), jnp.int32)
    return cache, nodes.keys, nodes.values, path, jnp.asarray(start, jnp.int32), jnp.asarray(count, jnp.int32)


def oracle(cache, keys, values, path, start, count):
    out_k, out_v = np.array(cache.keys, np.float32), np.array(cache.values, np.float32)
    size = out_k.shape[3]
    for b in range(len(start)):
        for i in range(int(count[b])):
            place = int(start[b]) + i
            row, slot = (b, place) if cache.table is None else (int(cache.table[b, place // size]), place % size)
            out_k[row, :, :, slot] = keys[b, int(path[b, i])]
            out_v[row, :, slot] = values[b, int(path[b, i])]
    return out_k, out_v


def compare(run, case):
    found = jax.jit(run)(*case)
    for ours, exact in zip((found.keys, found.values), oracle(*case), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), exact)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_the_path_is_written_and_nothing_else(case, name):
    if (name == "tpu_interpret") != (case == "pages"):
        pytest.skip("in test_all_shapes, which is slow")
    compare(RUNS[name], commit_case(*CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", WIDE | CASES)
def test_all_shapes(case, name):
    compare(RUNS[name], commit_case(*(WIDE | CASES)[case], seed=2))


def test_only_touched_blocks_move():
    cache, keys, _, path, start, count = commit_case(*CASES["contiguous"])
    layout = pallas_tpu.plan(cache, keys.shape[1], path.shape[1])
    moved = layout.traffic(*pallas_tpu.scalars(cache, path.shape[1], np.asarray(start), np.asarray(count)))
    token = 16 * 4  # head size, bytes
    # Row 0 (tokens 126 to 130) touches two blocks of each, row 1 commits nothing, row 2 (token 0) one of each, row 3 (46 to 48)
    # one of 128 keys and two of 16 values. Each is read and written.
    assert moved["keys"] == 2 * 4 * 128 * token
    assert moved["values"] == 2 * 5 * 16 * token


def test_bad_arguments_are_refused():
    cache, keys, values, path, start, count = commit_case(*CASES["contiguous"])
    for expected, arguments in {
        "a commit to tokens up to 257 does not fit into the capacity 256": (
            cache,
            keys,
            values,
            path,
            start.at[0].set(252),
            count,
        ),
        "path names node 6, there are 6": (cache, keys, values, path.at[0, 0].set(6), start, count),
        "count contains 6, must be 0 to 5": (cache, keys, values, path, start, count.at[0].set(6)),
        r"keys has shape \(4, 6, 1, 8\), expected \(4, 6, 1, 16\)": (cache, keys[..., :8], values, path, start, count),
    }.items():
        with pytest.raises(ValueError, match=expected):
            api.commit(*arguments, implementation="xla")
    paged = commit_case(*CASES["pages"])
    table = paged[0].table
    with pytest.raises(ValueError, match=r"cache\.table names page -1 where a row has tokens, must be 0 to 9"):
        api.commit(paged[0]._replace(table=table.at[1, 1].set(-1)), *paged[1:], implementation="interpret")
    quantized, nodes = attention_case(int8=True)[1], attention_case(int8=True)[0]
    with pytest.raises(ValueError, match="cache is int8"):
        api.commit(quantized, nodes.keys, nodes.values, path[:3], start[:3], count[:3], implementation="interpret")
    with pytest.raises(UnsupportedError, match="paths of 66 places; up to 65"):
        long = jnp.zeros((4, 66), jnp.int32)
        api.commit(cache, keys, values, long, start, count, implementation="interpret")
