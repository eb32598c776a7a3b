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
from adrl_jax.rollout import target
from adrl_jax.rollout.shared_slots import UNSURE, share_out, shared_pass
from adrl_jax.rollout.state import Prefilled, RolloutState, Tally
from adrl_jax.rollout.tree_round import tree_round
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law
from adrl_jax.speculation import verify
from adrl_jax.speculation.drafter import Drafter, Draw
from adrl_jax.speculation.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class RoundConfig:
    """The static part of a round.

    Attributes:
        model: the target's sizes and traits.
        law: filters and valid ids; the temperature is a property of each row.
        eos_ids: tokens that end a response.
        verification: `coupled` or `rejection`.
        simulate_acceptance: benchmark aid: each draft stands with this probability, whatever it is. What comes out is no
            sample of anything. None decides by the law.
        kernels: who computes the target's attention and draws, see `adrl_kernels.choice`; not `auto`.
    """

    model: ModelConfig
    law: Law
    eos_ids: tuple[int, ...]
    verification: str = "coupled"
    simulate_acceptance: float | None = None
    kernels: str = "xla"

    def __post_init__(self):
        verify.check_method(self.verification)


class Summary(NamedTuple):
    """What the host knows after a launch; on the device one int32 vector, so that it is one transfer.

    Attributes:
        length, finish_reason, accept_passes, accept_tokens: int32 `[B]`, as in `RolloutState`.
        rounds: rounds that ran.
        examined, accepted, faults: as in `Tally`.
        missing: per drafter, the most entries any running row lacks.
    """

    length: np.ndarray
    finish_reason: np.ndarray
    accept_passes: np.ndarray
    accept_tokens: np.ndarray
    rounds: int
    examined: np.ndarray
    accepted: np.ndarray
    faults: int
    missing: dict[str, int]


def pack_summary(state: RolloutState, rounds: jax.Array, tally: Tally, drafters: Mapping[str, Drafter]) -> jax.Array:
    """int32 `[4 B + 2 D + 2 + drafters]`, what `unpack_summary` reads."""
    rows = (state.length, state.finish_reason, state.accept_passes, state.accept_tokens)
    missing = [missing_entries(state, drafters[name]) for name in sorted(drafters)]
    numbers = jnp.stack([rounds, tally.faults, *missing])
    return jnp.concatenate([*rows, tally.examined, tally.accepted, numbers]).astype(jnp.int32)


def unpack_summary(packed: np.ndarray, batch: int, depth: int, drafters: Mapping[str, Drafter]) -> Summary:
    """The host's side of `pack_summary`; `depth` is that of the strategy that ran."""
    rows, rest = packed[: 4 * batch].reshape(4, batch), packed[4 * batch :]
    (examined, accepted), (rounds, faults, *missing) = rest[: 2 * depth].reshape(2, depth), rest[2 * depth :]
    missing = {name: int(n) for name, n in zip(sorted(drafters), missing, strict=True)}
    return Summary(*rows, int(rounds), examined, accepted, int(faults), missing)


def missing_entries(state: RolloutState, drafter: Drafter) -> jax.Array:
    """The most entries a running row's drafter lacks, int32 `[]`.

    A row of n tokens has n - 1 entries in a drafter that reads hidden states (the last token's is not known yet), n in others,
    and none in one that only looks at the text.
    """
    if not getattr(drafter, "keeps_entries", True):
        return jnp.int32(0)
    complete = state.length - 1 if drafter.uses_hidden else state.length
    return jnp.max(jnp.where(state.running, complete - state.drafter_states[drafter.name].length, 0))


def prefill(config: ModelConfig, width: int, keep_hidden: bool, params: Any, tokens: jax.Array) -> Prefilled:
    """Runs the first places of prompts `[P, C]` (padded at the end) through the target; the result has room for `width`."""
    count, _chunk = tokens.shape
    prefilled = Prefilled(
        init_cache(config, count, width),
        jnp.zeros((count, width, config.hidden_channels), config.compute_dtype) if keep_hidden else None,
    )
    return continue_prefill(config, params, tokens, prefilled, jnp.zeros(count, jnp.int32))


