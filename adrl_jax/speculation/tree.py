"""Draft trees: several candidates for each position, of which the target confirms one path.

A tree is grown level by level (Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees"): the
`width` most promising nodes of a level get `width` children each, and of everything drafted the most promising
`verify_tokens - 1` nodes are kept. What promises is the chance that the target's own tokens lead to a node; no node promises
more than its parent, so what is kept is connected.

All nodes of a level stand for the same absolute position, and share its noise g:

* `coupled`: the target will take argmax(log p + g). Children are the top-k of log q + g, and, g being known, the chance of
  each is not q. What separates the target's perturbed logits from the drafter's is the drafter's error; were that Gumbel
  noise of scale e, the chance of id x would be softmax((logits + T g) / e) at x, at any temperature T, also 0. How well a
  text is known differs: a path's chance is the mean over the scales in `DRAFT_ERRORS` of the products of its steps', weighted
  by what the row's past says about the scale (`belief`). Trees grown by log q alone are shorter than chains: likely tokens
  are not the ones that this noise picks.
* `rejection`: children are drawn from q without replacement (also the top-k of log q + g, with noise of the drafts' own), and
  which nodes are kept must not depend on what was drawn, or the law would not be the target's: chances are `RANK_CHANCES`,
  the same for every node.

Shapes: `B` rows, `W` the strategy's width, `N` nodes kept (the root, which is the last committed token, included), `M` nodes
extended at a time, `V` vocabulary. Levels count from 0, the root's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, log_law
from adrl_jax.sampling.noise import Role
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.speculation.verify import check_method

DRAFT_ERRORS = (1.6, 0.8, 0.4, 0.2)
"""Scales in logits at which the drafter's error is assumed, each half of the one before."""

_REMEMBERED = 32.0
"""Passes of a row's past that count when its drafter's error is judged."""

RANK_CHANCES = (0.75, 0.4)
"""Assumed chance that the first of a node's children stands, and that each further one does when those before it fell."""


class Tree(NamedTuple):
    """Drafted nodes of each row, parents before children, siblings side by side in the order in which they were drawn.

    Attributes:
        tokens: int32 `[B, N]`; the root's is the last committed token.
        parents: int32 `[B, N]`, each node's parent among the N; the root is its own.
        levels: int32 `[B, N]`, distance from the root.
        usable: bool `[B, N]`; other nodes may not be accepted. The root's value means nothing.
        law: int32 `[B, N]`, which of `log_q` a node's children were drawn from; None like `log_q`.
        log_q: float32 `[B, E, V]`, the laws of the nodes that were extended; None where the verifier does not need them.
        bad: bool `[B]`, the drafter gave something that is not a number; what was drafted from it is not usable.
    """

    tokens: jax.Array
    parents: jax.Array
    levels: jax.Array
    usable: jax.Array
    law: jax.Array | None
    log_q: jax.Array | None
    bad: jax.Array


class Children(NamedTuple):
    """The children of M nodes, in the order drawn.

    Attributes:
        tokens: int32 `[B, M, W]`, distinct among siblings.
        chance: float32 `[B, M, W, E]`, at most 1: the chance that the target's token after the node is this child, under each
            of E assumptions about the drafter.
        usable: bool `[B, M, W]`, false where the node's law has fewer ids than children, or is `bad`.
        log_q: float32 `[B, M, V]`, the laws drawn from, or None.
        bad: bool `[B, M]`, the node's logits are not numbers.
    """

    tokens: jax.Array
    chance: jax.Array
    usable: jax.Array
    log_q: jax.Array | None
    bad: jax.Array


Branch = Callable[[jax.Array, jax.Array], Children]
"""`branch(logits [B, M, V], positions [B])`: children at one absolute position a row. Made by `make_branch`."""


def make_branch(method: str, width: int, temperature: jax.Array, request_keys: jax.Array, law: Law) -> Branch:
    """How the children of nodes are drawn under `method`.

    Rows at temperature 0 take the most likely ids.

    Args:
        temperature: float32 `[B]`.
        request_keys: uint32 `[B, 2]`.
        law: static; the target's filters cut the drafter's law too.

    Raises:
        ValueError: the method is unknown, or (when children are drawn) the vocabulary has fewer ids than `width`.
    """
    check_method(method)
    # A law at temperature 0 is one id; the drafter's other guesses are those of temperature 1.
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    role = Role.TARGET if method == "coupled" else Role.DRAFT
    ranks = jnp.asarray(rank_chances(width), jnp.float32)[:, None]

    def perturbed(logits, positions):
        if logits.shape[-1] < width:
            raise ValueError(f"Strategy.width={width} exceeds the vocabulary of {logits.shape[-1]} ids")
        keys = noise.position_keys(request_keys, positions[:, None], role)
        return logits + temperature[:, None, None] * noise.gumbel(keys, logits.shape[-1])

    def coupled_branch(logits, positions):
        scores = perturbed(_kept(logits, scale[..., 0], law), positions)
        best, tokens = jax.lax.top_k(scores, width)
        return children(logits, best, tokens, step_chances(scores, best), None)

    def independent_branch(logits, positions):
        log_q = log_law(logits, jnp.broadcast_to(scale[..., 0], logits.shape[:-1]), law)
        best, tokens = jax.lax.top_k(perturbed(log_q * scale, positions), width)
        return children(logits, best, tokens, jnp.broadcast_to(ranks, (*best.shape, 1)), log_q)

    def children(logits, best, tokens, chance, log_q):
        bad = jnp.isnan(jnp.max(logits, axis=-1))
        return Children(tokens, chance, jnp.isfinite(best) & ~bad[..., None], log_q, bad)

    return coupled_branch if method == "coupled" else independent_branch


