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
        valid: bool `[N]`, whether the reward was usable and the loss wants the rollout; others are not packed.
        frac_zero_std: share of groups with usable rewards in which all of them are equal.
        tie_fraction: share of groups that offered no choice of a best (and worst) response; 0 where none was asked for.
    """

    values: np.ndarray
    valid: np.ndarray
    frac_zero_std: float
    tie_fraction: float = 0.0


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


def batch_normalized(rewards, group_ids, *, valid=None, epsilon: float = 1e-6) -> Advantages:
    """r - mean within each group, divided by the deviation over the batch of what results (Magistral, arXiv 2506.10910;
    ScaleRL, arXiv 2510.13786)."""
    out = group_centered(rewards, group_ids, valid=valid)
    centred = out.values[out.valid].astype(np.float64)
    # One usable reward, or none, has no deviation; then all centred rewards are 0 anyway.
    deviation = centred.std(ddof=1) if centred.size > 1 else 0.0
    values = np.where(out.valid, out.values / (deviation + epsilon), 0.0).astype(np.float32)
    return dataclasses.replace(out, values=values)


def raw(rewards, group_ids, *, valid=None) -> Advantages:
    """The reward itself, for losses with a baseline of their own (`copg`)."""
    rewards, usable, groups = _by_group(rewards, group_ids, valid)
    dead = sum(bool(rewards[m].max() == rewards[m].min()) for m in groups)
    values = np.where(usable, rewards, 0.0).astype(np.float32)
    return Advantages(values, usable, dead / len(groups) if groups else 0.0)


def optimal_baseline(rewards, group_ids, *, valid=None, weights=None, squared_norms=None) -> Advantages:
    """r - b with b = sum w^2 |g|^2 r / sum w^2 |g|^2 over the group, the baseline of least variance (VCPO, arXiv 2602.17616).

    Args:
        weights: `[N]`, importance weight of each response, unclipped; None for all 1.
        squared_norms: `[N]`, squared norm of each response's gradient of log pi, or something proportional to it: the number of
            its tokens, were their gradients independent and alike (OPO, arXiv 2505.23585). None for all 1.
    """
    rewards, usable, groups = _by_group(rewards, group_ids, valid)
    scale = np.ones(rewards.shape)
    if weights is not None:
        scale = scale * np.square(np.asarray(weights, np.float64))
    if squared_norms is not None:
        scale = scale * np.asarray(squared_norms, np.float64)
    values, dead = np.zeros(rewards.shape), 0
    for members in groups:
        r, s = rewards[members], scale[members]
        if r.max() == r.min():
            dead += 1
        else:
            values[members] = r - (s @ r / s.sum() if s.sum() > 0 else r.mean())
    return Advantages(values.astype(np.float32), usable, dead / len(groups) if groups else 0.0)


TIES = ("skip", "first")


def _choose(rewards, group_ids, valid, ties: str, worst: bool) -> Advantages:
    if ties not in TIES:
        raise ValueError(f"ties={ties!r} is unknown; choose one of {', '.join(TIES)}")
    rewards, _, groups = _by_group(rewards, group_ids, valid)
    values, wanted, dead, tied = np.zeros(rewards.shape, np.float32), np.zeros(rewards.shape, bool), 0, 0
    for members in groups:
        r = rewards[members]
        equal = bool(r.max() == r.min())
        dead += equal
        if (equal and ties == "skip") or (worst and len(members) < 2):
            tied += 1
            continue
        best = members[int(np.argmax(r))]
        values[best], wanted[best] = 1.0, True
        if worst:
            # Of equals the last one is the worse: the same response never stands on both sides.
            lowest = members[len(r) - 1 - int(np.argmin(r[::-1]))]
            values[lowest], wanted[lowest] = -1.0, True
    n = max(len(groups), 1)
    return Advantages(values, wanted, dead / n, tied / n)


def pairs(rewards, group_ids, *, valid=None, ties: str = "skip") -> Advantages:
    """+1 for the best response of each group and -1 for the worst; the others, and groups that tie, are left out.

    Args:
        ties: `skip` groups whose rewards are all equal, or take the `first` as the better one (an arbitrary preference, as one of
            the reference trainers does).
    """
    return _choose(rewards, group_ids, valid, ties, worst=True)


def best(rewards, group_ids, *, valid=None, ties: str = "skip") -> Advantages:
    """1 for the best response of each group; the others, and groups that tie, are left out. `ties` as in `pairs`."""
    return _choose(rewards, group_ids, valid, ties, worst=False)


def gae(rewards: np.ndarray, values: np.ndarray, *, bootstrap: float = 0.0, gamma: float = 1.0, lam: float = 0.95):
    """Generalised advantage estimation of one response (arXiv 1506.02438, eq. 16).

    Args:
        rewards: `[R]`, of each token.
        values: `[R]`, of the state before each token.
        bootstrap: value of the state after the last token: 0 where the response ended by itself.

    Returns:
        advantages and returns (advantage + value), float64 `[R]` each.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if rewards.shape != values.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {rewards.shape} and values {values.shape} must be vectors of one length")
    deltas = rewards + gamma * np.append(values[1:], bootstrap) - values
    out, running = np.zeros_like(deltas), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        running = deltas[t] + gamma * lam * running
        out[t] = running
    return out, out + values


def whitened(values: list[np.ndarray], epsilon: float = 1e-8) -> list[np.ndarray]:
    """Token advantages with mean 0 and deviation 1 over all tokens of the batch, float32 `[R_i]` each."""
    flat = np.concatenate([np.zeros(0), *values])
    if flat.size < 2 or flat.max() == flat.min():
        return [np.zeros(len(v), np.float32) for v in values]
    mean, deviation = flat.mean(), flat.std(ddof=1)
    return [((v - mean) / (deviation + epsilon)).astype(np.float32) for v in values]
