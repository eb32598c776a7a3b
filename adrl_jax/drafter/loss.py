"""EAGLE's loss on packed rows, from the hidden states that the policy's own pass yields (arXiv 2401.15077, §3.2).

At every target (a response token), with h the policy's hidden state that predicts it and f the drafter's prediction of h,

    feature_weight * smooth_l1(f, h) + token_weight * cross_entropy(law(h), law(f)) + overlap_weight * TV(law(h), law(f)),

where both laws are the policy's own projection at the sampling temperature: what acceptance is decided on. With `depths` > 1
the same is asked of predictions that were fed back (see `unroll`), depth d with weight `depth_decay` ** (d - 1). Nothing of the
policy is trained here. First response tokens of siblings share one hidden state and count once each, exactly as if each
sequence had been packed with a prompt of its own.

A drafter with a draft vocabulary (`draft_ids` among its parameters) is compared on those ids only, which costs V' / V of the
time; the policy's law keeps the mass that it has elsewhere.

Shapes: `M` rows, `T` tokens, `U` targets a row (in the inner functions: all of them in one vector), `H` hidden size.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from adrl_jax.drafter.importance import KINDS, target_weights
from adrl_jax.drafter.law_loss import LawLoss, law_loss
from adrl_jax.drafter.unroll import guesses
from adrl_jax.learner.attention import Reach
from adrl_jax.learner.forward import Forward, ForwardConfig, source_hidden
from adrl_jax.learner.log_probs import head_matrix
from adrl_jax.learner.losses import Loss
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.transformer import final_hidden
from adrl_jax.speculation import eagle
from adrl_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True)
class DrafterLossConfig:
    """Weights of the parts.

    Attributes:
        feature_weight: of smooth L1 between predicted and true hidden states, mean over H.
        token_weight: of the cross-entropy of the drafter's law against the policy's, nats.
        overlap_weight: of the total variation distance between the two.
        depths: draft depths that are trained; 1 trains on true hidden states alone.
        depth_decay: each further depth counts this times the one before.
        importance_weights: `none`, `token` or `prefix`: how targets of responses that another policy drew are weighted, see
            `importance`.
        importance_cap: no weight is larger.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    overlap_weight: float = 0.0
    depths: int = 1
    depth_decay: float = 0.8
    importance_weights: str = "none"
    importance_cap: float = 2.0

    def __post_init__(self):
        for name in ("feature_weight", "token_weight", "overlap_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be finite and >= 0")
        if not (self.feature_weight or self.token_weight or self.overlap_weight):
            raise ValueError("feature_weight, token_weight and overlap_weight are all 0: there would be nothing to train on")
        if not isinstance(self.depths, int) or isinstance(self.depths, bool) or self.depths < 1:
            raise ValueError(f"depths={self.depths!r} must be an integer >= 1")
        if not 0 < self.depth_decay <= 1:
            raise ValueError(f"depth_decay={self.depth_decay!r} must be in (0, 1]")
        if self.importance_weights not in KINDS:
            raise ValueError(f"importance_weights={self.importance_weights!r} is unknown; choose one of {', '.join(KINDS)}")
        if not self.importance_cap > 0:
            raise ValueError(f"importance_cap={self.importance_cap!r} must be > 0")


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
    """The loss of packed rows.

    The numerator is weighted as `config.importance_weights` says (current law over the batch's behaviour log-probs), the
    denominator and the sums, which are for logs, are not. The sums are those of depth 1, `feature_loss`, `token_loss` and `agreement` (sum_v min(p, q), the best acceptance any
    verification could reach on these places), and for each further depth d `agreement_d` and `targets_d`, over how many targets
    that is: a draft of depth d needs d - 1 response tokens before it.

    Args:
        model_config: with the taps that the drafter reads.
        drafter_params: with `draft_ids` where the drafter has a draft vocabulary. Differentiate `eagle.split(…)[0]` only.
        out: of the policy's pass; `log_probs` must be those of `forward_config`'s law (they tell its normaliser).
    """
    params = jax.lax.stop_gradient(params)
    hidden = jax.lax.stop_gradient(out.hidden)
    guess, usable = guesses(drafter_params, params, model_config, hidden, batch, config.depths, reach)
    true = source_hidden(final_hidden(hidden, model_config), batch)
    feature = smooth_l1(guess, true)
    laws = _compare(config, drafter_params, params, forward_config, out, batch, true, guess)
    each = config.feature_weight * feature + laws.value
    weights = config.depth_decay ** jnp.arange(config.depths, dtype=jnp.float32)

    if config.importance_weights != "none":
        ratio = target_weights(
            config.importance_weights,
            config.importance_cap,
            out.log_probs,
            batch.log_probs,
            batch.target_mask,
            batch.rollout_index,
        )
        each = each * ratio

    def total(x):
        return jnp.sum(jnp.where(usable, x, 0.0), axis=(1, 2))

    counts = jnp.sum(usable, axis=(1, 2), dtype=jnp.float32)
    overlap = total(laws.overlap)
    sums = {"feature_loss": total(feature)[0], "token_loss": total(laws.cross_entropy)[0], "agreement": overlap[0]}
    if config.importance_weights != "none":
        sums["weight"] = total(ratio)[0]
    for i in range(1, config.depths):
        sums |= {f"agreement_{i + 1}": overlap[i], f"targets_{i + 1}": counts[i]}
    return Loss(jnp.sum(weights * total(each)), counts[0], jax.lax.stop_gradient(sums), {})


def _compare(config, drafter_params, params, forward_config, out, batch, true, guess) -> LawLoss:
    """`law_loss` of all targets, `[D, M, U]` each."""
    depths, *shape, width = guess.shape
    flat, temperature = true.reshape(-1, width), forward_config.temperature
    weights = {"token_weight": config.token_weight, "overlap_weight": config.overlap_weight}
    if eagle.DRAFT_IDS in drafter_params:
        # The policy's log-probs were computed by its own pass: log p = logit / temperature - log of the normaliser.
        rows = eagle.head_rows(params, batch.target_ids.reshape(-1))
        logit = jnp.sum(flat.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
        log_total = logit / temperature - out.log_probs.reshape(-1)
        # Padding has no law; mass 0 keeps its numbers finite.
        log_total = jnp.where(batch.target_mask.reshape(-1), log_total, 1e30)
        matrix = eagle.head_rows(params, drafter_params[eagle.DRAFT_IDS])
        laws = law_loss(
            matrix, flat, guess.reshape(depths, -1, width), temperature, log_total=jax.lax.stop_gradient(log_total), **weights
        )
    else:
        matrix, by_row = head_matrix(params)
        laws = law_loss(
            matrix,
            flat,
            guess.reshape(depths, -1, width),
            temperature,
            by_row=by_row,
            valid_vocab=forward_config.valid_vocab,
            vocab_block=forward_config.vocab_block,
            **weights,
        )
    return jax.tree.map(lambda x: x.reshape(depths, *shape), laws)
