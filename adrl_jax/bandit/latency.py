"""How long a round takes: measured where it was measured, predicted from there everywhere else.

A *cell* is (batch bucket, cache bucket, arm). Each holds a running estimate of the log of its seconds a round that one slow
launch on a shared machine hardly moves. What was never measured is predicted in two steps: a cost law, linear in

    1,  batch * verify tokens,  batch * cache,  and for each drafter: 1,  depth,  depth * batch

(weights read, products, keys and values read, draft passes and what comes with them), fitted to the measured cells by least squares in relative
error with a weak prior; and what nearby cells (same arm, near batch, near cache) leave of it.

Letters: `B` batch buckets, `C` cache buckets, `A` arms, `P` terms of the law.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.acceptance import drafter_of
from adrl_jax.bandit.base import Arm, batch_bucket, check_buckets, off_arm, tokens_to_verify

CACHE_STEPS = 2  # cache buckets an octave
LEAST_CACHE = 32  # tokens of cache bucket 0
MEMORY = 30.0  # launches that a cell remembers
FORGET = 0.999  # discount of every cell at each launch
SLOW = 0.2  # log-seconds off the estimate at which a launch counts half
OWN = 0.15  # standard deviation of one launch, log-seconds
SELF = 0.06  # standard deviation of a launch that the other launches of the time do not share, log-seconds
CALM, WIND = 0.93, 0.25  # a slow-down that all arms share: what is left of it a launch later, gain of its estimate
UNIT = 3.0  # standard deviation of the log of a machine's speed before anything was measured
ODD = 0.05  # what no law and no neighbour tells of a cell
LAW = 0.2  # standard deviation of a prediction where nothing near was measured


class Latency(NamedTuple):
    """Attributes:
    log_seconds: float32 `[B, C, A]`, of a round; 0 where never measured.
    weight: float32 `[B, C, A]`, launches behind it, discounted; 0 where never measured.
    weather: float32 `[]`, by how much the log-seconds of every cell are up just now.
    """

    log_seconds: jax.Array
    weight: jax.Array
    weather: jax.Array


class Cells(NamedTuple):
    """What is known about the cells beforehand.

    Attributes:
        batches: int `[B]`, the compiled batch sizes, ascending.
        terms: float32 `[B, C, A, P]` of the cost law.
        prior, spread: float32 `[P]`, of the law's coefficients, in units of the first.
        near_batch, near_cache, near_arm: float32 `[B, B]`, `[C, C]`, `[A, A]`, how much a cell tells about another, 1 for itself.
        most: float32 `[A]`, log of the most that a round can cost, in plain rounds.
        off: the arm without speculation.
    """

    batches: np.ndarray
    terms: np.ndarray
    prior: np.ndarray
    spread: np.ndarray
    near_batch: np.ndarray
    near_cache: np.ndarray
    near_arm: np.ndarray
    most: np.ndarray
    off: int


def cells(strategies: Sequence[Arm], batch_buckets: Sequence[int], cache_buckets: int) -> Cells:
    """Lays out the cells.

    Raises:
        ValueError: no or several arms without speculation, `batch_buckets` not ascending from at least 1, `cache_buckets < 1`.
    """
    check_buckets(batch_buckets)
    off, batches = off_arm(strategies), np.asarray(batch_buckets)
    if cache_buckets < 1:
        raise ValueError(f"cache_buckets={cache_buckets!r} must be at least 1")
    batch = batches[:, None, None].astype(np.float64)
    cache = (LEAST_CACHE * 2.0 ** (np.arange(cache_buckets) / CACHE_STEPS))[:, None]
    verify = np.asarray([tokens_to_verify(s) for s in strategies], np.float64)
    depth = np.asarray([s.depth for s in strategies], np.float64)
    terms = [np.ones_like(verify), batch * verify, batch * cache / 1000]
    prior, spread = [1.0, 0.02, 0.01], [0.3, 0.05, 0.1]
    for drafter in sorted({drafter_of(s) for s in strategies if s.depth > 0}):
        own = np.asarray([s.depth > 0 and drafter_of(s) == drafter for s in strategies], np.float64)
        terms += [own, own * depth, batch * own * depth]
        prior += [0.1, 0.05, 0.002]
        spread += [0.3, 0.1, 0.01]
    shape = (len(batches), cache_buckets, len(strategies))
    stacked = np.stack([np.broadcast_to(term, shape) for term in terms], axis=-1)

    steps = np.log2(batches[:, None] / batches)
    hops = np.subtract.outer(np.arange(cache_buckets), np.arange(cache_buckets))
    owners = np.asarray([drafter_of(s) if s.depth > 0 else "" for s in strategies])
    alike = np.where(owners[:, None] == owners, 0.7, 0.5) * np.exp(-np.abs(np.log2(verify[:, None] / verify)))
    np.fill_diagonal(alike, 1.0)
    f32 = np.float32
    return Cells(
        batches=batches,
        terms=stacked.astype(f32),
        prior=np.asarray(prior, f32),
        spread=np.asarray(spread, f32),
        near_batch=np.exp(-(steps**2)).astype(f32),
        near_cache=np.exp(-((hops / 3) ** 2)).astype(f32),
        near_arm=alike.astype(f32),
        most=np.log(verify + depth).astype(f32),
        off=off,
    )


def init(layout: Cells) -> Latency:
    zeros = jnp.zeros(layout.terms.shape[:3], jnp.float32)
    return Latency(zeros, zeros, jnp.zeros((), jnp.float32))


def locate(layout: Cells, batch: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Batch and cache bucket of a launch, int32 each; sizes beyond the last bucket fall into it."""
    step = jnp.round(CACHE_STEPS * jnp.log2(cache.astype(jnp.float32) / LEAST_CACHE)).astype(jnp.int32)
    return batch_bucket(layout.batches, batch), jnp.clip(step, 0, layout.terms.shape[1] - 1)


