"""Surrogates: what is minimised for a token, given the log-ratio between the proximal and the current policy.

Each is a function of (config, row) that returns `Terms`, `[U]` each. Where a surrogate speaks of whole responses or groups, its
value is the same at each of their tokens, and the aggregation named in `SURROGATES` counts each response or group once.
A is the advantage, r = pi_t / pi_p, sg stops the gradient.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.learner.row import Row, log_ratio, safe_exp


class Terms(NamedTuple):
    """Attributes: value float32 `[U]`; clipped_low, clipped_high: bool `[U]`, where the gradient was taken out or capped."""

    value: jax.Array
    clipped_low: jax.Array
    clipped_high: jax.Array


def clipped_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, low: float, high: float, dual: float | None = None
) -> jax.Array:
    """PPO's -min(r A, clip(r, 1 - low, 1 + high) A), `[U]`; arXiv 1707.06347, eq. 7.

    With `dual` > 1 it is at most -dual A where A < 0 (dual clip, arXiv 1912.09729).
    """
    ratio = safe_exp(log_ratio)
    loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)
    return loss if dual is None else jnp.where(advantages < 0, jnp.minimum(loss, -dual * advantages), loss)


def _clip(config: Any, log: jax.Array, advantages: jax.Array, dual: float | None = None) -> Terms:
    value = clipped_surrogate(log, advantages, config.clip_low, config.clip_high, dual)
    # Clipping acts only where it lowers the objective: above for good tokens, below for bad ones.
    high = (log > jnp.log1p(config.clip_high)) & (advantages > 0)
    if dual is not None:
        high |= (log > jnp.log(dual)) & (advantages < 0)
    return Terms(value, (jnp.exp(log) < 1 - config.clip_low) & (advantages < 0), high)


def _plain(value: jax.Array) -> Terms:
    return Terms(value, jnp.zeros(value.shape, bool), jnp.zeros(value.shape, bool))


def ppo_clip(config: Any, row: Row) -> Terms:
    """PPO and GRPO: the clipped token ratio, optionally with a dual clip."""
    return _clip(config, log_ratio(row, config.old_log_probs), row.advantages, config.dual_clip or None)


def ratio(config: Any, row: Row) -> Terms:
    """-r A: importance-sampled REINFORCE, unclipped; with `mask=probability` PRIME-RL's loss (DPPO)."""
    return _plain(-safe_exp(log_ratio(row, config.old_log_probs)) * row.advantages)


def reinforce(config: Any, row: Row) -> Terms:
    """-A log pi_t (Williams 1992). A weight in front makes it off-policy: AIPO's min(pi_t / mu, C) (arXiv 2505.24034)."""
    return _plain(-row.advantages * row.log_probs)


def best_of_n(config: Any, row: Row) -> Terms:
    """-log pi_t: supervised learning on the responses that were kept, the best of each group."""
    return _plain(-row.log_probs)


