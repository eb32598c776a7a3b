"""How likely drafts stand: one belief shared by all strategies, so that a launch of one tells about every other.

A *curve* is what strategies share: the drafter of chains; drafter, width and verify tokens of trees, since the slots left at
a level depend on them. `a[c, j]` is the chance that the draft at depth `j + 1` stands given that all before it did; a drafter
that offers none counts as one that did not stand. A round of depth `d` then commits on average

    E(c, d) = 1 + sum_{i < d} prod_{j <= i} a[c, j]        tokens a row.

The belief is a normal law of all log-odds together, a Kalman filter (binomial counts enter through their curvature):

    prior    a level for each drafter, a smaller one for each of its curves, and a random walk along the depths, so that shallow
             counts tell about deeper drafts, and a tree's about those of the same drafter;
    time     each launch the same kinds of change may have happened, so what nobody observes becomes uncertain;
    jumps    counts that contradict the belief by more than chance widen it before they enter.

The last is about curves that run. One that does not is each launch with chance `HAZARD` no longer what it was; draws from the
belief respect that, its mean does not.

Letters: `C` curves, `D` depths, `N = C * D`, `M` draws.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.base import Arm, Report, tokens_to_verify

FIRST, FALL = 0.4, 0.05  # log-odds of the first draft of an unknown drafter, and what each further depth takes off
SLOTS, SLOTS_SPREAD = 0.25, 0.15  # what each doubling of a tree's verify tokens adds, and its standard deviation
DRAFTER, CURVE, DEPTH = 1.0, 0.2, 0.3  # prior standard deviations: of a drafter's level, a curve's, a step in depth
DRIFT, SHAPE_DRIFT = 0.05, 0.01  # deviation of a drafter's level's change in a launch; of all else, in units of the prior
JUMP, SHAPE_JUMP = 1.0, 0.2  # the same in a jump
SURPRISE = 3.0  # standard deviations at which counts prove a jump
FULL_LAUNCH = 64.0  # rows of one launch resemble each other: their evidence saturates here
HAZARD = 0.02  # chance a launch that a curve nobody runs has changed
NEVER = 1e6  # age of a curve that never ran


class Acceptance(NamedTuple):
    """Attributes:
    logit: float32 `[C, D]`, mean log-odds.
    covariance: float32 `[N, N]`, of them.
    age: float32 `[C]`, launches since the last evidence about the curve's drafter; less where it was little.
    """

    logit: jax.Array
    covariance: jax.Array
    age: jax.Array


class Curves(NamedTuple):
    """Which strategies share a curve, and what is believed beforehand.

    Attributes:
        names: of the curves, in order of first appearance.
        of_arm: int32 `[A]`, an arm's curve; 0 for the one without speculation, whose depth of 0 makes it irrelevant.
        owner: int32 `[C]`, a number for each drafter.
        logit: float32 `[C, D]`, prior mean.
        shape: float32 `[N, N]`, prior covariance.
        alike: float32 `[N, N]`, 1 where two positions are of one drafter.
    """

    names: tuple[str, ...]
    of_arm: np.ndarray
    owner: np.ndarray
    logit: np.ndarray
    shape: np.ndarray
    alike: np.ndarray


def drafter_of(strategy: Arm) -> str:
    return getattr(strategy, "drafter", "")


def curve_name(strategy: Arm) -> str:
    """The drafter's name for a chain, such as `eagle-w4-v16` for a tree."""
    width = getattr(strategy, "width", 1)
    if width == 1:
        # Of shared slots the likely drafts get more: their curve is their own, and counts what got no slot as fallen.
        return drafter_of(strategy) + (f"-v{tokens_to_verify(strategy)}" if _squeeze(strategy) else "")
    return f"{drafter_of(strategy)}-w{width}-v{tokens_to_verify(strategy)}"


def _squeeze(strategy: Arm) -> float:
    """Doublings by which a chain has more tokens than slots."""
    chain = getattr(strategy, "width", 1) == 1
    return float(np.log2((strategy.depth + 1) / tokens_to_verify(strategy))) if chain else 0.0


def curves(strategies: Sequence[Arm], depth: int) -> Curves:
    """Lays out the curves of the strategies over `depth` depths."""
    kinds = {curve_name(s): s for s in strategies if s.depth > 0}
    names, drafters = tuple(kinds) or ("",), [drafter_of(s) for s in kinds.values()] or [""]
    of_arm = np.asarray([names.index(curve_name(s)) if s.depth > 0 else 0 for s in strategies], np.int32)
    owner = np.asarray([list(dict.fromkeys(drafters)).index(drafter) for drafter in drafters], np.int32)
    widths = np.log2([getattr(s, "width", 1) for s in kinds.values()] or [1])
    slots = np.where(widths > 0, np.log2([tokens_to_verify(s) for s in kinds.values()] or [1]), 0.0)
    squeezes = np.asarray([_squeeze(s) for s in kinds.values()] or [0.0])
    apart = sum(np.abs(x[:, None] - x) for x in (widths, slots, squeezes))  # doublings
    related = (owner[:, None] == owner).astype(float)  # [C, C]
    level = related * (DRAFTER**2 + SLOTS_SPREAD**2 * slots[:, None] * slots + CURVE**2 * np.exp(-apart / 3))
    walk = DEPTH**2 * np.minimum.outer(np.arange(depth), np.arange(depth))  # [D, D]
    shape = np.kron(level, np.ones((depth, depth))) + np.kron(related * np.exp(-apart / 10), walk)
    shape += 1e-3 * np.eye(len(names) * depth)
    logit = FIRST + SLOTS * slots[:, None] - FALL * np.arange(depth)
    alike = np.kron(related, np.ones((depth, depth)))
    return Curves(names, of_arm, owner, *(x.astype(np.float32) for x in (logit, shape, alike)))


