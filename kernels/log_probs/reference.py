"""What `log_probs` means: all logits, then log-softmax, in the widest float at hand."""

import jax
import jax.numpy as jnp


def token_log_probs(matrix, hidden, target_ids, *, by_row: bool, scale: float, valid_vocab: int):
    """Log-probs of the targets and entropies (nats), `[U]` each in at least float32. Arguments as in `api.token_log_probs`."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    contract = (((1,), (1 if by_row else 0,)), ((), ()))
    logits = jax.lax.dot_general(hidden.astype(wide), matrix.astype(wide), contract, precision="highest") * scale
    log_law = jax.nn.log_softmax(logits[:, :valid_vocab], axis=1)
    entropy = -jnp.sum(jnp.exp(log_law) * log_law, axis=1)
    return jnp.take_along_axis(log_law, target_ids[:, None], axis=1)[:, 0], entropy
