"""Stale rollouts made exact rollouts of the serving policy, for the price of one pass and a suffix.

Under `coupled` verification a response is a function of the weights and of the request's noise. So an earlier response to the
same request is a draft like any other: one pass of the serving policy over all of it tells, at each position, the token that
this policy draws there with the same noise. The draft stands up to the first position that differs; that token is replaced
and ordinary rounds go on from there. What comes out is, token for token, what a fresh request would get.

It is a sample of the serving policy as long as no update between the two policies has learnt from that rollout: a consumed
rollout is never refreshed. Whether to refresh must not depend on the rollout (its disagreement, length or reward): each
selects. See `runtime.refreshing`.

Shapes: `P` rows, `W` places of a row, `H` hidden size, `V` vocabulary size.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models import transformer
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, choose
from adrl_jax.types import FinishReason, Request, Rollout

_PLACES = 32  # logits of so many places of each row exist at one time


class Known(NamedTuple):
    """What is known of a response before its request gets a row.

    Attributes:
        token_ids: int32 `[K]`, response tokens that the serving policy draws.
        log_probs: float32 `[K]`, of each.
        kept: how many of them are the draft's.
        differing: places of the whole draft, read after the draft's own text, at which the serving policy draws another token.
        finish_reason: `RUNNING` where the response goes on from here.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    kept: int
    differing: int
    finish_reason: FinishReason


def requests_for(rollouts: Sequence[Rollout], requests: Sequence[Request]) -> list[Request]:
    """The rollouts' own requests with the rollouts as drafts.

    Raises:
        ValueError: a rollout is not of its request.
    """
    out = []
    for i, (r, q) in enumerate(zip(rollouts, requests, strict=True)):
        if (r.prompt_id, r.visit, r.sample, r.noise_visit) != (q.prompt.prompt_id, q.visit, q.sample, q.noise_visit):
            raise ValueError(f"rollout {i} is of prompt {r.prompt_id}, not of its request's, {q.prompt.prompt_id}")
        out.append(dataclasses.replace(q, draft=r.response_ids))
    return out


def choices(
    law: Law,
    params: Any,
    hidden: jax.Array,
    first: jax.Array,
    request_keys: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The token that the serving policy draws after each place, and its log-prob.

    Args:
        law: static.
        params: the target's, in engine layout.
        hidden: `[P, W, H]`, its hidden states at places 0 … W - 1.
        first: int32 `[]`, places before it are of no interest and left out.
        request_keys: uint32 `[P, 2]`.
        temperature: float32 `[P]`.

    Returns:
        int32 and float32 `[P, W]`; entry t is of the token at position t + 1.
    """
    rows, width, size = hidden.shape
    places = math.gcd(width, _PLACES)

    def some(start, part):
        positions = jnp.broadcast_to(start + 1 + jnp.arange(places, dtype=jnp.int32), (rows, places))
        keys = noise.position_keys(request_keys, positions, noise.Role.TARGET)
        return choose(transformer.logits(params, part), temperature, keys, law)

    def one(args):
        index, part = args
        none = jnp.zeros((rows, places), jnp.int32), jnp.zeros((rows, places), jnp.float32)
        start = index * places
        return jax.lax.cond(start + places > first, functools.partial(some, start), lambda part: none, part)

    parts = hidden.reshape(rows, width // places, places, size).swapaxes(0, 1)
    tokens, log_probs = jax.lax.map(one, (jnp.arange(width // places, dtype=jnp.int32), parts))
    return tokens.swapaxes(0, 1).reshape(rows, width), log_probs.swapaxes(0, 1).reshape(rows, width)


def judge(request: Request, tokens: np.ndarray, log_probs: np.ndarray, eos_ids: Sequence[int]) -> Known:
    """How much of a request's draft stands. Host code.

    Args:
        tokens, log_probs: `[W]`, a row of `choices`.
    """
    draft, begin = np.asarray(request.draft, np.int32), len(request.prompt.token_ids) - 1
    own = tokens[begin : begin + len(draft)]
    different = np.flatnonzero(own != draft)
    kept = int(different[0]) if len(different) else len(draft)
    count = min(kept + 1, len(draft))  # the first token that differs is the serving policy's, and known too
    ends = count == request.max_new_tokens
    stops = not request.forced_length and int(own[count - 1]) in eos_ids
    reason = FinishReason.STOP if stops else FinishReason.LENGTH if ends else FinishReason.RUNNING
    spoken = log_probs[begin : begin + count].astype(np.float32)
    return Known(own[:count].astype(np.int32), spoken, kept, len(different), reason)


def check_drafts(requests: Sequence[Request], verification: str) -> None:
    """Raises ValueError for a draft that cannot be verified, before anything is compiled."""
    for r in requests:
        if r.draft is None:
            continue
        name = f"prompt {r.prompt.prompt_id}"
        if verification != "coupled":
            raise ValueError(f"{name} has a draft, but verification={verification!r}: only coupled noise can be verified again")
        if not 1 <= len(r.draft) <= r.max_new_tokens:
            raise ValueError(f"{name} has a draft of {len(r.draft)} tokens; 1 to max_new_tokens={r.max_new_tokens} are legal")
