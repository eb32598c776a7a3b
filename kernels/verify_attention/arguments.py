"""The arguments of `verify_attention`, and what is wrong with them.

Shapes: `B` rows, `N` fresh nodes a row, `H` query heads, `K` key-value heads, `G = H / K`, `D` head size, `S` capacity in
tokens a row, `P` pages of `T` tokens, `M = S / T` pages a row.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Cache(NamedTuple):
    """Keys and values of committed tokens, contiguous or paged; what lies at or past a row's length is never used.

    Attributes:
        keys: `[B, K, D, S]`, or paged `[P, K, D, T]`.
        values: `[B, K, S, D]`, or paged `[P, K, T, D]`.
        table: int32 `[B, M]`, page of each `T` tokens of a row, or None where the cache is contiguous. Entries of dead pages
            mean nothing.
        key_scales, value_scales: float32 `[B, K, S]` or `[P, K, T]`, what int8 entries are multiplied by; None otherwise.
    """

    keys: jax.Array
    values: jax.Array
    table: jax.Array | None = None
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None

    @property
    def capacity(self) -> int:
        """Tokens a row can hold."""
        tokens = self.keys.shape[3]
        return tokens if self.table is None else tokens * self.table.shape[1]

    @property
    def quantized(self) -> bool:
        return self.keys.dtype == jnp.int8


class Nodes(NamedTuple):
    """Fresh nodes, each of which sees the committed tokens, itself and its ancestors.

    Attributes:
        queries: `[B, N, H, D]`, scaled.
        keys, values: `[B, N, K, D]`.
        sees: bool `[B, N, N]`, `sees[b, i, j]`: j is i or an ancestor of i.
        first: int32 `[B, N]`, the first committed token that a node sees (sliding windows), or None: token 0.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    sees: jax.Array
    first: jax.Array | None = None


def known(x) -> np.ndarray | None:
    """The values of an array, None while it is being traced."""
    if x is None or isinstance(x, jax.ShapeDtypeStruct):
        return None
    try:
        return np.asarray(x)
    except jax.errors.TracerArrayConversionError:
        return None


