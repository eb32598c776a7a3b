"""Which programs an engine may ever compile: known from its settings before the first request, so that growth is a fault.

Most of these are never met. What a run compiled is `Programs.keys()`.
"""

import itertools
from collections.abc import Hashable, Mapping

from adrl_jax.rollout.settings import EngineConfig, round_up
from adrl_jax.sampling.law import Law
from adrl_jax.speculation.drafter import Drafter

WIDEST_CATCH_UP = 128
"""Tokens that a drafter catches up on in one program."""


def capacities(config: EngineConfig, longest: int) -> tuple[int, ...]:
    """Cache capacities that rows of up to `longest` tokens may need, ascending. A verify pass may write past their end."""
    most = longest + max(s.depth + 1 for s in config.strategies)
    return tuple(sorted({config.capacity(n) for n in range(1, most + 1)}))


def programs(
    config: EngineConfig, longest: int, longest_prompt: int, drafters: Mapping[str, Drafter], law: Law, flow: bool = False
) -> dict[str, set[Hashable]]:
    """The keys of `Programs` by kind.

    Args:
        longest: prompt + response in tokens.
        longest_prompt: in tokens.
        law: of the sampling parameters in use; each has launches of its own.
        flow: whether drafts are verified, weights swapped in flight, or requests come while others run.
    """
    batches, sizes = config.batches, capacities(config, longest)
    widths = sorted({round_up(max(n - 1, 1), config.prefill_bucket) for n in range(1, longest_prompt + 1)})
    counts = [1 << i for i in range(config.prefill_batch.bit_length())]
    pieces = [(c, w, p) for c in counts for w in widths for p in _pieces(config, w)]
    admitted = [1 << i for i in range((max(batches) - 1).bit_length() + 1)]
    catch_up = {min(1 << i, WIDEST_CATCH_UP, s) for i in range(1, WIDEST_CATCH_UP.bit_length()) for s in sizes}
    longer = sorted({round_up(max(n - 1, 1), config.prefill_bucket) for n in range(1, longest + 1)}) if flow else []
    drafts = [(c, w, p) for c in counts for w in longer for p in _pieces(config, w)]
    spoken = [n for n in drafters if any(s.drafter == n for s in config.strategies)]
    return {
        "prefill": {("prefill", (c, p), w) for c, w, p in pieces},
        "continue_prefill": {("continue_prefill", (c, p), w) for c, w, p in pieces if p < w},
        "empty": {("empty", *x) for x in itertools.product(batches, sizes)},
        "admit": {
            ("admit", (c, w), *x)
            for c in counts
            for w in {*widths, *longer}
            for x in itertools.product(admitted, batches, sizes)
        },
        "reshape": {
            ("reshape", b, s, b2, s2)
            for b, s, b2, s2 in itertools.product(batches, sizes, batches, sizes)
            if b2 <= b and s2 >= s
        },
        "catch_up": {("catch_up", n, *x) for n in spoken for x in itertools.product(catch_up, batches, sizes)},
        "references": {("references", *x) for x in itertools.product(batches, sizes)},
        "draft_prefill": {("draft_prefill", (c, p), w) for c, w, p in drafts},
        "draft_continue_prefill": {("draft_continue_prefill", (c, p), w) for c, w, p in drafts if p < w},
        "choices": {("choices", c, w, law) for c in counts for w in longer},
        "rewrite": {("rewrite", *x) for x in itertools.product(batches, sizes) if flow},
        "more_rows": {("more_rows", b, s, b2) for b, s, b2 in itertools.product(batches, sizes, batches) if b2 > b and flow},
        "launch": {("launch", s, law, *x) for s in config.strategies for x in itertools.product(batches, sizes)},
    }


def _pieces(config: EngineConfig, width: int) -> set[int]:
    """Lengths of the pieces in which a prompt of `width` tokens is prefilled."""
    chunk = config.prefill_chunk or width
    return {min(chunk, width - start) for start in range(0, width, chunk)}
