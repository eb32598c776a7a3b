"""`token_log_probs`: what the learner asks of the vocabulary projection, differentiable."""

import jax
import jax.numpy as jnp
from adrl_kernels import choice
from adrl_kernels.log_probs import pallas_gpu, pallas_tpu, xla
from adrl_kernels.log_probs.xla import Static, default_block


def token_log_probs(
    matrix: jax.Array,
    hidden: jax.Array,
    target_ids: jax.Array,
    *,
    by_row: bool = True,
    scale: float = 1.0,
    valid_vocab: int | None = None,
    vocab_block: int | None = None,
    entropy_gradient: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Log-softmax of scaled logits at the targets, and the entropy of that law.

    Args:
        matrix: the projection, `[V, H]`, or `[H, V]` with `by_row=False`; cast to the dtype of `hidden` where it is used.
        hidden: `[U, H]`.
        target_ids: int32 `[U]`.
        scale: logits are multiplied by it, 1 / temperature.
        valid_vocab: ids at or past it have probability 0; None allows all.
        vocab_block: for `xla`, ids handled together; chosen from U when None.
        entropy_gradient: whether the entropy may be differentiated; otherwise its gradient is 0.
        implementation: one of `choice.IMPLEMENTATIONS`.

    Returns:
        log-probs and entropies (nats), float32 `[U]` each.

    Raises:
        ValueError: shapes that do not fit together, or `valid_vocab` out of range.
        choice.UnsupportedError: a dtype or hidden size that the implementation does not do.
    """
    count, size = hidden.shape
    vocab = matrix.shape[0 if by_row else 1]
    if matrix.shape[1 if by_row else 0] != size:
        expected = f"[V, {size}]" if by_row else f"[{size}, V]"
        raise ValueError(f"matrix has shape {tuple(matrix.shape)}, expected {expected} (by_row={by_row})")
    if tuple(target_ids.shape) != (count,):
        raise ValueError(f"target_ids has shape {tuple(target_ids.shape)}, expected ({count},)")
    valid = vocab if valid_vocab is None else valid_vocab
    if not 0 < valid <= vocab:
        raise ValueError(f"valid_vocab={valid_vocab!r} must be between 1 and the projection's {vocab} ids")
    problems = {
        "pallas_tpu": lambda: pallas_tpu.problem(matrix, hidden),
        "interpret": lambda: pallas_tpu.problem(matrix, hidden),
        "pallas_gpu": lambda: pallas_gpu.problem(matrix, hidden),
    }
    chosen = choice.resolve("log_probs", implementation, lambda name: problems.get(name, lambda: None)())
    block = default_block(count) if vocab_block is None else vocab_block
    static = Static(by_row, valid, min(block, valid), scale, entropy_gradient)
    if chosen == "xla":
        log_probs, entropy = xla.token_log_probs(static, matrix, hidden, target_ids)
    else:
        if not by_row:
            matrix = jnp.swapaxes(matrix, 0, 1)
        run = pallas_gpu.token_log_probs if chosen == "pallas_gpu" else pallas_tpu.token_log_probs
        log_probs, entropy = run(static._replace(by_row=True), chosen == "interpret", matrix, hidden, target_ids)
    return log_probs, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)


def minimum_bytes(matrix, hidden, valid_vocab: int) -> int:
    """What no forward pass can do without: the projections of valid ids, the hidden states, and ids in and results out."""
    row = hidden.shape[1] * jnp.dtype(matrix.dtype).itemsize
    return valid_vocab * row + hidden.size * jnp.dtype(hidden.dtype).itemsize + 12 * hidden.shape[0]
