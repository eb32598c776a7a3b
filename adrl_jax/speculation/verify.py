"""Deciding which drafts stand, so that what comes out is distributed exactly as the target's own law.

`coupled` (Daliri, Musco and Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding"): the
target's token at absolute position t is argmax(log p + g) with noise g that only depends on the request and t; a draft stands
when it is that token. The output is, token for token, what plain decoding gives, whatever was drafted.

`rejection` (Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding"): a draft x ~ q
stands with probability min(1, p(x) / q(x)); the first that falls is replaced by a draw from max(p - q, 0), renormalised.
The output has the law of the target but depends on the drafts.

Shapes: `B` rows, `N` positions of one verify pass (N - 1 drafts and the target's own token), `V` vocabulary size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, choose, log_law, race
from adrl_jax.sampling.noise import Role
from adrl_jax.speculation.drafter import Draw
from adrl_jax.types import FinishReason

METHODS = ("coupled", "rejection")


class Verdict(NamedTuple):
    """What one verify pass commits.

    Attributes:
        tokens: int32 `[B, N]`; the first `count` of a row are committed, the rest means nothing.
        log_probs: float32 `[B, N]`, log p of each token under the *target's* law, also for accepted drafts and residual draws.
        count: int32 `[B]`, accepted drafts plus the target's own token, 1 … N.
    """

    tokens: jax.Array
    log_probs: jax.Array
    count: jax.Array


def check_method(method: str) -> None:
    """Raises ValueError for an unknown verification method."""
    if method not in METHODS:
        raise ValueError(f"verification={method!r} is unknown; choose one of {', '.join(METHODS)}")


def make_draw(method: str, temperature: jax.Array, request_keys: jax.Array, law: Law, *, log_chance: bool = False) -> Draw:
    """How a drafter draws from its own logits under `method`, at the request's temperature and filters.

    Args:
        temperature: float32 `[B]`.
        request_keys: uint32 `[B, 2]`.
        log_chance: with `coupled`, that `log_q` is `[B, 1, 1]`, of the id that was drawn alone, instead of None.
    """
    check_method(method)

    def coupled_draw(logits, positions):
        keys = noise.position_keys(request_keys, positions, Role.TARGET)
        ids, log_probs = choose(logits, temperature, keys, law)
        return ids, log_probs[..., None] if log_chance else None

    def independent_draw(logits, positions):
        keys = noise.position_keys(request_keys, positions, Role.DRAFT)
        log_q = log_law(logits, jnp.broadcast_to(temperature[:, None], positions.shape), law)
        return race(log_q, keys), log_q

    return coupled_draw if method == "coupled" else independent_draw


def coupled(
    logits: jax.Array,
    drafts: jax.Array,
    draft_count: jax.Array,
    temperature: jax.Array,
    request_keys: jax.Array,
    positions: jax.Array,
    law: Law,
) -> Verdict:
    """Keeps drafts as long as they are what the target draws itself.

    Args:
        logits: `[B, N, V]`, the target's logits for the tokens at `positions`.
        drafts: int32 `[B, N - 1]`, for the first N - 1 positions.
        draft_count: int32 `[B]`, usable drafts.
        temperature: float32 `[B]`.
        request_keys: uint32 `[B, 2]`.
        positions: int32 `[B, N]`, absolute position of each token being chosen.
        law: static.
    """
    keys = noise.position_keys(request_keys, positions, Role.TARGET)
    return matching(*choose(logits, temperature, keys, law), drafts, draft_count)


def matching(tokens: jax.Array, log_probs: jax.Array, drafts: jax.Array, draft_count: jax.Array) -> Verdict:
    """`coupled` once the target's own tokens (int32 `[B, N]`) and their log-probs are known."""
    stands = (tokens[:, :-1] == drafts) & _usable(drafts, draft_count)
    return Verdict(tokens, log_probs, _leading(stands) + 1)


