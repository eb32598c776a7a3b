"""One decoding round with a draft tree: draft -> verify -> commit. The sibling of `round.decode_round` for chains.

Shapes: `B` rows, `S` token capacity a row, `N` nodes of a tree (`verify_tokens`), `D` its depth, `V` vocabulary size.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from adrl_jax.models import kernel_attention, transformer
from adrl_jax.models.kv_cache import TreeCache, commit_path, init_cache, tree_attention, write_rows
from adrl_jax.rollout import target
from adrl_jax.rollout.state import RolloutState, Tally
from adrl_jax.speculation import verify, verify_tree
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.eagle import Eagle
from adrl_jax.speculation.eagle_tree import propose_tree
from adrl_jax.speculation.strategy import Strategy
from adrl_jax.speculation.tree import Tree, ancestors, belief, make_branch

if TYPE_CHECKING:
    from adrl_jax.rollout.round import RoundConfig


def check_tree(strategy: Strategy, drafter: Drafter) -> None:
    """Raises ValueError where a drafter cannot draft the strategy's trees."""
    if not isinstance(drafter, Eagle):
        raise ValueError(
            f"strategy {strategy.name!r} has width={strategy.width}, but the drafter {drafter.name!r} drafts chains (width=1); "
            "only EAGLE drafters draft trees"
        )


def tree_round(
    config: "RoundConfig",
    strategy: Strategy,
    drafter: Drafter,
    params: Any,
    drafter_params: Any,
    state: RolloutState,
) -> tuple[RolloutState, Tally]:
    """Commits 1 … D + 1 tokens to each running row and tells which levels were looked at and which stood.

    Up to D + 1 cache entries a row are written, from slot `length - 1` on, although N nodes are verified.

    Args:
        config, params, drafter_params: as in `round.decode_round`.
        strategy: of width 2 or more, or a chain.

    Raises:
        ValueError: the drafter drafts no trees, or acceptance is to be simulated.
    """
    check_tree(strategy, drafter)
    if config.simulate_acceptance is not None:
        raise ValueError(
            f"simulate_acceptance={config.simulate_acceptance} is for chains: {strategy.name!r} has width={strategy.width}"
        )
    running = state.running
    with jax.named_scope("draft"):
        tree, state = _draft(config, strategy, drafter, params, drafter_params, state)

    root = state.length - 1
    positions = root[:, None] + tree.levels
    sees = ancestors(tree.parents, strategy.depth)
    if config.kernels == "xla":
        attend = tree_attention(positions, root, sees, positions, 0)
        cache = TreeCache(state.cache, init_cache(config.model, *tree.tokens.shape))
    else:
        attend = kernel_attention.tree_attention(positions, root, sees, config.kernels)
        cache = TreeCache(state.cache, kernel_attention.empty_nodes(config.model))
    model = transformer.Transformer(config.model)
    hidden, cache = model.apply({"params": params}, tree.tokens, positions, attend=attend, cache=cache)
    with jax.named_scope("verify"):
        if config.verification == "coupled":
            chosen = state.length[:, None] + tree.levels
            own = target.own_tokens(config, params, hidden, state.temperature, state.request_keys, chosen)
            walk = verify_tree.matching(*own, tree, strategy)
        else:
            logits = transformer.logits(params, hidden)
            walk = verify_tree.rejection(
                logits, tree, strategy, state.temperature, state.request_keys, state.length, config.law
            )
        budget = jnp.where(running, state.limit - state.length, 0)
        committed, reason = verify.truncate(walk.verdict, config.eos_ids, budget, state.ignore_eos)
    committed = jnp.where(running, committed, 0)

    # Places past what is committed lie outside the row on purpose: such writes are dropped.
    fresh = jnp.arange(strategy.depth + 1, dtype=jnp.int32)
    place = jnp.where(fresh < committed[:, None], state.length[:, None] + fresh, state.capacity)
    rows = jnp.arange(place.shape[0])[:, None]
    speculated = running.astype(jnp.int32)
    state = state._replace(
        tokens=state.tokens.at[rows, place].set(walk.verdict.tokens, mode="drop"),
        log_probs=state.log_probs.at[rows, place].set(walk.verdict.log_probs, mode="drop"),
        length=state.length + committed,
        finish_reason=jnp.where(running, reason, state.finish_reason),
        cache=_commit(config, cache, walk, root, committed),
        hidden=write_rows(state.hidden, jnp.take_along_axis(hidden, walk.path[..., None], axis=1), root, 1),
        accept_passes=state.accept_passes + speculated,
        accept_tokens=state.accept_tokens + speculated * committed,
    )
    return state, _tally(walk, running, tree.bad)


def _commit(config, cache, walk, root, committed):
    if config.kernels == "xla":
        return commit_path(cache, walk.path, root)
    return kernel_attention.commit_path(cache, walk.path, root, committed, config.kernels)


def _draft(config, strategy, drafter, params, drafter_params, state) -> tuple[Tree, RolloutState]:
    own = drafter.advance(
        drafter_params,
        params,
        state.drafter_states[drafter.name],
        state.tokens,
        state.length,
        state.hidden,
        strategy.depth + 1,
    )
    branch = make_branch(config.verification, strategy.width, state.temperature, state.request_keys, config.law)
    weights = belief(config.verification, state.accept_passes, state.accept_tokens, strategy.depth)
    tree = propose_tree(drafter, drafter_params, params, own, state.tokens, state.length, branch, weights, strategy)
    return tree, state._replace(drafter_states={**state.drafter_states, drafter.name: own})


def _tally(walk: verify_tree.Walk, running: jax.Array, bad: jax.Array) -> Tally:
    """Rows that end within the pass count in full: a draft's worth does not depend on where the text ends."""
    stood = jnp.arange(walk.examined.shape[1]) < (walk.verdict.count - 1)[:, None]
    counts = (walk.examined & running[:, None], stood & running[:, None], running & bad)
    return Tally(*(jnp.sum(x, axis=0, dtype=jnp.int32) for x in counts))
