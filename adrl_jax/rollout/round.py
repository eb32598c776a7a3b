"""One decoding round, draft -> verify -> commit, and launches of several rounds. All pure.

Shapes: `B` rows, `S` token capacity a row, `N` tokens of one verify pass (depth + 1), `V` vocabulary size.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models import transformer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import cached_attention, init_cache
from adrl_jax.rollout.state import Prefilled, RolloutState
from adrl_jax.sampling.law import Law
from adrl_jax.speculation import verify
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class RoundConfig:
    """The static part of a round.

    Attributes:
        model: the target's sizes and traits.
        law: filters and valid ids; the temperature is a property of each row.
        eos_ids: tokens that end a response.
        verification: `coupled` or `rejection`.
    """

    model: ModelConfig
    law: Law
    eos_ids: tuple[int, ...]
    verification: str = "coupled"

    def __post_init__(self):
        verify.check_method(self.verification)


class Summary(NamedTuple):
    """What the host knows after a launch; on the device one int32 vector, so that it is one transfer.

    Attributes:
        length, finish_reason, accept_passes, accept_tokens: int32 `[B]`, as in `RolloutState`.
        rounds: rounds that ran.
        missing: per drafter, the most entries any running row lacks.
    """

    length: np.ndarray
    finish_reason: np.ndarray
    accept_passes: np.ndarray
    accept_tokens: np.ndarray
    rounds: int
    missing: dict[str, int]


def pack_summary(state: RolloutState, rounds: jax.Array, drafters: Mapping[str, Drafter]) -> jax.Array:
    """int32 `[4 B + 1 + drafters]`, what `unpack_summary` reads."""
    rows = (state.length, state.finish_reason, state.accept_passes, state.accept_tokens)
    missing = [missing_entries(state, drafters[name]) for name in sorted(drafters)]
    return jnp.concatenate([*rows, jnp.stack([rounds, *missing])]).astype(jnp.int32)


def unpack_summary(packed: np.ndarray, batch: int, drafters: Mapping[str, Drafter]) -> Summary:
    """The host's side of `pack_summary`."""
    rows, rest = packed[: 4 * batch].reshape(4, batch), packed[4 * batch :]
    return Summary(*rows, int(rest[0]), {name: int(n) for name, n in zip(sorted(drafters), rest[1:], strict=True)})


def missing_entries(state: RolloutState, drafter: Drafter) -> jax.Array:
    """The most entries a running row's drafter lacks, int32 `[]`.

    A row of n tokens has n - 1 entries in a drafter that reads hidden states (the last token's is not known yet), n in others.
    """
    complete = state.length - 1 if drafter.uses_hidden else state.length
    return jnp.max(jnp.where(state.running, complete - state.drafter_states[drafter.name].length, 0))


def prefill(config: ModelConfig, params: Any, tokens: jax.Array, keep_hidden: bool) -> Prefilled:
    """Runs prompts `[P, W]` (padded at the end) through the target."""
    count, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (count, width))
    hidden, cache = transformer.Transformer(config).apply(
        {"params": params},
        tokens,
        positions,
        attend=cached_attention(positions),
        cache=init_cache(config, count, width),
    )
    return Prefilled(cache, hidden if keep_hidden else None)


