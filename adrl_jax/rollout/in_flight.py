"""New weights for running requests: which token came from which version, and the cache computed anew.

Shapes: `B` rows, `S` token capacity a row.
"""

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.models import transformer
from adrl_jax.models.families import ModelConfig
from adrl_jax.models.kv_cache import cached_attention, write_rows
from adrl_jax.rollout.state import RolloutState, forget


class Versions:
    """Which version drew which tokens of which request.

    A request that ran while weights were swapped has one mark a swap: the length it had, and the version until then.
    """

    def __init__(self):
        self._marks: dict[int, list[tuple[int, int]]] = {}

    def mark(self, requests: np.ndarray, lengths: np.ndarray, version: int) -> None:
        """Up to `lengths` tokens of these requests are of `version` or earlier ones."""
        for request, length in zip(requests.tolist(), lengths.tolist()):
            self._marks.setdefault(request, []).append((length, version))

    def restart(self, request: int, length: int, version: int) -> None:
        """All that is known of a request, `length` tokens, is of `version`, whatever was marked before."""
        self._marks[request] = [(length, version)]

    def of(self, request: int, prompt_length: int, length: int, current: int) -> np.ndarray:
        """The version of each response token, int32 `[length - prompt_length]`; forgets the request."""
        out = np.full(length, current, np.int32)
        for end, version in reversed(self._marks.pop(request, [])):
            out[:end] = version
        return out[prompt_length:]


def rewrite(config: ModelConfig, width: int, params, state: RolloutState, start: jax.Array) -> RolloutState:
    """Computes the cache (and hidden states) of places `start … start + width - 1` of all rows from their tokens.

    Places at or past a row's `length - 1` get entries that mean nothing, as ever. Drafters forget theirs and catch up.

    Args:
        width: static; `start + width` must not pass the capacity.
        start: int32 `[]`. Called for 0, width, 2 width, … in order.
    """
    batch = state.length.shape[0]
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, width, axis=1)
    positions = jnp.broadcast_to(start + jnp.arange(width, dtype=jnp.int32), (batch, width))
    hidden, cache = transformer.Transformer(config).apply(
        {"params": params}, tokens, positions, attend=cached_attention(positions), cache=state.cache
    )
    rows = jnp.arange(batch)
    return state._replace(
        cache=cache,
        hidden=None if state.hidden is None else write_rows(state.hidden, hidden, jnp.full(batch, start), 1),
        drafter_states={name: forget(s, rows) for name, s in state.drafter_states.items()},
    )
