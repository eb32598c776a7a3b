"""Every implementation of verify_attention against a float64 softmax written with NumPy loops over what each node sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adrl_kernels import choice
from adrl_kernels.choice import UnsupportedError
from adrl_kernels.verify_attention import pallas_tpu, reference, verify_attention, xla
from adrl_kernels.verify_attention.arguments import check_forest, minimum_bytes
from kernel_world import TPU_INTERPRET, attention_case

RUNS = {
    "reference": reference.verify_attention,
    "xla": xla.verify_attention,
    "interpret": functools.partial(pallas_tpu.verify_attention, interpret=True),
    "tpu_interpret": functools.partial(pallas_tpu.verify_attention, interpret=TPU_INTERPRET),
}
CASES = {
    "tree": dict(capacity=700),
    "int8 pages, window": dict(capacity=512, page=128, int8=True, window=100, group=1),
    "bfloat16 chain": dict(capacity=64, count=33, chain=True, dtype=jnp.bfloat16, kv_heads=1),
}
# Shapes across the supported range, one after the other: nodes, groups, head sizes, capacities, layouts.
WIDE = {
    f"{count} nodes, group {group}, head {dim}, {layout}": dict(count=count, group=group, dim=dim, **options)
    for (count, group, dim), (layout, options) in zip(
        [(1, 8, 64), (2, 4, 128), (8, 7, 128), (16, 3, 64), (31, 2, 256), (64, 1, 64), (64, 8, 128), (5, 5, 64)],
        [
            ("short", dict(capacity=40)),
            ("pages", dict(capacity=384, page=128)),
            ("long", dict(capacity=1500, batch=4)),
            ("int8", dict(capacity=300, int8=True)),
            ("wide pages", dict(capacity=512, page=256)),
            ("window", dict(capacity=200, window=70)),
            ("empty", dict(capacity=256, lengths=(0, 0, 0))),
            ("full", dict(capacity=256, lengths=(256, 256, 256), page=128)),
        ],
    )
}


def oracle(nodes, cache, lengths):
    """float64 `[B, N, H, D]`: per node, the softmax over the tokens it sees, which are gathered one by one."""
    q, fresh_k, fresh_v, sees = (np.asarray(x, np.float64) for x in nodes[:4])
    keys, values = np.asarray(cache.keys, np.float64), np.asarray(cache.values, np.float64)
    if cache.quantized:
        keys, values = keys * np.asarray(cache.key_scales)[:, :, None], values * np.asarray(cache.value_scales)[..., None]
    out = np.zeros(q.shape)
    group = q.shape[2] // fresh_k.shape[2]
    for b, n in np.ndindex(q.shape[:2]):
        low = 0 if nodes.first is None else int(nodes.first[b, n])
        slots = np.arange(low, int(lengths[b]))
        row = np.full(len(slots), b)
        if cache.table is not None:
            row, slots = np.asarray(cache.table)[b, slots // keys.shape[3]], slots % keys.shape[3]
        relatives = np.flatnonzero(sees[b, n])
        for h in range(q.shape[2]):
            k = np.concatenate([keys[row, h // group, :, slots], fresh_k[b, relatives, h // group]])
            v = np.concatenate([values[row, h // group, slots], fresh_v[b, relatives, h // group]])
            weights = np.exp(k @ q[b, n, h] - np.max(k @ q[b, n, h]))
            out[b, n, h] = weights @ v / weights.sum()
    return out


def compare(run, case):
    nodes, cache, lengths = case
    found = np.asarray(jax.jit(run)(nodes, cache, lengths), np.float64)
    # int8 entries are scaled in another order, and their sums are as long as the row.
    tolerance = 2e-2 if nodes.queries.dtype == jnp.bfloat16 else 2e-5 if cache.quantized else 2e-6
    np.testing.assert_allclose(found, oracle(nodes, cache, lengths), atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_attention_of_what_each_node_sees_and_of_nothing_else(case, name):
    if name == "tpu_interpret" and case != "int8 pages, window":
        pytest.skip("in test_all_shapes, which is slow")
    compare(RUNS[name], attention_case(**CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16), ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", WIDE)
def test_all_shapes(case, name, dtype):
    compare(RUNS[name], attention_case(dtype=dtype, seed=1, **WIDE[case]))


def test_steps_bring_several_blocks():
    """What the cases above are to show: a step of more than one block, and a last step that is not full."""
    for case, blocks in {"tree": 3, "int8 pages, window": 2}.items():
        nodes, cache, _ = attention_case(**CASES[case])
        assert pallas_tpu.step_blocks(cache) == blocks
        assert pallas_tpu.plan(nodes, cache).grid[1] == 2


def test_dead_pages_cost_no_bytes_and_live_ones_are_read_once():
    lengths = np.array([0, 1000, 37, 2048, 0, 513, 128, 700])
    nodes, cache, _ = attention_case(batch=8, count=8, kv_heads=4, group=7, dim=128, capacity=2048, lengths=lengths)
    layout, scalars = pallas_tpu.plan(nodes, cache), pallas_tpu.scalars(nodes, cache, lengths)
    moved = layout.traffic(*scalars)
    pages = -(-lengths // 128).sum()
    block = 4 * 128 * 128 * 4
    width = pallas_tpu.step_blocks(cache)
    # Each of the step's blocks is an operand of its own and fetches at least one block in all.
    assert pages * block <= moved["keys"] <= (pages + width - 1) * block
    assert moved["keys"] == moved["values"]
    assert moved["queries"] == moved["out"] == 8 * 4 * 64 * 128 * 4  # 56 rows of a group's nodes, rounded up to 64
    long_rows = np.array([1000, 1500, 2048, 700, 1100, 1900, 1280, 1777])
    total = sum(layout.traffic(*pallas_tpu.scalars(nodes, cache, long_rows)).values())
    assert total <= 1.1 * minimum_bytes(nodes, cache, long_rows)


def test_bad_arguments_are_refused_with_what_is_supported():
    nodes, cache, lengths = attention_case()
    paged = attention_case(capacity=256, page=128)
    for expected, arguments in {
        "lengths contains 301, must be between 0 and the capacity 300": (nodes, cache, lengths.at[0].set(301)),
        "lengths contains -1": (nodes, cache, lengths.at[0].set(-1)),
        "mixed dtypes: nodes.queries float32, nodes.keys bfloat16": (
            nodes._replace(keys=nodes.keys.astype(jnp.bfloat16)),
            cache,
            lengths,
        ),
        "must both be int8, or both float32": (nodes, cache._replace(keys=cache.keys.astype(jnp.int8)), lengths),
        "cache.key_scales must be given exactly for an int8 cache": (
            nodes,
            cache._replace(keys=cache.keys.astype(jnp.int8), values=cache.values.astype(jnp.int8)),
            lengths,
        ),
        r"nodes.keys has shape \(3, 5, 2, 8\), expected \(3, 5, 2, 16\)": (
            nodes._replace(keys=nodes.keys[..., :8]),
            cache,
            lengths,
        ),
        "nodes.sees is no forest of ancestors in row 1: a node does not see itself": (
            nodes._replace(sees=nodes.sees.at[1, 2, 2].set(False)),
            cache,
            lengths,
        ),
        "cache.table names page 8 where a row has tokens, must be 0 to 7": (
            paged[0],
            paged[1]._replace(table=paged[1].table.at[1, 1].set(8)),
            paged[2],
        ),
        r"cache.table has shape \(2, 2\), expected \(3, pages of a row\)": (
            paged[0],
            paged[1]._replace(table=paged[1].table[:2]),
            paged[2],
        ),
        "queries have 6 heads, which must be a multiple of the 4 key-value heads": (
            nodes._replace(keys=jnp.zeros((3, 5, 4, 16))),
            cache,
            lengths,
        ),
    }.items():
        for implementation in ("xla", "interpret"):
            with pytest.raises(ValueError, match=expected):
                verify_attention(*arguments, implementation=implementation)
    for expected, options in {
        "head size 12; multiples of 8 up to 256": dict(dim=12),
        "head size 264": dict(dim=264),
        "65 nodes a row; 1 to 64": dict(count=65),
        "pages of 96 tokens; multiples of 128": dict(page=96),
        "float16": dict(dtype=jnp.float16),
    }.items():
        case = attention_case(**options)
        for implementation in ("interpret", "pallas_tpu"):
            with pytest.raises(UnsupportedError, match=expected):
                verify_attention(*case, implementation=implementation)
    with pytest.raises(ValueError, match="choose one of auto, xla"):
        verify_attention(nodes, cache, lengths, implementation="triton")


def test_only_forests_of_ancestors_are_taken():
    chain = np.tri(4, dtype=bool)[None]
    check_forest(chain)
    check_forest(np.eye(4, dtype=bool)[None])

    def changed(i, j, value, base=chain):
        out = base.copy()
        out[0, i, j] = value
        return out

    two_parents = changed(2, 1, True, changed(2, 0, True, np.eye(4, dtype=bool)[None]))
    for expected, sees in {
        "a node does not see itself": changed(2, 2, False),
        "a node sees a later one": changed(0, 3, True),
        "a node does not see an ancestor's ancestor": changed(3, 0, False),
        "a node sees two branches": two_parents,
    }.items():
        with pytest.raises(ValueError, match=expected):
            check_forest(sees)


def test_auto_says_once_what_it_chose_and_why(caplog):
    case = attention_case(batch=1, count=2, capacity=24)
    choice.told.cache_clear()
    with caplog.at_level("INFO", logger="adrl_kernels"):
        for _ in range(2):
            jax.eval_shape(lambda *x: verify_attention(*x, implementation="auto"), *case)
    assert [r.message for r in caplog.records] == ["verify_attention runs on xla: there are no Pallas kernels for cpu"]
