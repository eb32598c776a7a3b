"""`commit`: after a verify pass, the keys and values of the path that stands join the cache.

There is no kernel for GPUs: XLA's scatter writes the few entries where they go, in place, and `pallas_gpu` means that, which is
logged once. On TPUs the same scatter would go token by token.
"""

import jax
import numpy as np
from adrl_kernels import choice
from adrl_kernels.commit import pallas_tpu, reference
from adrl_kernels.verify_attention.arguments import Cache, check_pages, known


def commit(
    cache: Cache,
    keys: jax.Array,
    values: jax.Array,
    path: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    implementation: str = "auto",
) -> Cache:
    """Writes node `path[b, i]` to token `start[b] + i` of row b, for i < `count[b]`. Everything else stays as it is.

    The cache's buffers are reused where the caller donates them.

    Args:
        cache: float, contiguous or paged; pages that are written belong to one row only.
        keys, values: `[B, N, K, D]` of the fresh nodes.
        path: int32 `[B, L]`, nodes, in order; entries past `count` mean nothing.
        start: int32 `[B]`.
        count: int32 `[B]`, 0 … L; `start + count` may not pass the capacity.
        implementation: one of `choice.IMPLEMENTATIONS`.

    Returns:
        the cache with the path in it.

    Raises:
        ValueError: shapes that do not fit together; an int8 cache; where values are known: a write past the capacity, or a
            node that is not there.
        choice.UnsupportedError: a path, node count or page size that the implementation does not do.
    """
    _check(cache, keys, values, path, start, count)
    nodes, length = keys.shape[1], path.shape[1]
    problems = {
        "pallas_tpu": lambda: pallas_tpu.problem(cache, nodes, length),
        "interpret": lambda: pallas_tpu.problem(cache, nodes, length),
    }
    chosen = choice.resolve("commit", implementation, lambda name: problems.get(name, lambda: None)())
    if chosen == "pallas_gpu":
        chosen = choice.told("commit", "xla", "on GPUs its scatter writes a path where it goes, and there is no kernel")
    if chosen == "xla":
        return reference.commit(cache, keys, values, path, start, count)
    return pallas_tpu.commit(cache, keys, values, path, start, count, interpret=chosen == "interpret")


def minimum_bytes(cache: Cache, count: np.ndarray) -> int:
    """What no implementation can do without: each committed entry read once and written once."""
    _, kv_heads, dim, _ = cache.keys.shape
    return 2 * 2 * int(np.sum(count)) * kv_heads * dim * cache.keys.dtype.itemsize


def _check(cache, keys, values, path, start, count) -> None:
    batch, nodes = keys.shape[:2]
    _, kv_heads, dim, _ = cache.keys.shape
    if cache.quantized:
        raise ValueError("cache is int8: its entries are quantised before they are committed, which this operation does not do")
    expected = {
        "keys": (keys, (batch, nodes, kv_heads, dim)),
        "values": (values, (batch, nodes, kv_heads, dim)),
        "path": (path, (batch, path.shape[-1])),
        "start": (start, (batch,)),
        "count": (count, (batch,)),
    }
    for name, (array, shape) in expected.items():
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {shape}")
    places, counts, chosen = known(start), known(count), known(path)
    if places is not None and counts is not None:
        if counts.min() < 0 or counts.max() > path.shape[1]:
            raise ValueError(
                f"count contains {counts.min() if counts.min() < 0 else counts.max()}, must be 0 to {path.shape[1]}"
            )
        ends = np.where(counts > 0, places + counts, 0)
        if ends.max() > cache.capacity or np.where(counts > 0, places, 0).min() < 0:
            raise ValueError(f"a commit to tokens up to {ends.max()} does not fit into the capacity {cache.capacity}")
        check_pages(cache, places, ends)
        if chosen is not None:
            used = chosen[np.arange(path.shape[1]) < counts[:, None]]
            if used.size and not (0 <= used.min() and used.max() < nodes):
                raise ValueError(f"path names node {used.max() if used.max() >= nodes else used.min()}, there are {nodes}")