def check(nodes: Nodes, cache: Cache, lengths: jax.Array) -> None:
    """Raises ValueError for arguments that no implementation takes. Values are looked at only where they are known."""
    batch, count, heads, dim = nodes.queries.shape
    kv_heads = nodes.keys.shape[2]
    if heads % kv_heads:
        raise ValueError(f"queries have {heads} heads, which must be a multiple of the {kv_heads} key-value heads")
    rows = batch if cache.table is None else cache.keys.shape[0]
    tokens = cache.keys.shape[-1]
    expected = {
        "nodes.keys": (nodes.keys, (batch, count, kv_heads, dim)),
        "nodes.values": (nodes.values, (batch, count, kv_heads, dim)),
        "nodes.sees": (nodes.sees, (batch, count, count)),
        "nodes.first": (nodes.first, (batch, count)),
        "cache.keys": (cache.keys, (rows, kv_heads, dim, tokens)),
        "cache.values": (cache.values, (rows, kv_heads, tokens, dim)),
        "cache.key_scales": (cache.key_scales, (rows, kv_heads, tokens)),
        "cache.value_scales": (cache.value_scales, (rows, kv_heads, tokens)),
        "lengths": (lengths, (batch,)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {shape} beside queries {nodes.queries.shape}")
    if cache.table is not None and (cache.table.ndim != 2 or cache.table.shape[0] != batch):
        raise ValueError(f"cache.table has shape {tuple(cache.table.shape)}, expected ({batch}, pages of a row)")
    _check_dtypes(nodes, cache)
    _check_values(nodes, cache, lengths)


def _check_dtypes(nodes: Nodes, cache: Cache) -> None:
    fresh = {"nodes.queries": nodes.queries, "nodes.keys": nodes.keys, "nodes.values": nodes.values}
    dtypes = {name: jnp.dtype(x.dtype) for name, x in fresh.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError("mixed dtypes: " + ", ".join(f"{name} {d}" for name, d in dtypes.items()))
    dtype = nodes.queries.dtype
    stored = {jnp.dtype(cache.keys.dtype), jnp.dtype(cache.values.dtype)}
    if stored not in ({jnp.dtype(dtype)}, {jnp.dtype(jnp.int8)}):
        raise ValueError(
            f"cache.keys {cache.keys.dtype} and cache.values {cache.values.dtype} must both be int8, or both {dtype} as the queries"
        )
    for name in ("key_scales", "value_scales"):
        scales = getattr(cache, name)
        if (scales is not None) != cache.quantized:
            raise ValueError(f"cache.{name} must be given exactly for an int8 cache; the cache is {cache.keys.dtype}")
        if scales is not None and scales.dtype != jnp.float32:
            raise ValueError(f"cache.{name} is {scales.dtype}, must be float32")


def _check_values(nodes: Nodes, cache: Cache, lengths: jax.Array) -> None:
    found = known(lengths)
    if found is not None and found.size and (found.min() < 0 or found.max() > cache.capacity):
        bad = int(found.max()) if found.max() > cache.capacity else int(found.min())
        raise ValueError(f"lengths contains {bad}, must be between 0 and the capacity {cache.capacity}")
    first = np.zeros((len(lengths), 1), np.int32) if nodes.first is None else known(nodes.first)
    if found is not None and first is not None:
        check_pages(cache, first.min(1), found)
    sees = known(nodes.sees)
    if sees is not None:
        check_forest(sees)


def check_pages(cache: Cache, low: np.ndarray, high: np.ndarray) -> None:
    """Raises ValueError where the table names a page that is not there, for tokens low … high - 1 of a row, `[B]` each."""
    table = known(cache.table)
    if table is None:
        return
    count, size = cache.keys.shape[0], cache.keys.shape[3]
    first = np.arange(table.shape[1]) * size
    used = table[(first < high[:, None]) & (first + size > low[:, None])]
    wrong = used[(used < 0) | (used >= count)]
    if wrong.size:
        raise ValueError(f"cache.table names page {wrong[0]} where a row has tokens, must be 0 to {count - 1}")


def check_forest(sees: np.ndarray) -> None:
    """Raises ValueError where `sees` `[B, N, N]` is not the ancestor relation of a forest whose parents come first."""
    sees = np.asarray(sees, bool)
    count = sees.shape[1]
    through = np.matmul(sees, sees, dtype=np.int64) > 0  # i sees j through k
    chain = sees | sees.swapaxes(1, 2)  # one of j, k sees the other
    both = sees[:, :, :, None] & sees[:, :, None, :]
    faults = {
        "a node does not see itself": ~np.diagonal(sees, axis1=1, axis2=2).all(1),
        "a node sees a later one": (sees & ~np.tri(count, dtype=bool)).any((1, 2)),
        "a node does not see an ancestor's ancestor": (through & ~sees).any((1, 2)),
        "a node sees two branches": (both & ~chain[:, None]).any((1, 2, 3)),
    }
    for fault, rows in faults.items():
        if rows.any():
            raise ValueError(f"nodes.sees is no forest of ancestors in row {int(rows.argmax())}: {fault}")


def minimum_bytes(nodes: Nodes, cache: Cache, lengths: np.ndarray) -> int:
    """What no implementation can do without: live entries of the cache, queries, fresh keys and values, and the result."""
    batch, count, heads, dim = nodes.queries.shape
    kv_heads = nodes.keys.shape[2]
    entry = 2 * kv_heads * (dim * jnp.dtype(cache.keys.dtype).itemsize + 4 * cache.quantized)
    width = jnp.dtype(nodes.queries.dtype).itemsize
    fresh = 2 * math.prod((batch, count, heads, dim)) + 2 * math.prod((batch, count, kv_heads, dim))
    return int(np.sum(lengths)) * entry + fresh * width
