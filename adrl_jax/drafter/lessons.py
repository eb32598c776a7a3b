"""From samples with hidden states to packed lessons and back: where in a row each response's states lie.

Shapes: `M` rows, `T` tokens a row, `U` targets a row, `C` channels of hidden states, `R` response tokens.
"""

from collections.abc import Sequence

import jax
import numpy as np

from adrl_jax.drafter.buffer import Sample
from adrl_jax.drafter.warmup import Lesson
from adrl_jax.learner import packing
from adrl_jax.learner.attention import Reach
from adrl_jax.types import PackedBatch


def pack_samples(
    samples: Sequence[Sample], *, rows: int, row_length: int, layout: str = "plain", target_multiple: int | None = None
) -> Lesson:
    """One lesson of samples, every sequence a segment of its own: nothing leaks from one to the next.

    Args:
        samples: of one version and one temperature.
        rows: M; fewer filled ones are padded with empty ones.
        row_length: T.
        layout: see `learner.packing`.
        target_multiple: U is the number of targets of the fullest row, rounded up to a multiple of this; None: U = T, so that
            all lessons have one shape.

    Raises:
        ValueError: no samples, more than one version or temperature, or more than fits.
    """
    kinds = {(s.version, s.rollout.sampling.temperature) for s in samples}
    if len(kinds) != 1:
        raise ValueError(f"a lesson needs samples of one version and temperature, got {sorted(kinds)}")
    ((version, temperature),) = kinds
    rollouts = [s.rollout for s in samples]
    batch = packing.pack(
        rollouts,
        [0.0] * len(rollouts),
        row_length=row_length,
        layout=layout,
        target_multiple=row_length if target_multiple is None else target_multiple,
        version=version,
    )
    filled = np.flatnonzero(batch.segment_ids.any(axis=1))
    if len(filled) > rows:
        raise ValueError(f"{len(samples)} samples fill {len(filled)} rows of row_length={row_length}, more than rows={rows}")
    batch = jax.tree.map(lambda x: _rows(x, filled, rows), batch)
    hidden = np.zeros((rows, row_length, samples[0].hidden.shape[1]), samples[0].hidden.dtype)
    log_probs = np.zeros(batch.log_probs.shape, np.float32)
    for i, (row, places) in enumerate(places_of(batch, len(samples))):
        # The last token's state predicts nothing that is known.
        hidden[row, places[:-1]] = samples[i].hidden
        log_probs[row, batch.target_mask[row] & (batch.rollout_index[row] == i)] = samples[i].log_probs
    return Lesson(batch, hidden, temperature, Reach(), log_probs, version)


def _rows(x: np.ndarray, chosen: np.ndarray, rows: int) -> np.ndarray:
    out = np.zeros((rows, *x.shape[1:]), x.dtype)
    out[: len(chosen)] = x[chosen]
    return out


def places_of(batch: PackedBatch, rollouts: int) -> list[tuple[int, np.ndarray]]:
    """Where each rollout of a batch lies: its row, and the places of its tokens, prompt first, int `[n]`."""
    found = []
    for i in range(rollouts):
        (row,) = set(np.nonzero(batch.target_mask & (batch.rollout_index == i))[0].tolist())
        response = batch.target_index[row, batch.target_mask[row] & (batch.rollout_index[row] == i)]
        segment = batch.segment_ids[row, response[0]]
        prompt = np.flatnonzero((batch.segment_ids[row] == segment) & (batch.branch_ids[row] == 0))
        found.append((row, np.concatenate([prompt, response])))
    return found


def unpack_hidden(batch: PackedBatch, hidden: np.ndarray, rollouts: int) -> list[np.ndarray]:
    """Hidden states `[M, T, C]` of a packed batch as one array `[n - 1, C]` a rollout: what `Sample` takes.

    This is how a learner's forward pass, which runs anyway, refreshes what the buffer holds.
    """
    batch, hidden = jax.tree.map(np.asarray, (batch, hidden))
    return [hidden[row, places[:-1]] for row, places in places_of(batch, rollouts)]
