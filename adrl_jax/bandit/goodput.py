"""The default controller: expected tokens per second from a latency table and a belief about acceptance.

    goodput(arm) = running * E(curve, depth) / t(batch, cache, arm)

`E` (tokens a row and round, `acceptance.py`) is learnt once for every strategy of a drafter, `t` (seconds a round,
`latency.py`) is measured where it was run and predicted elsewhere. So a launch of a shallow strategy at a small batch tells what a
deep one at a large batch would do, and nothing hopeless has to be tried.

The first launch at each batch size is plain, so that what everything is compared with is measured there. From then on
exploration is Thompson's, at a price. Beliefs are drawn, and what an arm gains over the draws in which it wins is what knowing
it is worth in a launch; times the launches in which that is of use, less what the arm is expected to lose now, it decides whether
the arm runs. Only what a launch of the best arm would not tell anyway is drawn, so close calls do not alternate for nothing.
Where the draws say that a drafter may have changed since it was last seen, its cheapest strategy is run, as one is enough to
know. A purse bounds it all: it fills by a share of the time spent and is charged with what a launch is expected to lose. Where the
arm most worth a try costs more than is in it, nothing else is tried either, or cheap looks at one drafter would for ever leave
too little for a dear one.

A drafter that was left out has to catch up before it drafts again. What that takes a token and row is learnt beside the rounds,
and so is for how many launches it then stays: an arm that would have to catch up is judged as if the cost came in parts, in each
of so many launches. So a drafter is not switched on for little, nor off for a moment.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.bandit import acceptance, latency
from adrl_jax.bandit.base import Arm, Bandit, Context, checked, report_depth

PACE = 0.98  # discount of the running means of a launch's rounds and seconds
DRAWS = 24  # from the beliefs, at each decision
HORIZON = 4.0  # launches in which what an exploring launch shows is of use
STAY = 4.0  # launches that a drafter is taken to stay once it has caught up, before that was seen
CATCH_UP_GAIN = 0.3  # of the running means of what catching up takes and how long it serves
RESERVE = 2.0  # launches' time that the purse can hold, and holds after the first report


class GoodputState(NamedTuple):
    """Attributes:
    acceptance: belief about drafts.
    latency: belief about seconds a round.
    rounds, seconds: float32 `[]`, running means of a launch's rounds and seconds; 0 before the first report.
    purse: float32 `[]`, seconds that exploration may still lose.
    catch_up: float32 `[drafters]`, seconds that catching up takes a token and row; 0 before it was seen.
    stay: float32 `[drafters]`, launches that it served for, a running mean.
    since: float32 `[drafters]`, launches it has served for this time; 0 before the first.
    """

    acceptance: acceptance.Acceptance
    latency: latency.Latency
    rounds: jax.Array
    seconds: jax.Array
    purse: jax.Array
    catch_up: jax.Array
    stay: jax.Array
    since: jax.Array


class Outlook(NamedTuple):
    """What every arm promises in a context.

    Attributes:
        tokens: float32 `[A]`, expected tokens a row and round.
        seconds: float32 `[A]`, expected seconds a round.
        deviation: float32 `[A]`, of the log of `seconds`.
        entry: float32 `[A]`, seconds that catching up takes first.
        stay: float32 `[A]`, launches over which that is spread.
        rounds: float32 `[]`, of a launch.
    """

    tokens: jax.Array
    seconds: jax.Array
    deviation: jax.Array
    entry: jax.Array
    stay: jax.Array
    rounds: jax.Array

    @property
    def pace(self) -> jax.Array:
        """Seconds a round with its part of catching up, float32 `[A]`."""
        return self.seconds + self.entry / (self.stay * self.rounds)

    @property
    def rate(self) -> jax.Array:
        """Tokens a row and second, float32 `[A]`."""
        return self.tokens / self.pace

    @property
    def loss(self) -> jax.Array:
        """Share of an arm's time that the best arm would not have needed, float32 `[A]`."""
        return 1.0 - self.rate / self.rate.max()


