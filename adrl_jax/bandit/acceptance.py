"""How likely drafts stand: one belief a drafter and depth, shared by every strategy that uses the drafter.

A *curve* is what strategies share: the drafter of chains; drafter, width and verify tokens of trees, since the slots left at
a level depend on them. `a[j]` is the chance that the draft at depth `j + 1` stands given that all before it did; a drafter
that offers none counts as one that did not stand. A round of depth `d` then commits on average

    E(d) = 1 + sum_{i < d} prod_{j <= i} a[j]        tokens a row.

The belief at a depth is a Beta law with discounted counts. Its prior mean follows the depth before, a little lower, so that a
shallow strategy's evidence tells about the deeper ones; its strength is small, so that a depth's own evidence soon rules.

Drift: a short memory runs beside the long one. Where the two contradict each other by more than chance would, the long one is
dropped for the short one. A curve that gives no evidence (nobody ran it) is each launch with chance `HAZARD` no longer what
it was, so its belief slowly becomes a mixture with the prior.

Letters: `C` curves, `D` depths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.base import Arm, Report, tokens_to_verify

PRIOR = 0.6  # chance that the first draft of an unknown drafter stands
STRENGTH = 2.0  # row-passes that a prior counts as
DECAY = 0.95  # prior mean of a depth over the mean of the depth before
SIBLINGS = 4.0  # most row-passes that curves of the same drafter count as
FULL_LAUNCH = 128.0  # rows of one launch resemble each other: their evidence saturates here
LONG, SHORT = 0.97, 0.7  # discounts a launch of the curve
SURPRISE = 3.0  # standard deviations by which the memories must differ
NEVER = 1e6
HAZARD = 0.02  # chance a launch that a curve nobody runs has changed


class Acceptance(NamedTuple):
    """Attributes:
    trials, stood: float32 `[C, D]`, discounted row-passes that came to a depth, and those in which its draft stood.
    recent_trials, recent_stood: float32 `[C, D]`, the same with the short memory.
    age: float32 `[C]`, launches since the curve's last evidence; `NEVER` where there was none.
    """

    trials: jax.Array
    stood: jax.Array
    recent_trials: jax.Array
    recent_stood: jax.Array
    age: jax.Array


class Curves(NamedTuple):
    """Which strategies share a curve.

    Attributes:
        names: of the curves, in order of first appearance.
        of_arm: int `[A]`, an arm's curve; 0 for the one without speculation, whose depth of 0 makes it irrelevant.
        siblings: bool `[C, C]`, distinct curves of one drafter.
    """

    names: tuple[str, ...]
    of_arm: np.ndarray
    siblings: np.ndarray


def drafter_of(strategy: Arm) -> str:
    return getattr(strategy, "drafter", "")


def curve_name(strategy: Arm) -> str:
    """The drafter's name for a chain, such as `eagle-w4-v16` for a tree."""
    width = getattr(strategy, "width", 1)
    tree = "" if width == 1 else f"-w{width}-v{tokens_to_verify(strategy)}"
    return drafter_of(strategy) + tree


def curves(strategies: Sequence[Arm]) -> Curves:
    drafters = {curve_name(s): drafter_of(s) for s in strategies if s.depth > 0}
    names = tuple(drafters) or ("",)
    of_arm = np.asarray([names.index(curve_name(s)) if s.depth > 0 else 0 for s in strategies], np.int32)
    owners = np.asarray([drafters.get(name, "") for name in names])
    return Curves(names, of_arm, (owners[:, None] == owners) & ~np.eye(len(names), dtype=bool))


def init(num_curves: int, depth: int) -> Acceptance:
    zeros = jnp.zeros((num_curves, depth), jnp.float32)
    return Acceptance(zeros, zeros, zeros, zeros, jnp.full((num_curves,), NEVER, jnp.float32))


