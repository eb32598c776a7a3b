"""Log-probabilities and entropies of given tokens, without ever holding logits of the whole vocabulary.

`U` targets, `H` hidden size, `V` vocabulary. The work is done by `adrl_kernels.log_probs`.
"""

from typing import Any

import jax
from adrl_kernels.log_probs import api as op


def head_matrix(params: Any) -> tuple[jax.Array, bool]:
    """The output projection and whether it is stored `[V, H]` (a tied embedding, a served head) rather than `[H, V]`."""
    if "head_t" in params:
        return params["head_t"], True
    return (params["head"], False) if "head" in params else (params["embedding"], True)


def token_log_probs(
    params: Any,
    hidden: jax.Array,
    target_ids: jax.Array,
    temperature: float,
    *,
    valid_vocab: int | None = None,
    vocab_block: int | None = None,
    entropy_gradient: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Log-softmax of `logits / temperature` at the targets, and the entropy of that law.

    Args:
        params: of a `Transformer`; only the output projection is read.
        hidden: `[U, H]`, final-norm hidden states that predict the targets.
        target_ids: int32 `[U]`.
        temperature: the sampling temperature, > 0.
        valid_vocab: ids at or past it have probability 0, as in the sampler.
        vocab_block: ids handled together; chosen from U when None.
        entropy_gradient: whether the entropy may be differentiated; otherwise its gradient is 0.
        implementation: see `adrl_kernels.choice`.

    Returns:
        log-probs and entropies (nats), float32 `[U]` each.

    Raises:
        ValueError: temperature or valid_vocab out of range.
    """
    matrix, by_row = head_matrix(params)
    vocab = matrix.shape[0] if by_row else matrix.shape[1]
    valid = vocab if valid_vocab is None else valid_vocab
    if not temperature > 0:
        raise ValueError(f"temperature={temperature!r} must be positive: the limit law at 0 has no gradient")
    if not 0 < valid <= vocab:
        raise ValueError(f"valid_vocab={valid_vocab!r} must be between 1 and the model's vocab_size={vocab}")
    return op.token_log_probs(
        matrix,
        hidden,
        target_ids,
        by_row=by_row,
        scale=1.0 / temperature,
        valid_vocab=valid,
        vocab_block=vocab_block,
        entropy_gradient=entropy_gradient,
        implementation=implementation,
    )