def cispo(config: Any, row: Row) -> Terms:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi_t: every token keeps a gradient (MiniMax-M1, arXiv 2506.13585)."""
    log = jax.lax.stop_gradient(log_ratio(row, config.old_log_probs))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    bounded = jnp.clip(safe_exp(log), low, high)
    return Terms(-bounded * row.advantages * row.log_probs, jnp.exp(log) < low, log > jnp.log(high))


def gspo(config: Any, row: Row) -> Terms:
    """The clipped geometric-mean ratio of the whole response, (pi_t / pi_p)^(1 / length); arXiv 2507.18071."""
    return _clip(config, row.sequence_mean(log_ratio(row, config.old_log_probs)), row.advantages)


def prox_rloo(config: Any, row: Row) -> Terms:
    """Proximal RLOO: the clipped ratio of the whole response, pi_t / pi_p; arXiv 2410.18252."""
    return _clip(config, row.sequence_sum(log_ratio(row, config.old_log_probs)), row.advantages)


def topr(config: Any, row: Row) -> Terms:
    """-A log pi_t where A >= 0, -sg(min(pi_t / mu, 1)) A log pi_t where A < 0, ratio of the response; arXiv 2503.14286."""
    log = jax.lax.stop_gradient(row.sequence_sum(log_ratio(row, config.old_log_probs)))
    factor = jnp.where(row.advantages < 0, jnp.exp(jnp.minimum(log, 0.0)), 1.0)
    return Terms(-factor * row.advantages * row.log_probs, jnp.zeros(log.shape, bool), (row.advantages < 0) & (log > 0))


def _margin(row: Row) -> jax.Array:
    """log (pi_t / ref)(chosen) - log (pi_t / ref)(rejected), spread over the pair."""
    return row.group_sum(row.advantages * (row.log_probs - row.reference))


def online_dpo(config: Any, row: Row) -> Terms:
    """-log sigmoid(beta margin) on the best and worst response of a group; arXiv 2402.04792, from DPO, arXiv 2305.18290, eq. 7."""
    return _plain(-jax.nn.log_sigmoid(config.beta * _margin(row)))


def ipo(config: Any, row: Row) -> Terms:
    """(margin - 1 / (2 beta))^2; arXiv 2310.12036."""
    return _plain(jnp.square(_margin(row) - 0.5 / config.beta))


def copg(config: Any, row: Row) -> Terms:
    """Contrastive policy gradient, off-policy as it stands; arXiv 2406.19185, over all pairs of a group.

    With r_k = reward_k - beta log (pi_t / ref)(y_k), the sum over pairs of (r_j - r_k)^2 / (2 beta (K - 1)): its gradient is RLOO's,
    with the current r in the place of the reward.
    """
    regularised = row.advantages - config.beta * row.sequence_sum(row.log_probs - row.reference)
    each = 1.0 / row.lengths
    count = row.group_sum(each)
    mean = row.group_sum(each * regularised) / jnp.maximum(count, 1.0)
    spread = row.group_sum(each * jnp.square(regularised - mean))
    return _plain(count * spread / (2 * config.beta * jnp.maximum(count - 1.0, 1.0)))


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """A surrogate and what may be combined with it.

    Attributes:
        function: `(config, row) -> Terms`.
        level: `token`, or whole `sequence`s or `group`s, which fix the aggregation.
        has_ratio: whether it corrects pi_p -> pi_t by itself.
        reads: fields of the config that only some surrogates read.
        needs_reference: whether the reference model's log-probs enter.
        needs_behaviour: whether it is defined against mu and no other pi_p.
        advantages: what its advantages are: `any`, `response` (one number a response), `reward`, `pair` or `best`.
    """

    function: Callable[[Any, Row], Terms]
    level: str = "token"
    has_ratio: bool = False
    reads: tuple[str, ...] = ()
    needs_reference: bool = False
    needs_behaviour: bool = False
    advantages: str = "any"


_CLIP = ("clip_low", "clip_high")

SURROGATES: dict[str, Surrogate] = {
    "ppo_clip": Surrogate(ppo_clip, has_ratio=True, reads=(*_CLIP, "dual_clip")),
    "ratio": Surrogate(ratio, has_ratio=True),
    "reinforce": Surrogate(reinforce),
    "cispo": Surrogate(cispo, has_ratio=True, reads=_CLIP),
    "gspo": Surrogate(gspo, level="sequence", has_ratio=True, reads=_CLIP, advantages="response"),
    "prox_rloo": Surrogate(prox_rloo, level="sequence", has_ratio=True, reads=_CLIP, advantages="response"),
    "topr": Surrogate(topr, has_ratio=True, needs_behaviour=True, advantages="response"),
    "online_dpo": Surrogate(
        online_dpo, level="group", reads=("beta",), needs_reference=True, needs_behaviour=True, advantages="pair"
    ),
    "ipo": Surrogate(ipo, level="group", reads=("beta",), needs_reference=True, needs_behaviour=True, advantages="pair"),
    "copg": Surrogate(copg, level="group", reads=("beta",), needs_reference=True, needs_behaviour=True, advantages="reward"),
    "best_of_n": Surrogate(best_of_n, needs_behaviour=True, advantages="best"),
}