def continue_prefill(config: ModelConfig, params: Any, tokens: jax.Array, prefilled: Prefilled, start: jax.Array) -> Prefilled:
    """Runs the next places, `start` (int32 `[P]`, all the same) and on, of prompts that are partly prefilled."""
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, cache = transformer.Transformer(config).apply(
        {"params": params}, tokens, positions, attend=cached_attention(positions), cache=prefilled.cache
    )
    return Prefilled(cache, None if prefilled.hidden is None else _write_hidden(prefilled.hidden, hidden, start))


def decode_round(
    config: RoundConfig,
    strategy: Strategy,
    drafter: Drafter | None,
    params: Any,
    drafter_params: Any,
    state: RolloutState,
) -> tuple[RolloutState, Tally]:
    """Commits 1 … N tokens to each running row and tells which drafts stood, `[depth]` of them.

    Args:
        drafter: the strategy's; None exactly for a strategy that does not speculate.
        params: the target's, in engine layout.
        drafter_params: the drafter's, or None.

    Raises:
        ValueError: slots are shared and verification is not `coupled`: which drafts are looked at would bend the law.
    """
    if strategy.shares_slots and config.verification != "coupled":
        raise ValueError(
            f"verification={config.verification!r} with {strategy.name!r}: slots can be shared with 'coupled' only"
        )
    if strategy.width > 1:
        return tree_round(config, strategy, drafter, params, drafter_params, state)
    running = state.running
    if strategy.speculates:
        drafts, count, law, bad, state = draft(config, strategy, drafter, params, drafter_params, state)
    else:
        batch = state.length.shape[0]
        drafts, count, law = jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32), None
        bad = jnp.zeros(batch, bool)
    n = drafts.shape[1] + 1
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    chain = jnp.concatenate([last, drafts], axis=1)
    positions = (state.length - 1)[:, None] + jnp.arange(n, dtype=jnp.int32)
    if strategy.shares_slots:
        shares = share_out(
            jnp.full(drafts.shape, UNSURE) if law is None else law, count, running, drafts.shape[0] * strategy.verify_tokens
        )
        count = shares.drafts
        verdict, hidden, cache = shared_pass(config, params, chain, shares, state)
    else:
        hidden, cache = transformer.Transformer(config.model).apply(
            {"params": params}, chain, positions, attend=target.attention_of(config, positions), cache=state.cache
        )
        verdict = _verdict(config, params, hidden, drafts, count, law, positions + 1, state)
    with jax.named_scope("verify"):
        if config.simulate_acceptance is not None:
            verdict = _simulated(verdict, config.simulate_acceptance, count, state.request_keys, positions + 1)
        budget = jnp.where(running, state.limit - state.length, 0)
        committed, reason = verify.truncate(verdict, config.eos_ids, budget, state.ignore_eos)
    committed = jnp.where(running, committed, 0)

    # Places past what is committed lie outside the row on purpose: such writes are dropped.
    fresh = jnp.arange(n, dtype=jnp.int32)
    place = jnp.where(fresh < committed[:, None], state.length[:, None] + fresh, state.capacity)
    rows = jnp.arange(place.shape[0])[:, None]
    speculated = running.astype(jnp.int32) if strategy.speculates else jnp.zeros_like(committed)
    state = state._replace(
        tokens=state.tokens.at[rows, place].set(verdict.tokens, mode="drop"),
        log_probs=state.log_probs.at[rows, place].set(verdict.log_probs, mode="drop"),
        length=state.length + committed,
        finish_reason=jnp.where(running, reason, state.finish_reason),
        cache=cache,
        hidden=None if state.hidden is None else _write_hidden(state.hidden, hidden, state.length - 1),
        accept_passes=state.accept_passes + speculated,
        accept_tokens=state.accept_tokens + speculated * committed,
    )
    return state, tally(verdict.count - 1, count, running, bad, strategy.depth)


