"""From rewards to advantages, on the host in float64.

`N` rewards with a group id each. Rewards that are NaN or rejected carry weight 0: they shape no baseline and their
advantage is 0. A group whose usable rewards are all equal (max == min, not a small deviation) has advantage exactly 0.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Advantages:
    """One advantage a rollout.

    Attributes:
        values: float32 `[N]`; 0 where `valid` is False.
        valid: bool `[N]`, whether the reward was usable.
        frac_zero_std: share of groups with usable rewards in which all of them are equal.
    """

    values: np.ndarray
    valid: np.ndarray
    frac_zero_std: float


def _by_group(rewards, group_ids, valid):
    rewards, group_ids = np.asarray(rewards, np.float64), np.asarray(group_ids)
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {rewards.shape} and group_ids {group_ids.shape} must be vectors of one length")
    usable = np.isfinite(rewards)
    if valid is not None:
        valid = np.asarray(valid, bool)
        if valid.shape != rewards.shape:
            raise ValueError(f"valid {valid.shape} and rewards {rewards.shape} must have one length")
        usable &= valid
    members = [np.flatnonzero((group_ids == g) & usable) for g in np.unique(group_ids)]
    return rewards, usable, [m for m in members if m.size]


def _advantages(rewards, group_ids, valid, of_group) -> Advantages:
    rewards, usable, groups = _by_group(rewards, group_ids, valid)
    values, dead = np.zeros(rewards.shape, np.float64), 0
    for members in groups:
        r = rewards[members]
        # Rounding makes the mean of eight 0.1 differ from 0.1, so equality is decided on the rewards themselves.
        if r.max() == r.min():
            dead += 1
        else:
            values[members] = of_group(r)
    return Advantages(values.astype(np.float32), usable, dead / len(groups) if groups else 0.0)


def group_normalized(rewards, group_ids, *, valid=None, epsilon: float = 1e-6) -> Advantages:
    """GRPO: (r - mean) / (std + epsilon) within each group, with the sample deviation (n - 1); arXiv 2402.03300, §4.1.2.

    Args:
        rewards: `[N]`.
        group_ids: `[N]`, equal for siblings.
        valid: bool `[N]`, False for rewards to ignore; non-finite ones are ignored anyway.
    """
    return _advantages(rewards, group_ids, valid, lambda r: (r - r.mean()) / (r.std(ddof=1) + epsilon))


def group_centered(rewards, group_ids, *, valid=None) -> Advantages:
    """Dr. GRPO: r - mean within each group, undivided; arXiv 2503.20783, eq. 3."""
    return _advantages(rewards, group_ids, valid, lambda r: r - r.mean())


def leave_one_out(rewards, group_ids, *, valid=None) -> Advantages:
    """RLOO: r minus the mean of the *other* rewards of its group; arXiv 2402.14740, §4."""
    return _advantages(rewards, group_ids, valid, lambda r: (r - r.mean()) * r.size / (r.size - 1))
