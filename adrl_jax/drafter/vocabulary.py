"""Which ids a drafter may draft: the most frequent ones of what the policy writes, then of what it reads."""

from collections.abc import Sequence

import numpy as np

from adrl_jax.types import Rollout


def choose_ids(
    rollouts: Sequence[Rollout], size: int, vocab_size: int, *, valid_vocab: int | None = None, always: Sequence[int] = ()
) -> np.ndarray:
    """A draft vocabulary.

    Args:
        rollouts: what it shall serve. Ids are ranked by their count in responses, ties by their count in prompts, then lowest
            first; so ids that no response has come in only where there is room.
        size: V', how many ids.
        vocab_size: V, of the target.
        valid_vocab: ids at or past it are never drawn and never chosen.
        always: ids that are chosen whatever their count, such as those that end a response.

    Returns:
        int32 `[V']`, distinct, ascending.

    Raises:
        ValueError: there are fewer valid ids than `size`, or more in `always`; an id of `always` is not valid.
    """
    valid = vocab_size if valid_vocab is None else min(valid_vocab, vocab_size)
    if not 1 <= size <= valid:
        raise ValueError(f"draft vocabulary size={size!r} must be in [1, {valid}], the ids that can be drawn")
    always = sorted({int(i) for i in always})
    if any(not 0 <= i < valid for i in always) or len(always) > size:
        raise ValueError(f"always={always} must be at most size={size} ids in [0, {valid})")
    counts = np.zeros((2, valid), np.int64)
    for r in rollouts:
        for row, ids in enumerate((r.response_ids, r.token_ids[: r.prompt_length])):
            counts[row] += np.bincount(ids, minlength=valid)[:valid]
    counts[0, always] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(valid), -counts[1], -counts[0]))
    return np.sort(order[:size]).astype(np.int32)


def coverage(rollouts: Sequence[Rollout], ids: np.ndarray) -> float:
    """Share of response tokens that lie in a draft vocabulary; NaN where there are none."""
    tokens = [r.response_ids for r in rollouts]
    return float(np.isin(np.concatenate(tokens), ids).mean()) if tokens else float("nan")
