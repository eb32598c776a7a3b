"""Importance weights and rejection masks: what corrects data of another law, mu, before a surrogate sees it.

Both look at `row.log_correction`, on raw values and without a gradient. A weight multiplies the surrogate; a mask takes its
tokens out of the numerator (the denominator keeps counting them, see `aggregation`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.learner.row import Row, log_correction, safe_exp


def _token(row: Row, log: jax.Array) -> jax.Array:
    return log


def _sequence(row: Row, log: jax.Array) -> jax.Array:
    return row.sequence_sum(log)


def _geometric(row: Row, log: jax.Array) -> jax.Array:
    return row.sequence_mean(log)


LEVELS: dict[str, Callable[[Row, jax.Array], jax.Array]] = {
    "token": _token,
    "sequence": _sequence,
    "geometric": _geometric,
}
"""log-ratio of a token, of its response (the sum over tokens), or the response's mean over tokens."""


def truncated(level: str) -> Callable[[Any, Row], jax.Array]:
    """clip(ratio, weight_low, weight_high): truncated importance sampling (TIS; V-trace's bound, arXiv 1802.01561)."""

    def weight(config: Any, row: Row) -> jax.Array:
        ratio = safe_exp(LEVELS[level](row, log_correction(row, config.old_log_probs)))
        return jnp.clip(ratio, config.weight_low, config.weight_high or jnp.inf)

    return weight


def vespo(config: Any, row: Row) -> jax.Array:
    """W^k exp(l (1 - W)) with W the response's ratio and (k, l) = (2, 3) for A > 0, else (3, 2); arXiv 2602.10693."""
    log = row.sequence_sum(log_correction(row, config.old_log_probs))
    good = row.advantages > 0
    k, rate = jnp.where(good, 2.0, 3.0), jnp.where(good, 3.0, 2.0)
    return jnp.exp(k * jnp.clip(log, -20.0, 20.0) + rate * (1.0 - safe_exp(log)))


@dataclasses.dataclass(frozen=True)
class Weight:
    """Attributes: function `(config, row) -> [U]`; level `token` or `sequence`; reads: fields of the config it alone reads."""

    function: Callable[[Any, Row], jax.Array]
    level: str
    reads: tuple[str, ...] = ("weight_low", "weight_high")


WEIGHTS: dict[str, Weight] = {
    "token": Weight(truncated("token"), "token"),
    "sequence": Weight(truncated("sequence"), "sequence"),
    "geometric": Weight(truncated("geometric"), "sequence"),
    "vespo": Weight(vespo, "sequence", reads=()),
}


def band(level: str) -> Callable[[Any, Row], jax.Array]:
    """Keeps what has its ratio in [mask_low, mask_high]: IcePop by token, MIS by response, the geometric mask by its mean."""

    def keep(config: Any, row: Row) -> jax.Array:
        log = LEVELS[level](row, log_correction(row, config.old_log_probs))
        high = jnp.log(config.mask_high) if config.mask_high else jnp.inf
        return (log >= (jnp.log(config.mask_low) if config.mask_low else -jnp.inf)) & (log <= high)

    return keep


def opsm(config: Any, row: Row) -> jax.Array:
    """Drops responses with A < 0 whose mean log (mu / pi_t) exceeds the threshold (DeepSeek-V3.2, off-policy sequence masking)."""
    distance = row.sequence_mean(row.behaviour - jax.lax.stop_gradient(row.log_probs))
    return ~((row.advantages < 0) & (distance > threshold(config)))


def probability(config: Any, row: Row) -> jax.Array:
    """Drops tokens whose probability has moved by more than the threshold in the direction of A (DPPO, PRIME-RL)."""
    moved = jnp.exp(jax.lax.stop_gradient(row.log_probs)) - jnp.exp(row.behaviour)
    return ~(jnp.sign(row.advantages) * moved > threshold(config))


def decided(config: Any, row: Row) -> jax.Array:
    """M2PO's mask, decided on the host by `second_moment_mask`, since it looks at the whole optimizer batch."""
    return row.keep


@dataclasses.dataclass(frozen=True)
class Mask:
    """Attributes: function `(config, row) -> bool [U]`; level; reads; default_threshold: the published one, where it has one."""

    function: Callable[[Any, Row], jax.Array]
    level: str
    reads: tuple[str, ...] = ("mask_low", "mask_high")
    default_threshold: float | None = None


MASKS: dict[str, Mask] = {
    "token": Mask(band("token"), "token"),
    "sequence": Mask(band("sequence"), "sequence"),
    "geometric": Mask(band("geometric"), "sequence"),
    "opsm": Mask(opsm, "sequence", ("mask_threshold",), 1e-4),
    "probability": Mask(probability, "token", ("mask_threshold",), 0.2),
    "m2po": Mask(decided, "token", ("mask_threshold",), 0.04),
}


def threshold(config: Any) -> float:
    """`mask_threshold`, or the published one where it is 0."""
    return config.mask_threshold or MASKS[config.mask].default_threshold


def second_moment_mask(log_corrections: Sequence[np.ndarray], limit: float) -> list[np.ndarray]:
    """M2PO: drops the tokens with the largest (log pi_p / mu)^2 until the mean over what is left is below `limit`.

    Args:
        log_corrections: `[R_i]` of each response of the optimizer batch.
        limit: on the mean square, nats^2; arXiv 2510.01161.

    Returns:
        bool `[R_i]` of each response, True for what stays.
    """
    square = np.square(np.concatenate([np.zeros(0), *(np.asarray(x, np.float64) for x in log_corrections)]))
    # Ascending prefix means ascend too, so the longest prefix below the limit is the largest set that meets it.
    order = np.argsort(square, kind="stable")
    below = np.cumsum(square[order]) < limit * np.arange(1, square.size + 1)
    keep = np.zeros(square.size, bool)
    keep[order[: int(below.sum())]] = True
    return np.split(keep, np.cumsum([len(x) for x in log_corrections])[:-1])
