"""How far the policy has moved, in tokens: the share of stored tokens that it would not choose with the same noise.

Under coupled noise a token is argmax(log p + g) with g fixed by the request and the position. Read after the stored text, from
the learner's own logits, the share of positions at which that is another token measures staleness directly, in the unit in
which rollouts are used up; it is at most a few times the total variation distance, and 0 for the policy that sampled.

Shapes: `T` tokens and `U` targets of a packed row, `V` vocabulary size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adrl_jax.learner.forward import hidden_states, source_hidden
from adrl_jax.models import transformer
from adrl_jax.models.families import ModelConfig
from adrl_jax.sampling import noise
from adrl_jax.sampling.law import Law, choose
from adrl_jax.types import PackedBatch, Rollout

_TARGETS = 64  # targets whose logits exist at one time

Measure = Callable[[Any, PackedBatch, Sequence[Rollout], int], float | None]
"""`measure(params, batch, rollouts, turn) -> share`, in [0, 1], or None where the row of that turn holds no target."""


def make_measure(model_config: ModelConfig, *, seed: int, temperature: float, valid_vocab: int | None = None) -> Measure:
    """A measure that reads one packed row a call, another one each turn: one row is cheap, and turns go round.

    Args:
        seed: of the run, which names the noise.
        temperature, valid_vocab: of the sampling law.
    """
    law = Law(valid_vocab=valid_vocab)

    @jax.jit
    def differing(params, row: PackedBatch, keys: jax.Array) -> jax.Array:
        hidden = source_hidden(hidden_states(params, model_config, row), row)[0]
        count = hidden.shape[0]
        size = math.gcd(count, _TARGETS)

        def some(args):
            part, key = args
            chosen, _ = choose(transformer.logits(params, part)[:, None], jnp.full(size, temperature), key[:, None], law)
            return chosen[:, 0]

        chosen = jax.lax.map(some, (hidden.reshape(-1, size, hidden.shape[1]), keys.reshape(-1, size, 2)))
        return jnp.sum(row.target_mask[0] & (chosen.reshape(-1) != row.target_ids[0]))

    def measure(params: Any, batch: PackedBatch, rollouts: Sequence[Rollout], turn: int) -> float | None:
        used = np.flatnonzero(np.asarray(batch.target_mask).any(axis=1))
        if not len(used):
            return None
        m = int(used[turn % len(used)])
        row = jax.tree.map(lambda x: np.asarray(x)[m : m + 1], batch)
        keys = target_keys(seed, row, rollouts)
        return float(differing(params, row, keys)) / int(np.asarray(row.target_mask).sum())

    return measure


def target_keys(seed: int, row: PackedBatch, rollouts: Sequence[Rollout]) -> np.ndarray:
    """The noise of each target of a packed row: uint32 `[U, 2]`. Host code."""
    requests = noise.request_keys(
        seed,
        [r.prompt_id for r in rollouts],
        [r.visit if r.noise_visit is None else r.noise_visit for r in rollouts],
        [r.sample for r in rollouts],
    )
    owner, place = np.asarray(row.rollout_index)[0], np.asarray(row.target_index)[0]
    positions = np.asarray(row.positions)[0][place]
    return noise.position_keys(requests[owner], positions[:, None], noise.Role.TARGET)[:, 0]