def step_chances(scores: jax.Array, best: jax.Array) -> jax.Array:
    """Chances that the target's perturbed maximum is where the drafter's `best` are: softmax(scores / e).

    Args:
        scores: float32 `[..., V]`, the drafter's perturbed logits.
        best: float32 `[..., W]`, some of them.

    Returns:
        float32 `[..., W, E]`, one for each e in `DRAFT_ERRORS`; 0 where nothing is known (scores that are not finite).
    """
    top = jnp.max(scores, axis=-1, keepdims=True)
    everything, some = (jnp.exp((x - top) / DRAFT_ERRORS[0]) for x in (scores, best))
    chances = []
    for _ in DRAFT_ERRORS:
        chances.append(some / jnp.sum(everything, axis=-1, keepdims=True))
        everything, some = jnp.square(everything), jnp.square(some)  # half the scale
    chances = jnp.minimum(jnp.stack(chances, axis=-1), 1.0)
    return jnp.where(chances > 0, chances, 0.0)  # a comparison with NaN is false


def belief(method: str, passes: jax.Array, committed: jax.Array, depth: int) -> jax.Array:
    """How likely each of the assumptions that chances are made under is for a row: float32 `[B, E]`, sums are 1.

    With drafts that stand with chance a = 1 / (1 + e / 2), a pass of depth D accepts m = a + … + a^D drafts on average. The
    weights are those of numbers of accepted drafts that are geometric with such means.

    Args:
        passes, committed: int32 `[B]`, speculative passes the row ran in and the tokens they committed.
        depth: static.
    """
    if method != "coupled":
        return jnp.ones((passes.shape[0], 1))
    stands = 1 / (1 + 0.5 * np.asarray(DRAFT_ERRORS))
    mean = np.sum(stands ** np.arange(1, depth + 1)[:, None], axis=0)
    failed = passes.astype(jnp.float32)[:, None]
    accepted = jnp.maximum(committed - passes, 0).astype(jnp.float32)[:, None]
    evidence = accepted * np.log(mean / (1 + mean)) - failed * np.log(1 + mean)
    return jax.nn.softmax(evidence * jnp.minimum(_REMEMBERED / jnp.maximum(failed, 1.0), 1.0), axis=-1)


def rank_chances(width: int) -> np.ndarray:
    """Chances of a node's first, second, … child where the draws themselves may not be looked at: float64 `[W]`."""
    first, later = RANK_CHANCES
    missed = (1 - first) * (1 - later) ** np.arange(width - 1)
    return np.concatenate([[first], missed * later])


def _kept(logits: jax.Array, temperature: jax.Array, law: Law) -> jax.Array:
    """Logits, float32, -inf where the law is cut."""
    logits = logits.astype(jnp.float32)
    if law.filtered:
        return jnp.where(log_law(logits, jnp.broadcast_to(temperature, logits.shape[:-1]), law) > -jnp.inf, logits, -jnp.inf)
    if law.valid_vocab is None:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < law.valid_vocab, logits, -jnp.inf)


class _Beam(NamedTuple):
    """The nodes of one level that are extended: tokens, chances of their paths (`[B, W, E]`), parents within the beam before,
    and places in the pool of everything drafted, each `[B, W]`."""

    tokens: jax.Array
    chance: jax.Array
    parents: jax.Array
    places: jax.Array