def rejection(
    logits: jax.Array,
    drafts: jax.Array,
    draft_count: jax.Array,
    temperature: jax.Array,
    request_keys: jax.Array,
    positions: jax.Array,
    law: Law,
    log_q: jax.Array | None = None,
) -> Verdict:
    """Speculative sampling with the residual law.

    Args:
        log_q: float32 `[B, N - 1, V]`, the law each draft was really drawn from (filters and temperature included). None
            means that drafts are deterministic: q is one-hot at the draft.

    Other arguments as in `coupled`.
    """
    log_p = log_law(logits, jnp.broadcast_to(temperature[:, None], positions.shape), law)
    log_p_draft = jnp.take_along_axis(log_p[:, :-1], drafts[..., None], axis=-1)[..., 0]
    coins = noise.uniform(noise.position_keys(request_keys, positions[:, :-1], Role.ACCEPT))
    if log_q is None:
        q_draft = jnp.ones_like(log_p_draft)
    else:
        q_draft = jnp.exp(jnp.take_along_axis(log_q, drafts[..., None], axis=-1)[..., 0])
    # u < p / q without the division: u * q < p is false for p = 0 and true for q = 0 < p.
    stands = (coins * q_draft < jnp.exp(log_p_draft)) & _usable(drafts, draft_count)
    accepted = _leading(stands)

    # The target's own token: the residual law where a draft fell, the target's law where none was left.
    last = accepted[:, None, None]
    log_p_last = jnp.take_along_axis(log_p, last, axis=1)[:, 0]
    fell = accepted < draft_count
    p_last = jnp.exp(log_p_last)
    if drafts.shape[1] == 0:
        q_last = jnp.zeros_like(p_last)
    elif log_q is None:
        fallen = jnp.take_along_axis(drafts, jnp.minimum(accepted, drafts.shape[1] - 1)[:, None], axis=1)
        q_last = (jnp.arange(p_last.shape[-1]) == fallen).astype(jnp.float32)
    else:
        q_last = jnp.exp(jnp.take_along_axis(log_q, jnp.minimum(last, drafts.shape[1] - 1), axis=1)[:, 0])
    residual = jnp.maximum(p_last - q_last, 0.0)
    # Where p <= q everywhere (p = q up to rounding) nothing is left over and any draw from p is right.
    use_residual = fell & (jnp.max(residual, axis=-1) > 0)
    weights = jnp.where(use_residual[:, None], jnp.log(residual), log_p_last)
    place = jnp.take_along_axis(positions, accepted[:, None], axis=1)
    residual_keys = noise.position_keys(request_keys, place, Role.RESIDUAL)[:, 0]
    target_keys = noise.position_keys(request_keys, place, Role.TARGET)[:, 0]
    own = race(
        weights - jnp.max(weights, axis=-1, keepdims=True),
        jnp.where(fell[:, None], residual_keys, target_keys),
    )
    own_log_prob = jnp.take_along_axis(log_p_last, own[:, None], axis=-1)

    is_last = jnp.arange(positions.shape[1]) == accepted[:, None]
    tokens = jnp.where(is_last, own[:, None], jnp.pad(drafts, ((0, 0), (0, 1))))
    log_probs = jnp.where(is_last, own_log_prob, jnp.pad(log_p_draft, ((0, 0), (0, 1))))
    return Verdict(tokens.astype(jnp.int32), log_probs, accepted + 1)


def truncate(
    verdict: Verdict, eos_ids: tuple[int, ...], budget: jax.Array, ignore_eos: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Ends rows exactly where plain decoding ends them: at the first end token, else at the budget.

    Args:
        eos_ids: tokens that end a response (and belong to it).
        budget: int32 `[B]`, tokens the row may still commit; 0 for finished rows.
        ignore_eos: bool `[B]`.

    Returns:
        count int32 `[B]`, tokens of the verdict that are committed, and `FinishReason` values int32 `[B]`. An end token on
        the budget's last place is a stop; one past it was never generated.
    """
    places = jnp.arange(verdict.tokens.shape[1], dtype=jnp.int32)
    within = places < jnp.minimum(verdict.count, budget)[:, None]
    is_end = jnp.zeros_like(within)
    for end in eos_ids:
        is_end |= verdict.tokens == end
    is_end &= within & ~ignore_eos[:, None]
    stopped = jnp.any(is_end, axis=1)
    capped = jnp.minimum(verdict.count, budget)
    count = jnp.where(stopped, jnp.argmax(is_end, axis=1) + 1, capped)
    reason = jnp.where(
        stopped, FinishReason.STOP, jnp.where(verdict.count >= budget, FinishReason.LENGTH, FinishReason.RUNNING)
    )
    return count.astype(jnp.int32), reason.astype(jnp.int32)


def _usable(drafts: jax.Array, draft_count: jax.Array) -> jax.Array:
    return jnp.arange(drafts.shape[1]) < draft_count[:, None]


def _leading(stands: jax.Array) -> jax.Array:
    """How many leading entries of each row are true: bool `[B, K]` -> int32 `[B]`."""
    return jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
