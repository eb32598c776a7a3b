"""A world to try controllers in: rollouts of a shrinking batch, noisy times, drafts that stand less often after each update.

One decision is one launch. A rollout starts with `N` requests of long-tailed lengths; requests finish, the batch falls to
smaller compiled sizes and the caches grow to larger ones; when none is left, the policy is updated and the next rollout
starts. Drafts stand or fall row by row with the true chances of that moment, which fall at every policy update, recover as
the drafter learns, and jump at the world's shocks.

What a controller is judged by needs no luck of the draw: with `rate(arm)` the expected tokens per second of the requests
now running, from true chances and noise-free times, a launch of `s` noise-free seconds loses

    s * (1 - rate(arm) / max rate)          seconds,

and `s * rate(arm) / max rate` are what the oracle, who knows all this, would have needed for the same tokens. Sums of both
over a run are its *regret* and the *oracle's total*.

Letters: `A` arms, `B` batch buckets, `H` cache buckets, `C` curves, `D` depths, `E` shocks, `N` requests, `R` rounds a launch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit.acceptance import curves, expected_tokens
from adrl_jax.bandit.base import Arm, Bandit, Context, Report, report_depth


class World(NamedTuple):
    """What is true. Arrays only, so that worlds of one shape share a compiled program.

    Attributes:
        seconds: float32 `[B, H, A]`, of a round without noise.
        batches: int32 `[B]`, compiled batch sizes, ascending; the largest is at least `N`.
        caches: int32 `[H]`, cache capacities, ascending.
        logit: float32 `[C, D]`, log-odds that a draft stands given that all before it did, with a fully trained drafter.
        drop: float32 `[C]`, taken off the log-odds at each policy update.
        recovery: float32 `[]`, launches in which a drop shrinks to 1/e.
        shock_at: int32 `[E]`, decisions at which the world jumps; ascending.
        shock: float32 `[E + 1, C]`, added to the log-odds before the first jump, after the first, …
        spread: float32 `[]`, standard deviation of the log-odds between requests.
        lengths: float32 `[3]`, responses: median, log standard deviation, longest.
        prompt: float32 `[]`, tokens in the cache at the start.
        noise: float32 `[4]`, of the log-seconds: deviation of each launch, share of outliers, their largest factor, and the
            deviation of a slow-down that all arms share for some launches.
        weather: float32 `[]`, launches in which the shared slow-down forgets itself.
    """

    seconds: jax.Array
    batches: jax.Array
    caches: jax.Array
    logit: jax.Array
    drop: jax.Array
    recovery: jax.Array
    shock_at: jax.Array
    shock: jax.Array
    spread: jax.Array
    lengths: jax.Array
    prompt: jax.Array
    noise: jax.Array
    weather: jax.Array


class Trace(NamedTuple):
    """One run, decision by decision, each `[T]`.

    Attributes:
        arm: int32, chosen.
        best: int32, the oracle's.
        running: int32, requests.
        seconds: float32, noise-free.
        ratio: float32, rate of the arm over the oracle's rate.
        rollout: int32, how many were finished before.
    """

    arm: jax.Array
    best: jax.Array
    running: jax.Array
    seconds: jax.Array
    ratio: jax.Array
    rollout: jax.Array


class _Now(NamedTuple):
    left: jax.Array  # [N] tokens still to come
    done: jax.Array  # [N] tokens committed
    tilt: jax.Array  # [N] log-odds of each request
    dropped: jax.Array  # [C] log-odds below a trained drafter
    slow: jax.Array  # [] shared slow-down, log
    rollout: jax.Array


def run(
    bandit: Bandit, strategies: Sequence[Arm], world: World, key: jax.Array, *, decisions: int, requests: int, rounds: int = 8
) -> Trace:
    """Plays `decisions` launches of a controller; pure, to be jitted and mapped over keys.

    Args:
        bandit: the controller.
        strategies: its arms.
        world: what is true.
        key: consumed. The requests of a rollout depend on it and the rollout's number only, so all controllers meet the same.
        decisions: `T`.
        requests: `N`, at most the largest batch bucket.
        rounds: `R`.
    """
    depths = jnp.asarray([s.depth for s in strategies], jnp.int32)
    deepest = report_depth(strategies)
    of_arm = jnp.asarray(curves(strategies, deepest).of_arm)
    rollout_key, launch_key = jax.random.split(key)

    def begin(now, key):
        """The policy was updated: new requests, and the drafter is behind."""
        length_key, tilt_key = jax.random.split(key)
        median, spread, longest = world.lengths
        length = median * jnp.exp(spread * jax.random.normal(length_key, (requests,)))
        return now._replace(
            left=jnp.clip(jnp.round(length), 1, longest),
            done=jnp.zeros(requests),
            tilt=world.spread * jax.random.normal(tilt_key, (requests,)),
            dropped=now.dropped + world.drop,
            rollout=now.rollout + 1,
        )

    def step(carry, index):
        now, state = carry
        keys = jax.random.split(jax.random.fold_in(launch_key, index), 5)
        over = ~(now.left > 0).any()
        fresh = begin(now, jax.random.fold_in(rollout_key, now.rollout))
        now = jax.tree.map(lambda new, old: jnp.where(over, new, old), fresh, now)
        alive = now.left > 0
        running = alive.sum().astype(jnp.int32)
        row = jnp.searchsorted(world.batches, running)
        held = world.prompt + now.done.max() + rounds * (deepest + 1)
        column = jnp.minimum(jnp.searchsorted(world.caches, held), world.caches.shape[0] - 1)
        context = Context(running, world.batches[row], world.caches[column])
        arm = bandit.select(state, keys[0], context)

        shift = world.shock[jnp.searchsorted(world.shock_at, index, side="right")] - now.dropped
        chance = jax.nn.sigmoid((world.logit + shift[:, None])[None] + now.tilt[:, None, None])  # [N, C, D]
        per_row = expected_tokens(chance)[:, of_arm, depths]  # [N, A]
        rate = jnp.where(alive[:, None], per_row, 0.0).sum(0) / world.seconds[row, column]

        stands = jnp.cumprod(chance[:, of_arm[arm]], axis=-1) * (jnp.arange(deepest) < depths[arm])  # [N, D]
        accepted = (jax.random.uniform(keys[1], (rounds, requests, 1)) < stands).astype(jnp.float32)  # [R, N, D]
        before = jnp.cumsum(1.0 + accepted.sum(-1), axis=0) - (1.0 + accepted.sum(-1))
        active = before < now.left
        passes = active.any(1).sum().astype(jnp.int32)
        stood = (accepted * active[..., None]).sum((0, 1))
        offered = (jnp.arange(deepest) < depths[arm]).astype(jnp.float32)
        examined = offered * jnp.concatenate([active.sum()[None].astype(jnp.float32), stood[:-1]])
        committed = jnp.minimum((jnp.where(active, 1.0 + accepted.sum(-1), 0.0)).sum(0), now.left)

        each, share, factor, shared = world.noise
        slow = now.slow + (shared * jnp.sqrt(2 / world.weather) * jax.random.normal(keys[2]) - now.slow / world.weather)
        coin, size = jax.random.uniform(keys[3], (2,))
        outlier = jnp.where(coin < share, size * jnp.log(factor), 0.0)
        exact = passes * world.seconds[row, column, arm]
        seconds = exact * jnp.exp(slow + each * jax.random.normal(keys[4]) + outlier)
        report = Report(arm, running, context.batch, context.cache, passes, committed.sum(), seconds, examined, stood)
        state = bandit.update(state, report)
        now = now._replace(
            left=now.left - committed,
            done=now.done + committed,
            dropped=now.dropped * jnp.exp(-1 / world.recovery),
            slow=slow,
        )
        best = jnp.argmax(rate).astype(jnp.int32)
        return (now, state), Trace(arm, best, running, exact, rate[arm] / rate[best], now.rollout)

    zeros = jnp.zeros(requests)
    start = _Now(zeros, zeros, zeros, jnp.zeros(world.drop.shape), jnp.zeros(()), jnp.int32(-1))
    return jax.lax.scan(step, (start, bandit.init()), jnp.arange(decisions))[1]


def regret(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Seconds lost, and the oracle's seconds for the same tokens, float64; over the last axis of the trace."""
    seconds, ratio = np.asarray(trace.seconds, np.float64), np.asarray(trace.ratio, np.float64)
    return (seconds * (1 - ratio)).sum(-1), (seconds * ratio).sum(-1)


def recovery(trace: Trace, at: int, window: int = 20, within: float = 0.05) -> np.ndarray:
    """Decisions after the change at decision `at` until the next `window` together reach the oracle's rate but for `within`.

    Counts `k` from 0 such that decisions `at + k` to `at + k + window - 1` do the oracle's work in at most
    `1 / (1 - within)` of its time. Where that never happens: the decisions there were.

    Returns:
        int `[...]`, one a run.
    """
    seconds, ratio = np.asarray(trace.seconds, np.float64)[..., at:], np.asarray(trace.ratio, np.float64)[..., at:]
    if seconds.shape[-1] < window:
        raise ValueError(f"at={at} leaves {seconds.shape[-1]} decisions, fewer than window={window}")

    def windowed(x):
        total = np.cumsum(np.concatenate([np.zeros((*x.shape[:-1], 1)), x], axis=-1), axis=-1)
        return total[..., window:] - total[..., :-window]

    good = windowed(seconds * ratio) >= (1 - within) * windowed(seconds)
    return np.where(good.any(-1), good.argmax(-1), seconds.shape[-1])
