"""From scored rollouts to packed batches: what is left out, what the rewards become, which passes the loss needs first.

Order, for every algorithm: unusable rewards are left out, rewards are shaped, passes give log-probs of the reference and of the
proximal policy and values, advantages follow, what no loss wants is left out, and each optimizer step's responses are
packed. What is left out never shapes a baseline and never enters a denominator.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.learner import advantages, packing, shaping, weights
from adrl_jax.learner.loss_config import LossConfig
from adrl_jax.learner.update import LearnerState, policy_params
from adrl_jax.runtime.collect import Scored
from adrl_jax.types import PackedBatch, Rollout


@dataclasses.dataclass(frozen=True)
class GaeConfig:
    """Advantages from a value model.

    Attributes:
        gamma, lam: discount and GAE's lambda.
        bootstrap: a response cut off by the length limit is worth its last value beyond the end, not 0.
        whiten: advantages get mean 0 and deviation 1 over the tokens of the rollout batch.
    """

    gamma: float = 1.0
    lam: float = 0.95
    bootstrap: bool = True
    whiten: bool = True


@dataclasses.dataclass(frozen=True)
class ExperienceConfig:
    """What happens between scoring and learning; see `experiments.learner_config` for each field's meaning."""

    loss: LossConfig
    max_new_tokens: int
    minibatches: int = 1
    epochs: int = 1
    eos_rule: str = "none"
    eos_penalty: float = 0.0
    overlong_margin: int = 0
    overlong_penalty: float = 0.0
    drop_truncated: bool = False
    drop_zero_variance: bool = False
    reward_kl_coef: float = 0.0
    reward_kl_estimator: str = "k1"
    reference_every: int = 0
    baseline_weights: bool = False
    gae: GaeConfig | None = None

    @property
    def needs_reference(self) -> bool:
        return self.loss.needs_reference or self.reward_kl_coef > 0

    @property
    def passes_first(self) -> tuple[str, ...]:
        """What advantages depend on."""
        wanted = {
            "reference": self.reward_kl_coef > 0,
            "proximal": self.baseline_weights or (self.reward_kl_coef > 0 and self.loss.needs_proximal),
            "values": self.gae is not None,
        }
        return tuple(name for name, needed in wanted.items() if needed)

    @property
    def passes(self) -> tuple[str, ...]:
        """What packed batches must carry."""
        wanted = {
            "reference": self.loss.needs_reference,
            "proximal": self.loss.needs_proximal,
            "values": self.gae is not None,
        }
        return tuple(name for name, needed in wanted.items() if needed)


class Prepared(NamedTuple):
    """Attributes: learner (with a refreshed reference, where it was due); scored, with advantages; batches, one an optimizer
    step, in order; facts for the log; first, the rollouts of the first batch, which its `rollout_index` counts."""

    learner: LearnerState
    scored: Scored
    batches: list[PackedBatch]
    facts: dict[str, float]
    first: list[Rollout]


Measured = dict[str, list[np.ndarray]]
"""By name (`reference`, `proximal`, `values`, `after`) one array `[R_i]` a rollout."""


