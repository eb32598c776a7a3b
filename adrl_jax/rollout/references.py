"""What rows are given to look things up in: references of drafters that copy from earlier responses."""

from collections.abc import Iterable, Mapping

import jax
import numpy as np

from adrl_jax.rollout.state import RolloutState
from adrl_jax.speculation.drafter import Drafter
from adrl_jax.speculation.history_store import HistoryStore, References
from adrl_jax.types import Request


def readers(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """Drafters that take references."""
    return {name: d for name, d in drafters.items() if getattr(d, "reference_capacity", 0)}


def gather(store: HistoryStore, requests: Iterable[Request | None], drafter: Drafter) -> References:
    """References of rows for a drafter that takes some; a row without a request gets an empty one."""
    rows = [(-1, -1) if r is None else (r.prompt.prompt_id, r.sample) for r in requests]
    # Which sample a row is matters only where its own earlier text is drafted position by position.
    samples = [s for _, s in rows] if drafter.positional else None
    return store.references([p for p, _ in rows], drafter.reference_capacity, samples)


def give(
    drafters: Mapping[str, Drafter], state: RolloutState, taken: jax.Array, found: Mapping[str, References]
) -> RolloutState:
    """Hands references to the rows `taken` (bool `[B]`).

    Args:
        found: by drafter, `[B, …]` each.
    """
    fresh = {
        name: drafters[name].with_references(state.drafter_states[name], taken, *references)
        for name, references in found.items()
    }
    return state._replace(drafter_states={**state.drafter_states, **fresh})


def behind(store_prompts: set[int], requests: Iterable[Request | None]) -> np.ndarray:
    """Which rows serve one of these prompts, bool `[B]`."""
    return np.array([r is not None and r.prompt.prompt_id in store_prompts for r in requests])