def predict(state: Latency, layout: Cells, row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-seconds a round of every arm at a batch and cache bucket, and their standard deviations: float32 `[A]` each."""
    law = _fit(state, layout)
    trust = state.weight / (state.weight + 1.0)
    left = jnp.where(state.weight > 0, state.log_seconds - law, 0.0)
    near_batch, near_cache = jnp.asarray(layout.near_batch)[row], jnp.asarray(layout.near_cache)[column]
    near = jnp.einsum("b,c,bca,da->dbca", near_batch, near_cache, trust, jnp.asarray(layout.near_arm))
    near = near.at[:, row, column].multiply(1.0 - jnp.eye(near.shape[0]))  # its own measurement comes in below
    total = near.sum((1, 2, 3))
    guess = law[row, column] + (near * left).sum((1, 2, 3)) / (total + 0.5)
    own, count = state.log_seconds[row, column], state.weight[row, column]

    scale_known = 1.0 / (UNIT**-2 + trust.sum() / OWN**2)  # variance of the common scale: large before the first report
    guess_precision, own_precision = 1.0 / (LAW**2 / (0.5 + total) + ODD**2 + scale_known), count / OWN**2
    precision = guess_precision + own_precision

    def settle(guess):
        return (guess_precision * guess + own_precision * own) / precision

    plain = settle(guess)[layout.off]
    bounded = jnp.clip(guess, plain, plain + jnp.asarray(layout.most))  # no pass is cheaper than a plain one
    return settle(bounded), 1.0 / jnp.sqrt(precision)


def told(deviation: jax.Array) -> jax.Array:
    """Standard deviation of what one launch will add to the estimate of a cell now known to within `deviation`."""
    return deviation**2 / jnp.sqrt(deviation**2 + OWN**2)


def _fit(state: Latency, layout: Cells) -> jax.Array:
    """Log-seconds of every cell by the cost law, `[B, C, A]`. All zero-weight cells: the prior law in units of a second."""
    terms, prior = jnp.asarray(layout.terms), jnp.asarray(layout.prior)
    trust = state.weight / (state.weight + 1.0)
    shape = jnp.log(terms @ prior)
    unit = jnp.sum(trust * (state.log_seconds - shape)) / (jnp.sum(trust) + 1e-6)
    relative = terms * jnp.exp(unit - state.log_seconds)[..., None]  # predicted over measured, by unit coefficient
    weighted = trust[..., None] * relative
    scale = OWN**2 / jnp.asarray(layout.spread) ** 2
    matrix = jnp.einsum("bcap,bcaq->pq", weighted, relative) + jnp.diag(scale)
    moment = jnp.einsum("bcap,bca->p", weighted, jnp.ones_like(trust)) + scale * prior
    law = jnp.maximum(jnp.linalg.solve(matrix, moment), 1e-4 * prior)
    return jnp.log(terms @ law) + unit


def update(
    state: Latency,
    place: tuple[jax.Array, jax.Array, jax.Array],
    expected: jax.Array,
    deviation: jax.Array,
    log_seconds: jax.Array,
) -> Latency:
    """Moves a cell's estimate towards one launch, less the further off it is from what was expected there.

    Args:
        state: before.
        place: batch bucket, cache bucket and arm.
        expected, deviation: what `predict` says of the cell.
        log_seconds: of a round of the launch.
    """
    weather = CALM * state.weather
    surprise = log_seconds - weather - expected
    trust = 1.0 / (1.0 + surprise**2 / (SLOW**2 + deviation**2))
    trust = jnp.where(state.weight.any(), trust, 1.0)  # nothing to compare the very first launch with
    before = jnp.minimum(state.weight[place], MEMORY)
    after = before + trust
    old = state.log_seconds[place]
    gain = jnp.where(state.weight.any(), trust * WIND / (1.0 + (deviation / SELF) ** 2), 0.0)
    return Latency(
        state.log_seconds.at[place].set(old + trust / after * (log_seconds - weather - old)),
        (FORGET * state.weight).at[place].set(after),
        weather + gain * surprise,
    )
