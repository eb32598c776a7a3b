"""The default controller: expected tokens per second from a latency table and a belief about acceptance.

    goodput(arm) = running * E(curve, depth) / t(batch, cache, arm)

`E` (tokens a row and round, `acceptance.py`) is learnt once for every strategy of a drafter, `t` (seconds a round,
`latency.py`) is measured where it was run and predicted elsewhere. So a launch of a shallow strategy at a small batch tells what a
deep one at a large batch would do, and nothing hopeless has to be tried.

Exploration is Thompson's: beliefs are drawn, and the arm that is best under the draw may run. It is paid from a purse, which
fills by a share of the time spent and is charged with what an exploring launch is expected to lose; an arm that costs more
than is in the purse has to wait. Where the draw says that a drafter may have changed since it was last seen, its cheapest
strategy is run, as one is enough to know.
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
HORIZON = 30.0  # launches in which what an exploring launch shows is of use
RESERVE = 2.0  # launches' time that the purse can hold, and holds after the first report


class GoodputState(NamedTuple):
    """Attributes:
    acceptance: belief about drafts.
    latency: belief about seconds a round.
    rounds, seconds: float32 `[]`, running means of a launch's rounds and seconds; 0 before the first report.
    purse: float32 `[]`, seconds that exploration may still lose.
    """

    acceptance: acceptance.Acceptance
    latency: latency.Latency
    rounds: jax.Array
    seconds: jax.Array
    purse: jax.Array


class Outlook(NamedTuple):
    """What every arm promises in a context.

    Attributes:
        tokens: float32 `[A]`, expected tokens a row and round.
        seconds: float32 `[A]`, expected seconds a round.
        deviation: float32 `[A]`, of the log of `seconds`.
    """

    tokens: jax.Array
    seconds: jax.Array
    deviation: jax.Array

    @property
    def rate(self) -> jax.Array:
        """Tokens a row and second, float32 `[A]`."""
        return self.tokens / self.seconds

    @property
    def loss(self) -> jax.Array:
        """Share of an arm's time that the best arm would not have needed, float32 `[A]`."""
        return 1.0 - self.rate / self.rate.max()


def goodput(
    strategies: Sequence[Arm],
    batch_buckets: Sequence[int],
    *,
    cache_buckets: int = 24,
    exploration: float = 0.003,
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
    same = jnp.asarray((curves.of_arm[:, None] == curves.of_arm) & (depths > 0))

    def init():
        zero = jnp.zeros((), jnp.float32)
        return GoodputState(acceptance.init(curves), latency.init(layout), zero, zero, zero)

    def tokens_of(a):
        return acceptance.expected_tokens(a)[..., of_arm, depths]

    def look(state, context) -> Outlook:
        row, column = latency.locate(layout, context.batch, context.cache)
        log_seconds, deviation = latency.predict(state.latency, layout, row, column)
        return Outlook(tokens_of(acceptance.means(state.acceptance)), jnp.exp(log_seconds), deviation)

    def select(state, key, context):
        outlook = look(state, context)
        rate, loss = jnp.log(outlook.rate), outlook.loss
        best = jnp.argmax(rate)
        accept_key, latency_key = jax.random.split(key)
        a, changed = acceptance.sample(state.acceptance, curves, accept_key, DRAWS)
        tokens = jnp.log(tokens_of(a))  # [M, A]
        noise = outlook.deviation * jax.random.normal(latency_key, tokens.shape)
        drawn = tokens - jnp.log(outlook.seconds)
        gain = _gain(drawn - noise, best)
        # Of a drafter that may have changed, any strategy shows it: the cheapest is tried for the sake of the best.
        shown = (jnp.where(changed[:, of_arm], jnp.maximum(drawn - drawn[:, best, None], 0.0), 0.0)).mean(0)  # [A]
        hope = jnp.where(same, shown, 0.0).max(1)
        cheapest = loss <= jnp.where(same, loss, jnp.inf).min(1)
        gain = jnp.maximum(gain, jnp.where(cheapest & speculates, hope, 0.0))
        price = loss * outlook.seconds * state.rounds
        worth = jnp.where(price <= state.purse, HORIZON * gain - loss, 0.0).at[best].set(0.0)
        return jnp.where(worth.max() > 0, jnp.argmax(worth), best).astype(jnp.int32)

    def update(state, report):
        arm, first = report.arm, state.seconds == 0
        outlook = look(state, Context(report.running, report.batch, report.cache))
        row, column = latency.locate(layout, report.batch, report.cache)
        trials, stood = acceptance.evidence(report, jnp.asarray(depths)[arm])
        rounds = report.rounds.astype(jnp.float32)

        def paced(mean, new):
            return jnp.where(first, new, PACE * mean + (1 - PACE) * new)

        seconds = paced(state.seconds, report.seconds)
        purse = state.purse + exploration * report.seconds - jnp.where(first, 0.0, outlook.loss[arm] * report.seconds)
        most = RESERVE * seconds if exploration > 0 else 0.0
        return GoodputState(
            acceptance.update(state.acceptance, curves, of_arm[arm], trials, stood),
            latency.update(
                state.latency,
                (row, column, arm),
                jnp.log(outlook.seconds[arm]),
                outlook.deviation[arm],
                jnp.log(report.seconds / rounds),
            ),
            paced(state.rounds, rounds),
            seconds,
            jnp.where(first, most, jnp.clip(purse, -most, most)),
        )

    return checked(Bandit(init, select, update), len(strategies), deepest)


def _gain(drawn: jax.Array, best: jax.Array) -> jax.Array:
    """By how much each arm beats `best`, in log-rate, on average over draws `[M, A]` in which it does not count as a loss."""
    return jnp.maximum(drawn - drawn[:, best, None], 0.0).mean(0)
