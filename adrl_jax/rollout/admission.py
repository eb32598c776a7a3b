"""Which prompts go through the target together. Host code on numpy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adrl_jax.rollout.settings import EngineConfig, round_up
from adrl_jax.types import Request


class Part(NamedTuple):
    """Prompts of one prefill program.

    Attributes:
        token_ids: int32 `[P, W]`, padded at the end.
        source: int32 `[B]`, for each row of the batch its prompt in this part (0 where it has none here).
        taken: bool `[B]`, whether the row's prompt is in this part.
    """

    token_ids: np.ndarray
    source: np.ndarray
    taken: np.ndarray


def plan_prefill(requests: Sequence[Request], batch: int, config: EngineConfig) -> list[Part]:
    """Splits the distinct prompts of a wave into parts of similar length, each prompt once.

    A part has a power of two of prompts, so none is computed for nothing and few programs exist. Prompts are padded to the
    longest of their part, in buckets. The last token of a prompt is left to the first decoding round.

    Args:
        requests: of rows 0, 1, …; further rows of the batch have none.
    """
    index: dict[bytes, int] = {}
    prompt_of = np.array([index.setdefault(r.prompt.token_ids.tobytes(), len(index)) for r in requests], np.int32)
    prompts = [np.frombuffer(raw, np.int32)[:-1] for raw in index]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    parts = []
    while order:
        size = 1 << (min(len(order), config.prefill_batch).bit_length() - 1)
        members, order = order[:size], order[size:]
        width = round_up(max(len(prompts[members[-1]]), 1), config.prefill_bucket)
        ids = np.zeros((size, width), np.int32)
        place = np.full(len(prompts), -1, np.int32)
        for row, member in enumerate(members):
            ids[row, : len(prompts[member])] = prompts[member]
            place[member] = row
        source = np.full(batch, -1, np.int32)
        source[: len(requests)] = place[prompt_of]
        parts.append(Part(ids, np.maximum(source, 0), source >= 0))
    return parts


def check(requests: Sequence[Request], vocab_size: int, limit: int) -> None:
    """Refuses what cannot be served, before anything is compiled.

    Args:
        limit: longest prompt + response in tokens.

    Raises:
        ValueError: names the request, the value and what is legal.
    """
    if not requests:
        raise ValueError("requests is empty; generate needs at least one")
    for r in requests:
        name = f"prompt {r.prompt.prompt_id}"
        prompt = len(r.prompt.token_ids)
        if r.max_new_tokens < 1:
            raise ValueError(f"{name}: max_new_tokens={r.max_new_tokens} must be >= 1")
        if prompt >= limit:
            raise ValueError(f"{name} has {prompt} tokens, but prompt and response may have {limit} together")
        if prompt + r.max_new_tokens > limit:
            raise ValueError(
                f"{name} has {prompt} tokens and max_new_tokens={r.max_new_tokens}: {prompt + r.max_new_tokens} exceed the "
                f"{limit} that prompt and response may have together"
            )
        low, high = int(r.prompt.token_ids.min()), int(r.prompt.token_ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name} contains the token id {low if low < 0 else high}, outside [0, {vocab_size})")
