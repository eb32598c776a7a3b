"""The policy's forward pass over packed rows: hidden states, then log-probs of the targets.

`M` rows, `T` tokens a row, `U` targets a row, `H` hidden size, `V` vocabulary.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from adrl_kernels import choice

from adrl_jax.learner.attention import Reach, packed_attention
from adrl_jax.learner.log_probs import token_log_probs
from adrl_jax.learner.remat import recomputed
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.norm import Norm
from adrl_jax.models.transformer import DecoderLayer, embed_tokens, final_hidden, model_ropes
from adrl_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """How log-probs are computed. The law must be the one that sampled.

    Attributes:
        temperature: of the sampling law, > 0.
        valid_vocab: ids at or past it have probability 0; None where the whole vocabulary is valid.
        remat: keep only the inputs of layers for the backward pass and compute the rest again: a fraction of the memory,
            a third more work.
        vocab_block: ids whose logits exist at one time; chosen from the number of targets when None.
        kernels: who computes log-probs from hidden states, see `adrl_kernels.choice`.
    """

    temperature: float = 1.0
    valid_vocab: int | None = None
    remat: bool = False
    vocab_block: int | None = None
    kernels: str = "xla"

    def __post_init__(self):
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature!r} must be finite and positive: training rollouts are sampled")
        choice.check_name(self.kernels, "kernels")
        for name in ("valid_vocab", "vocab_block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer or None")


class Forward(NamedTuple):
    """What a pass over packed rows yields.

    Attributes:
        hidden: `[M, T, H]`, final-norm hidden states; with taps `[M, T, (1 + taps) H]`, those of the taps behind them.
        log_probs: float32 `[M, U]`, of the targets at the sampling temperature.
        entropy: float32 `[M, U]`, nats, of the laws they come from.
    """

    hidden: jax.Array
    log_probs: jax.Array
    entropy: jax.Array


def hidden_states(
    params: Any, model_config: ModelConfig, batch: PackedBatch, *, reach: Reach | None = None, remat: bool = False
) -> jax.Array:
    """Final-norm hidden states `[M, T, H]` of packed rows (with taps, theirs behind them): what `Transformer` computes, traced
    once a kind of layer.

    Rows are laid end to end, so that every matrix product, forward and backward, is a plain two-dimensional one.
    """
    c = model_config
    module = DecoderLayer(c)
    rows = (batch.segment_ids, batch.branch_ids, batch.positions)

    @functools.lru_cache
    def layer_like(local: bool):
        index = next(i for i in range(c.num_layers) if c.is_local(i) == local)

        def layer(weights, x, rest):
            rope, rows = rest
            return module.apply(
                {"params": weights}, x, rope, attend=packed_attention(*rows, reach=reach), layer=index, cache=None
            )[0]

        # Jitted for its cache: equal layers share one trace, one derivative and one transposition.
        return jax.jit(recomputed(layer) if remat else layer)

    x = embed_tokens(params["embedding"], batch.token_ids.reshape(1, -1), c)
    ropes = model_ropes(c, batch.positions.reshape(1, -1))
    tapped = []
    for i in range(c.num_layers):
        x = layer_like(c.is_local(i))(params[f"layer_{i}"], x, (ropes[c.is_local(i)], rows))
        if i + 1 in c.taps:
            tapped.append(x)
    x = Norm(c.norm, c.norm_eps, c.norm_offset).apply({"params": params["final_norm"]}, x)
    if tapped:
        x = jnp.concatenate([x, *tapped], axis=-1)
    return x.reshape(*batch.token_ids.shape, -1)


def source_hidden(hidden: jax.Array, batch: PackedBatch) -> jax.Array:
    """The hidden state that predicts each target, `[M, U, H]`; siblings share the last prompt token's."""
    return jnp.take_along_axis(hidden, batch.source_index[..., None], axis=1)


def forward(
    params: Any,
    model_config: ModelConfig,
    config: ForwardConfig,
    batch: PackedBatch,
    *,
    reach: Reach | None = None,
    entropy_gradient: bool = False,
) -> Forward:
    """Runs the policy over packed rows. Only response positions meet the vocabulary projection."""
    hidden = hidden_states(params, model_config, batch, reach=reach, remat=config.remat)
    sources = source_hidden(final_hidden(hidden, model_config), batch)
    log_probs, entropy = token_log_probs(
        params,
        sources.reshape(-1, sources.shape[-1]),
        batch.target_ids.reshape(-1),
        config.temperature,
        valid_vocab=config.valid_vocab,
        vocab_block=config.vocab_block,
        entropy_gradient=entropy_gradient,
        implementation=config.kernels,
    )
    shape = batch.target_ids.shape
    return Forward(hidden, log_probs.reshape(shape), entropy.reshape(shape))
