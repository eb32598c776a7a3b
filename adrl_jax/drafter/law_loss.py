"""How far a drafter's laws are from the policy's: soft cross-entropy and overlap, without logits of everything at once.

With p the policy's law at a place and q the drafter's (over the draft vocabulary where there is one; p keeps its mass outside),

    cross-entropy  -sum_v p log q        and        overlap  sum_v min(p, q),

both sums over the ids the drafter knows. 1 - overlap is the total variation distance; no verification accepts a draft more
often than overlap, and the coupled one at least overlap / (2 - overlap) of the time (arXiv 2408.07978), so training the overlap
is training acceptance.

Nothing but the drafter's hidden states is trained. So the gradient is a vector a place: it is computed along with the value,
and the backward pass is one multiplication.

Shapes: `D` draft depths, `N` places, `H` hidden size, `V` ids.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from adrl_kernels.log_probs.xla import block_logits, blocks, columns, default_block

_CHUNK_ELEMENTS = 4 * 1024 * 1024  # 16 MB of float32 logits


class LawLoss(NamedTuple):
    """float32 `[D, N]` each.

    Attributes:
        value: `token_weight * cross_entropy + overlap_weight * (1 - overlap)`, differentiable in the drafter's hidden states.
        cross_entropy: nats.
        overlap: between 0 and 1.
    """

    value: jax.Array
    cross_entropy: jax.Array
    overlap: jax.Array


def law_loss(
    matrix: jax.Array,
    true: jax.Array,
    guess: jax.Array,
    temperature: float,
    *,
    by_row: bool = True,
    token_weight: float = 1.0,
    overlap_weight: float = 0.0,
    log_total: jax.Array | None = None,
    valid_vocab: int | None = None,
    vocab_block: int | None = None,
) -> LawLoss:
    """Compares the laws of `guess` at each depth with that of `true`.

    Args:
        matrix: vocabulary projection, `[V, H]` (`by_row`) or `[H, V]`.
        true: `[N, H]`, the policy's hidden states.
        guess: `[D, N, H]`, the drafter's.
        temperature: of both laws, > 0.
        log_total: float32 `[N]`, log of the policy's normaliser over its whole vocabulary (logits divided by the temperature),
            where `matrix` is only a part of it; then places are handled in chunks rather than ids in blocks.
        valid_vocab: ids at or past it have probability 0.
        vocab_block: ids handled together where the vocabulary is whole; chosen from the number of places when None.
    """
    vocab = matrix.shape[0] if by_row else matrix.shape[1]
    valid = vocab if valid_vocab is None else valid_vocab
    depths, places = guess.shape[:2]
    static = (by_row, valid, 1.0 / temperature, float(token_weight), float(overlap_weight))
    if log_total is None:
        block = default_block(depths * places) if vocab_block is None else vocab_block
        return _law_loss((*static, min(block, valid)), matrix, true, guess, None)
    size = max(64, _CHUNK_ELEMENTS // (depths * valid) // 64 * 64)
    if places <= size:
        return _law_loss((*static, valid), matrix, true, guess, log_total)

    chunks = -(-places // size)
    spare = chunks * size - places
    true = jnp.pad(true, ((0, spare), (0, 0))).reshape(chunks, size, -1)
    guess = jnp.pad(guess, ((0, 0), (0, spare), (0, 0))).reshape(depths, chunks, size, -1).swapaxes(0, 1)
    log_total = jnp.pad(log_total, (0, spare)).reshape(chunks, size)
    out = jax.lax.map(lambda chunk: _law_loss((*static, valid), matrix, *chunk), (true, guess, log_total))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(depths, -1)[:, :places], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _law_loss(static, matrix, true, guess, log_total):
    return _forward(static, matrix, true, guess, log_total)[0]


def _normaliser(static, matrix, hidden):
    by_row, valid, scale, _, _, block = static
    top, total = jnp.full(hidden.shape[0], -1e30), jnp.zeros(hidden.shape[0])
    for start, stop in blocks(valid, block):
        scores = block_logits(hidden, columns(matrix, by_row, start, stop), by_row, scale)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(scores - new_top[:, None]), axis=1)
        top = new_top
    return top + jnp.log(total)


def _forward(static, matrix, true, guess, log_total):
    """With z the drafter's logits, d value / d z_v = q_v (token_weight m + overlap_weight s) - token_weight p_v
    - overlap_weight q_v [q_v < p_v], where m = sum p and s = sum q [q < p] over the ids that the drafter knows."""
    by_row, valid, scale, token_weight, overlap_weight, block = static
    depths, places, width = guess.shape
    flat = guess.reshape(-1, width)
    # Where m and s are known in time, one product with the matrix gives the gradient; else its two parts need one each.
    mass_is_one = log_total is None
    known = block >= valid or (mass_is_one and not overlap_weight)
    log_p_total = _normaliser(static, matrix, true) if log_total is None else log_total
    log_q_total = _normaliser(static, matrix, flat)
    cross_entropy = overlap = below = jnp.zeros((depths, places))
    mass = jnp.zeros(places)
    gradient = spread = jnp.zeros(flat.shape, jnp.float32)
    for start, stop in blocks(valid, block):
        part = columns(matrix, by_row, start, stop)
        p = jnp.exp(block_logits(true, part, by_row, scale) - log_p_total[:, None])
        log_q = (block_logits(flat, part, by_row, scale) - log_q_total[:, None]).reshape(depths, places, -1)
        q = jnp.exp(log_q)
        low = jnp.where(q < p, q, 0.0)
        cross_entropy -= jnp.sum(p * log_q, axis=-1)
        overlap += jnp.sum(jnp.minimum(p, q), axis=-1)
        below += jnp.sum(low, axis=-1)
        mass = jnp.ones(places) if mass_is_one else mass + jnp.sum(p, axis=-1)
        pull = token_weight * p + overlap_weight * low
        if known:
            gradient += _back((token_weight * mass + overlap_weight * below)[..., None] * q - pull, part, by_row, guess.dtype)
        else:
            gradient -= _back(pull, part, by_row, guess.dtype)
            spread += _back(q, part, by_row, guess.dtype)
    if not known:
        gradient += (token_weight * mass + overlap_weight * below).reshape(-1, 1) * spread
    value = token_weight * cross_entropy + overlap_weight * (1.0 - overlap)
    return LawLoss(value, cross_entropy, overlap), gradient.reshape(guess.shape) * scale


def _back(weights, part, by_row, dtype):
    """`[D, N, block]` weights of ids to `[D N, H]`."""
    weights, part = weights.reshape(-1, weights.shape[-1]).astype(dtype), part.astype(dtype)
    return jnp.matmul(weights, part if by_row else part.T, preferred_element_type=jnp.float32)


def _law_loss_fwd(static, matrix, true, guess, log_total):
    out, gradient = _forward(static, matrix, true, guess, log_total)
    return out, (gradient, jnp.zeros((), guess.dtype))


def _law_loss_bwd(static, saved, cotangents):
    gradient, like = saved
    return None, None, (cotangents.value[..., None] * gradient).astype(like.dtype), None


_law_loss.defvjp(_law_loss_fwd, _law_loss_bwd)
