"""What drafting takes of a round: the draft loop timed alone against whole rounds, in turn, on rows in mid-response."""

import functools
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from adrl_jax.rollout import round as rounds
from adrl_jax.rollout.engine import Engine
from adrl_jax.rollout.state import RolloutState, empty
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.types import FinishReason

LENGTH, CAPACITY = 100, 256  # tokens a row has, and may have
REPEATS = 10


def shares(engine: Engine, strategies: Sequence[Strategy], batches: Sequence[int]) -> dict[str, dict[str, float]]:
    """Median seconds of the drafts over median seconds of the round they begin: strategy -> batch -> share."""
    served = engine.served
    config = rounds.RoundConfig(served.model, Law(valid_vocab=engine.config.valid_vocab), engine.config.eos_ids)
    found: dict[str, dict[str, float]] = {}
    for strategy in strategies:
        drafter, own = served.drafters[strategy.drafter], served.drafter_params.get(strategy.drafter)
        for batch in batches:
            state = jax.jit(functools.partial(_rows, engine, batch))()  # a buffer of its own for each array, to be donated
            state = rounds.catch_up(drafter, LENGTH, served.params, own, state)
            drafts = jax.jit(functools.partial(_drafts, config, strategy, drafter))
            whole = jax.jit(functools.partial(rounds.decode_round, config, strategy, drafter), donate_argnums=2)
            drafting, round_ = [], []
            for _ in range(REPEATS + 1):
                began = time.perf_counter()
                jax.block_until_ready(drafts(served.params, own, state))
                between = time.perf_counter()
                state, _ = jax.block_until_ready(whole(served.params, own, state))
                drafting.append(between - began)
                round_.append(time.perf_counter() - between)
            share = statistics.median(drafting[1:]) / statistics.median(round_[1:])  # the first of each compiled
            found.setdefault(strategy.name, {})[str(batch)] = share
    return found


def _drafts(config, strategy, drafter, params, drafter_params, state):
    """The drafts and the drafter's state alone, so that nothing else is copied."""
    drafts, count, _, _, after = rounds.draft(config, strategy, drafter, params, drafter_params, state)
    return drafts, count, after.drafter_states[drafter.name]


def _rows(engine: Engine, batch: int) -> RolloutState:
    """Running rows whose drafters know nothing yet."""
    served = engine.served
    state = empty(served.model, batch, CAPACITY, served.drafters, served.keeps_hidden)
    return state._replace(
        length=jnp.full(batch, LENGTH, jnp.int32),
        limit=jnp.full(batch, CAPACITY, jnp.int32),
        finish_reason=jnp.full(batch, FinishReason.RUNNING, jnp.int32),
    )
