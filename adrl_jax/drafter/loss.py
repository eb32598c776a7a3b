"""EAGLE's loss on packed rows, from the hidden states that the policy's own pass yields (arXiv 2401.15077, §3.2).

At every target (a response token), with h the policy's hidden state that predicts it and f the drafter's prediction of h,

    feature_weight * smooth_l1(f, h) + token_weight * cross_entropy(law(h), law(f)),

where both laws are the policy's own projection at the sampling temperature: what acceptance is decided on. Nothing of the
policy is trained here. First response tokens of siblings share one hidden state and count once each, exactly as if each
sequence had been packed with a prompt of its own.

Shapes: `M` rows, `T` tokens, `U` targets a row (in the inner functions: all of them in one vector), `H` hidden size.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from adrl_jax.learner.attention import Reach, packed_attention
from adrl_jax.learner.forward import Forward, ForwardConfig, source_hidden
from adrl_jax.learner.log_probs import block_logits, blocks, columns, default_block, head_matrix
from adrl_jax.learner.losses import Loss
from adrl_jax.models.families import ModelConfig
from adrl_jax.speculation import eagle
from adrl_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True)
class DrafterLossConfig:
    """Weights of the two parts.

    Attributes:
        feature_weight: of smooth L1 between predicted and true hidden states, mean over H.
        token_weight: of the cross-entropy of the drafter's law against the policy's, nats.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1

    def __post_init__(self):
        for name in ("feature_weight", "token_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be finite and >= 0")
        if not (self.feature_weight or self.token_weight):
            raise ValueError("feature_weight and token_weight are both 0: there would be nothing to train on")


def smooth_l1(predicted: jax.Array, target: jax.Array) -> jax.Array:
    """Huber loss with threshold 1, mean over the last axis, float32 `[...]`."""
    d = jnp.abs(predicted.astype(jnp.float32) - target.astype(jnp.float32))
    return jnp.mean(jnp.where(d < 1.0, 0.5 * jnp.square(d), d - 0.5), axis=-1)


def packed_drafter_loss(
    config: DrafterLossConfig,
    drafter_params: Any,
    params: Any,
    model_config: ModelConfig,
    forward_config: ForwardConfig,
    out: Forward,
    batch: PackedBatch,
    reach: Reach | None = None,
) -> Loss:
    """The loss of packed rows; its sums are `feature_loss`, `token_loss` and `agreement`.

    `agreement` is sum_v min(p, q), the best acceptance any verification could reach on these positions.
    """
    params = jax.lax.stop_gradient(params)
    hidden = jax.lax.stop_gradient(out.hidden)
    segments = eagle.entry_segments(batch.segment_ids)
    predicted = eagle.packed_forward(
        drafter_params,
        params,
        model_config,
        hidden,
        batch.token_ids,
        batch.positions,
        packed_attention(segments, batch.branch_ids, batch.positions, reach=reach),
        sources=eagle.packed_sources(batch.token_ids.shape[1], batch.source_index, batch.target_index, batch.target_mask),
    )
    true, guess = source_hidden(hidden, batch), source_hidden(predicted, batch)
    # A prompt of one token has no entry before its response; such a first token is no lesson.
    usable = batch.target_mask & (jnp.take_along_axis(segments, batch.source_index, axis=1) != 0)
    feature = smooth_l1(guess, true)
    flat = (-1, hidden.shape[-1])
    token, agreement = soft_cross_entropy(
        params,
        true.reshape(flat),
        guess.reshape(flat),
        forward_config.temperature,
        valid_vocab=forward_config.valid_vocab,
        vocab_block=forward_config.vocab_block,
    )
    token, agreement = token.reshape(usable.shape), agreement.reshape(usable.shape)
    each = config.feature_weight * feature + config.token_weight * token

    def total(x):
        return jnp.sum(jnp.where(usable, x, 0.0))

    sums = {"feature_loss": total(feature), "token_loss": total(token), "agreement": total(agreement)}
    return Loss(total(each), jnp.sum(usable, dtype=jnp.float32), jax.lax.stop_gradient(sums), {})


def soft_cross_entropy(
    params: Any,
    true: jax.Array,
    guess: jax.Array,
    temperature: float,
    *,
    valid_vocab: int | None = None,
    vocab_block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """-sum_v p log q with p, q the laws of `true` and `guess`, `[U, H]` each; differentiable in `guess` alone.

    No logits of the whole vocabulary are held. Since nothing but `guess` is trained, its gradient is a vector a position
    times the incoming scalar, so it is computed along with the value and the backward pass is one multiplication.

    Returns:
        cross-entropy (nats) and sum_v min(p, q), float32 `[U]` each.
    """
    matrix, by_row = head_matrix(params)
    vocab = matrix.shape[0] if by_row else matrix.shape[1]
    valid = vocab if valid_vocab is None else valid_vocab
    block = default_block(guess.shape[0]) if vocab_block is None else vocab_block
    return _soft_cross_entropy((by_row, valid, min(block, valid), 1.0 / temperature), matrix, true, guess)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _soft_cross_entropy(static, matrix, true, guess):
    return _forward(static, matrix, true, guess)[0]


def _normaliser(static, matrix, hidden):
    by_row, valid, block, scale = static
    top, total = jnp.full(hidden.shape[0], -1e30), jnp.zeros(hidden.shape[0])
    for start, stop in blocks(valid, block):
        scores = block_logits(hidden, columns(matrix, by_row, start, stop), by_row, scale)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(scores - new_top[:, None]), axis=1)
        top = new_top
    return top + jnp.log(total)


def _forward(static, matrix, true, guess):
    by_row, valid, block, scale = static
    log_p_total, log_q_total = _normaliser(static, matrix, true), _normaliser(static, matrix, guess)
    value = overlap = jnp.zeros(guess.shape[0])
    d_guess = jnp.zeros(guess.shape, jnp.float32)
    for start, stop in blocks(valid, block):
        part = columns(matrix, by_row, start, stop)
        p = jnp.exp(block_logits(true, part, by_row, scale) - log_p_total[:, None])
        log_q = block_logits(guess, part, by_row, scale) - log_q_total[:, None]
        q = jnp.exp(log_q)
        value -= jnp.sum(p * log_q, axis=1)
        overlap += jnp.sum(jnp.minimum(p, q), axis=1)
        part = part.astype(guess.dtype)
        d_guess += jnp.matmul(
            ((q - p) * scale).astype(guess.dtype), part if by_row else part.T, preferred_element_type=jnp.float32
        )
    return (value, overlap), d_guess


def _soft_cross_entropy_fwd(static, matrix, true, guess):
    out, d_guess = _forward(static, matrix, true, guess)
    return out, (d_guess, jnp.zeros((), guess.dtype))


def _soft_cross_entropy_bwd(static, saved, cotangents):
    d_guess, like = saved
    return None, None, (cotangents[0][:, None] * d_guess).astype(like.dtype)


_soft_cross_entropy.defvjp(_soft_cross_entropy_fwd, _soft_cross_entropy_bwd)
