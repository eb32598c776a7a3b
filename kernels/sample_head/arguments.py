"""The arguments of `sample_head`, and what is wrong with them.

Shapes: `M` positions (rows x nodes), `H` hidden size, `V` vocabulary size, `C` draws of each position.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from adrl_kernels.verify_attention.arguments import known


class Norm(NamedTuple):
    """RMSNorm (arXiv 1910.07467) before the projection.

    Attributes:
        weight: `[H]`, whatever offset the family adds included.
        eps: added to the mean square.
    """

    weight: jax.Array
    eps: float


class Draws(NamedTuple):
    """The best perturbed ids of each position, best first.

    Attributes:
        ids: int32 `[M, C]`.
        scores: float32 `[M, C]`, logits / temperature + Gumbel noise; at temperature 0 the logits.
        log_probs: float32 `[M, C]`, under softmax(logits / temperature); at temperature 0 it is 0 for the first and -inf for others.
        log_total: float32 `[M]`, log-sum-exp of logits / temperature (of the logits at temperature 0).
    """

    ids: jax.Array
    scores: jax.Array
    log_probs: jax.Array
    log_total: jax.Array


def check(hidden, weight, keys, temperature, by_row: bool, valid_vocab: int, draws: int, norm: Norm | None) -> None:
    """Raises ValueError for arguments that no implementation takes."""
    if hidden.ndim != 2:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}, expected [M, H]")
    count, size = hidden.shape
    if weight.ndim != 2 or weight.shape[1 if by_row else 0] != size:
        expected = f"[V, {size}]" if by_row else f"[{size}, V]"
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected {expected} (by_row={by_row})")
    if tuple(keys.shape) != (count, 2) or keys.dtype != jnp.uint32:
        raise ValueError(f"keys is {keys.dtype}{list(keys.shape)}, expected uint32[{count}, 2]")
    if tuple(temperature.shape) != (count,):
        raise ValueError(f"temperature has shape {tuple(temperature.shape)}, expected ({count},)")
    if jnp.dtype(hidden.dtype) != jnp.dtype(weight.dtype):
        raise ValueError(f"mixed dtypes: hidden {hidden.dtype}, weight {weight.dtype}")
    vocab = weight.shape[0 if by_row else 1]
    if not 1 <= valid_vocab <= vocab:
        raise ValueError(f"valid_vocab={valid_vocab} must be between 1 and the weight's {vocab} ids")
    if not 1 <= draws <= valid_vocab:
        raise ValueError(f"draws={draws} must be between 1 and valid_vocab={valid_vocab}")
    if norm is not None and tuple(norm.weight.shape) != (size,):
        raise ValueError(f"norm.weight has shape {tuple(norm.weight.shape)}, expected ({size},)")
    values = known(temperature)
    if values is not None and not (np.isfinite(values) & (values >= 0)).all():
        bad = values[~(np.isfinite(values) & (values >= 0))][0]
        raise ValueError(f"temperature contains {bad}, must be finite and >= 0")


def minimum_bytes(hidden, weight, by_row: bool, valid_vocab: int) -> int:
    """What no implementation can do without: the weights of valid ids, and the hidden states."""
    rows = valid_vocab * hidden.shape[1] * jnp.dtype(weight.dtype).itemsize
    return rows + hidden.size * jnp.dtype(hidden.dtype).itemsize