def _verdict(config, params, hidden, drafts, count, log_q, positions, state) -> verify.Verdict:
    where = (state.temperature, state.request_keys, positions)
    with jax.named_scope("verify"):
        if config.verification == "coupled":
            return verify.matching(*target.own_tokens(config, params, hidden, *where), drafts, count)
        return verify.rejection(transformer.logits(params, hidden), drafts, count, *where, config.law, log_q=log_q)


def tally(accepted: jax.Array, offered: jax.Array, running: jax.Array, bad: jax.Array, depth: int) -> Tally:
    """Counts of one pass. Rows that end within it count in full: a draft's worth does not depend on where the text ends.

    Args:
        accepted, offered: int32 `[B]`, leading drafts that stood, and drafts there were to look at.
        running, bad: bool `[B]`; `bad` where the drafter gave something that is not a number.
    """
    level = jnp.arange(depth, dtype=jnp.int32)
    looked = running[:, None] & (level < offered[:, None]) & (level <= accepted[:, None])
    stood = running[:, None] & (level < accepted[:, None])
    return Tally(*(jnp.sum(x, axis=0, dtype=jnp.int32) for x in (looked, stood, running & bad)))


def _simulated(verdict: verify.Verdict, acceptance: float, offered, request_keys, positions) -> verify.Verdict:
    """The verdict with leading drafts standing by coins, as far as there were any."""
    coins = noise.uniform(noise.position_keys(request_keys, positions[:, :-1], noise.Role.ACCEPT))
    stands = jnp.cumprod((coins < acceptance).astype(jnp.int32), axis=1)
    return verdict._replace(count=1 + jnp.minimum(jnp.sum(stands, axis=1), offered))


def draft(config, strategy, drafter, params, drafter_params, state):
    """The first half of a round, as `decode_round`.

    Returns:
        drafts int32 `[B, depth]`; how many of them are usable, int32 `[B]`; their law, `Proposal.log_q`, or for shared slots
        their log-chance `[B, depth]`, or None; where the drafter gave something that is not a number, bool `[B]`; the state
        with the drafter's own.
    """
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
        chances = strategy.shares_slots
        draw = verify.make_draw(config.verification, state.temperature, state.request_keys, config.law, log_chance=chances)
        proposal, own = drafter.propose(
            drafter_params, params, own, state.tokens, state.length, state.hidden, guarded(draw), strategy.depth
        )
    state = state._replace(drafter_states={**state.drafter_states, drafter.name: own})
    wrong = (proposal.tokens < 0) & (jnp.arange(strategy.depth) < proposal.count[:, None])
    bad = jnp.any(wrong, axis=1)
    count = jnp.where(bad, jnp.argmax(wrong, axis=1), proposal.count)
    law = proposal.log_q
    if strategy.shares_slots:
        law = proposal.log_chance if law is None or proposal.log_chance is not None else law[..., 0]
    return jnp.maximum(proposal.tokens, 0), count, law, bad, state


def guarded(draw: Draw) -> Draw:
    """A `Draw` that gives the id -1 where the logits are not numbers: no draft at all, instead of a plausible one."""

    def checked(logits, positions):
        ids, log_q = draw(logits, positions)
        return jnp.where(jnp.isnan(jnp.max(logits, axis=-1)), -1, ids), log_q

    return checked


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
    enough: jax.Array,
) -> tuple[RolloutState, jax.Array]:
    """Up to `rounds` (int32 `[]`) rounds of one strategy; ends early when no more than `enough` (int32 `[]`) rows run.

    Args:
        drafter_params: the parameters of the strategy's drafter, or None.
        enough: rows at which the host has something better to do: a smaller batch will do, or others wait for their place.

    Returns:
        the state and its packed summary.
    """
    drafter = drafter_or_none(strategy, drafters)

    def more(carry):
        done, state, _ = carry
        return (done < rounds) & (jnp.sum(state.running) > enough)

    def body(carry):
        done, state, counts = carry
        state, fresh = decode_round(config, strategy, drafter, params, drafter_params, state)
        return done + 1, state, counts + fresh

    done, state, counts = jax.lax.while_loop(more, body, (jnp.int32(0), state, Tally.empty(strategy.depth)))
    return state, pack_summary(state, done, counts, drafters)


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