def init(layout: Curves) -> Acceptance:
    ages = jnp.full((len(layout.names),), NEVER, jnp.float32)
    return Acceptance(jnp.asarray(layout.logit), jnp.asarray(layout.shape), ages)


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


def update(state: Acceptance, layout: Curves, curve: jax.Array, trials: jax.Array, stood: jax.Array) -> Acceptance:
    """Everything grows a launch older; `curve` learns from `trials` and `stood` `[D]`, all zero where nothing was drafted."""
    weight = 1.0 / (1.0 + trials[0] / FULL_LAUNCH)
    trials, stood = weight * trials, weight * stood
    count, depth = layout.logit.shape
    prior = jnp.asarray(layout.shape)

    # Time. A curve as uncertain as it was at first cannot become more so.
    room = jnp.clip(1.0 - jnp.diagonal(state.covariance)[::depth] / jnp.diagonal(prior)[::depth], 0.0, 1.0)
    room = jnp.repeat(jnp.sqrt(room), depth)
    alike = jnp.asarray(layout.alike)
    covariance = state.covariance + (DRIFT**2 * alike + SHAPE_DRIFT**2 * prior) * room[:, None] * room

    logit = state.logit[curve]
    chance = jax.nn.sigmoid(logit)
    excess = stood - trials * chance
    # Slope of the logistic curve between what was believed and what was seen: a Newton step that does not overshoot.
    seen = jnp.clip((stood + chance) / (trials + 1.0), 1e-4, 1.0 - 1e-4)
    apart = jnp.log(seen / (1.0 - seen)) - logit
    flat = jnp.abs(apart) < 1e-3
    slope = jnp.where(flat, chance * (1.0 - chance), (seen - chance) / jnp.where(flat, 1.0, apart))
    known = jnp.sqrt(trials * slope)  # [D]

    # A jump. All depths together, as a drafter gets better or worse as a whole.
    rows = jnp.arange(count * depth).reshape(count, depth)[curve]
    own = covariance[rows][:, rows]
    information = trials * chance * (1.0 - chance)
    scatter = information.sum() + information @ own @ information
    jumped = jnp.abs(excess.sum()) > SURPRISE * jnp.sqrt(scatter + 0.1)
    kin = alike[rows[0]]  # [N], all positions of the drafter
    widened = (JUMP**2 * alike + SHAPE_JUMP**2 * prior) * kin[:, None] * kin
    covariance = covariance + jnp.where(jumped, 1.0, 0.0) * widened

    # Evidence.
    reach = covariance[:, rows] * known  # [N, D]
    inner = jnp.eye(depth) + known[:, None] * reach[rows]
    solved = jnp.linalg.solve(inner, reach.T)  # [D, N]
    covariance = covariance - reach @ solved
    moved = state.logit + (covariance[:, rows] @ excess).reshape(count, depth)

    age = jnp.minimum(state.age + 1.0, NEVER)
    related = jnp.asarray(layout.owner) == jnp.asarray(layout.owner)[curve]
    age = jnp.where(related, age * 2.0 / (2.0 + trials[0]), age)
    return Acceptance(jnp.clip(moved, -7.0, 7.0), (covariance + covariance.T) / 2, age)


def means(state: Acceptance) -> jax.Array:
    """`a` at the mean log-odds, float32 `[C, D]`."""
    return jax.nn.sigmoid(state.logit)


def sample(
    state: Acceptance, layout: Curves, key: jax.Array, draws: int, curve: jax.Array, depth: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws of `a` from the belief as it would be if `curve` were known down to `depth`: what running it teaches anyway.

    Returns:
        float32 `[M, C, D]`, with known chances at their means, and bool `[M, C]`: a curve has changed since it was last run.
    """
    coin_key, key = jax.random.split(key)
    count, deepest = layout.logit.shape
    size = count * deepest
    coin = jax.random.uniform(coin_key, (draws, count))[:, jnp.asarray(layout.owner)]  # one for each drafter
    known = (jnp.arange(count)[:, None] == curve) & (jnp.arange(deepest) < depth)
    changed = (coin < 1.0 - jnp.exp(-HAZARD * state.age)) & ~known.any(-1)
    noise = jax.random.normal(key, (draws, size))
    kept = noise @ jnp.linalg.cholesky(state.covariance + 1e-4 * jnp.eye(size)).T
    rows = jnp.arange(size).reshape(count, deepest)[curve]
    certain = (jnp.arange(deepest) < depth).astype(jnp.float32)
    cross = state.covariance[:, rows] * certain  # [N, D]
    inner = cross[rows] * certain[:, None] + jnp.diag(jnp.where(certain > 0, 1e-4, 1.0))
    kept = kept - (kept[:, rows] * certain) @ jnp.linalg.solve(inner, cross.T)
    anew = noise @ jnp.asarray(np.linalg.cholesky(layout.shape)).T + (jnp.asarray(layout.logit) - state.logit).ravel()
    shape = (draws, count, deepest)
    drawn = jnp.where(changed[..., None], anew.reshape(shape), kept.reshape(shape))
    return jax.nn.sigmoid(state.logit + drawn), changed


def expected_tokens(a: jax.Array) -> jax.Array:
    """Tokens a row and round at each depth from 0 to D: float32 `[..., D + 1]` of `a` `[..., D]`."""
    gains = jnp.cumsum(jnp.cumprod(a, axis=-1), axis=-1)
    return 1.0 + jnp.concatenate([jnp.zeros_like(gains[..., :1]), gains], axis=-1)
