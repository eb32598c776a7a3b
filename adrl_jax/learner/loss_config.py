"""The knobs of the policy loss, and which of them go together.

A loss is  aggregate( weight(mu -> pi_p) x mask x surrogate(pi_p -> pi_t) ) + regularisers.  Each factor is chosen by name. What would
be counted twice, would correct nothing, or would be a knob without effect is refused here, naming both fields.
"""

import dataclasses
import math
from typing import Any

from adrl_jax.learner.aggregation import AGGREGATIONS
from adrl_jax.learner.kl import ESTIMATORS
from adrl_jax.learner.row import OLD_LOG_PROBS
from adrl_jax.learner.surrogates import SURROGATES, Surrogate
from adrl_jax.learner.weights import MASKS, WEIGHTS


class Conflict(ValueError):
    """Two fields that do not go together.

    Attributes:
        field, value: the one to change.
        other, other_value: what it conflicts with.
        reason: why, and what would be legal.
    """

    def __init__(self, field: str, value: Any, other: str, other_value: Any, reason: str):
        self.field, self.value, self.other, self.other_value, self.reason = field, value, other, other_value, reason
        super().__init__(f"{field}={value!r} with {other}={other_value!r}: {reason}")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The policy loss. The defaults are GRPO's.

    Attributes:
        clip_low, clip_high: the ratio pi_t / pi_p is clipped to [1 - clip_low, 1 + clip_high] (asymmetric: DAPO).
        aggregation: see `aggregation.aggregation_weights`.
        constant_length: tokens, required with and only with `constant`.
        entropy_coef: entropy bonus, in units of the loss a nat.
        surrogate: see `surrogates.SURROGATES`.
        old_log_probs: which law is pi_p: `behaviour` (mu), `recompute` (the learner's weights when the batch arrived) or
            `interpolate` (between mu and pi_t, without a pass).
        dual_clip: `ppo_clip`'s bound on the loss of bad tokens, > 1; 0 for none.
        weight, weight_low, weight_high: importance weight and its truncation; `weight_high` 0 means no upper bound.
        mask, mask_low, mask_high, mask_threshold: rejection mask; a bound of 0 means none, a threshold of 0 the published one.
        beta: strength of the implicit KL of `online_dpo`, `ipo`, `copg`.
        kl_coef: of the KL to the reference in the loss; 0 leaves it out.
        kl_estimator, kl_correction: see `kl`.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: str = "token"
    constant_length: int | None = None
    entropy_coef: float = 0.0
    surrogate: str = "ppo_clip"
    old_log_probs: str = "behaviour"
    dual_clip: float = 0.0
    weight: str = "none"
    weight_low: float = 0.0
    weight_high: float = 2.0
    mask: str = "none"
    mask_low: float = 0.5
    mask_high: float = 2.0
    mask_threshold: float = 0.0
    beta: float = 0.1
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_correction: bool = False

    def __post_init__(self):
        _check_values(self)
        _check_knobs(self)
        _check_combination(self)

    @property
    def parts(self) -> Surrogate:
        """The surrogate's record."""
        return SURROGATES[self.surrogate]

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0 or self.parts.needs_reference

    @property
    def needs_proximal(self) -> bool:
        return self.old_log_probs == "recompute"

    @property
    def keeps_groups(self) -> bool:
        """Whether packing must keep the responses of a group in one row."""
        return self.aggregation == "group"


def _check_values(c: LossConfig) -> None:
    if not 0 < c.clip_low <= 1:
        raise ValueError(f"clip_low={c.clip_low!r} must be in (0, 1]")
    if not c.clip_high > 0:
        raise ValueError(f"clip_high={c.clip_high!r} must be positive")
    choices = {
        "aggregation": AGGREGATIONS,
        "surrogate": tuple(SURROGATES),
        "old_log_probs": OLD_LOG_PROBS,
        "weight": ("none", *WEIGHTS),
        "mask": ("none", *MASKS),
        "kl_estimator": ESTIMATORS,
    }
    for name, legal in choices.items():
        value = getattr(c, name)
        if value not in legal:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(legal)}")
    if (c.constant_length is not None) != (c.aggregation == "constant"):
        raise Conflict(
            "constant_length",
            c.constant_length,
            "aggregation",
            c.aggregation,
            "constant_length is required with aggregation='constant' and has no meaning otherwise",
        )
    if c.constant_length is not None and c.constant_length < 1:
        raise ValueError(f"constant_length={c.constant_length!r} must be a positive integer")
    for name in ("entropy_coef", "kl_coef", "weight_low", "weight_high", "mask_low", "mask_high", "mask_threshold"):
        if not 0 <= getattr(c, name) < math.inf:
            raise ValueError(f"{name}={getattr(c, name)!r} must be finite and >= 0")
    if not 0 < c.beta < math.inf:
        raise ValueError(f"beta={c.beta!r} must be finite and positive")
    if c.dual_clip and not 1 < c.dual_clip < math.inf:
        raise ValueError(f"dual_clip={c.dual_clip!r} must be 0 (off) or > 1")
    for kind in ("weight", "mask"):
        low, high = getattr(c, f"{kind}_low"), getattr(c, f"{kind}_high")
        if high and low >= high:
            raise Conflict(f"{kind}_low", low, f"{kind}_high", high, "the lower bound must be below the upper one")


