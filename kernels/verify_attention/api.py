"""`verify_attention`: what a verify pass (or, with one node, a decode step) asks of attention."""

import jax
from adrl_kernels import choice
from adrl_kernels.verify_attention import pallas_tpu, xla
from adrl_kernels.verify_attention.arguments import Cache, Nodes, check


def verify_attention(nodes: Nodes, cache: Cache, lengths: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """Softmax attention of fresh nodes over the committed tokens of their row and over their own ancestors.

    The keys and values of the nodes are not written to the cache, see `commit`. The mask never has the size of the cache:
    every node sees the whole committed row (or its window of it), and an N x N block says who sees whom among the nodes.

    Args:
        nodes: `N` nodes a row, see `Nodes`.
        cache: contiguous or paged, float or int8, see `Cache`.
        lengths: int32 `[B]`, committed tokens of each row, 0 … capacity.
        implementation: one of `choice.IMPLEMENTATIONS`.

    Returns:
        `[B, N, H, D]` in the dtype of the queries; sums are float32.

    Raises:
        ValueError: shapes or dtypes that do not fit together; where values are known (not traced): a length beyond the
            capacity, or `sees` is not the ancestor relation of a forest.
        choice.UnsupportedError: a head size, page size, node count or dtype that the implementation does not do.
    """
    check(nodes, cache, lengths)
    problems = {
        "pallas_tpu": lambda: pallas_tpu.problem(nodes, cache),
        "interpret": lambda: pallas_tpu.problem(nodes, cache),
        "pallas_gpu": lambda: choice.gpu_module("verify_attention").problem(nodes, cache),
    }
    chosen = choice.resolve("verify_attention", implementation, lambda name: problems.get(name, lambda: None)())
    if chosen == "xla":
        return xla.verify_attention(nodes, cache, lengths)
    if chosen == "pallas_gpu":
        return choice.gpu_module("verify_attention").verify_attention(nodes, cache, lengths)
    return pallas_tpu.verify_attention(nodes, cache, lengths, interpret=chosen == "interpret")
