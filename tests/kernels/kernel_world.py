"""Inputs for all kernel tests, with NaN wherever nothing may be read, and the ways each kernel can run on a CPU."""

import jax.numpy as jnp
import numpy as np
from adrl_kernels.verify_attention.arguments import Cache, Nodes
from jax.experimental.pallas import tpu as pltpu

TPU_INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def random_tree(rng, count):
    """`sees` bool `[N, N]` of a random tree whose parents come first."""
    sees = np.eye(count, dtype=bool)
    for i in range(1, count):
        sees[i] |= sees[rng.integers(i)]
    return sees


def attention_case(
    batch=3,
    count=5,
    kv_heads=2,
    group=3,
    dim=16,
    capacity=300,
    page=None,
    lengths=None,
    dtype=jnp.float32,
    int8=False,
    window=None,
    chain=False,
    seed=0,
):
    """(Nodes, Cache, lengths); what lies past a row's length is NaN (int8: NaN scales), dead entries of the table are -7."""
    rng = np.random.default_rng(seed)
    draw = lambda *s: rng.normal(size=s).astype(np.float32)  # noqa: E731
    if lengths is None:
        lengths = np.concatenate([[0, capacity], rng.integers(0, capacity + 1, max(batch - 2, 0))])[:batch]
    lengths = np.asarray(lengths, np.int32)
    sees = np.stack([np.tri(count, dtype=bool) if chain else random_tree(rng, count) for _ in range(batch)])
    first = None
    if window is not None:
        first = np.maximum(lengths[:, None] + sees.sum(2) - 1 - window + 1, 0).astype(np.int32)
    keys, values = draw(batch, kv_heads, dim, capacity), draw(batch, kv_heads, capacity, dim)
    alive = np.arange(capacity) < lengths[:, None]
    scales = [None, None]
    if int8:
        scales = [rng.uniform(0.01, 0.03, (batch, kv_heads, capacity)).astype(np.float32) for _ in range(2)]
        keys, values = (rng.integers(-127, 128, x.shape).astype(np.int8) for x in (keys, values))
        scales = [np.where(alive[:, None], s, np.nan) for s in scales]
    else:
        keys = np.where(alive[:, None, None], keys, np.nan)
        values = np.where(alive[:, None, :, None], values, np.nan)
    table = None
    if page is not None:
        pages = -(-capacity // page)
        pad = pages * page - capacity
        order = rng.permutation(batch * pages + 2)[: batch * pages].reshape(batch, pages).astype(np.int32)

        def paged(x, axis):
            poison = np.nan if x.dtype.kind == "f" else 99
            width = [(0, pad if a == axis else 0) for a in range(x.ndim)]
            x = np.pad(x, width, constant_values=poison)
            x = np.moveaxis(x.reshape(*x.shape[:axis], pages, page, *x.shape[axis + 1 :]), axis, 1)
            out = np.full((batch * pages + 2, *x.shape[2:]), poison, x.dtype)
            out[order.reshape(-1)] = x.reshape(-1, *x.shape[2:])
            return out

        keys, values = paged(keys, 3), paged(values, 2)
        scales = [None if s is None else paged(s, 2) for s in scales]
        table = np.where(np.arange(pages) * page < lengths[:, None], order, -7).astype(np.int32)
    stored = jnp.int8 if int8 else dtype
    nodes = Nodes(
        *(
            jnp.asarray(draw(batch, count, h, dim) * f, dtype)
            for h, f in ((kv_heads * group, dim**-0.5), (kv_heads, 1), (kv_heads, 1))
        ),
        jnp.asarray(sees),
        None if first is None else jnp.asarray(first),
    )
    arrays = [jnp.asarray(keys, stored), jnp.asarray(values, stored), table, *scales]
    return nodes, Cache(*(None if x is None else jnp.asarray(x) for x in arrays)), jnp.asarray(lengths)