# Fields that only some choices read: (field, what decides, the choices that read it).
_READERS = (
    *((name, "surrogate", SURROGATES) for name in ("clip_low", "clip_high", "dual_clip", "beta")),
    *((name, "weight", WEIGHTS) for name in ("weight_low", "weight_high")),
    *((name, "mask", MASKS) for name in ("mask_low", "mask_high", "mask_threshold")),
)


def _check_knobs(c: LossConfig) -> None:
    """A knob that nothing reads must stand at its default."""
    defaults = {f.name: f.default for f in dataclasses.fields(LossConfig)}
    for name, chooser, registry in _READERS:
        readers = [choice for choice, entry in registry.items() if name in entry.reads]
        choice = getattr(c, chooser)
        if choice not in readers and getattr(c, name) != defaults[name]:
            reason = f"nothing reads {name} then; leave it at {defaults[name]!r}, or choose {chooser} of {', '.join(readers)}"
            raise Conflict(name, getattr(c, name), chooser, choice, reason)
    for name in ("kl_estimator", "kl_correction"):
        if not c.kl_coef and getattr(c, name) != defaults[name]:
            raise Conflict(name, getattr(c, name), "kl_coef", c.kl_coef, "without a KL term in the loss nothing reads it")


def _check_combination(c: LossConfig) -> None:
    parts = c.parts
    fixed = {"sequence": ("sequence",), "group": ("group",), "token": AGGREGATIONS}[parts.level]
    if c.aggregation not in fixed:
        raise Conflict(
            "aggregation",
            c.aggregation,
            "surrogate",
            c.surrogate,
            f"its loss is one number a {parts.level}, and only aggregation={fixed[0]!r} counts each of them once",
        )
    if parts.needs_behaviour and c.old_log_probs != "behaviour":
        raise Conflict(
            "old_log_probs", c.old_log_probs, "surrogate", c.surrogate, "it is defined without a proximal policy; use behaviour"
        )
    own_correction = parts.has_ratio and c.old_log_probs == "behaviour"
    if c.weight != "none" and own_correction:
        raise Conflict(
            "weight",
            c.weight,
            "old_log_probs",
            c.old_log_probs,
            f"the ratio of surrogate={c.surrogate!r} already corrects mu -> pi_t, so a weight would count it twice; "
            "use weight=none, or old_log_probs of recompute, interpolate",
        )
    if c.weight != "none" and (parts.level == "group" or parts.advantages == "best"):
        raise Conflict("weight", c.weight, "surrogate", c.surrogate, "it needs no correction and takes none; use none")
    if c.mask != "none" and parts.level == "group":
        raise Conflict("mask", c.mask, "surrogate", c.surrogate, "a part of a group cannot be left out; use none")
    for name, registry in (("weight", WEIGHTS), ("mask", MASKS)):
        choice = getattr(c, name)
        if parts.level == "sequence" and choice != "none" and registry[choice].level == "token":
            legal = ", ".join(k for k, entry in registry.items() if entry.level == "sequence")
            raise Conflict(
                name, choice, "surrogate", c.surrogate, f"a loss of whole responses takes one {name} a response: {legal}"
            )
    if c.old_log_probs != "behaviour" and not parts.has_ratio and c.weight == c.mask == "none":
        raise Conflict(
            "old_log_probs",
            c.old_log_probs,
            "surrogate",
            c.surrogate,
            "it has no ratio, and without a weight or mask nothing reads the proximal policy; use behaviour",
        )
    if c.mask == "m2po" and c.old_log_probs != "recompute":
        raise Conflict(
            "mask", c.mask, "old_log_probs", c.old_log_probs, "it ranks log (pi_p / mu) of the whole batch; use recompute"
        )
    if c.kl_coef and c.kl_estimator == "k1" and not c.kl_correction:
        raise Conflict(
            "kl_estimator", c.kl_estimator, "kl_correction", c.kl_correction, "its expected gradient is 0; use True, k2 or k3"
        )
