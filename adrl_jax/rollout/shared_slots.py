"""A verify pass whose slots are shared out over the rows by what each further draft is expected to gain.

Equal shares verify as many drafts of a row that the drafter is unsure about as of one that it is sure about. Here the batch
has one total, `verify_tokens` a row on average: every running row gets the slot of its last committed token, and the rest go
to the drafts that most likely stand with all before them, by the drafter's own law (TETRIS, arXiv 2502.15197). A draft's
chance never exceeds that of the draft before it, so what is chosen of a row is always the beginning of its chain.

Which drafts are verified changes nothing about what is committed, for coupled verification: it only moves the place at which
a row stops.

Shapes: `B` rows, `N` depth + 1, `P` slots of the pass, `B * verify_tokens`; `H` hidden size.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from adrl_jax.models import transformer
from adrl_jax.models.kv_cache import KVCache
from adrl_jax.rollout import target
from adrl_jax.rollout.state import RolloutState
from adrl_jax.speculation import verify

if TYPE_CHECKING:
    from adrl_jax.rollout.round import RoundConfig

UNSURE = -0.1
"""Log-chance of each draft of a drafter that has no law: all rows are worth the same, shallow drafts more than deep ones."""


class Shares(NamedTuple):
    """Who got which slot.

    Attributes:
        rows, places: int32 `[P]`, row and place in the row's chain (0 is the last committed token) of every slot.
        drafts: int32 `[B]`, drafts of each row that are verified.
    """

    rows: jax.Array
    places: jax.Array
    drafts: jax.Array


def share_out(log_chance: jax.Array, count: jax.Array, running: jax.Array, slots: int) -> Shares:
    """Gives `slots` (static) slots to the likeliest drafts.

    Args:
        log_chance: float32 `[B, N - 1]`, of each draft given those before it; <= 0.
        count: int32 `[B]`, usable drafts.
        running: bool `[B]`; other rows get a slot only where there are too many.
    """
    batch, depth = log_chance.shape
    usable = (jnp.arange(depth) < count[:, None]) & running[:, None]
    together = jnp.cumsum(jnp.minimum(log_chance.astype(jnp.float32), 0.0), axis=1)
    worth = jnp.where(usable, jnp.maximum(together, -1e30), -jnp.inf)
    worth = jnp.concatenate([jnp.where(running, 1.0, -jnp.inf)[:, None], worth], axis=1)
    found, flat = jax.lax.top_k(worth.ravel(), slots)
    rows, places = flat // (depth + 1), flat % (depth + 1)
    drafts = jnp.zeros(batch, jnp.int32).at[rows].add(((places > 0) & (found > -jnp.inf)).astype(jnp.int32))
    return Shares(rows.astype(jnp.int32), places.astype(jnp.int32), drafts)


def shared_pass(
    config: "RoundConfig", params: Any, chain: jax.Array, shares: Shares, state: RolloutState
) -> tuple[verify.Verdict, jax.Array, KVCache]:
    """Runs the chosen tokens through the target and keeps drafts as long as they are what it draws itself.

    Projections run over the slots alone; attention over all places of all rows, where those without a slot are blank.

    Args:
        chain: int32 `[B, N]`, the last committed token and the drafts.
        shares: see `share_out`.

    Returns:
        the verdict `[B, N]`, hidden states `[B, N, H]` (0 where there was no slot), and the cache.
    """
    rows, places = shares.rows, shares.places
    positions = (state.length - 1)[:, None] + jnp.arange(chain.shape[1], dtype=jnp.int32)
    grid_attention = target.attention_of(config, positions)

    def on_grid(x):
        return jnp.zeros((*chain.shape, *x.shape[2:]), x.dtype).at[rows, places].set(x[0])

    def attend(q, k, v, **where):
        out, cache = grid_attention(*map(on_grid, (q, k, v)), **where)
        return out[rows, places][None], cache

    hidden, cache = transformer.Transformer(config.model).apply(
        {"params": params}, chain[rows, places][None], positions[rows, places][None], attend=attend, cache=state.cache
    )
    with jax.named_scope("verify"):
        where = (state.temperature[rows], state.request_keys[rows], positions[rows, places][:, None] + 1)
        own = target.own_tokens(config, params, hidden[0][:, None], *where)
        verdict = verify.matching(*(on_grid(x.T) for x in own), chain[:, 1:], shares.drafts)
    return verdict, on_grid(hidden), cache