def draft_tree(
    first_logits: jax.Array,
    step: Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
    carry: Any,
    last: jax.Array,
    length: jax.Array,
    branch: Branch,
    weights: jax.Array,
    strategy: Strategy,
) -> tuple[Tree, Any]:
    """Grows and prunes a tree.

    Args:
        first_logits: `[B, V]` for absolute position `length`, the root's children.
        step: `(carry, tokens [B, W], parents [B, W], index []) -> (logits [B, W, V], carry)`: feeds the nodes of level
            `index + 1` that are extended. `parents` says which of the W nodes fed before is each one's parent (0, for all,
            at the first call).
        carry: any pytree of arrays of fixed shapes.
        last: int32 `[B]`, the last committed token.
        length: int32 `[B]`, tokens committed.
        weights: float32 `[B, E]`, of the assumptions that chances are made under, see `belief`.
        strategy: depth, width and verify_tokens.
    """
    batch, (depth, width) = last.shape[0], (strategy.depth, strategy.width)
    first = branch(first_logits[:, None], length)
    at_root = jnp.zeros((batch, width), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(1, width + 1, dtype=jnp.int32), (batch, width))
    beam = _Beam(first.tokens[:, 0], weights[:, None] * first.chance[:, 0], at_root, places)

    def flat(x):
        return x.reshape(batch, width * width, *x.shape[3:])

    def grow(state, index):
        carry, beam = state
        logits, carry = step(carry, beam.tokens, beam.parents, index)
        found = branch(logits, length + index + 1)
        # Factors up to 1 never make a number larger, nor a sum of such numbers, rounding or not.
        tokens, chance = flat(found.tokens), flat(beam.chance[:, :, None] * found.chance)
        parents = jnp.repeat(beam.places, width, axis=1)
        promise = jnp.sum(chance, axis=-1)
        at = jax.lax.top_k(promise, width)[1]
        chance = jnp.take_along_axis(chance, at[..., None], axis=1)
        place = 1 + width + index * width * width + at
        beam = _Beam(jnp.take_along_axis(tokens, at, axis=1), chance, at // width, place)
        bad = jnp.any(found.bad, axis=1)
        return (carry, beam), (tokens, promise, flat(found.usable), parents, beam.places, found.log_q, bad)

    pool = [last[:, None], jnp.full((batch, 1), jnp.inf), jnp.zeros((batch, 1), bool), at_root[:, :1]]
    pool = [
        jnp.concatenate([root, x], axis=1)
        for root, x in zip(pool, (first.tokens[:, 0], jnp.sum(beam.chance, axis=-1), first.usable[:, 0], at_root))
    ]
    extended, log_q, bad = [at_root[:, :1], places], first.log_q, first.bad[:, 0]
    if depth > 1:
        steps = jnp.arange(depth - 1, dtype=jnp.int32)
        (carry, _), (*more, beams, more_q, more_bad) = jax.lax.scan(grow, (carry, beam), steps)
        join = lambda x: x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:])  # noqa: E731
        pool = [jnp.concatenate([x, join(y)], axis=1) for x, y in zip(pool, more)]
        extended.append(join(beams))
        bad |= jnp.any(more_bad, axis=0)
        log_q = None if log_q is None else jnp.concatenate([log_q, join(more_q)], axis=1)

    tokens, promise, usable, parents = pool
    kept, parents = select(promise, parents, strategy.verify_tokens)
    levels = jnp.asarray(np.repeat(np.arange(depth + 1), [1, width] + [width * width] * (depth - 1)), jnp.int32)
    law = None
    if log_q is not None:
        extended = jnp.concatenate(extended, axis=1)[:, : log_q.shape[1]]  # the last level's beam is not extended
        rows = jnp.arange(batch)[:, None]
        law = jnp.zeros(tokens.shape, jnp.int32).at[rows, extended].set(jnp.arange(log_q.shape[1], dtype=jnp.int32))
        law = jnp.take_along_axis(law, kept, axis=1)
    tokens, usable = (jnp.take_along_axis(x, kept, axis=1) for x in (tokens, usable))
    return Tree(tokens, parents, levels[kept], usable, law, log_q, bad), carry


def select(promise: jax.Array, parents: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` (static) most promising nodes.

    Args:
        promise: float32 `[B, P]`, for no node more than for its parent; the root, node 0, has most.
        parents: int32 `[B, P]`, each less than the node's own index; the root's is 0.

    Returns:
        The nodes kept, int32 `[B, count]`, ascending, and their parents among them, int32 `[B, count]`. Of equal nodes the
        first are kept, so that no node is kept without its parent.
    """
    kept = jnp.sort(jax.lax.top_k(promise, count)[1], axis=1)
    rows = jnp.arange(kept.shape[0])[:, None]
    renamed = jnp.zeros_like(parents).at[rows, kept].set(jnp.arange(count, dtype=jnp.int32))
    return kept, jnp.take_along_axis(renamed, jnp.take_along_axis(parents, kept, axis=1), axis=1)


def ancestors(parents: jax.Array, depth: int) -> jax.Array:
    """Which nodes lie on the way from the root to each node, both included: bool `[B, N, N]` of parents `[B, N]`."""
    count = parents.shape[1]
    itself = jnp.eye(count, dtype=bool)[None]
    on_path = jnp.broadcast_to(itself, (parents.shape[0], count, count))
    for _ in range(depth):
        on_path = itself | jnp.take_along_axis(on_path, parents[..., None], axis=1)
    return on_path