def evidence(report: Report, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row-passes that came to each depth of the launched strategy, and those in which its draft stood: float32 `[D]` each.

    Every row-pass commits one token of the target's own, so there were `tokens - sum(accepted)` of them, apart from drafts
    that stood beyond the end of a response.
    """
    within = jnp.arange(report.accepted.shape[0]) < depth
    stood = jnp.where(within, report.accepted, 0.0)
    most = report.rounds.astype(jnp.float32) * report.running.astype(jnp.float32)
    passes = jnp.clip(report.tokens - stood.sum(), jnp.minimum(report.examined[0], most), most)
    came = jnp.concatenate([passes[None], stood[:-1]])
    return jnp.where(within, came, 0.0), jnp.minimum(stood, came)


def update(state: Acceptance, curve: jax.Array, trials: jax.Array, stood: jax.Array) -> Acceptance:
    """Everything grows a launch older; `curve` learns from `trials` and `stood` `[D]`, all zero where nothing was drafted."""
    weight = 1.0 / (1.0 + trials[0] / FULL_LAUNCH)
    seen = trials[0] > 0
    trials, stood = weight * trials, weight * stood
    keep_short, keep_long = jnp.where(seen, SHORT, 1.0), jnp.where(seen, LONG, 1.0)
    short = keep_short * state.recent_trials[curve] + trials, keep_short * state.recent_stood[curve] + stood
    surprised = seen & (_surprise(*short, state.trials[curve], state.stood[curve]) > SURPRISE)
    long_ = keep_long * state.trials[curve] + trials, keep_long * state.stood[curve] + stood
    kept = [jnp.where(surprised, s, l) for s, l in zip(short, long_)]
    age = jnp.minimum(state.age + 1.0, NEVER)
    fresh = jnp.where(seen, age[curve] * STRENGTH / (STRENGTH + trials[0]), age[curve])
    return Acceptance(
        state.trials.at[curve].set(kept[0]),
        state.stood.at[curve].set(kept[1]),
        state.recent_trials.at[curve].set(short[0]),
        state.recent_stood.at[curve].set(short[1]),
        age.at[curve].set(fresh),
    )


def _surprise(trials, stood, before_trials, before_stood) -> jax.Array:
    """Standard deviations between recent and earlier acceptance, all depths together: a drafter gets better or worse as a whole."""
    before = (before_stood + 0.5) / (before_trials + 1.0)
    scatter = trials * before * (1 - before) * (1 + trials / (before_trials + 1.0))
    return jnp.abs(jnp.sum(stood - trials * before)) / jnp.sqrt(scatter.sum() + 0.1)


def means(state: Acceptance, siblings: np.ndarray) -> jax.Array:
    """Posterior mean of `a`, float32 `[C, D]`."""
    return _chain(state.trials, state.stood, siblings, jnp.zeros(state.age.shape))


def sample(state: Acceptance, siblings: np.ndarray, key: jax.Array, draws: int) -> tuple[jax.Array, jax.Array]:
    """Draws of `a` from the belief, float32 `[M, C, D]`, and in which a curve has changed since it was last run, bool `[M, C]`."""
    coin, normal = jax.random.split(key)
    shape = draws, state.age.shape[0]
    changed = jax.random.uniform(coin, shape) < 1.0 - jnp.exp(-HAZARD * state.age)
    keep = jnp.where(changed, 0.0, 1.0)[..., None]
    return _chain(keep * state.trials, keep * state.stood, siblings, jax.random.normal(normal, shape)), changed


def _chain(trials, stood, siblings, noise) -> jax.Array:
    """Depth by depth: prior from the depth before (and the drafter's other curves), then the own counts; `[..., C, D]`.

    `noise` `[..., C]` are standard deviations to add, the same at all depths: a drafter is better or worse as a whole.
    """
    others = jnp.asarray(siblings, jnp.float32)

    def deeper(mean, counts):
        trials, stood = counts
        prior = DECAY * mean
        if siblings.any():
            known, good = trials @ others, stood @ others
            weight = jnp.minimum(known, SIBLINGS)
            prior = (STRENGTH * prior + weight * good / jnp.maximum(known, 1e-6)) / (STRENGTH + weight)
        count = STRENGTH + trials
        mean = (STRENGTH * prior + stood) / count
        deviation = jnp.sqrt(mean * (1.0 - mean) / (count + 1.0))
        mean = jnp.clip(mean + noise * deviation, 0.001, 0.999)
        return mean, mean

    start = jnp.full(trials.shape[:-1], PRIOR / DECAY, jnp.float32)
    depths_first = jnp.moveaxis(trials, -1, 0), jnp.moveaxis(stood, -1, 0)
    return jnp.moveaxis(jax.lax.scan(deeper, start, depths_first)[1], 0, -1)


def expected_tokens(a: jax.Array) -> jax.Array:
    """Tokens a row and round at each depth from 0 to D: float32 `[..., D + 1]` of `a` `[..., D]`."""
    gains = jnp.cumsum(jnp.cumprod(a, axis=-1), axis=-1)
    return 1.0 + jnp.concatenate([jnp.zeros_like(gains[..., :1]), gains], axis=-1)