class Experience:
    """`prepare(learner, scored, step) -> Prepared`.

    Args:
        config: what happens.
        advantage: `(rewards, group_ids, valid=) -> Advantages`; not asked with `gae`.
        pack: `(rollouts, advantages, version) -> PackedBatch`.
        log_probs: `(params, batch) -> (log_probs, entropy)`, needed for reference and proximal policy.
        scalars: `(value params, batch) -> (before, after)`, needed for values.
    """

    def __init__(
        self,
        config: ExperienceConfig,
        advantage: Callable[..., advantages.Advantages] | None,
        pack: Callable[[Sequence[Rollout], Any, int], PackedBatch],
        log_probs: Callable[..., Any],
        scalars: Callable[..., Any] | None = None,
    ):
        self.config, self.advantage, self.pack = config, advantage, pack
        self.log_probs, self.scalars = log_probs, scalars

    def __call__(self, learner: LearnerState, scored: Scored, step: int) -> Prepared:
        c = self.config
        if c.reference_every and step > 1 and (step - 1) % c.reference_every == 0:
            learner = learner._replace(reference=jax.tree.map(jnp.copy, policy_params(learner)))
        rollouts = scored.rollouts
        truncated = np.array([r.truncated for r in rollouts])
        usable = scored.usable & ~(truncated & c.drop_truncated)
        rewards = self._shape(scored, truncated)
        measured = self._measure(learner, rollouts, np.flatnonzero(usable), c.passes_first)
        rewards, penalties = self._with_kl(rewards, rollouts, usable, measured)
        found, per_token = self._advantages(rewards, rollouts, usable, penalties, measured)
        chosen = np.flatnonzero(found.valid)
        parts = self._split(rollouts, chosen)
        batches = []
        for number in range(c.epochs * len(parts)):
            batches.append(self._batch(learner, rollouts, parts[number % len(parts)], per_token, measured, number))
        facts = {"reward/dropped": float(np.mean(~usable)), "reward/shaped_mean": _mean(rewards[usable])}
        facts["train/responses"] = float(len(chosen))
        if c.loss.parts.advantages in ("pair", "best"):
            facts["tie_fraction"] = float(found.tie_fraction)
        if penalties is not None:
            facts["reference/reward_kl"] = _mean(np.array([p.sum() for p in penalties]))
        scored = dataclasses.replace(scored, advantages=found.values, frac_zero_std=float(found.frac_zero_std))
        first = [rollouts[i] for i in parts[0]] if parts else []
        return Prepared(learner, scored, batches, facts, first)

    def _shape(self, scored: Scored, truncated: np.ndarray) -> np.ndarray:
        c = self.config
        rewards = shaping.eos_penalty(scored.rewards, truncated, c.eos_rule, c.eos_penalty)
        if c.overlong_penalty:
            lengths = np.array([r.response_length for r in scored.rollouts])
            rewards = rewards - shaping.overlong_penalty(lengths, c.max_new_tokens, c.overlong_margin, c.overlong_penalty)
        return rewards

    def _with_kl(self, rewards, rollouts, usable, measured):
        """Rewards less the KL of each response, and the KL penalties of its tokens (None without)."""
        c = self.config
        if not c.reward_kl_coef:
            return rewards, None
        own = measured["proximal"] if c.loss.needs_proximal else [r.log_probs for r in rollouts]
        some = [i for i in range(len(rollouts)) if usable[i]]
        found = shaping.token_penalties([own[i] for i in some], [measured["reference"][i] for i in some], c.reward_kl_estimator)
        penalties = [np.zeros(r.response_length) for r in rollouts]
        for i, penalty in zip(some, found, strict=True):
            penalties[i] = c.reward_kl_coef * penalty
        # A value model sees each token's own penalty; otherwise a response has one number.
        return rewards if c.gae else rewards - np.array([p.sum() for p in penalties]), penalties

    def _advantages(self, rewards, rollouts, usable, penalties, measured):
        c = self.config
        groups = np.array([r.group_id for r in rollouts])
        if c.gae is not None:
            return self._gae(rewards, rollouts, usable, penalties, measured)
        extra: dict[str, Any] = {}
        if c.baseline_weights:
            moved = [(p - r.log_probs).sum() if len(p) else 0.0 for p, r in zip(measured["proximal"], rollouts)]
            extra = {"weights": np.exp(np.clip(moved, -20, 20)), "squared_norms": [r.response_length for r in rollouts]}
        found = self.advantage(rewards, groups, valid=usable, **extra)
        if c.drop_zero_variance:
            dead = [g for g in np.unique(groups) if not np.any(found.values[(groups == g) & found.valid])]
            found = dataclasses.replace(found, valid=found.valid & ~np.isin(groups, dead))
        return found, list(found.values)

    def _gae(self, rewards, rollouts, usable, penalties, measured):
        c = self.config.gae
        per_token = [np.zeros(r.response_length) for r in rollouts]
        measured["returns"] = [np.zeros(r.response_length) for r in rollouts]
        for i in np.flatnonzero(usable):
            rollout = rollouts[i]
            token_rewards = np.zeros(rollout.response_length) if penalties is None else -penalties[i]
            token_rewards[-1] += rewards[i]
            beyond = float(measured["after"][i][-1]) if c.bootstrap and rollout.truncated else 0.0
            per_token[i], measured["returns"][i] = advantages.gae(
                token_rewards, measured["values"][i], bootstrap=beyond, gamma=c.gamma, lam=c.lam
            )
        if c.whiten:
            white = advantages.whitened([per_token[i] for i in np.flatnonzero(usable)])
            for i, value in zip(np.flatnonzero(usable), white, strict=True):
                per_token[i] = value
        mean = np.array([v.mean() for v in per_token], np.float32)
        return advantages.Advantages(mean, usable, 0.0), per_token

    def _split(self, rollouts: Sequence[Rollout], chosen: np.ndarray) -> list[list[int]]:
        """Rollouts of each optimizer step: whole groups, in the order they were drawn. Steps without any are left out."""
        groups = list(dict.fromkeys(rollouts[i].group_id for i in chosen))
        parts = [set(part.tolist()) for part in np.array_split(np.array(groups, np.int64), self.config.minibatches)]
        return [members for part in parts if (members := [int(i) for i in chosen if rollouts[i].group_id in part])]

    def _measure(self, learner, rollouts, chosen, names) -> Measured:
        """Passes over packed rollouts; those not asked for have empty arrays."""
        out: Measured = {}
        if not names:
            return out
        empty = [np.zeros(0, np.float32) for _ in rollouts]
        out = {name: list(empty) for name in (*names, "after")}
        for members in self._split(rollouts, chosen):
            batch = self.pack([rollouts[i] for i in members], np.zeros(len(members), np.float32), int(learner.version))
            for name, values in self._passes(learner, batch, names).items():
                for i, value in zip(members, packing.unpack_targets(batch, values, len(members)), strict=True):
                    out[name][i] = value
        return out

    def _passes(self, learner: LearnerState, batch: PackedBatch, names: Sequence[str]) -> dict[str, np.ndarray]:
        found = {}
        if "reference" in names:
            found["reference"] = np.asarray(self.log_probs(learner.reference, batch)[0])
        if "proximal" in names:
            found["proximal"] = np.asarray(self.log_probs(policy_params(learner), batch)[0])
        if "values" in names:
            before, after = self.scalars(learner.value.params, batch)
            found |= {"values": np.asarray(before), "after": np.asarray(after)}
        return found

    def _batch(self, learner, rollouts, members, per_token, measured, number) -> PackedBatch:
        c = self.config
        batch = self.pack([rollouts[i] for i in members], [per_token[i] for i in members], int(learner.version))
        missing = [name for name in c.passes if name not in measured]
        fields = {name: value for name, value in self._passes(learner, batch, missing).items() if name != "after"}
        for name in (*c.passes, "returns"):
            if name in measured:
                fields[name] = packing.scatter_targets(batch, [measured[name][i] for i in members])
        if c.loss.old_log_probs == "interpolate":
            fields["proximal_lag"] = np.full(batch.target_mask.shape, number, np.int32)
        if c.loss.mask == "m2po":
            unpacked = packing.unpack_targets(batch, fields["proximal"] - batch.log_probs, len(members))
            keep = weights.second_moment_mask(unpacked, weights.threshold(c.loss))
            fields["keep"] = packing.scatter_targets(batch, keep, bool)
        return batch._replace(**fields)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