def decode_round(
    config: RoundConfig,
    strategy: Strategy,
    drafter: Drafter | None,
    params: Any,
    drafter_params: Any,
    state: RolloutState,
) -> RolloutState:
    """Commits 1 … N tokens to each running row.

    Args:
        drafter: the strategy's; None exactly for a strategy that does not speculate.
        params: the target's, in engine layout.
        drafter_params: the drafter's, or None.
    """
    running = state.running
    if strategy.speculates:
        drafts, count, log_q, state = _draft(config, strategy, drafter, params, drafter_params, state)
    else:
        batch = state.length.shape[0]
        drafts, count, log_q = jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32), None
    n = drafts.shape[1] + 1

    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    positions = (state.length - 1)[:, None] + jnp.arange(n, dtype=jnp.int32)
    hidden, cache = transformer.Transformer(config.model).apply(
        {"params": params},
        jnp.concatenate([last, drafts], axis=1),
        positions,
        attend=cached_attention(positions),
        cache=state.cache,
    )
    with jax.named_scope("verify"):
        decide = verify.coupled if config.verification == "coupled" else verify.rejection
        extra = {} if config.verification == "coupled" else {"log_q": log_q}
        verdict = decide(
            transformer.logits(params, hidden),
            drafts,
            count,
            state.temperature,
            state.request_keys,
            positions + 1,
            config.law,
            **extra,
        )
        budget = jnp.where(running, state.limit - state.length, 0)
        committed, reason = verify.truncate(verdict, config.eos_ids, budget, state.ignore_eos)
    committed = jnp.where(running, committed, 0)

    # Places past what is committed lie outside the row on purpose: such writes are dropped.
    fresh = jnp.arange(n, dtype=jnp.int32)
    place = jnp.where(fresh < committed[:, None], state.length[:, None] + fresh, state.capacity)
    rows = jnp.arange(place.shape[0])[:, None]
    speculated = running.astype(jnp.int32) if strategy.speculates else jnp.zeros_like(committed)
    return state._replace(
        tokens=state.tokens.at[rows, place].set(verdict.tokens, mode="drop"),
        log_probs=state.log_probs.at[rows, place].set(verdict.log_probs, mode="drop"),
        length=state.length + committed,
        finish_reason=jnp.where(running, reason, state.finish_reason),
        cache=cache,
        hidden=None if state.hidden is None else _write_hidden(state.hidden, hidden, state.length - 1),
        accept_passes=state.accept_passes + speculated,
        accept_tokens=state.accept_tokens + speculated * committed,
    )


def _draft(config, strategy, drafter, params, drafter_params, state):
    with jax.named_scope("draft"):
        own = drafter.advance(
            drafter_params,
            params,
            state.drafter_states[drafter.name],
            state.tokens,
            state.length,
            state.hidden,
            strategy.depth + 1,
        )
        draw = verify.make_draw(config.verification, state.temperature, state.request_keys, config.law)
        proposal, own = drafter.propose(
            drafter_params, params, own, state.tokens, state.length, state.hidden, draw, strategy.depth
        )
    state = state._replace(drafter_states={**state.drafter_states, drafter.name: own})
    return proposal.tokens, proposal.count, proposal.log_q, state


def _write_hidden(buffer: jax.Array, fresh: jax.Array, start: jax.Array) -> jax.Array:
    return jax.vmap(lambda b, f, s: jax.lax.dynamic_update_slice(b, f.astype(b.dtype), (s, 0)))(buffer, fresh, start)


def catch_up(drafter: Drafter, width: int, params: Any, drafter_params: Any, state: RolloutState) -> RolloutState:
    """Fills up to `width` (static) entries of a drafter that lagged behind while rounds ran without it."""
    own = drafter.advance(
        drafter_params, params, state.drafter_states[drafter.name], state.tokens, state.length, state.hidden, width
    )
    return state._replace(drafter_states={**state.drafter_states, drafter.name: own})


def launch(
    config: RoundConfig,
    strategy: Strategy,
    drafters: Mapping[str, Drafter],
    params: Any,
    drafter_params: Any,
    state: RolloutState,
    rounds: jax.Array,
) -> tuple[RolloutState, jax.Array]:
    """Up to `rounds` (int32 `[]`) rounds of one strategy; ends early when every row has finished.

    Args:
        drafter_params: the parameters of the strategy's drafter, or None.

    Returns:
        the state and its packed summary.
    """
    drafter = drafter_or_none(strategy, drafters)

    def more(carry):
        done, state = carry
        return (done < rounds) & jnp.any(state.running)

    def body(carry):
        done, state = carry
        return done + 1, decode_round(config, strategy, drafter, params, drafter_params, state)

    done, state = jax.lax.while_loop(more, body, (jnp.int32(0), state))
    return state, pack_summary(state, done, drafters)


def drafter_or_none(strategy: Strategy, drafters: Mapping[str, Drafter]) -> Drafter | None:
    """The strategy's drafter.

    Raises:
        ValueError: it is not among `drafters`.
    """
    if not strategy.speculates:
        return None
    if strategy.drafter not in drafters:
        known = ", ".join(sorted(drafters)) or "none at all"
        raise ValueError(f"strategy {strategy.name!r} needs the drafter {strategy.drafter!r}; there is {known}")
    return drafters[strategy.drafter]