def goodput(
    strategies: Sequence[Arm],
    batch_buckets: Sequence[int],
    *,
    cache_buckets: int = 24,
    exploration: float = 0.01,
) -> Bandit:
    """Builds the controller.

    Args:
        strategies: the run's arms, the one without speculation among them.
        batch_buckets: the compiled batch sizes, ascending.
        cache_buckets: cache buckets, two an octave from 32 tokens on; 24 reach 93,000. Larger caches share the last.
        exploration: share of the time that exploration may be expected to lose; 0 never explores.

    Raises:
        ValueError: no or several arms without speculation, or a value out of range.
    """
    if not 0 <= exploration < 1:
        raise ValueError(f"exploration={exploration!r} must be in [0, 1)")
    layout = latency.cells(strategies, batch_buckets, cache_buckets)
    deepest = report_depth(strategies)
    curves = acceptance.curves(strategies, deepest)
    depths = np.asarray([s.depth for s in strategies], np.int32)
    speculates, of_arm = jnp.asarray(depths > 0), jnp.asarray(curves.of_arm)
    owner = jnp.asarray(curves.owner[curves.of_arm])  # [A], the drafter of each arm
    drafters = int(curves.owner.max()) + 1
    same = jnp.asarray((curves.of_arm[:, None] == curves.of_arm) & (depths > 0))

    def init():
        zero = jnp.zeros((), jnp.float32)
        unseen = jnp.zeros(drafters, jnp.float32)
        return GoodputState(
            acceptance.init(curves), latency.init(layout), zero, zero, zero, unseen, jnp.full(drafters, STAY), unseen
        )

    def tokens_of(a):
        return acceptance.expected_tokens(a)[..., of_arm, depths]

    def look(state, context) -> Outlook:
        row, column = latency.locate(layout, context.batch, context.cache)
        log_seconds, deviation = latency.predict(state.latency, layout, row, column)
        rows = jnp.asarray(context.batch).astype(jnp.float32)
        entry = jnp.where(speculates, state.catch_up[owner] * rows * context.gap, 0.0)
        return Outlook(
            tokens_of(acceptance.means(state.acceptance)),
            jnp.exp(log_seconds),
            deviation,
            entry,
            state.stay[owner],
            jnp.maximum(state.rounds, 1.0),
        )

    def gains(state, key, outlook, best):
        """What each arm would show: by how much, in log-rate, it may beat `best` by all that running `best` would not tell."""
        accept_key, latency_key = jax.random.split(key)
        a, changed = acceptance.sample(state.acceptance, curves, accept_key, DRAWS, of_arm[best], jnp.asarray(depths)[best])
        drawn = jnp.log(tokens_of(a) / outlook.pace)  # [M, A]
        lead = drawn - drawn[:, best, None]
        noise = latency.told(outlook.deviation) * jax.random.normal(latency_key, drawn.shape)
        own = jnp.maximum(lead + noise, 0.0).mean(0)
        # Of a drafter that may have changed any strategy shows it, so the cheapest is worth what the best may turn out to be.
        hope = jnp.where(changed[:, of_arm], jnp.maximum(lead, 0.0), 0.0).mean(0)
        hope = jnp.where(same, hope, 0.0).max(1)
        cheapest = outlook.loss <= jnp.where(same, outlook.loss, jnp.inf).min(1)
        return jnp.where(cheapest & speculates, jnp.maximum(own, hope), own)

    def select(state, key, context):
        outlook = look(state, context)
        best = jnp.argmax(outlook.rate)
        # What is tried once has paid for catching up whether it stays or not.
        price = outlook.loss * outlook.pace * state.rounds + (1.0 - 1.0 / outlook.stay) * outlook.entry
        worth = HORIZON * gains(state, key, outlook, best) - outlook.loss
        worth = jnp.where(price <= RESERVE * state.seconds, worth, 0.0).at[best].set(0.0)  # no purse ever holds the rest
        tried = jnp.argmax(worth)
        chosen = jnp.where((worth[tried] > 0) & (price[tried] <= state.purse), tried, best)
        # What plain decoding takes is measured at each batch size, not inferred: all gains are over it.
        row, _ = latency.locate(layout, context.batch, context.cache)
        known = (state.latency.weight[row, :, layout.off] > 0).any()
        return jnp.where(known, chosen, layout.off).astype(jnp.int32)

    def update(state, report):
        arm, first = report.arm, state.seconds == 0
        who = owner[arm]
        gap = jnp.where(owner == who, report.gap, 0.0)
        outlook = look(state, Context(report.running, report.batch, report.cache, gap))
        row, column = latency.locate(layout, report.batch, report.cache)
        trials, stood = acceptance.evidence(report, jnp.asarray(depths)[arm])
        rounds = report.rounds.astype(jnp.float32)

        def paced(mean, new):
            return jnp.where(first, new, PACE * mean + (1 - PACE) * new)

        seconds = paced(state.seconds, report.seconds)
        purse = state.purse + exploration * report.seconds - jnp.where(first, 0.0, outlook.loss[arm] * report.seconds)
        most = RESERVE * seconds if exploration > 0 else 0.0
        mean, stay, since = state.catch_up[who], state.stay[who], state.since[who]
        again = report.gap > 0
        seen = report.overhead / jnp.maximum(report.gap * report.batch.astype(jnp.float32), 1.0)
        mean = jnp.where(again, jnp.where(mean > 0, mean + CATCH_UP_GAIN * (seen - mean), seen), mean)
        stay = jnp.where(again & (since > 0), stay + CATCH_UP_GAIN * (since - stay), stay)
        since = jnp.where(speculates[arm], jnp.where(again, 1.0, since + 1.0), since)
        return GoodputState(
            acceptance.update(state.acceptance, curves, of_arm[arm], trials, stood),
            latency.update(
                state.latency,
                (row, column, arm),
                jnp.log(outlook.seconds[arm]),
                outlook.deviation[arm],
                jnp.log((report.seconds - report.overhead) / rounds),
            ),
            paced(state.rounds, rounds),
            seconds,
            jnp.where(first, most, jnp.clip(purse, -most, most)),
            state.catch_up.at[who].set(mean),
            state.stay.at[who].set(stay),
            state.since.at[who].set(since),
        )

    return checked(Bandit(init, select, update), len(strategies), deepest)
